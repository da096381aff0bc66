"""What one version of nsys understands, and what its words mean. Pure: nothing is run here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sftriage.errors import CaptureError

OLDEST = (2021, 4)
"""Reports are ``.nsys-rep`` from here on; what is older is refused."""
TRACES = ("cuda", "nvtx", "osrt", "cublas", "cudnn", "mpi", "ucx")

_VERSION = re.compile(r"version\s+(\d{4})\.(\d+)(?:\.(\d+))?")
_SESSION = re.compile(r"^\s*\d+\s+\S+\s+(\S+)\s+\d+\s+(\S.*?)\s*$")
_GENERATED = re.compile(r"^\s*(/\S.*\.(?:nsys-rep|qdstrm))\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ListedSession:
    """A line of ``nsys sessions list``."""

    state: str
    name: str

    @property
    def free(self) -> bool:
        """Whether nothing is collected in it, or waited for."""
        return self.state in ("Launched", "Idle")


def parse_version(output: str) -> tuple[int, int, int]:
    """The version in what ``nsys --version`` says.

    ``launch --trace``, ``start --sample --cpuctxsw --output`` and ``stop`` are the same from the oldest one on.

    Raises:
        CaptureError: there is none, or it is older than what is needed.
    """
    found = _VERSION.search(output)
    if found is None:
        raise CaptureError(f"nsys says no version that is understood: {output.strip()[:100]!r}")
    version = int(found[1]), int(found[2]), int(found[3] or 0)
    if version[:2] < OLDEST:
        raise CaptureError(f"nsys {version[0]}.{version[1]} is too old: {OLDEST[0]}.{OLDEST[1]} is needed")
    return version


def start_flags(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Flags of ``nsys start`` beside the session and the output: it samples nothing by default.

    Context switches follow sampling in nsys, so both flags are always there.

    Raises:
        CaptureError: an option that makes no sense.
    """
    unknown = sorted(set(options) - {"trace", "sample", "sqlite"})
    if unknown:
        raise CaptureError(f"unknown options: {', '.join(unknown)}")
    sample = options.get("sample", "none")
    if sample not in ("none", "cpu"):
        raise CaptureError(f"option sample {sample!r}: none or cpu")
    scope = "none" if sample == "none" else "process-tree"
    return f"--sample={scope}", f"--cpuctxsw={scope}"


def check_traces(options: Mapping[str, Any], launched: Sequence[str]) -> None:
    """Check what is to be traced: nsys learns that at launch and at no other time.

    Raises:
        CaptureError: the rank was launched with less.
    """
    wanted = options.get("trace", tuple(launched))
    if not isinstance(wanted, (list, tuple)) or not wanted or any(name not in TRACES for name in wanted):
        raise CaptureError(f"option trace {wanted!r}: some of {', '.join(TRACES)}")
    missing = [name for name in wanted if name not in launched]
    if missing:
        raise CaptureError(
            f"{', '.join(missing)} cannot be traced: the rank was launched under nsys with {','.join(launched)} only"
        )


def parse_sessions(output: str) -> tuple[ListedSession, ...]:
    """What ``nsys sessions list`` shows; lines that are not sessions are passed over."""
    found = (_SESSION.match(line) for line in output.splitlines())
    return tuple(ListedSession(one[1], one[2]) for one in found if one is not None)


def session_of(sessions: Iterable[ListedSession], prefix: str, rank: int) -> ListedSession:
    """The session of a rank: that of its newest attempt.

    It is looked up, never guessed: ``nsys start`` makes a new session of a name that it does not know.

    Raises:
        CaptureError: there is none.
    """
    name = re.compile(rf"{re.escape(prefix)}-{rank}\.(\d+)")
    matched = [(int(found[1]), one) for one in sessions if (found := name.fullmatch(one.name))]
    if not matched:
        raise CaptureError(
            f"rank {rank} has no nsys session ({prefix}-{rank}): not launched under nsys, or the session vanished"
        )
    return max(matched, key=lambda pair: pair[0])[1]


def report_of(output: str) -> str | None:
    """The report that ``nsys stop`` says it generated: it falls back on its own folder where ours is full or gone."""
    found = _GENERATED.findall(output)
    return found[-1] if found else None
