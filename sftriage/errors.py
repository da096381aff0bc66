"""The error tree.

Rooms raise these; ``sftriage.commands`` turns them into one line on stderr and an exit code, and nothing else does.
"""

from __future__ import annotations

import os
from types import TracebackType


class SftriageError(Exception):
    """Base of every error raised on purpose. ``str(error)`` is one line a person can act on.

    ``is_located``: its lines begin with the file and line that they are about.
    """

    is_located = False


class UsageError(SftriageError):
    """The person asked for something that cannot be: a bad flag, a run that is not there, a directory in use."""


class InputError(SftriageError):
    """A file, array or document handed in is not what it has to be. The message says which, where and why."""


class SchemaError(InputError):
    """A stage schema that makes no sense: no stages, a repeated name, a sync stage that is not a stage."""


class RingError(SftriageError):
    """A ring or mailbox file that cannot be used: foreign, truncated, of another version."""


class CaptureError(SftriageError):
    """A capture could not be made; the message is the reason that goes on record."""


class IntegrityError(SftriageError):
    """A stored artefact is not what its manifest says it is (size, checksum, or missing)."""


class StoreError(SftriageError):
    """A store elsewhere cannot be reached, or refuses what is asked of it. It may be there again later."""


class CatalogueError(SftriageError):
    """A catalogue cannot be reached, or not be used now. Its captures are in their stores all the same."""


class ClusterError(SftriageError):
    """A Kubernetes API server cannot be reached, or refuses what is asked of it. It may be there again later."""


_OURS = os.path.dirname(__file__) + os.sep  # noqa: PTH120 (a trainer that has not imported pathlib need not)


def without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback of the script and torch alone: what a signal's handler raises may come anywhere, in our code too."""

    def next_of_theirs(at: TracebackType | None) -> TracebackType | None:
        while at is not None and at.tb_frame.f_code.co_filename.startswith(_OURS):
            at = at.tb_next
        return at

    first = at = next_of_theirs(trace)
    while at is not None:
        at.tb_next = next_of_theirs(at.tb_next)
        at = at.tb_next
    return first
