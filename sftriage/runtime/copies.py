"""Copies of a run's captures: uploads to a store, and rows in a shared catalogue."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sftriage.base.loops import Backoff, Loop
from sftriage.errors import InputError, SftriageError, UsageError
from sftriage.model.events import CaptureChanged, Event, Observation
from sftriage.runs.directory import RunDirectory, RunInfo, read_info, write_info
from sftriage.sinks.stream import Sink
from sftriage.traces.remote import CaptureKey, RemoteStore, catalogue_url, checked_url
from sftriage.traces.store import LocalStore, Store
from sftriage.traces.uploading import Uploader, UploadProgress
from sftriage.words.verdicts import place

if TYPE_CHECKING:
    from sftriage.policy.in_force import PolicyFiles
    from sftriage.traces.catalogue import Catalogue
    from sftriage.windows.steplog import KeptSteps

log = logging.getLogger("sftriage")

Show = Callable[[UploadProgress], None]
"""Shows the progress of uploads."""

LIMIT_S, STILL_S = 900.0, 60.0
"""How long uploads may take after the end of a run, in all and without progress."""
PUSH_S = 60.0
UPLOADS_CLOSE_S, CATALOGUE_CLOSE_S = 5.0, 10.0
"""How long the end of a run may wait for an upload to give up, and for the catalogue."""
_TICK_S = 0.25
POLL_S, RETRY_S = 2.0, 15.0
"""How often captures are compared with the catalogue, and the pause after a failure."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """How many of a job's steps to keep (by default all), and the URL of a store for copies of its captures.

    With ``drop_local`` local traces are removed once their copy is verified.
    """

    store: str | None = None
    drop_local: bool = False
    steps: KeptSteps | None = None

    def info(self, run_id: str, job: str, command: tuple[str, ...], files: PolicyFiles, rings: Path) -> RunInfo:
        loaded = files.current.loaded
        return RunInfo(
            run_id=run_id,
            job=job,
            created_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            command=command,
            policy=", ".join(each.policy.metadata.name for each in loaded),
            policy_sha256=loaded[0].sha256,
            rings=str(rings),
            store=self.store,
            drop_local=self.drop_local,
            steps_bytes=None if self.steps is None else self.steps.max_bytes,
            steps_age_s=None if self.steps is None else self.steps.age_s,
            ended_at="",
        )


KEEP_ALL = Keeping()


def uploader_of(directory: RunDirectory, info: RunInfo, **how: Any) -> Uploader:
    """The uploader of a run's captures to the store that its record names; it contacts nothing yet."""
    if info.store is None:
        raise ValueError("the run has no store")
    url = checked_url(info.store)
    remote = RemoteStore.open(url, job=info.job, run=info.run_id, create=True)
    return Uploader(directory.path, remote, url, **how)


def with_store(directory: RunDirectory, info: RunInfo, store: str | None) -> RunInfo:
    """The run's record with the store: a run has one, so that findings and removals reach every copy."""
    if store is None:
        if info.store is None:
            raise UsageError(f"{directory.path} has no store; name one with --store")
        return info
    url = checked_url(store)
    if info.store is not None and checked_url(info.store) != url:
        raise UsageError(f"the captures of {directory.path} already go to {info.store}; a run has only one store")
    if info.store is None:
        info = replace(info, store=url)
        write_info(directory, info)
    return info


class RunUploads(Sink):
    """The uploads of a run in progress. Its owner calls `finish` after the stream has ended."""

    name = "uploads"

    def __init__(self, directory: RunDirectory, info: RunInfo) -> None:
        self._directory, self._info = directory, info
        self._uploader = uploader_of(directory, info, keep_local=not info.drop_local, resend=False)

    def start(self) -> None:
        self._uploader.start()

    def take(self, event: Event | Observation) -> None:
        """Release a stored capture, whose trace this run no longer reads."""
        if isinstance(event, CaptureChanged) and event.result.state == "stored":
            self._uploader.release(event.result.capture_id)

    def finish(
        self,
        say: Callable[[str], None],
        show: Show = lambda _: None,
        left_s: Callable[[], float] = lambda: float("inf"),
    ) -> None:
        """Wait for uploads in progress while they move, for at most ``left_s``, and print what is left."""
        self._uploader.release_all()
        standing = follow(self._uploader, LIMIT_S, STILL_S, show, lambda: left_s() <= 0.0)
        # (a thread may be left in the middle of an upload, which a later upload completes)
        self._uploader.close(min(UPLOADS_CLOSE_S, left_s()))
        if standing.stored:
            say(f"{_captures(standing.stored)} in {self._info.store}")
        if not standing.done:
            say(f"{what_is_left(standing)}; finish with: sftriage traces upload --run {place(self._directory.path)}")


def follow(
    uploader: Uploader,
    limit_s: float = float("inf"),
    still_s: float = float("inf"),
    show: Show = lambda _: None,
    over: Callable[[], bool] = lambda: False,
) -> UploadProgress:
    """Show the progress of uploads until they end, stall or are ``over``; return the last progress."""
    begun_s = moved_s = time.monotonic()
    standing = uploader.standing
    with suppress(KeyboardInterrupt):
        while not (standing.done or standing.given_up or standing.taken):
            now_s, before = time.monotonic(), standing
            if over() or now_s - begun_s > limit_s or now_s - moved_s > still_s:
                break
            standing = uploader.wait(standing, _TICK_S)
            if standing.moved_bytes != before.moved_bytes:
                moved_s = now_s
            show(standing)
    return standing


def what_is_left(standing: UploadProgress) -> str:
    """What is not in the store yet, and why."""
    if standing.taken:
        return "another process is uploading this run's captures"
    if not standing.checked:
        return "the captures are not all in the store yet"
    reasons = dict.fromkeys(reason for reason in (*standing.left.values(), *standing.removals.values()) if reason)
    parts = []
    if standing.left:
        parts.append(f"{_captures(len(standing.left))} not in the store yet")
    if standing.removals:
        parts.append(f"{_captures(len(standing.removals))} still to be removed there")
    first = next(iter(reasons), "")
    return " and ".join(parts) + (f" ({first}{', ...' if len(reasons) > 1 else ''})" if first else "")


def _captures(count: int) -> str:
    return "1 capture is" if count == 1 else f"{count} captures are"


_behind: set[Path] = set()


def push(path: Path) -> None:
    """Bring the copies of a run's captures up to date, if it has any, after a change here.

    A change that does not reach the store now is logged, once, and reaches it with the next upload.
    """
    directory = RunDirectory(path)
    try:
        info = read_info(directory)
    except InputError:
        return
    if info.store is None or path in _behind:
        return
    try:
        uploader = uploader_of(directory, info, changes_only=True, resend=False, tries=1)
    except UsageError as error:
        problem = str(error)
    else:
        uploader.start()
        standing = follow(uploader, PUSH_S, PUSH_S)
        uploader.close(UPLOADS_CLOSE_S)
        if standing.done or standing.taken:
            return
        problem = what_is_left(standing)
    _behind.add(path)
    finish = f"finish with: sftriage traces upload --run {place(path)}"
    log.warning("the copy in %s is not up to date: %s; %s", info.store, problem, finish)


class SharedIndexing(Sink):
    """Keeps a shared catalogue up to date with a run's store; UsageError if its URL is wrong or its driver missing.

    It compares what the store holds with what the catalogue was last known to hold, so the next comparison
    catches up after an outage of the catalogue.
    """

    name = "catalogue"

    def __init__(self, root: Path, url: str, *, poll_s: float = POLL_S, retry_s: float = RETRY_S) -> None:
        self._store = LocalStore(root)
        self._url, self._catalogue = url, _catalogue(url, self._store)
        self._copies: dict[str, tuple[str, str]] = {}
        self._indexed: dict[str, str | None] | None = None
        self._loop = Loop(
            *("index", self._compare, poll_s),
            failing="captures are stored but not catalogued",
            works=f"the catalogue {self._catalogue.name} is up to date again",
            expected=(SftriageError,),
            backoff=Backoff(retry_s, retry_s),
        )

    def start(self) -> None:
        self._loop.start()

    def take(self, event: Event | Observation) -> None:
        """Index a stored capture now, unless the catalogue is down."""
        if isinstance(event, CaptureChanged) and event.result.state == "stored":
            self._loop.wake()

    def finish(self, say: Callable[[str], None], left_s: Callable[[], float] = lambda: CATALOGUE_CLOSE_S) -> None:
        """Bring the catalogue up to date once more, in the time that is left, and say if it may lack captures."""
        if not self._loop.stop(min(CATALOGUE_CLOSE_S, left_s()), last_turn=True) or self._loop.problem:
            say(f"the catalogue {self._catalogue.name} may lack captures; add them with: sftriage traces reindex")

    def _compare(self) -> None:
        held: dict[str, str | None] = {}
        for capture_id in self._store.ids():
            upload = self._store.noted_upload(capture_id)
            whole = upload is not None and upload.state == "stored" and upload.verified_at is not None
            held[capture_id] = upload.url if upload is not None and whole else None
        if held != self._indexed:
            self._catalogue.refresh()
            self._index_copies(held)
            self._indexed = held

    def _index_copies(self, held: dict[str, str | None]) -> None:
        for capture_id, url in held.items():
            if url is None or capture_id in self._copies:
                continue
            try:
                manifest = self._store.manifest(capture_id)
            except SftriageError:
                continue
            _catalogue(self._url, RemoteStore.open(url)).add(manifest)
            self._copies[capture_id] = (url, CaptureKey.of(manifest).key)
        for capture_id in self._copies.keys() - held.keys():
            url, reference = self._copies[capture_id]
            _catalogue(self._url, RemoteStore.open(url)).drop(reference)
            del self._copies[capture_id]


def checked_catalogue(option: str | None) -> str | None:
    """The URL of the catalogue to index a run in, if one is named; the catalogue need not be there yet."""
    url = catalogue_url(option)
    if url is not None:
        _catalogue(url, None)
    return url


def _catalogue(url: str, store: Store | None) -> Catalogue:
    from sftriage.traces.catalogue import Catalogue  # a third of a run's imports, only with a catalogue

    return Catalogue(url, store)
