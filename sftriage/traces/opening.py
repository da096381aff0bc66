"""A file of a capture that is to be opened: what shows it, and a verified copy of it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sftriage.errors import UsageError
from sftriage.records import Profiler
from sftriage.traces.manifest import Artefact, Manifest
from sftriage.traces.store import LocalStore
from sftriage.traces.stores import Store, destination_of

Program = Literal["perfetto", "nsys-ui", "sqlite3", "text", "none"]

Copying = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows how many bytes of how many of a named file have been copied."""


def program_for(name: str, profiler: Profiler) -> Program:
    """What shows a file of a capture."""
    if profiler == "torch" and name.endswith((".json", ".json.gz")):
        return "perfetto"
    suffix = Path(name).suffix
    by_suffix: Mapping[str, Program] = {".nsys-rep": "nsys-ui", ".sqlite": "sqlite3", ".json": "text"}
    return by_suffix.get(suffix, "none")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a capture, where it is stored, where a copy of it is to be left, and what shows how far that is."""

    store: Store
    reference: str
    manifest: Manifest
    artefact: Artefact
    out: Path | None
    copying: Copying

    @property
    def name(self) -> str:
        """The file's name outside the store: its capture is said in it."""
        return f"{self.manifest.capture_id}-{self.artefact.name}"

    @property
    def here(self) -> Path | None:
        """Where it lies, if it is on this machine."""
        if not isinstance(self.store, LocalStore):
            return None
        try:
            return self.store.path(self.reference, self.artefact.name)
        except UsageError:
            # It was uploaded, and is there alone.
            return None

    @contextlib.contextmanager
    def verified(self) -> Iterator[Path]:
        """A copy of it, as its manifest says it is: in a private directory that is gone after the block, or left."""
        if self.out is not None:
            yield self._copied(destination_of(self.name, self.out, force=False))
            return
        with tempfile.TemporaryDirectory(prefix="sftriage-open-") as directory:
            yield self._copied(Path(directory) / self.name)

    def _copied(self, target: Path) -> Path:
        with self.copying(self.artefact.name, self.artefact.size_bytes) as progress:
            return self.store.get(self.reference, self.artefact.name, target, progress=progress)
