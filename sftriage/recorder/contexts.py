"""What a training script enters and leaves: the context managers of a step and of its stages.

They are the hot path: see `recording` for what they cost and why ``gate`` is all that they ask.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from threading import get_ident
from time import monotonic_ns

from sftriage.recorder.device import DeviceTime
from sftriage.recorder.layout import DURATIONS
from sftriage.recorder.recording import Recording
from sftriage.recorder.ring import CURRENT_STAGE, SINCE


class Stage:
    """The context manager of one stage. There is one for the life of its recording: entering allocates nothing.

    ``at`` is the word of the slot that holds its duration; ``outside_at``, of a sync stage, that of its outside time.
    """

    __slots__ = ("_at", "_index", "_outside_at", "_recording")

    def __init__(self, recording: Recording, at: int, outside_at: int) -> None:
        self._recording = recording
        self._at = at
        self._index = at - DURATIONS
        self._outside_at = outside_at

    def __enter__(self) -> None:
        recording = self._recording
        try:
            if get_ident() != recording.gate:
                recording.enter_slowly(self._at)
                return
            now = monotonic_ns()
            stack = recording.stack
            recording.words[stack[-1]] += now - recording.since
            recording.since = now
            stack.append(self._at)
            live = recording.live
            # The time first: a reader in between sees the old stage as just begun, not the new one as long under way.
            live[SINCE] = now
            live[CURRENT_STAGE] = self._index
        except Exception as error:
            recording.fail(error)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        recording = self._recording
        try:
            stack = recording.stack
            if get_ident() != recording.gate or stack[-1] != self._at:
                recording.leave_slowly(self._at)
                return
            now = monotonic_ns()
            words = recording.words
            words[self._at] += now - recording.since
            recording.since = now
            stack.pop()
            if self._outside_at and self._at not in stack:
                words[self._outside_at] = words[recording.other]
            live = recording.live
            live[SINCE] = now
            live[CURRENT_STAGE] = stack[-1] - DURATIONS
        except Exception as failure:
            recording.fail(failure)


class OtherStage(Stage):
    """``other``, entered by name. The bottom of the stack is ``other`` too, and must not be popped by a stray exit."""

    __slots__ = ()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._recording.leave_slowly(self._at)
        except Exception as failure:
            self._recording.fail(failure)


class MarkedStage:
    """A stage whose boundaries are marked on the device too; apart, so that others do not pay for the question."""

    __slots__ = ("_device", "_recording", "_stage")

    def __init__(self, recording: Recording, stage: Stage, device: DeviceTime) -> None:
        self._recording = recording
        self._stage = stage
        self._device = device

    def __enter__(self) -> None:
        self._stage.__enter__()
        # Whatever that came to, misuse included: the stage that runs now is the one on top.
        recording = self._recording
        if get_ident() == recording.owner:
            self._device.mark(recording.stack[-1])

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stage.__exit__(kind, error, trace)
        recording = self._recording
        if get_ident() == recording.owner:
            self._device.mark(recording.stack[-1])


class Step:
    """The context manager of a step; ``number`` is the job's own, or None for the one after the last."""

    __slots__ = ("_number", "_recording")

    def __init__(self, recording: Recording, number: int | None) -> None:
        self._recording = recording
        self._number = number

    def __enter__(self) -> None:
        try:
            self._recording.begin(self._number)
        except Exception as error:
            self._recording.fail(error)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._recording.end(kind is not None)
        except Exception as failure:
            self._recording.fail(failure)


class NotedStep(Step):
    """A step whose kind and work are given as it begins; apart, for most steps are given none."""

    __slots__ = ("_kind", "_work")

    def __init__(self, recording: Recording, number: int | None, kind: object, work: object) -> None:
        super().__init__(recording, number)
        self._kind = kind
        self._work = work

    def __enter__(self) -> None:
        try:
            self._recording.begin(self._number)
            self._recording.note(self._kind, self._work)
        except Exception as error:
            self._recording.fail(error)


def stages_of(recording: Recording) -> dict[str, AbstractContextManager[None]]:
    """The context manager of every stage of a recording, by name."""
    found: dict[str, AbstractContextManager[None]] = {}
    device = recording.device
    for at, name in enumerate(recording.info.schema.stages, DURATIONS):
        kind = OtherStage if at == recording.other else Stage
        stage = kind(recording, at, recording.outside.get(at, 0))
        found[name] = stage if device is None else MarkedStage(recording, stage, device)
    return found
