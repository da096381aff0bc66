"""The file of sampled stacks, as speedscope (https://www.speedscope.app) opens it: of a trainer, and of its workers.

What places a sample in its step and stage stands beside the profiles under ``sftriage``: columns of one length, a row a
time at which all threads were sampled. Each of the DataLoader's workers has rows of its own there, for it samples
itself, and its profiles follow the trainer's.
"""

from __future__ import annotations

import json
import linecache
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import CodeType
from typing import Any

SCHEMA_VERSION = 1
FORMAT = "https://www.speedscope.app/file-format-schema.json"

MAX_SOURCE = 200

ProcessSamples = dict[str, Any]
"""What a process tells of its own samples, ready for JSON.

``frames`` are (function, file, line), with a line of ``source`` each; ``stacks`` numbers of frames, the outermost
first; ``time_ns`` has a row's time, and each of ``threads`` by row the number of its ``stack`` (-1 where it was not
there), ``run_ns`` and ``waited_ns``, as has the ``sampler``, without a stack. What the first of them waits in stands in
``waits_in``, and what it has used by then in columns of their own (`stacks.USED`).
"""


def written(
    title: str, own: ProcessSamples, at: Mapping[str, Sequence[object]], workers: Sequence[ProcessSamples]
) -> Iterator[str]:
    """The file, in pieces: all in one would keep the interpreter from the training thread for as long as that takes.

    Args:
        title: what it is called.
        own: the trainer's samples, of the training thread first.
        at: the step and stage of each of its rows, by column.
        workers: those of the DataLoader's workers; or, with a ``problem``, why there are none of one.
    """
    numbers: dict[tuple[str, str, int], int] = {}
    source: list[str] = []
    sampled = [one for one in workers if "problem" not in one]
    profiles = []
    for process in (own, *sampled):
        renumbered = []
        for (function, file, line), text in zip(process["frames"], process["source"], strict=True):
            renumbered.append(numbers.setdefault((function, file, line), len(numbers)))
            source += [text] * (len(numbers) - len(source))
        stacks = [[renumbered[number] for number in stack] for stack in process["stacks"]]
        profiles += [(process, thread, stacks) for thread in process["threads"]]
    head = {"$schema": FORMAT, "exporter": "sftriage", "name": title, "activeProfileIndex": 0}
    yield _json(head)[:-1] + ',"profiles":['
    for at_first, (process, thread, stacks) in enumerate(profiles):
        yield ("," if at_first else "") + _json(_profile(process, thread, stacks, own["began_ns"]))
    frames = [{"name": function, "file": file, "line": line} for function, file, line in numbers]
    columns = {
        "schema_version": SCHEMA_VERSION,
        **_columns(own),
        **at,
        "source": source,
        "workers": [{name: one[name] for name in ("worker", "of", "pid")} | _columns(one) for one in sampled],
        "not_sampled": [one for one in workers if "problem" in one],
    }
    yield f'],"shared":{_json({"frames": frames})},"sftriage":{_json(columns)}}}'


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _columns(process: ProcessSamples) -> dict[str, Any]:
    times = [{name: thread[name] for name in thread if name not in ("name", "stack")} for thread in process["threads"]]
    return {name: process[name] for name in ("period_s", "time_ns", "sampler")} | {"threads": times}


def _profile(
    process: ProcessSamples, thread: Mapping[str, Any], stacks: Sequence[Sequence[int]], origin_ns: int
) -> ProcessSamples:
    times_ns = [process["began_ns"], *process["time_ns"]]
    name = thread["name"]
    if "worker" in process:
        name = f"DataLoader worker {process['worker']} (pid {process['pid']})" + (f": {name}" if name else "")
    return {
        "type": "sampled",
        "name": name,
        "unit": "nanoseconds",
        "startValue": times_ns[0] - origin_ns,
        "endValue": times_ns[-1] - origin_ns,
        # Where it was not there yet, or not any more, its stack is empty.
        "samples": [stacks[number] if number >= 0 else [] for number in thread["stack"]],
        "weights": [after - before for before, after in pairwise(times_ns)],
    }


class Frames:
    """Frames as speedscope has them, numbered as they come: of code objects, and the instructions they stand at."""

    def __init__(self, codes: Mapping[int, CodeType]) -> None:
        self._codes = codes
        self._lines: dict[int, dict[int, int]] = {}
        self._number: dict[tuple[str, str, int], int] = {}
        self._of: dict[tuple[int, int], int] = {}

    def numbers(self, stack: Sequence[int]) -> list[int]:
        """The frames of a stack (a code's id, an instruction, and so on from the innermost), the outermost first."""
        return [self._one((code, at)) for code, at in zip(stack[-2::-2], stack[::-2], strict=True)]

    def _one(self, frame: tuple[int, int]) -> int:
        number = self._of.get(frame)
        if number is None:
            code = self._codes[frame[0]]
            key = getattr(code, "co_qualname", code.co_name), code.co_filename, self._line(*frame)
            number = self._of[frame] = self._number.setdefault(key, len(self._number))
        return number

    def _line(self, code: int, at: int) -> int:
        lines = self._lines.get(code)
        if lines is None:
            lines = self._lines[code] = {
                offset: line
                for start, end, line in self._codes[code].co_lines()
                if line is not None
                for offset in range(start, end, 2)
            }
        return lines.get(at, self._codes[code].co_firstlineno)

    def listed(self) -> list[tuple[str, str, int]]:
        """Every frame, in the order of its number: function, file and line."""
        return list(self._number)

    def source(self) -> list[str]:
        """Of every frame the line of source, "" where that is not to be had."""
        known = set(linecache.cache)
        try:
            return [linecache.getline(file, line).strip()[:MAX_SOURCE] for _, file, line in self._number]
        finally:
            # What was not the job's own is not left in its memory.
            for file in set(linecache.cache) - known:
                linecache.cache.pop(file, None)
