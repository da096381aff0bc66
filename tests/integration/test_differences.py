"""What differs between a slow rank and its peers, in real jobs: facts of their processes, compared and shown."""

import json
import os
import sys

import pytest

from tests.integration.namespaces import two_hosts
from tests.integration.policies import policy
from tests.integration.processes import DEADLINE_S, FORKED, JOBS, wait_until
from tests.integration.runs import captures, named, on_record, verdicts

pytest.importorskip("torch")
UNLIKE = JOBS / "unlike.py"
SLOW, RANKS = (2, "data"), 3
CAPTURE = policy('name: slow, match: {scope: [rank], gain: ">= 10ms"}, capture: {profiler: stacks}', steps=(20, 10, 10))
CORES = len(os.sched_getaffinity(0))
WORKERS = "0 loader workers, the other ranks have 1"
THREADS = "OMP_NUM_THREADS=7, the other ranks have 1"
PINNED = f"1 CPU core, the other ranks have {CORES}"


@pytest.fixture
def job(start, tmp_path):
    """Starts a job whose last rank is slow, and unlike the others in some ways; `end` returns what it printed."""
    (tmp_path / "policy.yaml").write_text(CAPTURE, encoding="utf-8")
    about = "run", "--policy", tmp_path / "policy.yaml", "--out", tmp_path / "run", "--"

    def begin(*ways):
        process = start(*about, *FORKED, RANKS, UNLIKE, tmp_path / "release", *ways)

        def end():
            (tmp_path / "release").touch()
            printed = process.communicate(timeout=DEADLINE_S)[1]
            assert process.returncode == 0, printed
            return printed

        return tmp_path / "run", end

    return begin


def lines_of(start, *command):
    return start(*command).communicate(timeout=60)[0].splitlines()


@pytest.mark.skipif(CORES < 2, reason="a rank cannot be pinned to fewer cores than the others have")
def test_what_differs_is_found_once_the_suspect_is_captured_and_is_in_all_views(job, start):
    # GIVEN a job whose slow rank loads by itself, on one core, with other threads
    run, end = job("loader", "pinned", "threads")
    found = wait_until(lambda: on_record(run, "differences"))[0]
    # THEN its differences are recorded, the likeliest reason of slow data first
    assert (found["ranks"], sorted(found["peers"])) == ([2], [0, 1])
    of = {each["name"]: (each["value"], each["others"], each["alike"]) for each in found["differences"]}
    assert of == {"num_workers": (0, 1, 2), "cores": (1, CORES, 2), "OMP_NUM_THREADS": ("7", "1", 2)}
    # AND they are a line each, below the suspect and in its capture
    (capture,) = captures(run)
    wait_until(lambda: captures(run)[0].evidence == (WORKERS, PINNED, THREADS))
    values = json.loads(start("watch", "--run", run, "--once", "--json").communicate(timeout=60)[0])
    who = next(answer for answer in values["answers"] if answer["question"] == "who")
    assert [line for line in who["more"] if line in (WORKERS, PINNED, THREADS)] == [WORKERS, PINNED, THREADS]
    assert values["differences"]["differences"] == found["differences"]
    printed = end()
    assert f"What differs on rank 2: {WORKERS}; {PINNED}; {THREADS}." in printed
    window = next(one for one in reversed(verdicts(run)) if named(one) == SLOW)
    explained = lines_of(start, "explain", str(window["last_step"]), "--run", run)
    assert f"Differs:   {WORKERS}" in explained
    assert f"evidence    {PINNED}" in lines_of(start, "traces", "show", capture.capture_id, "--run", run)


def test_parameters_of_another_type_differ_and_an_environment_of_secrets_is_bounded(job):
    run, end = job("float64", "hostile")
    found = wait_until(lambda: on_record(run, "differences"))[0]
    end()
    assert {"name": "parameter_types", "value": "float64", "others": "float32", "alike": 2} in found["differences"]
    journal = (run / "decisions.jsonl").read_text(encoding="utf-8")
    assert "s3cret" not in journal
    assert "x" * 100 not in journal
    assert len(json.dumps(found)) < 4096


def test_nothing_is_said_of_a_slow_rank_that_is_like_its_peers(job, start):
    run, end = job()
    # GIVEN a slow rank that was captured, and windows after that
    wait_until(lambda: captures(run))
    judged = len(verdicts(run))
    wait_until(lambda: len(verdicts(run)) > judged + 5)
    assert "What differs" not in end()
    assert SLOW in map(named, verdicts(run))
    assert on_record(run, "differences") == []


def test_ranks_of_two_hosts_are_compared_over_the_hub(tmp_path, environment):
    pytest.importorskip("nats", reason="many hosts want the extra `nats`")
    (tmp_path / "policy.yaml").write_text(CAPTURE, encoding="utf-8")
    script, run = (UNLIKE, tmp_path / "release", "threads"), tmp_path / "run"
    with two_hosts() as hosts:
        options = "--job-id", f"job/{os.getpid()}"
        hosts.torchrun(tmp_path, environment, options, *script, ranks=2, port=29513, forked=True)
        try:
            found = wait_until(lambda: on_record(run, "differences"))[0]
        finally:
            sys.stdout.write("".join((tmp_path / f"said-{number}").read_text() for number in range(2)))
    assert (found["who"], found["ranks"], sorted(found["peers"])) == ("rank 3 on node-b", [3], [0, 1, 2])
    assert {"name": "OMP_NUM_THREADS", "value": "7", "others": "1", "alike": 3} in found["differences"]
