"""Whether the demo's own fault is what was named."""

import pytest

from sftriage.commands.demo import _faults
from sftriage.demo.faults import CAUSES, FAULT_STAGES, Fault, parse_cause
from sftriage.demo.outcome import found
from sftriage.traces.manifest import CauseCode, CauseInfo, PlaceInfo

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


def test_each_cause_has_codes_that_reduction_can_name():
    assert {cause.stage for cause in CAUSES.values()} <= {*FAULT_STAGES, ""}
    assert {code for cause in CAUSES.values() for code in cause.codes} <= set(CauseCode.__args__)


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
