"""A file of a capture that is to be opened: what shows it, and a verified copy of it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sftriage.decisions import Profiler
from sftriage.errors import SftriageError, UsageError
from sftriage.sampling.sampler import NAME as SAMPLES_NAME
from sftriage.traces.manifest import Artefact, Manifest
from sftriage.traces.store import LocalStore
from sftriage.traces.stores import Store, beside, destination_of
from sftriage.traces.viewing import FirstView, StackTracks, lay_out

Program = Literal["perfetto", "nsys-ui", "sqlite3", "text", "none"]

Copying = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows how many bytes of how many of a named file have been copied."""


def program_for(name: str, profiler: Profiler) -> Program:
    """What shows a file of a capture."""
    if name == SAMPLES_NAME or (profiler == "torch" and name.endswith((".json", ".json.gz"))):
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


@contextlib.contextmanager
def for_viewer(
    trace: StoredFile, stack_tracks: Callable[[Path], StackTracks]
) -> Iterator[tuple[Path, Path, FirstView | None]]:
    """A capture's trace, what the viewer is given of it, and where that opens: the suspect with its control beside it.

    Where they cannot be laid out so, the viewer is given the trace as it was stored. What was made for it is gone after
    the block. ``stack_tracks`` reads a file of sampled stacks.
    """
    with contextlib.ExitStack() as made:
        file = made.enter_context(trace.verified())
        target = Path(made.enter_context(tempfile.TemporaryDirectory(prefix="sftriage-open-"))) / trace.name
        alone = [(trace.manifest, file)]
        both, stacks = list(alone), _stacks(trace, file, made, stack_tracks)
        for other in _beside(trace) if trace.artefact == trace.manifest.artefacts[0] else ():
            with contextlib.suppress(SftriageError):
                its = made.enter_context(other.verified())
                both.append((other.manifest, its))
                stacks |= _stacks(other, its, made, stack_tracks)
        both.sort(key=lambda one: one[0].capture.role == "control")
        spot = lay_out(both, target, stacks) or lay_out(alone, target, stacks)
        yield file, file if spot is None else target, spot


def _stacks(
    trace: StoredFile, file: Path, made: contextlib.ExitStack, stack_tracks: Callable[[Path], StackTracks]
) -> dict[str, StackTracks]:
    with contextlib.suppress(SftriageError):
        for artefact in trace.manifest.artefacts:
            if artefact.name == SAMPLES_NAME:
                if artefact != trace.artefact:
                    file = made.enter_context(replace(trace, artefact=artefact, out=None).verified())
                return {trace.manifest.capture_id: stack_tracks(file)}
    return {}


def _beside(trace: StoredFile) -> list[StoredFile]:
    with contextlib.suppress(SftriageError):
        return [
            StoredFile(trace.store, reference, other, other.artefacts[0], None, trace.copying)
            for reference, other in beside(trace.store, trace.reference, trace.manifest)[:1]
        ]
    return []
