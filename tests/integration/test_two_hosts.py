"""Two agents whose monotonic clocks are 100,000 s apart, and one that has all ranks: nobody can tell the difference."""

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from sftriage.controller.controller import Controller
from sftriage.controller.gathering import WindowAssembly
from sftriage.controller.wanting import Wants
from sftriage.events import Span
from sftriage.fleet.in_process import InProcess
from sftriage.policy.loading import parse
from sftriage.records import ENDED, Decision, JobStatus, Report, Verdict, WantedCapture, Window, plain
from sftriage.runs.journal import Journal, read_journal
from sftriage.windows.gather import Shape
from sftriage.windows.shipped import ReadCounts, Rows
from tests.unit.test_records import assert_same

S = 1_000_000_000
APART_S = 100_000
WORLD_SIZE, SLOW = 4, 3
HOSTS = {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"}
SHAPE = Shape(window_steps=20, stride_steps=10, warmup_steps=5)
POLICY = parse(
    """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: test}
spec:
  detection: {window_steps: 20, stride_steps: 10, warmup_steps: 5, stalled_after: 2s}
  rules: [{name: slow, match: {gain: ">= 5%"}, capture: {steps: 2, warmup_steps: 0, max_seconds: 60}, cooldown: 10m}]
""",
    "test.yaml",
)
CROSSING = ("sftriage.records", "sftriage.windows.shipped", "sftriage.windows.decoding", "numpy")


class RecordsOnly(pickle.Unpickler):
    """Takes records, and the arrays in them; anything live is refused."""

    def find_class(self, module: str, name: str) -> object:
        if not module.startswith(CROSSING):
            raise pickle.UnpicklingError(f"{module}.{name} is no record")
        return super().find_class(module, name)


class Host:
    """A host in a process of its own, as a fleet sees it; the other methods are the job's."""

    def __init__(self, directory: Path, offset_s: int, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.wanted: list[WantedCapture] = []
        script = Path(__file__).parent / "jobs" / "host.py"
        command = [sys.executable, str(script), str(offset_s), str(directory)]
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
        self.wanted += [one for one in wanted if one not in self.wanted]
        self.call("want", tuple(wanted))

    def reports(self) -> Sequence[Report]:
        return self.call("reports")

    @property
    def telemetry(self) -> ReadCounts:
        return self.call("telemetry")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


@dataclass
class Triaged:
    """A job's hosts, and what a controller, whose clock is none of theirs, makes of what they send."""

    directory: Path
    hosts: Sequence[Host]
    now_ns: int = 7 * S
    windows: list[tuple[Window, dict[int, Span]]] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._fleet, self._gathering, self._wants = InProcess(self.hosts), WindowAssembly(SHAPE), Wants()
        self._journal = Journal(self.directory / "decisions.jsonl")
        self._controller = Controller(POLICY, self._journal, self.directory / "state.json")

    def train(self, steps: int, late_ms: dict[int, int] | None = None) -> None:
        """The job takes steps; after each five the controller has a turn."""
        for _ in range(steps // 5):
            for host in self.hosts:
                host.call("train", 5, late_ms or {})
            self.turn(0.2)

    def turn(self, passed_s: float) -> None:
        """One turn, as `runtime.triage` takes it."""
        self.now_ns += int(passed_s * S)
        now_s = self.now_ns / S
        for report in self._fleet.reports():
            self.reports.append(report)
            if report.result.state in ENDED:
                _, result = self._wants.ended(report.result)
                self._controller.changed(result, now_s, None, report.stored_bytes)
            else:
                self._controller.changed(report.result, now_s)
        for window in self._gathering.add(self._fleet.rows()):
            spans = dict(self._gathering.spans(window))
            self.windows.append((window, spans))
            self._take(self._controller.take(window, now_s, spans))
        job = self._fleet.statuses()
        self._take(self._controller.look(job, self.now_ns, now_s))
        self._fleet.want(self._wants.wanted(now_s))

    def _take(self, judged) -> None:
        if judged is None:
            return
        self.verdicts.append(judged.verdict)
        self.decisions.append(judged.decision)
        requests = judged.decision.requests
        if requests:
            triggers = {one.capture_id: self._controller.trigger_of(one.capture_id) for one in requests}
            self._wants.add(requests, triggers, judged.decision.attempt, self.now_ns / S)


@contextlib.contextmanager
def triaged(directory: Path, offsets_s: Sequence[int]) -> Iterator[Triaged]:
    """A job whose ranks are spread over hosts, as many as there are offsets of clocks."""
    each = WORLD_SIZE // len(offsets_s)
    with contextlib.ExitStack() as held:
        hosts = []
        for number, offset_s in enumerate(offsets_s):
            host = Host(directory / f"host-{number}", offset_s, range(number * each, (number + 1) * each))
            held.callback(host.close)
            hosts.append(host)
        job = Triaged(directory, hosts)
        held.callback(job._journal.close)
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


def test_windows_of_two_hosts_are_those_of_one(one_host, two_hosts):
    assert [window.first_step for window, _ in one_host.windows] == list(range(5, 80, 10))
    for (window, spans), (other, other_spans) in zip(one_host.windows, two_hosts.windows, strict=True):
        assert_same(window, other)
        assert np.isfinite(other.durations_NRS).all()
        # AND from when to when a step was is told in a time that all hosts share
        assert spans == other_spans != {}


def test_two_clocks_give_the_verdicts_and_decisions_of_one(one_host, two_hosts):
    assert plain(two_hosts.verdicts) == plain(one_host.verdicts)
    assert plain(two_hosts.decisions) == plain(one_host.decisions)
    # AND what is on record is the same, event by event
    one, two = (list(read_journal(job.directory / "decisions.jsonl")) for job in (one_host, two_hosts))
    assert plain(two) == plain(one) != []


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
    assert other.wanted == []
    assert [one.request.rank for one in its.wanted] == [SLOW]
    # AND the same comes of it: the rank has no torch, and says so at its next step
    states = [(one.result.state, one.result.detail) for one in two_hosts.reports]
    assert states == [("accepted", ""), ("refused", "torch is not imported in this process")]
    assert states == [(one.result.state, one.result.detail) for one in one_host.reports]


def test_an_agent_on_another_clock_stores_what_its_rank_captured(tmp_path):
    with triaged(tmp_path, (0, APART_S)) as job:
        other, its = job.hosts
        its.call("import_torch")
        # WHEN a rank is slow, its policy captures it, and the job goes on while its trace is written
        job.train(40)
        job.train(40, {SLOW: 25})
        its.call("written")
        job.train(10, {SLOW: 25})
        # THEN the agent that has the rank says that it has stored it
        (report,) = [one for one in job.reports if one.result.state in ENDED]
        assert (report.result.state, report.result.detail, report.result.rank) == ("stored", "", SLOW)
        assert report.stored_bytes > 0
        assert report.result.clock["mono_ns"] > APART_S * S
        # AND it is in the store of that host, and of no other
        assert (its.call("stored"), other.call("stored")) == ([report.result.capture_id], [])
