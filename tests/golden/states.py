"""Runs in every state in which a person may find them, and what the page and the terminal say of each."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from jinja2 import Environment

from sftriage.base.process import locked
from sftriage.model.captures import CaptureResult, ManualRequest
from sftriage.model.events import (
    CauseFound,
    CostMeasured,
    Difference,
    DifferencesFound,
    DiskRecovered,
    Event,
    EvidenceGathered,
    FollowUpDecided,
    JobPaused,
    ManualRequestDecided,
    Place,
    PolicyChanged,
    RemedyChanged,
    TakenOver,
)
from sftriage.model.verdicts import Regression, Verdict
from sftriage.reports.watch import RunNews, opening
from sftriage.reports.watch_lines import picture_lines
from sftriage.runs.directory import read_info, write_info
from sftriage.runs.liveness import DISK, note_launcher, note_problem
from sftriage.runs.summary import RunSummary
from sftriage.traces.manifest import CauseInfo, CostInfo, FollowedInfo, Manifest, PlaceInfo
from sftriage.traces.store import FileToStore, LocalStore, Upload
from sftriage.web import page
from sftriage.windows.steplog import StepLog
from tests.scenario import NOW_S, Run, decision, held, info_of, request_of, run_at, verdict
from tests.unit.conftest import asked_for, manifest_of
from tests.unit.web.client import readable
from tests.unit.web.conftest import Compiled
from tests.unit.web.stored import shelf_at
from tests.unit.web.test_charts import findings

State = Callable[[Run], object] | int
"""Something that happens to a run, or the pid of the process that holds its lock."""

NO_PROCESS = 2**22 + 1
"""Pids end before."""
URL = "s3://our-traces/pretraining"
DONE = datetime(2027, 1, 15, 8, 5, tzinfo=timezone.utc)
ENDED_AT = "2027-01-15T08:10:00+00:00"
DISTURBED = "needs_evidence", "hold", "self_inflicted"
SLOWER = Regression(640, 632, 655, 0.21, "all", ("backward",), 0.05)
AGAIN = replace(SLOWER, until_step=680)
ASK = ManualRequest("a-1", (1,), "ada", "why is the loader slow?")
CHANGED = {"time_s": NOW_S, "kind": "changed", "policies": [{"name": "default"}], "problems": [], "later": []}
SLEPT = CauseInfo(code="sleep", sure=False, sentence="Rank 2 sleeps in load (data.py:57).", next_step="Look there.")


def window(
    first: int, label: str = "healthy", outcome: str = "ignore", reason: str = "", *, asks: str = "", **of: Any
) -> State:
    """A window, and what was decided about it; ``asks`` is a capture that was asked for."""
    reason = reason or {"throttle": "cooldown", "ignore": "healthy" if label == "healthy" else "observe_only"}[outcome]
    reasons = (reason,) if label in ("stalled", "needs_evidence") else ()
    return judged(verdict(first, label, reasons=reasons, **of), outcome, reason, asks)


def judged(of: Verdict, outcome: str = "ignore", reason: str = "because", asks: str = "") -> State:
    return lambda run: run.decide(of, outcome, reason, requests=(request_of(asks),) if asks else ())


def note(*events: Event) -> State:
    return lambda run: run.record_events(*events)


def result(capture_id: str, state: str, detail: str = "", first_step: int | None = None) -> State:
    last = None if first_step is None else first_step + 4
    return lambda run: run.ended(CaptureResult(capture_id, 2, state, detail, first_step=first_step, last_step=last))


def stored(capture_id: str = "c-1", *found: Any, manifest: Any = lambda one: one) -> State:
    def put(run: Run) -> None:
        trace = run.directory.path / "exported.json"
        trace.write_text('{"traceEvents": []}')
        store = LocalStore(run.directory.path)
        made = manifest(manifest_of(capture_id))
        store.put_files(capture_id, [FileToStore(trace)], lambda files: made.model_copy(update={"artefacts": files}))
        for one in found:
            store.note(capture_id, one)

    return put


def follow_up(manifest: Manifest) -> Manifest:
    trigger = manifest.trigger.model_copy(update={"chosen": "left_open", "follows": "c-1"})
    return manifest.model_copy(update={"trigger": trigger})


def of_info(**changes: Any) -> State:
    return lambda run: write_info(run.directory, replace(read_info(run.directory), **changes))


def recorded(run: Run) -> None:
    run.record(4, range(60), lambda rank, step: {"data": 50.0 if rank == 2 else 10.0, "forward": 30, "backward": 60})


def partly(run: Run) -> None:
    for rank in (0, 3):
        StepLog(run.directory.steps, info_of(rank)).close()
    with run.directory.decisions.open("a") as file:
        file.write("no entry\n")


def over(run: Run) -> None:
    run.directory.path.joinpath("rings").rmdir()


def left(run: Run) -> None:
    run.directory.lock.write_text(str(NO_PROCESS))


def policy(**changes: Any) -> State:
    return note(msgspec.convert(CHANGED | changes, PolicyChanged))


def uploaded(state: str, **about: Any) -> State:
    return lambda run: LocalStore(run.directory.path).note_upload("c-1", Upload(url=URL, state=state, **about))


def sending(run: Run) -> AbstractContextManager[None]:
    """Somebody sends captures as long as the run is looked at."""
    return LocalStore(run.directory.path).uploading()


def regressed(first: int) -> State:
    return window(first, "needs_evidence", "hold", "regressed", regression=SLOWER)


SLOW = window(30, "suspect", onset=40)
THROTTLED = window(30, "suspect", "throttle", onset=40)
CAPTURED = window(30, "suspect", "capture", "rule slow-rank", asks="c-1", onset=40)
KEPT = CAPTURED, stored(), result("c-1", "stored", first_step=160)
MISSING = replace(verdict(80, "suspect").suspects[0], gain_s=75.0, share=0.0)
PASSED = replace(verdict(80, "suspect"), suspects=(replace(MISSING, pattern="one-off", gain_s=2.0),))
STALL = replace(verdict(80, "stalled", reasons=("not_arrived",)), suspects=(MISSING,))


def of_host(first: int, stage: str | None) -> Verdict:
    of = verdict(first, "suspect", onset=20, stage=stage)
    return replace(of, suspects=(replace(of.suspects[0], scope="host", ranks=(2, 3), rank=None, host="vm"),))


HUNG = verdict(100, "stalled", reasons=("in_sync",))
REMEDY = {"attempt": 0, "remedy": "stragglar", "rank": 2, "who": "rank 2", "where": "data"}
FULL = NOW_S, NOW_S - 1, "No space left"
FIGURES = {"on_s": 0.281, "off_s": 0.325, "saves_s": 0.044, "error_s": 0.0016}
SHARED = CostInfo(first_step=159, last_step=165, cost_s=0.5, before_s=0.1, captures=2)
COST = {"time_s": NOW_S, "attempt": 0, "first_step": 159, "last_step": 165, "before_s": 0.1}

STATES: dict[str, tuple[State, ...]] = {
    "nothing judged": (recorded,),
    "ended before its first window": (over,),
    "damaged": (lambda run: run.directory.info_file.write_text("{}"),),
    "healthy": (recorded, window(20), window(30)),
    "healthy after a trouble": (window(30, "suspect"), window(80)),
    "healthy though a capture disturbed the newest window": (window(20), window(30, *DISTURBED)),
    "slow, and nothing done": (window(20), SLOW),
    "undecided, then captured, and throttled now": (
        *(window(20), window(30, "needs_evidence", "hold", "sync_ambiguous")),
        window(100, "suspect", "capture", "rule slow-rank", asks="c-1", onset=120),
        *(window(110, *DISTURBED), window(160, "suspect", "throttle", onset=125)),
        *(stored(), result("c-1", "stored", first_step=160)),
    ),
    "slow, after a hang that led to two captures": (
        *(judged(HUNG, "capture", "rule hang", "c-1"), window(130), window(180, "suspect", "throttle")),
        note(FollowUpDecided("c-1", decision(HUNG, "capture", "it hangs", requests=(request_of("c-2"),)))),
    ),
    "a slow host, of which another stage or rank stands out in each window": (
        window(0),
        *(judged(of_host(first, stage)) for first, stage in ((20, "data"), (70, "forward"), (120, None))),
        *(window(170, "suspect", onset=20, rank=3), window(220, "suspect", onset=20, stage="forward")),
        judged(of_host(270, "data")),
    ),
    "another rank after a slow host": (judged(of_host(20, "data")), window(70, "suspect", rank=1, onset=70)),
    "slow, and throttled": (
        recorded,
        window(0),
        window(30, "suspect", "throttle", "overhead_budget", onset=40),
        window(80, "suspect", "throttle", "overhead_budget", onset=40),
        note(CostMeasured(**COST | {"cost_s": 1.5})),
    ),
    "slow, and held": (window(20), window(30, "suspect", "hold", "pending")),
    "slow, and a capture runs": (window(20), CAPTURED, result("c-1", "running", "fetching from node-b: 12 of 48 MiB")),
    "slow, and captured": (recorded, window(20), *KEPT),
    "captured, then disturbed": (CAPTURED, window(40, *DISTURBED)),
    "captured, and the trace shows why": (*KEPT[:1], stored("c-1", findings().model_copy(update={"cause": SLEPT}))),
    **{
        f"a capture {state}": (CAPTURED, result("c-1", state, "the disk is full"))
        for state in ("failed", "refused", "expired")
    },
    "a capture failed, and the run has ended": (CAPTURED, result("c-1", "failed", "the disk is full"), over),
    "only disturbed": (window(40, *DISTURBED),),
    "throttled after a trouble with a capture": (CAPTURED, window(80), window(90, "suspect", "throttle")),
    "started again": (CAPTURED, window(0, "suspect", "throttle", attempt=1)),
    "undecided": (window(20), window(30, "needs_evidence", "hold", "co_critical")),
    "undecided, with a candidate": (window(0), judged(held(30, reasons=("sync_ambiguous",)), "hold", "sync_ambiguous")),
    "undecided, who was named before": (window(20), THROTTLED, judged(held(40), "hold", "co_critical")),
    "slower than its best": (window(20), regressed(660), regressed(670)),
    "slow, then slower than its best too, and as good again": (
        *(window(first, "suspect", "throttle", "captures_left") for first in (610, 620)),
        *(window(first, "suspect", "throttle", "captures_left", regression=SLOWER) for first in (630, 640)),
        window(650, "suspect", "throttle", "captures_left", regression=AGAIN),
        window(660, "suspect", "throttle", "captures_left"),
    ),
    "one-off, and then chronic": (
        *(judged(PASSED, "ignore", "observe_only"), judged(replace(PASSED, first_step=90, last_step=139))),
        window(100, "suspect", "ignore"),
    ),
    "stalled": (window(20), judged(STALL, "hold", "not_arrived")),
    "stalled, and nothing else": (window(30, "stalled", "hold", "in_sync"),),
    "by the devices' clock": (recorded, judged(replace(verdict(30, "suspect", onset=30), clock="device"))),
    "few steps came in": (partly, judged(replace(verdict(20), numbers={"coverage": 0.7499}))),
    "slow, and unlike its peers": (
        window(20),
        window(30, "suspect", onset=40),
        note(DifferencesFound(NOW_S, 0, "rank 2", (2,), (0, 1, 3), (Difference("num_workers", 1, 4, 3),))),
    ),
    "paused twice": (window(0), *(note(JobPaused(NOW_S, 0, at, at, 55.2, "backward", "in_sync")) for at in (10, 60))),
    **{
        f"throttled for {reason}, {'ended' if ends else 'going on'}": (
            window(30, "suspect", "throttle", reason, onset=40),
            *ends,
        )
        for reason in ("cooldown", "captures_per_hour", "pending")
        for ends in ((), (over,))
    },
    "no longer watched": (window(100), left, of_info(ended_at="")),
    "no longer watched, undecided": (judged(held(30), "hold", "co_critical"), left, of_info(ended_at="")),
    "no longer watched, rings swept": (window(100), left, of_info(ended_at=""), over),
    "seen to end": (window(100), left, of_info(ended_at=ENDED_AT), over),
    "seen to end, not tidied up": (window(100), left, of_info(ended_at=ENDED_AT)),
    "of an earlier version, left": (window(100), left, of_info(ended_at=None)),
    "of an earlier version, swept": (window(100), left, of_info(ended_at=None), over),
    "watched from elsewhere, rings elsewhere": (window(100), of_info(ended_at=""), over, NO_PROCESS),
    "watched, judging nothing for long": (window(100), os.getpid()),
    "taken over": (window(100), lambda run: note_launcher(run.directory.path / "rings", os.getppid()), os.getpid()),
    "nothing recorded": (of_info(not_recorded="the script creates no sftriage.Monitor"), os.getpid()),
    "nothing was recorded": (of_info(not_recorded="the script creates no sftriage.Monitor", ended_at=ENDED_AT), over),
    "a person asked": (
        window(90),
        note(
            ManualRequestDecided(ASK, decision(verdict(100), "capture", "asked", requests=(request_of("a-1-r1", 1),))),
            ManualRequestDecided(ASK, decision(verdict(110), "throttle", "captures_left")),
        ),
    ),
    "a remedy was tried and kept": (
        window(100, "suspect"),
        note(RemedyChanged(**REMEDY, time_s=NOW_S, step=109, state="trying", reason="worthwhile")),
        note(RemedyChanged(**REMEDY, time_s=NOW_S, step=300, state="kept", reason="helps", numbers=FIGURES)),
    ),
    "it is known why, and is not": (
        SLOW,
        note(CauseFound(NOW_S, "c-1", 2, "unknown", True, "It is not known why.")),
        note(CauseFound(NOW_S, "c-1", 2, "sleep", False, SLEPT.sentence, Place("load", "/job/data.py", 57), 3)),
    ),
    "a capture hung, and led to another": (
        judged(HUNG, "capture", "rule hang", "c-1"),
        result("c-1", "failed", "no answer long after its time-box"),
        note(FollowUpDecided("c-1", decision(HUNG, "capture", "it hangs", requests=(request_of("c-10"),)))),
    ),
    "policies": (
        window(20),
        policy(),
        policy(later=["detection.window_steps"]),
        policy(kind="refused", problems=["policy.yaml:3:5: no duration"]),
        policy(kind="refused"),
        policy(kind="restored"),
    ),
    **{
        f"captures cost {cost_s}": (*KEPT, note(CostMeasured(**COST | {"cost_s": cost_s})))
        for cost_s in (0.82, -0.1, None)
    },
    "a cost in the manifest": (CAPTURED, stored("c-1", SHARED)),
    "GPUs": (
        window(100),
        note(EvidenceGathered(NOW_S, 100, 149, remarks=("GPU 2 is held back by its power limit",))),
        note(EvidenceGathered(NOW_S, 100, 149, ready_fraction=1.0)),
        note(TakenOver(NOW_S, "node-2", 7)),
    ),
    "the disk was full, and is again": (
        window(20),
        note(
            DiskRecovered(
                NOW_S, NOW_S - 60, "No space left", late={"steps": 9}, lost={"windows": 12}, lost_steps=(300, 460)
            )
        ),
        lambda run: note_problem(run.directory.path / "rings" / DISK, "Read-only file system"),
    ),
    "the disk was full, and nothing was lost": (window(20), note(DiskRecovered(*FULL, late={"steps": 3}))),
    "to be uploaded": (*KEPT, of_info(store=URL)),
    "to be uploaded once its sender is there": (*KEPT, of_info(store=URL), uploaded("uploading")),
    "to be uploaded, and its sender is there": (*KEPT, of_info(store=URL), sending),
    "being uploaded": (*KEPT, of_info(store=URL), uploaded("uploading"), sending),
    "could not be uploaded, and its sender is there": (
        *(*KEPT, of_info(store=URL), uploaded("failed", reason="refused <b>"), sending),
    ),
    "could not be uploaded": (*KEPT, of_info(store=URL), uploaded("failed", reason="refused <b>")),
    "uploaded": (*KEPT, of_info(store=URL), uploaded("stored", verified_at=DONE)),
    "captured again, after what was left open": (
        CAPTURED,
        stored("c-1", FollowedInfo(capture_id="c-9")),
        stored("c-9", manifest=follow_up),
    ),
    "asked for by a person, and stored": (window(20), stored("c-1", manifest=asked_for)),
}
"""Each as what happens to a run that goes on, or a pid that holds its lock."""


def told(root: Path) -> Iterator[str]:
    """What the page, its pages of captures and the terminal say of each."""
    # (a page compiles its templates once; here every run has a page)
    compiled = partial(Environment, bytecode_cache=Compiled())
    with mock.patch.object(page, "Environment", compiled):
        for number, (name, happens) in enumerate(STATES.items()):
            yield f"# {name}"
            yield from state(root / f"state-{number}", happens)


def state(path: Path, happens: tuple[State, ...]) -> Iterator[str]:
    run = run_at(path)
    run.directory.path.joinpath("rings").mkdir()

    def page_at(target: str) -> str:
        return str(run.get(target).text).replace(str(path), "runs/r")

    with ExitStack() as held:
        for one in happens:
            if isinstance(one, int):
                file = held.enter_context(locked(run.directory.lock))
                file.write(str(one).encode())
                file.flush()
            elif isinstance(made := one(run), AbstractContextManager):
                held.enter_context(made)
        view, text = replace(run.source.view(), directory="runs/r"), [*readable(page_at("/"))]
        links = re.findall(r'href="(/captures/[^"/]+)"', run.get().text + run.get("/decisions").text)
        for target in dict.fromkeys(links):
            text += [f"## {target}", *readable(page_at(target))]
        lines = [] if view.problem else picture_lines(RunSummary(view), "runs/r", NOW_S, 110)
        log = [] if view.problem else [opening(view, "runs/r"), *RunNews().lines(view, NOW_S)]
    drawn = re.sub(r"\n\nFrontier.*?(?=\n\n)", "", "\n".join(one.plain for one in lines), flags=re.DOTALL)
    for line in (*text, "## watch", drawn, "## watch, as a log", *log):
        yield line.replace(str(os.getpid()), "$PID").replace(str(os.getppid()), "$PPID")


QUERIES = (
    *("/", "/?job=resnet", "/?job=gpt%207b/ü", "/?run=run-2", "/?rank=3", "/?stage=forward", "/?reproduced=yes"),
    *("/?profiler=nsys", "/?since=2027-01-15T08:00:05Z", "/?since=1h", "/?job=resnet&rank=2&run=run-1"),
    # what means nothing is passed over
    *("/?job=&rank=&since=", "/?rank=x&job=resnet&run=run-2", "/?rank=-1", "/?rank=99999999999", "/?rank=%D9%A3"),
    *("/?since=yesterdayish", "/?since=%00", "/?reproduced=maybe", "/?profiler=perf"),
    *("/captures/resnet/run-2/c-1", "/captures/resnet/run-1/c-1"),
)


def queried(root: Path) -> Iterator[str]:
    """What the page of a store says to each query, and its pages of captures."""
    shelf = shelf_at(root / "shelf", root / "shelf.db").stock()
    shelf.put("c-5", second=5, update={"trigger": asked_for(manifest_of("c-5")).trigger})
    place = PlaceInfo(function="save", file="/job/train.py", line=211, source="torch.save(state, path)")
    cause = CauseInfo(code="checkpoint", sure=True, sentence="It saves.", next_step="Save less.", place=place)
    shelf.put("c-6", stage=None, second=6, update={"findings": findings().model_copy(update={"cause": cause})})
    shelf.look()
    for query in QUERIES:
        yield from (f"# {query}", *readable(shelf.get(query).text.replace(str(root), "stores")))
