"""A store of several jobs in a shared directory, and its page."""

import gzip
import hashlib
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sftriage.traces.catalogue import Catalogue
from sftriage.traces.manifest import Artefact, Manifest, ReproducedInfo
from sftriage.traces.remote import CaptureKey, RemoteStore
from sftriage.web.serving import Access
from sftriage.web.store_page import StorePage, StoreSource, StoreView
from tests.integration.processes import wait_until
from tests.unit.conftest import manifest_of
from tests.unit.web.client import Answer, fetch

NOW = datetime(2027, 1, 15, 12, tzinfo=timezone.utc)
CONTENT = gzip.compress(b'{"traceEvents": []}' * 1000, mtime=0)


def trace_of(content: bytes) -> Artefact:
    digest = hashlib.sha256(content).hexdigest()
    about = {"role": "trace", "media_type": "application/gzip", "size_bytes": len(content), "sha256": digest}
    return Artefact(name="trace.json.gz", **about)


@dataclass
class Shelf:
    root: Path
    source: StoreSource
    app: Any
    made: list[Manifest] = field(default_factory=list)

    def put(self, capture_id: str, job: str = "resnet", run: str = "run-1", **about: Any) -> Manifest:
        update = {"job": job, "run": run, **about.pop("update", {})}
        manifest = manifest_of(capture_id, trace_of(CONTENT), **about).model_copy(update=update)
        directory = self.directory(manifest)
        directory.mkdir(parents=True)
        (directory / "trace.json.gz").write_bytes(CONTENT)
        (directory / "manifest.json").write_bytes(manifest.to_json())
        return manifest

    def stock(self) -> "Shelf":
        again = ReproducedInfo(answer="yes", steps=5, steps_with=5, over_s=0.1, expected_s=0.1)
        self.put("c-1", second=1)
        self.put("c-2", rank=3, stage="forward", second=2)
        self.put("c-1", run="run-2", second=3, update={"reproduced": again})
        self.put("c-4", job="gpt 7b/ü", second=4)
        self.look()
        return self

    def directory(self, manifest: Manifest) -> Path:
        return self.root / CaptureKey.of(manifest).key

    def look(self) -> StoreView:
        """Have the source read the store again; its view."""
        before = self.source.view()
        self.source._due_s = float("-inf")
        self.source.view()
        wait_until(lambda: not self.source._busy)
        view = self.source._view
        assert view is not before
        return view

    def get(self, target: str = "/", **options: Any) -> Answer:
        return fetch(self.app, target, **options)


def shelf_at(path: Path, catalogue: Path) -> Shelf:
    path.mkdir(exist_ok=True)
    store = RemoteStore.open(str(path))
    source = StoreSource(Catalogue(catalogue, store), store, lambda row: store)
    app = StorePage(source, Access.to("127.0.0.1", None, ""), lambda: NOW.timestamp()).app
    return Shelf(path, source, app)
