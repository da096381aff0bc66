"""Deleting the trace of a TraceCapture that is being deleted: the store is asked here, and what comes of it is said."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from sftriage.errors import InputError, StoreError, UsageError
from sftriage.kube.captures import Body, Removal, removal
from sftriage.kube.objects import StoredTrace
from sftriage.traces.objects import checked_url
from sftriage.traces.remote import RemoteStore
from sftriage.traces.stores import PIN_NAME
from sftriage.words.objects import removal_sentence

RETRY_S = 15.0
"""How long after a store could not be reached it is tried again."""


@dataclass(frozen=True, slots=True)
class Remover:
    """Deletes traces, in ``stores`` alone: a status may name any place, and ours are the rights to delete there."""

    stores: Collection[str]
    open: Callable[[str], RemoteStore] = RemoteStore.open

    def remove(self, body: Body, now_s: float) -> Removal:
        """Do what is to become of a trace: nothing is left to do where the answer is not to ``wait``."""
        wanted = removal(body, now_s)
        return wanted if wanted.stored is None else self._remove(wanted.stored)

    def _remove(self, stored: StoredTrace) -> Removal:
        try:
            if checked_url(stored.store) not in self.stores:
                return _later("elsewhere", stored)
            store = self.open(stored.store)
            names = store.names(stored.reference)
            if not names:
                return Removal("release", removal_sentence("gone", place=stored.store))
            if PIN_NAME in names:
                return Removal("release", removal_sentence("pinned", place=stored.store))
            store.remove(stored.reference)
        except (UsageError, InputError, StoreError) as error:
            return _later("unreachable", stored, str(error))
        return Removal("release", removal_sentence("removed", place=stored.store))


def _later(code: str, stored: StoredTrace, problem: str = "") -> Removal:
    return Removal("wait", removal_sentence(code, place=stored.store, problem=problem), wait_s=RETRY_S)
