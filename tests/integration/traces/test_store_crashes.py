"""Real processes, killed: whatever the instant, a capture is there whole or not at all."""

import contextlib
import errno
import gzip
import multiprocessing
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

from sftriage.errors import CaptureError
from sftriage.traces.store import TRACE_NAME, LocalStore
from tests.unit.conftest import keep

# Forked, because fifteen interpreters that import pydantic would take longer than all of the tests.
FORK = multiprocessing.get_context("fork")
KILLS = 15


def verified(store: LocalStore, source: bytes, directory: Path) -> int:
    """How many captures are listed; each of them has been fetched, verified and unpacked."""
    listing = store.manifests()
    assert not listing.unfit
    for manifest in listing.manifests:
        copy = store.get(manifest.capture_id, TRACE_NAME, directory / "copy.gz", force=True)
        assert gzip.decompress(copy.read_bytes()) == source
    return len(listing.manifests)


def leftovers(root: Path) -> int:
    return len(list((root / "captures").glob(".tmp-*")))


def put_for_ever(root: Path, trace: Path, prefix: str, ready: Connection) -> None:
    for number in count():
        ready.send("go")
        keep(root, f"{prefix}-{number}", trace)


def test_killed_at_random_instants(tmp_path: Path) -> None:
    """GIVEN a process that stores one capture after another WHEN it is killed THEN only whole captures are listed."""
    rng = random.Random(7)
    root, trace = tmp_path / "run", tmp_path / "trace.json"
    source = rng.randbytes(300_000).hex().encode()  # compresses badly: most of a put is spent writing
    trace.write_bytes(source)
    store, listed, interrupted = LocalStore(root), 0, 0
    for kill in range(KILLS):
        here, there = FORK.Pipe()
        child = FORK.Process(target=put_for_ever, args=(root, trace, f"k{kill}", there))
        child.start()
        here.recv()
        began_s = time.monotonic()
        here.recv()
        # One is stored; within about as long the next one is.
        time.sleep(rng.uniform(0.0, time.monotonic() - began_s))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        left = leftovers(root)
        interrupted += left
        assert (store.sweep(), leftovers(root)) == (left, 0)
        listed = verified(store, source, tmp_path)
    # Else nothing was stored, or nothing was interrupted, and this test has shown nothing.
    assert listed > KILLS // 3
    assert interrupted > KILLS // 3


def die_at(call: int, root: Path, trace: Path) -> None:
    """Store a capture, and be killed just before the given one of the calls that make it durable."""
    remaining = call

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object) -> object:
            nonlocal remaining
            remaining -= 1
            if remaining < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        return wrapped

    os.fsync = dying(os.fsync)  # in a process of its own
    Path.rename = dying(Path.rename)
    keep(root, "c-1", trace)


def test_killed_before_each_call_that_makes_it_durable(tmp_path: Path, trace: Path) -> None:
    """GIVEN a kill before the 1st, 2nd, … sync or rename THEN no capture until the rename, and a whole one after it."""
    history = []
    for call in count():
        root = tmp_path / f"run-{call}"
        child = FORK.Process(target=die_at, args=(call, root, trace))
        child.start()
        child.join()
        store = LocalStore(root)
        listed = verified(store, trace.read_bytes(), tmp_path)
        history.append((listed, leftovers(root)))
        store.sweep()
        assert leftovers(root) == 0
        if not listed:
            # What was left does not stand in the way of trying again.
            keep(root, "c-1", trace)
        assert verified(store, trace.read_bytes(), tmp_path) == 1
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    # The store's own directory, trace, manifest, staging directory, rename; then the parent, and the end.
    assert history == [(0, 0), (0, 1), (0, 1), (0, 1), (0, 1), (1, 0), (1, 0)]


def put_on_a_full_disk(root: Path, trace: Path, answer: Connection) -> None:
    # Like a full disk, the limit lets a file grow so far and then fails the write.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        keep(root, "c-2", trace)
    except CaptureError as error:
        answer.send((str(error), error.__cause__.errno if isinstance(error.__cause__, OSError) else None))
    else:
        answer.send(("stored", None))


def test_a_disk_that_fills_up_leaves_what_was_there_and_nothing_else(tmp_path: Path, trace: Path) -> None:
    root, large = tmp_path / "run", tmp_path / "large.json"
    large.write_bytes(random.Random(7).randbytes(400_000))
    keep(root, "c-1", trace)
    here, there = FORK.Pipe()
    child = FORK.Process(target=put_on_a_full_disk, args=(root, large, there))
    child.start()
    said, number = here.recv()
    child.join()
    assert (said, number) == ("capture c-2 could not be stored: File too large", errno.EFBIG)
    assert leftovers(root) == 0
    assert verified(LocalStore(root), trace.read_bytes(), tmp_path) == 1


def put_two(root: Path, trace: Path, number: int) -> None:
    keep(root, f"own-{number}", trace)
    with contextlib.suppress(CaptureError):
        keep(root, "same", trace)


def test_many_processes_put_at_once_and_one_of_them_wins(tmp_path: Path, trace: Path) -> None:
    root = tmp_path / "run"
    children = [FORK.Process(target=put_two, args=(root, trace, number)) for number in range(6)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 6
    assert verified(LocalStore(root), trace.read_bytes(), tmp_path) == 7
    assert leftovers(root) == 0
