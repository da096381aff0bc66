"""Infos, and steps in slots, in which every number follows from the step's."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from sftriage.base.process import start_ticks
from sftriage.model.windows import StageSchema, StepRecord
from sftriage.recorder.layout import RingInfo
from tests.unit.windows.steps import raw as slots

MakeInfo = Callable[..., RingInfo]


@pytest.fixture(scope="session")
def make_info() -> MakeInfo:
    def make(**changes: object) -> RingInfo:
        schema = StageSchema.closed(("data", "forward", "backward"), ("backward",))
        pid = os.getpid()
        info = RingInfo(3, 8, 1, 0, "job-7", "node-a", "", schema, 1_000, 2_000, pid, start_ticks(pid) or 0)
        return replace(info, **changes)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def record_of() -> Callable[[RingInfo, int], StepRecord]:
    """The step of sequence number ``seq``."""

    def make(info: RingInfo, seq: int) -> StepRecord:
        stages, sync = len(info.schema.stages), len(info.schema.sync)
        return StepRecord(
            rank=info.rank,
            step=seq + 40,
            start_ns=seq * 1000,
            between_ns=seq * 10,
            durations_ns=tuple(seq * 100 + index for index in range(stages)),
            outside_ns=tuple(seq * 100 + stages + index for index in range(sync)),
            complete=True,
            capturing=False,
        )

    return make


@pytest.fixture(scope="session")
def slot_of(record_of) -> Callable[[RingInfo, int], bytes]:
    """The same as a whole slot."""
    return lambda info, seq: slots(seq, record_of(info, seq))
