"""What the agent makes of /proc, of py-spy's dumps and of trainers' answers, also of damaged ones."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from sftriage.agent.answers import MAX_ANSWER_BYTES, TrainerAccount, TrainerRequest
from sftriage.agent.hangs import (
    GONE,
    HangSampler,
    KernelState,
    children_of,
    interpreter_holder,
    threads_from,
    without_interpreter,
)
from sftriage.base.process import start_ticks
from sftriage.errors import CaptureError
from sftriage.model.hangs import INTERPRETER, SourceLine, ThreadEvidence, Wait
from tests.scenario import info_of


def stat(state, status):
    """A process's ``stat``: its name has parentheses, its parent is 3, and it started at 706."""
    return b"7 (a) T 1) %s 3 %s 706 %s %d\n" % (state, b"9 " * 16 + b"9", b"9 " * 28 + b"9", status)


@pytest.mark.parametrize(
    ("content", "wchan", "expected"),
    [
        (stat(b"S", 0), b"futex_wait\n", KernelState("S", "futex_wait", 3, 706)),
        (stat(b"T", 19), b"0", KernelState("T", "", 3, 706)),
        (stat(b"Z", 9), b"0", KernelState("Z", "", 3, 706, -9)),
        (stat(b"Z", 3 << 8), b"", KernelState("Z", "", 3, 706, 3)),
        # (nobody may say so without the right to read it)
        (stat(b"Z", 0), b"", KernelState("Z", "", 3, 706)),
        (b"", b"0", GONE),
        (b"7 (a) S 1 2", b"", GONE),
    ],
    ids=str,
)
def test_the_state_of_a_process_is_read_whatever_its_name(content, wchan, expected):
    assert KernelState.of(content, wchan) == expected


def test_the_state_of_this_process_is_its_own():
    found = KernelState.at(Path("/proc/self"))
    assert (found.state, found.parent, found.start_ticks) == ("R", os.getppid(), start_ticks(os.getpid()))
    child = os.fork()
    if not child:
        signal.pause()
    try:
        assert child in children_of({os.getpid()})[os.getpid()]
        assert children_of({2**22 + 1}) == {}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def frame(name, filename, line=7):
    return {"name": name, "filename": filename, "line": line}


def test_threads_of_a_dump_have_their_frames_and_states():
    dumped = [
        {"thread_name": "loader", "os_thread_id": 12, "owns_gil": False, "frames": []},
        {
            "thread_name": "Main\x1bThread",
            "os_thread_id": 11,
            "owns_gil": True,
            "frames": [
                frame("Condition.wait", "/usr/lib/python3.11/threading.py"),
                frame("train.<locals>.step", "/work/train.py", 1 << 70),
                frame("<module>", "<string>", None),
                "none",
            ],
        },
        {"frames": None, "os_thread_id": "12", "thread_id": 99},
        None,
    ]
    first, second, third = threads_from(dumped, 11, {11: KernelState("S", "futex_wait"), 12: KernelState("D")})
    assert (first.name, first.main, first.wait.state) == ("loader", False, "D")
    assert (second.name, second.main, second.wait.wchan) == ("Main?Thread", True, "futex_wait")
    assert [(line.function, line.line, line.own) for line in second.frames] == [
        ("wait", 7, False),
        ("step", 0, True),
        ("<module>", 0, False),
    ]
    assert (third.name, third.frames, third.wait.state) == ("thread 12", (), "")
    assert interpreter_holder(dumped) == "Main\x1bThread"
    assert interpreter_holder(dumped[:1]) == ""


def test_the_main_thread_waits_for_the_interpreter_that_another_holds():
    call = SourceLine("decode", "/work/train.py", 7, own=True)
    main, decoder = ThreadEvidence("MainThread", True, ()), ThreadEvidence("decoder", False, (call,))
    (found, _) = without_interpreter([main, decoder], "decoder")
    assert found.wait == Wait(lock=INTERPRETER, held_by="thread decoder", held_at=call)
    assert without_interpreter([main, decoder], "MainThread") == (main, decoder)


@pytest.fixture
def answered(tmp_path):
    """A request to a rank that somebody listens to, and a way to answer it."""
    info = info_of(1, 2, pid=os.getpid(), pid_start_ticks=1)
    os.mkfifo(tmp_path / info.file_name("asks"))
    pipe = os.open(tmp_path / info.file_name("asks"), os.O_RDWR | os.O_NONBLOCK)

    def answer(text):
        request = TrainerRequest(tmp_path, info, "hang c-1")
        assert request.answer() is None
        assert os.read(pipe, 100) == b"hang c-1\n"
        (tmp_path / info.file_name("stacks")).write_bytes(
            text if isinstance(text, bytes) else json.dumps(text).encode()
        )
        try:
            return request.answer()
        finally:
            assert request.answer() is None
            (tmp_path / info.file_name("stacks")).unlink()

    yield answer
    os.close(pipe)


def test_an_answer_is_taken_once_and_unknown_fields_of_it_are_ignored(answered):
    thread = {"name": "\ud800\x1b[2J", "main": True, "frames": [], "wait": {"state": "R", "later": 1}}
    found = answered(
        {"asked": "hang c-1", "rank_evidence": {"threads": [thread], "timeout_s": 5, "later": [1]}, "more": 2}
    )
    assert found.rank_evidence.threads[0].name == "??[2J"
    assert (found.rank_evidence.threads[0].wait.state, found.rank_evidence.timeout_s) == ("R", 5.0)
    assert answered({"asked": "hang c-1", "threads": [{"thread_name": "a"}]}).threads == [{"thread_name": "a"}]
    assert answered({"asked": "hang c-1", "rank_evidence": {}}).rank_evidence == TrainerAccount()


@pytest.mark.parametrize("text", [{"asked": "hang c-0"}, {"asked": None}, {}, [], None, 7], ids=str)
def test_what_is_no_answer_to_this_request_is_none(answered, text):
    assert answered(text) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"asked": "hang c-1", "rank_evidence": {"timeout_s": NaN}}',
        b'{"asked": "hang c-1", "rank_evidence": {"timeout_s": 1e999}}',
        b'{"asked": "hang c-1", "rank_evidence": {"groups": [{"name": "0"}]}}',
        b'{"asked": "hang c-1", "rank_evidence": {"calls": [{"op": 7}]}}',
        b'{"asked": "hang c-1", "rank_evidence": {"calls": [{"op": "a", "sizes": [[%d]]}]}}' % 10**40,
        b'{"asked": "hang c-1", "rank_evidence": 7}',
        b" " * (MAX_ANSWER_BYTES + 1),
    ],
    ids=lambda text: repr(text[:70]),
)
def test_an_answer_that_is_none_is_a_reason(answered, text):
    with pytest.raises(CaptureError, match=r"^the trainer's answer ") as found:
        answered(text)
    assert str(found.value).isprintable()


def test_a_rank_without_a_pipe_or_a_reader_is_a_reason(tmp_path):
    info = info_of(1, 2)
    with pytest.raises(CaptureError, match="No such file"):
        TrainerRequest(tmp_path, info, "hang c-1")
    os.mkfifo(tmp_path / info.file_name("asks"))
    with pytest.raises(CaptureError, match="No such device"):
        TrainerRequest(tmp_path, info, "hang c-1")
    # AND a file in its place is left as it is
    (tmp_path / info.file_name("asks")).unlink()
    (tmp_path / info.file_name("asks")).write_text("kept")
    with pytest.raises(CaptureError, match="is not a pipe"):
        TrainerRequest(tmp_path, info, "hang c-1")
    assert (tmp_path / info.file_name("asks")).read_text() == "kept"


def test_evidence_that_cannot_be_gathered_fails_once(tmp_path):
    # GIVEN rings that cannot be listed
    rings = SimpleNamespace(refresh=lambda: None)
    sampler = HangSampler(rings, tmp_path)
    with pytest.raises(AttributeError):
        sampler.poll("c-1", ())
    # THEN a loop that calls it again gets an end
    assert sampler.poll("c-1", ()) == ()
