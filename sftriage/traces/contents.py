"""What private data a trace may hold, in plain words: whoever passes it on has to know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sftriage.decisions import SAMPLE_STACKS, Profiler


def may_contain(options: Mapping[str, bool]) -> str:
    """What private data a torch.profiler trace recorded with these options may hold, in plain words."""
    parts = ["names of operators, kernels, threads and the program's own annotations", "process ids and device names"]
    if options.get("with_stack") or options.get(SAMPLE_STACKS):
        parts.append("file paths, function names and line numbers of the program")
    if options.get(SAMPLE_STACKS):
        parts.append("single lines of its source")
    if options.get("record_shapes"):
        parts.append("shapes, types and scalar values of operator arguments")
    if options.get("profile_memory"):
        parts.append("sizes and addresses of memory allocations")
    return "; ".join(parts)


_NSYS_CONTAINS = (
    "names of threads, system calls, libraries, CUDA kernels and the program's own ranges; process ids and names; "
    "host name, devices and drivers; the environment of processes that were started while it was collected, in the "
    "report itself (from an export they are removed)"
)
_STACKS_CONTAINS = (
    "file paths, function names and line numbers of the program, names of its threads; with a flight recorder's dump, "
    "sizes, types and stacks of collectives, as a pickle: open it only if you trust the job"
)
_SAMPLES_CONTAIN = (
    "file paths, function names and line numbers of the program; single lines of its source; names of its threads"
)


def contents_of(profiler: Profiler, options: Mapping[str, Any]) -> str:
    """What private data the artefacts of a capture may hold, in plain words."""
    stacks = _SAMPLES_CONTAIN if options.get(SAMPLE_STACKS) else _STACKS_CONTAINS
    return {"nsys": _NSYS_CONTAINS, "stacks": stacks}.get(profiler) or may_contain(options)
