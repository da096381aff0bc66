"""Of several operators one works: the one that holds a Lease of the cluster, which it renews."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from sftriage.base.loops import Loop
from sftriage.errors import ClusterError
from sftriage.kube.client import NOT_FOUND, STALE, AnsweredError, ClusterObjects, ask_unless, path_of

log = logging.getLogger(__name__)

DURATION_S, RENEW_S = 15, 5.0
"""A lease that is not renewed for so long is another's to take."""
API = "coordination.k8s.io/v1"


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """Who was seen to hold a lease, when that was renewed by its own words, and since when it says so by our clock."""

    holder: str = ""
    renewed: str = ""
    since_s: float = 0.0

    def after(self, spec: Mapping[str, Any], now_s: float) -> ObservedLease:
        """What is known once the lease was seen so: clocks of others are not believed, only that something changed."""
        holder, renewed = str(spec.get("holderIdentity") or ""), str(spec.get("renewTime") or "")
        return self if (holder, renewed) == (self.holder, self.renewed) else ObservedLease(holder, renewed, now_s)

    def free_for(self, me: str, duration_s: float, now_s: float) -> bool:
        """Whether somebody may take it."""
        return self.holder in ("", me) or now_s > self.since_s + duration_s


class LeaderElection:
    """A candidate called ``me``, for the lease ``name`` of a namespace; ``now`` is monotonic, in seconds."""

    def __init__(
        self, objects: ClusterObjects, namespace: str, name: str, me: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._objects, self._me, self._now = objects, me, now
        self._where, self._name, self._namespace = path_of(API, "leases", namespace), name, namespace
        self._seen = ObservedLease()
        self._renewed_s = 0.0
        self._loop = Loop("lease", self._renew, RENEW_S, failing="the lease cannot be renewed")
        self.lost = threading.Event()
        """Set once it is held no longer; then ``told`` is called, from that thread."""
        self.told: Callable[[], object] = lambda: None

    def lead(self) -> None:
        """Wait until it is held, and hold it from then on, in a thread of its own."""
        said = ""
        while not self._tried():
            if self._seen.holder != said:
                said = self._seen.holder
                log.info("%s leads; waiting", said)
            self._loop.stopping.wait(RENEW_S / 2)
        log.info("leading as %s", self._me)
        self._loop.start()

    def release(self) -> None:
        """Let another one lead at once."""
        self._loop.stop(2 * RENEW_S)
        if not self.lost.is_set():
            try:
                self._write(self._objects.ask("GET", f"{self._where}/{self._name}"), "")
            except ClusterError as error:
                log.debug("the lease goes by itself: %s", error)

    def _renew(self) -> None:
        if not self._tried() and (
            self._now() > self._renewed_s + DURATION_S or self._seen.holder not in ("", self._me)
        ):
            log.error("the lease is lost, to %s", self._seen.holder or "nobody")
            self._loop.stopping.set()
            self.lost.set()
            self.told()

    def _tried(self) -> bool:
        """Take or renew the lease if possible; whether that was done."""
        began_s = self._now()
        try:
            about = {"name": self._name, "namespace": self._namespace}
            missing: dict[str, Any] = {"apiVersion": API, "kind": "Lease", "metadata": about}
            body = ask_unless(self._objects, NOT_FOUND, "GET", f"{self._where}/{self._name}") or missing
            spec = body.get("spec") or {}
            self._seen = self._seen.after(spec, began_s)
            duration_s = float(spec.get("leaseDurationSeconds") or DURATION_S)
            if not self._seen.free_for(self._me, duration_s, began_s):
                return False
            self._write(body, self._me)
        except ClusterError as error:
            if not (isinstance(error, AnsweredError) and error.status == STALE):
                log.warning("the lease cannot be had now: %s", error)
            return False
        self._renewed_s = began_s
        return True

    def _write(self, body: dict[str, Any], holder: str) -> None:
        """Write who holds it, if it is still as it was read.

        Raises:
            ClusterError: it was not written.
        """
        spec, now = dict(body.get("spec") or {}), datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if spec.get("holderIdentity") != holder:
            spec |= {"acquireTime": now, "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1}
        spec |= {"holderIdentity": holder, "leaseDurationSeconds": DURATION_S, "renewTime": now}
        there = "resourceVersion" in body["metadata"]
        path = f"{self._where}/{self._name}" if there else self._where
        self._objects.ask("PUT" if there else "POST", path, {**body, "spec": spec})
