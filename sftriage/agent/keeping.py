"""What is kept of one rank's ring: its logs, made and written once the disk takes them. Nobody waits for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path

from sftriage.errors import RingError
from sftriage.recorder import RingInfo
from sftriage.traces.disk import Counted, Do, refusal
from sftriage.windows.decoding import StepArrays
from sftriage.windows.logs import LOG_KIND
from sftriage.windows.slots import slot_bytes
from sftriage.windows.steplog import KeptSteps, StepLog

BROKEN = {"steps": "steps are judged but not kept", LOG_KIND: "device times are judged but not kept"}


class RankLog:
    """One log of a rank, of its steps or of its device times.

    Args:
        steps: where it lies.
        info: the ring's.
        kind: which of the two.
        kept: how much of it is kept; by default all.
        do: who writes.
        say: told of what cannot be kept at all.
        there: its files, where they are known (see `StepLog`).

    Attributes:
        info: the ring's; with the stages that an earlier agent's log of it has, if that could be opened.
    """

    def __init__(
        self,
        steps: Path,
        info: RingInfo,
        kind: str,
        kept: KeptSteps | None,
        do: Do,
        say: Callable[[str], None],
        there: Mapping[str, Sequence[Path]] | None = None,
    ) -> None:
        self._kind, self._do, self._say = kind, do, say
        self._make = partial(StepLog, steps, info, kind=kind, kept=kept, there=there)
        self._lane = f"{kind} of {info.rank}.{info.attempt}"
        self._log: StepLog | None = None
        self._broken: RingError | None = None
        self._do(self._open, self._lane)
        self.info = info if (log := self._opened()) is None else log.info

    @property
    def broken(self) -> RingError | None:
        """Why nothing can be kept here, whatever the disk takes."""
        return self._broken

    def take(self, steps: StepArrays, blocks: Set[int], cohort: str) -> None:
        """Keep steps of the rank, which is of a cohort by now; ``blocks`` of them stay where others are thinned."""
        if len(steps):
            size_bytes = len(steps) * slot_bytes(self.info.schema)
            counted = Counted("steps" if self._kind == "steps" else "device times", len(steps), size_bytes)
            self._do(partial(self._append, steps, frozenset(blocks), cohort), self._lane, counted, waits=False)

    def rest(self) -> None:
        """Keep no file open until there is more to be written."""
        if self._log is not None:
            self._log.close()

    def close(self) -> None:
        """Close it, after what waits to be written."""
        self._do(self._close, self._lane, waits=False)

    def _open(self) -> None:
        if self._log is None and self._broken is None:
            try:
                self._log = self._make()
            except RingError as error:
                self._fails(error)

    def _opened(self) -> StepLog | None:
        return self._log

    def _append(self, steps: StepArrays, blocks: frozenset[int], cohort: str) -> None:
        self._open()
        if (log := self._opened()) is None:
            return
        try:
            if log.info.schema != self.info.schema:
                raise RingError(f"{log.path}: has other stages")
            if log.info.cohort != cohort:
                log.join(cohort)
            log.append(steps, blocks)
        except RingError as error:
            self._fails(error)

    def _fails(self, error: RingError) -> None:
        """A disk that refuses is tried again; a log that is another writer's is none of ours."""
        if refusal(error) is not None:
            raise error
        self._close()
        self._broken = error
        self._say(f"{error}; {BROKEN[self._kind]}")

    def _close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
