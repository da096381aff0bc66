"""Objects that are watched: as the server has them now, whatever was missed meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from sftriage.errors import ClusterError
from sftriage.kube.client import GONE, AnsweredError, ClusterObjects

log = logging.getLogger(__name__)

PAGE = 500
"""So many objects are read at once: those of a large cluster are never in memory together."""
WATCH_S = 300
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0

Kept = TypeVar("Kept")
Key = tuple[str, str]
"""Namespace and name."""


class ObjectWatch(threading.Thread, Generic[Kept]):
    """Some objects of a kind, in a thread of its own that lists them, and then watches what becomes of them.

    Where the server has forgotten what was before, or a connection broke, they are listed anew: what is missing then
    has gone. A server that is away is waited for, and what was seen last stays until it is back.

    Args:
        objects: the server.
        path: where they are, see `client.path_of`.
        keep: what is kept of each.
        changed: is told what was kept of one and what is now; None where it was or is not there. From that thread.
        about: what a list leaves out of each, its ``apiVersion`` and ``kind``.
        query: selectors, as the server has them.
        watch_s: how long one watch lasts before it is begun again; a network that drops it in silence is noticed then.
    """

    def __init__(
        self,
        objects: ClusterObjects,
        path: str,
        keep: Callable[[dict[str, Any]], Kept],
        changed: Callable[[Kept | None, Kept | None], None],
        *,
        about: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        watch_s: int = WATCH_S,
    ) -> None:
        super().__init__(name=f"sftriage-watch-{path.rpartition('/')[2]}", daemon=True)
        self._objects, self._path, self._keep, self._changed = objects, path, keep, changed
        self._about, self._query, self._watch_s = dict(about or {}), dict(query or {}), watch_s
        self._kept: dict[Key, Kept] = {}
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._said = ""
        self.listed = threading.Event()
        """Set once all of them have been seen."""

    def kept(self) -> list[Kept]:
        """What is kept of all of them now."""
        with self._lock:
            return list(self._kept.values())

    def end(self) -> None:
        """Watch no longer than until something happens."""
        self._ending.set()

    def run(self) -> None:
        """List and watch, until the end."""
        pause_s = _PAUSE_S
        while not self._ending.is_set():
            try:
                version = self._list()
                self.listed.set()
                pause_s, self._said = _PAUSE_S, ""
                while not self._ending.is_set():
                    version = self._follow(version)
            except ClusterError as error:
                if isinstance(error, AnsweredError) and error.status == GONE:
                    continue
                if str(error) != self._said:
                    self._said = str(error)
                    log.warning("%s cannot be watched, and is tried again: %s", self._path, error)
                self._ending.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _list(self) -> str:
        seen, token = set(), None
        while True:
            query: dict[str, Any] = {**self._query, "limit": PAGE, "continue": token}
            page = self._objects.ask("GET", self._path, **query)
            for body in page.get("items") or ():
                seen.add(_key(body))
                self._put({**self._about, **body})
            token = page["metadata"].get("continue")
            if not token:
                break
        with self._lock:
            gone = self._kept.keys() - seen
        for key in gone:
            self._drop(key)
        return str(page["metadata"].get("resourceVersion", ""))

    def _follow(self, version: str) -> str:
        for event in self._objects.watch(self._path, self._watch_s, resourceVersion=version, **self._query):
            if self._ending.is_set():
                break
            body = event["object"]
            version = str(body["metadata"].get("resourceVersion", version))
            if event["type"] == "DELETED":
                self._drop(_key(body))
            elif event["type"] in ("ADDED", "MODIFIED"):
                self._put({**self._about, **body})
        return version

    def _put(self, body: dict[str, Any]) -> None:
        now = self._keep(body)
        with self._lock:
            before, self._kept[_key(body)] = self._kept.get(_key(body)), now
        if before != now:
            self._changed(before, now)

    def _drop(self, key: Key) -> None:
        with self._lock:
            before = self._kept.pop(key, None)
        if before is not None:
            self._changed(before, None)


def _key(body: Mapping[str, Any]) -> Key:
    return str(body["metadata"].get("namespace", "")), str(body["metadata"]["name"])
