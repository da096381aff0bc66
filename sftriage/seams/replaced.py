"""Functions of torch in whose place something of ours is: around them, and never in the way of what they do."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from sftriage.seams.steps import StageSteps


def _nothing(*_: object) -> None:
    pass


def _hide_us(error: BaseException) -> None:
    from sftriage.errors import without_our_frames  # (not in a process that does not train)

    error.__traceback__ = without_our_frames(error.__traceback__)


class ReplacedName(NamedTuple):
    """A function that is a stage: whose it is, its name there, and what is in its place."""

    owner: Any
    name: str
    stage: str
    original: Callable[..., Any]
    staged: Callable[..., Any]


class Replaced:
    """Functions of torch that are replaced, until `undo`.

    Args:
        steps: of this process.
        on: names of the seams that are not switched off.
        fail: gets what a seam has raised.
        tracing: whether the compiler reads the code that calls it, rather than that it runs.

    Attributes:
        stages: the functions that are stages.
    """

    def __init__(
        self, steps: StageSteps, on: set[str], fail: Callable[[str, Exception], None], tracing: Callable[[], bool]
    ) -> None:
        self._steps, self._on, self._fail, self._tracing = steps, on, fail, tracing
        self.stages: list[ReplacedName] = []
        self._undo: list[Callable[[], object]] = []

    def undo(self) -> None:
        """Put back what there was."""
        undo, self._undo = self._undo, []
        for one in reversed(undo):
            with contextlib.suppress(Exception):
                one()

    def stage(self, owner: Any, name: str, stage: str, seen: Callable[..., None] = _nothing) -> None:
        """Have a function of torch be a stage. Until the job is in its stride, ``seen`` gets what it answers."""
        original, steps = getattr(owner, name), self._steps

        def begins(*_: object, **__: object) -> bool:
            return steps.enter(stage)

        def ended(answer: object, *_: object) -> None:
            seen(answer)
            steps.leave(stage)

        staged = self.around(original, stage, begins, ended)
        self.put(owner, name, staged)
        self.stages.append(ReplacedName(owner, name, stage, original, staged))

    def wrap(self, owner: Any, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put what is made of a function in its place."""
        self.put(owner, name, made(getattr(owner, name)))

    def put(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
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

    def around(
        self,
        original: Callable[..., Any],
        name: str,
        begins: Callable[..., bool],
        ended: Callable[..., None] = _nothing,
    ) -> Callable[..., Any]:
        """The original, with what is to be done before it, and after it, with its answer, if the former says so."""
        on, fail, tracing = self._on, self._fail, self._tracing
        uncompiled(begins, ended, self._steps.enter, self._steps.leave)

        @wraps(original)
        def around(*args: Any, **kwargs: Any) -> Any:
            if tracing() or name not in on:
                return original(*args, **kwargs)
            begun, answer = False, None
            try:
                begun = begins(*args, **kwargs)
            except Exception as error:
                fail(name, error)
            except BaseException as error:
                _hide_us(error)  # (a signal's handler raised it)
                raise
            try:
                answer = original(*args, **kwargs)
                return answer
            except BaseException as error:
                # What a traceback shows is the script and torch; without this line, as by Python 3.10, this frame too.
                _hide_us(error)
                raise
            finally:
                if begun:
                    try:
                        ended(answer, *args)
                    except Exception as error:
                        fail(name, error)
                    except BaseException as error:
                        _hide_us(error)
                        raise

        uncompiled(around)
        return around


def uncompiled(*functions: Any) -> None:
    """Keep the compiler from compiling these functions of ours where they run within a compiled one's broken graph."""
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
