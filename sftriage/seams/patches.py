"""The seams: where torch says, in a script that nobody has edited, that a part of a step begins or ends.

===========  =========================================================================================================
data         ``DataLoader.__iter__``, and ``__next__`` of its iterators
forward      a hook on each outermost model that is trained: on itself, not on its parts
backward     ``torch.autograd.backward``, which ``Tensor.backward`` calls
ready        what `Monitor.watch` does, under DDP
h2d          what copies a batch to the device in Accelerate and Lightning, where the model is on one
exchange     blocking collectives of all ranks that the script, or what it uses, calls in each step, but in backward;
             and the waits of a pipeline
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
from threading import get_ident
from typing import TYPE_CHECKING, Any

from sftriage.seams import exchanges, models, parallel
from sftriage.seams.hooks import Model
from sftriage.seams.replaced import Replaced, keeping_hooks
from sftriage.seams.steps import CHECKPOINT, COMPILATION, EVALUATION, EXCHANGE, H2D, STAGES, Steps

if TYPE_CHECKING:
    from sftriage.recorder.monitor import Monitor

RINGS_ENV = "SFTRIAGE_RINGS"
SEAMS_ENV = "SFTRIAGE_SEAMS"
REPORT_ENV = "SFTRIAGE_SEAMS_REPORT"
"""A directory in which each process says what its seams have seen (`sftriage.seams.telling`)."""
NAMES = ("data", H2D, "forward", "backward", "ready", EXCHANGE, "optimizer", EVALUATION, CHECKPOINT, COMPILATION)

COMPILER = "torch._dynamo.eval_frame"
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
        cohort: the ranks that do the same work as this one, once that is known; "" where all do.
        trained: the types of the models that are trained, once they are known.
        failed: why seams were switched off.
    """

    def __init__(self, off: frozenset[str] = frozenset()) -> None:
        self.on = set(NAMES) - off
        self.fired = dict.fromkeys(NAMES, 0)
        self.sync: tuple[str, ...] = ()
        self.cohort = ""
        self.trained: tuple[str, ...] = ()
        self.failed: dict[str, str] = {}
        self.steps = Steps(self._begin, self._step_ends)
        self._torch = torch = sys.modules["torch"]
        # (whether the compiler reads what it is in, rather than that it is run; it takes the answer for a constant)
        # (torch 2.2's compiler knows another one)
        known = hasattr(torch.compiler, "is_dynamo_compiling")
        self.tracing: Callable[[], bool] = torch.compiler.is_dynamo_compiling if known else torch._utils.is_compiling
        self.gradients: Callable[[], bool] = torch.is_grad_enabled
        self._replaced = Replaced(self.steps, self.on, self.fail, self.tracing)
        # What the compiler counts, and what that was at the end of the last step.
        self._counters: dict[str, dict[str, int]] = {}
        self._compiled = 0
        self._optimizers: dict[int, weakref.ref[Any]] = {}
        self._models: list[Model] = []
        self._clips_across_ranks = False
        self._exchanged: bool | None = None
        self._found: list[weakref.ref[Any]] = []
        self._collectives: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._pipelined = False
        self._optimizer_handles: list[Any] = []
        self._told: tuple[Callable[..., object], ...] = ()

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
        self.on.clear()
        for handle in self._optimizer_handles:
            with contextlib.suppress(Exception):
                handle.remove()
        self._replaced.undo()
        for model in self._models:
            model.unhook()
        self._models.clear()
        self.steps.stop()

    def guarded(self, name: str) -> _Guarded:
        """Whatever is raised inside switches the seam off, and goes no further."""
        return _Guarded(self, name)

    def fail(self, name: str, error: Exception) -> None:
        """A seam raised: it is switched off for good; with that of the optimizer all are, for then no step ends."""
        if name in self.on:
            self.on.discard(name)
            self.failed[name] = repr(error)
            warn("the seam %s is switched off here: %r", name, error)
            self.steps.forget(name)
            if name == "optimizer":
                self.stop()

    def pipelines(self) -> None:
        """torch.distributed.pipelining has been imported."""
        if EXCHANGE in self.on:
            with self.guarded(EXCHANGE):
                schedules = sys.modules[parallel.PIPELINING]
                self._replaced.wrap(schedules, parallel.PIPELINE_WAIT, self._waiting)
                self._pipelined = True

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def begins(*_: object, **__: object) -> bool:
            return not self.steps.opened and self.steps.enter(EXCHANGE)

        return self._replaced.around(original, EXCHANGE, begins, self._leaving(EXCHANGE))

    def checkpoints(self) -> None:
        """torch.distributed.checkpoint has been imported."""
        if CHECKPOINT in self.on:
            with self.guarded(CHECKPOINT):
                saver = sys.modules["torch.distributed.checkpoint.state_dict_saver"]
                for name in ("save", "async_save"):
                    if hasattr(saver, name):
                        self._replaced.wrap(saver, name, self._noting(CHECKPOINT))

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
        self._hook_optimizers(*self._optimizer_hooks())
        scaler = sys.modules.get("torch.amp.grad_scaler") or sys.modules["torch.cuda.amp.grad_scaler"]
        self._replaced.wrap(scaler.GradScaler, "step", self._scaling)
        clipping = sys.modules["torch.nn.utils.clip_grad"]
        original = clipping.clip_grad_norm_
        self._replaced.stage(clipping, "clip_grad_norm_", "optimizer", self._clips)
        if self._torch.nn.utils.clip_grad_norm_ is original:
            self._replaced.put(self._torch.nn.utils, "clip_grad_norm_", clipping.clip_grad_norm_)

    def _hook_optimizers(self, begins: Callable[..., object], ended: Callable[..., object]) -> None:
        """Have these called before each optimizer's step, and after it, and no others of ours."""
        optimizer = sys.modules["torch.optim.optimizer"]
        for one in self._optimizer_handles:
            one.remove()
        self._told = begins, ended
        self._optimizer_handles = [
            optimizer.register_optimizer_step_pre_hook(begins),
            optimizer.register_optimizer_step_post_hook(ended),
        ]

    def _optimizer_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Before an optimizer's step, and after it; in the way of most steps neither calls anything of Python's."""
        steps, on, tracing = self.steps, self.on, self.tracing
        opened, stepping, kinds, turns, ready = (
            *(steps.opened, steps.stepping, steps.kinds),
            *(steps.turns, steps.steady["optimizer"]),
        )

        def begins(optimizer: Any, args: object, kwargs: object) -> None:
            if tracing() or "optimizer" not in on:
                return
            try:
                if ready and not opened and not stepping and get_ident() == ready[0]:
                    stepping.append(id(optimizer))
                    opened.append("optimizer")
                    ready[1]()
                    return
                if steps.monitor is None:
                    self._optimizers[id(optimizer)] = weakref.ref(optimizer)
                steps.optimizer_begins(id(optimizer))
            except Exception as error:
                self.fail("optimizer", error)

        def ended(optimizer: Any, args: object, kwargs: object) -> None:
            if tracing() or "optimizer" not in on:
                return
            try:
                one = id(optimizer)
                usual = ready and opened == _OPTIMIZER and stepping == [one] and turns.alone == one and not kinds
                if usual and get_ident() == ready[0] and self._compiled == _frames(self._counters):
                    stepping.clear()
                    opened.clear()
                    steps.rounds += 1
                    ready[2](None, None, None)
                    ready[3](None, None, None)
                    ready[4]()
                else:
                    steps.optimizer_ended(one)
            except Exception as error:
                self.fail("optimizer", error)

        return begins, ended

    def _scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``GradScaler.step(optimizer)``: where gradients are infinite the optimizer's own step is never called."""

        def begins(_scaler: object, optimizer: Any, *_: object, **__: object) -> bool:
            # (apart from the optimizer's own step, which is inside this one)
            self.steps.optimizer_begins(-id(optimizer))
            return True

        def ended(_answer: object, _scaler: object, optimizer: Any, *_: object) -> None:
            self.steps.optimizer_ended(-id(optimizer))

        return self._replaced.around(original, "optimizer", begins, ended)

    def compiles(self) -> None:
        """The compiler has been imported: that of torch 2.2 takes the hooks from every optimizer."""
        patcher = getattr(sys.modules[COMPILER], "TorchPatcher", None)
        if patcher is not None and not hasattr(self._torch.compiler, "is_dynamo_compiling"):
            with self.guarded("optimizer"):
                self._replaced.wrap(patcher, "patch", keeping_hooks)

    def _clips(self, norm: object) -> None:
        """Clipping by norm is the optimizer's business, and under FSDP an exchange between the ranks."""
        self._clips_across_ranks |= models.is_sharded(norm)

    def _backward(self) -> None:
        self._replaced.stage(self._torch.autograd, "backward", "backward")

    def _data(self) -> None:
        loader = sys.modules["torch.utils.data.dataloader"]

        def begins(*_: object, **__: object) -> bool:
            # (what is then called need not be the model itself, but may be parts of it)
            if self.steps.monitor is not None and any(model.set_to_evaluate() for model in self._models):
                self.evaluates()
            return self.steps.enter("data")

        self._replaced.wrap(
            loader.DataLoader, "__iter__", lambda one: self._replaced.around(one, "data", begins, self._leaving("data"))
        )
        self._replaced.stage(loader._BaseDataLoaderIter, "__next__", "data")

    def _exchange(self) -> None:
        def wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
            of_all = exchanges.of_all_ranks(original)

            def begins(*args: Any, **kwargs: Any) -> bool:
                # (those of backward, and of the optimizer, are part of that)
                inside = self.steps.opened[-1:]
                return (
                    inside not in (["backward"], ["optimizer"]) and of_all(args, kwargs) and self.steps.enter(EXCHANGE)
                )

            return self._replaced.around(original, EXCHANGE, begins, self._leaving(EXCHANGE))

        for name, owners in exchanges.collectives():
            original = getattr(owners[0], name)
            self._collectives[original] = wrapping(original)
            for owner in owners:
                self._replaced.put(owner, name, self._collectives[original])
        exchanges.compiled_alike(self._collectives)

    def _checkpoint(self) -> None:
        self._replaced.wrap(self._torch, "save", self._noting(CHECKPOINT))

    def _leaving(self, stage: str) -> Callable[..., None]:
        return lambda *_: self.steps.leave(stage)

    def _noting(self, kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def begins(*_: object, **__: object) -> bool:
            self.fired[kind] += 1
            self.steps.note(kind)
            return False

        return lambda original: self._replaced.around(original, kind, begins, _nothing)

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
            exchanged = EXCHANGE in self.steps.order and (self._pipelined or "forward" not in self.sync)
            if exchanged and not looked:
                self._exchanged = True
                return None
            if exchanged:
                # (each rank of a pipeline waits at places of its own: for all of them it is one)
                order = ("backward", EXCHANGE, "optimizer") if self._pipelined else self.steps.order
                self.steps.stages = exchanges.placed(self.steps.stages, order)
                self.sync = (EXCHANGE, *self.sync)
                if self.sync == (EXCHANGE,) and not self._pipelined and parallel.many_ranks():
                    self.cohort = self.cohort or parallel.model_cohort(found)
            else:
                self.on.discard(EXCHANGE)
            self._compiled = self._compilations()
            cohort = None if os.environ.get(recorder.COHORT_ENV) else self.cohort
            monitor = recorder.AutomaticMonitor(self.steps.stages, self.sync, cohort, give_way=self.stop)
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
        """See which models are trained, where their ranks wait for one another, and which ranks do the same work."""
        optimizers = [made for reference in self._optimizers.values() if (made := reference()) is not None]
        self._optimizers.clear()
        trained = {id(one) for made in optimizers for group in made.param_groups for one in group["params"]}
        module, parts = self._torch.nn.Module, parallel.kinds()
        living = models.living((module, *parts))
        found = models.outermost([one for one in living if isinstance(one, module)], trained)
        self._found = [weakref.ref(one) for one in found]
        self.trained = tuple(type(one).__name__ for one in found)
        self._hook(found)
        if H2D in self.on and (copiers := models.copiers()) and models.on_device(found):
            for owner, name in copiers:
                self._replaced.stage(owner, name, H2D)
            self.steps.stages = ("data", H2D, *STAGES[1:])
        self.sync = tuple(
            one for one in models.exchanged_in(found, clipping=self._clips_across_ranks) if one in self.on
        )
        if parallel.many_ranks():
            at = parallel.coordinates_of([one for one in living if isinstance(one, parts)])
            self.cohort = parallel.cohort_of(at, loads=self.steps.entered["data"] > 0)
        return found

    def _hook(self, found: list[Any]) -> None:
        """Have these models say when they are called."""
        if "forward" not in self.on:
            return
        with self.guarded("forward"):
            for module in found:
                self._models += [Model(self, one) for one in (module, models.wrapped(module)) if one is not None]
            if hasattr(self._torch.jit, "script"):
                self._replaced.wrap(self._torch.jit, "script", self._scripting)

    def _scripting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.jit.script`` would compile our hooks: while it works they are not there."""

        def begins(*_: object, **__: object) -> bool:
            for model in self._models:
                model.unhook()
            return True

        def ended(*_: object) -> None:
            for model in self._models:
                model.hook()

        return self._replaced.around(original, "forward", begins, ended)

    def _step_ends(self) -> None:
        compiled = self._compilations()
        if compiled != self._compiled:
            self._compiled = compiled
            if self.steps.counting is not None:
                self.steps.counting.compiled = compiled
            self.fired[COMPILATION] += 1
            self.steps.note(COMPILATION)
        if self.steps.rounds <= LOOK_ROUNDS + 1:
            with self.guarded("forward"):
                self._look_inside()
        elif not self.steps.steady["optimizer"] and self.steps.turns.alone:
            self._settle(self.steps.turns.alone)

    def _settle(self, optimizer: int) -> None:
        """The job is in its stride: what seams do is known, and done with as little as there is."""
        steps = self.steps
        steps.settle(*(stage for stage in steps.stages if stage in self.on))
        form = sys.modules["sftriage.recorder.moments"].FORM
        make, spans = form.seam, [steps.span(stage) for stage in steps.stages]
        if make is None or steps.counting is not None or not all(isinstance(one, form.stage) for one in spans):
            return
        with self.guarded("optimizer"):
            begins, ended = self._told

            def of(role: int, stage: str, slow: object, *more: object) -> Any:
                return make(role, steps.span(stage), steps.opened, steps.steady[stage], stage, slow, *more)

            more = (None, None, steps.stepping, steps.kinds, self._counters, optimizer)
            steps.counting = of(_AFTER, "optimizer", ended, *more)
            self._hook_optimizers(of(_BEFORE, "optimizer", begins, *more), steps.counting)
            for owner, name, stage, original, slow in self._replaced.stages:
                if stage in self.on and getattr(owner, name) is slow:
                    self._replaced.put(owner, name, wraps(original)(of(_AROUND, stage, slow, original, self._leave)))

    def _leave(self, stage: str) -> None:
        with self.guarded(stage):
            self.steps.leave(stage)

    def _look_inside(self) -> None:
        """A model that nobody calls is a box for others: it is they that are called."""
        for model in [model for model in self._models if not model.calls and "forward" in self.on]:
            module = model.module()
            if module is not None and self.steps.entered["backward"] and not models.wrapped(module):
                model.unhook()
                self._models.remove(model)
                parts = models.children(module)
                self._models += [Model(self, part) for part in parts if any(map(_trained, part.parameters()))]

    def _compilations(self) -> int:
        """How many frames the compiler has compiled; 0 where nobody wants to know."""
        if not self._counters and COMPILATION in self.on:
            self._counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", self._counters)
        return _frames(self._counters)


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
        told = {
            COMPILER: _installed.compiles,
            exchanges.REMAPS: _installed.remaps,
            parallel.PIPELINING: _installed.pipelines,
        }
        told.get(name, _installed.checkpoints)()


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


def _frames(counters: dict[str, dict[str, int]]) -> int:
    frames = counters.get("frames")
    return 0 if frames is None else frames.get("total", 0)


_OPTIMIZER = ["optimizer"]
_AROUND, _BEFORE, _AFTER = range(3)
"""What the recorder's form makes: something around a function, or a hook of an optimizer's step."""

_installed: Seams | None = None
