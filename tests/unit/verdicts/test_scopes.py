"""Who is named where it is not one rank: hosts, cohorts, everybody; and who plays what role."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from sftriage.model.windows import StageSchema
from sftriage.verdicts import Past, Settings, judge
from sftriage.words.verdicts import who
from tests.scenario import Fault, Job, classify, every, exactly, from_step, gaussian

SETTINGS = Settings()
LOCAL = ("data", "forward", "optimizer", "other")


@dataclass(frozen=True)
class Case:
    """A situation and what is said of it: (scope, ranks, stage), or the reasons; neither where it is healthy."""

    situation: str
    job: Job
    faults: tuple[Fault, ...] = ()
    known: bool = False
    split: bool = False
    suspect: tuple[str, tuple[int, ...], str | None] | None = None
    reasons: tuple[str, ...] = ()


def hosts(*ranks_each):
    return tuple(f"node-{index}" for index, count in enumerate(ranks_each) for _ in range(count))


def slow(ranks, factor, stages=LOCAL):
    return tuple(Fault(stage, ranks, factor=factor) for stage in stages)


TWO_NODES = Job(n_ranks=8, hosts=hosts(4, 4))
FOUR_NODES = Job(n_ranks=16, hosts=hosts(4, 4, 4, 4))
MANY_NODES = Job(n_ranks=1024, hosts=hosts(*[8] * 128))
ONE_NODE = Job(hosts=hosts(4))
SCATTERED = Job(n_ranks=8, hosts=("a", "b", "a", "b", "a", "b", "a", "b"))
NODE_1 = (4, 5, 6, 7)

# Ranks 0 to 3 load data and compute little; ranks 4 to 7 load nothing and compute much.
ROLES = (Fault("data", NODE_1, factor=0.05), Fault("forward", NODE_1, factor=2.0))
OTHER_WORK = (Fault("data", 3, factor=0.05), Fault("forward", 3, factor=2.5))
PIPELINE = Job(n_ranks=8, cohorts=("pp0",) * 4 + ("pp1",) * 4)

TRUTH = [
    # A bad node slows all its ranks, which are co-critical with one another.
    Case("a slow node, in one stage", TWO_NODES, (Fault("data", NODE_1, 0.020),), suspect=("host", NODE_1, "data")),
    Case(
        "a slow node, in all local stages",
        replace(TWO_NODES, n_steps=100),
        slow(NODE_1, 1.5),
        suspect=("host", NODE_1, None),
    ),
    Case(
        "a slow node of two, for as long as a neighbour may be", TWO_NODES, slow(NODE_1, 1.5), reasons=("co_critical",)
    ),
    Case("a slow node, after the sync", TWO_NODES, (Fault("other", NODE_1, 0.02),), suspect=("host", NODE_1, "other")),
    Case("a slow node of four", FOUR_NODES, (Fault("forward", NODE_1, 0.02),), suspect=("host", NODE_1, "forward")),
    Case(
        "a slow node inside backward, split",
        FOUR_NODES,
        (Fault("backward", NODE_1, 0.02),),
        split=True,
        suspect=("host", NODE_1, "backward"),
    ),
    Case(
        "a slow node of 128",
        MANY_NODES,
        (Fault("data", tuple(range(80, 88)), 0.020),),
        suspect=("host", tuple(range(80, 88)), "data"),
    ),
    Case(
        "a slow node whose ranks are not numbered in a row",
        SCATTERED,
        (Fault("data", (1, 3, 5, 7), 0.020),),
        suspect=("host", (1, 3, 5, 7), "data"),
    ),
    # The smallest scope that explains it: a rank before its host.
    Case("one slow rank on a node", TWO_NODES, (Fault("data", 5, 0.020),), suspect=("rank", (5,), "data")),
    Case(
        "one rank much slower than the others of its slow node",
        FOUR_NODES,
        (Fault("data", NODE_1, 0.006), Fault("data", 5, 0.030)),
        suspect=("rank", (5,), "data"),
    ),
    Case("two slow ranks on different nodes", TWO_NODES, (Fault("data", (1, 5), 0.02),), reasons=("co_critical",)),
    Case("two slow ranks of a node's four", TWO_NODES, (Fault("data", (4, 5), 0.02),), reasons=("co_critical",)),
    Case("two slow nodes", FOUR_NODES, (Fault("data", (0, 1, 2, 3, *NODE_1), 0.02),), reasons=("co_critical",)),
    Case(
        "a slow node, nobody says who is where",
        Job(n_ranks=8),
        (Fault("data", (4, 5, 6), 0.02),),
        reasons=("co_critical",),
    ),
    Case(
        "all slow on one node alone",
        ONE_NODE,
        (Fault("data", None, 0.03),),
        known=True,
        suspect=("all", (0, 1, 2, 3), "data"),
    ),
    # Ranks of different roles are compared within their cohort.
    Case("two roles", PIPELINE, ROLES),
    Case("two roles, known", PIPELINE, ROLES, known=True),
    Case(
        "a slow rank among its own", PIPELINE, (*ROLES, Fault("forward", 6, 0.030)), suspect=("rank", (6,), "forward")
    ),
    Case("two roles that nobody declared", Job(n_ranks=8), ROLES, reasons=("mixed_roles",)),
    Case(
        "a pipeline of two ranks that nobody declared",
        Job(n_ranks=2),
        (Fault("data", 1, factor=0.05), Fault("forward", 1, factor=2.5)),
        reasons=("mixed_roles",),
    ),
    Case(
        "an embedding on the one rank of two, a loss on the other",
        Job(n_ranks=2),
        (Fault("data", 1, factor=0.2), Fault("optimizer", 0, factor=0.2), Fault("forward", 0, 0.010)),
        reasons=("mixed_roles",),
    ),
    Case("one rank that does other work", Job(n_ranks=4), OTHER_WORK, reasons=("mixed_roles",)),
    # Ranks that share a machine get in each other's way, but for the one that comes when the others wait.
    Case(
        "a slow rank that has the machine to itself after that",
        Job(n_ranks=4),
        (Fault("data", 2, 0.200), Fault("forward", (0, 1, 3), factor=2.5)),
        suspect=("rank", (2,), "data"),
    ),
    Case(
        "a rank that loads for the others, and computes less",
        Job(n_ranks=4),
        (Fault("data", 2, 0.060), Fault("forward", (0, 1, 3), factor=2.5)),
        reasons=("mixed_roles",),
    ),
]


@pytest.mark.parametrize("case", TRUTH, ids=lambda case: case.situation)
def test_the_truth_table_of_scopes(case):
    # GIVEN the situation, and healthy windows before it where the job is known
    past = None
    for healthy in range(10 if case.known else 0):
        before = case.faults if case.job.cohorts else ()
        first_step = 50 * (healthy - 10)
        _, past = judge(
            case.job.run(*before, seed=1000 + healthy, split=case.split, first_step=first_step), past, SETTINGS
        )
    for seed in range(1 if case.job.n_ranks > 100 else 3):
        # WHEN its window is classified
        verdict = classify(case.job.run(*case.faults, seed=seed, split=case.split), past, SETTINGS)
        # THEN the one who is named is the smallest that explains it, or the reason is given why nobody is
        label = "suspect" if case.suspect else "needs_evidence" if case.reasons else "healthy"
        assert (verdict.label, verdict.reasons) == (label, case.reasons), dict(verdict.numbers)
        if case.suspect is not None:
            first = verdict.suspects[0]
            assert (first.scope, first.ranks, first.stage) == case.suspect
            # AND a rank has its host beside it, where there are several
            if first.scope == "rank" and len(set(case.job.hosts or ())) > 1:
                assert who(first) == f"rank {first.rank} on {case.job.hosts[first.rank]}"
            elif first.scope == "rank":
                assert who(first) == f"rank {first.rank}"
            assert first.host == (case.job.hosts[first.ranks[0]] if first.scope == "host" else None)


def test_the_gain_of_a_node_is_what_was_injected():
    # GIVEN 20 ms on every rank of one node of four
    verdict = classify(FOUR_NODES.run(Fault("data", NODE_1, 0.020)))
    # THEN mending the node saves 20 ms a step (less a little: the last of four jitters more than the last of one)
    assert verdict.suspects[0].gain_s == pytest.approx(0.020, rel=0.1)


@pytest.mark.parametrize(
    ("cohort", "scope", "ranks"), [(1, "cohort", NODE_1), (None, "all", tuple(range(8)))], ids=["cohort", "all"]
)
def test_a_cohort_that_becomes_slow_is_found_against_its_own_past(cohort, scope, ranks):
    # GIVEN a pipeline of two stages that is known
    past = None
    for seed in range(10):
        _, past = judge(PIPELINE.run(*ROLES, seed=seed, first_step=50 * (seed - 10)), past, SETTINGS)
    # WHEN all ranks of the longer one, or of both, become slower in one stage
    fault = Fault("forward", None if cohort is None else NODE_1, 0.040)
    verdict, _ = judge(PIPELINE.run(*ROLES, fault, seed=99), past, SETTINGS)
    # THEN the cohort is named, or all
    first = verdict.suspects[0]
    assert (verdict.label, first.scope, first.ranks, first.stage) == ("suspect", scope, ranks, "forward")
    assert first.cohort == ("pp1" if scope == "cohort" else None)


def test_checkpoints_and_what_they_leave_behind_are_no_fault():
    # GIVEN a job that says which of its steps are checkpoints, in which rank 0 writes for three steps' time
    kinds = tuple("checkpoint" if n % 10 == 9 else "" for n in range(50))
    job = Job(kinds=kinds)
    writes = Fault("other", 0, 0.300, every(10, 9))
    # WHEN judged, THEN that is no fault
    verdict = classify(job.run(writes))
    assert (verdict.label, verdict.numbers["used_steps"]) == ("healthy", 41)
    # AND a rank that is slow in the ordinary steps is named from these
    verdict = classify(job.run(writes, Fault("data", 2, 0.020)))
    assert (verdict.label, verdict.suspects[0].rank, verdict.suspects[0].stage) == ("suspect", 2, "data")
    # BUT where nobody says so, it is a rank that holds everybody up every tenth step
    past = None
    for first_step in range(0, 200, 50):
        verdict, past = judge(replace(job.run(writes, first_step=first_step), kinds=None), past, SETTINGS)
    first = verdict.suspects[0]
    assert (verdict.label, first.rank, first.stage, first.pattern, first.period_steps) == (
        "suspect",
        0,
        "other",
        "recurring",
        10,
    )


def test_a_split_that_is_known_in_part_is_used_from_there_on_and_a_rare_one_not_at_all():
    # GIVEN a rank that is slow inside backward, and a split that was learned in the first five steps
    window = Job().run(Fault("backward", 1, 0.030), split=True)
    window.ready_NR[:5] = np.nan
    verdict = classify(window)
    assert (verdict.label, verdict.suspects[0].rank, verdict.suspects[0].stage) == ("suspect", 1, "backward")
    # AND where only a few steps have it, they are judged without
    window.ready_NR[5:45] = np.nan
    assert classify(window).numbers["complete_steps"] == 50


def test_backward_is_split_where_ranks_wait_for_one_another_before_it_too():
    # GIVEN a rank that is slow inside backward, in a job whose ranks exchange something before forward
    window = Job().run(Fault("backward", 1, 0.030), split=True)
    stages = ("data", "exchange", *window.schema.stages[1:])
    outside_NRG = window.outside_NRG
    window = replace(
        window,
        schema=StageSchema(stages, ("exchange", "backward")),
        durations_NRS=np.insert(window.durations_NRS, 1, 0.001, axis=2),
        outside_NRG=None if outside_NRG is None else np.insert(outside_NRG, 0, 0.0, axis=2),
    )
    # THEN it is named
    verdict = classify(window)
    assert (verdict.label, verdict.suspects[0].rank, verdict.suspects[0].stage) == ("suspect", 1, "backward")


def test_a_named_suspect_stays_named_while_its_gain_lies_at_the_threshold():
    # GIVEN a rank that was named, whose delay falls to just under what would get it named
    job, past, labels = Job(noise=gaussian(0.01)), None, []
    for n, delay_s in enumerate([0.020, 0.0040, 0.0040, 0.0]):
        verdict, past = judge(job.run(Fault("data", 1, delay_s), seed=n, first_step=50 * n), past, SETTINGS)
        labels.append(verdict.label)
    # THEN it stays named until it is mended
    assert labels == ["suspect", "suspect", "suspect", "healthy"]
    # AND without that past the same window names nobody
    assert classify(job.run(Fault("data", 1, 0.0040), seed=1), Past(), SETTINGS).label == "healthy"


def test_the_onset_is_kept_while_the_window_moves_on():
    # GIVEN a fault that begins at step 230, and windows of 50 steps every 50
    past, onsets = None, []
    for first in range(0, 500, 50):
        fault = Fault("data", 1, 0.030, from_step(max(0, 230 - first)))
        verdict, past = judge(Job().run(fault, seed=first, first_step=first), past, SETTINGS)
        onsets.append(verdict.suspects[0].onset_step if verdict.label == "suspect" else None)
    # THEN every window after it says so
    assert onsets == [None] * 4 + [pytest.approx(230, abs=2)] * 6


def test_ranks_that_do_nothing_are_in_no_role():
    # GIVEN a window of zeros but for one rank
    durations_NRS = np.zeros((10, 3, 2))
    durations_NRS[:, 1] = 0.1
    # THEN it is that rank, and no roles
    verdict = classify(exactly(durations_NRS, ("data", "forward", "backward")[:2]))
    assert verdict.reasons != ("mixed_roles",)
