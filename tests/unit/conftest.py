import json
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

from sftriage.commands import main
from sftriage.model.captures import CaptureRequest, CaptureResult, Profiler, Trigger
from sftriage.runs.directory import RunDirectory, RunInfo, create
from sftriage.traces.manifest import Artefact, CaptureInfo, Manifest, TriggerInfo, may_contain
from sftriage.traces.remote import RemoteStore
from sftriage.traces.store import LocalStore

MEMORY, ROOM_BYTES = Path("/dev/shm"), 2 << 30
"""Where files are in memory, and how much has to be free there."""
MakeManifest = Callable[..., Manifest]
Put = Callable[..., Manifest]

SOME = Artefact(name="trace.json.gz", role="trace", media_type="application/gzip", size_bytes=7, sha256="ab" * 32)


def cases(path: Path) -> list[tuple[str, str]]:
    """The cases of a text table: what is given, and on the line below what comes of it; ``#`` begins a comment."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return list(zip(lines[::2], lines[1::2], strict=True))


def manifest_of(
    capture_id: str,
    artefact: Artefact = SOME,
    *,
    rank: int = 2,
    stage: str | None = "data",
    first_step: int = 160,
    steps: int = 5,
    role: str = "suspect",
    window: tuple[int, int] = (100, 149),
    rule: str = "slow-rank",
    second: int = 0,
    profiler: Profiler = "torch",
) -> Manifest:
    trigger = Trigger(*window, "suspect", "rank", (rank,), stage, 0.02, 0.3, 0.9, "default", "cd" * 32, rule)
    request = CaptureRequest(capture_id, rank, profiler, 5, 1, 60.0, 2**29, role=role)
    result = CaptureResult(
        capture_id,
        rank,
        "stored",
        first_step=first_step,
        last_step=first_step + steps - 1,
        timings_s={"start": 0.1, "stop": 0.2},
        clock={"monotonic_ns": 5, "epoch_ns": 1_800_000_000_000_000_000},
    )
    return Manifest(
        capture_id=capture_id,
        job="resnet",
        run="run-1",
        created_at=datetime(2027, 1, 15, 8, 0, second, tzinfo=timezone.utc),
        trigger=TriggerInfo.of(trigger),
        capture=CaptureInfo.of(request, result, world_size=8, host="node-1"),
        artefacts=(artefact,),
        may_contain=may_contain({}),
    )


def asked_for(manifest: Manifest, why: str = "requested by ada: why is the loader slow?") -> Manifest:
    """The same capture, had a person asked for it."""
    nothing = {"stage": None, "gain_s": 0.0, "share": 0.0, "persistence": 0.0, "rule": ""}
    trigger = manifest.trigger.model_copy(update={"label": "asked", "why": why, **nothing})
    return manifest.model_copy(update={"trigger": trigger})


def run_in(path: Path, policy: str = "", **about: Any) -> RunDirectory:
    """A run in which nothing has happened yet."""
    info = RunInfo("run-1", "resnet", "2026-03-01T00:00:00+00:00", ("true",), "default", "0" * 64, "/nowhere")
    return create(path, replace(info, **about), policy)


def run_going_on(path: Path) -> RunDirectory:
    """A run that goes on, as far as its rings say: a directory of that name beside it."""
    rings = path.with_name("rings")
    rings.mkdir()
    return run_in(path, rings=str(rings))


@pytest.fixture(scope="session", autouse=True)
def no_test_waits_for_the_disk() -> Iterator[None]:
    """What a test wrote it reads back itself: none pulls the plug, and a disk that others use may take long.

    Where there is room for it in memory, no disk is written to at all: files that come and go take most of the time of
    many a test.
    """
    connect = sqlite3.connect

    def connect_unsynced(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        # Of a file that is no database it is the product that is to find out.
        with suppress(sqlite3.DatabaseError):
            connection.execute("PRAGMA synchronous = OFF")
        return connection

    def check_open(descriptor: int) -> None:
        os.fstat(descriptor)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as held:
        patch.setattr(sqlite3, "connect", connect_unsynced)
        patch.setattr(os, "fsync", check_open)
        if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM_BYTES:
            patch.setattr(tempfile, "tempdir", held.enter_context(TemporaryDirectory(prefix="unit-", dir=MEMORY)))
        yield


@pytest.fixture
def tmp_path(no_test_waits_for_the_disk: None) -> Iterator[Path]:
    """An empty directory, which is gone after the test: what thousands of them leave would fill the memory."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.fixture(scope="module")
def module_path(no_test_waits_for_the_disk: None) -> Iterator[Path]:
    """An empty directory for what the tests of a module make once and only look at."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.fixture(scope="session")
def make_manifest() -> MakeManifest:
    return manifest_of


TRACE = json.dumps({"traceEvents": [{"name": f"op{at}", "ph": "X", "ts": at, "dur": 1} for at in range(2000)]})


def keep(root: Path, capture_id: str, source: Path | None = None, content: str = TRACE, **about: Any) -> Manifest:
    """Put a capture into the store of a run: of a trace that is there, or of some ``content``."""
    its = {name: about.pop(name) for name in ("job", "run", "reproduced") if name in about}
    with TemporaryDirectory() as folder:
        if source is None:
            source = Path(folder, "trace.json")
            source.write_text(content)
        made = partial(manifest_of, capture_id, **about)
        return LocalStore(root).put(capture_id, source, lambda artefact: made(artefact).model_copy(update=its))


def copied(store: LocalStore, remote: RemoteStore, manifest: Manifest) -> Manifest:
    """Put a capture of a run into a store elsewhere too."""
    for artefact in manifest.artefacts:
        content = store.path(manifest.capture_id, artefact.name).read_bytes()
        remote.put_artefact(manifest.capture_id, artefact, content)
    remote.put_manifest(manifest)
    return manifest


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace as torch.profiler writes it, small."""
    path = tmp_path / "exported.json"
    path.write_text(TRACE)
    return path


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


@pytest.fixture
def put(store: LocalStore, trace: Path) -> Put:
    """Put a capture into the store."""

    return partial(keep, Path(store.place).parent, source=trace)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON value that a command has printed, which went well."""
        assert self.code == 0, self.err
        return json.loads(self.out)

    @property
    def refusal(self) -> str:
        """What a command says that refuses what a person can mend, and does nothing."""
        assert (self.code, self.out) == (2, "")
        return self.err


@pytest.fixture
def sftriage(monkeypatch, capsys, tmp_path) -> Callable[..., Outcome]:
    """Run a command; its exit code and what it wrote. Its home is its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["sftriage", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        written = capsys.readouterr()
        return Outcome(caught.value.code or 0, written.out, written.err)

    return call
