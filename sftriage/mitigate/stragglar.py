"""DistributedDataParallel's all-reduce under one late rank (StragglAR, arXiv 2505.23523). Runs in the trainer.

    state = Stragglar()
    model.register_comm_hook(state, stragglar_hook)   # an all-reduce, until a straggler is named
    state.switch(3)                                   # between two steps, on all ranks

or, to let a policy's ``mitigate`` name the straggler (`sftriage.mitigate.switching`)::

    attach(model)                                     # on all ranks

Works with Gloo and gradients on the CPU, and refuses anything else.
"""
# No postponed annotations: torch compares a hook's annotations with its own types.

import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import monotonic_ns
from typing import Any

import torch
import torch.distributed as dist

from sftriage.errors import UsageError
from sftriage.log import warn
from sftriage.mitigate.schedule import schedule_of
from sftriage.mitigate.switching import MultiHostSwitch, Switch, joined
from sftriage.trainer.monitor import RINGS_ENV
from sftriage.trainer.recording import step_now

AS_BEFORE = "gradients are reduced as before"

_MOST = dist.AllreduceOptions()
_MOST.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)


class Stragglar:
    """Reduces gradients in its own group and thread; ``straggler`` is a rank of the group, or None.

    It reduces buckets in order while backward continues. If one fails, backward raises, as with torch's all-reduce,
    within ``timeout`` (torch's default is half an hour, whatever the job's is). Create it on all ranks of the ``group``
    (default: all) at the same time.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.straggler: int | None = None
        self.group = dist.new_group(ranks, timeout, use_local_synchronization=True)
        self._ranks = ranks
        self._worker = ThreadPoolExecutor(1, "sftriage-stragglar")
        self._switch: Switch | None = None
        self._votes = array("q", bytes(24))
        self._votes_tensor = torch.frombuffer(self._votes, dtype=torch.int64)
        # Duration and bytes of the exchanges of the current round.
        self._took_ns = self._size_bytes = 0

    def follow(self, switch: Switch) -> None:
        """Take the straggler from the group's switch, anew for each backward."""
        self._switch = switch
        if isinstance(switch, MultiHostSwitch):
            switch.cast = self._cast

    def begin(self) -> None:
        """Begin a backward: its first gradients are ready, and those of the last backward are exchanged."""
        if self._switch is None:
            return
        if self.straggler is None and self._took_ns:
            self._switch.exchanged(self._took_ns, self._size_bytes)
        self._took_ns = self._size_bytes = 0
        value = self._switch.begin(step_now())
        self.straggler = value - 1 if value else None

    def _cast(self, words: Sequence[int]) -> Callable[[], Sequence[int]]:
        # (the group's method on one tensor: torch's wrapper takes longer than the exchange)
        for at, word in enumerate(words):
            self._votes[at] = word
        exchange = self.group.allreduce([self._votes_tensor], _MOST)

        def counted() -> Sequence[int]:
            exchange.wait()
            return self._votes

        return counted

    def switch(self, straggler: int | None) -> None:
        """Name the straggler, or None. Call on all ranks between two steps; the first rank's value applies to all.

        Raises UsageError if the group has no such rank.
        """
        named = torch.tensor([straggler is not None, straggler or 0], device="cpu")
        dist.broadcast(named, self._ranks[0], group=self.group)
        is_named, rank = named.tolist()
        if is_named and not 0 <= rank < len(self._ranks):
            raise UsageError(f"straggler {rank} is not among {len(self._ranks)} ranks")
        self.straggler = rank if is_named else None

    def start(self, gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Start averaging a flat gradient over all ranks, in place."""
        if gradient.device.type != "cpu":
            raise UsageError(f"gradients on {gradient.device}: StragglAR needs them on the CPU")
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._worker.submit(self._reduce, gradient, self.straggler, done)
        return done

    def _reduce(self, gradient: torch.Tensor, straggler: int | None, done: torch.futures.Future[torch.Tensor]) -> None:
        began_ns = monotonic_ns()
        try:
            gradient.div_(len(self._ranks))
            if straggler is None or len(self._ranks) < 2:
                dist.all_reduce(gradient, group=self.group)
            else:
                others = [rank for at, rank in enumerate(self._ranks) if at != straggler]
                _Exchange(gradient, [*others, self._ranks[straggler]], self.group).run()
            self._took_ns += monotonic_ns() - began_ns
            self._size_bytes += gradient.numel() * gradient.element_size()
            done.set_result(gradient)
        except Exception as error:
            done.set_exception(error)  # type: ignore[arg-type]  # torch says that it takes a value


def stragglar_hook(
    state: Stragglar,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch re-exports it by a star
) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: DistributedDataParallel calls it with each bucket of gradients."""
    if bucket.index() == 0:
        state.begin()
    return state.start(bucket.buffer())


def attach(model: torch.nn.Module, timeout: timedelta | None = None) -> Stragglar | None:
    """Register the hook, so that a policy's ``mitigate`` can reduce gradients around a straggler. Call on all ranks.

    Returns None if sftriage does not watch the job, and with a warning if gradients are on a GPU, some ranks are not
    watched, or the model is no `DistributedDataParallel` or has another hook. If ranks are on several hosts, they
    exchange votes of 24 bytes about once a second.
    """
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        if RINGS_ENV in os.environ:
            warn("%s: StragglAR needs DistributedDataParallel, not %s", AS_BEFORE, type(model).__name__)
        return None
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    switch = joined(
        AS_BEFORE,
        "StragglAR needs gradients on the CPU and all ranks watched by sftriage",
        model.process_group,
        fits=on_cpu,
        multi_host=True,
    )
    if switch is None:
        return None
    state = Stragglar(model.process_group, timeout)
    state.follow(switch)
    try:
        model.register_comm_hook(state, stragglar_hook)
    except RuntimeError as error:
        # (on all ranks alike: the model has another hook)
        warn("%s: %s", AS_BEFORE, str(error).partition("\n")[0])
        return None
    return state


class _Exchange:
    def __init__(self, gradient: torch.Tensor, ranks: list[int], group: dist.ProcessGroup) -> None:
        self._chunks = gradient.tensor_split(len(ranks) - 1)
        self._received = torch.empty_like(self._chunks[0])
        self._ranks, self._group = ranks, group

    def run(self) -> None:
        me, straggler = self._ranks.index(dist.get_rank()), len(self._ranks) - 1
        if me != straggler:
            # Each of the others sums a chunk. Not by Gloo's ``reduce_scatter_tensor``, which all-reduces everything:
            # twice the bytes, and a subgroup's cost.
            for distance in range(1, straggler):
                target, source = (me + distance) % straggler, (me - distance) % straggler
                self._add(target, target, me, source)
        for number, sends in enumerate(schedule_of(len(self._ranks))):
            if number < straggler and me in (number, straggler):
                peer = straggler if me == number else number
                self._add(number, peer, number, peer)
                continue
            self._transfer(
                [(self._ranks[send.target], self._chunks[send.chunk]) for send in sends if send.source == me],
                [(self._ranks[send.source], self._chunks[send.chunk]) for send in sends if send.target == me],
            )

    def _add(self, sent: int, target: int, own: int, source: int) -> None:
        received = self._received[: self._chunks[own].numel()]
        self._transfer([(self._ranks[target], self._chunks[sent])], [(self._ranks[source], received)])
        self._chunks[own].add_(received)

    def _transfer(self, sent: Iterable[tuple[int, torch.Tensor]], received: Iterable[tuple[int, torch.Tensor]]) -> None:
        operations: list[Any] = [
            dist.P2POp(call, chunk, peer, self._group)
            for call, ends in ((dist.isend, sent), (dist.irecv, received))
            for peer, chunk in ends
            if chunk.numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
