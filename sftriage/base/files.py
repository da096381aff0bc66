"""Files: atomic writes, private files, opening without following links, small values; trainer and agents call it."""

from __future__ import annotations

import contextlib
import grp
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from sftriage.errors import InputError, SftriageError, UsageError

T = TypeVar("T")

MODE_ENV = "SFTRIAGE_FILE_MODE"
GROUP_ENV = "SFTRIAGE_FILE_GROUP"
"""Permissions (octal) and group (name or number) of what the recorder creates; by default only the owner has access."""

PRIVATE = 0o600
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def create(path: Path) -> int:
    """Create an empty file, private except for what `permit` allows; return a descriptor to read and write.

    Raises OSError if the file cannot be made, or exists.
    """
    descriptor = os.open(path, _NEW, PRIVATE)
    try:
        permit(descriptor)
    except OSError:
        os.close(descriptor)
        path.unlink()
        raise
    return descriptor


def permit(descriptor: int) -> None:
    """Give a new file the mode and the group that the environment names.

    Raises OSError if they are invalid, or not permitted.
    """
    mode, group = os.environ.get(MODE_ENV), os.environ.get(GROUP_ENV)
    try:
        if group:
            os.fchown(descriptor, -1, int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid)
        if mode:
            os.fchmod(descriptor, int(mode, 8) & 0o666)
    except (ValueError, KeyError) as error:
        raise OSError(f"{MODE_ENV}={mode}, {GROUP_ENV}={group}: {error}") from error


def private(path: Path, mode: int = PRIVATE) -> BinaryIO:
    """A new file, which only its owner can read, unless ``mode`` allows more."""
    return os.fdopen(os.open(path, _NEW, mode), "wb")


def open_regular(path: Path, error_type: type[SftriageError], flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file that others may have written. Refuses links and pipes: a pipe would never end.

    Raises ``error_type`` if the file cannot be opened, or is no regular file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, PRIVATE)
    except OSError as error:
        raise error_type(f"{path}: cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error_type(f"{path}: not a regular file")
    return descriptor


def regular(path: Path, error_type: type[SftriageError]) -> BinaryIO:
    """A file for reading; see `open_regular`."""
    return os.fdopen(open_regular(path, error_type), "rb")


@contextlib.contextmanager
def refusing(subject: str) -> Iterator[None]:
    """Raise a UsageError for an OSError: the subject, and the reason."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{subject}: {error.strerror}") from error


@contextlib.contextmanager
def replacing(target: Path, mode: int | None = PRIVATE, *, synced: bool = True) -> Iterator[BinaryIO]:
    """A file that replaces the target when the block ends, and is removed if the block raises.

    ``mode`` is that of the new file, less the umask; None for what `permit` allows. If ``synced``, the content is on
    disk before the file takes its name.
    """
    partial = target.with_name(f".{target.name}.{os.urandom(6).hex()}.partial")
    file = os.fdopen(create(partial), "wb") if mode is None else private(partial, mode)
    try:
        with file:
            yield file
            if synced:
                sync(file)
        partial.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_atomically(path: Path, content: str | bytes, mode: int | None = PRIVATE, *, synced: bool = True) -> None:
    """Write a small file so that a reader, or a crash, finds the old content or the new; see `replacing`."""
    with replacing(path, mode, synced=synced) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync(file: BinaryIO) -> None:
    """Flush a file to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush a directory's names to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Note(Generic[T]):
    """A file with one value as JSON, of a type that msgspec encodes and that may contain paths; may be missing."""

    path: Path
    type: type[T]

    def save(self, value: T) -> None:
        """Replace the file's content; raises OSError if the file cannot be written."""
        import msgspec  # not above: a trainer need not have it

        write_atomically(self.path, msgspec.json.encode(value, enc_hook=str) + b"\n")

    def load(self) -> T | None:
        """The saved value; None if the file is missing.

        Raises InputError if the file cannot be read, or has another content.
        """
        import msgspec

        if not self.path.exists():
            return None
        with regular(self.path, InputError) as file:
            try:
                return msgspec.json.decode(file.read(), type=self.type, dec_hook=lambda kind, text: kind(text))
            except (OSError, ValueError) as error:
                raise InputError(f"{self.path}: {error}") from error

    def get(self) -> T | None:
        """The saved value; None if there is none that can be read."""
        try:
            return self.load()
        except InputError:
            return None
