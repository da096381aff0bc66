"""What a recording drives at step boundaries, without knowing what it does: captures, gradients, device time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StepHook(Protocol):
    """What a recording drives at step boundaries, on the training thread: the executor of captures.

    None of its methods raises.

    Attributes:
        doorbell: a word that changes when `before_step` has something to do.
        busy: `before_step` is wanted at the next step whether the doorbell changes or not.
        stepping: `after_step` is wanted at the end of this step.
        annotating: `follow` is wanted at every switch of stages in this step.
    """

    doorbell: memoryview

    @property
    def busy(self) -> bool:
        """See the class."""

    @property
    def stepping(self) -> bool:
        """See the class."""

    @property
    def annotating(self) -> bool:
        """See the class."""

    def before_step(self, number: int) -> bool:
        """Called before a step starts; says whether a heavy profiler touched the time around it."""

    def after_step(self) -> None:
        """Called after the step has been published."""

    def follow(self, stages: Sequence[str]) -> None:
        """Called with the stages that are open now, outermost first."""

    def close(self, wait: bool) -> None:
        """Called once, at the end; ``wait`` says whether it may take a while."""

    def abandon(self) -> None:
        """Called in a forked child, which has to keep its hands off."""


class DeviceWatch(Protocol):
    """What records how long the device was at each stage, on the training thread. None of its methods raises."""

    def begin(self, number: int, now_ns: int) -> None:
        """Called when a step has begun."""

    def mark(self, at: int) -> None:
        """Called when the step has gone over to the stage of this word of the slot."""

    def end(self, seq: int, capturing: bool, incomplete: bool) -> None:
        """Called when a step ends, with the number of steps before it and whether a heavy profiler touched it."""

    def settle(self) -> None:
        """Called after the step has been published."""

    def close(self) -> None:
        """Called once, at the end."""

    def abandon(self) -> None:
        """Called in a forked child, which has to keep its hands off."""


class ReadyWatch(Protocol):
    """What knows when a step's last gradient was ready, on the training thread. None of its methods raises.

    Attributes:
        due: `settle` is wanted after this step.
    """

    @property
    def due(self) -> bool:
        """See the class."""

    def collect(self, incomplete: bool) -> int:
        """Called at the end of a step, with its durations complete: its ``ready_ns``."""

    def settle(self) -> None:
        """Called after the step has been published."""

    def close(self) -> None:
        """Called once, at the end or when another takes its place."""
