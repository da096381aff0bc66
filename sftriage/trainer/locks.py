"""Names the lock that a thread waits for, and finds its holder, from frames and bytecode. Runs nothing of the program.

Wrong would be worse than unknown: only plain variables and attributes count, and a holder is a thread that is inside a
``with`` on that very lock, or the owner that a reentrant lock knows.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import CodeType, FrameType, MemberDescriptorType
from typing import Any, NamedTuple

MAX_CODE_BYTES = 1 << 16

_WAITERS = re.compile(r"/lib/python\d[^/]*/(threading|queue|multiprocessing/\w+|concurrent/futures/\w+)\.py$")
"""Files in which a thread waits on behalf of their caller."""
_METHODS = frozenset({"acquire", "join", "wait", "wait_for", "get", "put", "result", "__enter__"})
_ENTERS = frozenset({"BEFORE_WITH", "SETUP_WITH"})
_LOADS = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME"})
_PAIRS = frozenset({"LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST"})
_CALLS = frozenset({"CALL", "CALL_METHOD", "CALL_FUNCTION", "CALL_KW", "CALL_FUNCTION_KW"})
_NO_EFFECT = frozenset({"PRECALL", "KW_NAMES", "NOP", "EXTENDED_ARG", "PUSH_NULL", "CACHE"})
_READS_ALL = frozenset({"locals", "vars", "eval", "exec", "dir", "f_locals"})
"""Names in a function that may keep a dictionary of all its variables."""

_LOCK, _RLOCK = type(threading.Lock()), type(threading.RLock())
_OWNER = re.compile(r"owner=(\d+)")
UNKNOWN = object()


class Expression(NamedTuple):
    """A variable and attributes: ``self._lock``. ``is_global``: not a local variable."""

    names: tuple[str, ...]
    is_global: bool

    def value(self, frame: FrameType) -> object:
        """Its value in a frame now, or `UNKNOWN`."""
        found = UNKNOWN if self.is_global else local(frame, self.names[0])
        if self.is_global:
            found = frame.f_globals.get(self.names[0], UNKNOWN)
        for name in self.names[1:]:
            found = attribute(found, name)
        return found


class LockWait(NamedTuple):
    """What a thread waits for: the name in the program, and the object, or `UNKNOWN`."""

    name: str
    awaited: object


def lock_of(frames: Sequence[FrameType]) -> LockWait | None:
    """The lock, queue, event or thread that a thread waits for, by its frames, innermost first."""
    at = next((at for at, frame in enumerate(frames) if not _WAITERS.search(frame.f_code.co_filename)), None)
    if at is None:
        return None
    found = _awaited(frames[at].f_code, frames[at].f_lasti)
    if found is None:
        return None
    expression, method = found
    value, name = expression.value(frames[at]), ".".join(expression.names)
    if not at:  # (Python's own waiters are certain to wait; what is not written in Python has to be a lock)
        known = isinstance(value, (_LOCK, _RLOCK)) or type(value).__name__ == "SimpleQueue"
        if not known and (value is not UNKNOWN or method != "acquire"):
            return None
    return LockWait(name, value)


class Holder(NamedTuple):
    """The thread that holds a lock, and the frame in which it took it, if known."""

    ident: int
    frame: FrameType | None = None


def holder_of(awaited: object, threads: Mapping[int, Sequence[FrameType]]) -> Holder | None:
    """The thread that holds a lock, or that is joined; None: unknown. ``threads``: their frames, innermost first."""
    if isinstance(awaited, threading.Thread):
        return Holder(awaited.ident) if awaited.ident is not None and awaited.ident in threads else None
    lock = _core(awaited)
    if isinstance(lock, _RLOCK):
        owner = _OWNER.search(repr(lock))
        return Holder(int(owner[1])) if owner is not None and int(owner[1]) in threads else None
    if not isinstance(lock, _LOCK) or not lock.locked():
        return None
    inside = [
        Holder(ident, frame)
        for ident, frames in threads.items()
        if not _has_released(frames, lock)
        for frame in frames
        if any(_core(expression.value(frame)) is lock for expression in _entered(frame.f_code, frame.f_lasti))
    ]
    return inside[0] if len({found.ident for found in inside}) == 1 else None


def local(frame: FrameType, name: str) -> object:
    """A local variable of a frame of any thread, or `UNKNOWN`. Keeps none of the frame's variables alive."""
    return variables(frame).get(name, UNKNOWN)


def variables(frame: FrameType) -> dict[str, object]:
    """The local variables of a frame of any thread; none of one that is traced, or reads all of them itself."""
    code = frame.f_code
    if frame.f_trace is not None or not _READS_ALL.isdisjoint(code.co_names):
        return {}
    found: Any = frame.f_locals
    copied = dict(found)
    if sys.version_info < (3, 13) and code.co_flags & inspect.CO_OPTIMIZED:
        # (a copy, which the frame would keep until it ends)
        found.clear()
    return copied


def attribute(value: object, name: str) -> object:
    """An attribute that is stored in the object; properties do not run."""
    if value is UNKNOWN:
        return UNKNOWN
    found = inspect.getattr_static(value, name, UNKNOWN)
    if isinstance(found, MemberDescriptorType):
        try:
            return found.__get__(value)
        except AttributeError:
            return UNKNOWN
    return found


def _core(awaited: object) -> object:
    """The lock of a condition."""
    return attribute(awaited, "_lock") if isinstance(awaited, threading.Condition) else awaited


def _has_released(frames: Iterable[FrameType], lock: object) -> bool:
    """Whether a thread waits for a condition of this lock, which releases it, although it is in its ``with``."""
    waiting = (frame for frame in frames if frame.f_code is threading.Condition.wait.__code__)
    return any((its := _core(local(frame, "self"))) is lock or its is UNKNOWN for frame in waiting)


@lru_cache(64)
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code)) if len(code.co_code) <= MAX_CODE_BYTES else ()


def _awaited(code: CodeType, offset: int) -> tuple[Expression, str] | None:
    """What a ``with``, or a call of a method that waits, is about, and the method."""
    listed = _instructions(code)
    # (while Python calls Python, the offset may be in the cache entries behind the call)
    at = bisect_right(listed, offset, key=lambda one: one.offset) - 1
    if at < 0:
        return None
    if listed[at].opname in _ENTERS:
        expression = _expression(listed, at)
        return None if expression is None else (expression, "__enter__")
    method_at = _method_at(listed, at) if listed[at].opname in _CALLS else None
    if method_at is None or listed[method_at].argval not in _METHODS:
        return None
    expression = _expression(listed, method_at)
    return None if expression is None else (expression, listed[method_at].argval)


def _method_at(listed: Sequence[dis.Instruction], call_at: int) -> int | None:
    """Where the method of a call is loaded, if its arguments are plain."""
    call = listed[call_at]
    n_arguments = (call.arg or 0) + (call.opname in ("CALL_KW", "CALL_FUNCTION_KW"))
    for at in range(call_at - 1, -1, -1):
        name = listed[at].opname
        if listed[at + 1].is_jump_target:
            return None
        if name in _NO_EFFECT:
            continue
        if name in ("LOAD_ATTR", "LOAD_METHOD") and n_arguments <= 0:
            return at if n_arguments == 0 else None
        if name in _LOADS or name == "LOAD_CONST":
            n_arguments -= 1
        elif name == "LOAD_FAST_LOAD_FAST":
            n_arguments -= 2
        elif name != "LOAD_ATTR":
            return None
        if n_arguments < 0:
            return None
    return None


def _expression(listed: Sequence[dis.Instruction], end: int) -> Expression | None:
    """The variable and attributes whose value lies on the stack before an instruction."""
    names: list[str] = []
    for at in range(end - 1, -1, -1):
        one = listed[at]
        if listed[at + 1].is_jump_target:  # (the value may have come from elsewhere)
            return None
        if one.opname == "LOAD_ATTR":
            names.append(one.argval)
        elif one.opname in _LOADS:
            is_global = one.opname == "LOAD_GLOBAL"
            return Expression((one.argval, *reversed(names)), is_global)
        elif one.opname in _PAIRS:
            return Expression((one.argval[1], *reversed(names)), is_global=False)
        elif one.opname not in _NO_EFFECT:
            return None
    return None


def _entered(code: CodeType, offset: int) -> Iterator[Expression]:
    """The ``with`` blocks that an instruction is inside of, as far as they are plain; none before Python 3.11."""
    parse = getattr(dis, "_parse_exception_table", None)
    if parse is None or dis.opmap.get("BEFORE_WITH", -1) not in code.co_code[::2]:
        return
    listed, table = _instructions(code), parse(code)
    at_offset = {one.offset: at for at, one in enumerate(listed)}

    def target_of(offset: int) -> int | None:
        return next((entry.target for entry in table if entry.start <= offset < entry.end), None)

    # An exception here would go through these handlers, from the inside out.
    handlers = list[int]()
    target = target_of(offset)
    while target is not None and target not in handlers:
        handlers.append(target)
        target = target_of(target)
    for at, one in enumerate(listed[:-1]):
        if one.opname == "BEFORE_WITH" and one.offset < offset:
            handler = target_of(listed[at + 1].offset)
            ends_with = listed[at_offset[handler] + 1 :][:1] if handler in handlers else []
            if ends_with and ends_with[0].opname == "WITH_EXCEPT_START":
                expression = _expression(listed, at)
                if expression is not None:
                    yield expression
