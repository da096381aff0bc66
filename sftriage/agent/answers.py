"""Requests to the thread of a trainer that answers (`sftriage.trainer.executor`), and what it answers.

A trainer is not trusted: its answer is limited in bytes, its texts are printable, and unknown fields are ignored.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import msgspec

from sftriage.base.bounds import bounded, printable
from sftriage.errors import CaptureError
from sftriage.model.hangs import Call, Fact, GroupCalls, ThreadEvidence, WorkerEvidence
from sftriage.trainer.executor import STACK_ANSWER, STACK_REQUESTS
from sftriage.trainer.layout import RingInfo

MAX_ANSWER_BYTES = 1 << 20


class TrainerAccount(msgspec.Struct, frozen=True):
    """The fields of a `RankEvidence` that the trainer itself knows."""

    calls: tuple[Call, ...] = ()
    groups: tuple[GroupCalls, ...] = ()
    threads: tuple[ThreadEvidence, ...] = ()
    workers: tuple[WorkerEvidence, ...] = ()
    timeout_s: float | None = None
    problem: str = ""
    facts: dict[str, Fact] = {}


class TrainerAnswer(msgspec.Struct, frozen=True):
    """An answer; ``threads`` has stacks in the form of ``py-spy dump --json``."""

    rank_evidence: TrainerAccount | None = None
    threads: list[Any] = []


class TrainerRequest:
    """A request to one rank, sent; raises CaptureError if the rank does not listen."""

    def __init__(self, rings: Path, info: RingInfo, line: str) -> None:
        requests, self._path = (rings / info.file_name(kind) for kind in (STACK_REQUESTS, STACK_ANSWER))
        self._line, self._version = line, (0, 0)
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(requests, flags), "wb", buffering=0) as pipe:
                if not stat.S_ISFIFO(os.fstat(pipe.fileno()).st_mode):
                    raise CaptureError(f"{requests.name} is not a pipe")
                pipe.write(line.encode("ascii", "replace") + b"\n")
        except OSError as error:
            why = f"cannot send the request to the trainer: {requests.name}: {error.strerror}"
            raise CaptureError(why) from error

    def answer(self) -> TrainerAnswer | None:
        """The answer; None while there is none. Raises CaptureError if it cannot be read."""
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(self._path, flags), "rb") as file:
                about = os.fstat(file.fileno())
                version = about.st_ino, about.st_mtime_ns
                if version == self._version:
                    return None
                self._version = version
                data = file.read(MAX_ANSWER_BYTES + 1)
        except OSError:
            return None
        if len(data) > MAX_ANSWER_BYTES:
            raise CaptureError(f"the trainer's answer has more than {MAX_ANSWER_BYTES} bytes")
        try:
            # (msgspec refuses the surrogates of a path that is not UTF-8)
            found = json.loads(data)
            if not isinstance(found, dict) or found.get("asked") != self._line:
                return None
            answer = msgspec.convert(found, TrainerAnswer)
            account = answer.rank_evidence
            return answer if account is None else msgspec.structs.replace(answer, rank_evidence=_bounded(account))
        except (ValueError, RecursionError) as error:
            raise CaptureError(f"the trainer's answer cannot be read: {printable(str(error))}") from error


def _bounded(account: TrainerAccount) -> TrainerAccount:
    return TrainerAccount(*(bounded(getattr(account, name)) for name in TrainerAccount.__struct_fields__))
