"""The groups of ranks on one host that a remedy can be switched on, as they come and go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sftriage.errors import RingError

if TYPE_CHECKING:
    from sftriage.mitigate.switch_state import Setting, SwitchStatus
    from sftriage.mitigate.switching import SwitchFile

log = logging.getLogger("sftriage")


class Switches:
    """The files of groups in a directory of rings.

    Args:
        rings: the directory.
        writes: whether a process, by its id and when it started, writes a ring there: one of another container, whose
            id says nothing here, is known by its ring's lock.
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
