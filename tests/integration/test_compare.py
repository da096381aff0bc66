"""The job of the comparison runs with and without sftriage, and what runs beside the trainers is counted."""

import sys
from pathlib import Path

import pytest

from bench.crew import RowFailedError
from bench.jobs.compared import Plan
from bench.peers import watch

STEPS = 30


@pytest.mark.parametrize(("tool", "beside"), [("bare", False), ("sftriage", True)])
def test_a_job_runs_to_its_end_with_a_tool_or_without(tmp_path, tool, beside):
    ran = watch(tool, Plan(tool, "", STEPS, seed=1, onset=STEPS), 2, tmp_path / tool, Path(sys.executable))
    # THEN every step has its end, and only a tool takes something beside the trainers
    assert len(ran.ended_s) == STEPS
    assert ran.ended_s == sorted(ran.ended_s)
    assert (ran.cpu_s > 0, ran.peak_bytes > 0, ran.written_bytes > 0) == (beside,) * 3


def test_a_job_that_fails_is_reported_with_its_last_lines(tmp_path):
    # GIVEN a fault with a period of no steps
    plan = Plan("bare", "", STEPS, seed=1, onset=0, rank=0, stage="data", every=0)
    with pytest.raises(RowFailedError, match=r"torch\.distributed\.run .*: status 1\n"):
        watch("bare", plan, 1, tmp_path / "job", Path(sys.executable))
