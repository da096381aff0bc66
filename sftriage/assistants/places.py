"""What an assistant may ask about: the runs in one directory, and one store. Whatever else it names is not there.

A name is compared with what is there, and never made a path: nothing that is asked for leads anywhere else.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from sftriage.errors import InputError, UsageError
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.runs.source import RunSource, View
from sftriage.runtime.catalogues import CatalogueCaptures, captures_of
from sftriage.traces.keys import shown


@dataclass(frozen=True, slots=True)
class Places:
    """The runs that lie in a directory, or the one that it is, and a store, if there is one."""

    root: Path
    store: str | None = None
    _sources: dict[Path, RunSource] = field(default_factory=dict)

    def runs(self) -> list[RunDirectory]:
        """The runs that are there, newest first. A link that leads elsewhere is none."""
        if RunDirectory(self.root).info_file.is_file():
            return [RunDirectory(self.root)]
        began: dict[Path, str] = {}
        with contextlib.suppress(OSError):
            for path in self.root.iterdir():
                if path.is_dir() and not path.is_symlink():
                    with contextlib.suppress(InputError):
                        began[path] = read_info(RunDirectory(path)).created_at
        return [RunDirectory(path) for path in sorted(began, key=lambda path: (began[path], path.name), reverse=True)]

    def run(self, name: str) -> RunDirectory:
        """The run of that name; the newest where none is named.

        Raises:
            UsageError: there is none.
        """
        runs = self.runs()
        found = next((run for run in runs if name in ("", run.path.name)), None)
        if found is None:
            which = f"no run {shown(name)[:200]}" if name else "no run"
            raise UsageError(f"there is {which} here; list_runs says which there are")
        return found

    def view(self, run: RunDirectory) -> View:
        """A run as it is now; what has been read of it is not read again.

        Raises:
            InputError: it cannot be read.
        """
        source = self._sources.setdefault(run.path, RunSource(lambda: run))
        view = source.view()
        if view.problem:
            raise InputError(view.problem)
        return view

    def stored(self) -> CatalogueCaptures:
        """The store's captures.

        Raises:
            UsageError: no store was named when this began.
        """
        if self.store is None:
            raise UsageError("no store is looked at here: `sftriage mcp --store URL` does")
        return captures_of(None, self.store, None, lambda done, of: None)
