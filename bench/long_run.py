"""How often a healthy rank is named, and how soon a slow one: the operating characteristics of the verdicts.

Healthy jobs of several processes over Gloo are recorded by the real recorder, alone and beside busy processes, for
about a quarter of an hour (`recordings.py`). What they recorded is resampled in blocks to long jobs of 2 to 1,024
ranks, into which faults are put as a synchronous job would show them (`resampled.py`). Ours and other rules judge the
same jobs (`judging.py`, `rivals.py`). Counts of false names and captures are per million healthy steps with exact 95 %
Poisson intervals. With ``--from``, kept recordings are used again and nothing is run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bench import long_run_report
from bench.judging import OURS, RIVALS, Task, as_recorded, run
from bench.recordings import USUAL_S, Cell, by_cell, cells, kept, record
from bench.resampled import COURSES, LASTS_STEPS, LEAD_STEPS, SCOPES, SIZES, Dealer
from bench.rows import Deck
from bench.runner import add_recordings, recordings, say

SHARE_OF_RANKS = {2: 0.20, 4: 0.45, 8: 0.20, 64: 0.14, 1024: 0.01}
"""How the healthy steps are shared out: a window of many ranks takes much longer to judge."""
RUN_STEPS = {2: 10_000, 4: 10_000, 8: 10_000, 64: 10_000, 1024: 2_000}
"""How long a healthy job is. Each begins with no past, and with a policy that has captured nothing yet."""
FAULTY_RANKS = {"rank": (4, 8, 64), "host": (8, 64)}
RIVALS_EVERY = 10
"""The other rules judge one healthy job in ten, but at least one of each cell."""
MOST_RANKS = 64
"""Jobs of more ranks are judged by ours alone."""
QUICK = {"record_s": 6.0, "healthy_steps": 1e5, "faults": 1, "ranks": [4, 8, 64]}


def arguments(parser: argparse.ArgumentParser) -> None:
    add_recordings(parser)
    parser.add_argument("--record-only", action="store_true", help="record, and judge nothing")
    parser.add_argument("--record-s", type=float, default=USUAL_S, help="seconds of each recorded job")
    parser.add_argument("--healthy-steps", type=float, default=1e7, help="healthy steps over all")
    parser.add_argument("--faults", type=int, default=15, help="faults of each size, course and scope")
    parser.add_argument("--ranks", type=int, nargs="+", choices=SHARE_OF_RANKS, default=list(SHARE_OF_RANKS))
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that judge")


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is judged."""

    healthy_steps: int  # over all loads and numbers of ranks
    faults: int  # of each size, course and scope
    ranks: tuple[int, ...] = tuple(SHARE_OF_RANKS)  # of the jobs that are put together
    seed: int = 0  # of everything


def tasks_of(amount: Amount, recorded: Collection[Cell]) -> list[Task]:
    there = sorted(recorded, key=lambda cell: (cell.n_ranks, cell.job, cell.load))
    healthy = _healthy(amount, there)
    return healthy + _faulty(amount, there, first_job=len(healthy))


def sources(there: Collection[Cell], n_ranks: int) -> list[Cell]:
    """The recordings that a job of these ranks can be put together of: of hosts of 2 no more than a few."""
    return [cell for cell in there if n_ranks % cell.n_ranks == 0 and n_ranks <= 1024 // 8 * cell.n_ranks]


def hosts_of(cell: Cell, n_ranks: int) -> list[str]:
    """The host of each rank, as `side_by_side` has them."""
    return [f"host-{rank // cell.n_ranks}" for rank in range(n_ranks)]


def rules_of(*, rivals: bool) -> tuple[str, ...]:
    return (OURS, *(RIVALS if rivals else ()))


def _healthy(amount: Amount, there: list[Cell]) -> list[Task]:
    tasks: list[Task] = []
    total = sum(SHARE_OF_RANKS[n_ranks] for n_ranks in amount.ranks)
    for n_ranks in amount.ranks:
        found, few = sources(there, n_ranks), n_ranks <= MOST_RANKS
        steps = amount.healthy_steps * SHARE_OF_RANKS[n_ranks] / total / max(1, len(found))
        run_steps = min(RUN_STEPS[n_ranks], max(2000, int(steps // 2000) * 2000))
        for cell in found:
            for number in range(max(1, round(steps / run_steps))):
                rules = rules_of(rivals=few and number % RIVALS_EVERY == 0)
                tasks.append(Task(len(tasks), cell, n_ranks, run_steps, amount.seed, rules))
    return tasks


def _faulty(amount: Amount, there: list[Cell], first_job: int) -> list[Task]:
    dealer, decks = Dealer(amount.seed), dict[str, Deck[tuple[Cell, int]]]()
    for scope, counts in FAULTY_RANKS.items():
        jobs = [(cell, n) for n in counts if n in amount.ranks for cell in sources(there, n)]
        # A slow host is one of several.
        jobs = [(cell, n) for cell, n in jobs if scope == "rank" or n > cell.n_ranks]
        if jobs:
            decks[scope] = Deck(jobs, dealer.rng)
    tasks: list[Task] = []
    kinds = [(size, course, scope) for size in SIZES for course in COURSES for scope in SCOPES if scope in decks]
    for number in range(amount.faults):
        for job, (size, course, scope) in enumerate(kinds, start=first_job + number * len(kinds)):
            cell, n_ranks = decks[scope].deal()
            fault = dealer.deal(size, course, scope, np.array(hosts_of(cell, n_ranks)), split=cell.split)
            n_steps = -(-(LEAD_STEPS[1] + LASTS_STEPS) // cell.period_steps) * cell.period_steps
            tasks.append(Task(job, cell, n_ranks, n_steps, amount.seed, rules_of(rivals=True), fault))
    return tasks


def measure(options: argparse.Namespace) -> dict[str, Any] | None:
    if options.record_only and options.keep is None:
        raise SystemExit("--record-only goes with --keep")
    with tempfile.TemporaryDirectory(prefix="long-run-") as scratch:
        directory = recordings(options, scratch, kept)
        if options.from_ is None:
            record(cells(quick=options.quick), options.record_s, options.seed, directory)
        if options.record_only:
            return None
        return simulate(options, directory)


def simulate(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    recorded = by_cell(directory)
    amount = Amount(int(options.healthy_steps), options.faults, tuple(options.ranks), options.seed)
    tasks = tasks_of(amount, list(recorded))
    n_steps, every = sum(task.n_steps for task in tasks if task.fault is None), [*chain(*recorded.values())]
    say(f"{len(tasks)} jobs to judge, {n_steps:,} healthy steps of {len(every)} recordings")
    began_s = time.monotonic()
    results = list(run(tasks, directory, options.processes))
    about = {"seed": options.seed, "healthy_steps": n_steps, "judging_s": round(time.monotonic() - began_s, 1)}
    return long_run_report.document(
        results,
        about,
        [
            {**one.about, "steps": len(one.own), "step_ms": round(1e3 * one.step_s, 2), "ours": as_recorded(one)}
            for one in every
        ],
    )


def show(found: dict[str, Any]) -> Iterator[str]:
    yield long_run_report.text(found)
