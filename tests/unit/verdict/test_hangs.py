"""Why a job hangs: a truth table of kinds, real dumps, and faults that come together."""

import json
from dataclasses import replace

import pytest

from sftriage.model.hangs import WorkerEvidence
from sftriage.verdict.hangs import hang_of
from sftriage.words.hangs import hang_sentence

from .hang_cases import (
    DUMPS,
    GATHER,
    GRADIENTS,
    LOSS,
    STEP,
    TORCH,
    call,
    dumped,
    group,
    job,
    library,
    line,
    queue_get,
    rank,
    silent,
    thread,
)

PAIRS = {0: ((0, 1, 1),), 1: ((0, 1, 1),), 2: ((2, 3, 1),), 3: ((2, 3, 1),)}
PAST = STEP * 3


def brief(hang):
    return hang.kind, hang.ranks, hang.number


def others_in(*calls, world=4, odd=2, **fields):
    """All ranks but one, with these last calls."""
    return [rank(number, [*PAST, *calls], **fields) for number in range(world) if number != odd]


# Ranks that disagree


@pytest.mark.parametrize(
    ("mine", "theirs", "kind"),
    [
        (GATHER, GRADIENTS, "different_collective"),
        (call("broadcast", ()), LOSS, "different_collective"),
        (call("barrier", number=8), GRADIENTS, "different_collective"),
        (call(dtype="Half"), GRADIENTS, "different_types"),
        (call("all_reduce", (7,), number=97), LOSS, "different_sizes"),
        (call("broadcast", (7,)), call("broadcast", (8,)), "different_sizes"),
        (call("reduce_scatter", (7,)), call("reduce_scatter", (8,)), "different_sizes"),
        (call("all_gather", (4,)), call("all_gather", (3,)), "different_sizes"),
    ],
)
def test_a_rank_that_calls_what_does_not_fit_is_at_fault(mine, theirs, kind):
    # GIVEN three ranks in a call, and one in another
    hang = hang_of(job(*others_in(theirs), rank(2, [*PAST, mine], host="node-3")))
    # WHEN they are compared, THEN that one is at fault, with both calls
    assert brief(hang) == (kind, (2,), 7)
    assert (hang.call, hang.other_call, hang.others) == (mine, theirs, (0, 1, 3))
    assert (hang.hosts, hang.group, hang.group_ranks) == (("node-3",), "", (0, 1, 2, 3))
    assert hang.numbers == {"hosts": 2}


@pytest.mark.parametrize("ops", [(GATHER, GRADIENTS), (call("all_reduce", (7,)), GRADIENTS)])
@pytest.mark.parametrize("pairs", [1, 2, 3])
def test_of_as_many_on_each_side_none_is_accused(ops, pairs):
    # GIVEN as many ranks in a call as in another, WHEN compared
    hang = hang_of(job(*(rank(number, [*PAST, ops[number % 2]]) for number in range(2 * pairs))))
    # THEN it is a tie, and the lowest rank is not the one named
    assert hang.numbers["tie"] == 1.0
    assert hang.ranks == tuple(range(1, 2 * pairs, 2))
    assert hang.others == tuple(range(0, 2 * pairs, 2))


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (call("all_to_all", (7,)), call("all_to_all", (9,))),
        (call("all_to_all_single", (7,)), call("all_to_all_single", (9,))),
        (replace(call("scatter"), sizes=(), dtypes=()), call("scatter", (3,))),
        (replace(call("broadcast"), sizes=(), dtypes=()), call("broadcast", (3,))),
        (call("gather", (3,)), call("gather", (4,))),
        (call("broadcast", (5,), number=1), call("broadcast", (5,), number=2)),
        (call("_all_gather_base", (5,)), call("all_gather_into_tensor", (5,))),
    ],
)
def test_what_may_differ_is_no_disagreement(mine, theirs):
    # GIVEN a rank whose call differs in what may differ, and that all are in
    hang = hang_of(job(*others_in(theirs), rank(2, [*PAST, mine])))
    # WHEN compared, THEN none is at fault
    assert brief(hang) == ("all_inside", (0, 1, 2, 3), 7)


def test_all_gathers_that_were_uneven_before_may_be_so_again():
    # GIVEN an all_gather of different sizes that ended, and another that does not
    uneven = [call("all_gather", (3,)), call("all_gather", (4,))]
    ranks = [rank(number, [uneven[number == 2], GRADIENTS, uneven[number == 2]]) for number in range(4)]
    # THEN the sizes are not why
    assert hang_of(job(*ranks)).kind == "all_inside"


def test_ranks_that_part_and_agree_again_have_not_parted():
    # GIVEN a call that differed, which all ranks ended, and a rank that is absent many calls later
    calls = [*PAST, LOSS, *STEP * 3]
    late = rank(2, [*PAST, call("broadcast", ()), *STEP * 3][:-1], 0, threads=[queue_get()])
    hang = hang_of(job(*(rank(n, calls) for n in (0, 1, 3)), late))
    # THEN it is absent
    assert brief(hang) == ("absent", (2,), len(calls))


def test_the_call_at_which_some_have_gone_on_is_the_one():
    # GIVEN a rank in a call of another size, which the others have left: they are in the next
    hang = hang_of(job(*others_in(LOSS, GRADIENTS), rank(2, [*PAST, call("all_reduce", (7,), number=97)])))
    assert brief(hang) == ("different_sizes", (2,), 7)
    assert hang.other_call == LOSS


# Ranks that are a call behind, or ahead


@pytest.mark.parametrize("rest", [3, 5, 40])
@pytest.mark.parametrize("same_sizes", [False, True])
def test_a_skipped_call_shows_in_the_calls_after_it(rest, same_sizes):
    # GIVEN three calls a step, in two of which only the line differs, and a rank that has left out the second of them
    second = call(number=92) if same_sizes else LOSS
    steps = [GRADIENTS, second, call("all_reduce", (9,), number=99)] * (rest + 3)
    mine = steps[:4] + steps[5 : 5 + rest * 3]
    theirs = steps[: 6 + rest * 3]
    # WHEN it has come to a call that the others are not in
    hang = hang_of(job(*(rank(n, theirs) for n in (0, 1, 3)), rank(2, mine, 0, threads=[queue_get()])))
    # THEN it has skipped that one, however long ago
    assert brief(hang) == ("skipped", (2,), 5)
    assert (hang.other_call, hang.call, hang.shift) == (second, steps[5], 1)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_extra_calls_show_in_the_calls_after_them(k):
    # GIVEN a rank that calls k more in the second step
    steps = [GRADIENTS, LOSS, call("all_reduce", (9,), number=99)] * 8
    extra = [call("all_reduce", (1,), number=106 + n) for n in range(k)]
    mine = steps[:4] + extra + steps[4:]
    hang = hang_of(job(*(rank(n, steps) for n in (0, 1, 3)), rank(2, mine[: len(steps) + 1])))
    # THEN it is ahead by as many from there on
    assert brief(hang) == ("extra", (2,), 5)
    assert (hang.call, hang.shift) == (extra[0], k)


@pytest.mark.parametrize(
    ("mine", "step", "kind"),
    [
        ([GRADIENTS], 61, "skipped"),  # it should have been in LOSS first
        ([call("all_reduce", (3,), number=106)], 59, "extra"),
        ([call("all_reduce", (3,), number=106)], 60, "different_sizes"),
        ([GATHER], 59, "different_collective"),
        ([call("all_reduce", (3,), number=97)], 61, "different_sizes"),  # the same line
    ],
)
def test_of_ranks_in_the_same_number_the_step_tells(mine, step, kind):
    # GIVEN a rank in another call under the same number, in a step of its own
    hang = hang_of(job(*others_in(GRADIENTS, LOSS, step=60), rank(2, [*PAST, GRADIENTS, *mine], step=step)))
    assert brief(hang) == (kind, (2,), 8)


@pytest.mark.parametrize(("ahead", "kind"), [(1, "skipped"), (-1, "extra")])
def test_where_two_calls_alternate_the_step_tells(ahead, kind):
    # GIVEN ranks whose two calls alternate, one of them out of phase: skipped and extra calls look alike
    mine = [*PAST, *[LOSS, GRADIENTS] * 4]
    hang = hang_of(job(*others_in(*STEP * 4, step=60), rank(2, mine, step=60 + ahead)))
    assert brief(hang) == (kind, (2,), 7)


@pytest.mark.parametrize(
    ("mine", "theirs", "kind"),
    [
        ([GATHER], [call("barrier", number=8), GATHER], "different_collective"),  # another order, perhaps
        ([call("all_reduce", (3,), number=91), GRADIENTS], [GRADIENTS], "different_sizes"),  # of the same line
    ],
)
def test_one_call_alone_shows_no_shift(mine, theirs, kind):
    hang = hang_of(job(*others_in(*theirs), rank(2, [*PAST, *mine])))
    assert brief(hang) == (kind, (2,), 7)


@pytest.mark.parametrize("who", [0, 1])
def test_of_two_ranks_the_one_that_left_out_a_usual_call_has_skipped_it(who):
    # GIVEN a pair, of which one leaves out a call of every step, WHEN it has gone on
    steps = [GRADIENTS, LOSS, call("all_reduce", (9,), number=99)] * 8
    calls = [steps, steps]
    calls[who] = steps[:10] + steps[11:]
    hang = hang_of(job(*(rank(n, calls[n], int(n != who), threads=[queue_get()]) for n in range(2))))
    # THEN it has skipped it, though the other one called it alone
    assert (*brief(hang), hang.other_call, hang.shift) == ("skipped", (who,), 11, LOSS, 1)
    assert "tie" not in hang.numbers


@pytest.mark.parametrize("who", [0, 1])
def test_of_two_ranks_none_is_accused_of_a_call_that_was_never_called_before(who):
    # GIVEN a pair, of which one makes a call that neither made before: has it an extra one, or did the other skip it?
    steps = [GRADIENTS, LOSS, call("all_reduce", (9,), number=99)] * 8
    calls = [steps, steps]
    calls[who] = [*steps[:10], GATHER, *steps[10:]]
    hang = hang_of(job(*(rank(n, calls[n], int(n == who)) for n in range(2))))
    assert (hang.ranks, hang.number, hang.numbers["tie"]) == ((1,), 11, 1.0)
    assert hang.kind == ("extra" if who else "skipped")


def test_calls_that_are_all_alike_show_no_shift():
    # GIVEN one call a step, and a rank that lacks the last
    hang = hang_of(job(*(rank(n, [LOSS] * 9) for n in (0, 1, 3)), rank(2, [LOSS] * 8, 0, threads=[queue_get()])))
    assert brief(hang) == ("absent", (2,), 9)


def test_ranks_that_call_alike_from_other_lines_agree():
    # GIVEN rank 0, which calls every broadcast from a branch of its own; and rank 2, which is absent
    mine, theirs = [call("broadcast", (5,), number=1), LOSS], [call("broadcast", (5,), number=2), LOSS]
    ranks = [rank(n, (mine if n == 0 else theirs) * 20) for n in (0, 1, 3)]
    hang = hang_of(job(*ranks, rank(2, (theirs * 20)[:-1], 0, threads=[queue_get()])))
    assert brief(hang) == ("absent", (2,), 40)
    # AND where all are inside, none is at fault
    assert hang_of(job(*ranks, rank(2, theirs * 20))).kind == "all_inside"


def test_buffers_that_begin_elsewhere_are_compared_where_all_have_calls():
    # GIVEN ranks whose buffers have lost different numbers of calls, one with a call too few since before all of them
    steps = [GRADIENTS, LOSS, call("all_reduce", (9,), number=99)] * 20
    ranks = [rank(n, steps[5 * n : 50], first=5 * n + 1) for n in (0, 1, 3)]
    hang = hang_of(job(*ranks, rank(2, steps[31:51], first=31)))
    # THEN it is behind since the first call that all have, or before
    assert (hang.kind, hang.ranks, hang.shift) == ("skipped", (2,), 1)
    assert (hang.number, hang.numbers["before"]) == (31, 1.0)
    # AND where they agree, the beginning does not matter
    agree = [rank(n, steps[5 * n : 50], first=5 * n + 1) for n in range(4)]
    assert hang_of(job(*agree)).kind == "all_inside"


# Ranks that have not come


ABSENT = [
    ("queue", [queue_get()], {}),
    ("lock", [thread(line(source="with self._lock: pass"))], {}),
    ("stopped", [thread()], {"state": "T"}),
    ("python", [thread(cpu_fraction=0.99)], {}),
    ("file_lock", [thread(syscall="flock", path="/data/shards.lock")], {}),
    ("unknown", [thread()], {}),
]


@pytest.mark.parametrize(("code", "threads", "fields"), ABSENT)
def test_a_rank_that_has_not_come_is_absent_where_it_is(code, threads, fields):
    # GIVEN three ranks in a call to which the fourth has not come
    hang = hang_of(job(*others_in(GRADIENTS), rank(2, PAST, 0, threads=threads, **fields)))
    # THEN it is absent, and does what it does
    assert brief(hang) == ("absent", (2,), 7)
    assert [(at.rank, at.code, at.place) for at in hang.blocked] == [(2, code, threads[0].frames[-1])]
    assert (hang.call, hang.other_call, hang.others) == (None, GRADIENTS, (0, 1, 3))


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"state": "T", "alive": True}, "absent", "stopped"),
        ({"state": "R", "alive": True}, "absent", "native"),
        ({"state": "D", "alive": True}, "absent", "disk"),
        ({"state": "S", "alive": True}, "absent", "unknown"),
        ({"alive": False, "exit_status": -9}, "dead", "unknown"),
        ({"alive": None, "exit_status": 3}, "dead", "unknown"),
        ({"state": "Z"}, "dead", "unknown"),
        ({"alive": None}, "unknown", None),
        ({"state": "S", "threads": (thread(library("all_reduce", TORCH), line()),)}, "unknown", None),
    ],
)
def test_a_rank_that_does_not_answer_is_what_the_kernel_shows(fields, kind, code):
    # GIVEN three ranks in a call, and one without an account of its own
    hang = hang_of(job(*others_in(GRADIENTS), silent(2, **fields)))
    # THEN it is missing only where the kernel shows its process
    assert (hang.kind, [at.code for at in hang.blocked]) == (kind, [code] if code else [])
    assert hang.ranks == ((2,) if code else ())
    assert (hang.reason == "no evidence from rank 2") == (kind == "unknown")


def test_a_rank_without_any_record_is_not_accused():
    # GIVEN a rank of which nothing came, THEN its silence proves nothing
    assert hang_of(job(*others_in(GRADIENTS), world=4)).kind == "unknown"
    # AND it hides no rank that is absent for certain
    absent = rank(1, PAST, 0, threads=[queue_get()])
    assert brief(hang_of(job(rank(0, [*PAST, GRADIENTS]), absent, world=4))) == ("absent", (1,), 7)


def test_a_rank_that_has_left_the_job_is_absent():
    # GIVEN uneven inputs: one rank has left its loop
    left = rank(2, PAST, 0, closed=True, stage=None, threads=[thread(line("main", 120, "time.sleep(600)"))])
    hang = hang_of(job(*others_in(GRADIENTS), left))
    assert brief(hang) == ("absent", (2,), 7)
    assert (hang.blocked[0].code, hang.blocked[0].stage) == ("sleep", None)


def test_what_ranks_have_queued_after_a_call_explains_nothing_while_a_rank_is_missing():
    # GIVEN a device's queue: a call that rank 2 has not come to, and calls after it in which the others differ
    ahead = [rank(n, [*PAST, GRADIENTS, [LOSS, GATHER][n == 3]], 2) for n in (0, 1, 3)]
    assert brief(hang_of(job(*ahead, rank(2, PAST, 0, threads=[queue_get()])))) == ("absent", (2,), 7)


def test_several_silent_ranks_are_not_accused():
    # GIVEN half of the ranks without an answer, though their processes are there: perhaps they cannot answer
    hang = hang_of(job(*(rank(n, [*PAST, LOSS]) for n in (0, 1)), *(silent(n, state="S") for n in (2, 3))))
    assert (hang.kind, hang.reason) == ("unknown", "ranks 2 and 3 do not answer")


def test_a_rank_that_counts_its_calls_but_does_not_record_them_is_compared_by_its_count():
    # GIVEN a rank whose buffer has no calls, but whose group has counted as many as the others have called, or fewer
    def counted(n):
        return replace(rank(2, threads=[queue_get()]), groups=(replace(group([], [], 0), first=n + 1),))

    assert brief(hang_of(job(*others_in(GRADIENTS), counted(6)))) == ("absent", (2,), 7)
    assert hang_of(job(*others_in(GRADIENTS), counted(7))).kind == "all_inside"
    # AND it hides no disagreement of the others
    others = [*others_in(GRADIENTS, world=5), counted(7), rank(5, [*PAST[:5], GATHER, GRADIENTS], [6, 7])]
    assert brief(hang_of(job(*others))) == ("different_collective", (5,), 6)


# Waits that lead to others


def test_ranks_that_wait_for_each_other_in_two_groups_are_elsewhere():
    # GIVEN a rank in a call of its pair, which the other rank of the pair is not in
    away = rank(2, PAST, 0, others=[("2", PAIRS[2], [call("all_reduce", (4,), number=104)], 1)])
    hang = hang_of(job(*others_in(GRADIENTS), away))
    # THEN that is where it waits
    assert brief(hang) == ("elsewhere", (2,), 7)
    assert (hang.elsewhere, hang.elsewhere_ranks, hang.call.frames[0].line) == (("2", 1), (2, 3), 104)
    assert (hang.others, hang.other_call, hang.numbers["circle"]) == ((0, 1, 3), GRADIENTS, 1.0)


def test_of_two_circles_one_is_named():
    # GIVEN two ranks that both wait in their pairs
    pairs = {2: ("2", PAIRS[2]), 5: ("4", ((4, 5, 1),))}
    away = [rank(n, PAST, 0, others=[(*pairs[n], [GATHER], 1)]) for n in pairs]
    hang = hang_of(job(*(rank(n, [*PAST, GRADIENTS]) for n in range(6) if n not in pairs), *away))
    assert (*brief(hang), hang.elsewhere) == ("elsewhere", (2,), 7, ("2", 1))


def test_a_group_of_unknown_members_is_not_complete():
    # GIVEN the same, where the members of the pair are not known
    away = rank(2, PAST, 0, others=[("2", None, [call("all_reduce", (4,), number=104)], 1)])
    assert hang_of(job(*others_in(GRADIENTS), away)).kind == "elsewhere"


def mesh(number, tensors, data, first=0, **fields):
    """A rank of 8 in pairs of tensors, and fours of data: calls of each, and whether the last has not ended."""
    pair, side = number // 2 * 2, number % 2
    groups = [
        (f"tp{pair}", ((pair, pair + 1, 1),), [call(number=10)] * tensors[0], tensors[1]),
        (f"dp{side}", ((side, 6 + side, 2),), [call(number=20)] * data[0], data[1]),
    ]
    return rank(number, [LOSS] * first, 0, others=groups, **fields)


def test_waits_are_followed_through_groups_to_the_rank_that_waits_for_none():
    # GIVEN tensors in pairs and data in fours: rank 5 is in a queue, rank 4 waits for it in the pair, all others wait
    # for rank 4 or 5 in their fours
    ranks = [mesh(n, (5, 0), (5, 1)) for n in (0, 1, 2, 3, 6, 7)]
    ranks += [mesh(4, (5, 1), (4, 0)), mesh(5, (4, 0), (4, 0), threads=[queue_get()])]
    hang = hang_of(job(*ranks))
    # THEN rank 5 is absent in the group in which most wait for it
    assert (hang.kind, hang.ranks, hang.group, hang.group_ranks) == ("absent", (5,), "dp1", (1, 3, 5, 7))
    assert (hang.others, hang.blocked[0].code) == ((1, 3, 7), "queue")


@pytest.mark.parametrize(("odd", "peer", "name"), [(5, 4, "dp1"), (4, 5, "dp0")])
def test_a_circle_of_waits_names_the_rank_without_which_there_were_none(odd, peer, name):
    # GIVEN the same, where rank 5 (or 4) waits in a call of all ranks, to which no other comes
    ranks = [mesh(n, (5, 0), (5, 1), 1) for n in (0, 1, 2, 3, 6, 7)]
    alone = mesh(odd, (4, 0), (4, 0))
    table = [*alone.calls, GATHER]
    alone = replace(alone, calls=tuple(table), groups=(group([LOSS, GATHER], table), *alone.groups[1:]))
    hang = hang_of(job(*ranks, mesh(peer, (5, 1), (4, 0), 1), alone))
    assert (hang.kind, hang.ranks, hang.group, hang.elsewhere) == ("elsewhere", (odd,), name, ("", 2))
    assert hang.call == GATHER
    assert "tie" not in hang.numbers


def test_a_disagreement_in_one_group_is_why_others_wait():
    # GIVEN a pair that disagrees, which the fours wait for
    ranks = [mesh(n, (5, 0), (5, 1)) for n in range(8) if n not in (4, 5)]
    ranks += [mesh(4, (5, 1), (4, 0))]
    odd = mesh(5, (5, 1), (4, 0))
    table = [*odd.calls, GATHER]
    pair = group([call(number=10)] * 4 + [GATHER], table, 1, 1, "tp4", ((4, 5, 1),))
    odd = replace(odd, calls=tuple(table), groups=(odd.groups[0], pair, odd.groups[2]))
    hang = hang_of(job(*ranks, odd))
    assert (hang.kind, hang.group, hang.number, hang.numbers["tie"]) == ("different_collective", "tp4", 5, 1.0)


def receiving(number, peer, calls=(), op="recv", **fields):
    frames = (library(op, TORCH), library("wrapper", "c10d_logger.py"), line("exchange", 30))
    return rank(number, calls, 0, threads=[thread(*frames, peer=peer)], **fields)


def test_a_rank_that_receives_is_absent_with_its_peer():
    # GIVEN a rank that receives from one that waits for it in a collective
    hang = hang_of(job(*others_in(GRADIENTS), receiving(2, 0, PAST)))
    assert brief(hang) == ("absent", (2,), 7)
    assert (hang.blocked[0].code, hang.blocked[0].peer, hang.numbers["circle"]) == ("recv", 0, 1.0)


def test_a_pipeline_that_receives_leads_to_its_first_rank():
    # GIVEN stages that receive from the one before, of which the first is in a queue
    ranks = [rank(0, threads=[queue_get()]), *(receiving(n, n - 1) for n in range(1, 6))]
    hang = hang_of(job(*ranks))
    assert (hang.kind, hang.ranks, hang.others) == ("absent", (0,), (1, 2, 3, 4, 5))
    assert (hang.number, hang.group_ranks, hang.blocked[0].code) == (None, (), "queue")


def test_ranks_that_receive_from_each_other_are_a_circle():
    # GIVEN two ranks that both receive from the other, and a third that waits for one
    hang = hang_of(job(receiving(0, 1), receiving(1, 0), receiving(2, 1)))
    assert (hang.kind, hang.ranks, hang.others, hang.numbers["circle"]) == ("absent", (0, 1), (2,), 1.0)


def test_a_file_lock_leads_to_the_rank_that_holds_it():
    # GIVEN three ranks that wait for a lock that process 102, rank 2, holds, which is in a queue
    waiting = [rank(n, threads=[thread(syscall="flock", held_by="process 102")]) for n in (0, 1, 3)]
    hang = hang_of(job(*waiting, rank(2, threads=[queue_get()])))
    assert (hang.kind, hang.ranks, hang.others, hang.blocked[0].code) == ("absent", (2,), (0, 1, 3), "queue")


def unrecorded(number, calls=()):
    frames = (library("wait", TORCH), library("monitored_barrier", TORCH), line("validate", 60))
    return rank(number, calls, 0, threads=[thread(*frames)])


def test_a_collective_that_is_not_recorded_is_where_a_rank_is():
    # GIVEN a rank in a monitored_barrier, which no flight recorder has, and the others in another call
    hang = hang_of(job(*others_in(GRADIENTS), unrecorded(2, PAST)))
    assert (*brief(hang), hang.blocked[0].code) == ("absent", (2,), 7, "collective")
    # AND the other way round, THEN the majority is not at fault
    hang = hang_of(job(*(unrecorded(n, PAST) for n in (0, 1, 3)), rank(2, [*PAST, GRADIENTS])))
    assert (hang.kind, hang.ranks, hang.others, hang.elsewhere) == ("elsewhere", (2,), (0, 1, 3), ("", 7))
    assert (hang.call, hang.other_call.op) == (GRADIENTS, "monitored_barrier")


# No rank is missing, or all are


def test_a_call_that_all_are_in_is_the_networks():
    hang = hang_of(job(*(rank(n, [*PAST, GRADIENTS]) for n in range(4))))
    assert brief(hang) == ("all_inside", (0, 1, 2, 3), 7)
    assert (hang.call, hang.others, hang.other_call) == (GRADIENTS, (), None)


def test_ranks_that_all_wait_for_a_file_are_absent_together():
    waiting = [rank(n, threads=[thread(syscall="flock", path="/s.lock", held_by="process 9")]) for n in range(4)]
    hang = hang_of(job(*waiting))
    assert (hang.kind, hang.ranks, hang.others) == ("absent", (0, 1, 2, 3), ())
    assert {(at.code, at.about, at.held_by) for at in hang.blocked} == {("file_lock", "/s.lock", "process 9")}


def test_ranks_that_wait_for_different_things_are_unknown():
    hang = hang_of(job(rank(0, threads=[queue_get()]), rank(1, threads=[thread(syscall="flock")])))
    assert (hang.kind, hang.ranks, [at.code for at in hang.blocked]) == ("unknown", (), ["queue", "file_lock"])


# Without a flight recorder


def stack(number, op, **fields):
    frames = (library("wait", TORCH), library(op, TORCH), line(number=50 + len(op)))
    return silent(number, answered=True, threads=(thread(*(frames if op else frames[2:])),), **fields)


BACKWARD = silent(
    0, answered=True, threads=(thread(library("_engine_run_backward", "torch/autograd/graph.py"), line()),)
)


@pytest.mark.parametrize(
    ("ranks", "kind", "culprits"),
    [
        ([stack(n, "all_reduce") for n in range(3)], "all_inside", (0, 1, 2)),
        ([stack(0, "all_reduce"), stack(1, "all_gather"), stack(2, "all_reduce")], "different_collective", (1,)),
        ([stack(0, "barrier"), silent(1, answered=True, threads=(queue_get(),)), BACKWARD], "absent", (1,)),
        ([stack(0, "barrier"), silent(1, alive=False), BACKWARD], "dead", (1,)),
        ([stack(0, "barrier"), silent(1), stack(2, "barrier")], "unknown", ()),
        ([stack(1, "barrier"), BACKWARD], "unknown", ()),
    ],
)
def test_stacks_alone_tell_by_function(ranks, kind, culprits):
    ranks = [replace(each, rank=number) for number, each in enumerate(ranks)]
    hang = hang_of(job(*ranks))
    assert (hang.kind, hang.ranks, hang.number) == (kind, culprits, None)


def test_stacks_in_several_groups_do_not_accuse():
    groups = tuple(group([], [], 0, 1, name, members) for name, members in (("0", None), ("1", PAIRS[0])))
    ranks = [replace(stack(n, op), groups=groups) for n, op in enumerate(["all_reduce", "all_gather", "all_reduce"])]
    assert hang_of(job(*ranks)).kind == "unknown"


def test_no_evidence_at_all_is_unknown():
    assert hang_of(job(world=4)).kind == "unknown"
    assert hang_of(job(*(silent(n) for n in range(4)))).reason == "no evidence from ranks 0, 1, 2 and 3"


# Two faults, and many ranks


def test_the_call_that_most_wait_in_is_the_one_named():
    # GIVEN a source that waits in a broadcast, which the others left at once: they wait in the next call for rank 2
    ranks = [rank(0, [*PAST, LOSS]), *others_in(LOSS, GRADIENTS)[1:], rank(2, PAST, 0, threads=[queue_get()])]
    hang = hang_of(job(*ranks))
    assert brief(hang) == ("absent", (2,), 8)
    assert (hang.others, hang.other_call) == ((1, 3), GRADIENTS)


def test_a_rank_that_does_not_join_a_new_group_is_absent():
    frames = (library("_store_based_barrier", TORCH), library("new_group", TORCH), line("setup", 12))
    hang = hang_of(job(*(rank(n, threads=[thread(*frames)]) for n in (0, 1, 3)), rank(2, threads=[queue_get()])))
    assert (hang.kind, hang.ranks, hang.others, hang.other_call.op) == ("absent", (2,), (0, 1, 3), "new_group")


def test_two_absent_ranks_are_both_named():
    ranks = others_in(GRADIENTS, world=8, odd=2)[:-1]
    late = [rank(2, PAST, 0, threads=[queue_get()]), rank(7, PAST, 0, threads=[thread(syscall="flock")])]
    hang = hang_of(job(*ranks, *late))
    assert brief(hang) == ("absent", (2, 7), 7)
    assert [at.code for at in hang.blocked] == ["queue", "file_lock"]


def test_a_dead_rank_comes_before_an_absent_one():
    ranks = others_in(GRADIENTS, world=8, odd=2)[:-1]
    hang = hang_of(job(*ranks, rank(2, PAST, 0, threads=[queue_get()]), silent(7, alive=False, exit_status=-9)))
    assert (hang.kind, hang.ranks, hang.blocked[0].exit_status) == ("dead", (7,), -9)


def test_a_rank_that_hangs_at_its_exit_is_not_dead():
    # GIVEN a rank that has closed its ring, and whose process is there
    late = silent(3, alive=False, state="S", threads=[thread(library("_shutdown", "python3/threading.py"))])
    hang = hang_of(job(*others_in(GRADIENTS, odd=3), late))
    assert (*brief(hang), hang.blocked[0].code) == ("absent", (3,), 7, "thread")


def test_ranks_that_a_launcher_ended_are_not_those_that_failed():
    ends = {2: -6, 3: -15, 5: 0}
    ranks = [silent(n, exit_status=ends[n], alive=False) if n in ends else rank(n, [*PAST, LOSS]) for n in range(8)]
    assert brief(hang_of(job(*ranks))) == ("dead", (2,), 7)
    # AND where all have ended, there is no hang to explain
    assert hang_of(job(*(silent(n, exit_status=1) for n in range(4)))).reason == "all ranks have ended"


def test_of_two_missing_ranks_the_one_that_may_wait_for_a_rank_is_not_the_cause():
    # GIVEN a rank in a queue, and another that receives from a rank that is not known
    late = [rank(2, PAST, 0, threads=[queue_get()]), receiving(3, None, PAST)]
    assert brief(hang_of(job(*others_in(GRADIENTS)[:2], *late))) == ("absent", (2,), 7)


def test_one_of_many_ranks_is_found():
    ranks = [rank(n, [*PAST, GATHER if n == 41 else GRADIENTS], host=f"node-{n // 8}") for n in range(64)]
    hang = hang_of(job(*ranks))
    assert (*brief(hang), hang.hosts, hang.numbers) == ("different_collective", (41,), 7, ("node-5",), {"hosts": 8})


def test_a_worker_of_a_loader_explains_an_absent_rank():
    loader = thread(library("_try_get_data", "torch/utils/data/dataloader.py"), line(number=70))
    worker = WorkerEvidence(900, "T", threads=(thread(line("__getitem__", 19)),))
    hang = hang_of(job(*others_in(GRADIENTS), rank(2, PAST, 0, threads=[loader], workers=(worker,))))
    (at,) = hang.blocked
    assert (at.code, at.worker, at.worker_state, at.worker_at.line) == ("worker", 900, "T", 19)


# Real jobs


@pytest.mark.skipif(not DUMPS.is_dir(), reason="there are no dumps beside this checkout, in ../shared/hangs")
@pytest.mark.parametrize(
    ("name", "found", "code", "place"),
    [
        ("different", ("different_collective", (2,), 126), None, 52),
        ("op", ("different_collective", (2,), 127), None, 95),
        ("shape", ("different_sizes", (2,), 127), None, 97),
        ("subgroup", ("elsewhere", (2,), 128), None, 104),
        ("locks", ("absent", (2,), 126), "lock", 48),
        ("queue", ("absent", (2,), 126), "queue", 77),
    ],
)
def test_real_dumps_tell_kind_rank_and_line(name, found, code, place):
    # GIVEN what all ranks of a real job could tell, WHEN joined
    hang = hang_of(dumped(json.loads((DUMPS / f"{name}.json").read_text())))
    # THEN kind, rank, collective and line are those of the fault
    assert brief(hang) == found
    assert (hang.blocked[0].place if code else hang.call.frames[0]).line == place
    assert code is None or hang.blocked[0].code == code


@pytest.mark.parametrize(
    ("roots", "found"),
    [
        ((0, 0, 2, 0), ("different_collective", (2,), "broadcast from rank 2", "broadcast from rank 0")),
        ((0, 0, 2, 2), ("different_collective", (2, 3), "broadcast from rank 2", "broadcast from rank 0")),
        ((0, 0, 0, 0), ("all_inside", (0, 1, 2, 3), "broadcast from rank 0", "")),
        ((0, 0, 0, None), ("all_inside", (0, 1, 2, 3), "broadcast", "")),
        ((0, 0, 2, None), ("different_collective", (2,), "broadcast from rank 2", "broadcast from rank 0")),
    ],
)
def test_ranks_that_name_different_roots_disagree(roots, found):
    # GIVEN ranks that all wait in the same broadcast, whose roots only their stacks have
    ranks = [
        rank(n, [*STEP, call("broadcast")], threads=[thread(library("broadcast", TORCH), line(), peer=root)])
        for n, root in enumerate(roots)
    ]
    hang = hang_of(job(*ranks))
    # THEN the minority is named with its root
    calls = [each.op if each else "" for each in (hang.call, hang.other_call)]
    assert (hang.kind, hang.ranks, *calls) == found
    assert bool(hang.numbers.get("tie")) == (roots in ((0, 0, 2, 2), (0, 0, 2, None)))


@pytest.mark.parametrize(
    ("roots", "found"),
    [
        ((0, None, 2, None), ("different_collective", (2,), (0,), "broadcast from rank 2")),
        ((None, None, None, 3), ("all_inside", (3,), (0, 1, 2), "broadcast from rank 3")),
    ],
)
def test_ranks_that_have_left_a_collective_may_have_named_any_root(roots, found):
    # GIVEN ranks in a broadcast, with their roots, and others that are in the next call
    ranks = [
        rank(
            n,
            [*STEP, call("broadcast"), *[LOSS][: root is None]],
            threads=[thread(library("broadcast", TORCH), line(), peer=root)],
        )
        for n, root in enumerate(roots)
    ]
    hang = hang_of(job(*ranks))
    # THEN no majority accuses a rank, and the network is not all that may be stuck
    assert (hang.kind, hang.ranks, hang.others, hang.call.op) == found
    assert "tie" in hang.numbers or "different roots" in hang_sentence(hang)


def test_each_of_several_calls_is_named_with_its_ranks():
    # GIVEN two ranks that each call another thing, WHEN compared
    calls = [LOSS, call("broadcast", (2,)), LOSS, GATHER, LOSS]
    hang = hang_of(job(*(rank(n, [*PAST, each]) for n, each in enumerate(calls))))
    # THEN both are at fault, each with its own call
    assert (brief(hang), hang.others) == (("different_collective", (1, 3), 7), (0, 2, 4))
    assert hang.sides == (((1,), calls[1]), ((3,), GATHER))
    assert "tie" not in hang.numbers


def test_of_many_calls_none_is_the_usual():
    # GIVEN ranks that all call something else
    calls = [call("barrier"), call("broadcast", (2,)), GATHER, LOSS]
    hang = hang_of(job(*(rank(n, [*PAST, each]) for n, each in enumerate(calls))))
    assert (hang.ranks, hang.others, hang.numbers["tie"]) == ((1, 2, 3), (0,), 1.0)


def test_the_others_are_those_at_the_same_line():
    # GIVEN a majority that calls the same collective from two lines
    calls = [GRADIENTS, GRADIENTS, call(number=40), GATHER]
    hang = hang_of(job(*(rank(n, [*PAST, each]) for n, each in enumerate(calls))))
    # THEN the line that is named is theirs
    assert (brief(hang), hang.others, hang.other_call) == (("different_collective", (3,), 7), (0, 1), GRADIENTS)


@pytest.mark.parametrize("sizes", [((), (1,)), ((2, 6), (12,))])
def test_as_many_elements_in_another_shape_are_no_disagreement(sizes):
    hang = hang_of(job(*(rank(n, [*PAST, call("all_reduce", sizes[n == 2], number=40 + n)]) for n in range(4))))
    assert hang.kind == "all_inside"


def test_two_that_use_two_groups_in_another_order_wait_for_each_other():
    # GIVEN ranks 1 and 2 in two groups of them, each in another first, and two that wait for both
    both, here = ((1, 2, 1),), call(number=11)
    waiting = [rank(n, [*PAST, LOSS]) for n in (0, 3)]
    crossed = [rank(n, PAST, 0, others=[("12"[n - 1], both, [here], 1), ("21"[n - 1], both, [], 0)]) for n in (1, 2)]
    hang = hang_of(job(*waiting, *crossed))
    # THEN the call of the two that wait does not hide the circle
    assert (hang.kind, hang.ranks, hang.others, hang.elsewhere) == ("elsewhere", (2,), (1,), ("2", 1))
    assert hang.awaited == (1,)


def test_a_call_in_a_larger_group_keeps_those_waiting_that_it_waits_for():
    # GIVEN rank 1 in a call of all ranks, and rank 3 in another there, while ranks 0 and 2 wait for rank 1 in a group
    members = ((0, 2, 1),)
    ranks = [rank(n, PAST, 0, others=[("1", members, [LOSS], 1)]) for n in (0, 2)]
    ranks += [rank(1, [*PAST, call("all_reduce", (2,))], others=[("1", members, [], 0)]), rank(3, [*PAST, LOSS])]
    hang = hang_of(job(*ranks))
    # THEN it is elsewhere, whatever rank 3 calls
    assert (hang.kind, hang.ranks, hang.others, hang.awaited) == ("elsewhere", (1,), (0, 2), (0, 2))


def test_a_rank_that_creates_a_group_keeps_others_waiting():
    # GIVEN a collective of a pair that one has left, and a rank in new_group
    pair = ("1", ((0, 1, 1),), [LOSS])
    ranks = [rank(0, PAST, 0, others=[(*pair, 1)]), rank(1, [*PAST, LOSS], others=[(*pair, 0)]), rank(2, [*PAST, LOSS])]
    hang = hang_of(job(*ranks, rank(3, PAST, 0, threads=[thread(library("new_group", TORCH), line(number=35))])))
    # THEN the network is not blamed
    assert (brief(hang), hang.others) == (("absent", (3,), 7), (1, 2))
    assert hang.blocked[0].about == "new_group"


def test_a_rank_at_a_line_of_its_own_keeps_those_in_transfers_waiting():
    # GIVEN ranks in point-to-point calls of a pipeline whose peers are not known, and a rank that sleeps
    inside = library("_wait_batch_p2p", "site-packages/torch/distributed/pipelining/schedules.py")
    ranks = [rank(n, PAST, 0, threads=[thread(inside, line())]) for n in (0, 1, 3)]
    asleep = rank(2, PAST, 0, threads=[thread(line(source="time.sleep(9)"))])
    hang = hang_of(job(*ranks, asleep))
    assert (hang.kind, hang.ranks, hang.others) == ("absent", (2,), (0, 1, 3))
