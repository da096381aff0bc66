"""Small real disks that can be filled, emptied, made read-only, and frozen."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import needs


def _run(*command: object) -> bool:
    return subprocess.run([str(word) for word in command], capture_output=True).returncode == 0


class SmallDisk:
    """A file system of a few pages, at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
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

    def freeze(self) -> None:
        """Have whoever writes wait, as for a server that has gone."""
        assert _run("fsfreeze", "-f", self.path)

    def thaw(self) -> None:
        _run("fsfreeze", "-u", self.path)


@contextlib.contextmanager
def small_disk(path: Path, size: str = "256k") -> Iterator[SmallDisk]:
    """A tmpfs of so many bytes and of 200 names; the test is skipped where none can be mounted."""
    path.mkdir()
    if not _run("mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes=200", "tmpfs", path):
        pytest.skip(needs.NO_MOUNT)
    try:
        yield SmallDisk(path)
    finally:
        _run("umount", "--lazy", path)


@contextlib.contextmanager
def freezing_disk(folder: Path) -> Iterator[SmallDisk]:
    """An ext4 in a file, which can be frozen; the test is skipped where none can be mounted."""
    image, path = folder / "image", folder / "disk"
    path.mkdir()
    image.touch()
    os.truncate(image, 32 << 20)
    if not (_run("mkfs.ext4", "-q", image) and _run("mount", "-o", "loop", image, path)):
        pytest.skip(needs.NO_MOUNT)
    disk = SmallDisk(path)
    try:
        yield disk
    finally:
        disk.thaw()
        _run("umount", "--lazy", path)
