"""The seams in real loops of torch, in this process: what is recorded of them, and what they leave as it was."""

import copy
import gc
import io
import logging
import pickle
import sys
import traceback
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import sftriage
from sftriage.trainer import facts, monitor
from sftriage.trainer.moments import FORM, WHY_NOT_C
from sftriage.trainer.monitor import RINGS_ENV, AutomaticMonitor, Monitor
from sftriage.trainer.seams import hooks, patches
from sftriage.trainer.seams.patches import NAMES, SEAMS_ENV, Seams, switched_off
from sftriage.windows.rings import Ring
from tests.unit.trainer.conftest import in_a_thread

STAGES = ("data", "forward", "backward", "optimizer", "other")
c_form = pytest.mark.skipif(FORM.seam is None, reason=WHY_NOT_C)
SEAMS = Path(monitor.__file__).parents[1] / "seams"


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_already_is_no_model_of_the_tests():
    """The seams look for models through all objects that there are: those of other tests take longer than all else."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def rings(tmp_path, monkeypatch):
    monkeypatch.setenv(RINGS_ENV, str(tmp_path))
    monkeypatch.setattr(monitor, "made_by_hand", False)
    monkeypatch.setattr(monitor, "_automatic", None)
    monkeypatch.setattr(patches, "installed", None)
    return tmp_path


@pytest.fixture
def put_in():
    """Puts the seams in, but for those that are switched off; they are taken out again."""
    made = []

    def put_in(*off: str) -> Seams:
        made.append(Seams(frozenset(off)))
        patches.installed = made[-1]
        made[-1].install()
        return made[-1]

    yield put_in
    for seams in made:
        seams.stop()


def recorded(rings, attempt=0, stages=STAGES):
    with Ring(rings / f"rank-0.{attempt}.ring") as ring:
        assert ring.info.schema.stages == stages
        return ring.read().steps.records()


def network(*, wide=8):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 1))


def loader(steps):
    torch.manual_seed(2)
    return DataLoader(TensorDataset(torch.randn(4 * steps, 8)), batch_size=4)


def train(steps=6, model=None, *, optimizer=None, after=lambda step: None):
    model = network() if model is None else model
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    taken = iter(loader(steps))
    for step in range(steps):
        (batch,) = next(taken)
        loss = model(batch).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after(step)
    return losses


def two_optimizers():
    pairs = [(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in (network(), network())]
    for _ in range(6):
        for model, optimizer in pairs:
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()


def steps_in_backward():
    model = network()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda tensor: optimizers[tensor].step())
    for _ in range(6):
        model(torch.randn(4, 8)).sum().backward()


def zero():
    """ZeRO, whose step calls that of another optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(network())
    train(6, model, optimizer=ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1))


def skipped_by_a_scaler():
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    for step in range(6):
        loss = model(torch.randn(4, 8)).sum() * (float("inf") if step == 4 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def calls_the_model_itself():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        return loss

    for _ in range(6):
        optimizer.step(closure)


def never_set_to_train():
    train(6, network().eval())


def in_a_box():
    """A module that only holds another one, as a LightningModule does, and is never called."""
    box = nn.Module()
    box.model = network()
    optimizer = torch.optim.SGD(box.parameters(), lr=0.1)
    for _ in range(6):
        box.model(torch.randn(4, 8)).sum().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    ("loop", "stages", "forwards"),
    [
        (two_optimizers, ["fbo"] * 4, 8),
        (steps_in_backward, ["fb"] * 4, 4),
        (zero, ["dfbo"] * 4, 4),
        (skipped_by_a_scaler, ["fbo"] * 4, 4),
        (calls_the_model_itself, ["fbo"] * 4, 12),
        (never_set_to_train, ["dfbo"] * 4, 4),
        (in_a_box, ["bo", "fbo", "fbo", "fbo"], 3),
    ],
)
def test_each_round_of_any_loop_is_one_step_with_its_stages(put_in, rings, group, loop, stages, forwards):
    seams = put_in()
    loop()
    records = recorded(rings)
    assert [record.step for record in records] == [2, 3, 4, 5]
    assert [
        "".join(n[0] for n, ns in zip(STAGES[:4], record.durations_ns, strict=False) if ns) for record in records
    ] == stages
    assert {record.kind for record in records} == {""}
    assert seams.steps.entered["forward"] == forwards


class OwnError(Exception):
    pass


@pytest.mark.parametrize("where", ["data", "forward", "backward", "optimizer"])
def test_an_exception_passes_unchanged_and_shows_no_frame_of_ours(put_in, rings, where):
    # GIVEN a loop that is recorded, and a part of a step that raises now and then
    raising = []

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 400

        def __getitem__(self, index):
            if "data" in raising:
                raise OwnError
            return torch.randn(8)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, value):
            if "forward" in raising:
                raise OwnError
            return self.inner(value)

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            if "optimizer" in raising:
                raise OwnError
            return super().step(closure)

    def hook(grad):
        if "backward" in raising:
            raise OwnError

    model, batches = Model(), iter(DataLoader(Data(), batch_size=2))
    model.inner[0].weight.register_hook(hook)
    optimizer = Optimizer(model.parameters(), lr=0.1)

    def step():
        model(next(batches)).sum().backward()
        optimizer.step()

    put_in()
    for _ in range(4):
        step()
    raising.append(where)
    with pytest.raises(OwnError) as raised:
        step()
    raising.clear()
    # THEN (torch itself calls hooks: these frames are torch's)
    files = [Path(frame.filename) for frame in traceback.extract_tb(raised.tb)]
    assert not [file for file in files if file.is_relative_to(SEAMS)]
    # AND what comes then is recorded as ever
    if where == "data":
        batches = iter(DataLoader(Data(), batch_size=2))
    for _ in range(3):
        step()
    records = recorded(rings)
    assert [record.step for record in records] == [2, 3, 4, 5, 6]
    assert all(all(record.durations_ns[:4]) and record.complete for record in records)


@pytest.mark.parametrize("stage", STAGES[:4])
@pytest.mark.parametrize("how_often", [1, 12])
def test_a_seam_that_raises_is_switched_off_with_one_warning(put_in, rings, caplog, monkeypatch, stage, how_often):
    # GIVEN something that is wrong in a stage, soon or after a while
    class Broken:
        left = how_often

        def __enter__(self):
            self.left -= 1
            if self.left <= 0:
                raise RuntimeError("broken")

        def __exit__(self, *_):
            pass

    real = AutomaticMonitor.stage
    monkeypatch.setattr(AutomaticMonitor, "stage", lambda self, name: Broken() if name == stage else real(self, name))
    put_in()
    with caplog.at_level(logging.WARNING, "sftriage"):
        losses = train(20)
    # THEN one line says so, nothing is raised, and the other stages are recorded as ever
    assert [record.getMessage() for record in caplog.records] == [
        f"sftriage: switched off the seam {stage} in this process: RuntimeError('broken')"
    ]
    assert len(losses) == 20
    others = [STAGES.index(other) for other in STAGES[:4] if other != stage]
    records = recorded(rings)
    assert stage == "optimizer" or len(records) == 18
    assert all(record.durations_ns[at] for record in records for at in others)


@pytest.mark.parametrize("off", NAMES)
def test_each_seam_can_be_switched_off_by_name(put_in, rings, off, tmp_path):
    model = network()

    def after(step):
        with torch.no_grad():
            model(torch.randn(4, 8))
        torch.save(model.state_dict(), tmp_path / "checkpoint.pt")

    put_in(*switched_off(f"-{off}"))
    train(5, model, after=after)
    if off == "optimizer":
        assert not list(rings.glob("*.ring"))
        return
    records = recorded(rings)
    for name in STAGES[:4]:
        assert all(bool(record.durations_ns[STAGES.index(name)]) == (name != off) for record in records)
    seen = {"evaluation": "checkpoint", "checkpoint": "evaluation", "forward": "checkpoint"}
    assert {record.kind for record in records} == {seen.get(off, "eval+checkpoint")}


def test_an_unknown_name_is_logged_and_ignored(caplog):
    assert switched_off("-data, -gpu,forward") == {"data"}
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.endswith("ignored: -gpu, forward")
    assert switched_off("") == frozenset()


@pytest.mark.parametrize("made", [0, 1, 5])
def test_a_monitor_in_the_script_wins_whenever_it_is_made(put_in, rings, made):
    # GIVEN a script that makes one before it trains, after its first step, or when it is recorded already
    mine, originals = [], (torch.autograd.backward, torch.save)

    def after(step):
        if step == made:
            mine.append(Monitor(("work",), ()))
            assert (torch.autograd.backward, torch.save) == originals
        if mine:
            with mine[0].step(), mine[0].stage("work"):
                pass

    put_in()
    model = network()
    train(10, model, after=after)
    mine[0].close()
    # THEN from there on only that one records, and no hook is left
    attempt = 1 if made else 0
    if attempt:
        assert [record.step for record in recorded(rings)] == list(range(2, made + 1))
    with Ring(rings / f"rank-0.{attempt}.ring") as ring:
        assert ring.info.schema.stages == ("work", "other")
        assert len(ring.read().steps) == 10 - made
    assert len(list(rings.glob("*.ring"))) == attempt + 1
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


@pytest.mark.parametrize("why", ["a Monitor was created before torch was imported", "torch is too old"])
def test_seams_that_cannot_record_are_not_installed(put_in, rings, monkeypatch, caplog, why):
    if why == "torch is too old":
        monkeypatch.setattr(torch, "__version__", "2.3.1+cpu")
    else:
        Monitor(("work",), ()).close()
    original = torch.autograd.backward
    seams = put_in()
    train(4)
    assert torch.autograd.backward is original
    assert len(list(rings.glob("*.ring"))) == (why != "torch is too old")
    # AND a script of either kind sees no warning: `sftriage run` reports why, if nothing was recorded
    assert caplog.records == []
    assert seams.failed == ({"optimizer": "it needs torch 2.4 or later"} if why == "torch is too old" else {})


def test_seams_remove_themselves_if_nothing_can_be_recorded(put_in, rings, monkeypatch, caplog):
    monkeypatch.setenv(RINGS_ENV, str(rings / "missing"))
    seams = put_in()
    model = network()
    train(5, model)
    assert not seams.on
    assert not model._forward_hooks
    assert len(caplog.records) == 1


def test_removed_seams_leave_torch_as_it_was(put_in):
    places = (
        *((torch.autograd, "backward"), (torch, "save"), (torch.amp.GradScaler, "step"), (torch.jit, "script")),
        *((torch.nn.utils, "clip_grad_norm_"), (torch.nn.utils.clip_grad, "clip_grad_norm_")),
        *((DataLoader, "__iter__"), (torch.utils.data.dataloader._BaseDataLoaderIter, "__next__")),
    )
    before = [vars(owner).get(name) for owner, name in places]
    seams = put_in()
    model = network()
    train(4, model)
    assert all(vars(owner).get(name) is not old for (owner, name), old in zip(places, before, strict=True))
    seams.stop()
    assert all(vars(owner).get(name) is old for (owner, name), old in zip(places, before, strict=True))
    optimizer = sys.modules["torch.optim.optimizer"]
    assert not optimizer._global_optimizer_pre_hooks
    assert not optimizer._global_optimizer_post_hooks


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("steps", "hook"), [(5, hooks._Hook), pytest.param(12, FORM.seam, marks=c_form)], ids=["at first", "in its stride"]
)
def test_a_hooked_model_can_be_copied_saved_and_compiled(put_in, rings, steps, hook):
    put_in()
    model = network()
    train(steps, model)
    assert [type(installed) for installed in model._forward_hooks.values()] == [hook]
    # WHEN it is copied THEN the copies answer as it does, and say nothing: nobody counts what they are asked
    value = torch.randn(4, 8)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
        torch.jit.script(model),
        torch.jit.trace(model, value),
        torch.fx.symbolic_trace(model),
        torch.export.export(model, (value,)).module(),
        torch.compile(model, backend="eager", fullgraph=True),
    ):
        assert torch.equal(other(value), model(value))
    assert b"sftriage" not in pickle.dumps(model)
    # AND so are functions that are stages
    backward = torch.autograd.backward
    assert pickle.loads(pickle.dumps(backward)) is copy.deepcopy(backward) is backward
    # AND it is still recorded
    before = len(recorded(rings))
    train(5, model)
    assert len(recorded(rings)) > before


@c_form
def test_a_steady_model_is_recorded_as_before(put_in, rings, group, monkeypatch):
    # GIVEN a model under DDP, whose hooks are no longer Python's
    seams = put_in()
    inner = network()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(*calls):
        for call in calls:
            call(torch.randn(4, 8))
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return seams.steps.entered["forward"]

    for _ in range(7):
        entered = step()
    assert {type(hook) for made in (model, inner) for hook in made._forward_hooks.values()} == {FORM.seam}

    def raises(value):
        with pytest.raises(RuntimeError):
            model(value.T)

    def leaves(value):
        handle = inner.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()), prepend=True)
        with pytest.raises(KeyboardInterrupt):
            model(value)
        handle.remove()

    def looks(value):
        with torch.no_grad():
            model(value)

    def evaluates(value):
        model.eval()(value)
        model.train()

    def beside(value):
        in_a_thread(model, value)

    # AND in an ordinary step nothing of ours in Python is called for either of them
    with monkeypatch.context() as patched:
        patched.setattr(hooks._Hook, "__call__", lambda *_: pytest.fail("a hook in Python"))
        assert step() == entered + 1
    entered += 1
    # WHEN it is called in other ways beside a step's own call THEN each is a forward, but in another thread
    expected = {(): 1, (raises,): 2, (looks,): 2, (evaluates,): 2, (evaluates, looks): 3, (inner,): 2, (beside,): 1}
    for calls, more in expected.items():
        entered, before = step(*calls), entered
        assert (calls, entered - before) == (calls, more)
        assert step() == entered + 1
        entered += 1
        assert seams.steps.opened == []
    # AND an interrupt leaves the stage open until the next one begins, and no longer than the step
    step(leaves)
    entered = step()
    assert step() == entered + 1
    # AND steps that evaluate are of that kind
    kinds = [record.kind for record in recorded(rings)]
    assert kinds[8 - 2 :: 2][:7] == ["", "", "evaluation", "evaluation", "evaluation", "", ""]
    assert not any(kinds[8 - 1 :: 2])
    assert not seams.failed


@c_form
@pytest.mark.parametrize("model_of", [network, lambda: Twice()], ids=["a model", "one that calls itself"])
def test_a_function_that_calls_a_steady_model_is_compiled_whole(put_in, rings, model_of):
    seams = put_in()
    model = model_of()
    train(10, model)
    assert seams.steps.entered["forward"] == 8
    assert {type(hook) for hook in model._forward_pre_hooks.values()} == {FORM.seam}
    torch._dynamo.reset()
    compiled = torch.compile(lambda value: model(value) * 2, backend="eager", fullgraph=True)
    # THEN the compiler reads the model through its hooks, and it goes on to be seen
    value = torch.randn(4, 8)
    assert torch.equal(compiled(value), model(value) * 2)
    before = seams.steps.entered["forward"]
    train(4, model)
    assert seams.steps.entered["forward"] == before + 4


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = network()

    def forward(self, value, depth=1):
        return self(value, depth - 1) if depth else self.part(value)


def compiled(how, model):
    """A model, compiled in one of several ways: what is called."""
    if how == "in place":
        model.compile(backend="eager")
    if how == "as a function":
        return torch.compile(lambda value: model(value).square().mean(), backend="eager")
    if how == "under DDP":
        called = DistributedDataParallel(torch.compile(model, backend="eager"))
    elif how == "with DDP":
        called = torch.compile(DistributedDataParallel(model), backend="eager")
    else:
        called = torch.compile(model, backend="eager") if how == "as a module" else model
    return lambda value: called(value).square().mean()


@pytest.mark.parametrize("how", ["as a module", "in place", "as a function", "under DDP", "with DDP"])
def test_a_model_compiles_as_often_and_breaks_its_graph_as_rarely(put_in, rings, group, how):
    from torch._dynamo.utils import counters

    def compilations():
        torch._dynamo.reset()
        counters.clear()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of = compiled(how, model)
        for _ in range(10):  # (gradients are watched by all parameters for four of these, and then by few)
            loss_of(torch.randn(4, 8)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return {name: dict(counters[name]) for name in ("frames", "graph_break", "stats", "recompiles")}

    plain = compilations()
    seams = put_in()
    assert compilations() == plain
    assert seams.sync == (("backward",) if "DDP" in how else ())
    # AND its forward is seen, where it is a module that is called
    assert [bool(record.durations_ns[1]) for record in recorded(rings)] == [how != "as a function"] * 8


def test_steps_that_compile_are_of_that_kind(put_in, rings):
    torch._dynamo.reset()
    called = torch.compile(network(), backend="eager", dynamic=False)
    optimizer = torch.optim.SGD(called.parameters(), lr=0.1)
    put_in()
    for step in range(7):
        called(torch.randn(5 if step == 4 else 4, 8)).sum().backward()
        optimizer.step()
    assert {record.step: record.kind for record in recorded(rings)} == {2: "", 3: "", 4: "compilation", 5: "", 6: ""}


def test_an_undetected_stage_can_be_named_by_hand(put_in, rings):
    # GIVEN a script that names one stage, with seams and without
    def train():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            with sftriage.stage("data"):
                batch = torch.randn(4, 8)
            with sftriage.stage("augment"):
                batch = batch + 1
            model(batch).sum().backward()
            optimizer.step()

    train()
    assert not list(rings.glob("*"))
    put_in()
    train()
    # THEN it is recorded beside those that are seen, also one that the seams do not have
    with Ring(rings / "rank-0.0.ring") as ring:
        records = ring.read().steps.records()
        assert ring.info.schema.stages == ("data", "forward", "backward", "optimizer", "augment", "other")
    assert [record.step for record in records] == [2, 3, 4, 5]
    assert all(all(record.durations_ns) for record in records[1:])


WITH_EXCHANGE = ("data", "forward", "backward", "exchange", "optimizer", "other")


@pytest.fixture
def of_two(group, monkeypatch):
    """A process that its launcher calls one of two; the collectives that it waits in are of a group of itself."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")


def reduced(**how):
    return torch.distributed.all_reduce(torch.ones(1), **how)


def functional():
    from torch.distributed import _functional_collectives

    return _functional_collectives.all_reduce(torch.ones(1), "sum", torch.distributed.group.WORLD) + 1


WAITS = {
    "blocking": reduced,
    "a barrier": lambda: torch.distributed.barrier(),
    "of objects": lambda: torch.distributed.all_gather_object([None], 1),
    "of some ranks": lambda: reduced(group=some()),
    "work": lambda: reduced(async_op=True).wait(),
    "a future": lambda: reduced(async_op=True).get_future().wait(),
    "futures": lambda: torch.futures.wait_all([reduced(async_op=True).get_future().then(lambda done: done)]),
    "of a group itself": lambda: torch.distributed.group.WORLD.allreduce([torch.ones(1)]).wait(),
    "of buffers": lambda: torch.distributed._broadcast_coalesced(torch.distributed.group.WORLD, [torch.ones(1)], 99, 0),
    "functional": functional,
}


def exchanging(where, wait, *, steps=8, when=lambda step: True):
    """Train with waits for other ranks somewhere in each step, or now and then; the optimizer's class may have them."""
    now = {"step": 0}

    def act(here):
        if here == where and when(now["step"]):
            wait()

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 4 * steps

        def __getitem__(self, index):
            if index % 4 == 0:
                act("data")
            return torch.ones(8)

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            act("optimizer")
            return super().step(closure)

    model = network()
    model[0].register_forward_pre_hook(lambda *_: act("forward"))
    model[0].weight.register_post_accumulate_grad_hook(lambda _: act("backward"))
    optimizer = Optimizer(model.parameters(), lr=0.1)
    for batch in DataLoader(Data(), batch_size=4):
        loss = model(batch).square().mean()
        loss.backward()
        act("other")
        optimizer.step()
        optimizer.zero_grad()
        now["step"] += 1


@pytest.mark.parametrize("how", WAITS)
@pytest.mark.parametrize("where", ["optimizer", "other"])
def test_every_wait_in_a_collective_is_time_of_the_exchange(put_in, rings, of_two, where, how):
    # GIVEN a loop that neither DDP nor FSDP exchanges anything for WHEN it does so itself
    seams = put_in()
    exchanging(where, WAITS[how])
    # THEN that is its sync stage, in each step
    records = recorded(rings, stages=WITH_EXCHANGE)
    assert seams.sync == ("exchange",)
    assert [record.step for record in records] == list(range(2, 8))
    assert all(all(record.durations_ns[:5]) for record in records)
    assert {stage for _, stage in seams.exchanges.calls} == {where}


@pytest.mark.parametrize("where", ["data", "forward", "backward", "optimizer", "other"])
@pytest.mark.parametrize("begins", [0, 1, 5])
def test_an_exchange_is_recorded_in_any_stage_and_at_any_step(put_in, rings, of_two, where, begins):
    # GIVEN an exchange in every third step from some step on
    seams = put_in()
    exchanging(where, reduced, steps=15, when=lambda step: step >= begins and step % 3 == 0)
    # THEN it is in those steps alone, and the stage around it is there as ever
    records = recorded(rings, stages=WITH_EXCHANGE)
    exchanged = [record.step for record in records if record.durations_ns[3]]
    assert exchanged == [step for step in range(2, 15) if step >= begins and step % 3 == 0]
    assert all(all(record.durations_ns[at] for at in (0, 1, 2, 4)) and record.complete for record in records)
    assert seams.exchanges.calls["all_reduce", where] >= len(exchanged)


def later(value):
    work = torch.distributed.all_reduce(value, async_op=True)
    value = value + 1
    work.wait()
    return value * 2


def at_once(value):
    torch.distributed.all_reduce(value)
    return value * 2


def after_a_barrier(value):
    torch.distributed.barrier()
    return value + 1


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("function", [later, at_once, after_a_barrier])
def test_exchanging_functions_compile_as_often_and_break_as_rarely(put_in, rings, of_two, function):
    # GIVEN what the compiler makes of a function that waits for others
    def counted(step):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        called = torch.compile(function, backend="eager")
        assert all(torch.equal(called(torch.ones(2)), function(torch.ones(2))) for _ in range(2))
        found = torch._dynamo.utils.counters
        return {name: dict(found[name]) for name in ("frames", "stats")} | {
            "breaks": sum(found["graph_break"].values())
        }

    plain = counted(0)
    put_in()
    # WHEN a step is recorded in which it is called THEN it makes the same of it
    found = []
    train(6, after=lambda step: found.append(counted(step)))
    assert found == [plain] * 6


@pytest.mark.parametrize(
    ("world_size", "off", "later", "stages", "seen"),
    [
        (2, (), True, WITH_EXCHANGE, {("all_reduce (async)", "optimizer"): 8}),
        (1, (), False, STAGES, {("all_reduce", "optimizer"): 8}),
        (2, ("exchange",), False, STAGES, {}),
    ],
    ids=["only begun", "a rank alone", "switched off"],
)
def test_only_a_wait_for_other_ranks_is_an_exchange(
    put_in, rings, of_two, monkeypatch, world_size, off, later, stages, seen
):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    waits = [(torch.distributed, "all_reduce"), (torch.distributed.Work, "wait"), (torch._C.Future, "wait")]
    before = [getattr(*wait) for wait in waits]
    seams, works = put_in(*off), []
    assert ([getattr(*wait) for wait in waits] == before) == bool(off)
    exchanging("optimizer", lambda: works.append(reduced(async_op=later)))
    assert not any(record.durations_ns[3] for record in recorded(rings, stages=stages) if "exchange" in stages)
    assert (seams.exchanges.calls, seams.sync) == (seen, ("exchange",) if "exchange" in stages else ())
    for work in works if later else ():
        work.wait()
    # AND collectives are as they were once the seams are taken out
    seams.stop()
    assert [getattr(*wait) for wait in waits] == before


def some():
    """A group of ranks that is not all of them, though here it has as many."""
    return torch.distributed.new_group([0])


def test_an_evaluation_by_parts_of_a_model_is_detected_at_the_next_batch(put_in, rings):
    # GIVEN a model whose parts are called to evaluate it, as by Lightning
    seams, model = put_in(), network()

    def evaluate(step):
        if step == 3:
            model.eval()
            for (batch,) in loader(2):
                with torch.no_grad():
                    model[0](batch)
            model.train()

    train(7, model, after=evaluate)
    assert {record.step: record.kind for record in recorded(rings) if record.kind} == {4: "evaluation"}
    assert seams.fired["evaluation"]


@pytest.mark.parametrize(
    ("workers", "noted"),
    [
        ({"num_workers": 1}, {3: "loader start", 6: "evaluation", 9: "loader start"}),
        ({"num_workers": 1, "persistent_workers": True}, {6: "evaluation"}),
        ({}, {6: "evaluation"}),
    ],
)
def test_a_step_in_which_the_loader_starts_its_workers_anew_is_noted_unless_it_evaluates(put_in, rings, workers, noted):
    put_in()
    model, torch_data = network(), TensorDataset(torch.randn(12, 8))
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch_data, batch_size=4, **workers)
    for epoch in range(4):
        if epoch == 2:
            model.eval()(torch_data[:2][0])
            model.train()
        for (batch,) in batches:
            model(batch).square().mean().backward()
            optimizer.step()
    assert {record.step: record.kind for record in recorded(rings) if record.kind} == noted
    # AND what the loader runs with is known, though the loop may hold no reference to it
    del batches
    assert facts.answer()["num_workers"] == workers.get("num_workers", 0)


def test_a_framework_marks_the_ends_and_numbers_of_steps(rings, monkeypatch):
    # GIVEN seams that are in already, and a framework that takes the lead
    monkeypatch.setattr(patches, "installed", None)
    patches.imported("torch")
    seams = patches.lead()
    assert seams is patches.installed
    seams.steps.led = True
    # WHEN it trains, its optimizer stepping twice in what it counts as a step
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (batch,) in enumerate(loader(6), start=100):
        for _ in range(2):
            model(batch).square().mean().backward()
            optimizer.step()
        seams.steps.ended(number + 1)
    seams.stop()
    assert [record.step for record in recorded(rings)] == [102, 103, 104, 105]
    # AND what is trained next has seams of its own
    assert patches.lead() is not seams
    patches.installed.stop()


@pytest.mark.parametrize(("name", "value"), [(RINGS_ENV, ""), (SEAMS_ENV, "off")])
def test_a_framework_gets_no_seams_if_nothing_is_recorded(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert patches.lead() is None


def test_a_framework_that_copies_batches_to_a_device_has_a_stage_for_it(put_in, rings, monkeypatch):
    # GIVEN a model that is on a device, and a loop that gets its batches there as Accelerate does
    framework = ModuleType("accelerate.data_loader")
    framework.send_to_device = lambda batch, device: batch.to(device)
    monkeypatch.setitem(sys.modules, framework.__name__, framework)
    put_in()
    model = network().to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in loader(5):
        model(framework.send_to_device(batch, "meta")).square().mean().backward()
        optimizer.step()
    records = recorded(rings, stages=("data", "h2d", *STAGES[1:]))
    assert [all(record.durations_ns) for record in records] == [True] * 3
