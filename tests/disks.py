"""Small real disks that can be filled, emptied, made read-only, and stopped."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import needs


def _run(*command: object) -> bool:
    return subprocess.run([str(word) for word in command], capture_output=True).returncode == 0


class SmallDisk:
    """A file system of a few pages, at `path`. Some are served by a process."""

    def __init__(self, path: Path, server: subprocess.Popen | None = None) -> None:
        self.path, self._server = path, server
        self._filler = path / "filler"

    def fill(self) -> None:
        """Take every byte that is left."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 20)):
                pass

    def leave(self, size_bytes: int) -> None:
        """Of a disk that is full, give so many bytes back."""
        os.truncate(self._filler, self._filler.stat().st_size - size_bytes)

    def fill_names(self) -> None:
        """Take every inode that is left."""
        self._filler.mkdir()
        with contextlib.suppress(OSError):
            for number in range(10**6):
                (self._filler / str(number)).touch()

    def empty(self) -> None:
        """Give back what was taken."""
        _run("rm", "-rf", self._filler)

    def remount(self, options: str) -> None:
        assert _run("mount", "-o", f"remount,{options}", self.path)

    def stop(self) -> None:
        """Stop the process that serves it, as a server that has gone: whoever uses it waits."""
        self._server.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._server.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def small_disk(path: Path, size: str = "256k", names: int = 200) -> Iterator[SmallDisk]:
    """A tmpfs of so many bytes and names; the test is skipped where none can be mounted."""
    path.mkdir()
    if not _run("mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={names}", "tmpfs", path):
        pytest.skip(needs.NO_MOUNT)
    try:
        yield SmallDisk(path)
    finally:
        _run("umount", "--lazy", path)


@contextlib.contextmanager
def served_disk(folder: Path) -> Iterator[SmallDisk]:
    """A directory behind a server of files (FUSE), which can be stopped; skipped where there is none."""
    path, served = folder / "disk", folder / "served"
    path.mkdir()
    served.mkdir()
    with subprocess.Popen(
        ["bindfs", "-f", served, path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        disk = SmallDisk(path, server)
        try:
            while not path.is_mount():
                if server.poll() is not None:
                    pytest.skip(needs.NO_MOUNT)
                time.sleep(0.01)
            yield disk
        finally:
            disk.go_on()
            _run("umount", "--lazy", path)
            server.terminate()
