"""The copies of a run's captures that are kept in a store elsewhere: made while it runs, and told how far they are."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from sftriage.errors import InputError, UsageError
from sftriage.model.events import CaptureChanged, Event, Sight
from sftriage.runs.directory import RunDirectory, RunInfo, read_info, write_info
from sftriage.sinks.stream import Sink
from sftriage.traces.remote import RemoteStore, checked_url
from sftriage.traces.uploading import Uploader, UploadProgress
from sftriage.words.amounts import place

log = logging.getLogger("sftriage")

Show = Callable[[UploadProgress], None]
"""Who shows how far uploads are."""

LIMIT_S = 900.0
"""How long after the end of a run its uploads may take, and, while nothing moves, how long it is waited for more."""
STILL_S = 60.0
PUSH_S = 60.0
_CLOSE_S = 5.0
_TICK_S = 0.25


def uploader_of(directory: RunDirectory, info: RunInfo, **how: Any) -> Uploader:
    """Who uploads a run's captures to the store that its record names; nothing is asked of that yet.

    Raises:
        UsageError: the store cannot be opened, or the job's name cannot be part of a key there.
    """
    if info.store is None:
        raise ValueError("the run keeps its captures here alone")
    url = checked_url(info.store)
    remote = RemoteStore.open(url, job=info.job, run=info.run_id, create=True)
    return Uploader(directory.path, remote, url, **how)


def checked_store(url: str, job: str) -> str:
    """A store that a job's captures may be kept in, by its URL as it is written down.

    Raises:
        UsageError: it cannot be opened, or the job's name cannot be part of a key there.
    """
    RemoteStore.open(url, job=job, run="run", create=True)
    return checked_url(url)


def with_store(directory: RunDirectory, info: RunInfo, store: str | None) -> RunInfo:
    """The run's record, which names the store: a run has one, so that findings and removals reach every copy.

    Raises:
        UsageError: none is named, or another than the run's own.
    """
    if store is None:
        if info.store is None:
            raise UsageError(f"{directory.path} keeps its captures here alone; say where to with --store")
        return info
    url = checked_url(store)
    if info.store is not None and checked_url(info.store) != url:
        raise UsageError(f"the captures of {directory.path} go to {info.store}; a run has one store")
    if info.store is None:
        info = replace(info, store=url)
        write_info(directory, info)
    return info


class RunUploads(Sink):
    """The uploads of a run while it goes on. Whoever made them finishes them, after the stream has ended.

    Raises:
        UsageError: see `uploader_of`.
    """

    name = "uploads"

    def __init__(self, directory: RunDirectory, info: RunInfo) -> None:
        self._directory, self._info = directory, info
        self._uploader = uploader_of(directory, info, keep_local=not info.drop_local)

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._uploader.start()

    def take(self, seen: Event | Sight) -> None:
        """Once a capture is stored, nothing of this run reads its trace any more."""
        if isinstance(seen, CaptureChanged) and seen.result.state == "stored":
            self._uploader.release(seen.result.capture_id)

    def finish(
        self,
        say: Callable[[str], None],
        show: Show = lambda _: None,
        left_s: Callable[[], float] = lambda: float("inf"),
    ) -> None:
        """Wait for what is under way, as long as it moves, and say what is left and how to finish it.

        ``left_s`` says how long that may take from now on.
        """
        self._uploader.release_all()
        standing = follow(self._uploader, LIMIT_S, STILL_S, show, lambda: left_s() <= 0.0)
        # (a thread in the middle of an upload may be left behind: what it has not sent is sent another time)
        self._uploader.close(min(_CLOSE_S, left_s()))
        if standing.stored:
            say(f"{_captures(standing.stored)} in {self._info.store}")
        if not standing.done:
            say(f"{what_is_left(standing)}; finish with: sftriage traces upload --run {place(self._directory.path)}")


def follow(
    uploader: Uploader,
    limit_s: float,
    still_s: float,
    show: Show = lambda _: None,
    over: Callable[[], bool] = lambda: False,
) -> UploadProgress:
    """Show how far the uploads are until there is nothing more to wait for; how they stand then.

    It is waited no longer than ``limit_s``, nor for ``still_s`` without a byte that moves, nor once it is ``over``, nor
    past a Ctrl-C.
    """
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
        return "another process uploads this run's captures"
    if not standing.looked:
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


def pusher(directory: RunDirectory) -> Callable[[], None]:
    """What brings a run's copies up to date, if it has any, once something was changed here.

    What does not reach the store now is said, once, and reaches it with the next upload.
    """
    try:
        info = read_info(directory)
    except InputError:
        return lambda: None
    if info.store is None:
        return lambda: None
    away: list[str] = []

    def push() -> None:
        if away:
            return
        try:
            uploader = uploader_of(directory, info, changes_only=True, tries=1)
        except UsageError as error:
            away.append(str(error))
        else:
            uploader.start()
            standing = follow(uploader, PUSH_S, PUSH_S)
            uploader.close(_CLOSE_S)
            if standing.done or standing.taken:
                return
            away.append(what_is_left(standing))
        log.warning(
            "the copy in %s is not up to date: %s; finish with: sftriage traces upload --run %s",
            info.store,
            away[0],
            place(directory.path),
        )

    return push
