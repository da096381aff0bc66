import json
import os
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.agent.executor import MailboxClient
from sftriage.errors import CaptureError, RingError
from sftriage.model.captures import CaptureRequest, CaptureResult
from sftriage.model.windows import plain
from sftriage.trainer import executor, layout
from sftriage.trainer.executor import DOORBELL, MAX_DETAIL_CHARS, MAX_MESSAGE_BYTES, REQUEST_BYTES, SIZE_BYTES, Mailbox
from sftriage.trainer.layout import HEADER_BYTES, LIVE_AT, RingFile, RingInfo
from tests.rings import word

REQUEST = CaptureRequest("c-1", 3, "torch", 5, 2, 30.0, 1 << 20, {"with_stack": True})
RESULT = CaptureResult(
    "c-1", 3, "stored", "", 7, 11, 1234, {"start": 0.1, "export": 2}, {"mono_ns": 1, "wall_ns": 1 << 60}
)


@pytest.fixture
def ends(tmp_path, make_info):
    """Both ends of one mailbox, of rank 3."""
    trainer = mailbox(tmp_path, make_info())
    with MailboxClient(tmp_path / "rank-3.0.mailbox") as client:
        yield trainer, client
    trainer.close()


def mailbox(directory: Path, info: RingInfo) -> Mailbox:
    """A rank's mailbox beside its ring, in which the doorbell is."""
    if not (directory / info.file_name("ring")).exists():
        RingFile(directory, info, 1).close()
    return Mailbox(directory, info)


def doorbell(trainer: Mailbox, directory: Path) -> int:
    """What the trainer reads in a step; the mailbox has the same count."""
    rung = word((directory / "rank-3.0.ring").read_bytes(), layout.DOORBELL)
    assert rung == trainer.live[DOORBELL]
    return rung


def forge(trainer: Mailbox, body: bytes) -> None:
    """A request as anybody who may write the file could leave it."""
    trainer._bytes[HEADER_BYTES : HEADER_BYTES + len(body)] = body
    trainer.live[REQUEST_BYTES] = len(body)
    trainer.live[executor.REQUEST_CRC] = crc32(body)
    trainer.live[executor.REQUEST_SEQ] += 1


def test_a_request_goes_out_and_its_result_comes_back(ends, tmp_path):
    trainer, client = ends
    assert (trainer.take(), client.poll(), client.progress().answered) == (None, None, True)
    # WHEN a request is posted THEN the doorbell rings and the trainer takes it, once
    assert client.post(REQUEST) == 1
    assert (doorbell(trainer, tmp_path), trainer.take(), trainer.take()) == (1, REQUEST, None)
    # AND its progress is seen from outside
    trainer.show("recording", 4)
    progress = client.progress()
    assert (progress.state, progress.steps, progress.answered) == ("recording", 4, False)
    # AND its result is seen once by this client, and by one that is started later
    trainer.answer(RESULT)
    assert (client.poll(), client.poll(), client.progress().answered) == (RESULT, None, True)
    with MailboxClient(client.path) as later:
        assert later.poll() == RESULT


def test_a_mailbox_is_private_and_takes_the_place_of_one_left_over(tmp_path, make_info):
    (tmp_path / "rank-3.0.mailbox").write_bytes(b"left over")
    Mailbox(tmp_path, make_info()).close()
    (path,) = tmp_path.iterdir()
    assert (path.stat().st_mode & 0o777, path.stat().st_size) == (0o600, SIZE_BYTES)


def test_one_request_at_a_time(ends):
    trainer, client = ends
    client.post(REQUEST)
    # THEN no other can take its place, until it is answered
    later = replace(REQUEST, capture_id="c-2")
    with pytest.raises(CaptureError, match="not answered"):
        client.post(later)
    assert trainer.take() == REQUEST
    trainer.answer(RESULT)
    assert (client.post(later), trainer.take()) == (2, later)


def test_a_request_that_does_not_belong_here_is_not_posted(ends):
    trainer, client = ends
    with pytest.raises(CaptureError, match="rank 4"):
        client.post(replace(REQUEST, rank=4))
    with pytest.raises(CaptureError, match="at most"):
        client.post(replace(REQUEST, options={"x" * MAX_MESSAGE_BYTES: True}))
    assert (trainer.take(), trainer.live[DOORBELL]) == (None, 0)


@pytest.mark.parametrize(("says", "heard"), [("cancel", "cancelled"), ("allow", "allowed")])
def test_a_cancellation_or_permission_applies_to_its_request_only(ends, says, heard):
    trainer, client = ends

    def said(capture_id: str) -> tuple[bool, bool]:
        return getattr(client, says)(capture_id), getattr(trainer, heard)

    assert not getattr(client, says)("c-1")
    client.post(REQUEST)
    trainer.take()
    assert not getattr(trainer, heard)
    assert (said("c-2"), said("c-1")) == ((False, False), (True, True))
    assert (trainer.cancelled + trainer.allowed, trainer.live[DOORBELL]) == (1, 2)
    # AND the next request is not meant by it
    trainer.answer(RESULT)
    assert not getattr(client, says)("c-1")
    client.post(replace(REQUEST, capture_id="c-3"))
    trainer.take()
    assert not getattr(trainer, heard)


GOOD = plain(REQUEST)


@pytest.mark.parametrize(
    "message",
    [
        [],
        "text",
        {},
        GOOD | {"extra": 1},
        {name: value for name, value in GOOD.items() if name != "steps"},
        *(GOOD | {"capture_id": wrong} for wrong in ("../../etc/passwd", 5)),
        GOOD | {"steps": 10**30},
        *(GOOD | {"max_seconds": wrong} for wrong in (float("nan"), "9")),
        GOOD | {"rank": 4},
        GOOD | {"profiler": "perf"},
    ],
)
def test_a_request_that_is_wrong_is_refused_with_a_reason(ends, message):
    trainer, _ = ends
    forge(trainer, json.dumps(message).encode())
    with pytest.raises(CaptureError, match=r"the request .+"):
        trainer.take()
    # AND it is not looked at again
    assert trainer.take() is None


PLACES = st.one_of(
    *(st.integers(at, at + size) for at, size in ((LIVE_AT, 103), (HEADER_BYTES, 200), (executor.RESULT_AT, 300)))
)


@settings(max_examples=200)
@given(
    st.booleans(), st.lists(st.tuples(PLACES, st.integers(0, 255)), max_size=8), st.none() | st.integers(0, SIZE_BYTES)
)
def test_both_ends_survive_any_bytes_in_the_mailbox(make_info, answered, damage, size_bytes):
    # GIVEN a request, answered or not, WHEN bytes of the file are overwritten
    with tempfile.TemporaryDirectory() as directory:
        path, trainer = Path(directory) / "rank-3.0.mailbox", mailbox(Path(directory), make_info())
        with MailboxClient(path) as client:
            client.post(REQUEST)
            if answered:
                assert trainer.take() == REQUEST
                trainer.answer(RESULT)
            for at, value in damage:
                trainer._bytes[at] = value
            # THEN the trainer takes it as it was posted, refuses it, or does not see it
            with suppress(CaptureError):
                assert trainer.take() in (REQUEST, None)
            trainer.close()
            # AND, also when the file is cut at any length, every call of a client answers, or says what is wrong
            if size_bytes is not None:
                os.truncate(path, size_bytes)
            for call in (
                client.progress,
                lambda: client.cancel("c-1"),
                lambda: client.post(REQUEST),
                lambda: MailboxClient(path).close(),
            ):
                with suppress(RingError, CaptureError):
                    call()
            with suppress(RingError):
                assert client.poll() in (RESULT, None)


def test_a_detail_without_end_is_cut(ends):
    trainer, client = ends
    client.post(REQUEST)
    trainer.take()
    trainer.answer(replace(RESULT, state="failed", detail="\udc80" * 100_000))
    result = client.poll()
    assert len(result.detail) == MAX_DETAIL_CHARS


def test_a_truncated_mailbox_does_not_grow_again(ends):
    # GIVEN a mailbox that is cut while a client has it open
    _, client = ends
    os.truncate(client.path, HEADER_BYTES)
    # WHEN the client posts THEN it is told, and writes no holes
    with pytest.raises(RingError, match="truncated"):
        client.post(REQUEST)
    assert client.path.stat().st_size == HEADER_BYTES


def test_an_unknown_state_is_refused(ends):
    trainer, client = ends
    trainer.live[executor.STATE] = 4
    with pytest.raises(RingError, match="state 4"):
        client.progress()
