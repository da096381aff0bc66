"""The ready moment of real models' backward passes, on a clock that only moves when told."""

import copy
import gc
import io
import os
import signal
import threading
import traceback
import weakref

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sftriage.trainer import gradients
from sftriage.trainer.gradients import AUDIT_STEPS, FROZEN_A_STEP, KEPT, LEARNING_STEPS, MAX_LOOKS, GradientOrder
from sftriage.trainer.monitor import RINGS_ENV, AutomaticMonitor, Monitor
from tests.unit.trainer.conftest import in_a_thread

WAIT_NS = 1000


class Spend(torch.autograd.Function):
    """Nothing, except that time passes in its backward."""

    @staticmethod
    def forward(context, value, clock, ns):
        context.spent = clock, ns
        return value.clone()

    @staticmethod
    def backward(context, grad):
        clock, ns = context.spent
        clock.passes(ns)
        return grad, None, None


class Chain(nn.Module):
    """Layers in a row; the clock moves by 10 ns before the gradients of each, the last one's before the first one's."""

    def __init__(self, clock, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(layers))
        self.clock = [clock]
        self.skipped: set[int] = set()

    def forward(self, value):
        value = value.clone().requires_grad_()
        for index, layer in enumerate(self.layers):
            if index not in self.skipped:
                value = Spend.apply(layer(value), self.clock[0], 10)
        return value


def hooked(model) -> int:
    return sum(bool(parameter._post_accumulate_grad_hooks) for parameter in model.parameters())


def backward(model) -> None:
    model(torch.ones(2, 3)).sum().backward()


def train(watched, clock, *models, steps: int = 1, stage: str = "backward", waits_ns: int = WAIT_NS):
    """Steps in which each visit to the backward stage ends with a wait, as DDP's does; their ready moments."""
    for _ in range(steps):
        with watched.monitor.step():
            for number, model in enumerate(models, 1):
                clock.passes(5)
                with watched.monitor.stage(stage):
                    clock.passes(2)
                    backward(model)
                    clock.passes(WAIT_NS if number == len(models) else waits_ns)
    return [record.ready_ns for record in watched.steps()]


@pytest.fixture
def watched(clock, watch):
    return watch()


@pytest.fixture
def model(watched, clock):
    made = Chain(clock)
    watched.monitor.watch(made)
    return made


@pytest.fixture
def learnt(watched, clock, model):
    """Four layers that have been watched until only some hooks are left."""
    train(watched, clock, model, steps=LEARNING_STEPS)
    assert hooked(model) == KEPT
    return model


def test_the_moment_splits_the_sync_stage_while_it_learns_and_afterwards(watched, clock, model):
    assert hooked(model) == 8
    # THEN all but the last few hooks go off after some steps, and every step says 2 + 4 * 10 ns
    assert train(watched, clock, model, steps=LEARNING_STEPS) == [42] * LEARNING_STEPS
    assert hooked(model) == KEPT
    assert train(watched, clock, model, steps=3) == [42] * 3
    # AND the stage's duration is what it was: that much, and the wait
    with watched.monitor.step(), watched.monitor.stage("backward"):
        backward(model)
        clock.passes(WAIT_NS)
    assert watched.step().durations_ns[2] == 40 + WAIT_NS


def test_a_watch_that_begins_within_the_sync_stage_knows_the_visits_after_it(watched, clock):
    # GIVEN a model that is watched from the middle of a visit on
    model = Chain(clock)
    with watched.monitor.step(), watched.monitor.stage("backward"):
        watched.monitor.watch(model)
        backward(model)
    # THEN that one has no moment, and the next ones have
    assert watched.step().ready_ns is None
    assert train(watched, clock, model, steps=2) == [42, 42]


@pytest.mark.usefixtures("form")
def test_stage_entries_are_counted_with_and_without_a_watch(clock, tmp_path, monkeypatch):
    monkeypatch.setenv(RINGS_ENV, str(tmp_path))
    with AutomaticMonitor(("data", "backward"), ("backward",)) as monitor:
        stage = monitor.stage("backward")
        for model in (None, Chain(clock), Chain(clock), object()):
            if model is not None:
                monitor.watch(model)
            with monitor.step(), stage:
                pass
        assert (stage.entered, stage.left) == (4, 4)


def test_under_no_sync_all_of_backward_is_the_ranks_own(watched, clock, group):
    # GIVEN a model under DDP whose gradients are not exchanged, as between the averages of local SGD
    model = DistributedDataParallel(Chain(clock))
    watched.monitor.watch(model)
    with model.no_sync():
        assert train(watched, clock, model, steps=3) == [42 + WAIT_NS] * 3
    # THEN that is so for these steps alone
    assert train(watched, clock, model) == [42]


def test_two_models_with_a_backward_each_are_both_followed_to_their_last_gradient(watched, clock):
    # GIVEN two models, watched as one, each with a backward of its own that ends with a wait
    models = nn.ModuleList([Chain(clock, 6), Chain(clock, 3)])
    watched.monitor.watch(models)
    # THEN the waits are in no moment, while it learns and when most hooks are off
    assert train(watched, clock, *models, steps=3 * LEARNING_STEPS) == [62 + 32] * 3 * LEARNING_STEPS
    assert hooked(models) == 2 * KEPT
    # AND when the first leaves out the layer whose gradient came last, no step is told a moment that is too late, and
    # soon there is one again
    models[0].skipped = {0}
    moments = train(watched, clock, *models, steps=3 * LEARNING_STEPS)
    assert set(moments) <= {None, 52 + 32}
    assert moments[-1] == 52 + 32


ACTIONS = st.one_of(
    st.tuples(st.just("visit"), st.sampled_from(["data", "forward", "backward"])),
    st.tuples(st.just("leave"), st.none()),
    st.tuples(st.just("pass"), st.integers(1, 1000)),
    st.tuples(st.just("gradients"), st.booleans()),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.lists(ACTIONS, max_size=15), max_size=LEARNING_STEPS))
@example(steps=[[("visit", "backward"), ("pass", 1000), ("leave", None), ("visit", "backward"), ("gradients", True)]])
@example(steps=[[("visit", "backward"), ("pass", 2), ("visit", "data"), ("gradients", False), ("pass", 5)]])
@example(steps=[[("visit", "backward"), ("gradients", False), ("leave", None), ("gradients", False)]] * LEARNING_STEPS)
def test_a_visits_time_until_its_last_gradient_is_own_work(watch, clock, steps):
    # GIVEN visits to the sync stage that compute, wait or both, and backwards there and elsewhere, some of them in a
    # thread of autograd's
    watched, model, expected = watch(), Chain(clock), []
    watched.monitor.watch(model)
    for actions in steps:
        opened, own_ns, ready_ns = [], 0, []
        with watched.monitor.step():
            for action, value in [*actions, *[("leave", None)] * len(actions)]:
                before_ns = clock.now_ns
                if action == "visit" and value not in opened:
                    opened.append(value)
                    watched.monitor.stage(value).__enter__()
                    if value == "backward":
                        own_ns = 0
                        ready_ns.append(None)
                elif action == "leave" and opened:
                    watched.monitor.stage(opened.pop()).__exit__(None, None, None)
                elif action == "pass":
                    clock.passes(value)
                elif action == "gradients":
                    in_a_thread(backward, model) if value else backward(model)
                own_ns += (clock.now_ns - before_ns) * (opened[-1:] == ["backward"])
                if action == "gradients" and "backward" in opened:
                    ready_ns[-1] = own_ns
        known_ns = [ns for ns in ready_ns if ns is not None]
        expected.append(sum(known_ns) if known_ns else None)
    # THEN the moment is how long they were at it together, without any wait
    assert [record.ready_ns for record in watched.steps()] == expected
    assert watched.misuse == 0
    watched.monitor.close()


def test_without_gradients_in_the_sync_stage_the_hooks_go_off_with_one_warning(watched, clock, model, caplog):
    # GIVEN a script that calls backward() in a stage that is not the sync stage
    for _ in range(2 * MAX_LOOKS):
        with watched.monitor.step():
            with watched.monitor.stage("forward"):
                backward(model)
            with watched.monitor.stage("backward"):
                clock.passes(3)
        watched.steps()
        if not hooked(model):
            break
    assert hooked(model) == 0
    assert [record.getMessage().count("'backward'") for record in caplog.records] == [1]
    assert watched.misuse == 0


def test_steps_without_backward_change_nothing(watched, clock, learnt, caplog):
    # GIVEN a learnt model, then a long evaluation
    for _ in range(30):
        with watched.monitor.step(kind="evaluation"), watched.monitor.stage("forward"):
            clock.passes(3)
    assert {record.ready_ns for record in watched.steps()} == {None}
    # THEN nothing is learnt anew, and training goes on as before
    assert hooked(learnt) == KEPT
    assert train(watched, clock, learnt) == [42]
    assert caplog.records == []


@pytest.mark.parametrize("change", ["skipped", "frozen"])
def test_missing_last_gradients_make_it_learn_again(watched, clock, learnt, change):
    # GIVEN a learnt model WHEN its first layers, whose gradients come last, are unused or frozen
    if change == "skipped":
        learnt.skipped = {0, 1, 2}
    else:
        learnt.layers[:3].requires_grad_(False)
    # THEN the step in which that shows has no moment, and those after it the right one: one layer is left
    assert train(watched, clock, learnt, steps=3) == [None, 12, 12]
    train(watched, clock, learnt, steps=LEARNING_STEPS)
    # AND when they come back they are known
    learnt.skipped = set()
    learnt.layers.requires_grad_(True)
    for parameter in learnt.parameters():
        parameter.grad = None
    assert train(watched, clock, learnt) == [42]


def test_the_kept_hooks_notice_a_changed_order(watch, clock):
    # GIVEN two branches, one of them delayed; autograd runs the one that was made last first
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))
            self.order = [0, 1]

        def forward(self, value):
            value = value.clone().requires_grad_()
            outputs = [Spend.apply(self.branches[index](value), clock, 10) for index in self.order]
            return outputs[0] + outputs[1]

    watched, model = watch(), Branches()
    watched.monitor.watch(model)
    assert train(watched, clock, model, steps=LEARNING_STEPS) == [22] * LEARNING_STEPS
    # WHEN the other one comes last THEN that step has no moment, and the next ones have
    model.order = [1, 0]
    assert train(watched, clock, model, steps=2) == [None, 22]


@pytest.mark.parametrize(
    ("frozen", "steps", "before"), [(1, LEARNING_STEPS, 32), (1, 1, 32), (4, 3, None)], ids=["learnt", "early", "all"]
)
def test_thawed_layers_are_noticed_though_the_known_ones_still_come(watch, clock, frozen, steps, before):
    watched, model = watch(), Chain(clock)
    model.layers[:frozen].requires_grad_(False)
    watched.monitor.watch(model)
    assert train(watched, clock, model, steps=steps)[-1] == before
    # WHEN they are thawed THEN the step that shows it has no moment, and the next ones the right one
    model.layers.requires_grad_(True)
    assert train(watched, clock, model, steps=3) == [None, 42, 42]


def test_parameters_frozen_in_turns_do_not_keep_it_learning(watch, clock):
    # GIVEN two networks that are trained in turns, the other one frozen meanwhile, as a generator and a discriminator
    watched = watch()
    model = nn.ModuleList([Chain(clock, 6), Chain(clock, 8)])
    watched.monitor.watch(model)
    found, on = [], 0
    for step in range(60):
        mine, other = model[step % 2], model[1 - step % 2]
        mine.requires_grad_(True)
        other.requires_grad_(False)
        on += hooked(mine) > KEPT
        found += train(watched, clock, mine)
    # THEN both become known, and the hooks are few
    assert (found[40::2], found[41::2]) == ([62] * 10, [82] * 10)
    assert on < 30
    assert hooked(model) <= 2 * KEPT


def test_a_few_frozen_parameters_are_checked_after_each_step(watch, clock):
    # GIVEN 20 frozen layers, and the second one thawed
    watched, model = watch(), Chain(clock, 20)
    model.layers[:19].requires_grad_(False)
    watched.monitor.watch(model)
    train(watched, clock, model, steps=LEARNING_STEPS)
    model.layers[1].requires_grad_(True)
    # THEN within a turn of all 38 of them it is noticed
    steps = 38 // FROZEN_A_STEP + 2
    assert train(watched, clock, model, steps=steps)[-1] == 192


@pytest.fixture
def audit_steps(monkeypatch) -> int:
    """There is an audit after fewer steps than else."""
    monkeypatch.setattr(gradients, "AUDIT_STEPS", 50)
    return 50


def test_an_audit_finds_changes_that_nothing_else_shows(watched, clock, learnt, audit_steps):
    # GIVEN a learnt model, and a layer with a name of its own that was not there then
    learnt.layers.insert(0, nn.Linear(3, 3))
    found = []
    for _ in range(audit_steps + 1):
        found += train(watched, clock, learnt)
    # THEN its gradients are seen from the audit on
    assert (found[0], found[-1]) == (42, 52)
    # AND no hook was put on twice: closing leaves none
    assert max(len(parameter._post_accumulate_grad_hooks or ()) for parameter in learnt.parameters()) == 1
    watched.monitor.close()
    assert hooked(learnt) == 0


def test_shared_weights_and_a_parameter_used_twice_are_ready_after_their_last_use(watch, clock):
    # GIVEN a first layer that is used again as the last one, as tied embeddings are
    watched, model = watch(), Chain(clock)
    model.layers[3] = model.layers[0]
    watched.monitor.watch(model)
    assert train(watched, clock, model, steps=2 * LEARNING_STEPS) == [42] * 2 * LEARNING_STEPS


def test_a_step_left_half_way_teaches_nothing(watched, clock, model):
    # GIVEN a backward that fails after the gradients of two layers

    def fails(grad):
        raise ZeroDivisionError

    def step() -> None:
        with watched.monitor.step(), watched.monitor.stage("backward"):
            value = model.layers[0](torch.ones(2, 3))
            value.register_hook(fails)
            clock.passes(1)
            model.layers[2](model.layers[1](value)).sum().backward()

    for _ in range(LEARNING_STEPS):
        with pytest.raises(ZeroDivisionError):
            step()
    assert {(record.complete, record.ready_ns) for record in watched.steps()} == {(False, None)}
    # THEN all hooks are still on, and the first whole step is the first lesson
    assert hooked(model) == 8
    assert train(watched, clock, model) == [42]


def test_a_late_hook_writes_into_no_other_step(watch, clock):
    # GIVEN a hook that is held up on its thread while the step that it is about ends and the next one begins
    watched, model = watch(), Chain(clock, 1)
    model.layers[0].bias = None
    monitor = watched.monitor
    monitor.watch(model)
    held, go_on = threading.Event(), threading.Event()

    def slow() -> int:
        if threading.current_thread() is thread:
            held.set()
            assert go_on.wait(10)
        return clock.now_ns

    thread = threading.Thread(target=backward, args=(model,))
    with monitor.step(), monitor.stage("backward"):
        clock.passes(3)
        clock.instead = slow
        thread.start()
        assert held.wait(10)
    with monitor.step(), monitor.stage("backward"):
        clock.passes(4)
        go_on.set()
        thread.join(10)
    # THEN both slots are whole, and neither has a moment
    assert [(record.ready_ns, record.durations_ns[2]) for record in watched.steps()] == [(None, 13), (None, 4)]


def test_an_error_in_the_hook_ends_the_watch_and_nothing_else(watched, clock, caplog):
    def broken() -> int:
        raise RuntimeError("a bug")

    model = Chain(clock)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: setattr(clock, "instead", broken))
    watched.monitor.watch(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: setattr(clock, "instead", None))
    # WHEN a step is trained THEN autograd hears nothing of it
    assert train(watched, clock, model) == [None]
    # AND our hooks are off, with one warning, while recording goes on
    assert train(watched, clock, model) == [None]
    left = sum(len(parameter._post_accumulate_grad_hooks) for parameter in model.parameters())
    assert (left, watched.monitor.active, watched.misuse) == (2 * 8, True, 0)
    assert [record.getMessage().count("a bug") for record in caplog.records] == [1]


def test_ctrl_c_in_backward_shows_no_frame_of_ours(watched):
    # GIVEN a backward that is long in torch's own code, and whatever is interrupted there is handled in Python's next
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    batch = torch.ones(2048, 512)
    watched.monitor.watch(model)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)

    def interrupted():
        with watched.monitor.step(), watched.monitor.stage("backward"):
            loss = model(batch).sum()
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            loss.backward()
            signal.pause()

    try:
        for _ in range(8):
            # WHEN a signal comes there
            with pytest.raises(KeyboardInterrupt) as raised:
                interrupted()
            # THEN the traceback is that of the script and torch
            files = [frame.filename for frame in traceback.extract_tb(raised.tb)]
            assert not [file for file in files if "sftriage/trainer" in file], files
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_second_watch_takes_the_place_of_the_first(watched, clock, learnt):
    second = Chain(clock, 6)
    for _ in range(2):
        watched.monitor.watch(second)
    assert (hooked(learnt), hooked(second)) == (0, 12)
    assert train(watched, clock, second, steps=LEARNING_STEPS + 1) == [62] * (LEARNING_STEPS + 1)


@pytest.mark.parametrize("end", ["close", "drop"])
@pytest.mark.parametrize("steps", [0, LEARNING_STEPS])
def test_closing_or_dropping_the_monitor_takes_the_hooks_off(tmp_path, clock, end, steps):
    # GIVEN a watched model with a hook of the user's own
    model, called = Chain(clock), []
    model.layers[0].weight.register_post_accumulate_grad_hook(lambda _: called.append(1))
    monitor = Monitor(rings=tmp_path)
    monitor.watch(model)
    for _ in range(steps):
        with monitor.step(), monitor.stage("backward"):
            backward(model)
    # WHEN the monitor goes THEN only that one is left
    if end == "close":
        monitor.close()
        monitor.close()
        monitor.watch(model)
    else:
        del monitor
    assert hooked(model) == 1
    backward(model)
    assert len(called) == steps + 1


def test_a_watched_model_can_be_collected_and_watching_ends_with_one_warning(watched, clock, caplog):
    model = Chain(clock)
    watched.monitor.watch(model)
    train(watched, clock, model, steps=LEARNING_STEPS)
    gone, parameter = weakref.ref(model), weakref.ref(next(model.parameters()))
    del model
    gc.collect()
    assert (gone(), parameter()) == (None, None)
    # WHEN the job trains another one THEN it is told once
    assert train(watched, clock, Chain(clock), steps=20) == [None] * 20
    assert [record.getMessage().count("watch()") for record in caplog.records] == [1]


def test_a_watched_model_can_be_copied_saved_and_swapped(watch, clock):
    watched, model = watch(), Chain(clock)
    model.clock = [None]
    watched.monitor.watch(model)
    # WHEN it is copied, pickled and saved THEN the copies have no hooks and the same values
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert hooked(other) == 0
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert hooked(model) == 8
    # AND conversions that swap tensors work: they refuse one that somebody has a weak reference to
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert next(model.parameters()).dtype == torch.float64


def test_a_forked_child_trains_unrecorded(watched, clock, model):
    with watched.monitor.step(), watched.monitor.stage("backward"):
        child = os.fork()
        if not child:
            ok = False
            try:
                backward(model)
                watched.monitor.watch(model)
                ok = watched.monitor._recording.watch._notes == []
            finally:
                os._exit(0 if ok else 1)
        assert os.waitpid(child, 0)[1] == 0
        clock.passes(1)
    assert watched.step().ready_ns is None


class DTensor(nn.Parameter):
    """By name, what the shards of a module are."""


def with_shards() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = DTensor(torch.zeros(2, 2))
    return model


class Failing(nn.Module):
    def parameters(self, recurse=True):
        raise RuntimeError("not today")


@pytest.mark.parametrize(
    ("model", "misuse"),
    [(None, 1), ("model", 1), ({}, 1), (nn.Parameter(torch.zeros(2)), 1), (with_shards(), 0), (Failing(), 0)],
    ids=["none", "text", "mapping", "parameter", "shards", "failing"],
)
def test_an_unwatchable_model_is_one_warning_and_no_moment(watch, clock, caplog, model, misuse):
    # GIVEN something without parameters, or whose gradients are accumulated only after an exchange
    watched = watch()
    for _ in range(2):
        watched.monitor.watch(model)
    assert (len(caplog.records), watched.misuse) == (1, 2 * misuse)
    assert not isinstance(model, nn.Module) or Failing is type(model) or hooked(model) == 0
    # THEN steps are recorded as before, and what was watched is let go of
    assert train(watched, clock, Chain(clock), steps=2) == [None, None]


def test_a_model_sharded_after_watch_is_unwatched(watched, clock, learnt, caplog, audit_steps):
    learnt.layers[0].weight = DTensor(torch.zeros(3, 3))
    for _ in range(audit_steps + 1):
        train(watched, clock, learnt)
    # THEN that is found out at the latest by the audit, and said
    assert (hooked(learnt), len(caplog.records)) == (0, 1)
    assert "FSDP" in caplog.text


def test_a_schema_without_sync_stage_has_nothing_to_split(watch, clock, caplog):
    watched, model = watch(("forward", "backward"), ()), Chain(clock)
    watched.monitor.watch(model)
    assert (hooked(model), watched.misuse, len(caplog.records)) == (0, 1, 1)
    assert train(watched, clock, model) == [None]


def test_an_inert_monitor_puts_no_hook_on_anything(caplog):
    monitor = Monitor()
    model = nn.Linear(2, 2)
    for nothing in (model, None, 7, Failing()):
        monitor.watch(nothing)
    assert (hooked(model), caplog.records) == (0, [])


USUAL = [(1, 2, 3, 4)]


@pytest.mark.parametrize(("found", "more"), [(USUAL, 0), ([(2, 3, 4, 9)], LEARNING_STEPS - 1)])
def test_an_audit_is_one_step_and_goes_on_where_it_finds_something_new(found, more):
    # GIVEN nothing out of order for a long time
    order = GradientOrder()
    for step in range(LEARNING_STEPS + AUDIT_STEPS):
        assert order.learning == (step < LEARNING_STEPS)
        assert order.take(USUAL, False)
    # WHEN all hooks have been on for a step
    assert order.learning
    assert order.take(found, False)
    # THEN it is over, unless a parameter that was not known came last
    for _ in range(more):
        assert order.learning
        order.take(found, False)
    assert not order.learning


def test_a_new_ending_is_learnt_once_the_budget_allows():
    # GIVEN one that surprises have cost all it had
    order = GradientOrder()
    step = 0
    while order.learning:
        order.take([(step := step + 1,)], False)
    assert step == MAX_LOOKS
    # WHEN known steps and surprises follow THEN the first surprise that can be paid for is looked into
    for _ in range(LEARNING_STEPS * gradients.STEPS_A_LOOK - 2):
        assert order.take([(step,)], False)
    assert not order.take([(0,)], False)
    assert not order.learning
    assert not order.take([(0,)], False)
    assert order.learning


def test_a_model_with_ever_new_endings_has_all_hooks_on_in_few_steps():
    order = GradientOrder()
    on = 0
    for step in range(10_000):
        on += order.learning
        order.take([(step,)], False)
    assert on <= 0.03 * 10_000


a_visit = st.lists(st.integers(0, 20), min_size=1, max_size=KEPT, unique=True).map(tuple)


@given(steps=st.lists(st.tuples(st.lists(a_visit, max_size=3), st.booleans()), max_size=200))
def test_a_moment_is_known_only_for_a_known_ending(steps):
    order = GradientOrder()
    seen = set()
    for visits, thawed in steps:
        learning = order.learning
        ending = visits and (visits[-1][-1], frozenset(visit[-1] for visit in visits[:-1]))
        if learning and visits and not thawed:
            seen.add(ending)
        known = order.take(visits, thawed)
        # THEN none is known that has not been seen with all hooks on
        assert not known or ending in seen
        assert known or not (learning and visits) or thawed
        # AND the hooks that stay are few
        assert len(order.kept) <= gradients.MAX_ENDINGS * 3 * KEPT
