"""The seams `forward` and `optimizer`: hooks on models, and before and after an optimizer's step.

Those on models leave no trace in what is copied, pickled or compiled of these.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sftriage.trainer.seams import models

if TYPE_CHECKING:
    from sftriage.trainer.seams.patches import Seams

AROUND, BEFORE, AFTER, MODEL_BEFORE, MODEL_AFTER = range(5)
"""What the form in C makes: something around a function, or a hook of an optimizer's step, or of a model."""
_NOTHING = (getattr, (contextlib.nullcontext(), "__exit__"))
"""What replaces a hook in copies and pickles: it takes any arguments, does nothing, and exists in every Python."""


class Models:
    """The trained models, which report when they are called."""

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self._hooked: list[_Model] = []
        self._may_be_compiled = False

    def put_in(self) -> None:
        """Put the seam in; the models are found later."""
        for owner, name in ((sys.modules["torch"], "compile"), (sys.modules.get("torch.export"), "export")):
            if hasattr(owner, name):
                self._seams.replaced.wrap(owner, name, self._compiling)

    def take_out(self) -> None:
        for model in self._hooked:
            model.unhook()
        self._hooked.clear()

    def hook(self, found: list[Any]) -> None:
        seams = self._seams
        if "forward" not in seams.on:
            return
        with seams.guarded("forward"):
            for module in found:
                self._hooked += [_Model(seams, one) for one in (module, models.wrapped(module)) if one is not None]
            jit = sys.modules["torch"].jit
            if hasattr(jit, "script"):
                seams.replaced.wrap(jit, "script", self._scripting)

    def look_inside(self) -> None:
        """Replace models that are not called, such as containers, by their parts."""
        seams = self._seams
        for model in [model for model in self._hooked if not model.calls and "forward" in seams.on]:
            module = model.module()
            if module is not None and seams.steps.entered["backward"] and not models.wrapped(module):
                model.unhook()
                self._hooked.remove(model)
                for part in models.children(module):
                    if any(one.requires_grad for one in part.parameters()):
                        self._hooked.append(_Model(seams, part))

    def set_to_evaluate(self) -> bool:
        """Whether one of them is in evaluation mode and was not always."""
        return any(model.set_to_evaluate() for model in self._hooked)

    def settle(self, made: Callable[..., Any]) -> None:
        """Replace their hooks by what ``made`` makes of them, unless the compiler may read them."""
        if not self._may_be_compiled:
            for model in self._hooked:
                model.settle(made)

    def _compiling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.compile`` and ``torch.export.export`` read a model with its hooks, which must be Python's."""

        def begins(*_: object, **__: object) -> bool:
            if not self._may_be_compiled:
                self._may_be_compiled = True
                for model in self._hooked:
                    model.change(*model.own_hooks())
            return False

        return self._seams.replaced.around(original, "forward", begins)

    def _scripting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.jit.script`` would compile our hooks: they are removed while it works."""

        def begins(*_: object, **__: object) -> bool:
            for model in self._hooked:
                model.unhook()
            return True

        def ended(*_: object) -> None:
            for model in self._hooked:
                model.hook()

        return self._seams.replaced.around(original, "forward", begins, ended)


class _Model:
    """A model that reports when it is called. It is not kept alive, and its copies and pickles report nothing."""

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
            # `model.compile()` would compile hooks too. (What it makes is not pickled.)
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
    """A hook of a seam, while that is on. A copy, or a pickle, of it does nothing."""

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
    """What reports that an optimizer steps, which ends a step: hooks, ``GradScaler.step``, and clipping by norm."""

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self.seen: dict[int, weakref.ref[Any]] = {}  # those that have stepped in the first round, by id
        self.clip_across_ranks = False  # gradients that are spread over the ranks are clipped
        self._handles: list[Any] = []
        self._begins = _Hook(seams, "optimizer", self._step_begins)
        self._ended = _Hook(seams, "optimizer", self._step_ended)

    def put_in(self) -> None:
        replaced, torch = self._seams.replaced, sys.modules["torch"]
        self._hook(self._begins, self._ended)
        replaced.wrap(sys.modules["torch.amp.grad_scaler"].GradScaler, "step", self._scaling)
        clipping = sys.modules["torch.nn.utils.clip_grad"]
        original = clipping.clip_grad_norm_
        replaced.stage(clipping, "clip_grad_norm_", "optimizer", self._clips)
        if torch.nn.utils.clip_grad_norm_ is original:
            replaced.put(torch.nn.utils, "clip_grad_norm_", clipping.clip_grad_norm_)

    def take_out(self) -> None:
        for handle in self._handles:
            with contextlib.suppress(Exception):
                handle.remove()

    def settle(self, made: Callable[..., Any], ender: int) -> Any:
        """Replace these hooks by what ``made`` makes of them; returns what counts the steps of the ``ender``."""
        counting = made(AFTER, "optimizer", self._ended, ender)
        self._hook(made(BEFORE, "optimizer", self._begins, ender), counting)
        return counting

    def _hook(self, begins: Callable[..., object], ended: Callable[..., object]) -> None:
        optimizer = sys.modules["torch.optim.optimizer"]
        self.take_out()
        self._handles = [
            optimizer.register_optimizer_step_pre_hook(begins),
            optimizer.register_optimizer_step_post_hook(ended),
        ]

    def _step_begins(self, optimizer: Any, *_: object) -> None:
        steps = self._seams.steps
        if steps.monitor is None:
            self.seen[id(optimizer)] = weakref.ref(optimizer)
        steps.optimizer_begins(id(optimizer))

    def _step_ended(self, optimizer: Any, *_: object) -> None:
        self._seams.steps.optimizer_ended(id(optimizer))

    def _scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``GradScaler.step(optimizer)`` does not call the optimizer's step if gradients are infinite."""
        steps = self._seams.steps

        def begins(_scaler: object, optimizer: Any, *_: object, **__: object) -> bool:
            # (apart from the optimizer's own step, which is inside this one)
            steps.optimizer_begins(-id(optimizer))
            return True

        def ended(_answer: object, _scaler: object, optimizer: Any, *_: object) -> None:
            steps.optimizer_ended(-id(optimizer))

        return self._seams.replaced.around(original, "optimizer", begins, ended)

    def _clips(self, norm: object) -> None:
        """Clipping by norm is part of the optimizer, and under FSDP an exchange between the ranks."""
        self.clip_across_ranks |= models.is_sharded(norm)
