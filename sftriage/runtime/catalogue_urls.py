"""Which shared catalogue an option or the environment names. Imports little: every command that lists captures does."""

from __future__ import annotations

import os
from pathlib import Path

from sftriage.errors import UsageError

URL_VARIABLE = "SFTRIAGE_CATALOGUE"
FILE_VARIABLE = "SFTRIAGE_CATALOGUE_FILE"


def catalogue_url(option: str | None, *, from_environment: bool = True) -> str | None:
    """The URL of the catalogue that the option or the environment names, if any.

    Raises:
        UsageError: it holds a password where everybody on the machine can read it, or its file cannot be read.
    """
    if option is not None:
        from sftriage.traces.catalogue import has_password

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
    if not (name := os.environ.get(FILE_VARIABLE)):
        return None
    try:
        return Path(name).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageError(f"${FILE_VARIABLE}: {Path(name)}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"${FILE_VARIABLE}: {Path(name)}: not a URL") from None
