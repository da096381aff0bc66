"""What other processes of a tool take, from /proc. A process that has ended in between is not seen."""

from __future__ import annotations

from pathlib import Path


def children_of(stats: dict[int, int], root: int) -> set[int]:
    """The root and all its descendants, from each process's parent."""
    found = {root}
    while more := {pid for pid, parent in stats.items() if parent in found} - found:
        found |= more
    return found


def parents() -> dict[int, int]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold anything, a parenthesis too.
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
    return found


def run_ns(pid: int) -> int:
    """Processor time of the threads that a process has now."""
    total_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total_ns += int(path.read_text().split()[0])
        except (OSError, ValueError, IndexError):
            continue
    return total_ns


def beside_ns(root: int, trainer: int) -> int:
    """Processor time of the root's descendants, without the root's own and the trainer's."""
    return sum(run_ns(pid) for pid in children_of(parents(), root) - {root, trainer})
