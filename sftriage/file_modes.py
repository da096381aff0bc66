"""Whose the files are that sftriage makes in a trainer: the owner's alone, but for what the environment allows."""

from __future__ import annotations

import grp
import os
from pathlib import Path

MODE_ENV = "SFTRIAGE_FILE_MODE"
GROUP_ENV = "SFTRIAGE_FILE_GROUP"
"""Permissions (octal) and group (name or number) of what the recorder creates; by default it is the owner's alone."""


def create(path: Path) -> int:
    """Create an empty file, private but for what `permit` allows; its descriptor, open for both.

    Raises:
        FileExistsError: there is a file of that name already.
        OSError: it cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        permit(descriptor)
    except OSError:
        os.close(descriptor)
        path.unlink()
        raise
    return descriptor


def permit(descriptor: int) -> None:
    """Give a new file the mode and the group that the environment names.

    Raises:
        OSError: they make no sense, or may not be given.
    """
    mode, group = os.environ.get(MODE_ENV), os.environ.get(GROUP_ENV)
    try:
        if group:
            os.fchown(descriptor, -1, int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid)
        if mode:
            os.fchmod(descriptor, int(mode, 8) & 0o666)
    except (ValueError, KeyError) as error:
        raise OSError(f"{MODE_ENV}={mode}, {GROUP_ENV}={group}: {error}") from error
