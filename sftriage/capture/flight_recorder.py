"""PyTorch's flight recorder: the last collectives of a process group, dumped by the trainer when a pipe is written to.

Only NCCL's process groups have that pipe, and only where the job was started with ``TORCH_NCCL_DEBUG_INFO_PIPE_FILE``
and a buffer that is not of size 0: a thread of the trainer waits on it, also while the training thread hangs. The dump
is a pickle; it is copied and never opened here, for opening a pickle runs what is in it.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sftriage.recorder import RingInfo

SETTLED_S = 0.5
"""A dump that has not grown for so long is whole."""
PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class RecorderPlace:
    """The pipe that asks for a dump, and the file that it goes to."""

    pipe: Path
    dump: Path


def place_of(environment: Mapping[str, str], rank: int) -> RecorderPlace | str:
    """Where a rank's flight recorder is, by the environment it was started with; or why there is none."""
    size = environment.get("TORCH_FR_BUFFER_SIZE") or environment.get("TORCH_NCCL_TRACE_BUFFER_SIZE")
    pipe = environment.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    if not pipe:
        return "none: TORCH_NCCL_DEBUG_INFO_PIPE_FILE is not set (and Gloo has none)"
    if size == "0":
        return "none: its buffer is of size 0"
    prefix = environment.get("TORCH_FR_DUMP_TEMP_FILE") or environment.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    return RecorderPlace(Path(f"{pipe}{rank}.pipe"), Path(f"{prefix or '/tmp/nccl_trace_rank_'}{rank}"))


class FlightRecorder:
    """The dump of one rank.

    Args:
        info: the rank's process.
        target: where the dump is copied to.
        max_bytes: a larger one is left alone.
    """

    def __init__(self, info: RingInfo, target: Path, max_bytes: int) -> None:
        self._info, self._target, self._max_bytes = info, target, max_bytes

    def take(self, end_s: float) -> Generator[None, None, str]:
        """Ask for a dump and copy it, turn by turn; what became of it, in words. Raises nothing."""
        try:
            return (yield from self._take(min(end_s, time.monotonic() + PATIENCE_S)))
        except OSError as error:
            return f"none: {error.filename or 'its pipe'}: {error.strerror}"

    def _take(self, end_s: float) -> Generator[None, None, str]:
        place = place_of(environment_of(self._info.pid), self._info.rank)
        if isinstance(place, str):
            return place
        if not place.pipe.exists():
            return f"none: {place.pipe} is not there (Gloo has none)"
        if not stat.S_ISFIFO(place.pipe.stat().st_mode):
            return f"none: {place.pipe} is no pipe"
        before = _seen(place.dump)
        # Without O_NONBLOCK this would wait for a reader, for ever.
        pipe = os.open(place.pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(pipe, b"1\n")
        finally:
            os.close(pipe)
        last, since_s = before, time.monotonic()
        while time.monotonic() < end_s:
            now = _seen(place.dump)
            if now != last:
                last, since_s = now, time.monotonic()
            elif now != before and time.monotonic() - since_s >= SETTLED_S:
                return self._copy(place.dump)
            yield
        return f"none: {place.dump} was not written"

    def _copy(self, dump: Path) -> str:
        descriptor = os.open(dump, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as source:
            data = source.read(self._max_bytes + 1)
        if len(data) > self._max_bytes:
            return f"none: {dump} has more than {self._max_bytes} bytes"
        with os.fdopen(os.open(self._target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as target:
            target.write(data)
        return f"{len(data)} bytes"


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with.

    Raises:
        OSError: it is gone, or not ours.
    """
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode("utf-8", "surrogateescape").split("=", 1) for entry in entries if b"=" in entry)


def _seen(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
