"""Which executor a request gets, and what must not overlap on one rank; a trace that is not what was promised."""

import contextlib
import json
from contextlib import closing
from pathlib import Path

import pytest

from sftriage.agent.agent import executor_for, overlap
from sftriage.agent.executor import verify_stacks, verify_trace
from sftriage.agent.nsys import NsysPlace
from sftriage.errors import CaptureError
from sftriage.model.captures import CaptureRequest, CaptureResult
from sftriage.trainer.monitor import Monitor
from sftriage.trainer.sampler import NAME as SAMPLES_NAME


def request(profiler, rank=0, capture_id="c-1"):
    """A request; of ``sampled`` stacks, or of ``stacks`` from outside."""
    options = {"sample_stacks": True} if profiler == "sampled" else {}
    profiler = "stacks" if profiler == "sampled" else profiler
    bounds = {"steps": 1, "warmup_steps": 0, "max_seconds": 5, "max_bytes": 10**6}
    return CaptureRequest(capture_id, rank, profiler, **bounds, options=options)


@pytest.mark.parametrize(
    ("wanted", "running", "may"),
    [
        (("torch", 0), [], True),
        (("torch", 0), [("torch", 1), ("nsys", 2)], True),
        (("torch", 0), [("torch", 0)], False),
        (("torch", 0), [("nsys", 0)], False),
        (("nsys", 0), [("torch", 0)], False),
        (("nsys", 0), [("nsys", 0)], False),
        (("nsys", 0), [("stacks", 0)], True),
        (("stacks", 0), [("nsys", 0)], True),
        (("stacks", 0), [("torch", 0)], True),
        (("stacks", 0), [("stacks", 1)], True),
        (("stacks", 0), [("stacks", 0)], False),
        (("nsys", 0), [("stacks", 0), ("torch", 0)], False),
        # A trainer samples, or runs a profiler; stacks from outside may be taken meanwhile
        (("sampled", 0), [("torch", 0)], False),
        (("nsys", 0), [("sampled", 0)], False),
        (("sampled", 0), [("stacks", 0)], True),
        (("stacks", 0), [("sampled", 0)], True),
        (("sampled", 0), [("sampled", 1)], True),
    ],
)
def test_the_gpus_tracing_has_one_owner_on_a_rank(wanted, running, may):
    others = [request(profiler, rank, f"c-{number}") for number, (profiler, rank) in enumerate(running)]
    reason = overlap(request(*wanted), others)
    assert (reason is None) == may
    assert reason is None or f"of rank {wanted[1]} is under way" in reason


@pytest.fixture
def executor(tmp_path):
    """The executor of a profiler on a rank whose recorder is in this directory."""
    place = NsysPlace(Path("/usr/bin/nsys"), "sft-run", ("nvtx",), tmp_path)
    with Monitor(rank=0, world_size=1, rings=tmp_path, spool=tmp_path) as monitor:
        yield lambda profiler, place=place: executor_for(
            request(profiler), monitor.info, tmp_path, tmp_path, place, lambda: None
        )


def test_without_a_launch_under_nsys_the_reason_says_how(executor):
    with pytest.raises(CaptureError, match="sftriage run --nsys"):
        executor("nsys", None)


@pytest.mark.parametrize("profiler", ["torch", "nsys"])
def test_a_rank_without_a_mailbox_cannot_be_reached(executor, tmp_path, profiler):
    (tmp_path / "rank-0.0.mailbox").unlink()
    with pytest.raises(CaptureError, match="rank 0 cannot be reached"):
        executor(profiler)


@pytest.mark.parametrize(
    ("trace", "detail"),
    [
        (None, "no trace: the disk is full"),  # (the trainer's reason)
        (b'{"traceEvents": [', "no trace: the trace is not Kineto JSON: c-1.json: cut short: it ends at byte 17"),
    ],
)
def test_stacks_are_kept_where_the_trace_beside_them_is_lost(executor, tmp_path, trace, detail):
    # GIVEN a capture that has left its stacks, and no trace or a broken one
    (tmp_path / f"c-1.{SAMPLES_NAME}").write_text('{"sftriage": {"step": [5, 5]}}')
    if trace is not None:
        (tmp_path / "c-1.json").write_bytes(trace)
    message = "" if trace is not None else "no trace: the disk is full"
    result = CaptureResult("c-1", 0, "stored", message, first_step=5, last_step=5)
    with closing(executor("torch")) as found:
        # WHEN it is verified THEN it is stored with the stacks alone, and says why
        assert found.verify(result).detail.startswith(detail)
        assert [one.path.name for one in found.products()] == [f"c-1.{SAMPLES_NAME}"]
        (tmp_path / f"c-1.{SAMPLES_NAME}").unlink()
        with pytest.raises(CaptureError, match="the trace cannot be read"):
            found.verify(result)
    assert list(tmp_path.glob("c-1.*")) == []


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
    [
        ('{"sftriage": {"step": [5, 6, 6, 7]}}', None),
        ('{"sftriage": {"step": []}}', "no stack was sampled"),
        ('{"sftriage": {"step": [5, 8]}}', "not of steps 5 to 7"),
        ('{"sftriage": {"step": [true]}}', "not of steps"),
        ('{"sftriage": {"step": [[5]]}}', "not a file of sampled stacks"),
        ('{"sftriage": {"step": [5', "not a file of sampled stacks"),
        ("[]", "not a file of sampled stacks"),
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
        (trace(steps=(5, 7)), r"lacks step 6$"),
        (json.dumps(trace())[:-5], r"not Kineto JSON|not whole JSON"),
        (trace(rank=1), "of rank 1; expected rank 2"),
        (trace(filler="x" * 100_000), "at most 100000 were allowed"),
        ('{"traceEvents": [3]}', "lacks steps 5, 6, 7"),
        *((content, "not Kineto JSON") for content in NOT_KINETO),
    ],
    ids=["a step is missing", "cut short by a full disk", "another rank's", "too large", "no events", *NOT_KINETO],
)
def test_a_trace_other_than_the_requested_one_is_refused(tmp_path, content, reason):
    with pytest.raises(CaptureError, match=reason):
        verified(tmp_path, content)


@pytest.mark.parametrize(
    ("result", "reason"),
    [(RESULT, "No such file"), (CaptureResult("w0-9-r2-x-1", 2, "stored"), "did not name the steps")],
)
def test_a_trace_that_is_not_there_or_has_no_steps_to_look_for_is_refused(tmp_path, result, reason):
    with pytest.raises(CaptureError, match=reason):
        verify_trace(tmp_path / "trace.json", REQUEST, result)
