"""Device time: what the GPU did at each stage, without ever waiting for it.

Most tests run on a device that is a clock and a queue; the last ones on a real GPU, where there is one.
"""

import contextlib
import inspect
import os
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.trainer import device as device_times
from sftriage.trainer import gradients, moments, monitor, recording
from sftriage.trainer.device import IN_FLIGHT, MAX_MARKS
from sftriage.trainer.monitor import DEVICE_ENV
from sftriage.trainer.recording import START_STEPS
from sftriage.windows.rings import Ring
from tests import needs
from tests.unit.trainer.conftest import Account, Watched

from .fake_cuda import FakeDevice, FakeEvent

STAGES = ("data", "forward", "backward", "optimizer")


FORMS = ("C", "torch")
"""Device time in C, with the driver's functions; and with torch's, as where the driver is not CUDA's."""


@contextlib.contextmanager
def simulated(form):
    if form == "C" and moments.FORM.device is None:
        pytest.skip(moments.WHY_NOT_C)
    made = FakeDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", made.in_torch)
        for module in (recording, gradients, monitor):
            patch.setattr(module, "monotonic_ns", made.host_clock)
        patch.setattr(device_times, "driver", made.functions if form == "C" else tuple)
        yield made
    assert made.complaints == []


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


@pytest.fixture
def device(form):
    with simulated(form) as made:
        yield made


@pytest.fixture
def start(tmp_path, request):
    """Start a job, which is closed in the end, before its device is gone."""
    if "device" in request.fixturenames:
        request.getfixturevalue("device")
    made = []

    def start(*stages, **options):
        made.append(Watched(tmp_path, *stages, slots=4 * IN_FLIGHT, **options))
        return made[-1]

    yield start
    for watched in made:
        watched.close()


@pytest.fixture
def job(start, device):
    return start()


def finish(job, device):
    """Let the device do what it has to, and close; the device times that come of it."""
    device.catches_up()
    job.monitor.close()
    return job.device()


def train(job, device, **launched):
    """One step of a host that only launches: nanoseconds of work on the device by stage."""
    with job.monitor.step():
        for name in STAGES:
            with job.monitor.stage(name):
                device.launch(launched.get(name, 0))
                device.passes(10)


class Parameter:
    """What a model's parameter is to whoever watches it."""

    requires_grad = is_leaf = True

    def __init__(self):
        self.hooks = {}

    def register_post_accumulate_grad_hook(self, hook):
        self.hooks[id(hook)] = hook
        return SimpleNamespace(remove=lambda: self.hooks.pop(id(hook), None))

    def has_its_gradient(self):
        for hook in list(self.hooks.values()):
            hook(self)


class Model:
    def __init__(self, count=3):
        self.layers = [Parameter() for _ in range(count)]

    def parameters(self):
        return self.layers


def backward(job, device, model, own_ns, exchange_ns):
    """Gradients of the layers, the last one's first, and then an exchange; the host only launches."""
    with job.monitor.stage("backward"):
        device.passes(1)
        for layer in reversed(model.layers):
            device.launch(own_ns // len(model.layers))
            layer.has_its_gradient()
        device.launch(exchange_ns)


def test_the_last_gradient_is_ready_when_the_device_has_it(job, device):
    # GIVEN a model that is watched, and hosts that launch its backward in next to no time
    model = Model()
    job.monitor.watch(model)
    for own_ns in (3000, 9000, 3000):
        with job.monitor.step():
            with job.monitor.stage("forward"):
                device.launch(500)
            backward(job, device, model, own_ns, exchange_ns=2000)
        device.catches_up()
    # THEN on the device's clock the sync stage is split there
    times = finish(job, device)
    assert [(row.durations_ns[2], row.ready_ns) for row in times] == [(5000, 3000), (11000, 9000), (5000, 3000)]


def test_only_the_gradient_that_comes_last_has_an_event(job, device):
    # GIVEN a model whose gradients come in one order, which is known after some steps
    model = Model(8)
    job.monitor.watch(model)

    def step():
        before = device.recorded
        with job.monitor.step():
            backward(job, device, model, 8000, exchange_ns=700)
        device.catches_up()
        return device.recorded - before

    while job.monitor._recording.watch._order.learning:
        boundaries = step() - len(model.layers)
    # THEN a step has one event more than it has without, and its moment
    assert {step() for _ in range(5)} == {boundaries + 1}
    assert {record.ready_ns for record in finish(job, device)} == {8001}


def test_each_visit_to_the_sync_stage_has_its_own_last_gradient(job, device):
    # GIVEN micro-batches: what a visit takes after its last gradient is a wait
    model = Model()
    job.monitor.watch(model)
    made = None
    for _ in range(40):
        with job.monitor.step():
            for _ in range(3):
                backward(job, device, model, 3000, exchange_ns=700)
        device.catches_up()
        made = device.made if made is None else made
    # (the device is idle for the 1 ns until the first gradient is launched)
    times = finish(job, device)
    assert {(record.durations_ns[2], record.ready_ns) for record in times} == {(3 * 3700 + 1, 3 * 3000 + 1)}
    assert len(times) == 40
    # AND the events of some steps are used again and again
    assert device.made - made <= 3 * IN_FLIGHT


def test_a_step_whose_last_gradient_may_be_another_one_has_no_ready_moment_on_either_clock(job, device):
    model = Model()
    job.monitor.watch(model)
    for number in range(20):
        with job.monitor.step(), job.monitor.stage("backward"):
            for layer in reversed(model.layers if number < 19 else model.layers[2:]):
                device.launch(100)
                layer.has_its_gradient()
        device.catches_up()
    assert [record.ready_ns is None for record in finish(job, device)][-2:] == [False, True]
    assert [record.ready_ns is None for record in job.steps()][-2:] == [False, True]


@pytest.mark.parametrize("form", ["torch"], indirect=True)
def test_a_gradient_on_another_device_costs_its_own_moment_alone(job, device, monkeypatch, caplog):
    # GIVEN a model whose last layers are on a device whose clock is another one
    model = Model()
    job.monitor.watch(model)
    measured = FakeEvent.elapsed_time

    def elapsed_time(event, end):
        if end.foreign:
            raise RuntimeError("Both events must be on the same device")
        return measured(event, end)

    monkeypatch.setattr(FakeEvent, "foreign", False, raising=False)
    monkeypatch.setattr(FakeEvent, "elapsed_time", elapsed_time)
    for number in range(4):
        with job.monitor.step():
            backward(job, device, model, 3000, exchange_ns=700)
        if number == 1:
            (event,) = job.monitor._recording.device._steps[-1].ready.values()
            event.foreign = True
        device.catches_up()
    # THEN the steps' own times go on, without the moment, and that is said once
    assert [(record.durations_ns[2], record.ready_ns) for record in finish(job, device)] == [
        (3701, 3001),
        (3701, None),
        (3701, 3001),
        (3701, None),
    ]
    assert caplog.text.count("is not known on the device") == 1


@pytest.mark.parametrize("form", ["C"], indirect=True)
def test_a_gradient_on_another_device_has_no_event(job, device):
    # GIVEN a model whose last layer is on another device, in the second step
    model = Model(1)
    job.monitor.watch(model)
    for other in (0, 1, 0):
        with job.monitor.step(), job.monitor.stage("backward"):
            device.launch(100)
            device.number = other
            model.layers[0].has_its_gradient()
            device.number = 0
        device.catches_up()
    assert [(row.durations_ns[2], row.ready_ns) for row in finish(job, device)] == [(100, 100), (100, None), (100, 100)]


@pytest.mark.parametrize("form", ["C"], indirect=True)
def test_a_job_that_goes_to_another_device_has_device_time_there(job, device):
    # GIVEN a trainer that says which device is its own once it has trained a step on another one
    train(job, device, forward=3000)
    device.catches_up()
    device.number = 1
    # WHEN it goes on THEN no event of the first one is asked there, and its steps have their times
    for _ in range(3):
        train(job, device, forward=500)
        device.catches_up()
    assert [(step.step, step.durations_ns[1]) for step in finish(job, device)][-2:] == [(2, 500), (3, 500)]


@pytest.mark.parametrize("form", ["C"], indirect=True)
def test_a_thread_that_has_not_used_the_device_yet_begins_with_its_next_step(job, device, caplog):
    device.has_context = False
    train(job, device)
    device.has_context = True
    train(job, device)
    assert [step.step for step in finish(job, device)] == [1]
    assert caplog.records == []


@pytest.mark.parametrize("form", ["C"], indirect=True)
def test_boundaries_between_which_nothing_was_launched_have_one_event(job, device):
    # GIVEN stages that follow one another at once
    for _ in range(10):
        with job.monitor.step():
            for name in STAGES:
                with job.monitor.stage(name):
                    device.launch(100)
        device.catches_up()
    # THEN a step has an event for the beginning of each and one for its end, and nothing is missing
    assert device.recorded == 10 * (len(STAGES) + 1)
    assert {step.durations_ns for step in finish(job, device)} == {(100, 100, 100, 100, 0)}


def test_a_gradient_in_a_graph_that_is_captured_has_no_event(job, device):
    model = Model()
    job.monitor.watch(model)
    for capturing in (False, True, False):
        with job.monitor.step(), job.monitor.stage("backward"):
            device.launch(100)
            device.is_capturing = capturing
            model.layers[0].has_its_gradient()
            device.is_capturing = False
        device.catches_up()
    assert [record.ready_ns for record in finish(job, device)] == [100, None, 100]


def test_a_host_far_ahead_of_its_device_leaves_steps_out(job, device):
    # GIVEN more steps than can be in flight, none of which the GPU has done
    n_steps = IN_FLIGHT + 10
    for _ in range(n_steps):
        train(job, device, forward=100_000)
    # WHEN it catches up, and the job goes on
    device.catches_up()
    for _ in range(IN_FLIGHT):
        train(job, device, backward=10)
        device.catches_up()
    train(job, device)
    # THEN what was recorded is right under its own number, and the host's times are all there
    found = {step.step: step for step in job.device()}
    assert set(range(IN_FLIGHT - 1)) < set(found)
    assert not {IN_FLIGHT - 1, n_steps - 1, n_steps} & set(found)
    assert found[3].durations_ns[STAGES.index("forward")] == 100_000
    assert found[n_steps + 1].durations_ns[STAGES.index("backward")] == 10
    # AND the first one after the gap does not take the gap for time between steps
    assert found[n_steps + 1].between_ns == 0
    assert len(job.steps()) == n_steps + IN_FLIGHT + 1


@pytest.mark.parametrize("behind", [1, 3, IN_FLIGHT - 1])
def test_a_steady_step_makes_no_event(job, device, behind):
    # GIVEN a device that is so many steps behind its host, once it has been so
    def go_on(steps):
        for _ in range(steps):
            train(job, device, forward=1000)
            if device.reached_ns() - device.now_ns > 1000 * behind:
                device.passes(1000)

    go_on(2 * IN_FLIGHT)
    made = device.made
    # WHEN it goes on THEN the events that there are do, and of those there are no more than are under way
    go_on(200)
    assert device.made == made <= (behind + 4) * (2 * len(STAGES) + 2)


def test_events_of_steps_that_have_no_device_time_are_used_again(job, device):
    # GIVEN steps that are left half-way, and others in which a graph is captured
    for _ in range(10):
        with contextlib.suppress(KeyError), job.monitor.step(), job.monitor.stage("data"):
            raise KeyError
        with job.monitor.step(), job.monitor.stage("forward"):
            device.is_capturing = True
            with job.monitor.stage("data"):
                pass
            device.is_capturing = False
    # THEN none of them has an event to itself, and the next one has its device time
    assert 0 < device.made <= 4
    train(job, device)
    assert [step.step for step in finish(job, device)] == [20]


def test_a_step_with_more_boundaries_than_are_sensible_ends_device_time_alone(job, device, caplog):
    for _ in range(10):
        with job.monitor.step():
            for _ in range(MAX_MARKS):
                with job.monitor.stage("data"):
                    pass
    assert "no more device times" in caplog.text
    assert job.monitor.active
    assert device.made == MAX_MARKS


def test_a_broken_device_ends_device_time_and_not_the_recording(job, device, caplog):
    train(job, device)
    device.broken = True
    train(job, device)
    recorded = device.recorded
    train(job, device)
    # THEN one warning, nothing more asked of the device, and the host's steps go on
    assert [record.message for record in caplog.records if "no more device times" in record.message]
    assert device.recorded == recorded
    assert [step.step for step in job.steps()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("argument", "variable", "expected"),
    [(None, None, True), (None, "1", True), (None, "0", False), (False, None, False), (True, "0", True)],
)
def test_device_time_is_on_unless_switched_off(start, device, monkeypatch, argument, variable, expected):
    if variable is not None:
        monkeypatch.setenv(DEVICE_ENV, variable)
    job = start(device_time=argument)
    train(job, device)
    job.device()
    assert (device.recorded > 0, job.reader.untimed) == (expected, not expected)


def test_closing_publishes_finished_steps_without_waiting(job, device):
    # GIVEN a device that is through with one step when the next two have been launched
    train(job, device, forward=4)
    device.catches_up()
    train(job, device, forward=1000)
    train(job, device, forward=1_000_000)
    assert ([step.step for step in job.device()], job.reader.over) == ([0], False)
    # WHEN it is through with another one, and the monitor is closed
    device.passes(2000)
    job.monitor.close()
    # THEN that one is there too, and a reader knows that nothing more will come
    assert ([step.step for step in job.device()], job.reader.over) == ([1], True)
    train(job, device)
    assert job.device() == []


def test_a_forked_child_records_no_device_time(job, device):
    train(job, device)
    recorded, made = device.recorded, device.made
    pid = os.fork()
    if pid == 0:
        train(job, device)
        job.monitor.close()
        os._exit(0 if (device.recorded, device.made) == (recorded, made) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    device.catches_up()
    train(job, device)
    train(job, device)
    assert job.device()[0].step == 0


ACTIONS = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from(STAGES)),
    st.tuples(st.just("leave"), st.none()),
    st.tuples(st.sampled_from(["launch", "pass"]), st.integers(0, 10**6)),
    st.tuples(st.just("loop"), st.integers(1, 60)),
    st.tuples(st.just("gradient"), st.integers(0, 2)),
    st.tuples(st.just("capture"), st.booleans()),
    st.tuples(st.just("raise"), st.none()),
)


class Script:
    """Steps of a job, and beside what is recorded of them what a naive account of the queue says."""

    def __init__(self, form, rings, steps):
        self.expected, self.model, self.opened = [], Model(), []
        with simulated(form) as self.device:
            job = Watched(rings, STAGES, ("backward", "forward"))
            job.monitor.watch(self.model)
            self.monitor, ended_ns = job.monitor, None
            for number, actions in enumerate(steps, start=100):
                self.device.launch(11)
                self.account, self.captured, self.opened = Account("forward", "backward"), False, []
                began_ns = self.at_ns = self.device.reached_ns()
                with contextlib.suppress(KeyError), self.monitor.step(number):
                    self.boundary()
                    for action, value in actions:
                        getattr(self, f"_{action}")(value)
                    while self.opened:
                        self._leave(None)
                    self.boundary()
                    if not self.captured:
                        between_ns = 0 if ended_ns is None else began_ns - ended_ns
                        self.expected.append((number, *self.account.record(), between_ns, True))
                        ended_ns = self.at_ns
                        continue
                ended_ns = None
            self.found = finish(job, self.device)
            starts_ns = {step.step: step.start_ns for step in job.steps()}
            assert all(step.start_ns == starts_ns[step.step] for step in self.found)
            job.close()

    def boundary(self):
        self.captured |= self.device.is_capturing
        before_ns, self.at_ns = self.at_ns, self.device.reached_ns()
        self.account.passes(self.at_ns - before_ns)

    def _enter(self, name):
        self.boundary()
        self.account.open.append(name)
        self.opened.append(self.monitor.stage(name))
        self.opened[-1].__enter__()

    def _leave(self, _):
        if self.opened:
            self.boundary()
            self.account.leave(self.account.open[-1])
            self.opened.pop().__exit__(None, None, None)

    def _launch(self, ns):
        self.device.launch(ns)

    def _pass(self, ns):
        self.device.passes(ns)

    def _loop(self, count):
        for _ in range(count):
            self._enter("forward")
            self.device.launch(2)
            self._leave(None)

    def _gradient(self, layer):
        self.model.layers[layer].has_its_gradient()

    def _capture(self, value):
        self.device.is_capturing = value
        self.device.passes(0)  # (it takes the host its time, as a launch does)

    def _raise(self, _):
        raise KeyError


@settings(max_examples=150)
@given(steps=st.lists(st.lists(ACTIONS, max_size=12), max_size=12))
def test_both_forms_agree_with_a_naive_model_of_the_queue(tmp_path_factory, steps):
    # GIVEN any order of stages, launches, pauses, gradients and captured graphs, in steps that end or are left
    forms = [form for form in FORMS if form != "C" or moments.FORM.device is not None]
    scripts = [Script(form, tmp_path_factory.mktemp("rings"), steps) for form in forms]
    # THEN each whole step that was not captured has the device's times, under the job's own number
    for script in scripts:
        found = [(row.step, row.durations_ns, row.outside_ns, row.between_ns, row.complete) for row in script.found]
        assert found == script.expected
        # AND both forms agree on when the last gradient was ready
        assert [record.ready_ns for record in script.found] == [record.ready_ns for record in scripts[0].found]


def marked(rings):
    with Ring(rings / "rank-0.0.ring") as ring:
        ring.read()
        return ring.on_device


@pytest.mark.parametrize("device_time", [True, False])
def test_the_ring_shows_that_the_rank_uses_cuda(start, tmp_path, device, device_time):
    # GIVEN a rank that initialises CUDA in its third step, with device time or without
    device.initialised = False
    job = start(device_time=device_time)
    train(job, device)
    train(job, device)
    device.initialised = True
    assert not marked(tmp_path)
    # WHEN it goes on, THEN its ring says so, once and for all
    train(job, device)
    assert marked(tmp_path)
    assert [step.step for step in finish(job, device)] == ([2] if device_time else [])
    assert marked(tmp_path)


@pytest.mark.parametrize("torch", [None, SimpleNamespace(), SimpleNamespace(cuda=SimpleNamespace())])
def test_a_job_without_cuda_or_whose_torch_is_half_imported_is_not_marked(start, tmp_path, monkeypatch, torch):
    monkeypatch.setitem(sys.modules, "torch", torch)
    job = start(device_time=False)
    for _ in range(3):
        with job.monitor.step():
            pass
    assert job.monitor.active
    assert not marked(tmp_path)


@pytest.mark.parametrize("initialised", [True, False])
@pytest.mark.parametrize("device_time", [True, False])
def test_whether_cuda_is_in_use_is_looked_up_in_the_first_steps_only(
    start, device, monkeypatch, caplog, initialised, device_time
):
    looked_up = []
    monkeypatch.setattr(device, "is_initialized", lambda: looked_up.append(1) or initialised)
    job = start(device_time=device_time)
    # WHEN it trains for longer than CUDA may take to be initialised
    for _ in range(2 * START_STEPS):
        train(job, device)
    # THEN it is looked up until it is, or until then, and without a word: that is how most jobs on CPUs are
    assert len(looked_up) == (1 if initialised else START_STEPS)
    assert caplog.records == []
    assert (bool(device.recorded), len(job.steps())) == (initialised and device_time, 2 * START_STEPS)


def test_torch_has_the_functions_that_device_time_uses():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    assert callable(torch.cuda.is_current_stream_capturing)
    assert callable(torch.cuda.current_stream)
    # (of a build for CUDA alone)
    if torch.version.cuda:
        assert callable(torch._C._cuda_getDevice)
        assert callable(torch._C._cuda_getCurrentRawStream)
    # GIVEN torch's own event class, whether or not there is a device to record it on
    # THEN it takes what it is given here
    inspect.signature(torch.cuda.Event.record).bind(None, object())
    inspect.signature(torch.cuda.Event.elapsed_time).bind(None, object())
    inspect.signature(torch.cuda.Event.query).bind(None)
    inspect.signature(torch.cuda.Event.__new__).bind(torch.cuda.Event, enable_timing=True)


@needs.gpu
def test_a_real_gpu_goes_on_capturing_graphs(start):
    import torch

    torch.cuda.init()
    job = start()
    square = torch.ones(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with job.monitor.step(), job.monitor.stage("forward"), torch.cuda.graph(graph), job.monitor.stage("data"):
        result = square * 2
    for _ in range(3):
        with job.monitor.step(), job.monitor.stage("forward"):
            graph.replay()
    torch.cuda.synchronize()
    job.monitor.close()
    assert result.sum().item() == 128
    assert [step.step for step in job.device()] == [1, 2, 3]
