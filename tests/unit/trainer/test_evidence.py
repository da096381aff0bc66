"""A rank's evidence of a hang, from what its flight recorders have: as torch 2.13 has entries, also those of NCCL."""

import json
import sys
from types import ModuleType

import msgspec
import pytest

from sftriage.model.hangs import GroupCalls, RankEvidence, SourceLine, ThreadEvidence
from sftriage.trainer import evidence
from sftriage.trainer.evidence import MAX_ANSWER_BYTES, Found, Group, bounded, calls_of, ranges

PROGRAM = [
    {
        "name": "all_reduce",
        "filename": "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
        "line": 9,
    },
    {"name": "train", "filename": "/home/me/train.py", "line": 91},
    {"name": "main", "filename": "/home/me/train.py", "line": 7},
]


def entry(number: int, op: str = "all_reduce", **more: object) -> dict[str, object]:
    """A call that has ended, in the default group of NCCL."""
    default = {"process_group": ("0", "default_pg"), "pg_id": 0, "frames": PROGRAM, "is_p2p": False, "retired": True}
    about = {"profiling_name": f"nccl:{op}", "collective_seq_id": number, "state": "completed", "timeout_ms": 600_000}
    return {**default, **about, "input_sizes": [[3]], "input_dtypes": ["Float"], **more}


OPEN = {"retired": False, "state": "started"}
DEFAULT = Group("0", "default_pg", (0, 1, 2, 3), frozenset({"nccl"}))
GROUPS = {"0": DEFAULT}


def test_equal_calls_share_a_record_and_keep_the_programs_own_frames():
    entries = [entry(1), entry(2, "broadcast"), entry(3), entry(4, **OPEN)]
    calls, groups, timeout_s = calls_of(entries, GROUPS, None)
    assert [call.op for call in calls] == ["all_reduce", "broadcast"]
    assert calls[0].frames == (
        SourceLine("train", "/home/me/train.py", 91, own=True),
        SourceLine("main", "/home/me/train.py", 7, own=True),
    )
    assert groups == (GroupCalls("0", "default_pg", ((0, 3, 1),), 1, (0, 1, 0, 0), (4,)),)
    assert timeout_s == 600.0


def test_a_call_that_torch_makes_for_objects_has_the_function_of_the_program():
    frames = [PROGRAM[0] | {"name": "all_gather"}, PROGRAM[0] | {"name": "all_gather_object"}, *PROGRAM[1:]]
    (call,), _, _ = calls_of([entry(1, "all_gather", frames=frames)], GROUPS, None)
    assert (call.op, call.function, call.frames[0].line) == ("all_gather", "all_gather_object", 91)


def test_frames_of_an_installed_program_are_its_own():
    (call,), _, _ = calls_of([entry(1)], GROUPS, "/v/lib/python3.11/site-packages/torch/")
    assert call.frames[0].function == "all_reduce"


@pytest.mark.parametrize(
    ("entries", "first", "calls", "pending"),
    [
        # the buffer wrapped
        ([entry(501), entry(502)], 501, (0, 0), ()),
        # a number that is missing
        ([entry(5), entry(8)], 5, (0, -1, -1, 0), ()),
        # coalesced calls share a number, of which one has not ended
        ([entry(1, "_allgather_base"), entry(1, "coalesced", **OPEN)], 1, (0,), (1,)),
        # point-to-point calls have no number of their own
        ([entry(1), entry(1, "send 0->1", is_p2p=True, **OPEN), entry(2)], 1, (0, 0), ()),
        # the group was destroyed and created anew
        ([entry(1), entry(2, **OPEN), entry(1, pg_id=4), entry(2, pg_id=4)], 1, (0, 0), ()),
        # both recorders have the same
        ([entry(1), entry(2), entry(1), entry(2)], 1, (0, 0), ()),
        # it ended by its state, which the watchdog has not noticed yet
        ([entry(1, retired=False)], 1, (0,), ()),
    ],
)
def test_a_groups_run_of_calls(entries, first, calls, pending):
    _, (group,), _ = calls_of(entries, GROUPS, None)
    assert (group.first, group.calls, group.pending) == (first, calls, pending)


def test_two_backends_of_a_group_count_their_own_calls():
    # GIVEN a group with NCCL for the GPU and Gloo for the CPU
    both = {"0": Group("0", "default_pg", (0, 1), frozenset({"nccl", "gloo"}))}
    _, groups, _ = calls_of([entry(1), entry(1, profiling_name="gloo:barrier", **OPEN)], both, None)
    # THEN they are two groups, with the same members
    assert [(group.name, group.pending, group.members) for group in groups] == [
        ("0", (), ((0, 1, 1),)),
        ("0/gloo", (1,), ((0, 1, 1),)),
    ]


def test_groups_without_calls_have_their_members_and_groups_that_are_gone_are_left_out():
    other = Group("1", "pair", (0, 2), frozenset({"nccl"}), n_calls=3)
    gone = entry(1, process_group=("7", "old"))
    _, groups, _ = calls_of([entry(1), gone], {**GROUPS, "1": other}, None)
    # (the recorder has none of the three calls any more)
    assert [(group.name, group.members, group.first) for group in groups] == [
        ("0", ((0, 3, 1),), 1),
        ("1", ((0, 2, 2),), 4),
    ]
    # AND one that is gone while it waits is there
    _, groups, _ = calls_of([gone | OPEN], GROUPS, None)
    assert [(group.name, group.members) for group in groups] == [("7", None), ("0", ((0, 3, 1),))]


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ((0,), ((0, 0, 1),)),
        (range(1024), ((0, 1023, 1),)),
        (range(3, 64, 8), ((3, 59, 8),)),
        ((0, 1, 2, 10, 20, 30), ((0, 2, 1), (10, 30, 10))),
        ((), None),
        ([number**2 for number in range(600)], None),
    ],
)
def test_ranks_as_ranges(ranks, found):
    assert ranges(ranks) == found
    if found:
        assert sorted(ranks) == [rank for first, last, step in found for rank in range(first, last + 1, step)]


def test_a_pending_call_to_one_rank_names_it_by_its_rank_in_the_job(monkeypatch):
    # GIVEN a call that receives from the first of ranks 4 to 7
    monkeypatch.setattr(evidence, "_groups", lambda: {"0": Group("0", "default_pg", (4, 5, 6, 7), frozenset({"nccl"}))})
    monkeypatch.setattr(evidence, "_entries", lambda: ([entry(0, "recv 1<-0", is_p2p=True, **OPEN)], ""))
    found = Found(threads=(ThreadEvidence("MainThread", True, ()),))
    evidence._add_calls(found, None)
    assert (found.threads[0].wait.peer, found.problems) == (4, [])


def decoded(found: Found) -> RankEvidence:
    text = json.dumps(bounded(found))
    assert len(text) <= MAX_ANSWER_BYTES * 1.1
    return msgspec.convert(json.loads(text) | {"rank": 0, "host": "h", "pid": 1}, RankEvidence)


def test_an_answer_that_would_be_too_long_loses_its_oldest_calls_first():
    # GIVEN calls that all differ, more than fit WHEN they are answered
    entries = [entry(number, input_sizes=[[number] * 100]) for number in range(1, 2000)] + [entry(2000, **OPEN)]
    calls, groups, _ = calls_of(entries, GROUPS, None)
    thread = ThreadEvidence("MainThread", True, (SourceLine("train", "/home/me/train.py", 91, own=True),))
    found = decoded(Found((thread,), calls, groups))
    # THEN the latest are there by their numbers, with the call that has not ended, and the threads
    (group,) = found.groups
    assert group.first > 1
    assert (group.first + len(group.calls) - 1, group.pending, found.threads) == (2000, (2000,), (thread,))
    assert [found.calls[at].sizes[0][0] for at in group.calls[:-1]] == list(range(group.first, 2000))


def test_an_answer_that_is_too_long_for_other_reasons_keeps_the_main_thread():
    frames = tuple(SourceLine("f" * 1000, "/home/me/train.py", line) for line in range(64))
    main, *others = (ThreadEvidence(f"t{number}", not number, frames) for number in range(16))
    found = decoded(Found((main, *others)))
    assert found.threads == (main, *others[:3])
    # AND one that is too long whatever is left out says so
    found = decoded(Found((ThreadEvidence("x" * (1 << 20), True, ()),)))
    assert (found.threads, found.problem.partition(" 1")[0]) == ((), "its evidence has")


def test_a_part_that_fails_or_blocks_costs_only_itself(monkeypatch):
    # GIVEN a flight recorder that fails
    monkeypatch.setattr(evidence, "_entries", lambda: 1 / 0)
    found = Found()
    evidence.collect(found, detail=False)
    assert found.threads[0].main
    assert found.problems == ["the flight recorder: ZeroDivisionError('division by zero')"]
    # AND one that is still blocked since the last request is not tried again
    monkeypatch.setitem(evidence._under_way, "the flight recorder", None)
    answered = evidence.answer(detail=False)
    assert answered["problem"] == "the flight recorder took too long"
    assert answered["threads"][0]["main"]


class Recorder(ModuleType):
    """torch's core, whose recorder looks for ``torch._inductor`` and raises what an older one does."""

    def __init__(self, found: list[object]) -> None:
        super().__init__("torch._C._distributed_c10d")
        self.found = found

    def _dump_fr_trace(self, *arguments: object) -> bytes:
        if arguments:
            raise TypeError("no arguments")
        torch = sys.modules["torch"]
        self.found.append(hasattr(getattr(torch, "_inductor", None), "codecache"))
        return json.dumps({}).encode()


def test_a_dump_imports_nothing(monkeypatch):
    # GIVEN a torch that would import its compiler when a recorder looks for it
    torch, found = ModuleType("torch"), []
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", Recorder(found))
    monkeypatch.setattr(evidence.pickle, "loads", json.loads)
    # WHEN its entries are read, also by an older function without arguments THEN it finds none, and nothing is left
    assert evidence._entries() == ([], "")
    assert (found, "_inductor" in vars(torch)) == ([False], False)


def test_a_torch_without_a_flight_recorder_says_so(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._C._distributed_c10d", raising=False)
    assert evidence._entries() == ([], "this torch has no flight recorder")
