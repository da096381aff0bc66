"""How long the join of a hang takes: many ranks in the default group, or in groups of tensors, pipelines and data.

Each rank has called 2,000 collectives, of 12 different ones. One of them has not come to the last (absent), has called
another one there (different), or is one call behind since the middle (skipped). Records are as they come
from hosts: no two ranks share any, and each lists its calls in an order of its own.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sftriage.model.hangs import Call, GroupCalls, HangEvidence, RankEvidence, SourceLine, ThreadEvidence, Wait
from sftriage.verdict.hangs import hang_of

CALLS, DISTINCT = 2_000, 12
FAULTS = ("absent", "different", "skipped")


QUICK = {"ranks": 1024, "rounds": 1}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=8192)
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--pipelines", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    layouts = ("default group", f"TP {options.tensors} x PP {options.pipelines} x DP")
    rows = [measured(layout, fault, options) for layout in layouts for fault in FAULTS]
    return {"ranks": options.ranks, "calls": CALLS, "rows": rows}


def measured(layout: str, fault: str, options: argparse.Namespace) -> dict[str, object]:
    culprit = options.ranks // 3
    ranks = [evidence_of(rank, layout, fault if rank == culprit else "", options) for rank in range(options.ranks)]
    evidence = HangEvidence(0.0, 1, 60, options.ranks, tuple(ranks))
    seconds = []
    for _ in range(options.rounds):
        began = time.perf_counter()
        hang = hang_of(evidence)
        seconds.append(time.perf_counter() - began)
    return {
        "layout": layout,
        "fault": fault,
        "kind": hang.kind,
        "right": hang.ranks == (culprit,),
        "seconds": min(seconds),
        "longest_s": max(seconds),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def evidence_of(rank: int, layout: str, fault: str, options: argparse.Namespace) -> RankEvidence:
    calls = [
        Call("all_reduce", ((n * 100,),), ("Float",), tuple(line(f"f{n}", n + k) for k in range(3)))
        for n in range(1, DISTINCT + 1)
    ]
    calls.append(Call("all_gather", ((3,),), ("Float",), (line("validate", 52),)))
    order = random.Random(rank).sample(range(len(calls)), len(calls))
    table = tuple(calls[n] for n in order)
    places = [order.index(n) for n in range(len(calls))]
    groups = tuple(
        group(name, members, number, fault, places)
        for number, (name, members) in enumerate(groups_of(rank, layout, options))
    )
    frames = (line("wait", 1), line("train", 77))
    threads = (ThreadEvidence("MainThread", True, frames, Wait(syscall="futex")),) if fault == "absent" else ()
    host = f"node-{rank // 8}"
    return RankEvidence(rank, host, rank, 60, "backward", answered=True, calls=table, groups=groups, threads=threads)


def line(function: str, number: int) -> SourceLine:
    return SourceLine(function, f"/work/{function[:1]}rain.py", number, own=True)


def groups_of(rank: int, layout: str, options: argparse.Namespace) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Names and members of the groups of a rank: consecutive ranks share tensors, equal places in replicas data."""
    if layout == "default group":
        yield "0", (0, options.ranks - 1, 1)
        return
    tensors, model = options.tensors, options.tensors * options.pipelines
    first = rank - rank % tensors
    yield f"tp{first}", (first, first + tensors - 1, 1)
    place = rank % model
    yield f"dp{place}", (place, options.ranks - model + place, model)
    replica = rank - place
    yield f"pp{replica + rank % tensors}", (replica + rank % tensors, replica + model - 1, tensors)


def group(name: str, members: tuple[int, int, int], number: int, fault: str, places: Sequence[int]) -> GroupCalls:
    """A third of the calls in each of three groups; the last waits."""
    several = name != "0"
    length = CALLS // 3 if several else CALLS
    calls = [n % DISTINCT for n in range(length)]
    pending = (length,) if number == 0 else ()
    if number == 0 and fault == "absent":
        calls, pending = calls[:-1], ()
    elif number == 0 and fault == "different":
        calls[-1] = DISTINCT
    elif number == 0 and fault == "skipped":
        calls = [n % DISTINCT for n in range(length + 1) if n != length // 2]
    return GroupCalls(
        name, "default_pg" if name == "0" else name, (members,), 1, tuple(places[n] for n in calls), pending
    )
