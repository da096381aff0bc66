"""A job of some ranks, with faults, for some steps: as windows, steps, a run directory, a journal, a store and a page.

`Job` and `Fault` are users' own (`sftriage.testing`). `run_at` makes a run directory, in which a `Run` records steps
and decisions; `verdict`, `decision` and `request_of` are what it decides. `raw` has steps as rings and step logs hold
them, `batch` as they are taken from these.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from struct import unpack
from typing import Any, get_args
from zlib import crc32

import numpy as np
import pytest

from sftriage.agent.reading import RankRings
from sftriage.controller.agents import WindowAssembly
from sftriage.model.captures import ENDED, CaptureRequest, CaptureResult, Decision, ReasonCode, Trigger
from sftriage.model.events import CaptureChanged, Event, WindowJudged, encode
from sftriage.model.verdicts import Lost, Regression, Settings, Suspect, Verdict
from sftriage.model.windows import ReadCounts, StageSchema, StepRecord, Window
from sftriage.runs.decisions import WindowRow, row_of
from sftriage.runs.directory import RunDirectory, RunInfo, create
from sftriage.runs.journal import Journal, read_journal
from sftriage.runs.source import RunSource
from sftriage.testing import BETWEEN, CALM, OUTSIDE, Noise, always, at, every, from_step, gaussian, heavy_tailed  # noqa: F401
from sftriage.testing import Delay as Fault  # noqa: F401
from sftriage.testing import DrawnNoise as Drawn  # noqa: F401
from sftriage.testing import SyntheticJob as Job  # noqa: F401
from sftriage.traces.store import LocalStore
from sftriage.trainer.layout import RingInfo
from sftriage.verdict.judging import judge
from sftriage.windows.decoding import CAPTURING, INCOMPLETE, UNKNOWN, StepArrays, decode
from sftriage.windows.gather import Shape
from sftriage.windows.log_files import find_logs
from sftriage.windows.logs import KeptReadings, kept_readings
from sftriage.windows.rings import Ring
from sftriage.windows.steplog import COUNTERS_KIND, KeptSteps, StepLog

SCHEMA = StageSchema(("data", "forward", "backward", "other"), ("backward",))
NOW_S = 1_800_000_600.0
ADVANCES = {"data": 0.01, "forward": 0.03, "backward": 0.06, "other": 0.0}
STEP_S = 0.100


def exactly(durations_NRS, stages, sync=(), **optional):
    return Window(StageSchema(stages, sync), 0, np.asarray(durations_NRS, dtype=float), **optional)


def classify(window, past=None, settings=None):
    return judge(window, past, settings or Settings())[0]


def judged_windows(windows, past=None):
    for window in windows:
        verdict, past = judge(window, past, Settings())
        yield verdict, past


def judged(run, length=50, stride=50, past=None, first=0):
    """The verdict on each window of a run, and the state after it."""
    firsts = range(first, len(run.durations_NRS) - length + 1, stride)
    return judged_windows((run.steps(first, first + length - 1) for first in firsts), past)


def verdicts(run, length=50, stride=10):
    """The verdicts on a run after a warm-up of 20 steps."""
    return [verdict for verdict, _ in judged(run, length, stride, first=20)]


def past_of(windows, past=None):
    *_, (_, past) = judged_windows(windows, past)
    return past


class Recorder(Journal):
    """A journal to which things are added by what they are."""

    def window(self, verdict: Verdict, decision: Decision, triggers: Mapping[str, Trigger] | None = None) -> None:
        self.append(WindowJudged(verdict, decision, triggers or {}))

    def capture(self, result: CaptureResult, time_s: float = 1.0) -> None:
        self.append(CaptureChanged(time_s, result))


def entries(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """What a journal holds, as JSON values; of one type alone, where that is named, and of captures only their ends."""
    values = [json.loads(encode(event)) for event in read_journal(path)]
    if kind is not None:
        values = [one for one in values if one["type"] == kind]
    return [one for one in values if kind != "capture" or one["result"]["state"] in ENDED]


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
    """A window that names no rank, and has a candidate."""
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
    of = verdict(first, label, **about)
    lost_s = 0.0 if of.lost is None else sum(of.lost.step_s)
    return replace(row_of(of, decision(of, outcome, reason, requests=requests)), lost_s=lost_s)


def request_of(capture_id: str, rank: int = 2, role: str = "suspect") -> CaptureRequest:
    return CaptureRequest(capture_id, rank, "torch", 5, 1, 60.0, 2**29, role=role)


def slots(info: RingInfo, steps: Iterable[int], durations_ms: Callable[[int], Mapping[str, float]]) -> bytes:
    """Steps as a rank writes them, one after the other on its clock."""
    records, at_ns = [], 0
    for step in steps:
        took = durations_ms(step)
        took_ns = tuple(int(took.get(stage, 0.0) * 1e6) for stage in info.schema.stages)
        records.append(StepRecord(info.rank, step, at_ns, 0, took_ns, (0,) * len(info.schema.sync), True, False))
        at_ns += sum(took_ns)
    return raw(1, *records)


def steps_of(info: RingInfo, steps: Iterable[int], durations_ms: Callable[[int], Mapping[str, float]]) -> StepArrays:
    return decode([(info.rank, slots(info, steps, durations_ms))], info.schema)


@lru_cache(maxsize=32)
def steps_of_rank(rank: int, ranks: int, steps: range, durations_ms: Callable[[int, int], Mapping[str, float]]):
    """What a rank's log takes, made once for all tests that record the same."""
    return steps_of(info_of(rank, ranks), steps, lambda step: durations_ms(rank, step))


def info_of(rank: int, ranks: int = 4, **about: Any) -> RingInfo:
    info = RingInfo(rank, ranks, rank, 0, "resnet", "node-1", "", SCHEMA, 0, 0, 1, 0)
    return replace(info, **about)


@dataclass
class Run:
    directory: RunDirectory
    app: Any
    source: RunSource

    def decide(self, of: Verdict, outcome: str = "ignore", reason: str = "healthy", **about: Any) -> None:
        journal = Recorder(self.directory.decisions)
        journal.window(of, decision(of, outcome, reason, **about))
        journal.close()

    def ended(self, result: CaptureResult) -> None:
        self.record_events(CaptureChanged(1.0, result))

    def record_events(self, *events: Event) -> None:
        journal = Recorder(self.directory.decisions)
        for event in events:
            journal.append(event)
        journal.close()

    def record(
        self,
        ranks: int,
        steps: range,
        durations_ms: Callable[[int, int], Mapping[str, float]],
        hosts: Callable[[int], str] = lambda rank: "node-1",
        kept: KeptSteps | None = None,
        kind: str = "steps",
    ) -> None:
        for rank in range(ranks):
            log = StepLog(self.directory.steps, info_of(rank, ranks, host=hosts(rank)), kind=kind, kept=kept)
            log.append(steps_of_rank(rank, ranks, steps, durations_ms))
            log.close()

    def get(self, target: str = "/", **options: Any) -> Any:
        from tests.unit.web.client import fetch

        return fetch(self.app, target, **options)


def run_at(path: Path) -> Run:
    # (the page takes long to import)
    from sftriage.web.run_page import RunPage
    from sftriage.web.serving import Access

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


def raw(first_seq: int, *records: StepRecord) -> bytes:
    """Whole slots, as a rank publishes them, numbered from ``first_seq`` on."""
    slots = []
    for seq, record in enumerate(records, start=first_seq):
        slot_W = np.array(
            (
                *(seq, record.step, record.start_ns, record.between_ns),
                (0 if record.complete else INCOMPLETE) | (CAPTURING if record.capturing else 0),
                *unpack("=2q", record.kind.encode()[:16].ljust(16, b"\0")),
                record.work,
                UNKNOWN if record.ready_ns is None else record.ready_ns,
                *record.durations_ns,
                *record.outside_ns,
                0,
            ),
            dtype=np.int64,
        )
        slot_W[-1] = crc32(slot_W[:-1].tobytes())
        slots.append(slot_W.tobytes())
    return b"".join(slots)


def of_rank(first_seq: int, *records: StepRecord, schema: StageSchema) -> StepArrays:
    return decode([(records[0].rank, raw(first_seq, *records))], schema)


def batch(*records: StepRecord, schema: StageSchema | None = None) -> StepArrays:
    """Steps of any ranks; of as many stages as they have durations, without a schema."""
    if schema is None:
        n_stages, n_sync = (len(records[0].durations_ns), len(records[0].outside_ns)) if records else (1, 0)
        stages = tuple(f"s{n}" for n in range(n_stages))
        schema = StageSchema(stages, stages[:n_sync])
    return decode([(record.rank, raw(1, record)) for record in records] or [(0, b"")], schema)


def new_records(ring: Ring) -> list[StepRecord]:
    return ring.read().steps.records()


def kept_of(steps: Path, info: RingInfo) -> KeptReadings | None:
    """The readings of a rank's scheduling that are kept in a directory."""
    logs = {(log.rank, log.attempt): log for log in find_logs(steps, COUNTERS_KIND)}
    return kept_readings(logs.get((info.rank, info.attempt)), info)


class Windows:
    """The windows of the ranks of one host, put together as an agent and a controller do."""

    def __init__(self, rings: Path, steps: Path, shape: Shape) -> None:
        self.rings = RankRings(rings, steps)
        self._gathering = WindowAssembly(shape)

    def poll(self, *, ended: bool = False) -> list[Window]:
        return self._gathering.add(self.rings.rows(), ended=ended)

    @property
    def telemetry(self) -> ReadCounts:
        return self.rings.telemetry()

    def close(self) -> None:
        self.rings.close()
