"""Made-up jobs with one slow rank each, whose onset and cost are known, and the verdicts that name it.

Jobs of 2 to 8 ranks, steps of 20 or 100 ms with little or much noise, and a fault of 8 to 400 % of a step: constant,
intermittent, in bursts, recurring or growing. In some the same rank has small events before it, and others hiccup.
"""

from dataclasses import dataclass, replace

import numpy as np

from sftriage.model.verdicts import Suspect
from sftriage.verdict.accounting import anchored
from tests.scenario import Fault, Job, gaussian, heavy_tailed, verdicts

COURSES = ("constant", "intermittent", "bursts", "recurring", "growing")
LEAST_TIMES = 13
"""Steps of the fault from which on a verdict must name it: fewer name no rank."""


@dataclass(frozen=True)
class MadeUp:
    """A job, its fault, what else is late in it, and the steps that have the fault."""

    job: Job
    fault: Fault
    others: tuple[Fault, ...]
    onset: int
    course: str
    split: bool
    there_N: np.ndarray


@dataclass(frozen=True)
class Naming:
    """A verdict that names the slow rank, what a slow step takes without it, and what the fault really costs one."""

    suspect: Suspect
    without_s: float
    cost_s: float


def at_steps(there_N):
    return lambda n: there_N[:n]


def made_up(number: int) -> MadeUp:
    """One of the jobs: the same for the same number."""
    random = np.random.default_rng([number, 44])
    course, n_ranks, split = COURSES[number % len(COURSES)], int(random.integers(2, 9)), random.random() < 0.5
    noise = (gaussian if random.random() < 0.5 else heavy_tailed)(random.choice([0.01, 0.03, 0.06, 0.1]))
    factor = 0.2 if random.random() < 0.5 else 1.0
    onset = int(random.integers(60, 400))
    job = Job(n_ranks=n_ranks, n_steps=onset + 420, noise=noise)
    stages = tuple((name, factor * seconds) for name, seconds in job.stages)
    job = replace(job, stages=stages, exchange_s=factor * job.exchange_s, outside_s=factor * job.outside_s)
    names = [name for name, _ in stages if split or name != "backward"]
    stage, rank = random.choice(names), int(random.integers(n_ranks))
    size_s = 0.1 * factor * np.exp(random.uniform(np.log(0.3 if course == "recurring" else 0.08), np.log(4.0)))
    since_N = np.arange(job.n_steps) - onset
    there_N, grown_N = since_N >= 0, np.ones(job.n_steps)
    if course == "intermittent":
        there_N &= (random.random(job.n_steps) < random.uniform(0.3, 0.9)) | (since_N == 0)
    elif course == "bursts":
        there_N &= since_N % random.integers(20, 90) < random.integers(10, 40)
    elif course == "recurring":
        there_N &= since_N % random.integers(2, 41) == 0
    elif course == "growing":
        grown_N = np.clip((since_N + 1) / random.integers(30, 300), 0.0, 1.0)
    late_N = size_s * grown_N * np.clip(1.0 + 0.1 * random.standard_normal(job.n_steps), 0.3, 2.0)
    others = []
    if random.random() < 0.5:
        before_N = (since_N < 0) & (since_N > -random.integers(20, 120)) & (random.random(job.n_steps) < 0.1)
        others.append(Fault(random.choice(names), rank, size_s * random.uniform(0.05, 0.25), at_steps(before_N)))
    if random.random() < 0.5:
        for other in range(n_ranks):
            hiccup_N = random.random(job.n_steps) < random.uniform(0.0, 0.03)
            if other != rank:
                seconds = 0.1 * factor * random.uniform(0.1, 1.5)
                others.append(Fault(random.choice(names), other, seconds, at_steps(hiccup_N)))
    fault = Fault(stage, rank, late_N[:, None], at_steps(there_N))  # seconds of its own in each step
    return MadeUp(job, fault, tuple(others), onset, course, split, there_N)


def namings(one: MadeUp, seed: int) -> list[Naming]:
    """The verdicts that name the slow rank for its stage, once it has been slow often enough."""
    window = one.job.run(one.fault, *one.others, seed=seed, split=one.split)
    without = one.job.run(*one.others, seed=seed, split=one.split)
    cost_N = anchored(window).advances_NS.sum(axis=1) - anchored(without).advances_NS.sum(axis=1)
    found = []
    for verdict in verdicts(window):
        first = verdict.first_step
        here_N = one.there_N[first : first + 50]
        often = one.there_N[: first + 50].sum() >= LEAST_TIMES
        named = verdict.named
        if named is not None and often and (named.rank, named.stage) == (one.fault.rank, one.fault.stage):
            # (what comes back may be away from a window in which it is named still)
            cost_s = float(cost_N[first : first + 50][here_N].mean()) if here_N.any() else named.gain_s
            found.append(Naming(named, verdict.numbers["without_s"], cost_s))
    return found
