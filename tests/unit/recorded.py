"""Runs as they lie on disk, made up."""

import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args
from zlib import crc32

import pytest

from sftriage.decisions import CaptureRequest, CaptureResult, Decision, Lost, ReasonCode, Regression, Suspect, Verdict
from sftriage.recorder import RingInfo
from sftriage.recorder.layout import WORD_BYTES
from sftriage.records import StageSchema
from sftriage.runs.directory import RunDirectory, RunInfo, create
from sftriage.runs.following import WindowRow, row_of
from sftriage.runs.source import RunSource
from sftriage.traces.store import LocalStore
from sftriage.web.access import Access
from sftriage.web.run_page import RunPage
from sftriage.windows.decoding import StepArrays, decode
from sftriage.windows.slots import DURATIONS, READY, SEQ, START, STEP, slot_words
from sftriage.windows.steplog import KeptSteps, StepLog
from tests.journals import Recorder
from tests.unit.web.asking import Answer, ask

SCHEMA = StageSchema(("data", "forward", "backward", "other"), ("backward",))
NOW_S = 1_800_000_600.0
ADVANCES = {"data": 0.01, "forward": 0.03, "backward": 0.06, "other": 0.0}


def verdict(
    first: int = 20,
    label: str = "healthy",
    *,
    reasons: tuple[str, ...] = (),
    rank: int = 2,
    stage: str | None = "data",
    onset: int | None = None,
    attempt: int = 0,
    advances: Mapping[str, float] = ADVANCES,
    regression: Regression | None = None,
) -> Verdict:
    suspects = (Suspect("rank", (rank,), stage, 0.02, 0.2, 0.9, rank, onset_step=onset),) if label == "suspect" else ()
    advances = {} if label == "stalled" else advances
    exposed_s = sum(advances.values()) if advances else 75.0
    leaders = dict.fromkeys(advances, rank)
    lost = Lost(first, (0.018,) * 50, 4) if label == "suspect" else None
    about = {"attempt": attempt, "regression": regression, "lost": lost}
    return Verdict(
        first, first + 49, label, reasons, suspects, exposed_s, advances, leaders, {}, ("backward",), **about
    )


def held(first: int = 20, *, rank: int = 3, reasons: tuple[str, ...] = ("co_critical",)) -> Verdict:
    """A window that names nobody, and has a candidate."""
    candidates = verdict(first, "suspect", rank=rank, stage="forward", onset=first + rank).suspects
    return replace(verdict(first, "needs_evidence", reasons=reasons), suspects=candidates, numbers={"excess_s": 0.01})


def decision(of: Verdict, outcome: str = "ignore", reason: str = "healthy", **about: Any) -> Decision:
    """What was decided. A ``reason`` that is no code is text, as a verdict's reasons are."""
    undecided = {"needs_evidence": "undecided", "stalled": "standstill"}
    time_s, parameters = 1_800_000_000.0 + of.last_step, {}
    if of.label in undecided and reason == ", ".join(of.reasons):
        reason, parameters = undecided[of.label], {"reasons": of.reasons}
    elif reason not in get_args(ReasonCode):
        reason, parameters = "undecided", {"reasons": (reason,)}
    where = time_s, of.first_step, of.last_step, of.label
    return Decision(*where, outcome, reason, parameters=parameters, attempt=of.attempt, **about)


def row(
    first: int = 20,
    label: str = "healthy",
    outcome: str = "ignore",
    reason: str = "because",
    requests: tuple[CaptureRequest, ...] = (),
    **about: Any,
) -> WindowRow:
    """What is kept of a window."""
    of = verdict(first, label, **about)
    lost_s = 0.0 if of.lost is None else sum(of.lost.step_s)
    return replace(row_of(of, decision(of, outcome, reason, requests=requests)), lost_s=lost_s)


def request_of(capture_id: str, rank: int = 2, role: str = "suspect") -> CaptureRequest:
    return CaptureRequest(capture_id, rank, "torch", 5, 1, 60.0, 2**29, role=role)


def slots(
    info: RingInfo, steps: Iterable[int], durations_ms: Callable[[int], Mapping[str, float]], *, flags: int = 0
) -> bytes:
    """Steps as a rank writes them, one after the other on its clock."""
    written, at_ns = [], 0
    for number, step in enumerate(steps):
        words = array.array("q", [0] * slot_words(info.schema))
        durations = durations_ms(step)
        words[SEQ], words[STEP], words[START], words[READY] = number + 1, step, at_ns, -1
        for index, stage in enumerate(info.schema.stages):
            words[DURATIONS + index] = int(durations.get(stage, 0.0) * 1e6)
        at_ns += sum(words[DURATIONS : DURATIONS + len(info.schema.stages)])
        words[-1] = crc32(words.tobytes()[:-WORD_BYTES])
        written.append(words.tobytes())
    return b"".join(written)


def steps_of(
    info: RingInfo, steps: Iterable[int], durations_ms: Callable[[int], Mapping[str, float]], *, flags: int = 0
) -> StepArrays:
    """The same as a log takes them."""
    return decode([(info.rank, slots(info, steps, durations_ms, flags=flags))], info.schema)


@lru_cache(maxsize=32)
def steps_of_rank(rank: int, ranks: int, steps: range, durations_ms: Callable[[int, int], Mapping[str, float]]):
    """What a rank's log takes, made once for all tests that record the same."""
    return steps_of(info_of(rank, ranks), steps, lambda step: durations_ms(rank, step))


def info_of(rank: int, ranks: int = 4, **about: Any) -> RingInfo:
    info = RingInfo(rank, ranks, rank, 0, "resnet", "node-1", "", SCHEMA, 0, 0, 1, 0)
    return replace(info, **about)


@dataclass
class Run:
    """A run directory, and the page about it."""

    directory: RunDirectory
    app: Any
    source: RunSource

    def decide(self, of: Verdict, outcome: str = "ignore", reason: str = "healthy", **about: Any) -> None:
        journal = Recorder(self.directory.decisions)
        journal.window(of, decision(of, outcome, reason, **about))
        journal.close()

    def ended(self, result: CaptureResult) -> None:
        journal = Recorder(self.directory.decisions)
        journal.capture(result)
        journal.close()

    def record(
        self,
        ranks: int,
        steps: range,
        durations_ms: Callable[[int, int], Mapping[str, float]],
        hosts: Callable[[int], str] = lambda rank: "node-1",
        kept: KeptSteps | None = None,
    ) -> None:
        for rank in range(ranks):
            log = StepLog(self.directory.steps, info_of(rank, ranks, host=hosts(rank)), kept=kept)
            log.append(steps_of_rank(rank, ranks, steps, durations_ms))
            log.close()

    def get(self, target: str = "/", **options: Any) -> Answer:
        return ask(self.app, target, **options)


def run_at(path: Path) -> Run:
    info = RunInfo("run-1", "resnet", "2027-01-15T08:00:00+00:00", ("train",), "default", "0" * 64, str(path / "rings"))
    directory = create(path, info, "")
    source = RunSource(lambda: directory)
    return Run(directory, RunPage(source, Access.to("127.0.0.1", None, ""), lambda: NOW_S).app, source)


@pytest.fixture
def run(tmp_path) -> Run:
    """A run of which nothing is known yet; it goes on."""
    made = run_at(tmp_path / "run")
    (tmp_path / "run" / "rings").mkdir()
    return made


@pytest.fixture
def store(run) -> LocalStore:
    return LocalStore(run.directory.path)


def slow_loader(rank: int, step: int) -> Mapping[str, float]:
    return {"data": 50.0 if rank == 2 else 10.0, "forward": 30, "backward": 60}


@pytest.fixture
def captured(run, store, trace, make_manifest):
    """A run in which a suspect was captured, with all that is recorded of it."""
    run.record(4, range(200), slow_loader)
    run.decide(verdict(90))
    run.decide(verdict(100, "suspect", onset=120), "capture", "rule slow-rank", requests=(request_of("c-1"),))
    store.put("c-1", trace, lambda artefact: make_manifest("c-1", artefact))
    run.ended(CaptureResult("c-1", 2, "stored", first_step=160, last_step=164))
    return run
