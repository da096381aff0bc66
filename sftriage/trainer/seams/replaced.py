"""Functions of torch that are wrapped by ours, which never get in the way of what they do.

Among them is the seam `exchange`: a rank waits for others in a collective of torch.distributed, wherever it is called,
if the call blocks, and in the wait for a call with ``async_op=True``. That time is the stage ``exchange``, which may
lie inside any other stage, whose own time is without it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any

from sftriage.errors import without_our_frames
from sftriage.trainer.seams.models import C10D
from sftriage.trainer.seams.steps import EXCHANGE

if TYPE_CHECKING:
    from sftriage.trainer.seams.patches import Seams

_COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single", "_all_gather_base"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("broadcast", "_broadcast_coalesced", "gather", "recv", "reduce", "scatter", "send"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base"),
)
"""Of torch.distributed, as far as this torch has them. Those for objects call these, and all that wait call Work.wait.
(On a device, a call that blocks may have done its work before that.)"""

REMAPS = "torch.distributed._functional_collectives"
"""Where the compiler looks up what it makes of a collective, by the called function."""


def _nothing(*_: object) -> None:
    pass


class Replaced:
    """Functions of torch that are replaced, until `undo`."""

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        # Functions that are stages: owner, name, stage, original, and what replaces it.
        self.stages: list[tuple[Any, str, str, Callable[..., Any], Callable[..., Any]]] = []
        self._undo: list[Callable[[], object]] = []

    def undo(self) -> None:
        undo, self._undo = self._undo, []
        for one in reversed(undo):
            with contextlib.suppress(Exception):
                one()

    def stage(self, owner: Any, name: str, stage: str, seen: Callable[..., None] = _nothing) -> None:
        """Make a function of torch a stage. Until the job is in its stride, ``seen`` gets its result."""
        original, steps = getattr(owner, name), self._seams.steps

        def begins(*_: object, **__: object) -> bool:
            return steps.enter(stage)

        def ended(answer: object, *_: object) -> None:
            seen(answer)
            steps.leave(stage)

        staged = self.around(original, stage, begins, ended)
        self.put(owner, name, staged)
        self.stages.append((owner, name, stage, original, staged))

    def wrap(self, owner: Any, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.put(owner, name, made(getattr(owner, name)))

    def put(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        """Replace what is there, until `undo`, unless it was replaced again meanwhile."""
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
        self,
        original: Callable[..., Any],
        name: str,
        begins: Callable[..., bool],
        ended: Callable[..., None] = _nothing,
    ) -> Callable[..., Any]:
        """The original, after ``begins``, and before ``ended`` with its result if ``begins`` returned true."""
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
                # A traceback shows the script and torch alone, also where a signal's handler raised in our code.
                error.__traceback__ = without_our_frames(error.__traceback__)
                raise

        uncompiled(around)
        return around


def uncompiled(*functions: Any) -> None:
    """Keep the compiler from compiling these functions where they run within a compiled one's broken graph."""
    compiler: Any = getattr(getattr(sys.modules["torch"]._C, "_dynamo", None), "eval_frame", None)
    codes = [one.__code__ for one in functions if hasattr(one, "__code__")]
    if hasattr(compiler, "skip_code"):
        for code in codes:
            compiler.skip_code(code)
    elif hasattr(compiler, "set_code_exec_strategy"):
        actions = compiler._FrameAction
        alone = compiler._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
        for code in codes:
            compiler.set_code_exec_strategy(code, alone)


class Exchanges:
    """The collectives of this process."""

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self.seen: dict[tuple[str, str], int] = {}  # calls by name and open stage
        # Stages that wait for other ranks as a whole: exchanges inside them are not timed.
        self.within: frozenset[str] = frozenset()
        self.in_backward = False  # some were called there, in a thread of autograd, where no time can be noted
        self._wrapped: dict[Callable[..., Any], Callable[..., Any]] = {}

    def put_in(self) -> None:
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
                self._seams.replaced.wrap(owner, "wait", lambda original: self._waiting(original, "wait"))
        if REMAPS in sys.modules:
            self.remaps()

    def remaps(self) -> None:
        """The module has been imported that says what the compiler makes of collectives, and waits for them."""
        with self._seams.guarded(EXCHANGE):
            # (the compiler makes the same of a collective and its wrapper, whichever of the two it knows)
            known = getattr(sys.modules[REMAPS], "traceable_collective_remaps", {})
            for original, wrapper in self._wrapped.items():
                found = known.get(original, known.get(wrapper))
                if found is not None:
                    known[original] = known[wrapper] = found
            self._seams.replaced.wrap(sys.modules[REMAPS], "wait_tensor", lambda one: self._waiting(one, "wait"))

    def _waiting(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        steps, seen, begun = self._seams.steps, self.seen, f"{name} (async)"
        at = _place(original, "async_op")

        def begins(*args: Any, **kwargs: Any) -> bool:
            stage = steps.opened[-1] if steps.opened else "other"
            if stage == EXCHANGE:
                return False
            later = kwargs.get("async_op") or (len(args) > at and args[at])
            key = begun if later else name, stage
            seen[key] = seen.get(key, 0) + 1
            if later or stage in self.within:
                return False
            entered = steps.enter(EXCHANGE)
            self.in_backward |= stage == "backward" and not entered
            return entered

        return self._seams.replaced.around(original, EXCHANGE, begins, lambda *_: steps.leave(EXCHANGE))


def _place(function: Callable[..., Any], parameter: str) -> int:
    """The position of a function's parameter; past all of them if it has no such one."""
    try:
        return list(signature(function).parameters).index(parameter)
    except ValueError:  # (also for a function that is not Python's)
        return sys.maxsize
