"""Which catalogue a command asks, or a run tells of its captures: named by an option, or in the environment."""

from __future__ import annotations

import os
from pathlib import Path

from sftriage.errors import UsageError

URL_VARIABLE = "SFTRIAGE_CATALOGUE"
FILE_VARIABLE = "SFTRIAGE_CATALOGUE_FILE"

MAX_URL_BYTES = 4096


def catalogue_url(option: str | None, *, from_environment: bool = True) -> str | None:
    """The URL of the catalogue to ask, if one is named: by the option, or in the environment.

    Raises:
        UsageError: it holds a password where everybody on the machine can read it, or its file cannot be read.
    """
    if option is not None:
        from sftriage.traces.databases import has_password

        if has_password(option):
            raise UsageError(
                "a command line can be read by everybody on the machine: put the catalogue's URL into "
                f"${URL_VARIABLE}, or into the file that ${FILE_VARIABLE} names, or its password into ~/.pgpass"
            )
        return option
    if not from_environment:
        return None
    if url := os.environ.get(URL_VARIABLE):
        return url
    return _from_file(Path(name)) if (name := os.environ.get(FILE_VARIABLE)) else None


def _from_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_URL_BYTES)
        return content.decode().strip()
    except OSError as error:
        raise UsageError(f"${FILE_VARIABLE}: {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"${FILE_VARIABLE}: {path}: not a URL") from None
