"""A trace that is not what was promised is a failed capture."""

import json

import pytest

from sftriage.capture import torch_profiler
from sftriage.capture.torch_profiler import verify_trace
from sftriage.errors import CaptureError
from sftriage.records import CaptureRequest, CaptureResult

REQUEST = CaptureRequest("w0-9-r2-x-1", 2, "torch", steps=3, warmup_steps=1, max_seconds=10, max_bytes=100_000)
RESULT = CaptureResult("w0-9-r2-x-1", 2, "stored", first_step=5, last_step=7)


def trace(steps=(5, 6, 7), rank: int | None = 2, **more: object) -> dict[str, object]:
    events = [{"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": n, "dur": 1} for n in steps]
    its = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 4}}
    return {"traceEvents": [*events, {"ph": "M", "name": "process_name"}], **its, **more}


@pytest.fixture(params=["parsed whole", "searched"])
def way(request, monkeypatch):
    """Small traces are parsed; large ones, in which a parse would take gigabytes, are searched."""
    if request.param == "searched":
        monkeypatch.setattr(torch_profiler, "WHOLE_PARSE_BYTES", 0)
    return request.param


@pytest.mark.parametrize("before", ["", " ", "\n  "])  # torch writes a space
def test_a_trace_with_the_promised_steps_passes(tmp_path, way, before):
    path = tmp_path / "trace.json"
    path.write_text(before + json.dumps(trace()) + "\n", encoding="utf-8")
    verify_trace(path, REQUEST, RESULT)


def test_a_missing_step_is_named(tmp_path, way):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace(steps=(5, 7))), encoding="utf-8")
    with pytest.raises(CaptureError, match=r"lacks step 6$"):
        verify_trace(path, REQUEST, RESULT)


def test_a_trace_cut_short_by_a_full_disk_is_refused(tmp_path, way):
    path = tmp_path / "trace.json"
    whole = json.dumps(trace())
    path.write_text(whole[:-5], encoding="utf-8")
    with pytest.raises(CaptureError, match=r"not Kineto JSON|not whole JSON"):
        verify_trace(path, REQUEST, RESULT)


def test_a_trace_of_another_rank_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace(rank=1)), encoding="utf-8")
    with pytest.raises(CaptureError, match="of rank 1; rank 2 was asked for"):
        verify_trace(path, REQUEST, RESULT)


def test_a_trace_over_the_byte_limit_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace(filler="x" * 100_000)), encoding="utf-8")
    with pytest.raises(CaptureError, match="at most 100000 were allowed"):
        verify_trace(path, REQUEST, RESULT)


@pytest.mark.parametrize("content", ["[]", "{}", '{"traceEvents": 3}', '{"traceEvents": [3]}', "null", ""])
def test_what_is_no_kineto_trace_is_refused(tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CaptureError):
        verify_trace(path, REQUEST, RESULT)


def test_a_trace_that_is_not_there_is_said(tmp_path):
    with pytest.raises(CaptureError, match="No such file"):
        verify_trace(tmp_path / "trace.json", REQUEST, RESULT)


def test_a_trainer_that_names_no_steps_has_captured_none(tmp_path):
    with pytest.raises(CaptureError, match="names no steps"):
        verify_trace(tmp_path / "trace.json", REQUEST, CaptureResult("w0-9-r2-x-1", 2, "stored"))
