"""A remedy is switched on all ranks of a group before the same exchange of gradients, or on none: by a mapped file.

``rank-<first rank>.<number>.switch``, among the rings, is of one group on one host. 64-bit words in native byte order::

    0     8   magic
    8     4   length of the document in bytes
    12    4   CRC-32 of the document
    16    n   document: UTF-8 JSON: ``ranks`` of the group, in its order; ``microbatches`` of a pipeline's step, 0 of
              no pipeline; ``pid``, ``pid_start_ticks`` of who made it
    4096      the request: a number of 15 bits, the round that it is for (32 bits), and the value (16)
    4104      how far ahead each stage of a pipeline is to be, a byte each, up to the first zero
    4160      a line for each rank: the words below

A *round* is one backward whose gradients are exchanged, or one step of a pipeline, counted from 1. A value is what is
in force: 0 for nothing, one more than the straggler's place in the group, or from `PLANNED` on the checksum of how far
ahead stages are. A rank that finds another plan than the value's, or has no room for its part, does not vote.

Whoever wants another value asks for it from a round T on that is yet to come: one store. A rank that sees it as round
T - 1 begins says so: it *votes*, before it takes part in that round's exchange. As round T begins, each rank looks at
the votes: if all are for this request, it is in force from there on, and else it never will be. All ranks see the same
votes then, for round T - 1 ended on none before all had begun it, and a vote stands until the round
that it is for is over: until then, nobody votes again. So nothing is exchanged for a switch, nobody waits, a request
that comes too late for one rank comes to nothing on all, and who asked may be gone by then, or ask for something else.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from sftriage.errors import RingError
from sftriage.recorder import files

MAGIC = b"SFTSWTCH"
REQUEST_AT = 4096
LINE_BYTES, LINE_WORDS = 64, 8
ROUND, VOTE, IN_FORCE, SINCE_STEP, EXCHANGE_NS, EXCHANGED_BYTES = range(6)
"""Words of a rank's line: the round that has begun last; the request that it votes for; what is in force, and the job's
step that it began in (-1 where nobody counts steps); of an exchange with nothing in force, how long it takes the rank,
smoothed, and how much of it there is."""
FORWARD_NS, BACKWARD_NS, THERE_NS, BACK_NS, MOST = range(4, 9)
SENT, SENT_AT = 2, 16
"""And of a stage of a pipeline: what a microbatch's computations take it, and on their way from the stage before
(activations) and from the one after (gradients), typical of recent steps, or 0; of how many microbatches it can hold
the activations; from `SENT_AT` on, when each microbatch's results were last sent on, and sent back."""

PLANNED = 1 << 15
MAX_RANKS = PLANNED - 2
MAX_STAGES = 56
SMOOTHED = 8
"""Of so many rounds about, an exchange's time is the mean."""
ROUNDS_AHEAD = 3
"""A request is for the so-manieth round after the newest: all ranks see it in time, unless who asks is held up."""

_PROLOGUE = struct.Struct("=8sII")
_WORD = struct.Struct("=q")


class Request(NamedTuple):
    """A value that is to be in force from a round on; ``number`` tells requests apart."""

    number: int
    round: int
    value: int

    @property
    def word(self) -> int:
        """It in one word."""
        return self.number << 48 | self.round << 16 | self.value

    @classmethod
    def of(cls, word: int) -> Request:
        """The request that a word is."""
        return cls(word >> 48 & 0x7FFF, word >> 16 & 0xFFFFFFFF, word & 0xFFFF)


class Setting(NamedTuple):
    """What is to be in force: a value, and of a pipeline how far ahead each stage is."""

    value: int = 0
    ahead_S: tuple[int, ...] = ()

    @classmethod
    def of_plan(cls, ahead_S: Sequence[int]) -> Setting:
        """Stages so far ahead."""
        return cls(PLANNED | crc32(bytes(ahead_S)) & (PLANNED - 1), tuple(ahead_S))


class StageTimes(NamedTuple):
    """What a microbatch takes a stage, and on its way there, in seconds; 0 where that is not known.

    ``there_s`` is from the end of the stage before's computation, ``back_s`` from that of the one after; ``most`` is of
    how many microbatches it can hold the activations.
    """

    forward_s: float
    backward_s: float
    there_s: float
    back_s: float
    most: int


@dataclass(frozen=True, slots=True)
class SwitchStatus:
    """How a group stands.

    Attributes:
        name: of its file.
        ranks: the job's ranks in it, in the group's order.
        round: the newest that a rank has begun; ``all_begun`` is the newest that all have.
        value: what is in force on all ranks; None while they are between two rounds with different ones.
        since_step: the job's step from which on it is, by the last of them; -1 where that is not known.
        request: the last one.
        exchange_s: what an exchange takes that waits for nobody, with nothing in force; 0 where none has been.
        exchanged_bytes: how much of it there is.
        stages: what microbatches take, of a pipeline.
        microbatches: of its step; 0 of no pipeline.
    """

    name: str
    ranks: tuple[int, ...]
    round: int
    all_begun: int
    value: int | None
    since_step: int
    request: Request
    exchange_s: float = 0.0
    exchanged_bytes: int = 0
    stages: tuple[StageTimes, ...] = ()
    microbatches: int = 0

    def next_request(self, value: int) -> Request | None:
        """What to ask for so that a value comes into force; None where it is, or was asked for and may yet be."""
        may_come = self.all_begun < self.request.round
        if (self.request.value if may_come else self.value) == value:
            return None
        return Request(self.request.number % 0x7FFF + 1, self.round + ROUNDS_AHEAD, value)


class Switch:
    """A rank's end of the file of its group; driven as each round begins, on one thread.

    Attributes:
        ahead_S: how far ahead stages of a pipeline are, by the value in force; empty where it says nothing of that.

    Raises:
        RingError: it is no such file.
    """

    def __init__(self, path: Path, place: int) -> None:
        with SwitchFile(path) as file:
            n, size_bytes, self._line_words = len(file.ranks), file.size_bytes, file.line_words
            self.microbatches = file.microbatches
        descriptor = files.open_regular(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map)[REQUEST_AT:].cast("q")
        self._place, self._line = place, self._line_of(place)
        self._votes = [self._line_of(rank) + VOTE for rank in range(n)]
        self._n, self._round, self._vote, self._value = n, 0, 0, 0
        self.ahead_S: tuple[int, ...] = ()
        self._asked_S: tuple[int, ...] = ()
        self._words[self._line + SINCE_STEP] = -1

    def _line_of(self, place: int) -> int:
        return LINE_WORDS + self._line_words * place

    def begin(self, step: int) -> int:
        """A round begins, in the job's ``step``: the value that is in force in it."""
        words, line = self._words, self._line
        self._round += 1
        mine = Request.of(self._vote)
        if self._vote and mine.round == self._round:
            if all(words[vote] == self._vote for vote in self._votes):
                self._value, self.ahead_S = mine.value, self._asked_S
                words[line + SINCE_STEP], words[line + IN_FORCE] = step, mine.value
        else:
            asked = Request.of(words[0])
            if asked.round == self._round + 1 and self._may(asked.value):
                self._vote = words[line + VOTE] = asked.word
        words[line + ROUND] = self._round
        return self._value

    def _may(self, value: int) -> bool:
        """Whether a value can be in force here, and how far ahead stages are then."""
        self._asked_S = ()
        if value < PLANNED:
            return value <= (0 if self.microbatches else self._n)
        ahead_S = self._map[REQUEST_AT + _WORD.size : REQUEST_AT + LINE_BYTES].partition(b"\0")[0]
        # (another one may be written over it just now)
        self._asked_S = tuple(ahead_S)
        fits = len(ahead_S) == self._n and list(ahead_S) == sorted(ahead_S, reverse=True)
        return fits and Setting.of_plan(ahead_S).value == value and ahead_S[self._place] <= self.most

    @property
    def most(self) -> int:
        """Of how many microbatches this stage can hold the activations."""
        return self._words[self._line + MOST] if self.microbatches else 0

    @most.setter
    def most(self, most: int) -> None:
        self._words[self._line + MOST] = most

    def send(self, way: int, microbatch: int, now_ns: int) -> None:
        """What this stage has computed of a microbatch is sent on (``way`` 0), or back (1)."""
        self._words[self._line + SENT_AT + SENT * microbatch + way] = now_ns

    def sent_ns(self, way: int, microbatch: int) -> int:
        """When the stage before sent it on, or the one after sent it back."""
        return self._words[self._line_of(self._place + (1 if way else -1)) + SENT_AT + SENT * microbatch + way]

    def took(self, word: int, typical_ns: int) -> None:
        """What one of a stage's words from `FORWARD_NS` to `BACK_NS` typically is."""
        self._words[self._line + word] = max(1, typical_ns)

    def exchanged(self, took_ns: int, size_bytes: int) -> None:
        """What the exchange of a round has taken this rank, with nothing in force."""
        words, line = self._words, self._line
        known = words[line + EXCHANGE_NS]
        words[line + EXCHANGE_NS] = known + (took_ns - known) // SMOOTHED if known else took_ns
        words[line + EXCHANGED_BYTES] = size_bytes


class SwitchFile(files.OpenFile):
    """Who asks: the file of a group, read and written as one.

    Raises:
        RingError: it is no such file. Every method raises it where it has become so.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, os.O_RDWR)
        try:
            magic, length, checksum = _PROLOGUE.unpack(self._read_at(_PROLOGUE.size, 0).ljust(_PROLOGUE.size))
            body = self._read_at(min(length, REQUEST_AT - _PROLOGUE.size), _PROLOGUE.size)
            if magic != MAGIC or crc32(body) != checksum:
                raise RingError(f"{path}: no switch of sftriage, or damaged")
            document = json.loads(body)
            # (a long run of ranks, as most groups are, is its first, its number and how far apart they are)
            self.ranks = tuple(range(*document["ranks"])) if document["range"] else tuple(document["ranks"])
            self._maker, self.microbatches = (document["pid"], document["pid_start_ticks"]), document["microbatches"]
            self.line_words = _line_words(self.microbatches)
            self.size_bytes = REQUEST_AT + LINE_BYTES + _WORD.size * self.line_words * len(self.ranks)
            if self._size_bytes() != self.size_bytes or not 0 < len(self.ranks) <= MAX_RANKS:
                raise RingError(f"{path}: {self._size_bytes()} bytes for {len(self.ranks)} ranks")
        except (ValueError, TypeError, KeyError, struct.error) as error:
            self.close()
            raise RingError(f"{path}: bad header: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def maker_alive(self) -> bool:
        """Whether the rank that made it is there."""
        return bool(files.start_ticks(self._maker[0]) == self._maker[1])

    def status(self) -> SwitchStatus:
        """How the group stands."""
        found = self._read_at(self.size_bytes - REQUEST_AT, REQUEST_AT)
        if len(found) != self.size_bytes - REQUEST_AT:
            raise RingError(f"{self.path}: truncated")
        request, *_ = words = memoryview(found).cast("q")
        lines = [words[at : at + self.line_words] for at in range(LINE_WORDS, len(words), self.line_words)]
        rounds, values = [one[ROUND] for one in lines], {one[IN_FORCE] for one in lines}
        if self.microbatches:
            more: dict[str, Any] = {"stages": tuple(map(_stage_times, lines)), "microbatches": self.microbatches}
        else:
            # (who comes last waits for nobody)
            more = {
                "exchange_s": max(0, min(one[EXCHANGE_NS] for one in lines)) / 1e9,
                "exchanged_bytes": max(one[EXCHANGED_BYTES] for one in lines),
            }
        return SwitchStatus(
            name=self.path.name,
            ranks=self.ranks,
            round=max(rounds),
            all_begun=min(rounds),
            value=values.pop() if len(values) == 1 else None,
            since_step=max(one[SINCE_STEP] for one in lines),
            request=Request.of(request),
            **more,
        )

    def ask(self, request: Request, ahead_S: Sequence[int] = ()) -> None:
        """Have a value be in force from a round on, in the place of what was asked for before."""
        try:
            if ahead_S:
                os.pwrite(self._descriptor, bytes(ahead_S).ljust(MAX_STAGES, b"\0"), REQUEST_AT + _WORD.size)
            os.pwrite(self._descriptor, _WORD.pack(request.word), REQUEST_AT)
        except OSError as error:
            raise RingError(f"{self.path}: cannot be written: {error.strerror}") from error


def make_switch(directory: Path, ranks: Sequence[int], microbatches: int = 0) -> Path:
    """Make the file of a group, under the first number that is free; those that gone ones have left are removed.

    Args:
        directory: that of the rings.
        ranks: of the group, in its order.
        microbatches: of a step, where the group is a pipeline of a stage a rank.

    Raises:
        OSError: the directory is missing or full, or may not be written.
        RingError: the group has more ranks than a file has room for.
    """
    apart = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    in_range = range(ranks[0], ranks[0] + apart * len(ranks), apart) if apart > 0 else range(0)
    is_range = list(in_range) == list(ranks)
    document = {
        "ranks": [in_range.start, in_range.stop, in_range.step] if is_range else list(ranks),
        "range": is_range,
        "microbatches": microbatches,
        "pid": os.getpid(),
        "pid_start_ticks": files.start_ticks(os.getpid()),
    }
    body = json.dumps(document).encode("ascii")
    head = _PROLOGUE.pack(MAGIC, len(body), crc32(body)) + body
    if len(head) > REQUEST_AT or len(ranks) > (MAX_STAGES if microbatches else MAX_RANKS):
        raise RingError(f"a group of {len(ranks)} ranks: there is no room for so many")
    _sweep(directory, ranks[0])
    for number in count():
        path = directory / f"rank-{ranks[0]}.{number}.switch"
        with contextlib.suppress(FileExistsError):
            size_bytes = REQUEST_AT + LINE_BYTES + _WORD.size * _line_words(microbatches) * len(ranks)
            os.close(files.create_whole(path, size_bytes, lambda _: head))
            return path
    raise AssertionError


def _stage_times(line: memoryview[int]) -> StageTimes:
    forward_ns, backward_ns, there_ns, back_ns, most = line[FORWARD_NS : MOST + 1]
    return StageTimes(forward_ns / 1e9, backward_ns / 1e9, there_ns / 1e9, back_ns / 1e9, most)


def _line_words(microbatches: int) -> int:
    return SENT_AT + SENT * microbatches if microbatches else LINE_WORDS


def find_switches(directory: Path) -> tuple[Path, ...]:
    """The files of all groups in a directory: of each first rank's, the newest."""
    newest: dict[str, tuple[int, Path]] = {}
    for path in directory.glob("rank-*.*.switch"):
        rank, number = path.name.removesuffix(".switch").split(".", 1)
        if number.isdecimal():
            newest[rank] = max(newest.get(rank, (-1, path)), (int(number), path))
    return tuple(path for _, path in newest.values())


def _sweep(directory: Path, rank: int) -> None:
    for path in directory.glob(f"rank-{rank}.*.switch"):
        with contextlib.suppress(OSError, RingError):
            with SwitchFile(path) as file:
                alive = file.maker_alive
            if not alive:
                path.unlink()
