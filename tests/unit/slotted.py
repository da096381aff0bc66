import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from sftriage.base.process import start_ticks
from sftriage.model.windows import StageSchema
from sftriage.trainer.layout import RingInfo

MakeInfo = Callable[..., RingInfo]


@pytest.fixture(scope="session")
def make_info() -> MakeInfo:
    def make(**changes: object) -> RingInfo:
        schema = StageSchema.closed(("data", "forward", "backward"), ("backward",))
        pid = os.getpid()
        info = RingInfo(3, 8, 1, 0, "job-7", "node-a", "", schema, 1_000, 2_000, pid, start_ticks(pid) or 0)
        return replace(info, **changes)  # type: ignore[arg-type]

    return make
