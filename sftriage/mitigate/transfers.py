"""Activations and gradients of a pipeline sent from the host, so that nothing computed later waits for them.

    HostTransfers(stage)   # on all ranks of the pipeline, before its first step

In one queue with the next computation, a slow link would hold both up. Here each result leaves in a thread of its own,
over a group of its own (arXiv 2504.19232, section 5). How torch asks a stage for its transfers is not public: another
shape than in torch 2.13 is refused before anything runs, and so are stages that are not on the CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from sftriage.errors import UsageError

_SENDS, _RECEIVES = ("get_fwd_send_ops", "get_bwd_send_ops"), ("get_fwd_recv_ops", "get_bwd_recv_ops")


class HostTransfers:
    """What one stage sends and receives, once this is made; an exchange that fails does so at a later one, or `finish`.

    All ranks of the stage's group make theirs at the same time. An exchange may wait for a rank for ``timeout``
    (torch's default is half an hour). Raises UsageError where the stage is not on the CPU, or torch makes stages in
    another way.
    """

    def __init__(self, stage: Any, timeout: timedelta | None = None) -> None:
        if not all(callable(getattr(stage, name, None)) for name in (*_SENDS, *_RECEIVES)):
            raise UsageError(f"torch {torch.__version__} sends activations in another way: it goes on doing so")
        if stage.device.type != "cpu":
            raise UsageError(f"a stage on {stage.device}: transfers from the host are here for those on the CPU")
        ranks = dist.get_process_group_ranks(stage.group or dist.group.WORLD)
        self.group = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
        self._worker = ThreadPoolExecutor(1, "sftriage-transfers")
        self._under_way: deque[Future[dist.Work]] = deque()
        for names, instead in ((_SENDS, self._send), (_RECEIVES, self._receive)):
            for name in names:
                setattr(stage, name, partial(instead, getattr(stage, name)))

    def finish(self) -> None:
        """Wait for all that was sent."""
        while self._under_way:
            self._under_way.popleft().result().wait()

    def _send(self, asked: Callable[[int], list[dist.P2POp]], microbatch: int) -> list[dist.P2POp]:
        while self._under_way and self._under_way[0].done() and self._under_way[0].result().is_completed():
            self._under_way.popleft()
        for one in asked(microbatch):
            # (what is computed next may be put where this lies)
            self._under_way.append(self._worker.submit(self._leave, one.tensor.detach().clone(), one.peer))
        return []

    def _receive(self, asked: Callable[[int], list[dist.P2POp]], microbatch: int) -> list[dist.P2POp]:
        return [dist.P2POp(dist.irecv, one.tensor, one.peer, self.group) for one in asked(microbatch)]

    def _leave(self, tensor: torch.Tensor, peer: int) -> dist.Work:
        """In the thread; it waits for nobody: stages on both sides may be served in any order."""
        sent = dist.isend(tensor, peer, self.group)
        assert sent is not None  # (it is None on ranks that are not of the group)
        return sent
