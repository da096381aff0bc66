"""Every sentence that the product says of a job, in one table that a person reads in one go: ``sentences.txt``.

Rows are made from the codes themselves, so that a code without words, and words that nobody has read, fail. After a
change, ``SFTRIAGE_WRITE_SENTENCES=1`` writes the table anew: read what has changed in it.
"""
# ruff: noqa: E501 (a row a line: it is read as a table)

import ast
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html import unescape
from pathlib import Path
from re import DOTALL, findall, search, sub
from typing import get_args

import pytest
from rich.console import Console

import sftriage
from sftriage.mitigate.advice import Messages, Straggler, advice_of
from sftriage.model.captures import (
    CaptureRequest,
    CaptureResult,
    CaptureState,
    Decision,
    ManualRequest,
    Outcome,
    Profiler,
    ReasonCode,
)
from sftriage.model.events import (
    CaptureChanged,
    CauseFound,
    CostMeasured,
    Departure,
    Difference,
    DifferencesFound,
    DiskFailed,
    DiskRecovered,
    Event,
    EvidenceGathered,
    FollowUpDecided,
    JobBroken,
    JobPaused,
    JournalCompacted,
    ManualRequestDecided,
    NamedPolicy,
    Pipeline,
    Place,
    PolicyChanged,
    RemedyChanged,
    RingGivenUp,
    TakenOver,
    WindowJudged,
)
from sftriage.model.hangs import Call, Hang, SourceLine
from sftriage.model.verdicts import Label, OwnWork, Pattern, Regression, Scope, SlowLink, Suspect, Verdict
from sftriage.model.windows import LOADER_START
from sftriage.policy.in_force import change_lines
from sftriage.reports.texts import explanation_lines, manifest_lines
from sftriage.runs.decisions import Other, note_kind
from sftriage.runs.summary import advice_lines, captured_words
from sftriage.runs.timetable import TimeRow, TimeTable
from sftriage.sinks.terminal import Reporter
from sftriage.traces.manifest import CostInfo, FollowedInfo, ReproducedInfo
from sftriage.verdict.units import SHOWN_COUNTERS
from sftriage.web.page import templates
from sftriage.words.decisions import (
    COUNTED,
    COUNTED_STEP,
    DOES,
    NEXT_STEP,
    RESOLUTIONS,
    SENTENCES,
    capturing_sentence,
    cost_sentence,
    ended_sentence,
    outcome_sentence,
    reason_kind,
    reason_sentence,
    resolution,
)
from sftriage.words.kube import CAPTURE_STATES, CAPTURES, INJECTED_BUT, LEFT_ALONE, NEWS, POLICIES, REMOVAL, REPORTS
from sftriage.words.kube import REPRODUCED as UNKNOWN
from sftriage.words.run import (
    HEADLINES,
    HEALTH_ANSWERS,
    LOOK_AT,
    OUTCOMES,
    QUESTIONS,
    REMEDY_REASONS,
    SLOW,
    TIME_ROWS,
    event_sentence,
    look_at,
    time_row_detail,
    time_row_name,
    time_sentence,
)
from sftriage.words.verdicts import (
    AFTER_GRADIENTS,
    AGAINST_ITSELF,
    BY_INTERPRETER,
    CLOCK,
    EXCESS,
    FIRST,
    REASONS,
    RESOLVES,
    STALLS,
    explain,
    hours_of_ranks,
    lasted,
    system_sentence,
    verdict_sentence,
)
from tests.unit.conftest import asked_for, manifest_of

TABLE = Path(__file__).with_name("sentences.txt")
SOURCE = Path(sftriage.__file__).parent
NOON_S = 1_800_000_000.0
RANK = Suspect("rank", (3,), "data", 0.0242, 0.17, 0.57, rank=3, onset_step=120)
RIVAL = replace(RANK, ranks=(1,), rank=1, stage="forward", gain_s=0.004, share=0.03)
REGRESSED = Regression(400, 380, 410, 0.45, "all", ("backward",), 0.12)


def judged(label: Label = "suspect", *reasons: str, suspects=(RANK,), **about) -> Verdict:
    advances = {"data": 0.02, "backward": 0.12}
    return Verdict(
        90, 139, label, reasons, suspects, 0.14, advances, {}, about.pop("numbers", {}), ("backward",), **about
    )


Rows = Iterator[tuple[str, str]]
CONDITIONS = {
    "policy: ": POLICIES,
    "report: ": REPORTS,
    "capture: ": CAPTURE_STATES,
    "capture of no run: ": CAPTURES,
    "event: ": NEWS,
    "reproduced: ": UNKNOWN,
    "removal: ": REMOVAL,
    "not injected: ": LEFT_ALONE,
    "injected, but: ": INJECTED_BUT,
}


def tables(parts: Mapping[str, Mapping[str, str]]) -> Rows:
    return ((f"{what}{code}", text) for what, sentences in parts.items() for code, text in sentences.items())


def verdicts() -> Rows:
    healthy = judged("healthy", suspects=())
    yield "healthy", verdict_sentence(healthy)
    yield "healthy, by the devices' clock", verdict_sentence(replace(healthy, clock="device"))
    yield "healthy, of one step", verdict_sentence(replace(healthy, last_step=90))
    scopes: dict[Scope, Suspect] = {
        "rank": RANK,
        "host": replace(RANK, scope="host", host="node-2", ranks=(4, 5), rank=None),
        "cohort": replace(RANK, scope="cohort", cohort="stage-0", ranks=(4,), rank=None, stage=None),
        "all": replace(RANK, scope="all", ranks=tuple(range(8)), rank=None, stage="backward"),
    }
    for scope in get_args(Scope):
        yield f"suspect: {scope}", verdict_sentence(judged(suspects=(scopes[scope],)))
    without = {"numbers": {"without_s": 0.116}}
    yield "suspect, and the step without", verdict_sentence(judged(**without))
    yield "suspect, and a step that would take nothing without", verdict_sentence(judged(numbers={"without_s": 1e-5}))
    back = replace(RANK, pattern="recurring", period_steps=10)
    yield "suspect that comes back, and the step without", verdict_sentence(judged(suspects=(back,), **without))
    patterns: dict[Pattern, Suspect] = {
        "chronic": replace(RANK, onset_range=(118, 126)),
        "recurring": replace(RANK, pattern="recurring", period_steps=7),
        "one-off": replace(RANK, pattern="one-off"),
    }
    for pattern in get_args(Pattern):
        yield f"suspect: {pattern}", verdict_sentence(judged(suspects=(patterns[pattern],)))
    often = replace(RANK, pattern="recurring", period_steps=2)
    yield "suspect: every second step", verdict_sentence(judged(suspects=(often,)))
    yield "suspect: recurring, who knows when", verdict_sentence(judged(suspects=(replace(often, period_steps=None),)))
    evaluates = replace(often, period_steps=40, alone=OwnWork("evaluation", 1.0, 7, 8.46))
    saves = replace(often, period_steps=None, alone=OwnWork("eval+checkpoint", 1.0, 7, 8.46))
    yield "suspect that evaluates alone", verdict_sentence(judged(suspects=(evaluates,)))
    yield "suspect that evaluates and saves alone", verdict_sentence(judged(suspects=(saves,)))
    compiles = replace(RANK, alone=OwnWork("compilation", 0.9, 178, 29.4))
    yield "suspect that compiles alone", verdict_sentence(judged(suspects=(compiles,)))
    does = replace(RANK, alone=OwnWork("mine", 0.9, 178, 29.4))
    yield "suspect that does something of its own alone", verdict_sentence(judged(suspects=(does,)))
    for fraction in (0.83, 0.2, None):
        for pattern in get_args(Pattern):
            suspect = replace(patterns[pattern], descheduled_fraction=fraction)
            waited = judged(suspects=(suspect,), numbers={"queued_s": 0.03, "preempted": 8.2})
            yield f"suspect that waited for a CPU, {fraction}", verdict_sentence(waited)
            yield f"suspect that waited for a CPU, {fraction}, explained", system_sentence(waited)
    for code, known in SHOWN_COUNTERS.items():
        numbers = {name: 0.0302 if name.endswith("_s") else 31.0 for name in (*known, "queued_s", "preempted")}
        held_up = replace(RANK, **{"interpreter" if code in BY_INTERPRETER else "system": (code, 0.83)})
        yield f"suspect: {code}", system_sentence(judged(suspects=(held_up,), numbers=numbers))
    yield "suspect, and slower than ever", verdict_sentence(judged(regression=REGRESSED))
    for reason in REASONS:
        yield f"needs_evidence: {reason}", verdict_sentence(judged("needs_evidence", reason, suspects=()))
    for peer, direction, against in (("", "send", "peers"), ("", "both", "peers"), ("node-c", "send", "reverse")):
        link = SlowLink("node-b", peer, direction, 1.9e8, 9e9, against, 0.065, again_per_s=3.0 * bool(peer))
        yield f"slow link: {against}", verdict_sentence(judged("needs_evidence", "slow_link", suspects=(), link=link))
    link = SlowLink("node-b", "node-c", "both", 9.9e8, 1e10, "interface", 0.065)
    yield "suspect, and a slow link", verdict_sentence(judged(link=link))
    of_kind = replace(REGRESSED, kind="eval", scope="some", stages=())
    for what, regression in (("known", REGRESSED), ("a kind of step", of_kind)):
        slower = judged("needs_evidence", "regressed", suspects=(), regression=regression)
        yield f"needs_evidence: regressed, {what}", verdict_sentence(slower)
    yield "regression that has ended", verdict_sentence(replace(healthy, regression=replace(REGRESSED, until_step=700)))
    two = judged("needs_evidence", "roaming", "no_baseline", suspects=())
    yield "needs_evidence: two reasons", verdict_sentence(two)
    numbers = {"still_s": 61.3, "typical_step_s": 0.02, "missing_ranks": 12.0}
    for reason in STALLS:
        named = (RANK, scopes["host"]) if reason in ("not_arrived", "died", "left_early", "no_rank_waits") else ()
        stall = replace(judged("stalled", reason, suspects=named, numbers=numbers if named else {}), last_step=90)
        yield f"stalled: {reason}", verdict_sentence(stall)


def advice() -> Rows:
    for reason in (*REASONS, *STALLS):
        yield reason, RESOLVES[reason][0]
    yield "sync_ambiguous, the last gradient being on record", AFTER_GRADIENTS[0]


PARAMETERS: dict[ReasonCode, dict] = {
    "healthy": {},
    "undecided": {"reasons": ("roaming", "low_coverage")},
    "standstill": {"reasons": ("died",), "rank": 3, "stage": "data", "more_ranks": 2},
    "no_rank_named": {},
    "one_off": {},
    "contended": {"rank": 1, "stage": "forward", "contended_share": 0.87, "lasted_s": 2.13, "for_s": 30.0},
    "descheduled": {"descheduled_share": 0.83},
    "cgroup_throttled": {"rank": 3, "system_share": 0.83},
    "stopped": {"rank": 3, "system_share": 0.83},
    "page_faults": {"rank": 3, "system_share": 0.83},
    "memory_pressure": {"rank_count": 4, "system_share": 0.83},
    "no_rule_matched": {"rule": "slow-rank", "share": 0.03, "min_share": 0.05, "stage": "data", "stages": ("forward",)},
    "observe_only": {"rule": "slow-rank"},
    "pending": {"rule": "slow-rank", "lasted_steps": 60, "for_steps": 100},
    "rule_matched": {"rule": "slow-rank", "rank": 3, "stage": "data", "gain_s": 0.0242, "share": 0.17, "persistence": 0.57, "controls": (1,)},
    "follow_up": {"rule": "slow-rank", "follows": "w90-139-r3-slow-rank-1", "left_open": "operators", "rank": 3, "stage": "data", "gain_s": 0.0242, "share": 0.17, "persistence": 0.57, "profiler": "torch", "chosen": "left_open"},
    "asked": {"who": "ada", "why": "why is the loader slow?"},
    "rank_hangs": {"rank": 3, "capture_id": "w90-139-r3-slow-rank-1"},
    "captures_per_run": {"captures": 3, "limit": 3},
    "active": {"until_s": NOON_S},
    "overhead_budget": {"spent_s": 0.864, "budget_s": 0.126, "budget_share": 0.005, "until_s": NOON_S},
    "captures_per_hour": {"captures": 4, "limit": 4, "until_s": NOON_S},
    "captures_per_day": {"captures": 12, "limit": 12, "until_s": NOON_S},
    "place_kept": {"place_of": "captures_per_hour", "gain_s": 0.015, "largest_gain_s": 0.02, "until_s": NOON_S},
    "already_captured": {"capture_id": "w90-139-r3-slow-rank-1", "captured_gain_s": 0.024, "gain_s": 0.025, "worse_gain_s": 0.036, "until_s": NOON_S},
    "cooldown": {"rule": "slow-rank", "until_s": NOON_S},
    "after_failures": {"rule": "slow-rank", "failures": 2, "until_s": NOON_S},
    "rank_busy": {"rank": 3, "capture_id": "w90-139-r3-slow-rank-1"},
    "concurrent_ranks": {"running": 1, "limit": 2, "wanted": 2},
    "no_such_rank": {"ranks": (8, 9), "last_rank": 7},
    "captures_left": {"wanted": 2, "left": 1},
}  # fmt: skip

VARIANTS: list[tuple[ReasonCode, dict]] = [
    ("undecided", {}),
    ("no_rule_matched", {}),
    ("no_rule_matched", {"rule": "slow-rank", "gain_s": 0.004, "min_gain_s": 0.01, "stage": "", "stages": ("data",)}),
    ("no_rule_matched", {"rule": "dear", "cost_hours": 3.25, "min_cost_hours": 5.0}),
    ("observe_only", {"rule": "stuck", "reasons": ("died",), "rank": 3, "stage": "data"}),
    *(("pending", {"rule": "slow-rank", "lasted_s": lasted_s, "for_s": 86400.0}) for lasted_s in (4.2, 1234.5)),
    ("rule_matched", {**PARAMETERS["rule_matched"], "rank": 3, "stage": "", "controls": ()}),
    *(
        ("rule_matched", {**PARAMETERS["rule_matched"], "profiler": profiler, "chosen": chosen})
        for profiler, chosen in (
            ("stacks", "host_stage"),
            ("torch", "compute_stage"),
            ("nsys", "device_clock"),
            ("torch", "whole_rank"),
        )
    ),
    *(
        ("follow_up", {**PARAMETERS["follow_up"], "left_open": left, "profiler": "nsys"})
        for left in ("stacks", "system")
    ),
    ("rule_matched", {"rule": "stuck", "reasons": ("not_arrived",), "rank": 3, "stage": "data"}),
    ("contended", {"rank": 1, "stage": None, "lasted_s": 2.13, "for_s": 30.0}),
    ("active", {}),
    ("captures_per_hour", {"captures": 1, "limit": 1, "until_s": NOON_S}),
    ("after_failures", {"rule": "slow-rank", "failures": 1, "until_s": NOON_S}),
    ("no_such_rank", {"ranks": (8,)}),
    ("captures_left", {"wanted": 1, "left": 0}),
]


def decisions() -> Rows:
    for code, given in (*((code, PARAMETERS[code]) for code in get_args(ReasonCode)), *VARIANTS):
        decision = Decision(NOON_S, 90, 139, "suspect", "hold", code, parameters=given)
        yield code, reason_sentence(decision)
        yield f"{code}, counted as", reason_kind(decision)
        if resolves := resolution(decision):
            yield f"{code}, resolved by", resolves
    throttled = Decision(NOON_S, 90, 139, "suspect", "throttle", "cooldown", parameters=PARAMETERS["cooldown"])
    yield "on a terminal", outcome_sentence(throttled)
    yield from tables({"outcome: ": OUTCOMES, "headline: ": HEADLINES})


def requested(rank: int, profiler: Profiler = "torch", role: str = "suspect") -> CaptureRequest:
    return CaptureRequest(f"c-{rank}", rank, profiler, 3, 1, 60.0, 2**29, role=role)


def captures() -> Rows:
    for profiler in get_args(Profiler):
        yield f"capturing with {profiler}", capturing_sentence([requested(2, profiler)])
        beside = [requested(2, profiler), requested(3, profiler), requested(1, profiler, "control")]
        yield f"capturing with {profiler}, beside a control", capturing_sentence(beside)
    sampled = replace(requested(2, "stacks"), options={"sample_stacks": True})
    yield "capturing with sampled stacks", capturing_sentence([sampled])
    for state in get_args(CaptureState):
        if state in ("accepted", "armed", "running"):
            continue
        steps = (147, 151) if state == "stored" else (None, None)
        result = CaptureResult("c-2", 2, state, "" if state == "stored" else "cancelled", *steps)
        yield state, ended_sentence(result, 2048)
    yield "cost", cost_sentence(0.1601, 0.1407, 146, 152)
    yield "cost that several share", cost_sentence(0.1601, 0.1407, 146, 152, 2)
    yield "cost of nothing", cost_sentence(0.0, 0.1407, 146, 146)
    yield "cost that is not known", cost_sentence(None, None, 146, 152)


def explanations() -> Rows:
    for name, what, *_ in (*CLOCK, *EXCESS, *FIRST, *AGAINST_ITSELF):
        yield f"check: {name}", what
    numbers = {threshold: 1.0 for _, _, threshold, _ in (*EXCESS, *FIRST)}
    reached = numbers | {name: 2.0 for name, *_ in (*EXCESS, *FIRST)}
    missed = numbers | {name: 0.5 for name, *_ in (*EXCESS, *FIRST)}
    clock = {"device_coverage": 0.1, "min_device_coverage": 0.5}
    for case, verdict in {
        "suspect": judged(suspects=(RANK, RIVAL), numbers=reached),
        "healthy": judged("healthy", suspects=(), numbers=missed),
        "co_critical": judged("needs_evidence", "co_critical", suspects=(), numbers={}),
        "roaming": judged("needs_evidence", "roaming", numbers=missed),
        "low_coverage": judged("needs_evidence", "low_coverage", suspects=()),
        "clock_limited": judged("needs_evidence", "clock_limited", suspects=(), numbers=clock),
        "self_inflicted": judged("needs_evidence", "self_inflicted", suspects=()),
        "regressed": judged("needs_evidence", "regressed", suspects=()),
    }.items():
        for change in explain(verdict).changes:
            yield f"{case}", f"It would be {change}."
    of = judged(suspects=(RANK, RIVAL), numbers=reached)
    for line in explanation_lines(WindowJudged(of, Decision(NOON_S, 90, 139, of.label, "hold", "one_off"))):
        yield "sftriage explain", line


def manifests() -> Rows:
    told = ReproducedInfo(answer="yes", steps=5, steps_with=5, over_s=0.0404, expected_s=0.0242)
    cost = CostInfo(first_step=146, last_step=152, cost_s=0.1601, before_s=0.1407, captures=2)
    about = {"reproduced": told, "cost": cost, "evidence": ("GPU 0 runs at 1,200 of 1,980 MHz: power cap",)}
    whole = manifest_of("w100-149-r2-slow-rank-1").model_copy(update=about)
    whole = whole.model_copy(update={"trigger": whole.trigger.model_copy(update={"why": verdict_sentence(judged())})})
    control = manifest_of("w100-149-r1-slow-rank-1", rank=1, role="control").model_copy(
        update={"reproduced": told.model_copy(update={"answer": "partly", "steps_with": 1, "over_s": -0.004})}
    )
    linked = {"chosen": "left_open", "follows": "w90-139-r2-slow-rank-1"}
    second = whole.model_copy(update={"trigger": whole.trigger.model_copy(update=linked)})
    alone = manifest_of("w90-139-r2-slow-rank-1", profiler="stacks")
    files = (alone.artefacts[0].model_copy(update={"name": "stacks.speedscope.json"}),)
    first = {"followed": FollowedInfo(capture_id="w100-149-r2-slow-rank-2"), "artefacts": files}
    first |= {"trigger": alone.trigger.model_copy(update={"chosen": "host_stage"})}
    cases = {"suspect": whole, "control": control, "asked for": asked_for(manifest_of("a-1"))}
    cases |= {"followed": alone.model_copy(update=first), "follow-up": second, "from outside": alone}
    for case, manifest in cases.items():
        for line in manifest_lines(manifest):
            yield case, line
    for capture in (whole, control):
        for answer in ("yes", "partly", "no"):
            found = {"reproduced": told.model_copy(update={"answer": answer})}
            yield f"{capture.capture.role}, in short", captured_words(capture.model_copy(update=found))


MISMATCH = Hang(
    "different_sizes",
    (2,),
    ("node-0",),
    group_ranks=(0, 1, 2, 3),
    number=126,
    call=Call("all_reduce", ((3,),), ("Float",), (SourceLine("check", "/job/train.py", 52),)),
    others=(0, 3),
    other_call=Call("all_reduce", ((4,),), ("Float",), (SourceLine("train", "/job/train.py", 91),)),
    numbers={"hosts": 1.0},
)
FOLLOWED = (
    Departure(
        (0, 1),
        "gave_up",
        ("node-0",),
        None,
        "RuntimeError",
        "Connection reset by peer",
        Place("train", "/job/train.py", 91),
        "backward",
        60,
    ),
    Departure((3,), "killed", ("node-1",), -15, stage="backward", step=60),
)
TOLD: dict[type, list[Event]] = {
    WindowJudged: [WindowJudged(judged(), Decision(NOON_S, 90, 139, "suspect", "throttle", "cooldown", parameters=PARAMETERS["cooldown"]))],
    ManualRequestDecided: [
        ManualRequestDecided(ManualRequest("q", (2,), "ada", "why?"), Decision(NOON_S, 90, 90, "asked", "capture", "asked", parameters=PARAMETERS["asked"], requests=(requested(2),))),
        ManualRequestDecided(ManualRequest("q", (2,), "ada", "why?"), Decision(NOON_S, 90, 90, "asked", "throttle", "rank_busy", parameters=PARAMETERS["rank_busy"])),
    ],
    FollowUpDecided: [FollowUpDecided("c-2", Decision(NOON_S, 90, 90, "asked", "capture", "rank_hangs", parameters=PARAMETERS["rank_hangs"], requests=(requested(2, "stacks"),)))],
    CaptureChanged: [CaptureChanged(NOON_S, CaptureResult("c-2", 2, "stored", "", 147, 151), stored_bytes=2048)],
    PolicyChanged: [PolicyChanged(NOON_S, kind, (NamedPolicy("default"),), problems, later) for kind, problems, later in (
        ("changed", (), ("detection.window_steps",)), ("refused", ("line 3: limits: no such field",), ()), ("restored", (), ()))],
    CostMeasured: [CostMeasured(NOON_S, 0, 146, 152, cost_s, before_s) for cost_s, before_s in ((0.1601, 0.1407), (0.0, 0.1407), (None, None))],
    EvidenceGathered: [EvidenceGathered(NOON_S, 90, 139, ("GPU 0 runs at 1,200 of 1,980 MHz: power cap",))],
    RingGivenUp: [RingGivenUp(NOON_S, 2, "/dev/shm/sftriage-x/rank-2.0.ring: truncated: its header is incomplete")],
    JobBroken: [
        JobBroken(NOON_S, 0, (Departure((2,), "exited", ("node-1",), 3, stage="data", step=60),), FOLLOWED, world_size=4),
        JobBroken(NOON_S, 0, (Departure((2,), "killed", ("node-1",), -9, stage="other", step=60, out_of_memory="cgroup", limit_bytes=8 << 30),), FOLLOWED, world_size=8),
        JobBroken(NOON_S, 0, (Departure((2,), "worker", (), -9, stage="data", step=60, worker=4711, out_of_memory="kernel_log"),), FOLLOWED, world_size=4),
        JobBroken(NOON_S, 0, (Departure((2,), "raised", (), 1, "ValueError", "no sample 17", Place("load", "/job/data.py", 57), "data", 60),), FOLLOWED, 4, restarted=True),
        JobBroken(NOON_S, 1, (Departure((2,), "left", (), 0, step=60),), FOLLOWED[:1], 4),
        JobBroken(NOON_S, 0, (Departure((2,), "died"),), FOLLOWED[:1], 4),
        JobBroken(NOON_S, 0, (Departure((0,), "exited", (), 3, stage="", step=60),)),
        JobBroken(NOON_S, 0, (Departure((1,), "exited", (), 3, stage="data", step=60), Departure((2,), "killed", (), -11, stage="data", step=60)), FOLLOWED[1:], 4),
        JobBroken(NOON_S, 0, (), FOLLOWED, 8),
        JobBroken(NOON_S, 0, (Departure((2, 3), "silent", ("node-1",), stage="backward", step=60),), FOLLOWED[:1], 4),
        JobBroken(NOON_S, 0, (Departure((1,), "killed", (), -6, stage="backward", step=60),), FOLLOWED[:1], 4, mismatch=MISMATCH),
    ],
    JobPaused: [JobPaused(NOON_S, 0, 240, 240, 55.2, "backward", "in_sync"), JobPaused(NOON_S, 0, 240, 242, 190.0, "data", "in_own_work")],
    JournalCompacted: [],
    DifferencesFound: [DifferencesFound(NOON_S, 0, "rank 2", (2,), (0, 1, 3), (Difference("num_workers", 1, 4, 3), Difference("OMP_NUM_THREADS", "1", None, 2)))],
    TakenOver: [TakenOver(NOON_S, "node-1", 4711)],
    CauseFound: [
        CauseFound(NOON_S, "c-2", 2, "sleep", True, "Rank 2 is slow in data: 38.0 of 40.0 ms in load (data.py:57: time.sleep(0.04)), which sleeps; rank 3 spends 0.3 ms there."),
        CauseFound(NOON_S, "c-2", 2, "blocked", False, "Rank 2 is slow in data: 38.0 of 40.0 ms in load (data.py:57: codec.next()), which waits there for an unknown reason."),
    ],
    DiskRecovered: [
        DiskRecovered(NOON_S, NOON_S - 40.0, "No space left on device", late={"windows": 3}),
        DiskRecovered(NOON_S, NOON_S - 40.0, "No space left on device", late={"windows": 3}, lost={"windows": 1, "captures": 2}, lost_steps=(90, 139)),
        DiskRecovered(NOON_S, NOON_S - 40.0, "it does not answer", lost={"windows": 5}, lost_steps=(90, 189), over=False),
    ],
    RemedyChanged: [
        RemedyChanged(time_s=NOON_S, attempt=0, step=139, remedy="stragglar", state=state, reason=reason, rank=2, who="rank 2", where="data", numbers=numbers)
        for numbers in ({"expected_s": 0.046, "on_s": 0.281, "off_s": 0.325, "saves_s": 0.044, "error_s": 0.0016},)
        for state, reason in (("advised", "not_allowed"), ("trying", "worthwhile"), ("kept", "helps"), *(("undone", why) for why in REMEDY_REASONS if why not in ("worthwhile", "helps", "no_room")))
    ] + [
        RemedyChanged(time_s=NOON_S, attempt=0, step=139, remedy="pipeline", state="advised", reason=reason, rank=1, who="the link between ranks 1 and 2", where="the pipeline", numbers={"delay_s": 0.0204, "expected_s": 0.123})
        for reason in ("not_allowed", "no_room", "gone")
    ],
}  # fmt: skip


def events(capsys) -> Rows:
    reporter = Reporter(Console(stderr=True, width=500))
    yield "DiskFailed, on a terminal", event_sentence(DiskFailed(NOON_S, "No space left on device"))
    for kind in get_args(Event):
        for event in TOLD[kind]:
            reporter.take(event)
            reporter.end()
            for line in capsys.readouterr().err.splitlines():
                yield f"{kind.__name__}, on a terminal", line
            if isinstance(event, PolicyChanged):
                for line in change_lines(event):
                    yield f"{kind.__name__}, on a terminal", line
            if kind in get_args(Other):
                for line in on_the_page(event):
                    yield f"{kind.__name__}, on the page", line


def causes() -> Rows:
    for what, causes, steps in (("cause", DOES, NEXT_STEP), ("cause, counted", COUNTED, COUNTED_STEP)):
        for code, does in causes.items():
            for text in (does and f"... {does}.", steps.get(code)):
                if text:
                    yield f"{what}: {code}", text


def first_glance() -> Rows:
    yield from tables({"question: ": QUESTIONS, "healthy? ": {**HEALTH_ANSWERS, "any other": SLOW}})
    for stage in LOOK_AT:
        yield f"slow in {stage or 'all local stages'}", look_at("rank 2", stage, ("node-1",))
    for who, stage, hosts in (("rank 2", "data", [""]), ("host vm (8 ranks)", None, ["vm"]), ("every rank", "x", "ab")):
        yield f"slow, {who}", look_at(who, stage, hosts)
    yield "lengths of time", ", ".join(map(lasted, (0.0, 0.4291, 1.463, 119, 120)))
    yield (
        "what all ranks have lost",
        f"{hours_of_ranks(144.0, on_devices=False)}, {hours_of_ranks(3.7e6, on_devices=True)}",
    )
    later = {**RESOLVES, "sync_ambiguous, the last gradient being on record": AFTER_GRADIENTS, **RESOLUTIONS}
    yield from tables({"once a run has ended: ": {code: texts[-1] for code, texts in later.items() if texts[-1]}})
    placed = {"suspect": ("rank 2", "data"), "alone": ("rank 2", "data"), "shared": ("", "data"), "pause": ("", "data")}
    rows = [TimeRow(code, 3.0 * (20 - n), n + 1, *placed.get(code, ())) for n, code in enumerate(TIME_ROWS)]
    rows += [TimeRow("alone", 2.0, 4, "", "", "evaluation", 40), TimeRow("shared", 1.5, 1, kind="compilation")]
    rows += [TimeRow("shared", 6.0, 4, "", "", LOADER_START, 40), TimeRow("pause", 5.0, 2, "rank 2")]
    for of in rows:
        yield f"time, {of.code}", f"{time_row_name(of)}: {time_row_detail(of)}"
    yield "where the time went", time_sentence(TimeTable(sum(of.seconds for of in rows), tuple(rows)))


def on_the_page(note: Other) -> Iterator[str]:
    """What the page says of an event that is no window and no capture."""
    macros = templates({}, lambda: NOON_S).get_template("macros.html").make_module()
    for paragraph in findall(r"<p[^>]*>(.*?)</p>", macros.noted(note, note_kind(note)), DOTALL)[1:]:
        yield " ".join(unescape(sub(r"<[^>]*>", "", paragraph)).split())


def said_in(path: str, *called: str) -> Iterator[str]:
    """What the calls of these functions in a file are given to say; what is filled in stands in braces."""
    text = (SOURCE / path).read_text(encoding="utf-8")
    if not any(f"{name}(" in text for name in called):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in called:
            for argument in (*node.args, *(one.value for one in node.keywords if one.arg in ("failing", "works"))):
                yield from _texts(argument)


def _texts(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)) if " " in text.strip() or text == "cancelled":
            yield text
        case ast.JoinedStr(values=values):
            parts = [
                one.value if isinstance(one, ast.Constant) else "{" + ast.unparse(one.value) + "}" for one in values
            ]
            if any(isinstance(one, ast.Constant) and " " in one.value for one in values):
                yield "".join(map(str, parts))
        case ast.Starred(value=ast.GeneratorExp(elt=each)):
            yield from _texts(each)
        case ast.IfExp() | ast.BoolOp() | ast.BinOp():
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    yield from _texts(child)


def calls(rooms: str, functions: str) -> Rows:
    """What is said in the files of some rooms, by the file."""
    for path in sorted(str(path.relative_to(SOURCE)) for room in rooms.split() for path in SOURCE.glob(room)):
        for text in said_in(path, *functions.split()):
            yield path, text


def remedies() -> Rows:
    """Advice on a straggler, and on a pipeline: worth the trouble or not, of known messages or not."""
    late = Straggler("rank 3", "data", (3,), 8, 0.05, 0.25)
    messages = Messages(10**9, 1e-5, 1e-10)
    pipeline, absorbed = (Pipeline((0.01,) * 4, (0.02,) * 4, (0.0, delay_s, 0.0), 16) for delay_s in (0.02, 1e-6))
    asked = {
        "a late rank": (late, messages, None),
        "of messages that nobody knows": (late, None, None),
        "hardly late": (replace(late, late_s=1e-4), messages, None),
        "one of two": (replace(late, n_ranks=2, ranks=(1,)), messages, None),
        "a slow link": (None, None, pipeline),
        "a link of which nothing is left to absorb": (None, None, absorbed),
    }
    for what, given in asked.items():
        for line in advice_lines(advice_of(*given)):
            yield what, line


def table(capsys) -> str:
    sections = {
        "Verdicts": verdicts(),
        "What would resolve them": advice(),
        "Decisions": decisions(),
        "Captures": captures(),
        "Why a capture is refused or fails": calls(
            "trainer/*.py agent/*.py runtime/triage.py traces/objects.py traces/store.py",
            "CaptureError _NotBegunError failed _fail _refuse CaptureResult _finish_early",
        ),
        "Explanations": explanations(),
        "Manifests": manifests(),
        "Events": events(capsys),
        "Causes": causes(),
        "Advice": remedies(),
        "The first glance": first_glance(),
        "Conditions of objects in a cluster": tables(CONDITIONS),
        "Findings of the doctor": calls("runtime/doctor.py runtime/preflight.py", "CheckResult FoundCheck"),
        "Lines of commands": calls("commands/*.py runtime/*.py", "say tell write"),
        "Warnings": calls("**/*.py", "warning error warn joined _log_once Loop"),
    }
    lines = []
    for title, rows in sections.items():
        lines += ["", f"== {title}", ""]
        before = ""
        for what, text in rows:
            lines += [*([f"[{what}]"] if what != before else []), f"    {text}"]
            before = what
    return "\n".join(lines[1:]) + "\n"


def test_every_sentence_is_in_the_table_that_people_read(capsys):
    said = table(capsys)
    if os.environ.get("SFTRIAGE_WRITE_SENTENCES"):
        TABLE.write_text(said, encoding="utf-8")
    assert said == TABLE.read_text(encoding="utf-8")


def test_no_code_is_without_a_row():
    assert set(PARAMETERS) == set(SENTENCES) == set(get_args(ReasonCode))
    assert set(RESOLVES) == {*REASONS, *STALLS}
    assert set(RESOLUTIONS) <= set(PARAMETERS)
    assert (set(OUTCOMES), set(NEXT_STEP)) == (set(get_args(Outcome)), set(DOES))
    assert set(TOLD) == set(get_args(Event))


@pytest.mark.parametrize(
    "wrong",
    [
        r"(?<!of )\b1 (?:step|rank|window|capture|time)s\b",
        r" \?|\?\?",
        r"\.\.(?!\.)",
        r"\w  +\w",
        r"-\d+\.\d ms",
        r"rank \d+, \d+ ",
    ],
)
def test_what_no_sentence_says(wrong):
    rows = (*verdicts(), *advice(), *decisions(), *captures())
    assert [line for _, line in rows if search(wrong, line)] == []
