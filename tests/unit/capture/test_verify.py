"""A trace that is not what was promised is a failed capture."""

import contextlib
import json

import pytest

from sftriage.capture.torch_profiler import verify_stacks, verify_trace
from sftriage.errors import CaptureError
from sftriage.model.captures import CaptureRequest, CaptureResult

REQUEST = CaptureRequest("w0-9-r2-x-1", 2, "torch", steps=3, warmup_steps=1, max_seconds=10, max_bytes=100_000)
RESULT = CaptureResult("w0-9-r2-x-1", 2, "stored", first_step=5, last_step=7)


def trace(steps=(5, 6, 7), rank: int | None = 2, **more: object) -> dict[str, object]:
    events = [{"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": n, "dur": 1} for n in steps]
    its = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 4}}
    return {"traceEvents": [*events, {"ph": "M", "name": "process_name"}], **its, **more}


def verified(tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    verify_trace(path, REQUEST, RESULT)


@pytest.mark.parametrize("before", ["", " ", "\n  "])  # torch writes a space
def test_a_trace_with_the_promised_steps_passes(tmp_path, before):
    verified(tmp_path, before + json.dumps(trace()) + "\n")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(trace(steps=(5, 7)), r"lacks step 6$"), (json.dumps(trace())[:-5], r"not Kineto JSON|not whole JSON")],
    ids=["a step is missing", "cut short by a full disk"],
)
def test_a_trace_that_is_not_whole_is_refused(tmp_path, content, reason):
    with pytest.raises(CaptureError, match=reason):
        verified(tmp_path, content)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"sftriage": {"step": [5, 6, 6, 7]}}', None),
        ('{"sftriage": {"step": []}}', "no stack was sampled"),
        ('{"sftriage": {"step": [5, 8]}}', "of other steps than 5 to 7"),
        ('{"sftriage": {"step": [true]}}', "of other steps"),
        ('{"sftriage": {"step": [[5]]}}', "no file of sampled stacks"),
        ('{"sftriage": {"step": [5', "no file of sampled stacks"),
        ("[]", "no file of sampled stacks"),
        (None, "cannot be read: No such file"),
    ],
)
def test_sampled_stacks_are_of_the_promised_steps(tmp_path, content, reason):
    file = tmp_path / "stacks.json"
    if content is not None:
        file.write_text(content)
    with contextlib.nullcontext() if reason is None else pytest.raises(CaptureError, match=reason):
        verify_stacks(file, REQUEST, RESULT)


NOT_KINETO = ["[]", "{}", '{"traceEvents": 3}', "null", ""]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (trace(rank=1), "of rank 1; rank 2 was asked for"),
        (trace(filler="x" * 100_000), "at most 100000 were allowed"),
        ('{"traceEvents": [3]}', "lacks steps 5, 6, 7"),
        *((content, "not Kineto JSON") for content in NOT_KINETO),
    ],
    ids=["another rank's", "too large", "no events", *NOT_KINETO],
)
def test_a_trace_that_is_not_the_one_asked_for_is_refused(tmp_path, content, reason):
    with pytest.raises(CaptureError, match=reason):
        verified(tmp_path, content)


@pytest.mark.parametrize(
    ("result", "reason"),
    [(RESULT, "No such file"), (CaptureResult("w0-9-r2-x-1", 2, "stored"), "names no steps")],
)
def test_a_trace_that_is_not_there_or_has_no_steps_to_look_for_is_refused(tmp_path, result, reason):
    with pytest.raises(CaptureError, match=reason):
        verify_trace(tmp_path / "trace.json", REQUEST, result)
