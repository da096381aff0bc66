"""A real job on three hosts, one of which has a slow link, or lacks CPU time."""

import os

import pytest

from tests.integration.namespaces import hosts_of
from tests.integration.processes import JOBS, ROOT, limited_cgroup, wait_until
from tests.integration.runs import named, verdicts

pytest.importorskip("torch")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")
JOB = JOBS / "bulk.py"
LIMITED, BITS_PER_S = 1, 200e6
POLICY = "policies/default.yaml"


@pytest.fixture
def hosts():
    with hosts_of(3) as found:
        yield found


@pytest.fixture
def begin(hosts, tmp_path, environment):
    """Begin the job; gives its run."""

    def begin():
        (tmp_path / "policy.yaml").write_text((ROOT / POLICY).read_text())
        job, script = f"links/{os.getpid()}", (JOB, tmp_path / "release")
        hosts.torchrun(tmp_path, environment, ("--job-id", job), *script, ranks=1, port=29517)
        return tmp_path / "run"

    return begin


def judged(run):
    return verdicts(run) if (run / "decisions.jsonl").exists() else []


@pytest.mark.parametrize("receiving", [False, True], ids=["sends", "receives"])
def test_a_slow_link_is_named_with_its_host_and_no_rank(hosts, begin, receiving):
    # GIVEN a job with a host that sends, or receives, at 200 Mbit/s
    hosts.limit(LIMITED, "200mbit", receiving=receiving)
    run = begin()
    # WHEN many windows have been judged
    wait_until(lambda: sum(one["link"] is not None for one in judged(run)) >= 8)
    found = [one["link"] for one in judged(run) if one["link"] is not None]
    # THEN the link is named by its host, with its rate and what it costs
    assert {link["host"] for link in found} == {"node-b"}
    newest = found[-1]
    assert (newest["peer"], newest["direction"]) == ("", "receive" if receiving else "send")
    assert newest["bits_per_s"] == pytest.approx(BITS_PER_S, rel=0.3)
    assert newest["usual_bits_per_s"] > 3 * BITS_PER_S
    assert newest["cost_s"] > 0.02
    # AND such windows are held for that, and no rank or host is named
    held = [one for one in judged(run) if one["link"] is not None]
    assert {(one["label"], tuple(one["reasons"]), named(one)) for one in held} == {
        ("needs_evidence", ("slow_link",), None)
    }


def test_a_host_that_lacks_cpu_time_has_no_slow_link(hosts, begin):
    # GIVEN a healthy job THEN no link of it is slow
    run = begin()
    wait_until(lambda: len(judged(run)) >= 8)
    before = len(judged(run))
    # WHEN a host's rank may run for a tenth of the time
    with limited_cgroup() as cgroup:
        for pid in hosts.pids(LIMITED, JOB.name):
            (cgroup / "cgroup.procs").write_text(str(pid))
        wait_until(lambda: len(judged(run)) >= before + 15)
        hosts.kill(LIMITED)
    # THEN its link is none either
    assert {one["link"] for one in judged(run)} == {None}
