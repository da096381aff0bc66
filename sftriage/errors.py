"""The error tree.

Packages raise these; only ``sftriage.commands`` turns them into a line on stderr and an exit code.
"""

from __future__ import annotations

import os
from types import TracebackType


class SftriageError(Exception):
    """Base of all deliberate errors. ``str(error)`` is one line that a person can act on.

    ``is_located``: its lines begin with the file and line of each mistake.
    """

    is_located = False


class UsageError(SftriageError):
    """The user requested something impossible: a bad flag, a missing run, a directory in use."""


class InputError(SftriageError):
    """An input file, array or document is invalid. The message has the place and the reason."""


class SchemaError(InputError):
    """An invalid stage schema: no stages, a repeated name, a sync stage that is not a stage."""


class RingError(SftriageError):
    """A ring or mailbox file that cannot be used: foreign, truncated, of another version."""


class CaptureError(SftriageError):
    """A capture failed; the message is the recorded reason."""


class IntegrityError(SftriageError):
    """A stored artefact does not match its manifest (size or checksum), or is missing."""


class StoreError(SftriageError):
    """A remote store cannot be reached, or refuses a request. It may work again later."""


class CatalogueError(SftriageError):
    """A catalogue cannot be reached or used now. Its captures remain in their stores."""


class ClusterError(SftriageError):
    """A Kubernetes API server cannot be reached, or refuses a request. It may work again later."""


EXTRAS = {
    "apscheduler": "schedules",
    "cryptography": "k8s",
    "jinja2": "ui",
    "kopf": "k8s",
    "kubernetes": "k8s",
    "mcp": "mcp",
    "starlette": "ui",
    "urllib3": "notify",
    "uvicorn": "ui",
}
"""The extra of each library that is not a dependency, and is imported where it is used."""


def missing_extra(error: Exception) -> str:
    """What to install, in words, if a library of an extra is missing; "" for any other error."""
    module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"this needs {module}: pip install 'sftriage[{EXTRAS[module]}]'" if module in EXTRAS else ""


_OURS = os.path.dirname(__file__) + os.sep  # noqa: PTH120 (a trainer that has not imported pathlib need not)


def without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without our frames: a signal handler may raise anywhere, also in our code."""

    def next_of_theirs(at: TracebackType | None) -> TracebackType | None:
        while at is not None and at.tb_frame.f_code.co_filename.startswith(_OURS):
            at = at.tb_next
        return at

    first = at = next_of_theirs(trace)
    while at is not None:
        at.tb_next = next_of_theirs(at.tb_next)
        at = at.tb_next
    return first
