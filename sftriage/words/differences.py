"""Sentences on what differs between a suspect and its peers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sftriage.model.hangs import Fact
from sftriage.words.verdicts import counted, size

if TYPE_CHECKING:
    from sftriage.model.events import Difference, DifferencesFound

PHRASES: Mapping[str, str] = {
    "num_workers": "# loader worker",
    "torch_threads": "# torch thread",
    "interop_threads": "# inter-op thread",
    "cores": "# CPU core",
    "batch_size": "batches of {}",
    "parameter_types": "{} parameters",
    "deterministic": "deterministic algorithms {}",
    "cudnn_benchmark": "cudnn.benchmark {}",
    "cpu_limit": "CPU limit {}",
    "memory_limit_bytes": "memory limit {}",
    "gpu_clock_mhz": "GPU clock {} MHz",
    "gpu_power_limit_watts": "GPU power limit {} W",
    "gpu_limited_by": "GPU clock limited by {}",
    "traced_by": "traced by {}",
    "gc": "garbage collection {}",
}
"""A fact with its value, or with a count (#). Of others, the name says what it is."""


def difference_lines(found: DifferencesFound) -> list[str]:
    """A line for each difference."""
    return [_line(each, len(found.peers)) for each in found.differences]


def differences_sentence(found: DifferencesFound) -> str:
    """All differences in a sentence."""
    return f"What differs on {found.who}: {'; '.join(difference_lines(found))}."


def _line(found: Difference, peers: int) -> str:
    others = f"{found.alike} of {counted(peers, 'other rank')} have"
    if found.alike == peers:
        others = "the other rank has" if peers == 1 else "the other ranks have"
    name, value, shown = found.name, found.value, _shown(found.name, found.value)
    known_as = name if name.isupper() else name.replace("_", " ")
    phrase = PHRASES.get(name, f"{known_as}{'=' if name.isupper() and value is not None else ' '}{{}}")
    mine = phrase.replace("{}", shown)
    if phrase.startswith("# "):
        mine = counted(value, phrase[2:]) if isinstance(value, int) else f"{shown} {phrase[2:]}s"
    it = "it " if isinstance(found.others, bool) or (found.others is None and name.isupper()) else ""
    return f"{mine}, {others} {it}{_shown(name, found.others)}"


def _shown(name: str, value: Fact | None) -> str:
    if value is None:
        return "not set" if name.isupper() else "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str):
        return value
    return size(value) if name.endswith("_bytes") else f"{value:,}" if isinstance(value, int) else f"{value:,g}"
