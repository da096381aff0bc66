"""The dependencies of synchronous hybrid-parallel training, from one recorded step of one data-parallel rank.

Operations have a begin and an end; which waits for which follows from how such a job is run (arXiv 2505.05713). On each
worker the computations go in the order in which they began, and so do the transfers of each type. A computation waits
for what it receives, and what it sends waits for it. A send and its receive are a group, and so are the members of a
collective. After the last backward computation come the gradients' collectives, clipping and the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sftriage.errors import InputError
from sftriage.whatif.graph import Graph, graph_of
from sftriage.whatif.operations import OpType

FORWARD, BACKWARD = "forward-compute", "backward-compute"
FORWARD_SEND, FORWARD_RECV = "forward-send", "forward-recv"
BACKWARD_SEND, BACKWARD_RECV = "backward-send", "backward-recv"
ALL_GATHER, REDUCE_SCATTER = "params-all-gather", "grads-reduce-scatter"
SEPARATE, LAYERNORM = "separate-grads-all-reduce", "layernorm-grads-all-reduce"
EMBEDDING, CLIP = "embedding-grads-all-reduce", "optimizer-clip-main-grad"
OPTIMIZER, GC = "optimizer", "gc"

TYPES: dict[str, OpType] = {
    one.name: one
    for one in (
        OpType(FORWARD, FORWARD, communication=False, phase="forward"),
        OpType(BACKWARD, BACKWARD, communication=False, phase="backward"),
        OpType(FORWARD_SEND, "forward-pp-comm", communication=True),
        OpType(FORWARD_RECV, "forward-pp-comm", communication=True),
        OpType(BACKWARD_SEND, "backward-pp-comm", communication=True),
        OpType(BACKWARD_RECV, "backward-pp-comm", communication=True),
        *(OpType(name, name, communication=True) for name in (ALL_GATHER, REDUCE_SCATTER, SEPARATE)),
        *(OpType(name, name, communication=True) for name in (LAYERNORM, EMBEDDING, CLIP)),
        OpType(OPTIMIZER, OPTIMIZER, communication=False),
        OpType(GC, GC, communication=False),
    )
}
"""All types of operations that such a job has."""

CLOCK_EPS_S = 5e-5
"""How far two workers' clocks, and a transfer and its computation on one, may be apart."""

_PEERS = {
    FORWARD_SEND: (FORWARD_RECV, 1),
    FORWARD_RECV: (FORWARD_SEND, -1),
    BACKWARD_SEND: (BACKWARD_RECV, -1),
    BACKWARD_RECV: (BACKWARD_SEND, 1),
}
"""Of each transfer between stages, what its other end is, and how many stages on."""


@dataclass(frozen=True, slots=True)
class Op:
    """An operation of the step that shows the order, with its index among the T operations; seconds.

    ``order`` sorts types where all else is equal, ``seq`` counts those of a type on a worker, ``pp`` is its stage. A
    computation is of a ``chunk`` of the stage's layers, and of a ``model_chunk``.
    """

    index: int
    kind: str
    order: int
    seq: int
    pp: int
    start_s: float
    end_s: float
    chunk: int
    model_chunk: int

    def __str__(self) -> str:
        return f"{self.kind} {self.seq} of stage {self.pp}"


class _Stage:
    def __init__(self, pp: int, ops: Iterable[Op]) -> None:
        self.pp = pp
        self.ops = sorted(ops, key=lambda op: (op.start_s, op.seq, op.order))
        self.by_seq = {(op.kind, op.seq): op for op in self.ops}
        self.computed = self.of(FORWARD, BACKWARD)

    def of(self, *kinds: str) -> list[Op]:
        return [op for op in self.ops if op.kind in kinds]

    def first(self, kind: str) -> list[Op]:
        found = self.by_seq.get((kind, 0))
        return [] if found is None else [found]

    def in_turn(self, kind: str) -> list[Op]:
        return sorted(self.of(kind), key=lambda op: op.seq)


def pipeline_graph(ops: Sequence[Op]) -> Graph:
    """The graph of one step of one data-parallel rank; its collectives span all ranks.

    Raises InputError where a stage computes nothing, or a transfer has no computation or no other end.
    """
    stages = [_Stage(pp, (op for op in ops if op.pp == pp)) for pp in range(1 + max(op.pp for op in ops))]
    for stage in stages:
        for kind in (FORWARD, BACKWARD):
            if not stage.of(kind):
                raise InputError(f"stage {stage.pp} has no {kind}")
    if nowhere := [op for stage in stages for op in stage.computed if op.chunk < 0 or op.model_chunk < 0]:
        raise InputError(f"{nowhere[0]} is of no model chunk (mc, gmc)")
    n_chunks = len(stages) * (1 + max(op.chunk for op in ops))
    pairs: dict[tuple[int, int, str], list[Op]] = {}
    alone: list[Op] = []
    dependencies: list[tuple[Op, Op]] = []
    for stage in stages:
        matched = dict(_matched(stage, len(stages)))
        dependencies += _around_transfers(stage, matched)
        dependencies += _on_streams(stage)
        dependencies += _after_computing(stage)
        for kind in _PEERS:
            n_paired = 0
            for op in stage.of(kind):
                computed = matched.get(op)
                if computed is None or not 0 <= computed.model_chunk + _PEERS[kind][1] < n_chunks:
                    # Recorded, but at an end of the pipeline: nobody is at the other side.
                    alone.append(op)
                    continue
                pairs.setdefault(_pair(op, n_paired, len(stages)), []).append(op)
                n_paired += 1
    for pair in pairs.values():
        if len(pair) != 2:
            raise InputError(f"{pair[0]} has no other end")
    groups = [*pairs.values(), *([op] for op in alone)]
    ends = [op for stage in stages for op in stage.first(EMBEDDING)]
    joined = [[op] for op in ops if op.kind in (ALL_GATHER, REDUCE_SCATTER, SEPARATE)]
    joined += [[op for stage in stages for op in stage.first(CLIP)]]
    groups += [group for group in (ends, *joined) if group]
    spans_all = {op.index for group in joined for op in group}
    return graph_of(
        len(ops),
        [(earlier.index, later.index) for earlier, later in dependencies],
        [[op.index for op in group] for group in groups],
        [group[0].index in spans_all for group in groups],
        lambda index: str(ops[index]),
    )


def _pair(op: Op, n_th: int, n_stages: int) -> tuple[int, int, str]:
    """What both ends of a transfer have in common: its number, the sending stage, and the direction."""
    peer, distance = _PEERS[op.kind]
    sending = op.kind in (FORWARD_SEND, BACKWARD_SEND)
    sender = op.pp if sending else (op.pp + distance) % n_stages
    return n_th, sender, op.kind if sending else peer


def _matched(stage: _Stage, n_stages: int) -> Iterator[tuple[Op, Op]]:
    for kind in _PEERS:
        of_kind, transfers = (BACKWARD if kind.startswith("backward") else FORWARD), stage.of(kind)
        computed = stage.of(of_kind)
        receives = kind in (FORWARD_RECV, BACKWARD_RECV)
        if receives:
            last_s = max(op.start_s for op in computed) + CLOCK_EPS_S
            transfers = [op for op in transfers if op.start_s <= last_s]
        else:
            first_s = min(op.end_s for op in computed) - CLOCK_EPS_S
            transfers = [op for op in transfers if op.end_s >= first_s]
        missing = len(computed) - len(transfers)
        at_an_end = stage.pp in (0, n_stages - 1)
        if transfers and (missing not in (0, 1) or (missing and not at_an_end)):
            raise InputError(f"stage {stage.pp} has {len(transfers)} of {kind} for {len(computed)} of {of_kind}")
        if not transfers and not at_an_end:
            raise InputError(f"stage {stage.pp} has no {kind}")
        # Where one is missing, it is what would come in before all else, or go out after it.
        first = missing if receives else 0
        for seq, op in enumerate(transfers, first):
            found = stage.by_seq.get((of_kind, seq))
            if found is None:
                raise InputError(f"stage {stage.pp} has no {of_kind} {seq}, to which {op} would belong")
            yield op, found


def _around_transfers(stage: _Stage, matched: dict[Op, Op]) -> Iterator[tuple[Op, Op]]:
    """What is sent waits for what computed it; what is received is waited for, and asked for one computation ahead."""
    for op, computed in matched.items():
        if op.kind in (FORWARD_SEND, BACKWARD_SEND):
            yield computed, op
            continue
        yield op, computed
        if (before := stage.by_seq.get((computed.kind, computed.seq - 1))) is not None:
            yield before, op
    # The first of the way back may begin as soon as the forward computation before the last one ahead of it has ended.
    kinds = [op.kind for op in stage.computed]
    first_back = kinds.index(BACKWARD)
    if first_back >= 2:
        for kind in (BACKWARD_RECV, BACKWARD_SEND):
            for op in stage.first(kind):
                yield stage.computed[first_back - 2], op


def _on_streams(stage: _Stage) -> Iterator[tuple[Op, Op]]:
    yield from _chain(stage.computed)
    for kind in _PEERS:
        yield from _chain(stage.of(kind))
    yield from _chain(stage.of(ALL_GATHER, REDUCE_SCATTER))


def _after_computing(stage: _Stage) -> Iterator[tuple[Op, Op]]:
    """Parameters come in before their chunk's first forward; after the last backward gradients, and the optimizer."""
    gathers = {op.chunk: op for op in stage.in_turn(ALL_GATHER)}
    for chunk, gather in gathers.items():
        forwards = [op for op in stage.of(FORWARD) if op.chunk == chunk]
        if forwards:
            yield gather, forwards[0]
    scatters = stage.in_turn(REDUCE_SCATTER)
    last = max(stage.computed, key=lambda op: op.end_s)
    separate = stage.first(SEPARATE)
    end = stage.first(GC) or [last]
    yield from _chain([last, *stage.first(GC)])
    if separate:
        # Gradients leave while backward still computes: each chunk's first after the chunk's last computation.
        for chunk in {op.chunk for op in scatters}:
            backwards = [op for op in stage.of(BACKWARD) if op.chunk == chunk]
            if backwards:
                yield max(backwards, key=lambda op: op.end_s), next(op for op in scatters if op.chunk == chunk)
    final = [*stage.first(CLIP), *stage.first(OPTIMIZER)]
    middle = [*stage.first(LAYERNORM), *stage.first(EMBEDDING)]
    tail = [*middle, *(separate or scatters), *final]
    for one in [*end, *(scatters[-1:] if separate else [])]:
        yield from _chain([one, *tail[:1]])
    yield from _chain(tail)


def _chain(ops: Sequence[Op]) -> Iterator[tuple[Op, Op]]:
    yield from pairwise(ops)
