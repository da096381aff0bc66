"""A framework says where the steps of its loop end, and what is done in them; the stages come from torch's seams."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sftriage.recorder.log import warn

if TYPE_CHECKING:
    from sftriage.seams.patches import Seams


class Lead:
    """From when training begins to its end. Nothing is raised into it.

    Where nothing is recorded, or the script makes a `Monitor` by itself, all this does nothing.

    Args:
        optimizers: the optimizers say where steps end, and not a framework by `ended`.
        first_step: the number of the loop's first step, where that is the optimizers' business.
    """

    def __init__(self, *, optimizers: bool = False, first_step: int = 0) -> None:
        self._seams: Seams | None = None
        try:
            if "torch" in sys.modules:
                from sftriage.seams import patches

                self._seams = patches.lead()
            if self._seams is not None:
                self._seams.steps.led, self._seams.steps.first = not optimizers, first_step
        except Exception as error:
            self._fail(error)

    def ended(self, next_number: int) -> None:
        """A step has ended; the number of the one that begins."""
        try:
            if self._seams is not None:
                self._seams.steps.ended(next_number)
        except Exception as error:
            self._fail(error)

    def note(self, kind: str) -> None:
        """Something is done in this step that ordinary ones do not (`sftriage.seams.steps`)."""
        try:
            if self._seams is not None:
                self._seams.steps.note(kind)
        except Exception as error:
            self._fail(error)

    def stop(self) -> None:
        """Training is over."""
        seams, self._seams = self._seams, None
        try:
            if seams is not None:
                seams.stop()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._seams = None
        warn("no stages here: %r", error)
