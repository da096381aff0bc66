"""The rings of device times, read beside those of the host.

They exist only for ranks that record device time, and are looked for only where a rank's ring says that its steps run
on a device: a job on CPUs pays nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sftriage.errors import RingError
from sftriage.recorder import RingInfo, RingReader, StepLog
from sftriage.windows.decoding import StepArrays, decode
from sftriage.windows.logs import KIND, LOG_KIND


@dataclass(slots=True)
class _Rank:
    """One rank's: its log, unless the disk does not take one, and its ring once there is one.

    ``done``: the ring is over, or found to be broken.
    """

    log: StepLog | None
    reader: RingReader | None = None
    done: bool = False


class DeviceRings:
    """Reads the device times of ranks, and keeps them. What cannot be read is said once, and goes without.

    A rank's log of device times is made as soon as its steps are known to run on a device, and stays empty where no
    times come: whoever judges the run later knows from it what the host's times are worth. What is wrong with a file
    is told to ``say``, and may be told again.
    """

    def __init__(self, rings: Path, steps: Path, say: Callable[[str], None]) -> None:
        self._rings, self._steps, self._say = rings, steps, say
        self._ranks: dict[tuple[int, int], _Rank] = {}

    def read(self, info: RingInfo) -> tuple[StepArrays, bool]:
        """A rank's device times that have come since the last call, and whether none will come any more."""
        one = self._ranks.get((info.attempt, info.rank))
        if one is None:
            one = self._ranks[info.attempt, info.rank] = _Rank(self._log(info))
        nothing = decode([(info.rank, b"")], info.schema)
        try:
            if one.reader is None and not one.done:
                one.reader = self._opened(info)
            if one.reader is None:
                return nothing, one.done
            batch = one.reader.read()
        except RingError as error:
            self._say(f"{error}; the device times of rank {info.rank} are not known")
            self._leave(one)
            return nothing, True
        self._keep(one, batch.raw)
        if one.reader.over:
            self._leave(one)
        return decode([(info.rank, batch.raw)], info.schema), one.done

    def close(self) -> None:
        """Close every file."""
        for one in self._ranks.values():
            self._leave(one)
        self._ranks.clear()

    def _log(self, info: RingInfo) -> StepLog | None:
        try:
            return StepLog(self._steps, info, kind=LOG_KIND)
        except RingError as error:
            self._say(f"{error}; device times are judged but not kept")
            return None

    def _opened(self, info: RingInfo) -> RingReader | None:
        """The rank's ring of device times, or None before there is one.

        Raises:
            RingError: it cannot be read.
        """
        path = self._rings / info.file_name(KIND)
        if not path.exists():
            return None
        reader = RingReader(path, kind=KIND)
        if reader.info == info:
            return reader
        # A dead process has left it, and the rank's own will take its place.
        reader.close()
        return None

    def _keep(self, one: _Rank, raw: bytes) -> None:
        if one.log is None or not raw:
            return
        try:
            one.log.append(one.log.unknown(raw))
        except RingError as error:
            self._say(f"{error}; some device times are judged but not kept")

    def _leave(self, one: _Rank) -> None:
        one.done = True
        for file in (one.reader, one.log):
            if file is not None:
                file.close()
        one.reader = one.log = None
