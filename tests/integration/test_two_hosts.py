"""Two agents whose monotonic clocks are 100,000 s apart, and one that has all ranks: nobody can tell the difference."""

import contextlib
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sftriage.decisions import ENDED, CaptureResult, Report, Verdict, WantedCapture
from sftriage.events import CaptureChanged, Event, EvidenceGathered, Sight, WindowJudged, WindowSeen, encode
from sftriage.fleet.in_process import InProcess
from sftriage.policy.loading import parse
from sftriage.records import GpuFindings, JobStatus
from sftriage.runs.directory import RunInfo, create
from sftriage.runs.journal import read_journal
from sftriage.runtime.triage import Clock, Triage
from sftriage.traces.store import LocalStore
from sftriage.windows.shipped import ReadCounts, Rows
from tests.unit.test_records import assert_same

S = 1_000_000_000
APART_S = 100_000
WORLD_SIZE, SLOW = 4, 3
HOSTS = {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"}
POLICY = parse(
    """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: test}
spec:
  detection: {window_steps: 20, stride_steps: 10, warmup_steps: 5, stalled_after: 2s}
  rules:
    - name: slow
      match: {gain: ">= 5%"}
      capture: {profiler: torch, steps: 2, warmup_steps: 0, max_seconds: 60}
      cooldown: 10m
""",
    "test.yaml",
)
CROSSING = ("sftriage.decisions", "sftriage.records", "sftriage.windows.shipped", "sftriage.windows.decoding", "numpy")


class RecordsOnly(pickle.Unpickler):
    """Takes records, and the arrays in them; anything live is refused."""

    def find_class(self, module: str, name: str) -> object:
        if not module.startswith(CROSSING):
            raise pickle.UnpicklingError(f"{module}.{name} is no record")
        return super().find_class(module, name)


class Host:
    """A host in a process of its own, as a fleet sees it; the other methods are the job's."""

    def __init__(self, directory: Path, store: Path, offset_s: int, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.wanted: dict[str, int] = {}
        script = Path(__file__).parent / "jobs" / "host.py"
        command = [sys.executable, str(script), str(offset_s), str(directory), str(store)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.call("begin", {rank: HOSTS[rank] for rank in ranks}, WORLD_SIZE)

    def call(self, name: str, *arguments: object) -> object:
        pickle.dump((name, arguments), self._process.stdin)
        self._process.stdin.flush()
        return RecordsOnly(self._process.stdout).load()

    def rows(self) -> Sequence[Rows]:
        return self.call("rows")

    def statuses(self) -> JobStatus | None:
        return self.call("statuses")

    def want(self, wanted: Sequence[WantedCapture]) -> None:
        self.wanted |= {one.request.capture_id: one.request.rank for one in wanted}
        self.call("want", tuple(wanted))

    def reports(self) -> Sequence[Report]:
        return self.call("reports")

    def gpus(self, ranks: Sequence[int]) -> GpuFindings | None:
        return self.call("gpus", tuple(ranks))

    @property
    def telemetry(self) -> ReadCounts:
        return self.call("telemetry")

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.stdin.close()
            self._process.wait(60)
            self._process.stdout.close()


class Seen:
    """A sink that keeps the windows it is told of."""

    name = "seen"

    def __init__(self) -> None:
        self.windows: list[WindowSeen] = []

    def start(self) -> None: ...

    def take(self, seen: Event | Sight) -> None:
        if isinstance(seen, WindowSeen):
            self.windows.append(seen)

    def close(self) -> None: ...


class Settling(InProcess):
    """Keeps what it is told that nobody needs any more."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        super().__init__(hosts)
        self.positions: list[int] = []

    def switches(self):
        return ()

    def switch(self, wanted) -> None:
        pass

    def settled(self, agent: str, position: int) -> None:
        self.positions.append(position)


class Triaged:
    """A job's hosts, and the triage of what they send, whose clock is none of theirs."""

    def __init__(self, directory: Path, hosts: Sequence[Host]) -> None:
        self.hosts, self.now_ns, self.seen = hosts, 7 * S, Seen()
        info = RunInfo("run-1", "job", "2026-01-01T00:00:00+00:00", ("true",), "test", "0" * 64, str(directory))
        self.run = create(directory / "run", info, "")
        self.fleet = Settling(hosts)
        clock = Clock(lambda: self.now_ns, lambda: self.now_ns / S)
        self._triage = Triage(self.run, info, POLICY, self.fleet, [self.seen], clock=clock)
        self._triage._stream.start()

    def train(self, steps: int, late_ms: dict[int, int] | None = None) -> None:
        """The job takes steps; after each five the controller has a turn."""
        for _ in range(steps // 5):
            for host in self.hosts:
                host.call("train", 5, late_ms or {})
            self.turn(0.2)

    def turn(self, passed_s: float) -> None:
        self.now_ns += int(passed_s * S)
        self._triage.turn()

    def close(self) -> None:
        self._triage.close()

    @property
    def events(self) -> list[Event]:
        """What is on record, but for what drivers said of GPUs: they answer when they do."""
        return [one for one in read_journal(self.run.decisions) if not isinstance(one, EvidenceGathered)]

    @property
    def verdicts(self) -> list[Verdict]:
        return [one.verdict for one in self.events if isinstance(one, WindowJudged)]

    @property
    def results(self) -> list[CaptureResult]:
        return [one.result for one in self.events if isinstance(one, CaptureChanged)]


@contextlib.contextmanager
def triaged(directory: Path, offsets_s: Sequence[int]) -> Iterator[Triaged]:
    """A job whose ranks are spread over hosts, as many as there are offsets of clocks."""
    each = WORLD_SIZE // len(offsets_s)
    with contextlib.ExitStack() as held:
        hosts = []
        for number, offset_s in enumerate(offsets_s):
            ranks = range(number * each, (number + 1) * each)
            host = Host(directory / f"host-{number}", directory / "run", offset_s, ranks)
            held.callback(host.close)
            hosts.append(host)
        job = Triaged(directory, hosts)
        held.callback(job.close)
        yield job


def run_job(directory: Path, offsets_s: Sequence[int]) -> Triaged:
    """Healthy steps, then a slow rank, then one that stands still."""
    with triaged(directory, offsets_s) as job:
        job.train(40)
        job.train(60, {SLOW: 25})
        for host in job.hosts:
            host.call("stand", SLOW)
        job.turn(0.2)
        for _ in range(5):
            for host in job.hosts:
                host.call("wait", 1.0)
            job.turn(1.0)
        return job


@pytest.fixture(scope="module")
def one_host(tmp_path_factory) -> Triaged:
    return run_job(tmp_path_factory.mktemp("one"), (0,))


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory) -> Triaged:
    return run_job(tmp_path_factory.mktemp("two"), (0, APART_S))


def unscheduled(window):
    """A window without what its agent has read of the kernel, at its own looks."""
    return replace(window, counted_NRC=None)


def alike(events):
    """Events as plain data, without what follows from these readings."""

    def without(values):
        if isinstance(values, dict):
            of_suspects = {"descheduled_fraction", "contended_fraction", "system"}
            own = of_suspects | {"queued_s", "preempted", "min_persistence", "min_log_odds"}
            return {name: without(one) for name, one in values.items() if name not in own}
        return [without(one) for one in values] if isinstance(values, list | tuple) else values

    return [without(json.loads(encode(event))) for event in events]


def test_windows_of_two_hosts_are_those_of_one(one_host, two_hosts):
    assert [one.window.first_step for one in one_host.seen.windows] == list(range(5, 80, 10))
    for one, other in zip(one_host.seen.windows, two_hosts.seen.windows, strict=True):
        assert_same(unscheduled(one.window), unscheduled(other.window))
        assert np.isfinite(other.window.durations_NRS).all()
        # AND from when to when a step was is told in a time that all hosts share
        assert one.spans == other.spans != {}


def test_two_clocks_give_the_verdicts_and_decisions_of_one(one_host, two_hosts):
    # THEN what is on record is the same, event by event
    assert alike(two_hosts.events) == alike(one_host.events) != []


def test_a_slow_rank_on_the_other_clock_is_named(two_hosts):
    suspects = [one for one in two_hosts.verdicts if one.label == "suspect"]
    assert {(one.suspects[0].scope, one.suspects[0].rank, one.suspects[0].stage) for one in suspects} == {
        ("rank", SLOW, "data")
    }
    assert all(one.label == "healthy" for one in two_hosts.verdicts if one.last_step < 40)


def test_a_stall_on_the_other_clock_is_as_old_as_it_is(one_host, two_hosts):
    (one,), (two,) = ([each for each in job.verdicts if each.label == "stalled"] for job in (one_host, two_hosts))
    assert (two.reasons, two.suspects[0].rank, two.suspects[0].stage) == (("not_arrived",), SLOW, "data")
    # THEN it is told at the first look past the policy's 2 s, and not 100,000 s early or late
    assert two.numbers["still_s"] == one.numbers["still_s"] == pytest.approx(2.0, abs=1.0)
    assert two.numbers["threshold_s"] == 2.0


def test_a_capture_is_asked_only_of_the_agent_that_has_the_rank(one_host, two_hosts):
    other, its = two_hosts.hosts
    assert (other.wanted, list(its.wanted.values())) == ({}, [SLOW])
    # AND the same comes of it: the rank has no torch, and says so at its next step
    states = [(one.state, one.detail) for one in two_hosts.results]
    assert states == [("accepted", ""), ("armed", ""), ("refused", "torch is not imported in this process")]


def test_rows_that_are_in_no_window_to_come_are_settled(two_hosts):
    # GIVEN a turn after each 5 steps; the last window that is ready begins at step 75, and the next one at step 85
    # THEN what the hosts sent in the turns before is needed no more, and what came after is: but for the 5 steps that
    # another controller would pass over as the job's warm-up
    assert max(two_hosts.fleet.positions) == 16


def test_an_agent_on_another_clock_stores_what_its_rank_captured(tmp_path):
    with triaged(tmp_path, (0, APART_S)) as job:
        _, its = job.hosts
        its.call("import_torch")
        # WHEN a rank is slow, its policy captures it, and the job goes on while its trace is written
        job.train(40)
        job.train(40, {SLOW: 25})
        its.call("written")
        job.train(10, {SLOW: 25})
        # THEN the agent that has the rank says that it has stored it
        (change,) = [one for one in job.events if isinstance(one, CaptureChanged) and one.result.state in ENDED]
        result = change.result
        assert (result.state, result.detail, result.rank) == ("stored", "", SLOW)
        assert result.clock["mono_ns"] > APART_S * S
        # AND what the controller knows of it is in its manifest: the fault was there
        manifest = LocalStore(job.run.path).manifest(result.capture_id)
        assert (manifest.capture.host, manifest.capture.rank) == (HOSTS[SLOW], SLOW)
        assert manifest.reproduced.fault_steps == change.reproduced.fault_steps != ()
