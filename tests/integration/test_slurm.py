"""Jobs on a real SLURM of two nodes, by the scripts of docs/slurm.md: who is slow is named; nothing is left behind."""

import contextlib
import json
import re
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import own_environment
from tests.integration.processes import wait_until
from tests.integration.runs import captures, named, verdicts
from tests.integration.slurm import cluster_of_two
from tests.integration.test_many_hosts import POLICY

pytest.importorskip("torch")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")
JOBS = Path(__file__).parent / "jobs"
PAGE = Path(__file__).parents[2] / "docs" / "slurm.md"
SLOW = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster on which sftriage and torchrun are commands."""
    place = tmp_path_factory.mktemp("slurm")
    for name, module in (("sftriage", "-m sftriage"), ("torchrun", "-m torch.distributed.run"), ("python", "")):
        (place / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (place / name).chmod(0o755)
    environment = own_environment(place)
    environment |= {"PATH": f"{place}:{environment['PATH']}", "PYTHONPATH": str(Path(__file__).parents[2])}
    with cluster_of_two(environment | {"USER": "somebody"}) as found:
        yield found


@pytest.fixture(autouse=True)
def no_jobs_left(cluster):
    yield
    cluster.run(0, "scancel", "--signal=KILL", "--full", "--user", "root")
    cluster.run(0, "scancel", "--user", "root")
    wait_until(lambda: not cluster.run(0, "squeue", "-h").stdout.strip())


def on_the_page(number, place):
    """A script of the page, with a training script of ours and as many ranks as there is room for here."""
    script = re.findall(r"```bash\n(#!.*?)```", PAGE.read_text("utf-8"), re.S)[number]
    (place / "input.yaml").write_text(POLICY, encoding="utf-8")
    ours = {
        "--nproc-per-node 8": "--nproc-per-node 2",
        "--ntasks-per-node=8": "--ntasks-per-node=2",
        "train.py": f"{JOBS / 'slow_data.py'} release 0.05",
        "sftriage run": "sftriage run --policy input.yaml",
        "sftriage controller": "sftriage controller --policy input.yaml",
    }
    for theirs, mine in ours.items():
        script = script.replace(theirs, mine)
    (place / "train.sh").write_text(script)
    return place / "train.sh"


def said(place, job):
    return (place / f"slurm-{job}.out").read_text("utf-8", "replace")


@pytest.mark.parametrize("number", [0, 1], ids=["torchrun", "a task a rank"])
def test_the_pages_script_names_a_slow_rank_of_the_second_node_and_has_its_trace(cluster, tmp_path, number):
    # GIVEN a job by a script of the page, whose rank 3, on the second node, becomes slow in data
    job = cluster.submit(on_the_page(number, tmp_path), cwd=tmp_path)
    run = tmp_path / "sftriage-runs" / job
    wait_until(lambda: cluster.ended(job) or ((run / "captures").is_dir() and captures(run)))
    assert not cluster.ended(job), said(tmp_path, job)
    # THEN it can be watched on the first node while it goes on
    (capture,) = captures(run)
    live = cluster.run(0, "sftriage", "watch", "--once", "--json", cwd=tmp_path)
    assert json.loads(live.stdout)["run"] == json.loads((run / "run.json").read_text())["run_id"], live.stderr
    about = cluster.run(0, "sftriage", "traces", "for-step", capture.capture.first_step, cwd=tmp_path)
    assert capture.capture_id in about.stdout, about.stderr
    # WHEN it ends
    (tmp_path / "release").touch()
    wait_until(lambda: cluster.ended(job))
    assert cluster.about(job)["JobState"] == "COMPLETED", said(tmp_path, job)
    # THEN the rank and its stage are named, and nobody else, for as much as the rule asks for
    found = {named(one) for one in verdicts(run) if one["suspects"] and one["suspects"][0]["gain_s"] >= 0.01}
    assert {one[0] for one in found if one is not None} == {SLOW}
    assert (SLOW, "data") in found
    assert {one["numbers"]["coverage"] for one in verdicts(run)} == {1.0}
    # AND it was captured, once, on its node
    (capture,) = captures(run)
    assert (capture.capture.rank, capture.capture.host) == (SLOW, "node-b")
    # AND its trace is had on the first node
    got = cluster.run(0, "sftriage", "traces", "get", capture.capture_id, "--out", tmp_path / "got", cwd=tmp_path)
    assert got.returncode == 0, got.stderr
    (there,) = (tmp_path / "sftriage-runs").glob(f"{job}.hosts/node-b*/captures/*/trace.json.gz")
    assert (tmp_path / "got").read_bytes() == there.read_bytes()
    # AND what was found is said once, and not by every node
    text = said(tmp_path, job)
    assert text.count("judged, 1 capture stored") == text.count("Capturing 2 steps of rank 3") == 1
    # AND nothing of it is left: no process, no rings, no password
    assert not [*wait_until_nothing(cluster), *run.parent.glob("*.hub"), *run.parent.glob("*.nats")]


def wait_until_nothing(cluster, deadline_s=20.0):
    """What is left of jobs, after a moment in which it may go."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not cluster.left(), deadline_s)
    return cluster.left()
