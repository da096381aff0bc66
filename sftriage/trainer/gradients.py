"""Records the moment the last gradient is ready on this rank, which splits a sync stage into own work and waiting.

`Monitor.watch` calls it. Inside DDP's backward the ranks tie: one slow rank makes all slow. But a rank's last gradient
is ready before the rank waits for others, and a hook on its parameter notes that moment before DDP's hook starts the
bucket's all-reduce. A step may visit the sync stage several times, for micro-batches or models; each has its moment.

For a few steps all parameters have a hook, afterwards only those whose gradients came last. A step that ends with
others has no ready moment, which might be wrong; then all parameters get hooks again, within a budget.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import cycle, islice
from time import monotonic_ns
from typing import Any

from sftriage.trainer.recording import Recording
from sftriage.trainer.seams import models

LastGradients = tuple[int, ...]
"""The ids of the parameters whose gradients came last in one visit to the sync stage, up to `KEPT`, in order."""

KEPT = 4
"""Hooks that stay on for each visit: a weight and a bias of two layers. The last alone would do as long as nothing
changes; the others show at once that it is missing, or that another gradient came after it."""

NO_GRADIENT: LastGradients = (0,)
"""A visit without a gradient, before the first with any: no object has the id 0."""

LEARNING_STEPS = 4
"""Steps in a row with all hooks on that must show no new ending: some jobs alternate between two losses."""

MAX_ENDINGS = 8
"""Maximum endings remembered, for models that differ from step to step; the oldest go first."""

STEPS_A_LOOK = 40
"""In the long run, one step in 40 may have all hooks on: they cost about 4 us a parameter."""

MAX_LOOKS = 16
"""Maximum of saved-up steps with all hooks on; the budget at the start."""

AUDIT_STEPS = 512
"""Steps after which all hooks go on for one step, to find changes that nothing else shows."""

FROZEN_A_STEP = 4
"""Frozen parameters checked after each step, in turn."""

_SHARDED = (
    "watch() has no effect under FSDP or with DTensor parameters: gradients are accumulated there only after an"
    " exchange between the ranks, so that no step has a ready moment"
)


class GradientOrder:
    """Learns which gradients come last, and decides when to hook all parameters again. No torch, no clock."""

    def __init__(self) -> None:
        self.learning = True  # hook every parameter; otherwise those of ``kept``
        # By ending, the last parameter of the last visit and those of the visits before: the parameters to hook.
        self._endings: dict[tuple[int, frozenset[int]], frozenset[int]] = {}
        self.finals: frozenset[int] = frozenset()  # the parameters that came last in a visit
        self._left = LEARNING_STEPS
        self._since = 0
        self._budget = MAX_LOOKS * STEPS_A_LOOK

    @property
    def kept(self) -> frozenset[int]:
        """The parameters whose hooks stay on when there is nothing to learn."""
        return frozenset[int]().union(*self._endings.values())

    def take(self, visits: list[LastGradients], thawed: bool) -> bool:
        """Learn from a step; return whether the last gradient of each of its visits is known to be the last.

        No visit is empty. ``thawed``: a parameter that has had no hook so far now requires a gradient.
        """
        ending = (visits[-1][-1], frozenset([visit[-1] for visit in visits[:-1]])) if visits else None
        known = ending in self._endings and not thawed
        if not self.learning:
            self._since += 1
            self._budget = min(self._budget + 1, MAX_LOOKS * STEPS_A_LOOK)
            audit = known and self._since >= AUDIT_STEPS
            if audit or (not known and self._budget >= LEARNING_STEPS * STEPS_A_LOOK):
                self.learning = True
                self._left, self._since = 1 if audit else LEARNING_STEPS, 0
            return known
        if not known:
            self._left = LEARNING_STEPS
        if ending is not None and not thawed:
            self._endings.pop(ending, None)
            self._endings[ending] = frozenset[int]().union(*visits)
            if len(self._endings) > MAX_ENDINGS:
                del self._endings[next(iter(self._endings))]
            self.finals = frozenset[int]().union(*({last, *others} for last, others in self._endings))
            self._left -= 1
        self._budget -= STEPS_A_LOOK
        self.learning = self._left > 0 and self._budget >= STEPS_A_LOOK
        return ending is not None and not thawed


class GradientWatch:
    """The hooks on one model's parameters, and the ready moment of each step.

    It holds neither the model nor a parameter, and no weak reference to a parameter: ``torch.utils.swap_tensors``
    refuses a tensor that has any. The recording needs a sync stage, the model ``parameters()``. Raises Exception as
    the model's own ``parameters()`` does.
    """

    def __init__(self, recording: Recording, model: Any) -> None:
        self._recording = recording
        self._name = recording.info.schema.split_sync or ""
        self._stage = recording.stages[self._name]
        self._entered_before = self._stage.entered
        self._model = weakref.ref(model)
        self._order = GradientOrder()
        self._handles: dict[int, Any] = {}
        self._frozen: Iterator[tuple[weakref.ref[Any], str]] = iter(())
        self._ever_hooked: set[int] = set()
        self._notes: list[Any] = []
        self._ready = recording.form.ready(self._stage, recording, self._order, self._notes)
        self._error: Exception | None = None
        self.due = False  # call `settle` after this step
        try:
            self._hook_all(model)
        except BaseException:
            self.close()
            raise

    def collect(self, incomplete: bool) -> dict[int, int]:
        """The ready moments of the ending step, by visit; none if they might be wrong.

        The step's thread calls it before it publishes the step. An ``incomplete`` step teaches nothing.
        """
        # By visit, counted by entries into the stage: when its last gradient was ready, and which came last.
        noted: dict[int, tuple[int, LastGradients]] = {}
        n_notes = len(self._notes)  # (a late hook may be adding notes)
        for note in self._notes[:n_notes]:
            if isinstance(note, Exception):
                self._error, self.due = note, True
                continue
            entered, ready_ns, parameter = note
            noted[entered] = ready_ns, (*noted.get(entered, (0, ()))[1][1 - KEPT :], parameter)
        del self._notes[:n_notes]
        before, self._entered_before = self._entered_before, self._stage.entered
        # A step without backward, such as an evaluation, changes nothing.
        if incomplete or self._stage.entered == before:
            return {}
        visits = sorted((entered, *last) for entered, last in noted.items() if entered > before)
        lasts = [last for _, _, last in visits]
        if visits and visits[0][0] > before + 1:
            lasts.insert(0, NO_GRADIENT)
        order, thawed = self._order, self._thawed()
        learning = order.learning
        known = order.take(lasts, thawed)
        if order.learning != learning or thawed:
            self.due = True
        ready = {entered: ready_ns for entered, ready_ns, _ in visits}
        # (reading a missing attribute of a module would raise in every step)
        attributes = getattr(self._model(), "__dict__", {})
        if visits and not attributes.get("require_backward_grad_sync", True):
            # Under DDP's no_sync() the rank has not waited, whichever gradient came last.
            return ready | {visits[-1][0]: monotonic_ns()}
        return ready if known else {}

    def settle(self) -> None:
        """Add or remove hooks as needed. The step's thread calls it between two steps."""
        self.due = False
        try:
            if self._error is not None:
                raise self._error
            model = self._model()
            if not self._order.learning:
                self._unhook()
            elif model is None:
                self._stop("the model given to watch() is gone: give it the new one")
            elif models.shards(model):
                self._stop(_SHARDED)
            else:
                self._hook_all(model)
        except Exception as error:
            self._stop(f"watch() no longer watches: {error!r}")

    def close(self) -> None:
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.remove()

    def _hook_all(self, model: Any) -> None:
        for parameter in model.parameters():
            # A hook on a parameter that is frozen now stays on: torch would accept no new one.
            if parameter.requires_grad and parameter.is_leaf:
                key = id(parameter)
                if key in self._handles:
                    self._handles.pop(key).remove()
                self._handles[key] = parameter.register_post_accumulate_grad_hook(self._ready)
                self._ever_hooked.add(key)
        self._frozen = cycle(
            [
                (weakref.ref(module), name)
                for module in models.modules_of(model)
                for name, parameter in module.named_parameters(recurse=False)
                if not parameter.requires_grad and id(parameter) not in self._ever_hooked
            ]
        )

    def _unhook(self) -> None:
        kept = self._order.kept
        for key in [key for key in self._handles if key not in kept]:
            self._handles.pop(key).remove()
        if not kept:
            self._recording.warn_once(
                f"watch() saw no gradient become ready in the sync stage {self._name!r}:"
                " is backward() called there, and on this model?"
            )

    def _thawed(self) -> bool:
        frozen = islice(self._frozen, FROZEN_A_STEP)
        return any(getattr(getattr(module(), name, None), "requires_grad", False) for module, name in frozen)

    def _stop(self, why: str) -> None:
        self._recording.warn_once(why)
        self._recording.set_watch(None)
        self.close()


def watch_model(recording: Recording, model: Any) -> None:
    """Watch a model's gradients instead of those of an earlier model. Never raises."""
    if recording.off:
        return
    watched = recording.watch
    recording.set_watch(None)
    try:
        if watched is not None:
            watched.close()
        if not callable(getattr(model, "parameters", None)):
            recording.misused("watch() needs a model: what it was given has no parameters()", type(model).__name__)
        elif not recording.info.schema.sync:
            recording.misused("watch() needs a sync stage, and none was declared")
        elif models.shards(model):
            recording.warn_once(_SHARDED)
        else:
            recording.set_watch(GradientWatch(recording, model))
    except Exception as error:
        recording.warn_once(f"watch() cannot watch this model: {error!r}")
