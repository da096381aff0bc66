"""The seam `optimizer`: what says that one steps, which ends a step, and what clips gradients by their norm."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sftriage.seams import models
from sftriage.seams.hooks import AFTER, BEFORE

if TYPE_CHECKING:
    from sftriage.seams.patches import Seams


class Optimizers:
    """Hooks before and after each optimizer's step, ``GradScaler.step``, and clipping by norm.

    Attributes:
        seen: optimizers that have stepped in the first round, by id.
        clip_across_ranks: gradients that are spread over the ranks are clipped.
    """

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self.seen: dict[int, weakref.ref[Any]] = {}
        self.clip_across_ranks = False
        self._handles: list[Any] = []
        self._slow: tuple[Callable[..., object], ...] = ()

    def put_in(self) -> None:
        """Put the seam in."""
        replaced, torch = self._seams.replaced, sys.modules["torch"]
        self._slow = self._hooks()
        self._hook(*self._slow)
        replaced.wrap(sys.modules["torch.amp.grad_scaler"].GradScaler, "step", self._scaling)
        clipping = sys.modules["torch.nn.utils.clip_grad"]
        original = clipping.clip_grad_norm_
        replaced.stage(clipping, "clip_grad_norm_", "optimizer", self._clips)
        if torch.nn.utils.clip_grad_norm_ is original:
            replaced.put(torch.nn.utils, "clip_grad_norm_", clipping.clip_grad_norm_)

    def take_out(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            with contextlib.suppress(Exception):
                handle.remove()

    def settle(self, made: Callable[..., Any], ender: int) -> Any:
        """Have these hooks do from now on what ``made`` makes of them; what counts the steps that end with this one."""
        begins, ended = self._slow
        counting = made(AFTER, "optimizer", ended, ender)
        self._hook(made(BEFORE, "optimizer", begins, ender), counting)
        return counting

    def _hook(self, begins: Callable[..., object], ended: Callable[..., object]) -> None:
        optimizer = sys.modules["torch.optim.optimizer"]
        for one in self._handles:
            one.remove()
        self._handles = [
            optimizer.register_optimizer_step_pre_hook(begins),
            optimizer.register_optimizer_step_post_hook(ended),
        ]

    def _hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        seams, steps = self._seams, self._seams.steps

        def begins(optimizer: Any, args: object, kwargs: object) -> None:
            if seams.tracing() or "optimizer" not in seams.on:
                return
            try:
                if steps.monitor is None:
                    self.seen[id(optimizer)] = weakref.ref(optimizer)
                steps.optimizer_begins(id(optimizer))
            except Exception as error:
                seams.fail("optimizer", error)

        def ended(optimizer: Any, args: object, kwargs: object) -> None:
            if seams.tracing() or "optimizer" not in seams.on:
                return
            try:
                steps.optimizer_ended(id(optimizer))
            except Exception as error:
                seams.fail("optimizer", error)

        return begins, ended

    def _scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``GradScaler.step(optimizer)``: where gradients are infinite the optimizer's own step is never called."""
        steps = self._seams.steps

        def begins(_scaler: object, optimizer: Any, *_: object, **__: object) -> bool:
            # (apart from the optimizer's own step, which is inside this one)
            steps.optimizer_begins(-id(optimizer))
            return True

        def ended(_answer: object, _scaler: object, optimizer: Any, *_: object) -> None:
            steps.optimizer_ended(-id(optimizer))

        return self._seams.replaced.around(original, "optimizer", begins, ended)

    def _clips(self, norm: object) -> None:
        """Clipping by norm is the optimizer's business, and under FSDP an exchange between the ranks."""
        self.clip_across_ranks |= models.is_sharded(norm)


def frames(counters: dict[str, dict[str, int]]) -> int:
    """How many frames the compiler has compiled, of what it counts."""
    found = counters.get("frames")
    return 0 if found is None else found.get("total", 0)
