"""Turns what the seams report into the steps and stages of a `Monitor`. Imports no torch.

A step ends, and the next begins, where the optimizer has stepped. The first round shows which optimizer is the last of
a step, and which models are trained; the monitor is made after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sftriage.trainer.monitor import Monitor

STAGES = ("data", "forward", "backward", "optimizer")
H2D = "h2d"
"""A stage of frameworks that copy batches to a device themselves."""
EXCHANGE = "exchange"
"""A stage of jobs of several ranks: the time a rank waits in a collective, inside any other stage."""
ALL_STAGES = (*STAGES, H2D, EXCHANGE)
EVALUATION, CHECKPOINT, COMPILATION = "evaluation", "checkpoint", "compilation"
OF_LOADER = ("num_workers", "batch_size", "pin_memory", "prefetch_factor", "persistent_workers")
LOADED: deque[dict[str, object]] = deque(maxlen=4)
"""These attributes of the DataLoaders that began an iteration last: a loop need not hold a reference to its loader."""
IN_BACKWARD = 0
"""The id of all optimizers that step while gradients are accumulated: no object has it."""
_NO_THREAD = -1
"""No thread has this ident."""


class Rounds:
    """Finds which of several optimizers ends a training step: the last one before the first steps again."""

    def __init__(self) -> None:
        self.ender: int | None = None
        self.alone: int | None = None  # the only optimizer of the latest steps
        self._last: int | None = None
        self._stepped: set[int] = set()

    def ends(self, optimizer: int) -> bool:
        before, self._last = self._last, optimizer
        self.alone = optimizer if before == optimizer == self.ender else None
        if optimizer == self.ender:
            self._stepped.clear()
            return True
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            return False
        # This optimizer steps twice in a round without the ender: the round ended with the optimizer before it.
        self.ender = before
        self._stepped.clear()
        if before == optimizer:
            return True
        self._stepped.add(optimizer)
        return False


class StageSteps:
    """The steps of one training thread: the first one that calls ``backward()`` or an optimizer.

    ``begin`` makes the monitor after the first round, or returns None; ``ends`` is called at each end of a step.
    """

    def __init__(self, begin: Callable[[], Monitor | None], ends: Callable[[], object]) -> None:
        self._begin, self._ends = begin, ends
        self.monitor: Monitor | None = None  # records the steps, from the second round on
        self.stages: tuple[str, ...] = STAGES
        self.opened: list[str] = []  # stages, outermost first
        # By stage: not empty once a seam in C may enter and leave it without `enter` and `leave`.
        self.steady: dict[str, list[bool]] = {stage: [] for stage in ALL_STAGES}
        self.stepping: list[int] = []  # optimizers whose step is under way, outermost first
        self.stepped_in_backward = False  # an optimizer stepped while gradients were accumulated
        self.kinds: set[str] = set()  # of this step: evaluation, checkpoint, compilation, loader start
        self.counting: Any = None  # the hook in C that ends steps, and counts them
        self.led = False  # a framework marks where steps end (`ended`), instead of an optimizer
        self.first = 0  # the number of the loop's first step, by default
        self.turns = Rounds()
        self.spans: dict[str, AbstractContextManager[None]] = {}  # the monitor's context manager of each stage
        self._entered = dict.fromkeys(ALL_STAGES, 0)
        self._rounds = self._thread = 0
        self._step: AbstractContextManager[None] | None = None

    @property
    def rounds(self) -> int:
        return self._rounds + getattr(self.counting, "rounds", 0)

    @property
    def entered(self) -> dict[str, int]:
        return {stage: n + getattr(self.spans.get(stage), "entered", 0) for stage, n in self._entered.items()}

    def settle(self, *stages: str) -> None:
        """Let seams in C enter and leave these stages."""
        for stage in stages:
            if stage in self.spans:
                self.steady[stage][:] = [True]

    def forget(self, *stages: str) -> None:
        """Close these stages for good; by default all."""
        for stage in stages or self.steady:
            self.steady.get(stage, []).clear()
            self.opened[:] = [opened for opened in self.opened if opened != stage]

    def enter(self, stage: str) -> bool:
        """Enter a stage; False, and nothing to leave, if it is open or this is another thread."""
        if get_ident() != self._thread:
            if self._thread or stage not in ("backward", "optimizer"):
                return False
            self._thread = get_ident()
        opened = self.opened
        if stage in opened:
            return False
        opened.append(stage)
        span = self.spans.get(stage)
        if span is not None:
            span.__enter__()
        else:
            self._entered[stage] += 1
        return True

    def leave(self, stage: str) -> None:
        """Leave a stage, and all stages that are still open in it."""
        opened = self.opened
        if stage not in opened or get_ident() != self._thread:
            return
        left = None
        while left != stage:
            left = opened.pop()
            span = self.spans.get(left)
            if span is not None:
                span.__exit__(None, None, None)
        if self.stepped_in_backward and stage == "backward":
            self.stepped_in_backward = False
            self.stepped(IN_BACKWARD)

    def optimizer_begins(self, optimizer: int) -> None:
        """An optimizer's step begins, perhaps inside that of another, or while gradients are accumulated."""
        if not self.stepping and "backward" in self.opened:
            return
        if optimizer in self.stepping:  # (an exception ended that step)
            del self.stepping[self.stepping.index(optimizer) :]
            if not self.stepping:
                self.leave("optimizer")
        if not self.stepping:
            self.enter("optimizer")
        if get_ident() == self._thread:
            self.stepping.append(optimizer)

    def optimizer_ended(self, optimizer: int) -> None:
        """An optimizer's step ended, which may end the training step."""
        if not self.stepping and "backward" in self.opened:  # (perhaps in a thread of autograd)
            self.stepped_in_backward = True
            self.steady["backward"].clear()
            return
        if get_ident() != self._thread or optimizer not in self.stepping:
            return
        del self.stepping[self.stepping.index(optimizer) :]
        if not self.stepping:
            self.leave("optimizer")
            self.stepped(abs(optimizer))

    def note(self, kind: str) -> None:
        """Give the open step a kind: it does something that ordinary steps do not."""
        if self.monitor is not None and get_ident() == self._thread and kind not in self.kinds:
            self.kinds.add(kind)
            self.monitor.note(kind=_kind(self.kinds))

    def stop(self) -> None:
        monitor, self.monitor = self.monitor, None
        self._thread = _NO_THREAD
        self.forget()
        self._entered, self.spans, self._step = self.entered, {}, None
        if monitor is not None:
            monitor.close()

    def abandon(self) -> None:
        """Record nothing in a forked child of a training process: it is a worker. Other children may train."""
        if self._thread:
            self.forget()
            self.monitor, self._thread, self.spans, self._step = None, _NO_THREAD, {}, None

    def stepped(self, optimizer: int) -> None:
        """An optimizer's step and its stage are over; the last of a round ends a training step."""
        if not self.led and self.turns.ends(optimizer):
            self.ended()

    def ended(self, number: int | None = None) -> None:
        """End the step and begin the next, whose ``number`` is by default one more than the last's, from 0."""
        if get_ident() != self._thread:
            return
        self._rounds += 1
        if self._step is None:
            # (the seams know the first round from its first backward on)
            monitor = None if self.led and self.rounds == 1 else self._begin()
            if monitor is None:
                return
            self.monitor, self._step = monitor, monitor.step()
            self.spans = {stage: monitor.stage(stage) for stage in self.stages}
            monitor.step(self.first + self.rounds + 1 if number is None else number).__enter__()
        else:
            self._ends()
            while self.opened:
                self.leave(self.opened[0])
            self._step.__exit__(None, None, None)
            self.kinds.clear()
            (self._step if number is None or self.monitor is None else self.monitor.step(number)).__enter__()


def _kind(kinds: set[str]) -> str:
    if COMPILATION in kinds:
        return COMPILATION
    from sftriage.model.windows import LOADER_START  # not above: a process that does not train need not have it

    work = kinds - {LOADER_START} or kinds
    return "eval+checkpoint" if len(work) > 1 else next(iter(work))
