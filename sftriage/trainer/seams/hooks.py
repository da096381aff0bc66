"""Wrapped functions of torch, and hooks of models and optimizers, which the seams install and remove.

A wrapper passes arguments, results and exceptions on unchanged. A model that is copied, pickled or compiled carries no
hooks of ours.

The seam `exchange`: in a blocking collective of torch.distributed, and in the wait for one with ``async_op=True``, a
rank waits for others. That time is the stage ``exchange``, which may lie inside any other stage; that stage's own time
does not include it.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any

from sftriage.errors import without_our_frames
from sftriage.trainer.seams import models
from sftriage.trainer.seams.models import C10D
from sftriage.trainer.seams.steps import EXCHANGE

if TYPE_CHECKING:
    from sftriage.trainer.seams.patches import Seams

AROUND, BEFORE, AFTER, MODEL_BEFORE, MODEL_AFTER = range(5)
"""What the form in C makes: a wrapper around a function, a hook of an optimizer's step, or a hook of a model."""
_NOTHING = (getattr, (contextlib.nullcontext(), "__exit__"))
"""What replaces a hook in copies and pickles: it takes any arguments, does nothing, and exists in every Python."""

_COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single", "_all_gather_base"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("broadcast", "_broadcast_coalesced", "gather", "recv", "reduce", "scatter", "send"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base"),
)
"""Functions of torch.distributed, as far as this torch has them. Collectives of objects call these; all call Work.wait.
(On a device, a blocking call may have done its work before that.)"""

REMAPS = "torch.distributed._functional_collectives"
"""The module in which the compiler looks up, by the called function, what to compile a collective to."""


def _nothing(*_: object) -> None:
    pass


class Replaced:
    """Functions of torch that are wrapped until `undo`."""

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        # Functions that are stages: owner, name, stage, original, and what replaces it.
        self.stages: list[tuple[Any, str, str, Callable[..., Any], Callable[..., Any]]] = []
        self._undo: list[Callable[[], object]] = []

    def undo(self) -> None:
        undo, self._undo = self._undo, []
        for restore in reversed(undo):
            with contextlib.suppress(Exception):
                restore()

    def stage(self, owner: Any, name: str, stage: str, inspect: Callable[..., None] = _nothing) -> None:
        """Make a function of torch a stage. ``inspect`` gets its results until the form in C takes over."""
        original, steps = getattr(owner, name), self._seams.steps

        def begins(*_: object, **__: object) -> bool:
            return steps.enter(stage)

        def ended(answer: object, *_: object) -> None:
            inspect(answer)
            steps.leave(stage)

        staged = self.around(original, stage, begins, ended)
        self.put(owner, name, staged)
        self.stages.append((owner, name, stage, original, staged))

    def wrap(
        self, owner: Any, name: str, seam: str, begins: Callable[..., bool], ended: Callable[..., None] = _nothing
    ) -> None:
        """Wrap the function in ``begins`` and ``ended`` until `undo`; see `around`."""
        self.put(owner, name, self.around(getattr(owner, name), seam, begins, ended))

    def put(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        """Replace the function; `undo` restores it, unless someone else has replaced it meanwhile."""
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

    def around(
        self, original: Callable[..., Any], name: str, begins: Callable[..., bool], ended: Callable[..., None]
    ) -> Callable[..., Any]:
        """A wrapper: ``begins``, the original, and ``ended`` with its result if ``begins`` returned true."""
        seams = self._seams
        on, fail, tracing = seams.on, seams.fail, seams.tracing
        uncompiled(begins, ended, seams.steps.enter, seams.steps.leave)

        @wraps(original)
        def around(*args: Any, **kwargs: Any) -> Any:
            if tracing() or name not in on:
                return original(*args, **kwargs)
            begun, answer = False, None
            try:
                try:
                    begun = begins(*args, **kwargs)
                except Exception as error:
                    fail(name, error)
                try:
                    answer = original(*args, **kwargs)
                    return answer
                finally:
                    if begun:
                        try:
                            ended(answer, *args)
                        except Exception as error:
                            fail(name, error)
            except BaseException as error:
                # A traceback shows only the script and torch, even if a signal handler raised in our code.
                error.__traceback__ = without_our_frames(error.__traceback__)
                raise

        uncompiled(around)
        return around


def uncompiled(*functions: Any) -> None:
    """Keep the compiler from compiling these functions where a compiled function's graph breaks."""
    compiler: Any = getattr(getattr(sys.modules["torch"]._C, "_dynamo", None), "eval_frame", None)
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
    if hasattr(compiler, "skip_code"):
        for code in codes:
            compiler.skip_code(code)
    elif hasattr(compiler, "set_code_exec_strategy"):
        actions = compiler._FrameAction
        skip = compiler._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
        for code in codes:
            compiler.set_code_exec_strategy(code, skip)


class Exchanges:
    """Times the collectives of this process, and counts their calls."""

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self.calls: dict[tuple[str, str], int] = {}  # by name and open stage
        # Stages that wait for other ranks as a whole: exchanges inside them are not timed.
        self.within: frozenset[str] = frozenset()
        self.in_backward = False  # a thread of autograd called some, where no time can be noted
        self._wrapped: dict[Callable[..., Any], Callable[..., Any]] = {}

    def install(self) -> None:
        distributed = sys.modules["torch.distributed"]
        for name in _COLLECTIVES if distributed.is_available() else ():
            owners = [owner for owner in (sys.modules[C10D], distributed) if hasattr(owner, name)]
            originals = [getattr(owner, name) for owner in owners]
            for owner, original in zip(owners, originals, strict=True):
                if original is originals[0]:
                    if original not in self._wrapped:
                        self._wrapped[original] = self._waiting(original, name)
                    self._seams.replaced.put(owner, name, self._wrapped[original])
        if C10D in sys.modules:
            for owner in (sys.modules[C10D].Work, sys.modules["torch"]._C.Future):
                self._seams.replaced.put(owner, "wait", self._waiting(owner.wait, "wait"))
        if REMAPS in sys.modules:
            self.remaps()

    def remaps(self) -> None:
        """Make the compiler treat wrapped collectives like the originals: the module of its remaps was imported."""
        with self._seams.guarded(EXCHANGE):
            # (one entry for a collective and its wrapper, whichever of the two the table has)
            known = getattr(sys.modules[REMAPS], "traceable_collective_remaps", {})
            for original, wrapper in self._wrapped.items():
                found = known.get(original, known.get(wrapper))
                if found is not None:
                    known[original] = known[wrapper] = found
            waiting = self._waiting(sys.modules[REMAPS].wait_tensor, "wait")
            self._seams.replaced.put(sys.modules[REMAPS], "wait_tensor", waiting)

    def _waiting(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        steps, calls, begun = self._seams.steps, self.calls, f"{name} (async)"
        at = _position(original, "async_op")

        def begins(*args: Any, **kwargs: Any) -> bool:
            stage = steps.opened[-1] if steps.opened else "other"
            if stage == EXCHANGE:
                return False
            later = kwargs.get("async_op") or (len(args) > at and args[at])
            key = begun if later else name, stage
            calls[key] = calls.get(key, 0) + 1
            if later or stage in self.within:
                return False
            entered = steps.enter(EXCHANGE)
            self.in_backward |= stage == "backward" and not entered
            return entered

        return self._seams.replaced.around(original, EXCHANGE, begins, lambda *_: steps.leave(EXCHANGE))


def _position(function: Callable[..., Any], parameter: str) -> int:
    """The position of a function's parameter; past all positions if there is none."""
    try:
        return list(signature(function).parameters).index(parameter)
    except ValueError:  # (also for a built-in function)
        return sys.maxsize


class Models:
    """Hooks on the trained models, which report each call."""

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self._hooked: list[_Model] = []
        self._may_be_compiled = False

    def install(self) -> None:
        """Install the seam; the models are found later."""
        for owner, name in ((sys.modules["torch"], "compile"), (sys.modules.get("torch.export"), "export")):
            if hasattr(owner, name):
                self._seams.replaced.wrap(owner, name, "forward", self._compiles)

    def remove(self) -> None:
        for model in self._hooked:
            model.unhook()
        self._hooked.clear()

    def hook(self, found: list[Any]) -> None:
        seams = self._seams
        if "forward" not in seams.on:
            return
        with seams.guarded("forward"):
            for module in found:
                self._hooked += [_Model(seams, part) for part in (module, models.wrapped(module)) if part is not None]
            jit = sys.modules["torch"].jit
            if hasattr(jit, "script"):
                seams.replaced.wrap(jit, "script", "forward", self._scripts, self._scripted)

    def look_inside(self) -> None:
        """Replace models that are not called, such as containers, by their parts."""
        seams = self._seams
        for model in [model for model in self._hooked if not model.calls and "forward" in seams.on]:
            module = model.module()
            if module is not None and seams.steps.entered["backward"] and not models.wrapped(module):
                model.unhook()
                self._hooked.remove(model)
                for part in models.children(module):
                    if any(parameter.requires_grad for parameter in part.parameters()):
                        self._hooked.append(_Model(seams, part))

    def set_to_evaluate(self) -> bool:
        """Whether a model has been switched to evaluation mode."""
        return any(model.set_to_evaluate() for model in self._hooked)

    def settle(self, made: Callable[..., Any]) -> None:
        """Replace the hooks by hooks that ``made`` makes, unless the compiler may read them."""
        if not self._may_be_compiled:
            for model in self._hooked:
                model.settle(made)

    def _compiles(self, *_: object, **__: object) -> bool:
        """Use hooks in Python: ``torch.compile`` and ``torch.export.export`` read a model with its hooks."""
        if not self._may_be_compiled:
            self._may_be_compiled = True
            for model in self._hooked:
                model.change(*model.own_hooks())
        return False

    def _scripts(self, *_: object, **__: object) -> bool:
        """Remove the hooks while ``torch.jit.script`` works, which would compile them."""
        for model in self._hooked:
            model.unhook()
        return True

    def _scripted(self, *_: object) -> None:
        for model in self._hooked:
            model.hook()


class _Model:
    """The hooks on one model, which they do not keep alive. Copies and pickles of it carry none."""

    def __init__(self, seams: Seams, module: Any) -> None:
        self.module = weakref.ref(module)
        self.calls = self._depth = 0
        self._seams = seams
        self._was_training = False
        self._hooks = self.own_hooks()
        self._handles: list[Callable[[], object]] = []
        self.hook()

    def hook(self) -> None:
        module = self.module()
        if module is None or self._handles:
            return
        if vars(module).get("_compiled_call_impl") is not None:
            # `model.compile()` would compile hooks too. (Its compiled call is not pickled.)
            self._around_compiled(module)
            return
        begins, ended = self._hooks
        self._handles = [
            module.register_forward_pre_hook(begins, prepend=True).remove,
            module.register_forward_hook(ended, always_call=True).remove,
        ]

    def settle(self, made: Callable[..., Any]) -> None:
        begins, ended = self._hooks
        before = made(MODEL_BEFORE, "forward", begins)
        after = made(MODEL_AFTER, "forward", ended, before)
        before.__reduce_ex__ = after.__reduce_ex__ = lambda _: _NOTHING
        self.change(before, after)

    def own_hooks(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return _Hook(self._seams, "forward", self._begins), _Hook(self._seams, "forward", self._ended)

    def change(self, begins: Callable[..., Any], ended: Callable[..., Any]) -> None:
        hooked = bool(self._handles)
        self.unhook()
        self._hooks = begins, ended
        if hooked:
            self.hook()

    def unhook(self) -> None:
        handles, self._handles = self._handles, []
        for remove in handles:
            remove()

    def _begins(self, *_: object) -> None:
        seams = self._seams
        self.calls += 1
        opened = seams.steps.opened
        if "forward" not in opened:
            self._depth = 0
            if "backward" not in opened and (not seams.gradients() or self.set_to_evaluate()):
                seams.evaluates()
        if self._depth or seams.steps.enter("forward"):
            self._depth += 1

    def _ended(self, *_: object) -> None:
        if self._depth:
            self._depth -= 1
            if not self._depth:
                self._seams.steps.leave("forward")

    def set_to_evaluate(self) -> bool:
        if (module := self.module()) is None:
            return False
        self._was_training |= module.training
        return self._was_training and not module.training

    def _around_compiled(self, module: Any) -> None:
        original, reference = module._compiled_call_impl, self.module

        def begins(*_: object, **__: object) -> bool:
            self._begins()
            return True

        compiled = self._seams.replaced.around(original, "forward", begins, self._ended)

        def undo() -> None:
            made = reference()
            if made is not None and made._compiled_call_impl is compiled:
                made._compiled_call_impl = original

        module._compiled_call_impl = compiled
        self._handles = [undo]


class _Hook:
    """A hook of a seam: does nothing once the seam is off. A copy or a pickle of it never does anything."""

    __slots__ = ("_call", "_name", "_seams", "_tracing")

    def __init__(self, seams: Seams, name: str, call: Callable[..., None]) -> None:
        self._seams, self._name, self._call, self._tracing = seams, name, call, seams.tracing

    def __call__(self, *args: object) -> None:
        if self._tracing() or self._name not in self._seams.on:
            return
        try:
            self._call(*args)
        except Exception as error:
            self._seams.fail(self._name, error)

    def __reduce__(self) -> tuple[object, ...]:
        return _NOTHING


class Optimizers:
    """Reports optimizer steps, which end a step: by hooks, ``GradScaler.step``, and clipping by norm."""

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self.stepped: dict[int, weakref.ref[Any]] = {}  # the optimizers of the first round, by id
        self.clip_across_ranks = False  # the script clips gradients that are spread over the ranks
        self._handles: list[Any] = []
        self._begins = _Hook(seams, "optimizer", self._step_begins)
        self._ended = _Hook(seams, "optimizer", self._step_ended)

    def install(self) -> None:
        replaced, torch = self._seams.replaced, sys.modules["torch"]
        self._hook(self._begins, self._ended)
        scaler = sys.modules["torch.amp.grad_scaler"].GradScaler
        replaced.wrap(scaler, "step", "optimizer", self._scaled_step_begins, self._scaled_step_ended)
        clipping = sys.modules["torch.nn.utils.clip_grad"]
        original = clipping.clip_grad_norm_
        replaced.stage(clipping, "clip_grad_norm_", "optimizer", self._clips)
        if torch.nn.utils.clip_grad_norm_ is original:
            replaced.put(torch.nn.utils, "clip_grad_norm_", clipping.clip_grad_norm_)

    def remove(self) -> None:
        for handle in self._handles:
            with contextlib.suppress(Exception):
                handle.remove()

    def settle(self, made: Callable[..., Any], ender: int) -> Any:
        """Replace the hooks by hooks that ``made`` makes; returns the one that counts the steps of the ``ender``."""
        counting = made(AFTER, "optimizer", self._ended, ender)
        self._hook(made(BEFORE, "optimizer", self._begins, ender), counting)
        return counting

    def _hook(self, begins: Callable[..., object], ended: Callable[..., object]) -> None:
        optimizer = sys.modules["torch.optim.optimizer"]
        self.remove()
        self._handles = [
            optimizer.register_optimizer_step_pre_hook(begins),
            optimizer.register_optimizer_step_post_hook(ended),
        ]

    def _step_begins(self, optimizer: Any, *_: object) -> None:
        steps = self._seams.steps
        if steps.monitor is None:
            self.stepped[id(optimizer)] = weakref.ref(optimizer)
        steps.optimizer_begins(id(optimizer))

    def _step_ended(self, optimizer: Any, *_: object) -> None:
        self._seams.steps.optimizer_ended(id(optimizer))

    def _scaled_step_begins(self, _scaler: object, optimizer: Any, *_: object, **__: object) -> bool:
        """``GradScaler.step(optimizer)`` skips the optimizer's own step if gradients are infinite."""
        # (minus: not to be confused with the optimizer's own step inside this one)
        self._seams.steps.optimizer_begins(-id(optimizer))
        return True

    def _scaled_step_ended(self, _answer: object, _scaler: object, optimizer: Any, *_: object) -> None:
        self._seams.steps.optimizer_ended(-id(optimizer))

    def _clips(self, norm: object) -> None:
        """Note whether the norm spans ranks: under FSDP, clipping is an exchange."""
        self.clip_across_ranks |= models.is_sharded(norm)
