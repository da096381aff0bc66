"""The moment the last gradient is ready on this rank: what splits a sync stage into a local part and one that waits.

Inside DDP's backward the ranks tie: with one of them slow, all take as long. But a rank's own last gradient is ready
before it waits for anybody, and a hook on the parameter that it belongs to sees that moment. (The hook is called while
the gradient is accumulated; DDP's own, which starts the bucket's all-reduce, only after that.)

A step may come to the sync stage several times: for each micro-batch, or for each of two models. What a visit takes
after its last gradient is the wait of that visit (next to nothing where nothing was exchanged), so the moment is told
as the stage's own time until the step's last gradient, less the waits of the visits before.

Which parameter comes last is learnt: at first all that require a gradient have a hook, then only the few that came last
in those steps. It is learnt again when the last one stays away or is overtaken, when a frozen parameter is thawed, and
every `AUDIT_STEPS` in any case. A step in which a parameter came last that was never seen to be the last of all has no
ready moment: it might be a wrong one.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from time import monotonic_ns
from typing import Any

from sftriage.recorder.layout import DURATIONS, SEQ, UNKNOWN
from sftriage.recorder.recording import Recording

LESSON_STEPS = 4
"""Steps with all the hooks on: a job's first ones are unlike the rest, and some jobs take turns with two losses."""

KEPT = 4
"""Hooks that stay on in any case, for the gradients that came last: a weight and a bias of two layers. One would do as
long as nothing changes; the others tell at once that the last one stayed away, or that another has come after it."""

MAX_LASTS = 8
"""Parameters known to come last now and then, for models that are not the same in each step; the oldest go first. As
many sets of the last ones of earlier visits are known."""

SILENT = 0
"""In place of a parameter, for a visit to the sync stage without a gradient: nothing has this for its id."""

PATIENCE_STEPS = 16
"""Steps of learning in which no gradient came, before the hooks go off again."""

AUDIT_STEPS = 512
"""Steps after which all hooks go on for one step, to see what nothing else shows. That costs about 4 µs a parameter."""

CALM_STEPS = 256
"""Steps without a surprise after which the next one is looked into at once; and the longest pause after one."""

FROZEN_A_STEP = 4
"""Frozen parameters that are looked at after a step, in turn."""

_FSDP = ("FSDPModule", "FullyShardedDataParallel")
_SHARDED = (
    "watch() sees nothing under FSDP or with DTensor parameters: gradients are accumulated there only after an exchange"
    " between the ranks, so that no step has a ready moment"
)


class Lessons:
    """What is known of the order of a model's gradients, and when to learn it anew. No torch, no clock.

    Attributes:
        learning: every parameter is to have a hook; otherwise those of ``kept``.
    """

    __slots__ = ("_audit", "_calm", "_lasts", "_left", "_patience", "_pause", "_quiet", "_tail", "_visits", "learning")

    def __init__(self) -> None:
        self.learning = True
        self._lasts: dict[int, None] = {}
        self._visits: dict[frozenset[int], None] = {}
        self._tail: dict[int, None] = {}
        self._left = LESSON_STEPS
        self._patience = PATIENCE_STEPS
        self._audit = False
        self._pause = 0
        self._quiet = 0
        self._calm = 0

    @property
    def kept(self) -> frozenset[int]:
        """The parameters whose hooks stay on when there is nothing to learn."""
        return frozenset(self._lasts).union(self._tail, *self._visits)

    @property
    def fruitless(self) -> bool:
        """Whether no gradient has ever been seen."""
        return not self._lasts

    def take(self, tail: Sequence[int], thawed: bool, earlier: frozenset[int] = frozenset()) -> bool:
        """Take in one step, and say whether the last gradient of each of its visits is known for the last.

        Args:
            tail: the parameters whose hooks were called last, up to `KEPT`, in order.
            thawed: a parameter that has had no hook so far now requires a gradient.
            earlier: the last parameters of the visits to the sync stage before the last one, and `SILENT` where the
                first one was without a gradient.
        """
        return self._learn(tail, thawed, earlier) if self.learning else self._check(tail, thawed, earlier)

    def _learn(self, tail: Sequence[int], thawed: bool, earlier: frozenset[int]) -> bool:
        if thawed:
            self._begin(LESSON_STEPS, audit=False)
            return False
        if tail:
            last = tail[-1]
            if self._audit and last not in self._lasts:
                self._audit, self._left = False, LESSON_STEPS
            self._lasts.pop(last, None)
            self._lasts[last] = None
            if len(self._lasts) > MAX_LASTS:
                del self._lasts[next(iter(self._lasts))]
            self._tail = dict.fromkeys(tail)
            self._visits.pop(earlier, None)
            self._visits[earlier] = None
            if len(self._visits) > MAX_LASTS:
                del self._visits[next(iter(self._visits))]
            self._left -= 1
        else:
            self._patience -= 1
        self.learning = self._left > 0 and self._patience > 0
        return bool(tail)

    def _check(self, tail: Sequence[int], thawed: bool, earlier: frozenset[int]) -> bool:
        known = bool(tail) and tail[-1] in self._lasts and not thawed and earlier in self._visits
        self._quiet += 1
        if known:
            self._calm += 1
            if self._quiet >= AUDIT_STEPS:
                self._begin(1, audit=True)
        else:
            if self._calm >= CALM_STEPS:
                self._pause = 0
            self._calm = 0
            if self._quiet > self._pause:
                # A model that never ceases to surprise costs little: each pause is twice the one before.
                self._pause = min(max(1, 2 * self._pause), CALM_STEPS)
                self._begin(LESSON_STEPS, audit=False)
        return known

    def _begin(self, steps: int, *, audit: bool) -> None:
        self.learning = True
        self._left, self._audit = steps, audit
        self._patience = PATIENCE_STEPS
        self._quiet = 0


class GradientWatch:
    """The hooks on one model's parameters, and the ready moment of each step. A `ReadyWatch`.

    It holds neither the model nor a parameter, and no weak reference to one: ``torch.utils.swap_tensors`` refuses a
    tensor that has any.

    Args:
        recording: whose steps it watches; it needs a sync stage.
        model: what to watch; anything with ``parameters()``.

    Attributes:
        due: see `ReadyWatch`.

    Raises:
        Exception: whatever the model's own ``parameters()`` raises.
    """

    __slots__ = (
        "_at",
        "_earlier",
        "_error",
        "_frozen",
        "_handles",
        "_lessons",
        "_met",
        "_model",
        "_moment",
        "_outside_at",
        "_recording",
        "_tail",
        "_turn",
        "due",
    )

    def __init__(self, recording: Recording, model: Any) -> None:
        schema = recording.info.schema
        self._recording = recording
        self._at = DURATIONS + schema.stages.index(schema.sync_in_order[0])
        self._outside_at = recording.outside[self._at]
        self._model = weakref.ref(model)
        self._lessons = Lessons()
        self._handles: dict[int, Any] = {}
        self._frozen: list[tuple[weakref.ref[Any], str]] = []
        self._met: set[int] = set()
        self._turn = 0
        # Of the last gradient: which step, the stage's own time until then, which visit, and the waits of those before.
        self._moment: tuple[int, int, int, int] | None = None
        self._earlier: list[int] = []
        self._tail: deque[int] = deque(maxlen=KEPT)
        self._error: Exception | None = None
        self.due = False
        try:
            self._hook_all(model)
        except BaseException:
            self.close()
            raise

    def ready(self, parameter: object) -> None:
        """The hook: a gradient has been accumulated.

        On CUDA this is called on autograd's device thread, while the step's own thread is inside ``backward()``; and
        nothing keeps a job from calling ``backward()`` in any other thread. So it only leaves a note, with the number
        of the step that it is about, and the step's own thread picks that up: a slot is never written from here. What
        it reads may be off by one switch of stages in a job that does switch stages meanwhile; `collect` refuses what
        cannot be.
        """
        try:
            recording = self._recording
            at, stack, words = self._at, recording.stack, recording.words
            # Before all else: what follows is about this step, or it is thrown away.
            seq = words[SEQ]
            if not recording.owner:
                return
            ready_ns = words[at]
            if stack[-1] == at:
                ready_ns += monotonic_ns() - recording.since
            elif at not in stack:
                return
            # Written whenever the stage is left, and time passes in between: it tells one visit from the next.
            visit, moment = words[self._outside_at], self._moment
            if moment is None or moment[0] != seq:
                waited_ns = words[at] if visit else 0
                if visit:
                    self._earlier.append(SILENT)
            elif moment[2] != visit:
                waited_ns = moment[3] + words[at] - moment[1]
                self._earlier.append(self._tail[-1])
            else:
                waited_ns = moment[3]
            self._tail.append(id(parameter))
            self._moment = (seq, ready_ns, visit, waited_ns)
        except Exception as error:
            self._error = error
            self.due = True

    def collect(self, incomplete: bool) -> int:
        """The ready moment of the step that ends. Called by the step's thread, before the step is published.

        Args:
            incomplete: the step was left half-way. Its gradients teach nothing.
        """
        words = self._recording.words
        moment, self._moment = self._moment, None
        tail, earlier = list(self._tail), frozenset(self._earlier)
        self._tail.clear()
        self._earlier = []
        took_ns = words[self._at]
        # A step without backward, such as an evaluation, is no surprise.
        if incomplete or not took_ns:
            return UNKNOWN
        if moment is None or moment[0] != words[SEQ]:
            moment, tail, earlier = None, [], frozenset()
        lessons = self._lessons
        before, thawed = lessons.learning, self._thawed()
        known = lessons.take(tail, thawed, earlier)
        if lessons.learning != before or thawed:
            self.due = True
        if moment is None or not known:
            return UNKNOWN
        _, until_ns, _, waited_ns = moment
        return until_ns - waited_ns if 0 <= waited_ns <= until_ns <= took_ns else UNKNOWN

    def settle(self) -> None:
        """Put on and take off hooks as the lessons want them. Called by the step's thread between two steps."""
        self.due = False
        try:
            if self._error is not None:
                raise self._error
            if not self._lessons.learning:
                self._keep()
                return
            model = self._model()
            if model is None:
                self._stop("the model given to watch() is gone: give it the new one")
            elif sharded(model):
                self._stop(_SHARDED)
            else:
                self._hook_all(model)
        except Exception as error:
            self._stop(f"watch() no longer watches: {error!r}")

    def close(self) -> None:
        """Take all hooks off. A second call does nothing."""
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.remove()

    def _hook_all(self, model: Any) -> None:
        for parameter in model.parameters():
            # A hook that is on one that is frozen just now stays there: no new one could be put on.
            if parameter.requires_grad and parameter.is_leaf:
                key = id(parameter)
                if key in self._handles:
                    self._handles.pop(key).remove()
                self._handles[key] = parameter.register_post_accumulate_grad_hook(self.ready)
                self._met.add(key)
        self._frozen = [
            (weakref.ref(module), name)
            for module in _modules(model)
            for name, parameter in module.named_parameters(recurse=False)
            if not parameter.requires_grad and id(parameter) not in self._met
        ]

    def _keep(self) -> None:
        kept = self._lessons.kept
        for key in [key for key in self._handles if key not in kept]:
            self._handles.pop(key).remove()
        if self._lessons.fruitless:
            stage = self._recording.info.schema.stages[self._at - DURATIONS]
            self._recording.say_once(
                f"watch() has seen no gradient become ready in the first sync stage, {stage!r}:"
                " is backward() called there, and on this model?"
            )

    def _thawed(self) -> bool:
        """Whether one of the next few frozen parameters requires a gradient now."""
        frozen = self._frozen
        for _ in range(min(FROZEN_A_STEP, len(frozen))):
            self._turn = (self._turn + 1) % len(frozen)
            module, name = frozen[self._turn]
            if getattr(getattr(module(), name, None), "requires_grad", False):
                return True
        return False

    def _stop(self, why: str) -> None:
        self._recording.say_once(why)
        if self._recording.watch is self:
            self._recording.watch = None
        self.close()


def watch_model(recording: Recording, model: Any) -> None:
    """Watch a model's gradients from now on, in place of what was watched before. Never raises."""
    if recording.off:
        return
    watched, recording.watch = recording.watch, None
    try:
        if watched is not None:
            watched.close()
        if not callable(getattr(model, "parameters", None)):
            recording.misused("watch() was given something that has no parameters()", type(model).__name__)
        elif not recording.info.schema.sync:
            recording.misused("watch() splits the first sync stage, and none was declared")
        elif sharded(model):
            recording.say_once(_SHARDED)
        else:
            recording.watch = GradientWatch(recording, model)
    except Exception as error:
        recording.say_once(f"watch() cannot watch this model: {error!r}")


def sharded(model: Any) -> bool:
    """Whether gradients of this model are accumulated only after an exchange between the ranks.

    By name: torch.distributed.fsdp is not imported here.
    """
    kinds = {kind for module in _modules(model) for kind in type(module).__mro__}
    if any(kind.__name__ in _FSDP and kind.__module__.startswith("torch.distributed.") for kind in kinds):
        return True
    return any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())


def _modules(model: Any) -> list[Any]:
    """The model's modules; what only has parameters has none."""
    modules = getattr(model, "modules", None)
    return list(modules()) if callable(modules) else []
