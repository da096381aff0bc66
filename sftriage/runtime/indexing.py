"""A run's captures in a catalogue that many jobs share: told of while it runs, and never waited for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sftriage.base.loops import Backoff, Loop
from sftriage.errors import SftriageError
from sftriage.model.events import CaptureChanged, Event, Sight
from sftriage.runtime.catalogue_urls import catalogue_url
from sftriage.sinks.stream import Sink
from sftriage.traces.manifest import Manifest
from sftriage.traces.remote import RemoteStore
from sftriage.traces.store import LocalStore
from sftriage.traces.stores import CaptureKey, Store

if TYPE_CHECKING:
    from sftriage.traces.catalogue import Catalogue

LOOK_S = 2.0
"""How often it is looked whether the captures have changed, or a copy elsewhere is there."""
RETRY_S = 15.0
"""How long a catalogue that is away is left alone."""
CLOSE_S = 10.0
"""How long the end of a run may wait for the catalogue."""


class SharedIndexing(Sink):
    """Keeps a shared catalogue up to date with a run's store.

    It compares what the store holds with what the catalogue was last known to hold, so the next comparison makes good
    what was missed while the catalogue was away.

    Raises:
        UsageError: the URL is none, or what is needed to talk to it is not installed.
    """

    name = "catalogue"

    def __init__(self, root: Path, url: str, *, look_s: float = LOOK_S, retry_s: float = RETRY_S) -> None:
        self._store = LocalStore(root)
        self._url, self._catalogue = url, _catalogue(url, self._store)
        self._copies: dict[str, tuple[str, str]] = {}
        self._told: dict[str, str | None] | None = None
        self._loop = Loop(
            *("index", self._compare, look_s),
            failing="captures are stored but not catalogued",
            works=f"the catalogue {self._catalogue.name} is up to date again",
            expected=(SftriageError,),
            backoff=Backoff(retry_s, retry_s),
        )

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._loop.start()

    def take(self, seen: Event | Sight) -> None:
        """A capture that is stored is looked at now; but a catalogue that is away is left alone for its time."""
        if isinstance(seen, CaptureChanged) and seen.result.state == "stored":
            self._loop.wake()

    def finish(self, say: Callable[[str], None], left_s: Callable[[], float] = lambda: CLOSE_S) -> None:
        """Bring the catalogue up to date once more, for no longer than is left, and say what it may lack."""
        if not self._loop.stop(min(CLOSE_S, left_s()), last_turn=True) or self._loop.problem:
            say(f"the catalogue {self._catalogue.name} may lack captures; add them with: sftriage traces reindex")

    def _compare(self) -> None:
        held = self._held()
        if held != self._told:
            self._catalogue.refresh()
            self._tell_copies(held)
            self._told = held

    def _held(self) -> dict[str, str | None]:
        held: dict[str, str | None] = {}
        for capture_id in self._store.ids():
            upload = self._store.noted_upload(capture_id)
            whole = upload is not None and upload.state == "stored" and upload.verified_at is not None
            held[capture_id] = upload.url if upload is not None and whole else None
        return held

    def _tell_copies(self, held: dict[str, str | None]) -> None:
        """Have copies elsewhere found by everybody; the store that they are in is asked for nothing."""
        for capture_id, url in held.items():
            if url is None or capture_id in self._copies:
                continue
            if (manifest := self._whole(capture_id)) is not None:
                _catalogue(self._url, RemoteStore.open(url)).add(manifest)
                self._copies[capture_id] = (url, CaptureKey.of(manifest).key)
        for capture_id in self._copies.keys() - held.keys():
            url, reference = self._copies[capture_id]
            _catalogue(self._url, RemoteStore.open(url)).drop(reference)
            del self._copies[capture_id]

    def _whole(self, capture_id: str) -> Manifest | None:
        try:
            return self._store.manifest(capture_id)
        except SftriageError:
            return None


def checked_catalogue(option: str | None) -> str | None:
    """The catalogue that a run is to tell of its captures, if one is named; it need not be there yet.

    Raises:
        UsageError: it is none, or what is needed to talk to it is not installed.
    """
    url = catalogue_url(option)
    if url is not None:
        _catalogue(url, None)
    return url


def _catalogue(url: str, store: Store | None) -> Catalogue:
    from sftriage.traces.catalogue import Catalogue  # a third of what a run imports, for those that name one alone

    return Catalogue(url, store)
