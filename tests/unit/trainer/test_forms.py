"""The form in C and the one in Python write the same bytes, whatever a script does."""

import contextlib
import copy
import gc
import pickle
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sftriage.trainer import moments, monitor, recording
from sftriage.trainer.layout import BLOCK_WORDS, COLLECTED, LIVE_AT, WORK
from sftriage.trainer.monitor import Monitor
from sftriage.trainer.recording import START_STEPS
from sftriage.windows.rings import Ring
from tests.unit.trainer.conftest import in_a_thread

STAGES = ("data", "forward", "backward")
OPERATIONS = st.one_of(
    st.tuples(st.just("begin"), st.one_of(st.none(), st.integers(-1, 1 << 57))),
    st.tuples(st.sampled_from(["end", "fail", "thread", "declare", "note", "join", "kind", "call"]), st.integers(0, 3)),
    st.tuples(st.just("enter"), st.sampled_from((*STAGES, "other", "late-0", "nowhere"))),
    st.tuples(st.just("leave"), st.sampled_from((*STAGES, "other", "late-0", "nowhere"))),
    st.tuples(st.just("pass"), st.integers(0, 1 << 40)),
    st.tuples(st.just("loop"), st.integers(1, 200)),
    st.tuples(st.sampled_from(["listen", "put", "disown"]), st.integers(0, 3)),
)


class PythonMonitor(Monitor):
    step, stage = Monitor._step_in_python, Monitor._stage_in_python


class Script:
    """What a script does with its monitor, on a clock that goes on with each thing that it does."""

    def __init__(self, form: moments.Form, directory: str, program: list[tuple[str, object]]) -> None:
        self.now_ns = 10**9
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(moments, "FORM", form)
            for module in (recording, monitor):
                patched.setattr(module, "monotonic_ns", self._clock)
            patched.setattr(monitor, "time_ns", lambda: 0)
            kind = PythonMonitor if form is moments.PYTHON else Monitor
            self.monitor = kind(STAGES, ("backward",), rings=directory, slots=1)
        for operation, value in program:
            self.now_ns += 3
            self._run(operation, value)
        with Ring(Path(directory) / "rank-0.0.ring") as reader:
            status, batch = reader.status(), reader.read()
            where = status.stage, status.step
            self.found = batch.steps.slots_BW.tolist(), batch.missed, batch.torn, batch.misuse, where
        content = bytearray((Path(directory) / "rank-0.0.ring").read_bytes()[LIVE_AT:])
        # (garbage is collected when it has come together)
        content[8 * COLLECTED : 8 * (COLLECTED + 1)] = bytes(8)
        self.content = bytes(content)
        self.monitor.close()

    def _clock(self) -> int:
        return self.now_ns

    def _pass(self, ns: int) -> None:
        self.now_ns += ns

    def _run(self, operation: str, value: Any) -> None:
        step, stage, log = self.monitor.step, self.monitor.stage, self.monitor._recording.log
        match operation:
            case "begin":
                step(value).__enter__()
            case "kind":
                kind = ("", "evaluation", "a kind that is too long", None)[value]
                step(kind=kind, work=value or None).__enter__()
            case "end":
                step().__exit__(None, None, None)
            case "fail":
                with pytest.raises(KeyError), step(), stage("data"):
                    raise KeyError
            case "loop":
                for _ in range(value):
                    with step(), stage("forward"):
                        self.now_ns += 7
            case "enter":
                stage(value).__enter__()
            case "leave":
                stage(value).__exit__(None, None, None)
            case "call":
                # By keyword, by an equal name that is another object, and by values that are not names.
                moment = ({"name": "data"}, {"name": "".join(["da", "ta"])}, {"name": []}, {"name": None})[value]
                for _ in range(2):
                    with stage(**moment):
                        pass
            case "thread":
                in_a_thread(self._elsewhere, value)
            case "declare":
                self.monitor.declare(f"late-{value}", sync=value > 1)
            case "note":
                self.monitor.note(kind=("", "evaluation", "a kind that is too long", "\x1f")[value], work=value)
            case "join":
                self.monitor.join(f"cohort-{value}")
            case "pass":
                self._pass(value)
            # What a recording does with its log, where it captures, watches a device, and closes.
            case "listen":
                log.listener = (lambda code: self._pass(code)) if value else None
            case "put":
                log.put(WORK, value)
            case "disown":
                log.owner = 0

    def _elsewhere(self, kind: int) -> None:
        if kind % 2:
            self.monitor.step().__exit__(None, None, None)
        with self.monitor.stage("data"):
            pass
        if kind > 1:
            with self.monitor.step():
                pass


@pytest.mark.skipif(moments.FORM.name != "C", reason=moments.WHY_NOT_C)
@settings(max_examples=150)
@given(program=st.lists(OPERATIONS, max_size=30))
@example(program=[("begin", None), ("enter", "data"), ("disown", 0), ("put", 1), ("begin", None), ("leave", "data")])
@example(program=[("loop", 80), ("begin", None), ("enter", "data"), ("listen", 1), ("leave", "data"), ("listen", 0)])
def test_both_forms_write_the_same_bytes(program):
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        c, python = Script(moments.FORM, one, program), Script(moments.PYTHON, other, program)
        assert c.found == python.found
        assert c.content == python.content


@pytest.mark.parametrize("moment", ["begin", "enter", "leave", "end"])
@pytest.mark.parametrize("boundaries", [1, 2, BLOCK_WORDS - 3, BLOCK_WORDS, 3 * BLOCK_WORDS])
def test_notes_of_a_signal_handler_inside_a_boundary_are_kept(tmp_path, monkeypatch, moment, boundaries):
    # GIVEN a handler that enters and leaves stages, or takes a step of its own, between a boundary's read of its
    # thread's ident and the word that it writes
    monkeypatch.setattr(moments, "FORM", moments.PYTHON)
    with PythonMonitor(STAGES, (), rings=tmp_path) as monitor, Ring(tmp_path / "rank-0.0.ring") as reader:
        step, stage = monitor.step(), monitor.stage("forward")
        within = moment in ("enter", "leave", "end")

        def interrupted() -> int:
            monkeypatch.setattr(moments, "get_ident", threading.get_ident)
            with contextlib.nullcontext() if within else monitor.step():
                for _ in range(boundaries):
                    with monitor.stage("data"):
                        pass
            return threading.get_ident()

        for _ in range(START_STEPS + 1):
            with step:
                pass
        usual = {"begin": step.__enter__, "enter": stage.__enter__, "leave": stage.__exit__, "end": step.__exit__}
        for name, call in usual.items():
            with monkeypatch.context() as patched:
                if name == moment:
                    patched.setattr(moments, "get_ident", interrupted)
                call(*((None, None, None) if name in ("leave", "end") else ()))
        # THEN the reader finds both, each whole, and later steps
        with step:
            pass
        batch = reader.read()
        assert (batch.missed, batch.torn, batch.misuse) == (0, 0, 0)
        assert len(batch.steps.records()) == START_STEPS + 3 + (moment == "begin")


@pytest.mark.parametrize("kind", [Monitor, PythonMonitor])
def test_wrong_arguments_are_a_type_error_as_everywhere(kind):
    with kind() as monitor:
        for call in (monitor.stage, lambda: monitor.stage("data", "forward"), lambda: monitor.stage(stage="data")):
            with pytest.raises(TypeError):
                call()
        for call in (lambda: monitor.step(1, "", 2, 3), lambda: monitor.step(steps=1)):
            with pytest.raises(TypeError):
                call()


@pytest.mark.parametrize("kind", [Monitor, PythonMonitor])
def test_many_names_each_find_their_own_stage(kind, tmp_path):
    # GIVEN more stages than are remembered by the objects that name them
    names = [f"stage-{number}" for number in range(30)]
    with kind(names, (), rings=tmp_path) as monitor:
        first = [monitor.stage(name) for name in names]
        # THEN each is found again, by the same name and by an equal one
        assert [monitor.stage(name) for name in names] == first
        assert [monitor.stage("".join(list(name))) for name in names] == first
        assert len(set(first)) == len(names)
        # AND a name that was none becomes one when it is declared
        before = monitor.stage("late")
        monitor.declare("late")
        assert monitor.stage("late") is monitor.stage("late") is not before


@pytest.mark.parametrize("kind", [Monitor, PythonMonitor])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda monitor: pickle.loads(pickle.dumps(monitor))])
def test_an_inert_monitor_is_copied_with_its_holder(kind, copied):
    monitor = copied(kind())
    with monitor.step(), monitor.stage("data"):
        pass
    assert not monitor.active


@pytest.mark.skipif(moments.FORM.name != "C", reason=moments.WHY_NOT_C)
def test_steps_and_stages_are_looked_up_without_a_frame_of_pythons(tmp_path):
    # GIVEN a monitor whose stages have been requested once
    with Monitor(STAGES, rings=tmp_path) as monitor:

        def steps(count: int) -> None:
            for _ in range(count):
                with monitor.step():
                    for name in STAGES:
                        with monitor.stage(name):
                            pass

        steps(START_STEPS + 1)
        called = []
        sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
        try:
            steps(3)
        finally:
            sys.setprofile(None)
    # THEN steady steps call nothing that is written in Python
    assert called == ["steps"]


@pytest.mark.skipif(moments.FORM.name != "C", reason=moments.WHY_NOT_C)
def test_the_form_in_c_keeps_nothing_alive(tmp_path):
    # GIVEN monitors that were closed, and a stage of each that a script still holds
    held = []
    for number in range(50):
        with Monitor(rings=tmp_path, rank=number, world_size=50, slots=1) as one:
            held.append(one.stage("data"))
            with one.step():
                pass
    # THEN their maps and recordings are gone, and the stages do nothing
    del one
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert str(tmp_path) not in maps
    for stage in held:
        with stage:
            pass
