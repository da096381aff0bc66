"""What a place in the program does: by what it had called, by what the kernel says that it waited in, or its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import PurePath

from sftriage.reduce.samples import Frame
from sftriage.reduce.spots import Spot
from sftriage.traces.findings import CauseCode

ONE_LINE_FRACTION = 0.8
"""Of a function's time, what is of one line for that line to say what it does."""

RUNS_FRACTION = 0.6
"""A thread that runs, or could if it had a core, for as much of the time works; any other waits for something."""

_CALLED: tuple[tuple[CauseCode, re.Pattern[str]], ...] = (
    ("recompilation", re.compile(r"torch/_(dynamo|inductor)/")),
    # (Python 3.10 does not say whose method it is)
    ("dataloader_workers", re.compile(r" _MultiProcessingDataLoaderIter\.|/dataloader\.py _(try_)?get_data$")),
    ("checkpoint", re.compile(r"torch/(serialization\.py (_?save|_legacy_save)|distributed/checkpoint/)")),
    ("collective", re.compile(r"torch/distributed/distributed_c10d\.py")),
    ("subprocess", re.compile(r"/subprocess\.py ")),
    ("output", re.compile(r"/logging/__init__\.py |/(tqdm|rich|loguru)/")),
    ("database", re.compile(r"/(sqlite3|sqlalchemy|psycopg2?|pymysql|pymongo|redis|asyncpg)/")),
    ("network", re.compile(r"/(socket|ssl)\.py |/(http|urllib|urllib3|requests|aiohttp|botocore|fsspec)/")),
    ("lock", re.compile(r"/(threading|queue)\.py |/multiprocessing/(synchronize|queues|connection)\.py ")),
)
"""By what the program had called, as ``FILE FUNCTION``: of several the first."""

_STANDS_AT: tuple[tuple[CauseCode, re.Pattern[str]], ...] = (
    ("sleep", re.compile(r"\bsleep\(")),
    ("garbage_collection", re.compile(r"\bgc\.collect\(")),
    ("output", re.compile(r"\bprint\(|\bstd(out|err)\.(write|flush)\(")),
    ("database", re.compile(r"\.(commit|execute\w*|fetch(one|many|all))\(")),
    ("network", re.compile(r"\b(recv\w*|sendall|urlopen|getresponse|connect)\(")),
    ("subprocess", re.compile(r"\bos\.(system|wait\w*|posix_spawn\w*|fork)\(")),
    (
        "disk",
        re.compile(
            r"\b(open|read\w*|pread\w*|write\w*|f(data)?sync|os\.sync|fromfile|tofile|(np|torch)\.load|memmap)\("
        ),
    ),
    ("lock", re.compile(r"\b(acquire|join|flock|lockf)\(|^with\b.*(\b|_)(r?lock|mutex|semaphore|condition)\b", re.I)),
    ("checkpoint", re.compile(r"\b(torch|dcp|checkpoint\w*)\.save\(")),
)
"""By the line at which the innermost function stood, which calls what has no Python of its own."""

_WAITS_IN: tuple[tuple[CauseCode, re.Pattern[str]], ...] = (
    ("sleep", re.compile(r"nanosleep")),
    ("subprocess", re.compile(r"^(do|kernel)_wait(4|id)?$")),
    ("output", re.compile(r"pipe_write|tty_write")),
    ("lock", re.compile(r"flock|setlk|(posix|locks)_lock|pipe_read|eventfd_read|semtimedop|msgrcv|^unix_")),
    ("network", re.compile(r"^(sk|skb|tcp|udp|inet|inet6|nfs|rpc)_|^wait_woken$")),
    (
        "disk",
        re.compile(
            r"io_schedule|folio|wait_on_(page|buffer)|jbd2|^blk|^bio|submit_bio|rq_qos|^(ext4|xfs|btrfs|fuse)_|"
            r"balance_dirty|writeback|^wb_|sync_(inodes|filesystems)|iomap"
        ),
    ),
)
"""By the function of the kernel in which it waited."""

WORKS: frozenset[CauseCode] = frozenset(
    {"garbage_collection", "recompilation", "checkpoint", "disk", "subprocess", "output", "database"}
)
"""What a thread may well run for; of a thread that runs the others are not the cause."""


def code_of(spot: Spot) -> CauseCode:
    """What is done at a place, by what had been called there and by whether the thread ran."""
    runs = spot.run_fraction is not None and spot.run_fraction + (spot.waited_fraction or 0.0) >= RUNS_FRACTION
    innermost = spot.within[-1] if spot.within else spot.frame
    called = [f"{one.file} {one.function}" for one in spot.within]
    fits: Sequence[CauseCode] = (
        *(code for code, pattern in _CALLED if any(pattern.search(one) for one in called)),
        *(code for code, pattern in _WAITS_IN if spot.waits_in and pattern.search(spot.waits_in) and not runs),
        *(code for code, pattern in _STANDS_AT if pattern.search(innermost.source)),
    )
    found = next((code for code in fits if not runs or code in WORKS), None)
    if found is not None or runs:
        return found or "python"
    # (where the system does not say whether it ran, nobody knows)
    if spot.run_fraction is None:
        return "unknown"
    return "blocked" if spot.beside is None else "gil"


_SAYS_ALL: frozenset[CauseCode] = frozenset({"dataloader_workers", "checkpoint", "collective", "recompilation"})
"""What a library does by functions of its own, whose names say no more."""


def how(code: CauseCode, spot: Spot) -> str:
    """By what a place does it: the library's function that it calls, and for whom it waits meanwhile."""
    called = "" if code in _SAYS_ALL else called_by(spot)
    if code == "python":
        calls = _calls(spot.frame.source) if spot.line_fraction >= ONE_LINE_FRACTION else []
        return f" in {called}" if called else "" if calls else " in Python"
    shown = f"{called.rpartition('.')[2]}(" in spot.frame.source
    said = f" ({called})" if called and not shown else ""
    if code == "lock" and spot.meanwhile is not None:
        name, frame = spot.meanwhile
        said += f", while thread {name!r} is in {place(frame)}"
    return said


def called_by(spot: Spot) -> str:
    """What a place calls, as a program would name it: the first of a library's functions below it that has such a name.

    Where what it calls has no Python of its own, it is the one call that its one line makes. "" where nobody knows.
    """
    public = (one for one in spot.within if not re.search(r"<|(^|\.)_", one.function))
    first = next(public, None)
    calls = _calls(spot.frame.source)
    if first is not None:
        name = first.function.rpartition(".")[2]
        its = (one for one in calls if re.fullmatch(rf"[\w.]*\b{re.escape(name)}", one))
        return next(its, f"{_module(first.file)}.{first.function}")
    if spot.within or spot.line_fraction < ONE_LINE_FRACTION:
        return ""
    return calls[0] if len(calls) == 1 and re.fullmatch(r"[\w.]{1,100}", calls[0]) else ""


def _calls(source: str) -> list[str]:
    try:
        parsed = ast.parse(f"{source} pass" if source.endswith(":") else source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ["?" for _ in re.finditer(r"\w\(", source)]
    return [ast.unparse(one.func) for one in ast.walk(parsed) if isinstance(one, ast.Call)]


def _module(file: str) -> str:
    path = re.sub(r"^.*/((site|dist)-packages|lib/python\d[^/]*)/", "", file)
    return re.sub(r"(/__init__)?\.py$", "", path).replace("/", ".").strip("<>").removeprefix("frozen ")


def place(frame: Frame) -> str:
    """A line of the program: function, file, number and source."""
    # (what a comment behind it says is no part of what is done there)
    line = frame.source.partition("  # ")[0]
    source = f": {line}" if line else ""
    return f"{frame.function[:100]} ({PurePath(frame.file).name}:{frame.line}{source})"
