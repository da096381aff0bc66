"""One host of a job: reads its rings, carries out captures on its ranks, and stores what they bring."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sftriage.agent.captures import CapturePaths, Captures
from sftriage.agent.gpus import EvidenceSampler, slowed_fraction
from sftriage.agent.reading import RankRings
from sftriage.capture.nsys import NsysPlace
from sftriage.errors import RingError
from sftriage.model.captures import Report, WantedCapture
from sftriage.model.windows import GpuFindings, plain
from sftriage.traces.disk import Do, at_once
from sftriage.traces.store import LocalStore
from sftriage.windows.steplog import KeptSteps

if TYPE_CHECKING:
    from sftriage.mitigate.switching import Setting, SwitchFile, SwitchStatus

log = logging.getLogger("sftriage")


class Switches:
    """The files of groups in a directory of rings.

    ``writes`` says whether a process, by its id and start time, writes a ring there: of another container the id says
    nothing here, but its ring's lock does.
    """

    def __init__(self, rings: Path, writes: Callable[[int, int], bool]) -> None:
        self._rings, self._writes = rings, writes
        self._files: dict[Path, SwitchFile] = {}

    def statuses(self) -> list[SwitchStatus]:
        """How each group stands whose first rank here is there."""
        if not (self._files or any(self._rings.glob("*.switch"))):
            return []
        # (not above: most jobs have no such group)
        from sftriage.mitigate.switching import SwitchFile, find_switches, newest_of_each

        for path in self._files.keys() - (there := find_switches(self._rings)):
            self._files.pop(path).close()
        for path in there:
            try:
                file = self._files[path] = self._files.get(path) or SwitchFile(path)
                if not (file.maker_alive or self._writes(*file.maker)):
                    # (another one may be there under that name by the next look)
                    self._files.pop(path).close()
            except RingError as error:
                log.debug("%s", error)
        found = []
        for file in newest_of_each(self._files.values()):
            try:
                found.append(file.status())
            except RingError as error:
                log.debug("%s", error)
        return found

    def want(self, wanted: Mapping[str, Setting]) -> None:
        """Have settings be in force, by the files of their groups. Told again, nothing happens again."""
        for file in self._files.values():
            try:
                setting = wanted.get(file.name)
                if setting is not None and (request := file.status().next_request(setting.value)):
                    file.ask(request, setting.ahead_S)
            except RingError as error:
                log.warning("a remedy cannot be switched: %s", error)

    def close(self) -> None:
        """Close every file."""
        for file in self._files.values():
            file.close()
        self._files.clear()


STORING_S = 60.0
"""How long it is waited for a trace to be checked and stored. After that, what else there is to do is done."""


class Agent(RankRings):
    """What a controller needs of one host. Nothing here waits; its owner calls it again and again.

    ``rings`` has the trainers' rings and mailboxes, ``spool`` the traces that they leave; ``do`` writes steps, spool
    and store; ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        rings: Path,
        steps: Path,
        spool: Path,
        store: LocalStore,
        *,
        job: str,
        run: str,
        nsys: NsysPlace | None = None,
        kept: KeptSteps | None = None,
        do: Do = at_once,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(rings, steps, kept, do)
        self._switches = Switches(rings, self.writes)
        self._captures = Captures(self, CapturePaths(rings, spool, nsys), store, job=job, run=run)
        self._do = partial(do, lane="captures", latest=True, patience_s=STORING_S)
        self._gpus = EvidenceSampler()
        self._has_gpus = True
        self._clock = clock

    def want(self, wanted: Sequence[WantedCapture]) -> None:
        """All captures that are wanted of the host now. Told again, nothing happens again."""
        self.look()
        self._do(partial(self._captures.want, wanted, self._clock()))

    def switches(self) -> list[SwitchStatus]:
        """The groups of ranks that a remedy can be switched on, as they stand."""
        return self._switches.statuses()

    def switch(self, wanted: Mapping[str, Setting]) -> None:
        """What is to be in force in each of them."""
        self._switches.want(wanted)

    def reports(self) -> list[Report]:
        """What there is to say of captures since the last call."""
        self._do(partial(self._captures.go_on, self._clock()))
        return self._captures.reports()

    def gpus(self, ranks: Sequence[int]) -> GpuFindings | None:
        """What the driver says of the GPUs of those of these ranks that are the host's; None while it is asked.

        Where no GPU answers, that is said once, and nobody asks again.
        """
        here = self.ranks
        about = sorted(set(ranks) & set(here))
        if not (about and self._has_gpus):
            return GpuFindings(time.time())
        found = self._gpus.ask(list(here.values()), self._clock(), about)
        if found is None:
            return None
        self._has_gpus = bool(found.gpus)
        of = {
            rank: plain(gpu) | {"slowed_fraction": slowed_fraction(gpu, found.gpus)}
            for rank in about
            if (gpu := found.of(rank)) is not None
        }
        return GpuFindings(found.time_s, found.remarks, of, found.problem)

    def close(self) -> None:
        """Close every file, and end what has not ended."""
        self._gpus.close()
        self._do(self._captures.close)
        self._switches.close()
        super().close()
