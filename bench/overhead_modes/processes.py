"""What other processes of a tool take, from /proc. A process that has ended in between is not seen."""

from __future__ import annotations

from pathlib import Path

from tests.integration.processes import descendants


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
    return sum(run_ns(pid) for pid in set(descendants(root)) - {trainer})
