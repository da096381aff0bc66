"""A framework says where the steps of its loop end, and what is done in them; the stages come from torch's seams."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sftriage.integrations.verdicts import VerdictLog, log_verdicts
from sftriage.log import warn

if TYPE_CHECKING:
    from sftriage.seams.patches import Seams


class Lead:
    """From when training begins to its end. Nothing is raised into it.

    Where nothing is recorded, or the script makes a `Monitor` by itself, no stages are.

    Args:
        targets: where verdicts are logged (`log_verdicts`).
        optimizers: the optimizers say where steps end, and not a framework by `ended`.
        first_step: the number of the loop's first step, where that is the optimizers' business.

    Attributes:
        log: what logs verdicts.
    """

    def __init__(self, targets: Sequence[Any] = (), *, optimizers: bool = False, first_step: int = 0) -> None:
        self._seams: Seams | None = None
        try:
            if "torch" in sys.modules:
                from sftriage.seams import patches

                self._seams = patches.lead()
        except Exception as error:
            warn("no stages here: %r", error)
        if self._seams is not None:
            self._seams.steps.led, self._seams.steps.first = not optimizers, first_step
        self.log = VerdictLog()
        try:
            self.log = log_verdicts(*targets)
        except Exception as error:
            warn("no verdicts are logged: %r", error)

    def ended(self, next_number: int) -> None:
        """A step has ended; the number of the one that begins."""
        self._have(lambda seams: seams.steps.ended(next_number))

    def note(self, kind: str) -> None:
        """Something is done in this step that ordinary ones do not (`sftriage.seams.steps`)."""
        self._have(lambda seams: seams.steps.note(kind))

    def stop(self) -> None:
        """Training is over. Verdicts on the last steps are waited for, not long."""
        self._have(lambda seams: seams.stop())
        self._seams = None
        self.log.close()

    def _have(self, do: Callable[[Seams], object]) -> None:
        try:
            if self._seams is not None:
                do(self._seams)
        except Exception as error:
            self._seams = None
            warn("no more stages here: %r", error)
