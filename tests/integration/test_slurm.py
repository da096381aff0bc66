"""Jobs on a real SLURM of two nodes, by the scripts of docs/slurm.md: who is slow is named; nothing is left behind."""

import contextlib
import json
import re
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import own_environment
from tests.integration.processes import JOBS, wait_until
from tests.integration.runs import captures, named, on_record, verdicts
from tests.integration.slurm import cluster_of_two
from tests.integration.test_many_hosts import POLICY

pytest.importorskip("torch")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")
PAGE = Path(__file__).parents[2] / "docs" / "slurm.md"
SLOW = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    place = tmp_path_factory.mktemp("slurm")
    for name, module in (("sftriage", "-m sftriage"), ("torchrun", "-m torch.distributed.run"), ("python", "")):
        (place / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (place / name).chmod(0o755)
    environment = own_environment(place)
    environment |= {"PATH": f"{place}:{environment['PATH']}", "PYTHONPATH": str(Path(__file__).parents[2])}
    with cluster_of_two(environment | {"USER": "somebody"}) as found:
        yield found


ID, APART = '--job-id "$SLURM_JOB_ID"', "--chdir={apart}"
MISTAKES = {
    # options of sftriage run, and of sbatch; what is said
    "no job": ('--job-id "$NONE" --hub "$HEAD:7610"', "", r"--job-id is missing; .* as \$SLURM_JOB_ID"),
    "no head": (f'{ID} --hub "$NONE"', "", "--hub is empty; give the name of the job's first host"),
    "another host": (
        f"{ID} --hub node-c",
        "",
        r"node-c is not a host of this job \(node-a, node-b\); give the",
    ),
    "port taken": (f'{ID} --hub "$HEAD:6818"', "", "on node-a:6818: address already in use, .* --hub HOST:PORT"),
    "tasks": (f'{ID} --hub "$HEAD:7620"', "--ntasks-per-node=2", "one `sftriage run` per host, .* --ntasks-per-node=1"),
    "not shared": (f'{ID} --hub "$HEAD:7630"', APART, r"\d\.hub-7630 is missing: node-a creates it .* with --creds"),
    "": (f'{ID} --hub "$HEAD:7640" --creds "$SECRET"', APART, "0 captures stored"),
}
"""Mistakes, and the way out of the last one."""


@pytest.fixture(scope="module", autouse=True)
def mistaken(cluster, tmp_path_factory):
    """A job with each mistake; they are under way while others are looked at."""
    place = tmp_path_factory.mktemp("mistaken")
    (place / "secret").write_text("job:of-a-file-on-every-host\n")
    cluster.environment["SECRET"] = str(place / "secret")
    jobs = {}
    for number, (what, (run, options, _)) in enumerate(MISTAKES.items()):
        script, said = place / f"{number}.sh", place / f"{number}.out"
        train = f"{JOBS / 'stepping.py'} {place / 'release'}"
        lines = ['HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)']
        lines += [f"srun --kill-on-bad-exit=1 sftriage run --required {run} -- python {train}"]
        script.write_text("\n".join(["#!/bin/bash", *lines, ""]))
        given = ["--ntasks-per-node=1", *options.format(apart=cluster.apart).split()]
        jobs[what] = cluster.submit(script, "--nodes=2", f"--output={said}", *given, cwd=place), said
    yield jobs
    cluster.run(0, "scancel", *(job for job, _ in jobs.values()))


@pytest.fixture
def submit(cluster):
    jobs = []

    def submit(script, *options):
        jobs.append(cluster.submit(script, *options, cwd=script.parent))
        return jobs[-1]

    yield submit
    for job in jobs:
        if not cluster.ended(job):
            cluster.run(0, "scancel", "--signal=KILL", "--full", job)
            cluster.run(0, "scancel", job)
            wait_until(lambda job=job: cluster.ended(job))


def on_the_page(number, place, train="slow_data.py release 0.05", hub="$HEAD"):
    """A script of the page, with a training script of ours and as many ranks as there is room for here."""
    script = re.findall(r"```bash\n(#!.*?)```", PAGE.read_text("utf-8"), re.S)[number]
    (place / "input.yaml").write_text(POLICY, encoding="utf-8")
    ours = {
        "--nproc-per-node 8": "--nproc-per-node 2",
        "--ntasks-per-node=8": "--ntasks-per-node=2",
        "train.py": f"{JOBS}/{train}",
        '--hub "$HEAD"': f'--hub "{hub}"',
        "sftriage run": "sftriage run --policy input.yaml",
        "sftriage controller": "sftriage controller --policy input.yaml",
    }
    for theirs, mine in ours.items():
        script = script.replace(theirs, mine)
    file = place / f"train-{number}.sh"
    file.write_text(script)
    return file


def said(place, job):
    return (place / f"slurm-{job}.out").read_text("utf-8", "replace")


@pytest.mark.parametrize("number", [0, 1], ids=["torchrun", "a task a rank"])
def test_the_pages_script_names_a_slow_rank_of_the_second_node_and_has_its_trace(cluster, submit, tmp_path, number):
    # GIVEN a job by a script of the page, whose rank 3, on the second node, becomes slow in data
    job = submit(on_the_page(number, tmp_path))
    run = tmp_path / "sftriage-runs" / job
    wait_until(lambda: cluster.ended(job) or ((run / "captures").is_dir() and captures(run)))
    assert not cluster.ended(job), said(tmp_path, job)
    # THEN it can be watched on the first node while it goes on
    (capture,) = captures(run)
    live = cluster.run(0, "sftriage", "watch", "--run", run, "--once", "--json", cwd=tmp_path)
    assert json.loads(live.stdout)["run"] == json.loads((run / "run.json").read_text())["run_id"], live.stderr
    step = capture.capture.first_step
    about = cluster.run(0, "sftriage", "traces", "for-step", step, "--run", run, cwd=tmp_path)
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
    fetch = ("sftriage", "traces", "get", capture.capture_id, "--run", run, "--out", tmp_path / "got")
    got = cluster.run(0, *fetch, cwd=tmp_path)
    assert got.returncode == 0, got.stderr
    (there,) = (tmp_path / "sftriage-runs").glob(f"{job}.hosts/node-b*/captures/*/trace.json.gz")
    assert (tmp_path / "got").read_bytes() == there.read_bytes()
    # AND what was found is said once, and not by every node
    text = said(tmp_path, job)
    assert text.count("judged, 1 capture stored") == text.count("Capturing 2 steps of rank 3") == 1
    # AND nothing of it is left: no process, no rings, no password
    assert not left(cluster, job, run.parent)


def test_the_pages_check_meets_on_the_first_node_and_starts_nothing(cluster, submit, tmp_path):
    # GIVEN the first script of the page, with the check of the page in place of the run
    script = on_the_page(0, tmp_path)
    text = script.read_text().replace("sftriage run", "sftriage run --check").replace("--kill-on-bad-exit=1", "")
    script.write_text(text)
    job = submit(script)
    wait_until(lambda: cluster.ended(job))
    # THEN both nodes have met, which know each other's names from SLURM, and are ready
    text = said(tmp_path, job)
    assert re.search(r"hosts +ok +2 hosts came", text), text
    assert cluster.about(job)["JobState"] == "COMPLETED", text
    assert text.count("all hosts are ready") == 1
    # AND nothing of it is left, and no run
    assert not left(cluster, job, tmp_path / "sftriage-runs")
    assert not (tmp_path / "sftriage-runs").exists()


def left(cluster, job, runs):
    """What is left of a job, after a moment in which it may go: processes, rings, passwords."""
    run_ids = (json.loads(one.read_text())["run_id"] for one in runs.glob("*/run.json"))
    # (another job's process may have a number that begins with this one)
    its = re.compile("|".join([f"/{job}-node-", rf"-{job}(?!\d)", *map(re.escape, run_ids)]))

    def found():
        return [what for of, what in cluster.left() if of == job or (not of and its.search(what))]

    with contextlib.suppress(AssertionError):
        wait_until(lambda: not found(), 10.0)
    return [*found(), *runs.glob(f"{job}.hub*"), *runs.glob(f"{job}*.nats")]


def test_what_slurm_ends_leaves_a_record_and_nothing_else_and_what_it_starts_again_works(cluster, submit, tmp_path):
    # GIVEN a job of either script, without torch, whose ranks take steps
    again = submit(on_the_page(0, tmp_path, "stepping.py release"))
    cancelled = submit(on_the_page(1, tmp_path, "stepping.py release", "$HEAD:7500"))
    runs = tmp_path / "sftriage-runs"
    for job in (again, cancelled):
        wait_until(lambda job=job: verdicts(runs / job))
    # WHEN one is queued again, and the other one is cancelled
    cluster.run(0, "scontrol", "requeue", again)
    cluster.run(0, "scancel", cancelled)
    wait_until(lambda: cluster.ended(cancelled) and cluster.about(again)["JobState"] == "PENDING")
    # THEN nothing is left of them but what was found, which can be read
    for job in (again, cancelled):
        wait_until(lambda job=job: not left(cluster, job, runs))
        assert len(on_record(runs / job, "window")) == len(verdicts(runs / job)) > 0
        shown = cluster.run(0, "sftriage", "decisions", "--run", runs / job, "--json", cwd=tmp_path)
        assert shown.returncode == 0, shown.stderr
    # WHEN SLURM starts the first one again, under the same number
    cluster.run(0, "scontrol", "update", f"job={again}", "StartTime=now")
    second = runs / f"{again}-2"
    wait_until(lambda: verdicts(second))
    assert cluster.about(again)["Restarts"] == "1"
    (tmp_path / "release").touch()
    wait_until(lambda: cluster.ended(again))
    # THEN it is watched as before, as a run of its own, and its hosts keep nothing of the first one in mind
    assert cluster.about(again)["JobState"] == "COMPLETED", said(tmp_path, again)
    assert verdicts(second)[0]["numbers"]["coverage"] == 1.0
    assert len(list(runs.glob(f"{again}-2.hosts/*"))) == 2
    assert not left(cluster, again, runs)


@pytest.mark.parametrize("what", MISTAKES)
def test_what_may_be_amiss_is_said_in_a_line_with_what_to_do(cluster, mistaken, what):
    # GIVEN a job with a mistake in it (or none)
    job, file = mistaken[what]
    if not what:
        (file.parent / "release").touch()
    # WHEN it has ended
    wait_until(lambda: cluster.ended(job))
    # THEN that is said in a line, with what to do, and no stack of calls is
    text = file.read_text()
    assert cluster.about(job)["JobState"] == ("FAILED" if what else "COMPLETED"), text
    assert len({line for line in text.splitlines() if re.search(MISTAKES[what][-1], line)}) == 1, text
    assert "Traceback" not in text
