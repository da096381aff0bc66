"""A store of objects in memory, whose requests can be made to fail, and are counted."""

import hashlib
from collections.abc import Callable, Iterator

from obstore.store import MemoryStore

from sftriage.errors import StoreError
from sftriage.traces.manifest import Artefact, Manifest
from sftriage.traces.objects import Objects
from sftriage.traces.remote import Bucket, RemoteStore
from tests.unit.conftest import manifest_of

CONTENT = b"a trace " * 5000


class FaultyObjects(Bucket):
    """``fails``: words of requests that fail, as ``put manifest.json``, until they are taken out of it.

    ``meanwhile``: what happens just before the next request of such words.
    """

    def __init__(self) -> None:
        super().__init__(MemoryStore(), "s3://bucket")
        self.fails: set[str] = set()
        self.requests: list[str] = []
        self.meanwhile: dict[str, Callable[[], object]] = {}

    def _request(self, what: str, key: str) -> None:
        request = f"{what} {key.rpartition('/')[2]}"
        self.requests.append(request)
        self.meanwhile.pop(request, lambda: None)()
        if self.fails & {"any", what, request}:
            raise StoreError(f"s3://bucket: cannot {request}")

    def sizes(self, prefix: str | None = None) -> dict[str, int]:
        self._request("list", prefix or "")
        return super().sizes(prefix)

    def stream(self, key: str) -> Iterator[bytes]:
        self._request("get", key)
        return super().stream(key)

    def delete(self, key: str) -> None:
        self._request("delete", key)
        super().delete(key)

    def put(self, key: str, content: bytes | Iterator[bytes]) -> None:
        self._request("put", key)
        super().put(key, content)

    def put_so_far(self) -> list[str]:
        puts = [one.removeprefix("put ") for one in self.requests if one.startswith("put ")]
        self.requests.clear()
        return puts


def run_of(objects: Objects, job: str = "resnet", run: str = "run-1") -> RemoteStore:
    return RemoteStore(objects, job=job, run=run)


def captured(capture_id: str = "c-1", content: bytes = CONTENT, **about: object) -> Manifest:
    digest = hashlib.sha256(content).hexdigest()
    artefact = Artefact(
        name="trace.json.gz", role="trace", media_type="application/gzip", size_bytes=len(content), sha256=digest
    )
    return manifest_of(capture_id, artefact).model_copy(update=about)


def keep(objects: Objects, manifest: Manifest, content: bytes = CONTENT) -> Manifest:
    store = run_of(objects, manifest.job, manifest.run)
    store.put_artefact(manifest.capture_id, manifest.artefacts[0], content)
    store.put_manifest(manifest)
    return manifest
