"""The capture's state machine, with a stand-in for torch's session. The real one is in tests/integration/trainer."""

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import ModuleType, SimpleNamespace

import pytest

from sftriage.agent.executor import MailboxClient
from sftriage.model.captures import CaptureRequest, CaptureResult
from sftriage.model.windows import StepRecord
from sftriage.trainer import executor
from sftriage.trainer.executor import CaptureExecutor, Mailbox
from sftriage.trainer.layout import RingFile
from sftriage.trainer.monitor import Monitor
from sftriage.trainer.recording import Recording
from sftriage.trainer.session import ProfilerGuard, Session, TorchSession
from sftriage.windows.rings import Ring
from tests.scenario import new_records

REQUEST = CaptureRequest("c-1", 3, "torch", 2, 1, 30.0, 1000)


class FakeSession(Session):
    """Notes its calls, and raises in the one that ``breaks`` names."""

    log: list[str]
    breaks: str = ""
    store = TorchSession.store

    def __init__(self, info, options, guard, *, sample=False) -> None:
        super().__init__()
        self.timings_s = {"start": 0.5}
        self.stall_s = 0.0
        self.clock = {"mono_ns": 1, "wall_ns": 2}
        self.sampler = None

    def _note(self, what: str) -> None:
        self.log.append(what)
        if what.split()[0] == self.breaks:
            raise RuntimeError(f"{self.breaks} is broken")

    def prepare(self) -> None:
        self._note("prepare")

    def start(self, capture_id: str, first_step: int, labels: Mapping[str, str]) -> None:
        self._note(f"start {first_step}")
        self.first_step = first_step

    def begin_step(self, number: int) -> None:
        self._note(f"begin {number}")
        self.last_step = number

    def end_step(self) -> None:
        self._note("end")
        self.steps += 1

    def follow(self, stages) -> None:
        self._note(f"stages {'/'.join(stages)}")

    def stop(self) -> None:
        self._note("stop")

    def export(self, path: str) -> None:
        self._note("export")
        Path(path).write_text('{"traceEvents": [], "traceName": "x"}')


class Rig:
    """A recording of rank 3 with an executor, driven step by step, and the controller's end of both files."""

    def __init__(self, directory: Path, info, now_s: list[float]) -> None:
        self.now_s = now_s
        self.spool = directory / "spool"
        self.spool.mkdir()
        self.guard = ProfilerGuard()
        writer = RingFile(directory, info, 64)
        self.executor = CaptureExecutor(Mailbox(directory, info), info, self.spool, self.guard)
        self.recording = Recording(writer, self.executor)
        self.client = MailboxClient(directory / "rank-3.0.mailbox")
        self.reader = Ring(writer.path)
        self.records: list[StepRecord] = []

    def step(self, count: int = 1, during: Callable[[], None] = lambda: None) -> None:
        for _ in range(count):
            self.recording.begin(None)
            during()
            self.recording.end(False)
        self.records += new_records(self.reader)

    def exported(self) -> None:
        thread = self.executor._export
        thread.join(10)
        assert not thread.is_alive()

    def ask(self, **changes: object) -> None:
        self.client.post(replace(REQUEST, **changes))

    def result(self) -> CaptureResult:
        return self.client.poll()

    def captured(self, count: int, during: Callable[[], None] = lambda: None, **changes: object) -> CaptureResult:
        """What comes of a request in so many steps of the job."""
        self.ask(**changes)
        self.step(count, during)
        if self.executor._export is not None:
            self.exported()
        return self.result()

    def outcome(self) -> tuple[str, str]:
        result = self.result()
        return result.state, result.detail

    @property
    def touched(self) -> list[int]:
        return [record.step for record in self.records if record.capturing]


def test_exactly_the_requested_steps_are_recorded_after_the_warm_up(rig, session):
    # GIVEN a job at step 2, and a request for two steps after one of warm-up
    rig.step(2)
    rig.ask()
    rig.step()
    assert rig.client.progress().state == "armed"
    rig.step()
    assert (rig.client.progress().state, rig.client.progress().steps) == ("recording", 1)
    rig.step()
    rig.exported()
    rig.step(3)
    # THEN the profiler was prepared before step 2, started before 3 and stopped after 4
    assert session.log == ["prepare", "start 3", "begin 3", "end", "begin 4", "end", "stop", "export"]
    result = rig.result()
    assert (result.state, result.detail, result.first_step, result.last_step) == ("stored", "", 3, 4)
    assert result.size_bytes == (rig.spool / "c-1.json").stat().st_size
    assert (result.clock, result.timings_s["start"]) == ({"mono_ns": 1, "wall_ns": 2}, 0.5)
    assert rig.client.progress().state == "idle"
    # AND the steps it touched say so: warm-up, recorded, and the one whose between_ns has the stop
    assert rig.touched == [2, 3, 4, 5]


def test_stages_are_marked_while_recording_and_timed_as_usual(clock, rig, session):
    # GIVEN a capture, with stages used in warm-up and in the recorded step
    stages = rig.recording.stages

    def work() -> None:
        with stages["forward"]:
            clock.passes(10)
            with stages["data"]:
                clock.passes(5)

    rig.captured(2, work, steps=1)
    # THEN the recorded one has them in its trace, nested as they were
    marks = [entry for entry in session.log if entry.startswith("stages")]
    assert marks == ["stages forward", "stages forward/data", "stages forward", "stages "]
    assert [record.durations_ns for record in rig.records] == [(5, 10, 0, 0)] * 2


@pytest.mark.parametrize(
    ("steps", "max_bytes", "recorded", "detail"),
    [
        (12, 100_000, 12, ""),
        (12, 6_000, 9, "9 of 12 steps: more would not fit into 6000 bytes"),
        (1000, 700, 1, "1 of 1000 steps: more would not fit into 700 bytes"),
    ],
)
def test_a_probe_cuts_many_steps_to_those_that_fit(rig, sized, steps, max_bytes, recorded, detail):
    result = rig.captured(3 + min(steps, 20), steps=steps, max_bytes=max_bytes)
    # THEN one step was recorded beforehand, and as many as fit after it
    log = sized.log
    assert log[:13] == [*BLANKS, "prepare", "start 0", "stop", "export 0", "prepare"]
    assert len([what for what in log if what.startswith("begin")]) == recorded
    assert (result.state, result.detail, result.first_step) == ("stored", detail, 2)
    assert "probe" in result.timings_s
    # AND every step that the profiler touched is marked, and nothing is left in the spool but the trace
    assert rig.touched[:2] == [0, 1]
    assert [path.name for path in rig.spool.iterdir()] == ["c-1.json"]


@pytest.fixture
def session(monkeypatch):
    FakeSession.log = []
    FakeSession.breaks = ""
    monkeypatch.setattr(executor, "TorchSession", FakeSession)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    return FakeSession


@pytest.fixture
def rig(tmp_path, make_info, session, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(executor, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    made = Rig(tmp_path, make_info(), now_s)
    yield made
    made.recording.close()
    made.client.close()
    made.reader.close()


@pytest.mark.parametrize(
    ("steps", "warmup", "period", "phase", "armed_at", "recorded"),
    [
        # What comes back at once is caught from now on; else it is waited for, and is in the middle.
        (5, 1, 20, 13, 10, range(11, 16)),
        (5, 1, 20, 14, 10, range(12, 17)),
        (5, 1, 20, 5, 10, range(23, 28)),
        (1, 0, 20, 5, 10, range(25, 26)),
        (2, 2, 20, 5, 10, range(25, 27)),
        # As many steps as the period hold it wherever they begin.
        (5, 1, 5, 0, 10, range(11, 16)),
        (5, 1, 0, 0, 10, range(11, 16)),
    ],
)
def test_a_capture_waits_for_its_recurring_step(rig, steps, warmup, period, phase, armed_at, recorded):
    # GIVEN a job, and a request to catch what comes back, that arrives before some step
    rig.step(armed_at)
    result = rig.captured(40, steps=steps, warmup_steps=warmup, period_steps=period, phase=phase)
    # THEN the steps that hold it are recorded, and while it was waited for no profiler was in the way
    assert (result.state, result.first_step, result.last_step) == ("stored", recorded[0], recorded[-1])
    assert not period or any(step % period == phase for step in recorded)
    assert min(rig.touched) == recorded[0] - warmup
    assert FakeSession.log[:2] == ["prepare", f"start {recorded[0]}"]


STACKS = {"profiler": "stacks", "options": {"sample_stacks": True}, "warmup_steps": 0, "max_bytes": 10**6}


def until_sampled(rig) -> None:
    rows = rig.executor._capture.session.sampler._stacks._rows
    before, end_s = len(rows), monotonic() + 20.0
    while len(rows) == before:
        assert monotonic() < end_s


@pytest.mark.parametrize("own_profiler", [False, True])
@pytest.mark.parametrize("torch_there", [True, False])
def test_stacks_alone_are_sampled_over_the_steps_and_leave_every_profiler_alone(
    rig, session, monkeypatch, own_profiler, torch_there
):
    # GIVEN a job at step 2 that may profile itself, and need not use torch
    if not torch_there:
        monkeypatch.delitem(sys.modules, "torch")
    rig.guard._job_has_profiler = own_profiler
    rig.step(2)
    result = rig.captured(2, lambda: until_sampled(rig), **STACKS)
    rig.step(3)
    # THEN these two steps are sampled, no profiler was touched, and the job's own need not make way
    assert (result.state, result.detail, result.first_step, result.last_step) == ("stored", "", 2, 3)
    assert set(result.timings_s) == {"start", "run", "export"}
    assert session.log == []
    file = rig.spool / "c-1.stacks.speedscope.json"
    assert result.size_bytes == file.stat().st_size
    assert set(json.loads(file.read_bytes())["sftriage"]["step"]) == {2, 3}
    # AND the steps say so, and nothing of it goes on
    assert rig.touched == [2, 3, 4]
    assert not [thread for thread in threading.enumerate() if thread.name == "sftriage-samples"]
    assert rig.client.progress().state == "idle"


def test_cancelled_or_oversized_stacks_leave_nothing(rig):
    rig.ask(**STACKS)
    rig.step()
    rig.client.cancel("c-1")
    rig.step(2)
    assert rig.outcome() == ("failed", "cancelled")
    result = rig.captured(2, **{**STACKS, "capture_id": "c-2", "max_bytes": 10})
    assert (result.state, result.detail.startswith("no stacks: they would take ")) == ("failed", True)
    assert list(rig.spool.iterdir()) == []


def test_steps_stay_touched_until_the_export_is_done(rig, monkeypatch):
    # GIVEN an export that takes its time
    going = threading.Event()
    monkeypatch.setattr(FakeSession, "export", lambda self, path: going.wait(10) and None)
    rig.ask(warmup_steps=0, steps=1)
    rig.step(3)
    assert rig.client.progress().state == "exporting"
    # AND a second request that comes the moment it is answered
    going.set()
    rig.exported()
    rig.ask(capture_id="c-2", warmup_steps=0, steps=1)
    rig.step()
    # THEN the steps in between are touched, and the second request is heard
    assert rig.touched == [0, 1, 2, 3]
    rig.exported()
    assert rig.result().capture_id == "c-2"


def test_a_request_during_the_end_of_an_export_is_taken(rig, monkeypatch):
    # GIVEN an export that has answered and is about to say that it is idle, and a client that posts just then
    answered, going = threading.Event(), threading.Event()
    enter, look = rig.executor._enter, rig.executor.before_step

    def enter_late(state: str) -> None:
        if state == "idle":
            answered.set()
            going.wait(10)
        enter(state)

    def look_early(number: int) -> bool:
        touched = look(number)
        going.set()
        rig.exported()
        return touched

    monkeypatch.setattr(rig.executor, "_enter", enter_late)
    rig.ask(warmup_steps=0, steps=1)
    rig.step()
    assert answered.wait(10)
    rig.ask(capture_id="c-2")
    # WHEN the doorbell is read during the export, and the export ends before the hook is asked whether it is
    monkeypatch.setattr(rig.executor, "before_step", look_early)
    rig.step()
    monkeypatch.setattr(rig.executor, "before_step", look)
    rig.step()
    # THEN the request is under way, and not lost until the doorbell rings again
    assert rig.client.progress().state == "armed"


def time_is_up(rig) -> None:
    rig.now_s[0] = 200.0


def is_called_off(rig) -> None:
    rig.client.cancel("c-1")


def makes_way(rig) -> None:
    rig.guard._on_job_profiler()


def training_ends(rig) -> None:
    rig.recording.close()


NINE, WARMING = {"steps": 9, "warmup_steps": 0}, {"steps": 9, "warmup_steps": 5}
UNRECORDED = "before a step was recorded"
EARLY = {
    "in its warm-up": (WARMING, 2, time_is_up, ("failed", f"time-box reached {UNRECORDED}")),
    "after one step": (NINE, 1, time_is_up, ("stored", "time-box reached after 1 of 9 steps")),
    "after two": ({"steps": 9}, 3, time_is_up, ("stored", "time-box reached after 2 of 9 steps")),
    "waiting": ({"period_steps": 20, "phase": 15}, 5, time_is_up, ("failed", f"time-box reached {UNRECORDED}")),
    "called off": (NINE, 2, is_called_off, ("failed", "cancelled")),
    "the job's own profiler": (NINE, 2, makes_way, ("failed", "the job started a profiler of its own")),
    "the end": (NINE, 2, training_ends, ("stored", "training ended after 2 of 9 steps")),
    "the end in its warm-up": (WARMING, 2, training_ends, ("failed", f"training ended {UNRECORDED}")),
    "the end before it began": ({}, 0, training_ends, ("refused", "training ended")),
}


@pytest.mark.parametrize("within", [False, True], ids=["between two steps", "in a step"])
@pytest.mark.parametrize(("changes", "steps", "ends", "outcome"), EARLY.values(), ids=EARLY)
def test_a_capture_that_ends_early_keeps_the_steps_it_has(rig, session, within, changes, steps, ends, outcome):
    # GIVEN a capture under way WHEN it is to end before it has all its steps, between two steps or in one
    within &= ends is not training_ends
    rig.ask(**changes)
    rig.step(steps - within)
    if within:
        rig.step(1, lambda: ends(rig))
    else:
        ends(rig)
    rig.step()
    if rig.executor._export is not None:
        rig.exported()
    # THEN it stops at the next boundary, and keeps steps where they are worth it, or leaves nothing
    assert rig.outcome() == outcome
    assert (rig.client.progress().answered, session.log.count("stop") <= 1) == (True, True)
    assert (rig.spool / "c-1.json").exists() == bool(list(rig.spool.iterdir())) == (outcome[0] == "stored")
    rig.step(2)
    touched = [] if "period_steps" in changes else list(range(steps + (ends is not training_ends)))
    assert rig.touched in (touched, [*touched, steps])
    assert outcome[1] == "training ended" or "period_steps" in changes or session.log.count("stop") == 1


@pytest.mark.parametrize("where", ["prepare", "start", "begin", "end", "stages", "stop", "export"])
def test_an_error_fails_the_capture_and_not_the_training(rig, session, where):
    session.breaks = where
    forward = rig.recording.stages["forward"]

    def work() -> None:
        with forward:
            pass

    # WHEN training goes on, with a stage in each step
    result = rig.captured(6, work)
    # THEN the capture failed with that reason, every step is recorded, and the next capture works
    assert (result.state, result.detail) == ("failed", f"RuntimeError: {where} is broken")
    assert [record.step for record in rig.records] == list(range(6))
    assert not rig.recording.off
    assert rig.guard.busy() is None
    session.breaks = ""
    assert rig.captured(4, capture_id="c-2").state == "stored"


def called_off(rig, patch):
    rig.client.cancel("c-1")


@pytest.mark.parametrize("named", [True, False])
def test_the_training_thread_does_not_touch_the_disk_of_traces(rig, monkeypatch, named):
    # GIVEN a spool on a disk that does not answer, named by somebody or by a link beside the ring
    training, asked, stat = threading.get_ident(), [], os.stat

    def hangs(path, *arguments, **named):
        if threading.get_ident() == training and str(path).startswith(str(rig.spool)):
            asked.append(path)
        return stat(path, *arguments, **named)

    monkeypatch.setattr(rig.executor, "_named", named)
    monkeypatch.setattr(os, "stat", hangs)
    # WHEN a capture is made THEN only what writes its trace has to do with it
    assert (rig.captured(4).state, asked) == ("stored", [])


def nothing(rig, patch):
    pass


def damaged(rig, patch):
    rig.executor._requests.live[3] += 1  # its checksum


@pytest.mark.parametrize(
    ("spoil", "changes", "reason"),
    [
        (nothing, {"profiler": "stacks"}, "stacks are taken from outside"),
        (nothing, {**STACKS, "options": {"sample_stacks": 1, "with_stack": 1}}, "unknown options: with_stack"),
        (nothing, {**STACKS, "options": {"sample_stacks": 1, "samples_per_second": 0}}, "0: must be 1 to 1000"),
        (lambda rig, patch: patch.setattr(rig.guard, "_job_has_profiler", True), {}, "a profiler is already running"),
        (
            lambda rig, patch: patch.setattr(rig.executor, "_named", False) or rig.spool.rmdir(),
            {},
            "no spool directory",
        ),
        (lambda rig, patch: patch.delitem(sys.modules, "torch"), {}, "torch is not imported"),
        (nothing, {"options": {"with_stack": True, "rm": True}}, "unknown options: rm"),
        (called_off, {}, "cancelled"),
        (damaged, {}, "the request does not match its checksum"),
    ],
)
def test_an_impossible_request_is_refused_and_touches_nothing(rig, session, monkeypatch, spoil, changes, reason):
    rig.ask(**changes)
    spoil(rig, monkeypatch)
    rig.step(2)
    result = rig.result()
    assert (result.state, result.capture_id) == ("refused", "unreadable" if spoil is damaged else "c-1")
    assert reason in result.detail
    assert (session.log, rig.touched) == ([], [])


@pytest.mark.parametrize(
    ("waits_s", "end"),
    [(0.01, lambda rig: rig.recording.close()), (1e6, lambda rig: rig.recording.fail(RuntimeError("a bug")))],
    ids=["training ends", "the recorder breaks"],
)
def test_closing_does_not_wait_for_a_hanging_export(rig, monkeypatch, waits_s, end):
    going = threading.Event()
    monkeypatch.setattr(FakeSession, "export", lambda self, path: going.wait(30) and None)
    monkeypatch.setattr(executor, "LAST_EXPORT_S", waits_s)
    rig.ask(steps=1, warmup_steps=0)
    rig.step()
    end(rig)
    # THEN the ring is closed, and the export may still answer when it is done
    assert rig.reader.status().closed
    assert rig.client.poll() is None
    going.set()
    rig.exported()
    assert rig.client.poll() is not None


def test_the_spool_is_the_trainers_own_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("SFTRIAGE_SPOOL", str(tmp_path / "elsewhere"))
    with Monitor(rings=tmp_path) as monitor:
        assert monitor._recording._hook._spool == tmp_path / "elsewhere"


class SizedSession(FakeSession):
    """Its trace has as many bytes as its steps say; the step beforehand counts as one."""

    step_bytes = 600

    def export(self, path: str) -> None:
        self._note(f"export {self.steps}")
        head = '{"traceEvents": [], "traceName": "'
        Path(path).write_text(head + "x" * (self.step_bytes * max(1, self.steps) - len(head) - 2) + '"}')


@pytest.fixture
def sized(session, monkeypatch):
    monkeypatch.setattr(executor, "TorchSession", SizedSession)
    SizedSession.log = []
    return SizedSession


BLANKS = ["prepare", "start 0", "stop", "export 0"] * 2
"""What is done before a step is recorded beforehand: two traces without any."""


def test_a_probe_refuses_a_step_that_is_too_large(rig, sized):
    result = rig.captured(4, steps=20, max_bytes=500)
    assert (result.state, result.detail) == ("failed", "one step alone makes a trace of 600 bytes; 500 are allowed")
    assert list(rig.spool.iterdir()) == []


def test_the_cost_of_a_step_is_learnt_once(rig, sized):
    # GIVEN a process that was captured before
    assert rig.captured(4, steps=2, max_bytes=100_000).state == "stored"
    sized.log.clear()
    result = rig.captured(8, capture_id="c-2", steps=20, max_bytes=3000)
    # THEN nothing is recorded beforehand, and as many are as fit
    assert sized.log[:2] == ["prepare", "start 5"]
    assert result.detail == "4 of 20 steps: more would not fit into 3000 bytes"


class SlowSession(SizedSession):
    """Its stop and its export take as long as is told for each session in turn, in the order in which they are made."""

    takes_s: list[float]

    def __init__(self, info, options, guard, *, sample=False) -> None:
        super().__init__(info, options, guard)
        self.stall_s = self.takes_s.pop(0)


@pytest.mark.parametrize(
    ("asked", "options", "blank_s", "step_s", "recorded"),
    [
        # A step takes 0.3 s more than none, and one of many half as much again: four in 2 s.
        (12, {}, 0.1, 0.4, 4),
        (3, {"with_stack": True}, 0.1, 1.0, 1),
        (3, {"with_stack": True}, 0.1, 0.2, 3),
        (2, {"with_stack": True}, 3.0, 3.5, 1),
        (12, {}, 0.1, 0.1, 12),
    ],
)
def test_a_probe_cuts_a_capture_that_would_hold_up_the_rank(
    rig, session, monkeypatch, asked, options, blank_s, step_s, recorded
):
    # GIVEN a profiler whose very first trace is slow, and an empty one and one of a step take their times
    monkeypatch.setattr(executor, "TorchSession", SlowSession)
    SlowSession.log = []
    SlowSession.takes_s = [0.0, 9.0, blank_s, step_s]
    result = rig.captured(15, steps=asked, options=options, max_bytes=100_000)
    # THEN as many steps are recorded as do not take too long, and the result says why there are no more
    cut = f"{recorded} of {asked} steps: more would hold the rank up for over 2 s"
    assert (result.state, result.detail) == ("stored", cut if recorded < asked else "")
    assert result.last_step - result.first_step + 1 == recorded


def test_an_empty_trace_that_fails_fails_the_capture_and_stops_the_profiler(rig, session):
    session.breaks = "export"
    assert rig.captured(3, steps=20).detail == "RuntimeError: export is broken"
    assert session.log.count("stop") >= session.log.count("start 0") == 1
    assert rig.guard.busy() is None


@pytest.mark.parametrize("fault", ["left half way", "the job's own profiler", "called off", "the spool is gone"])
def test_an_interrupted_probe_leaves_no_profiler_running(rig, sized, fault):
    rig.ask(steps=20, max_bytes=100_000)
    rig.recording.begin(None)
    log = sized.log
    assert log == [*BLANKS, "prepare", "start 0"]
    del log[:8]
    if fault == "the job's own profiler":
        rig.executor._yield_to_job()
    elif fault == "called off":
        rig.client.cancel("c-1")
    elif fault == "the spool is gone":
        rig.spool.rmdir()
    rig.recording.end(fault == "left half way")
    rig.step(1)
    assert log.count("stop") >= 1
    assert log.index("stop") < (log.index("prepare", 1) if "prepare" in log[1:] else len(log))
    assert fault == "left half way" or rig.result().state == "failed"
    assert not list(rig.spool.glob("*.probe"))
