"""When the evidence of a pause proves a hang, when to gather it again, and from when on a timeout is near."""

from dataclasses import replace

import pytest

from sftriage.verdict.hangs import hang_of
from sftriage.verdict.proof import before_timeout_s, snapshot_of
from tests.unit.verdict.hang_cases import GATHER, GRADIENTS, LOSS, STEP, TORCH, call, job, library, line, rank, thread
from tests.unit.verdict.test_hangs import receiving

S = 1_000_000_000
BEGAN = 1000 * S
PAST = STEP * 3
EVALUATES = (thread(library("forward", "site-packages/torch/nn/modules/linear.py"), line(number=40)),)
SLEEPS = (thread(line(number=40, source="time.sleep(1000)"), syscall="clock_nanosleep"),)


def of(evidence):
    return replace(evidence, hang=hang_of(evidence))


def snapshots(*evidence, every_s=2.0, took_s=0.5):
    """The snapshots of evidence, gathered at these intervals."""
    found = [None]
    for at, each in enumerate(evidence):
        began_ns = BEGAN + int(at * every_s * S)
        found.append(snapshot_of(of(each), began_ns, began_ns + int(took_s * S), found[-1]))
    return found[1:]


def ranks(odd, rest=((*PAST, GRADIENTS),), **fields):
    """Four ranks, of which rank 2 has called ``odd``, and the others ``rest``."""
    return job(*(rank(at, odd if at == 2 else rest[0], **(fields if at == 2 else {})) for at in range(4)))


def locked(*circle, names=("MainThread", "refresh", "flush")):
    """The threads of a rank, of which each waits for a lock that the numbered one holds; None: it works."""
    waits = [{} if at is None else {"lock": "x", "held_by": f"thread {names[at]}"} for at in circle]
    return tuple(thread(line(), main=not at, name=names[at], **wait) for at, wait in enumerate(waits))


def pair(number, *, calls, threads=None):
    """A rank that waits in the groups that it has calls in, of two of all ranks."""
    blocked = (thread(library("all_reduce", TORCH), line()),)
    groups = [(name, PAIRS_OF_ALL, [GRADIENTS], 1 if name in calls else 0) for name in calls]
    return rank(number, PAST, 0, others=groups, threads=threads or blocked)


PAIRS_OF_ALL = ((0, 3, 1),)
CROSSED = [("1",), ("1",), ("1",), ("2",)]
UNEVEN = call("all_gather", (3,)), call("all_gather", (7,))

HANGS = {
    "another collective": ranks([*PAST, GATHER]),
    "other sizes": ranks([*PAST, call("all_reduce", (7,))]),
    "other types": ranks([*PAST, call(dtype="Half")]),
    "other sizes, with one rank that evaluates": job(
        rank(0, PAST, 0, threads=EVALUATES), rank(1, [*PAST, GRADIENTS]), rank(2, [*PAST, GATHER]), world=3
    ),
    "a skipped call": ranks([*PAST, *STEP * 2], ([*PAST, GATHER, *STEP * 2][:-1],)),
    "a dead rank": job(rank(0, [*PAST, GRADIENTS]), rank(1, [*PAST, GRADIENTS]), rank(2, PAST, 0, exit_status=3)),
    "a stopped rank": ranks(PAST, pending=0, state="T"),
    "a lock that its own thread holds": ranks(PAST, pending=0, threads=locked(0)),
    "two threads with each other's lock": ranks(PAST, pending=0, threads=locked(1, 0)),
    "a lock behind two others": ranks(PAST, pending=0, threads=locked(1, 2, 1)),
    "groups in different orders": job(*(pair(at, calls=calls) for at, calls in enumerate(CROSSED))),
}
HEALTHY = {
    "an evaluation": ranks(PAST, pending=0, threads=EVALUATES),
    "a sleep": ranks(PAST, pending=0, threads=SLEEPS),
    "a traced rank": ranks(PAST, pending=0, state="t"),
    "a lock whose holder works": ranks(PAST, pending=0, threads=locked(1, None)),
    "threads of one name": ranks(PAST, pending=0, threads=locked(1, 0, names=("a", "a"))),
    "a call that all are in": ranks([*PAST, GRADIENTS]),
    "an uneven all_gather": ranks([*PAST, UNEVEN[0]], ([*PAST, UNEVEN[1]],)),
    "a call that ranks have left, with other types": ranks(
        [*PAST, call(dtype="Half"), LOSS], ([*PAST, GRADIENTS, LOSS],), pending=1
    ),
    "ranks that pass each other messages": job(receiving(0, 1), receiving(1, 0)),
    "all ranks at work": job(*(rank(at, PAST, 0, threads=EVALUATES) for at in range(3))),
    "groups in different orders, with a rank that works": job(
        *(pair(at, calls=calls, threads=EVALUATES if at == 3 else None) for at, calls in enumerate(CROSSED))
    ),
    "a rank that stopped before any waits": job(rank(0, PAST, 0, state="T"), rank(1, PAST, 0, state="T")),
    "no evidence": job(),
}


@pytest.mark.parametrize("name", HANGS)
def test_what_no_healthy_job_shows_is_proved_by_two_snapshots(name):
    first, second = snapshots(HANGS[name], HANGS[name])
    # THEN the second one is due soon after the first
    assert (first.proved, first.again_ns - first.began_ns) == (False, 2 * S)
    assert second.proved


@pytest.mark.parametrize("name", HEALTHY)
def test_what_may_end_by_itself_is_no_proof_however_often(name):
    assert not any(each.proved for each in snapshots(*[HEALTHY[name]] * 3))


def test_a_disagreement_between_calls_that_go_on_is_no_proof():
    # GIVEN ranks that answer one after the other while they evaluate, which may look as if they disagreed
    moving = [ranks([*PAST * 2, *[GATHER] * at], ([*PAST * 2, *[GRADIENTS] * at],)) for at in (1, 2, 3, 4)]
    found = snapshots(*moving, every_s=30.0)
    assert not any(each.proved for each in found)
    # THEN after the second one, evidence is gathered as seldom as where nothing is suspected
    assert [(each.again_ns - each.began_ns) / S for each in found] == [2, 20, 40, 60]


def test_evidence_is_gathered_less_and_less_often_and_costs_little():
    healthy = [HEALTHY["an evaluation"]] * 5
    assert [(each.again_ns - each.began_ns) / S for each in snapshots(*healthy)] == [10, 20, 40, 60, 60]
    # AND the longer it takes, the less often
    assert [(each.again_ns - each.began_ns) / S for each in snapshots(*healthy[:4], took_s=3.0)] == [30, 30, 40, 60]


@pytest.mark.parametrize(
    ("timeout_s", "before_s"), [(1800, 1620), (600, 540), (100, 85), (60, 45), (30, 15), (20, 10), (2, 1)]
)
def test_a_timeout_leaves_time_for_the_evidence(timeout_s, before_s):
    assert before_timeout_s(timeout_s) == before_s


def with_timeouts(timeouts_s, in_stage_s=20.0, n_calls=1):
    """Ranks 1 and on wait in their call number ``n_calls`` for rank 0."""
    calls = [*PAST, *[GRADIENTS] * n_calls]
    waiting = [rank(at, calls, timeout_s=some, in_stage_s=in_stage_s) for at, some in enumerate(timeouts_s, 1)]
    return job(rank(0, PAST, 0, threads=EVALUATES), *waiting)


def test_the_timeout_that_is_over_first_counts_from_when_its_call_can_have_begun():
    # GIVEN ranks in their stage since 20 s (at the end of gathering, which takes 0.5 s)
    (first,) = snapshots(with_timeouts([1800.0, 60.0, None]))
    assert first.timeout == (60.0, first.began_ns + int((0.5 - 20.0 + 45.0) * S))
    # WHEN the same call is pending later THEN it counts as before, and another one from the earlier snapshot on
    for n_calls, since_s in ((1, -19.5), (2, 0.0)):
        calls = with_timeouts([60.0, 60.0], in_stage_s=50.0, n_calls=n_calls)
        first, second = snapshots(with_timeouts([60.0, 60.0]), calls, every_s=30.0)
        assert second.timeout == (60.0, first.began_ns + int((since_s + 45.0) * S))
    # AND none is known without a pending call
    assert snapshots(HEALTHY["all ranks at work"])[0].timeout is None


def test_evidence_is_gathered_again_when_a_timeout_is_near():
    (first,) = snapshots(with_timeouts([60.0], in_stage_s=40.0))
    assert first.again_ns == first.timeout[1] == first.began_ns + int(5.5 * S)


def test_a_timeout_that_may_be_near_counts_only_for_a_call_that_does_not_end():
    # GIVEN an evaluation on all ranks with a call each few seconds, of which evidence is gathered once a minute
    working = HEALTHY["all ranks at work"]
    moving = [with_timeouts([60.0], in_stage_s=600.0, n_calls=n_calls) for n_calls in (1, 2)]
    *_, first, second = snapshots(working, *moving, every_s=60.0)
    # THEN the first call may have begun a minute ago: whether it ends is to be found out soon
    assert first.timeout[1] == first.again_ns == first.began_ns + 2 * S
    # AND the next has begun since
    assert second.timeout[1] == second.began_ns + 2 * S
    # AND one that is still there is near its timeout
    *_, second = snapshots(working, moving[0], moving[0], every_s=60.0)
    assert second.timeout[1] < second.began_ns
