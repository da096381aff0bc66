"""Whether the demo's own fault is what was named."""

import signal
from dataclasses import replace

import pytest

from sftriage.commands.demo import _faults
from sftriage.demo.faults import CAUSES, FAULT_STAGES, Fault, parse_cause
from sftriage.demo.hanging import CAUSE_AFTER_S, HANG_KINDS, STALL_AFTER_S, HangEnd, write_policy
from sftriage.demo.outcome import found, found_hang
from sftriage.model.events import CauseFound, JobObserved, WindowJudged
from sftriage.model.hangs import Blocked, Call, Hang, SourceLine
from sftriage.model.windows import ReadCounts
from sftriage.policy.in_force import find, load
from sftriage.traces.manifest import CauseCode, CauseInfo, PlaceInfo
from tests.scenario import decision, verdict
from tests.unit.policy.making import job_at

SLOW_DISK = Fault("slow-disk", 2)


def cause(code, function="copy_shard"):
    place = PlaceInfo(function=function, file="ways.py", line=3) if function else None
    return CauseInfo(code=code, sure=True, sentence="", next_step="", place=place)


TABLE = {
    # (what the job was given, what was named of which rank) -> what that is
    "what it was given": ([SLOW_DISK], [(2, cause("disk"))], "right"),
    "of another rank": ([SLOW_DISK], [(1, cause("disk"))], "wrong"),
    "another cause": ([SLOW_DISK], [(2, cause("sleep"))], "wrong"),
    "a function of a class": ([SLOW_DISK], [(2, cause("disk", "Trainer.copy_shard"))], "right"),
    "another line": ([SLOW_DISK], [(2, cause("disk", "decode"))], "wrong"),
    "no line, where there is one": ([SLOW_DISK], [(2, cause("disk", ""))], "wrong"),
    "one of two": ([Fault("garbage", 1), SLOW_DISK], [(2, cause("disk"))], "right"),
    "the first counts": ([SLOW_DISK], [(2, cause("sleep")), (2, cause("disk"))], "wrong"),
    "unknown at first": ([SLOW_DISK], [(2, cause("unknown", "")), (2, cause("disk"))], "right"),
    "unknown": ([SLOW_DISK], [(2, cause("unknown", ""))], "not named"),
    "nothing": ([SLOW_DISK], [], "not named"),
    "a delay": ([Fault("data", 1, 0.04)], [(1, cause("sleep", "pause_for"))], "right"),
    "what is of no line": ([Fault("gil-thread", 1)], [(1, cause("gil", ""))], "right"),
    "nothing, of a healthy job": ([], [], None),
    "something, of a healthy job": ([], [(1, cause("sleep"))], "wrong"),
}


@pytest.mark.parametrize(("faults", "causes", "said"), TABLE.values(), ids=TABLE)
def test_the_first_cause_is_right_if_rank_cause_and_line_are(faults, causes, said):
    assert found(faults, causes) == said


HANG_LOCK, HANG_WORKER, HANG_COLLECTIVE = (Fault(f"hang-{name}", 2) for name in ("lock", "worker", "collective"))
LOOKING_UP = SourceLine("Trainer.look_up", "train.py", 3)
READING = SourceLine("Sequences.read_shard", "train.py", 9)
BLOCKED = Blocked(2, "h", "lock", LOOKING_UP)
IN_WORKER = Blocked(2, "h", "worker", SourceLine("train", "train.py", 1), worker=7, worker_at=READING)
GATHER = Call("all_gather", frames=(SourceLine("Trainer.validate", "train.py", 5),))

HANGS = {
    # (what the job was given, how it hangs) -> what that is
    "its lock": (HANG_LOCK, Hang("absent", (2,), blocked=(BLOCKED,)), "right"),
    "its worker": (HANG_WORKER, Hang("absent", (2,), blocked=(IN_WORKER,)), "right"),
    "its collective": (HANG_COLLECTIVE, Hang("different_collective", (2,), call=GATHER), "right"),
    "a worker at no line": (HANG_WORKER, Hang("absent", (2,), blocked=(replace(IN_WORKER, worker_at=None),)), "wrong"),
    "a call at no line": (
        HANG_COLLECTIVE,
        Hang("different_collective", (2,), call=replace(GATHER, frames=())),
        "wrong",
    ),
    "another line": (HANG_LOCK, Hang("absent", (2,), blocked=(IN_WORKER,)), "wrong"),
    "another kind": (HANG_LOCK, Hang("elsewhere", (2,), blocked=(BLOCKED,)), "wrong"),
    "another rank": (HANG_LOCK, Hang("absent", (1,), blocked=(BLOCKED,)), "wrong"),
    "one rank too many": (HANG_LOCK, Hang("absent", (1, 2), blocked=(BLOCKED,)), "wrong"),
    "unknown": (HANG_LOCK, Hang("unknown"), "not named"),
    "nothing": (HANG_LOCK, None, "not named"),
}


@pytest.mark.parametrize(("fault", "hang", "result"), HANGS.values(), ids=HANGS)
def test_a_hang_is_right_if_its_kind_rank_and_line_are(fault, hang, result):
    assert found_hang([Fault("garbage", 1), fault], hang) == result


def test_each_cause_has_codes_that_reduction_can_name():
    assert {cause.stage for cause in CAUSES.values()} <= {*FAULT_STAGES, ""}
    codes = {
        hangs: {code for cause in CAUSES.values() if cause.hangs is hangs for code in cause.codes} for hangs in (0, 1)
    }
    assert codes[False] <= set(CauseCode.__args__)
    assert codes[True] <= HANG_KINDS - {"unknown"}


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_on_its_rank_or_on_a_drawn_one(name):
    assert parse_cause(f"{name}:3") == Fault(name, 3)
    assert parse_cause(name, iter([1])) == Fault(name, 1)
    # AND it says itself as it is parsed
    assert parse_cause(str(Fault(name, 3))) == Fault(name, 3)


def test_several_causes_are_on_different_ranks_as_far_as_possible():
    # GIVEN five causes for two ranks WHEN ranks are drawn THEN each rank has two of four, and none is missing
    ranks = [fault.rank for fault in _faults(["garbage"] * 5, None, 2)]
    assert sorted(ranks[:2]) == sorted(ranks[2:4]) == [0, 1]
    assert ranks[4] in (0, 1)


def test_without_options_the_default_is_injected_and_a_delay_alone_is_alone():
    assert [fault.name for fault in _faults(None, None, 4)] == ["slow-dataset"]
    assert _faults(None, ["data:1:40"], 4) == [Fault("data", 1, 0.04)]
    assert len(_faults(["garbage"], ["data:1:40"], 4)) == 2


def test_the_policy_of_a_hang_reports_a_stall_soon_and_is_otherwise_as_it_was(tmp_path):
    # GIVEN the shipped policies, with and without a detection of their own
    for name in ("default", "hang"):
        # WHEN a demo hangs under one THEN only the time of a stall differs
        before, after = (load(path).policy for path in (find(name), write_policy(find(name), tmp_path)))
        assert after.spec.detection.stalled_after_s == 5.0
        detection = after.spec.detection.model_copy(update={"stalled_after": before.spec.detection.stalled_after})
        assert after.spec.rules == before.spec.rules
        assert after.spec.limits == before.spec.limits
        assert detection == before.spec.detection


STALL = verdict(100, "stalled", reasons=("not_arrived",))
STALLED = WindowJudged(verdict=STALL, decision=decision(STALL))
STALLED_S = STALLED.decision.time_s
CAUSE, OTHER_CAUSE = (
    CauseFound(time_s=STALLED_S, capture_id="c-1", rank=2, code=code, sure=True, sentence="")
    for code in ("absent", "sleep")
)


def observed(time_s):
    return JobObserved(time_s, ReadCounts(), job_at(40), 0.0, 0.0)


ENDS = {
    # (what happens) -> at which of these the job is ended
    "its cause": ([observed(1.0), STALLED, OTHER_CAUSE, CAUSE, CAUSE], 3),
    "no cause in time": (
        [observed(STALLED_S), STALLED, observed(STALLED_S + CAUSE_AFTER_S), observed(STALLED_S + CAUSE_AFTER_S + 1)],
        3,
    ),
    "no stall in time": ([observed(1.0), observed(1.0 + STALL_AFTER_S), observed(2.0 + STALL_AFTER_S)], 2),
    "neither yet": ([observed(1.0), observed(STALL_AFTER_S)], None),
}


@pytest.mark.parametrize(("events", "ended_at"), ENDS.values(), ids=ENDS)
def test_a_job_that_hangs_is_ended_once_after_its_cause_or_without_one_in_time(events, ended_at):
    # GIVEN signals as the launcher takes them, which passes them on
    signals: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, _: signals.append(signum))
    try:
        hang_end, counts = HangEnd(), []
        for event in events:
            hang_end.take(event)
            counts.append(len(signals))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert counts == [int(ended_at is not None and at >= ended_at) for at in range(len(events))]
    assert hang_end.done == (ended_at is not None)
