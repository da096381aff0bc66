"""The seams: where torch says, in a script that nobody has edited, that a part of a step begins or ends.

===========  =========================================================================================================
data         ``DataLoader.__iter__``, and ``__next__`` of its iterators
forward      a hook on each outermost model that is trained: on itself, not on its parts
backward     ``torch.autograd.backward``, which ``Tensor.backward`` calls
ready        what `Monitor.watch` does, under DDP
h2d          what copies a batch to the device in Accelerate and Lightning, where the model is on one
exchange     blocking collectives of all ranks that the script, or what it uses, calls in each step, but in backward
optimizer    hooks before and after the step of every optimizer, ``GradScaler.step`` and ``clip_grad_norm_``
evaluation   a model of these is called without gradients, or in its evaluation mode: the kind of that step
checkpoint   ``torch.save``, and ``torch.distributed.checkpoint``: the kind of that step
compilation  ``torch.compile`` was at work: the kind of that step
===========  =========================================================================================================

``SFTRIAGE_SEAMS=-data,-ready`` switches seams off by name, ``off`` all of them. One that raises is switched off, with
one warning; what it wraps goes on as ever. A monitor that the script makes by itself ends it all, whenever it is made.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sftriage.seams import exchanges, models
from sftriage.seams.hooks import Model
from sftriage.seams.steps import CHECKPOINT, COMPILATION, EVALUATION, EXCHANGE, H2D, STAGES, Steps

if TYPE_CHECKING:
    from sftriage.recorder.monitor import Monitor

RINGS_ENV = "SFTRIAGE_RINGS"
SEAMS_ENV = "SFTRIAGE_SEAMS"
REPORT_ENV = "SFTRIAGE_SEAMS_REPORT"
"""A directory in which each process says what its seams have seen (`sftriage.seams.telling`)."""
NAMES = ("data", H2D, "forward", "backward", "ready", EXCHANGE, "optimizer", EVALUATION, CHECKPOINT, COMPILATION)

LOOK_ROUNDS = 4
"""Steps after each of which a model that nobody has called so far is given up for its parts."""


class Seams:
    """All seams of this process.

    Args:
        off: names of those that are switched off.

    Attributes:
        on: names of the others.
        fired: how often each seam that is no stage was seen at work.
        sync: the stages that wait for other ranks, once that is known.
        trained: the types of the models that are trained, once they are known.
        failed: why seams were switched off.
    """

    def __init__(self, off: frozenset[str] = frozenset()) -> None:
        self.on = set(NAMES) - off
        self.fired = dict.fromkeys(NAMES, 0)
        self.sync: tuple[str, ...] = ()
        self.trained: tuple[str, ...] = ()
        self.failed: dict[str, str] = {}
        self.steps = Steps(self._begin, self._step_ends)
        self._torch = torch = sys.modules["torch"]
        # (whether the compiler reads what it is in, rather than that it is run; it takes the answer for a constant)
        self.tracing: Callable[[], bool] = torch.compiler.is_compiling
        self.gradients: Callable[[], bool] = torch.is_grad_enabled
        self._compiled: object = None
        self._optimizers: dict[int, weakref.ref[Any]] = {}
        self._models: list[Model] = []
        self._clips_across_ranks = False
        self._exchanged: bool | None = None
        self._found: list[weakref.ref[Any]] = []
        self._collectives: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._undo: list[Callable[[], object]] = []

    def install(self) -> None:
        """Put them in; what this torch does not have is left out, with a warning."""
        for name, put_in in (
            ("optimizer", self._optimizer),
            ("backward", self._backward),
            ("data", self._data),
            (EXCHANGE, self._exchange),
            (CHECKPOINT, self._checkpoint),
        ):
            if name in self.on:
                with self.guarded(name):
                    put_in()
        os.register_at_fork(after_in_child=self.steps.abandon)

    def stop(self) -> None:
        """Take them out again. What is in nobody's way stays, and does nothing."""
        undo, self._undo = self._undo, []
        self.on.clear()
        for one in reversed(undo):
            with contextlib.suppress(Exception):
                one()
        for model in self._models:
            model.unhook()
        self._models.clear()
        self.steps.stop()

    def guarded(self, name: str) -> _Guarded:
        """Whatever is raised inside switches the seam off, and goes no further."""
        return _Guarded(self, name)

    def fail(self, name: str, error: Exception) -> None:
        """A seam raised: it is switched off for good."""
        if name in self.on:
            self.on.discard(name)
            self.failed[name] = repr(error)
            warn("the seam %s is switched off here: %r", name, error)

    def checkpoints(self) -> None:
        """torch.distributed.checkpoint has been imported."""
        if CHECKPOINT in self.on:
            with self.guarded(CHECKPOINT):
                saver = sys.modules["torch.distributed.checkpoint.state_dict_saver"]
                for name in ("save", "async_save"):
                    if hasattr(saver, name):
                        self._wrap(saver, name, self._noting(CHECKPOINT))

    def remaps(self) -> None:
        """What the compiler makes of collectives has been imported."""
        with self.guarded(EXCHANGE):
            exchanges.compiled_alike(self._collectives)

    def evaluates(self) -> None:
        """A model is called to look at what it answers, and not to train it."""
        if EVALUATION in self.on:
            self.fired[EVALUATION] += 1
            self.steps.note(EVALUATION)

    def _optimizer(self) -> None:
        optimizer = sys.modules["torch.optim.optimizer"]
        for register, told in (
            (optimizer.register_optimizer_step_pre_hook, self._optimizer_begins),
            (optimizer.register_optimizer_step_post_hook, self._optimizer_ended),
        ):
            self._undo.append(register(told).remove)
        scaler = sys.modules.get("torch.amp.grad_scaler") or sys.modules["torch.cuda.amp.grad_scaler"]
        self._wrap(scaler.GradScaler, "step", self._scaling)
        clipping = sys.modules["torch.nn.utils.clip_grad"]
        original = clipping.clip_grad_norm_
        self._wrap(clipping, "clip_grad_norm_", self._clipping)
        if self._torch.nn.utils.clip_grad_norm_ is original:
            self._set(self._torch.nn.utils, "clip_grad_norm_", clipping.clip_grad_norm_)

    def _optimizer_begins(self, optimizer: Any, args: object, kwargs: object) -> None:
        if self.tracing() or "optimizer" not in self.on:
            return
        try:
            if self.steps.monitor is None:
                self._optimizers[id(optimizer)] = weakref.ref(optimizer)
            self.steps.optimizer_begins(id(optimizer))
        except Exception as error:
            self.fail("optimizer", error)

    def _optimizer_ended(self, optimizer: Any, args: object, kwargs: object) -> None:
        if self.tracing() or "optimizer" not in self.on:
            return
        try:
            self.steps.optimizer_ended(id(optimizer))
        except Exception as error:
            self.fail("optimizer", error)

    def _scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``GradScaler.step(optimizer)``: where gradients are infinite the optimizer's own step is never called."""

        def begins(_scaler: object, optimizer: Any, *_: object, **__: object) -> bool:
            # (apart from the optimizer's own step, which is inside this one)
            self.steps.optimizer_begins(-id(optimizer))
            return True

        def ended(_answer: object, _scaler: object, optimizer: Any, *_: object) -> None:
            self.steps.optimizer_ended(-id(optimizer))

        return self._around(original, "optimizer", begins, ended)

    def _clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Clipping by norm is the optimizer's business, and under FSDP an exchange between the ranks."""

        def begins(*_: object, **__: object) -> bool:
            return self.steps.enter("optimizer")

        def ended(norm: object, *_: object) -> None:
            self._clips_across_ranks |= models.is_sharded(norm)
            self.steps.leave("optimizer")

        return self._around(original, "optimizer", begins, ended)

    def _backward(self) -> None:
        self._wrap(self._torch.autograd, "backward", self._staging("backward"))

    def _data(self) -> None:
        loader = sys.modules["torch.utils.data.dataloader"]

        def begins(*_: object, **__: object) -> bool:
            # (what is then called need not be the model itself, but may be parts of it)
            if self.steps.monitor is not None and any(model.set_to_evaluate() for model in self._models):
                self.evaluates()
            return self.steps.enter("data")

        for owner, name in ((loader.DataLoader, "__iter__"), (loader._BaseDataLoaderIter, "__next__")):
            self._wrap(owner, name, lambda original: self._around(original, "data", begins, self._leaving("data")))

    def _exchange(self) -> None:
        def wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
            of_all = exchanges.of_all_ranks(original)

            def begins(*args: Any, **kwargs: Any) -> bool:
                # (those of backward, and of the optimizer, are part of that)
                inside = self.steps.opened[-1:]
                return (
                    inside not in (["backward"], ["optimizer"]) and of_all(args, kwargs) and self.steps.enter(EXCHANGE)
                )

            return self._around(original, EXCHANGE, begins, self._leaving(EXCHANGE))

        for name, owners in exchanges.collectives():
            original = getattr(owners[0], name)
            self._collectives[original] = wrapping(original)
            for owner in owners:
                self._set(owner, name, self._collectives[original])
        exchanges.compiled_alike(self._collectives)

    def _checkpoint(self) -> None:
        self._wrap(self._torch, "save", self._noting(CHECKPOINT))

    def _staging(self, stage: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def begins(*_: object, **__: object) -> bool:
            return self.steps.enter(stage)

        return lambda original: self._around(original, stage, begins, self._leaving(stage))

    def _leaving(self, stage: str) -> Callable[..., None]:
        return lambda *_: self.steps.leave(stage)

    def _noting(self, kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def begins(*_: object, **__: object) -> bool:
            self.fired[kind] += 1
            self.steps.note(kind)
            return False

        return lambda original: self._around(original, kind, begins, _nothing)

    def _wrap(self, owner: Any, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._set(owner, name, made(getattr(owner, name)))

    def _set(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        """Put something in the place of what is there; to be undone unless somebody else has come after us."""
        old = getattr(owner, name)
        own = name in vars(owner)

        def undo() -> None:
            if vars(owner).get(name) is new:
                if own:
                    setattr(owner, name, old)
                else:
                    delattr(owner, name)

        setattr(owner, name, new)
        self._undo.append(undo)

    def _around(
        self, original: Callable[..., Any], name: str, begins: Callable[..., bool], ended: Callable[..., None]
    ) -> Callable[..., Any]:
        """The original, with what is to be done before it, and after it, with its answer, if the former says so."""
        on, fail, tracing = self.on, self.fail, self.tracing

        @wraps(original)
        def around(*args: Any, **kwargs: Any) -> Any:
            if tracing() or name not in on:
                return original(*args, **kwargs)
            begun, answer = False, None
            try:
                begun = begins(*args, **kwargs)
            except Exception as error:
                fail(name, error)
            try:
                answer = original(*args, **kwargs)
                return answer
            except BaseException as error:
                # What a traceback shows is the script and torch; without this line, as by Python 3.10, this frame too.
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
                raise
            finally:
                if begun:
                    try:
                        ended(answer, *args)
                    except Exception as error:
                        fail(name, error)

        return around

    def _begin(self) -> Monitor | None:
        """The first round has ended: it is known what is trained, so that a monitor can be made for it.

        Where ranks exchange something between the stages, the round after it shows whether they do so in every step,
        and where in it.
        """
        from sftriage.recorder import monitor as recorder

        monitor = None
        try:
            if recorder.made_by_hand():
                self.stop()
                return None
            looked = self._exchanged is not None
            found = [made for model in self._found if (made := model()) is not None] if looked else self._look()
            exchanged = EXCHANGE in self.steps.order and "forward" not in self.sync
            if exchanged and not looked:
                self._exchanged = True
                return None
            if exchanged:
                self.steps.stages = exchanges.placed(self.steps.stages, self.steps.order)
                self.sync = (EXCHANGE, *self.sync)
            else:
                self.on.discard(EXCHANGE)
            self._compiled = self._compilations()
            monitor = recorder.AutomaticMonitor(self.steps.stages, self.sync, give_way=self.stop)
            if not monitor.active:
                self.stop()
                return None
            watched = models.largest_ddp(found) if "ready" in self.on else None
            if "backward" in self.sync and "forward" not in self.sync and watched is not None:
                monitor.watch(watched)
                self.fired["ready"] += 1
            return monitor
        except Exception as error:
            self.fail("optimizer", error)
            self.stop()
            if monitor is not None:
                monitor.close()
            return None

    def _look(self) -> list[Any]:
        """See which models are trained, and where their ranks wait for one another."""
        found = self._outermost()
        self._found = [weakref.ref(one) for one in found]
        self.trained = tuple(type(one).__name__ for one in found)
        self._hook(found)
        if H2D in self.on and (copiers := models.copiers()) and models.on_device(found):
            for owner, name in copiers:
                self._wrap(owner, name, self._staging(H2D))
            self.steps.stages = ("data", H2D, *STAGES[1:])
        self.sync = tuple(
            one for one in models.exchanged_in(found, clipping=self._clips_across_ranks) if one in self.on
        )
        return found

    def _outermost(self) -> list[Any]:
        optimizers = [made for reference in self._optimizers.values() if (made := reference()) is not None]
        self._optimizers.clear()
        trained = {id(one) for made in optimizers for group in made.param_groups for one in group["params"]}
        return models.outermost(trained)

    def _hook(self, found: list[Any]) -> None:
        """Have these models say when they are called."""
        if "forward" not in self.on:
            return
        with self.guarded("forward"):
            for module in found:
                self._models += [Model(self, one) for one in (module, models.wrapped(module)) if one is not None]
            if hasattr(self._torch.jit, "script"):
                self._wrap(self._torch.jit, "script", self._scripting)

    def _scripting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.jit.script`` would compile our hooks: while it works they are not there."""

        def begins(*_: object, **__: object) -> bool:
            for model in self._models:
                model.unhook()
            return True

        def ended(*_: object) -> None:
            for model in self._models:
                model.hook()

        return self._around(original, "forward", begins, ended)

    def _step_ends(self) -> None:
        compiled = self._compilations()
        if compiled != self._compiled:
            self._compiled = compiled
            self.fired[COMPILATION] += 1
            self.steps.note(COMPILATION)
        if self.steps.rounds <= LOOK_ROUNDS + 1 and "forward" in self.on:
            with self.guarded("forward"):
                self._look_inside()

    def _look_inside(self) -> None:
        """A model that nobody calls is a box for others: it is they that are called."""
        for model in [model for model in self._models if not model.calls]:
            module = model.module()
            if module is not None and self.steps.entered["backward"] and not models.wrapped(module):
                model.unhook()
                self._models.remove(model)
                parts = models.children(module)
                self._models += [Model(self, part) for part in parts if any(map(_trained, part.parameters()))]

    def _compilations(self) -> object:
        if COMPILATION not in self.on:
            return None
        counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
        return 0 if counters is None else counters.get("frames", {}).get("total", 0)


class _Guarded:
    """Switches a seam off where something is raised inside."""

    __slots__ = ("_name", "_seams")

    def __init__(self, seams: Seams, name: str) -> None:
        self._seams, self._name = seams, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._seams.fail(self._name, error)
        return True


def lead() -> Seams | None:
    """The seams of this process, for a framework that says by itself where steps end; None where nothing is recorded.

    They are put in where ``sftriage run --auto`` has not; then they are the same, so that nothing is counted twice.
    """
    global _installed
    if not os.environ.get(RINGS_ENV) or os.environ.get(SEAMS_ENV) == "off":
        return None
    if _installed is not None and (_installed.steps.rounds or not _installed.on):
        # Something else was trained before.
        _installed.stop()
        _installed = None
    if "torch.distributed" in sys.modules:
        # (before the seams are in, for nobody says when it is imported)
        with contextlib.suppress(ImportError):
            import_module(exchanges.REMAPS)
    imported("torch")
    if _installed is not None and "torch.distributed.checkpoint.state_dict_saver" in sys.modules:
        _installed.checkpoints()
    return _installed


def imported(name: str) -> None:
    """A module of torch has just been imported: what is in it gets its seams."""
    global _installed
    if name == "torch":
        off = switched_off(os.environ.get(SEAMS_ENV, ""))
        if _installed is None:
            _installed = Seams(off)
            _installed.install()
            if directory := os.environ.get(REPORT_ENV):
                from sftriage.seams.telling import tell

                tell(_installed, Path(directory))
    elif _installed is not None:
        (_installed.remaps if name == exchanges.REMAPS else _installed.checkpoints)()


def switched_off(text: str) -> frozenset[str]:
    """The seams that are switched off by `SEAMS_ENV`: ``-data,-ready``."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name[:1] != "-" or name[1:] not in NAMES]
    if wrong:
        warn("%s=%s: a minus and one of %s, with commas; ignored: %s", SEAMS_ENV, text, NAMES, ", ".join(wrong))
    return frozenset(name[1:] for name in names if name not in wrong)


def warn(message: str, *arguments: object) -> None:
    """Log one warning; seldom, so that nothing of the recorder is imported for it before."""
    from sftriage.recorder.log import warn as said

    said(message, *arguments)


def _trained(parameter: Any) -> bool:
    return bool(parameter.requires_grad)


def _nothing(*_: object) -> None:
    """Do nothing afterwards."""


_installed: Seams | None = None
