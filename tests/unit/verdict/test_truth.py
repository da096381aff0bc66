"""The truth table of the verdicts: what happened in a job, who is named for it or why none is, and since when.

Each situation is a simulated job of 100 ms steps, most of them with 3 % of noise on every stage.
"""

from dataclasses import replace
from functools import cache

import pytest

from sftriage.model.verdicts import Settings
from sftriage.words.verdicts import subject
from tests.scenario import BETWEEN, OUTSIDE, Fault, Job, at, classify, every, from_step, gaussian, heavy_tailed, past_of

LOCAL = ("data", "forward", "optimizer", "other")
EVERYWHERE = (*LOCAL, "backward", OUTSIDE)
GPU = ("forward", "backward")
SETTINGS = Settings()


def case(situation, expected, *faults, job=Job(), known=False, split=False):  # noqa: B008  # frozen
    """A situation, and the verdict: "healthy", a reason, or the suspect and its stage.

    Who is a rank, "all", or the ranks of a host. ``known``: healthy windows went before. ``split``: the moment of the
    last ready gradient is recorded.
    """
    return pytest.param(expected, faults, job, known, split, id=situation)


def slow(ranks, factor, stages=EVERYWHERE):
    return tuple(Fault(stage, ranks, factor=factor) for stage in stages)


def taking_turns(n_ranks, seconds):
    return tuple(Fault("data", rank, seconds, every(n_ranks, rank)) for rank in range(n_ranks))


def other_work(rank):
    return Fault("data", rank, factor=0.05), Fault("forward", rank, factor=2.5)


def hosts(*ranks_each):
    return tuple(f"node-{index}" for index, count in enumerate(ranks_each) for _ in range(count))


LARGE = Job(n_ranks=1024)
PAIR, EIGHT = Job(n_ranks=2), Job(n_ranks=8)
FSDP = Job(sync=("forward", "backward", "optimizer"))
MOSTLY_BACKWARD = Job(
    stages=(("data", 0.005), ("forward", 0.025), ("backward", 0.060), ("optimizer", 0.005), ("other", 0.001))
)
TWO_NODES = Job(n_ranks=8, hosts=hosts(4, 4))
FOUR_NODES = Job(n_ranks=16, hosts=hosts(4, 4, 4, 4))
MANY_NODES = Job(n_ranks=1024, hosts=hosts(*[8] * 128))
ONE_NODE = Job(hosts=hosts(4))
SCATTERED = Job(n_ranks=8, hosts=("a", "b", "a", "b", "a", "b", "a", "b"))
NODE_1, NODE_10, ODD = (4, 5, 6, 7), tuple(range(80, 88)), (1, 3, 5, 7)

# Ranks 0 to 3 load data and compute little; ranks 4 to 7 load nothing and compute much.
ROLES = (Fault("data", NODE_1, factor=0.05), Fault("forward", NODE_1, factor=2.0))
EMBEDDING_AND_LOSS = Fault("data", 1, factor=0.2), Fault("optimizer", 0, factor=0.2), Fault("forward", 0, 0.010)
OTHERS_COMPUTE = Fault("forward", (0, 1, 3), factor=2.5)
AHEAD = Fault("data", 1, 0.020), Fault("forward", 1, 0.020), Fault("data", 2, 0.015)
PIPELINE = Job(n_ranks=8, cohorts=("pp0",) * 4 + ("pp1",) * 4)

TRUTH = [
    # Healthy: the excess is under the threshold.
    case("nothing happens", "healthy"),
    case("nothing happens, as before", "healthy", known=True),
    case("nothing happens, without any noise", "healthy", job=Job(noise=gaussian(0.0))),
    case("nothing happens, with 10 % noise", "healthy", job=Job(noise=gaussian(0.10))),
    case("nothing happens, with heavy-tailed noise", "healthy", job=Job(noise=heavy_tailed(0.03))),
    case("nothing happens on two ranks", "healthy", job=PAIR),
    case("nothing happens on one rank", "healthy", job=Job(n_ranks=1)),
    case("nothing happens on 1,024 ranks", "healthy", job=LARGE),
    case("nothing happens in a job of many sync stages", "healthy", job=FSDP),
    case("a rank late by 3 % of the step", "healthy", Fault("data", 1, 0.003)),
    case("all ranks slower by 8 %, as machines drift", "healthy", Fault("data", None, 0.008), known=True),
    # One suspect explains the excess: one rank, one stage.
    case("one rank late in data", (2, "data"), Fault("data", 2, 0.020)),
    case("one rank late in forward", (0, "forward"), Fault("forward", 0, 0.020)),
    case("one rank late in optimizer, after the last sync", (3, "optimizer"), Fault("optimizer", 3, 0.020)),
    case("one rank late outside stages, after the last sync", (1, "other"), Fault("other", 1, 0.020)),
    case("one rank late outside stages, before the sync", (1, "other"), Fault(OUTSIDE, 1, 0.020)),
    case("one rank late between two steps", (2, "other"), Fault(BETWEEN, 2, 0.020)),
    case("one rank late, as it was not before", (2, "data"), Fault("data", 2, 0.020), known=True),
    case("one rank late by 8 % of the step", (2, "data"), Fault("data", 2, 0.008)),
    case("one rank late by as much as a step", (2, "forward"), Fault("forward", 2, 0.100)),
    case("one rank late amid 10 % noise", (2, "data"), Fault("data", 2, 0.020), job=Job(noise=gaussian(0.1))),
    case("one rank late from the middle on", (2, "data"), Fault("data", 2, 0.040, from_step(15))),
    case("one rank late, of two: or the other one is quick", "no_baseline", Fault("data", 1, 0.02), job=PAIR),
    case("one rank quicker, of two", "mixed_roles", Fault("forward", 0, factor=0.3), job=PAIR, known=True),
    case("one rank late, of two, known", (1, "data"), Fault("data", 1, 0.020), job=PAIR, known=True),
    case("one rank late, of 1,024", (700, "forward"), Fault("forward", 700, 0.020), job=LARGE),
    case("one rank late before the first of many syncs", (2, "data"), Fault("data", 2, 0.02), job=FSDP),
    case("one rank late between many syncs", (1, "other"), Fault("outside-1", 1, 0.02), job=FSDP),
    case("slow inside the sync, split", (1, "backward"), Fault("backward", 1, 0.030), split=True),
    case(
        "late while all drift by 10 %", (2, "data"), Fault("data", 2, 0.012), Fault("forward", None, 0.01), known=True
    ),
    case("of two unequal, the one with most", (1, "forward"), Fault("forward", 1, 0.030), Fault("data", 2, 0.008)),
    # One suspect, a whole rank: slow alike in all its local stages, and in the sync stage's own part with them.
    case("a slow rank", (1, None), *slow(1, 1.5)),
    case("a slow rank, known", (1, None), *slow(1, 1.5), known=True),
    case("a slow rank, of 1,024", (5, None), *slow(5, 1.6), job=LARGE),
    # (it arrives just ahead of another: the margin cuts its stages' gains alike)
    case("a slow rank, and another one", (1, None), *AHEAD),
    case("a slow GPU: data comes from the CPU", (1, "forward"), *slow(1, 1.5, GPU)),
    case("a slow GPU, mostly in backward", (1, "forward"), *slow(1, 1.5, GPU), job=MOSTLY_BACKWARD, known=True),
    # One suspect, all ranks: against the job's own past.
    case("all ranks slow in data", ("all", "data"), Fault("data", None, 0.030), known=True),
    case("all ranks slow everywhere", ("all", None), *slow(None, 1.6), known=True),
    case("all slow on one node alone", ("all", "data"), Fault("data", None, 0.03), job=ONE_NODE, known=True),
    # Excess, and several who share it: no single gain.
    case("two equal stragglers", "co_critical", Fault("data", 2, 0.02), Fault("forward", 1, 0.02)),
    case("two equal stragglers in one stage", "co_critical", Fault("data", (0, 3), 0.02)),
    case("two equal, known", "co_critical", Fault("data", 2, 0.02), Fault("optimizer", 1, 0.02), known=True),
    case("two nearly equal stragglers", "co_critical", Fault("forward", 1, 0.030), Fault("data", 2, 0.022)),
    case("three of four ranks slow alike", "co_critical", Fault("data", (0, 1, 3), 0.03), known=True),
    case("both of two slow", "co_critical", Fault("data", 0, 0.03), Fault("forward", 1, 0.03), job=PAIR, known=True),
    case("one more so", "co_critical", Fault("data", 1, 0.03), Fault("forward", (0, 1), 0.02), job=PAIR, known=True),
    # Excess inside the sync stage, without a local lead.
    case("slow inside the sync", "sync_ambiguous", Fault("backward", 1, 0.030), known=True),
    case("slow inside the sync from step 25", "sync_ambiguous", Fault("backward", 1, 0.05, from_step(25))),
    # Excess whose cause changes, or comes and goes.
    case("another rank late each step", "roaming", *taking_turns(4, 0.040)),
    case("another rank late each step, of two", "roaming", *taking_turns(2, 0.040), job=PAIR),
    case("one rank late in a few steps", "intermittent", Fault("data", 1, 0.400, at(3, 20, 28, 41))),
    # All ranks slow alike, and nothing to compare with.
    case("all ranks slow from step 25", "no_baseline", Fault("data", None, 0.05, from_step(25))),
    # Two causes: a clear rank is no reason, what hides the rest is.
    case("and a rank a little late", "sync_ambiguous", Fault("backward", 0, 0.06), Fault("data", 2, 0.01), known=True),
    # A bad node slows all its ranks, which are co-critical with one another.
    case("a slow node, in one stage", (NODE_1, "data"), Fault("data", NODE_1, 0.020), job=TWO_NODES),
    case("a slow node, everywhere", (NODE_1, None), *slow(NODE_1, 1.5, LOCAL), job=replace(TWO_NODES, n_steps=100)),
    case("a slow node, for as long as a neighbour may be", "co_critical", *slow(NODE_1, 1.5, LOCAL), job=TWO_NODES),
    case("a slow node, after the sync", (NODE_1, "other"), Fault("other", NODE_1, 0.02), job=TWO_NODES),
    case("a slow node of four", (NODE_1, "forward"), Fault("forward", NODE_1, 0.02), job=FOUR_NODES),
    case("inside backward, split", (NODE_1, "backward"), Fault("backward", NODE_1, 0.02), job=FOUR_NODES, split=True),
    case("a slow node of 128", (NODE_10, "data"), Fault("data", NODE_10, 0.020), job=MANY_NODES),
    case("a slow node, not numbered in a row", (ODD, "data"), Fault("data", ODD, 0.020), job=SCATTERED),
    # The smallest scope that explains it: a rank before its host.
    case("one slow rank on a node", (5, "data"), Fault("data", 5, 0.020), job=TWO_NODES),
    case("one of a slow node", (5, "data"), Fault("data", NODE_1, 0.006), Fault("data", 5, 0.030), job=FOUR_NODES),
    case("two slow ranks on different nodes", "co_critical", Fault("data", (1, 5), 0.02), job=TWO_NODES),
    case("two slow ranks of a node's four", "co_critical", Fault("data", (4, 5), 0.02), job=TWO_NODES),
    case("two slow nodes", "co_critical", Fault("data", (0, 1, 2, 3, *NODE_1), 0.02), job=FOUR_NODES),
    case("a slow node that no host is known of", "co_critical", Fault("data", (4, 5, 6), 0.02), job=EIGHT),
    # Ranks of different roles are compared within their cohort.
    case("two roles", "healthy", *ROLES, job=PIPELINE),
    case("two roles, known", "healthy", *ROLES, job=PIPELINE, known=True),
    case("a slow rank among its own", (6, "forward"), *ROLES, Fault("forward", 6, 0.030), job=PIPELINE),
    case("two roles without cohorts", "mixed_roles", *ROLES, job=EIGHT),
    case("a pipeline of two ranks without cohorts", "mixed_roles", *other_work(1), job=PAIR),
    case("an embedding on one rank of two, a loss on the other", "mixed_roles", *EMBEDDING_AND_LOSS, job=PAIR),
    case("a rank that does other work", "mixed_roles", *other_work(3)),
    # Ranks that share a machine get in each other's way, but for the one that comes when the others wait.
    case("a slow rank that has the machine to itself after that", (2, "data"), Fault("data", 2, 0.200), OTHERS_COMPUTE),
    case("a rank that loads for the others, and computes less", "mixed_roles", Fault("data", 2, 0.060), OTHERS_COMPUTE),
]


@cache
def healthy_past(job, split, *faults):
    return past_of(job.run(*faults, seed=1000 + n, split=split, first_step=50 * (n - 10)) for n in range(10))


@pytest.mark.parametrize(("expected", "faults", "job", "known", "split"), TRUTH)
def test_the_truth_table(expected, faults, job, known, split):
    # (what cohorts do otherwise is no fault)
    past = healthy_past(job, split, *(faults if job.cohorts else ())) if known else None
    for seed in range(1 if job.n_ranks > 100 else 3):
        # GIVEN the situation, WHEN its window is classified
        verdict = classify(job.run(*faults, seed=seed, split=split), past, SETTINGS)
        # THEN the label is the one, and the reason
        label = "suspect" if isinstance(expected, tuple) else "healthy" if expected == "healthy" else "needs_evidence"
        reasons = (expected,) if label == "needs_evidence" else ()
        assert (verdict.label, verdict.reasons) == (label, reasons), dict(verdict.numbers)
        if label != "suspect":
            continue
        # OR the suspect, the smallest that explains it
        (named, stage), first = expected, verdict.suspects[0]
        scope = "all" if named == "all" else "rank" if isinstance(named, int) else "host"
        ranks = {"all": tuple(range(job.n_ranks)), "rank": (named,)}.get(scope, named)
        assert (first.scope, first.ranks, first.stage) == (scope, ranks, stage)
        assert first.persistence >= SETTINGS.min_persistence_fraction
        # AND a rank has its host beside it, where there are several
        several = len(set(job.hosts or ())) > 1
        if scope == "rank":
            assert subject(first) == (f"rank {named} on {job.hosts[named]}" if several else f"rank {named}")
        assert first.host == (job.hosts[ranks[0]] if scope == "host" else None)


def moment(situation, named, *faults, job=Job()):  # noqa: B008  # frozen
    """What rank 1 does, and its (pattern, period, onset); None where it is not named."""
    return pytest.param(named, faults, job, id=situation)


def growing(seconds):
    """A delay that grows from 0 to ``seconds`` over 50 steps, as ten faults that begin one after another."""
    return tuple(Fault("data", 1, seconds / 10, from_step(5 * n)) for n in range(10))


TICKS = (Fault("data", 1, 0.03, every(5)),)

COURSES = [
    moment("always", ("chronic", None, 0), Fault("data", 1, 0.02)),
    moment("from step 15 on", ("chronic", None, 15), Fault("data", 1, 0.03, from_step(15))),
    moment("from step 34 on", ("chronic", None, 34), Fault("forward", 1, 0.03, from_step(34))),
    moment("after the sync, from step 30 on", ("chronic", None, 30), Fault("optimizer", 1, 0.03, from_step(30))),
    moment("growing", ("chronic", None, 0), *growing(0.06)),
    moment("from step 10 to 30", ("one-off", None, 10), Fault("data", 1, 0.03, from_step(10, 30))),
    moment("from the start to step 16", ("one-off", None, 0), Fault("data", 1, 0.03, from_step(0, 16))),
    moment(
        "from the start to step 38, most of the window",
        ("one-off", None, 0),
        Fault("data", 1, 0.03, from_step(0, 38)),
    ),
    moment("every second step", ("recurring", 2, 0), Fault("data", 1, 0.03, every(2))),
    moment("every fifth step", ("recurring", 5, 3), Fault("data", 1, 0.03, every(5, 3))),
    moment("every twelfth step", ("recurring", 12, 0), Fault("data", 1, 0.05, every(12)), job=Job(n_steps=80)),
    moment("every twelfth step, in few steps", None, Fault("data", 1, 0.05, every(12))),
    moment("every fifth step, after the sync", ("recurring", 5, 3), Fault("other", 1, 0.03, every(5, 3))),
    moment("every fifth step, by little", ("recurring", 5, 0), Fault("data", 1, 0.015, every(5))),
    moment("every fifth step, and now and then", ("recurring", 5, 0), *TICKS, Fault("data", 1, 0.05, at(7, 29))),
    moment("often, in no order", None, Fault("data", 1, 0.05, at(2, 3, 11, 20, 22, 36, 37, 47))),
    moment("in three steps", None, Fault("data", 1, 0.05, at(2, 19, 22))),
    moment("in one step", None, Fault("data", 1, 0.5, at(20))),
]


@pytest.mark.parametrize(("named", "faults", "job"), COURSES)
def test_the_truth_table_of_time(named, faults, job):
    for seed in range(3):
        # GIVEN what one rank does, WHEN the window is classified
        verdict = classify(job.run(*faults, seed=seed))
        # THEN the rank is named from the steps it fills, and how they lie
        assert (verdict.label == "suspect") == (named is not None), (verdict.label, verdict.reasons)
        if named is not None:
            first, (pattern, period, onset) = verdict.suspects[0], named
            assert (first.rank, first.pattern, first.period_steps) == (1, pattern, period)
            # AND the onset is exact to two steps, or its range has it
            earliest, latest = first.onset_range
            assert earliest <= onset <= latest
            assert first.onset_step == pytest.approx(onset, abs=max(2, (latest - earliest) / 2))


def test_a_recurring_fault_is_not_averaged_away():
    # GIVEN 30 ms in every tenth step: 3 % of the window
    verdict = classify(Job(n_steps=100, noise=gaussian(0.01)).run(Fault("data", 1, 0.030, every(10))))
    # THEN the gain is that of the steps it fills, of which there is a tenth
    first = verdict.suspects[0]
    assert first.gain_s == pytest.approx(0.030, rel=0.1)
    assert first.share == pytest.approx(30 / 130, rel=0.1)
    assert first.persistence == pytest.approx(0.1)
