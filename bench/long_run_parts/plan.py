"""Which jobs are put together and who judges them: the tasks of a run of the bench. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from bench.hidden_rank_matrix.drawing import Deck
from bench.long_run_parts.faults import COURSES, LASTS_STEPS, LEAD_STEPS, SCOPES, SIZES, Dealer
from bench.long_run_parts.jobs import JOB_TYPES, Cell
from bench.long_run_parts.rules import OURS, RIVALS, variants
from bench.long_run_parts.simulating import Task

SHARE_OF_RANKS = {2: 0.20, 4: 0.45, 8: 0.20, 64: 0.14, 1024: 0.01}
"""How the healthy steps are shared out: a window of many ranks takes much longer to judge."""

RUN_STEPS = {2: 10_000, 4: 10_000, 8: 10_000, 64: 10_000, 1024: 2_000}
"""How long a healthy job is. Each begins with no past, and with a policy that has captured nothing yet."""

FAULTY_RANKS = {"rank": (4, 8, 64), "host": (8, 64)}
RIVALS_EVERY = 10
"""The other rules judge one healthy job in so many, but at least one of each cell."""
VARIANTS_EVERY = 5
"""Our other sensitivities judge one job in so many, healthy or not."""
MOST_RANKS = 64
"""Jobs of more ranks are judged by ours alone."""


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is asked for.

    Attributes:
        healthy_steps: over all loads and numbers of ranks.
        faults: of each size, course and scope.
        ranks: of the jobs that are put together.
        seed: of everything.
    """

    healthy_steps: int
    faults: int
    ranks: tuple[int, ...] = tuple(SHARE_OF_RANKS)
    seed: int = 0


def tasks_of(amount: Amount, recorded: Collection[Cell]) -> list[Task]:
    """All tasks, the same ones for the same arguments."""
    cells = sorted(recorded, key=lambda cell: (cell.n_ranks, cell.job, cell.load))
    healthy = _healthy(amount, cells)
    return healthy + _faulty(amount, cells, first_job=len(healthy))


def sources(cells: Collection[Cell], n_ranks: int) -> list[Cell]:
    """The recordings that so many ranks can be put together of: of hosts of 2 no more than a few."""
    return [cell for cell in cells if n_ranks % cell.n_ranks == 0 and n_ranks <= 1024 // 8 * cell.n_ranks]


def hosts_of(cell: Cell, n_ranks: int) -> list[str]:
    """The host of each rank, as `side_by_side` has them."""
    return [f"host-{rank // cell.n_ranks}" for rank in range(n_ranks)]


def rules_of(*, rivals: bool, varied: bool) -> tuple[str, ...]:
    """Ours, and the others that are asked for."""
    return (OURS, *(RIVALS if rivals else ()), *(variants() if varied else ()))


def _healthy(amount: Amount, cells: list[Cell]) -> list[Task]:
    tasks: list[Task] = []
    job = 0
    total = sum(SHARE_OF_RANKS[n_ranks] for n_ranks in amount.ranks)
    for n_ranks in amount.ranks:
        found = sources(cells, n_ranks)
        steps = amount.healthy_steps * SHARE_OF_RANKS[n_ranks] / total / max(1, len(found))
        run_steps = min(RUN_STEPS[n_ranks], max(2000, int(steps // 2000) * 2000))
        for cell in found:
            for number in range(max(1, round(steps / run_steps))):
                rivals = number % RIVALS_EVERY == 0 and n_ranks <= MOST_RANKS
                varied = job % VARIANTS_EVERY == 0 and n_ranks <= MOST_RANKS
                rules = rules_of(rivals=rivals, varied=varied)
                tasks.append(Task(job, cell, n_ranks, run_steps, amount.seed, rules))
                job += 1
    return tasks


def _faulty(amount: Amount, cells: list[Cell], first_job: int) -> list[Task]:
    dealer, decks = Dealer(amount.seed), dict[str, Deck[tuple[Cell, int]]]()
    for scope, counts in FAULTY_RANKS.items():
        jobs = [(cell, n) for n in counts if n in amount.ranks for cell in sources(cells, n)]
        # A slow host is one of several.
        jobs = [(cell, n) for cell, n in jobs if scope == "rank" or n > cell.n_ranks]
        if jobs:
            decks[scope] = Deck(jobs, dealer.rng)
    tasks: list[Task] = []
    kinds = [(size, course, scope) for size in SIZES for course in COURSES for scope in SCOPES if scope in decks]
    for number in range(amount.faults):
        for job, (size, course, scope) in enumerate(kinds, start=first_job + number * len(kinds)):
            cell, n_ranks = decks[scope].deal()
            period = JOB_TYPES[cell.job].period_steps
            split = bool(JOB_TYPES[cell.job].values.get("split", True))
            fault = dealer.deal(size, course, scope, np.array(hosts_of(cell, n_ranks)), split=split)
            n_steps = -(-(LEAD_STEPS[1] + LASTS_STEPS) // period) * period
            rules = rules_of(rivals=True, varied=(job + number) % VARIANTS_EVERY == 0)
            tasks.append(Task(job, cell, n_ranks, n_steps, amount.seed, rules, fault))
    return tasks
