"""Captures as a cluster has them: objects whose statuses the operator writes, and their traces in a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sftriage.kube.statuses import KnownCapture, capture_status
from sftriage.model.captures import CaptureResult
from sftriage.traces.manifest import Manifest, ReproducedInfo
from sftriage.traces.remote import RemoteStore
from sftriage.traces.store import LocalStore
from tests.integration.kube import Cluster
from tests.integration.processes import wait_until
from tests.unit.conftest import manifest_of

CAPTURE_ID = "w100-149-r2-slow-rank-1"


def made(kind: str, name: str, spec: Any, **metadata: Any) -> dict[str, Any]:
    """An object of ours."""
    return {"apiVersion": "sftriage.dev/v1alpha1", "kind": kind, "metadata": {"name": name, **metadata}, "spec": spec}


def put_status(server: Cluster, namespace: str, plural: str, name: str, status: Any) -> None:
    """Write a status as the operator does, by its subresource; again where somebody else writes meanwhile."""
    path = f"/apis/sftriage.dev/v1alpha1/namespaces/{namespace}/{plural}/{name}/status"

    def written() -> bool:
        body = {**server.get(plural, name, namespace=namespace), "status": status}
        done = server.kubectl("replace", "--raw", path, "-f", "-", text=json.dumps(body), check=False)
        assert done.returncode == 0 or "the object has been modified" in done.stderr, done.stderr
        return done.returncode == 0

    wait_until(written, 60)


def stored_trace(folder: Path, url: str) -> tuple[RemoteStore, Manifest]:
    """A store with one trace, and its manifest."""
    trace = folder / "exported.json"
    trace.write_text('{"traceEvents": []}')
    run = LocalStore(folder / "run")
    manifest = run.put(CAPTURE_ID, trace, lambda artefact: manifest_of(CAPTURE_ID, artefact))
    found = ReproducedInfo(answer="yes", steps=5, steps_with=5, over_s=0.02, expected_s=0.02)
    manifest = manifest.model_copy(update={"reproduced": found})
    store = RemoteStore.open(url, job=manifest.job, run=manifest.run)
    for artefact in manifest.artefacts:
        store.put_artefact(CAPTURE_ID, artefact, run.path(CAPTURE_ID, artefact.name).read_bytes())
    store.put_manifest(manifest)
    return RemoteStore.open(url), manifest


def captured(server: Cluster, namespace: str, store: RemoteStore, manifest: Manifest, place: str = "") -> str:
    """A TraceCapture whose trace is stored; its name."""
    why = {"policy": "default", "rule": "slow-rank", "stage": "data", "first_step": 100, "last_step": 149}
    body = made("TraceCapture", "c", {"job": "resnet", "rank": 2, "reason": "slow", "trigger": why})
    server.create(body, namespace)
    result = CaptureResult(CAPTURE_ID, 2, "stored", first_step=160, last_step=164)
    seen = KnownCapture(result, manifest, place or store.place, f"resnet/run-1/{CAPTURE_ID}")
    status = {**capture_status(body, seen, 0.0).plain(), "observedGeneration": 1}
    put_status(server, namespace, "tracecaptures", "c", status)
    return "c"
