"""Switches a remedy on all ranks of a group in the same round, or on none: the ranks vote in a memory-mapped file.

The agent writes requests and reads the state (`SwitchFile`); each rank votes (`Switch`, in the trainer). The file
``rank-<first rank>.<number>.switch`` lies beside the rings. If a group spans hosts, each host has one for its ranks.
64-bit words in native byte order::

    0     8   magic
    8     4   length of the document in bytes
    12    4   CRC-32 of the document
    16    n   document: UTF-8 JSON: ``ranks`` of the group, in its order, and the places in it that are ``here``;
              ``microbatches`` of a pipeline's step, or 0; ``pid``, ``pid_start_ticks`` of its maker; ``group``, the
              name of a group on several hosts
    4096      the request: a number (15 bits), its round (32 bits), and its value (16 bits)
    4104      a pipeline's plan: how far ahead each stage is to run, a byte each, up to the first zero
    4160      a line for each rank that is here: the words below

A *round* is one backward that exchanges gradients, or one step of a pipeline, counted from 1. The value in force is 0
for no remedy, the straggler's place in the group plus 1, or from `PLANNED` on a checksum of a pipeline's plan. A rank
does not vote if the plan does not match the value, or if it lacks memory for its part.

A request names a future round T; writing it is one store. A rank that sees it at the start of round T - 1 *votes* for
it before it joins that round's exchange. At the start of round T each rank counts the votes: if all ranks voted, the
value is in force from then on, else never. All ranks count the same votes, since no rank ends round T - 1 before all
have begun it, and a vote cannot change before round T is over. So a switch needs no messages and delays no rank, a
request that one rank sees too late fails on all, and the requester may exit or change its mind.

Across hosts no file has all votes, so the ranks exchange them: see `MultiHostSwitch`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from zlib import crc32

from sftriage import __version__
from sftriage.base.files import open_regular
from sftriage.base.process import BOOT_ID, start_ticks
from sftriage.errors import RingError
from sftriage.log import warn
from sftriage.trainer.layout import MAX_COUNT, OpenFile, create_whole

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PLANNED = 1 << 15
MAX_RANKS = PLANNED - 2
MAX_STAGES = 56
ROUNDS_AHEAD = 3
"""Rounds from the newest one to a request's: enough for all ranks to see it, unless the agent is delayed."""


class Request(NamedTuple):
    """Requests a value from ``round`` on; ``number`` distinguishes requests.

    Both are 0 for a group on several hosts, where the value takes effect once all ranks see it.
    """

    number: int
    round: int
    value: int

    @property
    def word(self) -> int:
        return self.number << 48 | self.round << 16 | self.value

    @classmethod
    def of(cls, word: int) -> Request:
        return cls(word >> 48 & 0x7FFF, word >> 16 & 0xFFFFFFFF, word & 0xFFFF)


UNLIKE = Request(0, 0, -1)
"""The request of a group whose hosts have different ones, or do not all report."""


class Setting(NamedTuple):
    """The wanted value, and for a pipeline how far ahead each stage is to run."""

    value: int = 0
    ahead_S: tuple[int, ...] = ()

    @classmethod
    def of_plan(cls, ahead_S: Sequence[int]) -> Setting:
        return cls(PLANNED | crc32(bytes(ahead_S)) & (PLANNED - 1), tuple(ahead_S))


class StageTimes(NamedTuple):
    """Seconds that a microbatch takes in a stage and on its way there; 0 if unknown.

    ``there_s`` counts from the end of the previous stage's computation, ``back_s`` from that of the next stage. The
    stage has memory for the activations of ``most`` microbatches.
    """

    forward_s: float
    backward_s: float
    there_s: float
    back_s: float
    most: int


@dataclass(frozen=True, slots=True)
class SwitchStatus:
    """The state of a group on one host; `whole_groups` joins those of a group on several hosts.

    Attributes:
        name: name of its file; for a group on several hosts, the name in all of its files.
        ranks: the job's ranks in it, in the group's order.
        round: the newest round that a rank has begun; ``all_begun`` is the newest that all have begun.
        value: the value in force on all ranks; None while some ranks have switched and others have not.
        since_step: the first step with that value on all ranks; -1 if unknown.
        request: the last request; `UNLIKE` while hosts have different ones.
        exchange_s: duration of an exchange of ``exchanged_bytes``, without waits and without a remedy; 0 before the
            first one.
        stages: a pipeline's times per microbatch.
        microbatches: microbatches of a pipeline's step; 0 for other groups.
        here: places of this host's ranks in a group on several hosts; empty on one host.
    """

    name: str
    ranks: Sequence[int]
    round: int
    all_begun: int
    value: int | None
    since_step: int
    request: Request
    exchange_s: float = 0.0
    exchanged_bytes: int = 0
    stages: tuple[StageTimes, ...] = ()
    microbatches: int = 0
    here: Sequence[int] = ()

    @property
    def ranks_here(self) -> Iterable[int]:
        return map(self.ranks.__getitem__, self.here) if self.here else self.ranks

    def next_request(self, value: int) -> Request | None:
        """The request that brings a value into force; None if it is in force, or already requested and pending."""
        if self.here or self.request == UNLIKE:
            return None if self.request.value == value else Request(0, 0, value)
        may_come = self.all_begun < self.request.round
        if (self.request.value if may_come else self.value) == value:
            return None
        return Request(self.request.number % 0x7FFF + 1, self.round + ROUNDS_AHEAD, value)


def whole_groups(reported: Iterable[SwitchStatus]) -> list[SwitchStatus]:
    """The groups of a job, from the reports of all hosts; groups with unreported ranks are left out."""
    groups: dict[str, list[SwitchStatus]] = {}
    for status in reported:
        groups.setdefault(status.name, []).append(status)
    return [whole for some in groups.values() if (whole := _whole(some)) is not None]


def _whole(parts: Sequence[SwitchStatus]) -> SwitchStatus | None:
    first, *others = parts
    if not (others or first.here):
        return first
    here = sorted(place for part in parts for place in part.here)
    if any(part.ranks != first.ranks for part in others) or here != list(range(len(first.ranks))):
        return None
    values, requests = {part.value for part in parts}, {part.request for part in parts}
    return replace(
        first,
        round=max(part.round for part in parts),
        all_begun=min(part.all_begun for part in parts),
        value=first.value if len(values) == 1 else None,
        since_step=max(part.since_step for part in parts),
        request=first.request if len(requests) == 1 else UNLIKE,
        exchange_s=min(part.exchange_s for part in parts),
        exchanged_bytes=max(part.exchanged_bytes for part in parts),
        here=tuple(here),
    )


def as_range(numbers: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Shorten numbers to start, end and step if they are a range, as most groups are; and say whether they are."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    run = range(numbers[0], numbers[0] + step * len(numbers), step) if numbers and step > 0 else range(0)
    is_range = len(run) > 0 and list(run) == list(numbers)
    return ((run.start, run.stop, run.step) if is_range else tuple(numbers)), is_range


def numbers_of(shortened: tuple[Sequence[int], bool], below: int) -> Sequence[int]:
    """The numbers that `as_range` shortened; a range is not expanded, however long.

    Raises ValueError if they are not distinct, not in 0 to ``below``, or more than `MAX_RANKS`.
    """
    short, is_range = shortened
    if not all(type(number) is int for number in short) or (is_range and len(short) != 3):
        raise ValueError(f"{len(short)} numbers that are not ranks")
    found = range(*short) if is_range else tuple(short)
    if isinstance(found, range):
        ends, differ = (*found[:1], *found[-1:]), found.step > 0
    else:
        ends, differ = found, len(set(found)) == len(found)
    if not differ or len(found) > MAX_RANKS or not all(0 <= number < below for number in ends):
        raise ValueError(f"{len(found)} numbers that are not ranks")
    return found


MAGIC = b"SFTSWTCH"
REQUEST_AT = 4096
LINE_BYTES, LINE_WORDS = 64, 8
ROUND, VOTE, IN_FORCE, SINCE_STEP, EXCHANGE_NS, EXCHANGED_BYTES = range(6)
"""Words of a rank's line: its newest round; the request it votes for; the value in force, and its first step (-1: not
counted); duration, smoothed, and size of an exchange without a remedy."""
FORWARD_NS, BACKWARD_NS, THERE_NS, BACK_NS, MOST = range(4, 9)
SENT, SENT_AT = 2, 16
"""Words of a pipeline's stage instead: typical times of a microbatch's forward and backward, and of its way from the
previous stage (activations) and the next (gradients), or 0; the microbatches whose activations it can hold; from
`SENT_AT` on, when it last sent each microbatch's results forward and back."""

SMOOTHED = 8
"""Rounds over which an exchange's time is averaged, roughly."""
NO_VOTE = -1
"""The vote of a rank that cannot apply the requested value."""

VOTES_APART_NS, MOST_ROUNDS_APART = 1_000_000_000, 32
"""Time between two votes across hosts, roughly, and the maximum rounds between them."""

Cast = Callable[[Sequence[int]], Callable[[], Sequence[int]]]
"""Starts a maximum over all ranks of each number, without waiting. Call the returned function in a later round to get
the maxima."""

_PROLOGUE = struct.Struct("=8sII")
_WORD = struct.Struct("=q")


class Switch:
    """A rank's view of its group's file, in the trainer; ``place`` is the rank's index in the group.

    The remedy calls `begin` at the start of each round, always in one thread. ``ahead_S`` is the pipeline's plan in
    force, if any. Raises RingError if the file is not a switch.
    """

    def __init__(self, path: Path, place: int) -> None:
        with SwitchFile(path) as file:
            n, size_bytes, self._line_words = len(file.ranks), file.size_bytes, file.line_words
            self.microbatches, line = file.microbatches, file.here.index(place)
        descriptor = open_regular(path, RingError, os.O_RDWR)
        try:
            self._map = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map)[REQUEST_AT:].cast("q")
        self._place, self._line = place, self._line_of(line)
        self._votes = [self._line_of(rank) + VOTE for rank in range(n)]
        self._n, self._round, self._vote, self._value = n, 0, 0, 0
        self.ahead_S: tuple[int, ...] = ()
        self._requested_S: tuple[int, ...] = ()
        self._words[self._line + SINCE_STEP] = -1

    def _line_of(self, place: int) -> int:
        return LINE_WORDS + self._line_words * place

    def begin(self, step: int) -> int:
        """Begin a round in the job's ``step``: vote, count votes, and return the value in force."""
        words, line = self._words, self._line
        self._round += 1
        mine = Request.of(self._vote)
        if self._vote and mine.round == self._round:
            if all(words[vote] == self._vote for vote in self._votes):
                self.ahead_S = self._requested_S
                self._in_force(mine.value, step)
        else:
            request = Request.of(words[0])
            if request.round == self._round + 1 and self._accepts(request.value):
                self._vote = words[line + VOTE] = request.word
        words[line + ROUND] = self._round
        return self._value

    def _in_force(self, value: int, step: int) -> None:
        self._value = value
        self._words[self._line + SINCE_STEP], self._words[self._line + IN_FORCE] = step, value

    def _accepts(self, value: int) -> bool:
        self._requested_S = ()
        if value < PLANNED:
            return value <= (0 if self.microbatches else self._n)
        ahead_S = self._map[REQUEST_AT + _WORD.size : REQUEST_AT + LINE_BYTES].partition(b"\0")[0]
        # (the agent may be overwriting it)
        self._requested_S = tuple(ahead_S)
        fits = len(ahead_S) == self._n and list(ahead_S) == sorted(ahead_S, reverse=True)
        return fits and Setting.of_plan(ahead_S).value == value and ahead_S[self._place] <= self.most

    @property
    def most(self) -> int:
        """Maximum microbatches whose activations this stage can hold."""
        return self._words[self._line + MOST] if self.microbatches else 0

    @most.setter
    def most(self, most: int) -> None:
        self._words[self._line + MOST] = most

    def send(self, way: int, microbatch: int, now_ns: int) -> None:
        """Note when this stage sends a microbatch's result on (``way`` 0) or back (1)."""
        self._words[self._line + SENT_AT + SENT * microbatch + way] = now_ns

    def sent_ns(self, way: int, microbatch: int) -> int:
        """When the previous stage sent a microbatch on, or the next one sent it back."""
        return self._words[self._line_of(self._place + (1 if way else -1)) + SENT_AT + SENT * microbatch + way]

    def took(self, word: int, typical_ns: int) -> None:
        """Set one of the stage's typical times, from `FORWARD_NS` to `BACK_NS`."""
        self._words[self._line + word] = max(1, typical_ns)

    def exchanged(self, took_ns: int, size_bytes: int) -> None:
        """Note what a round's exchange took this rank without a remedy."""
        words, line = self._words, self._line
        known = words[line + EXCHANGE_NS]
        words[line + EXCHANGE_NS] = known + (took_ns - known) // SMOOTHED if known else took_ns
        words[line + EXCHANGED_BYTES] = size_bytes


class MultiHostSwitch(Switch):
    """A rank's view in a group on several hosts, each with its own file. It has no pipeline plans.

    A request names no round, since many rounds pass before all hosts have it; it stays until replaced. At the start of
    a voting round each rank votes for the request it sees; the ranks exchange votes during that round and count them
    at the start of the next. If all voted alike, that value is in force from then on. All ranks count the same votes,
    and none waits, since no rank ends a round before all have voted.

    Each rank adds its time per round to its vote. From the longest, all derive the same next voting round: an exchange
    costs more than the rest of a round, and requests are rare. ``cast`` exchanges votes; set it before the first round.
    """

    cast: Cast
    clock: Callable[[], int] = staticmethod(monotonic_ns)
    _counted: Callable[[], Sequence[int]] | None = None
    _due, _cast_ns, _rounds_apart = 1, 0, 1

    def begin(self, step: int) -> int:
        words = self._words
        self._round += 1
        if self._counted is not None:
            most, minus_least, round_ns = self._counted()
            self._counted = None
            if most == -minus_least and most not in (NO_VOTE, self._value):
                self._in_force(most, step)
            self._rounds_apart = max(1, min(VOTES_APART_NS // max(1, round_ns), MOST_ROUNDS_APART))
            self._due += self._rounds_apart
        if self._round == self._due:
            requested, now_ns = Request.of(words[0]).value, self.clock()
            vote = requested if self._accepts(requested) else NO_VOTE
            # (the first vote has no time yet, and the second follows at once)
            round_ns = (now_ns - self._cast_ns) // self._rounds_apart if self._cast_ns else VOTES_APART_NS
            self._cast_ns = now_ns
            self._counted = self.cast((vote, -vote, round_ns))
        words[self._line + ROUND] = self._round
        return self._value


class SwitchFile(OpenFile):
    """A group's file, as the agent reads and writes it; methods raise RingError if it is damaged."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, os.O_RDWR)
        try:
            magic, length, checksum = _PROLOGUE.unpack(self.read_at(_PROLOGUE.size, 0).ljust(_PROLOGUE.size))
            body = self.read_at(min(length, REQUEST_AT - _PROLOGUE.size), _PROLOGUE.size)
            if magic != MAGIC or crc32(body) != checksum:
                raise RingError(f"{path}: not a switch of sftriage, or damaged")
            document = json.loads(body)
            self.ranks = tuple(numbers_of(document["ranks"], MAX_COUNT))
            self.group, self.here = document["group"], tuple(numbers_of(document["here"], len(self.ranks)))
            self.maker, self.microbatches = (document["pid"], document["pid_start_ticks"]), document["microbatches"]
            self.line_words, self.size_bytes = _sizes(self.microbatches, len(self.here))
            if self.length_bytes() != self.size_bytes or not self.here:
                raise RingError(f"{path}: {self.length_bytes()} bytes for {len(self.here)} ranks")
        except (ValueError, TypeError, KeyError, struct.error) as error:
            self.close()
            raise RingError(f"{path}: bad header: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self.group or self.path.name

    @property
    def maker_alive(self) -> bool:
        return bool(start_ticks(self.maker[0]) == self.maker[1])

    def status(self) -> SwitchStatus:
        found = self.read_at(self.size_bytes - REQUEST_AT, REQUEST_AT)
        if len(found) != self.size_bytes - REQUEST_AT:
            raise RingError(f"{self.path}: truncated")
        request, *_ = words = memoryview(found).cast("q")
        lines = [words[at : at + self.line_words] for at in range(LINE_WORDS, len(words), self.line_words)]
        rounds, values = [line[ROUND] for line in lines], {line[IN_FORCE] for line in lines}
        of_stages = lines if self.microbatches else []
        of_ranks = [] if self.microbatches else lines
        return SwitchStatus(
            name=self.name,
            ranks=self.ranks,
            round=max(rounds),
            all_begun=min(rounds),
            value=values.pop() if len(values) == 1 else None,
            since_step=max(line[SINCE_STEP] for line in lines),
            request=Request.of(request),
            # (the last rank to arrive does not wait, so the minimum has no waits)
            exchange_s=max(0, min((line[EXCHANGE_NS] for line in of_ranks), default=0)) / 1e9,
            exchanged_bytes=max((line[EXCHANGED_BYTES] for line in of_ranks), default=0),
            stages=tuple(
                StageTimes(forward / 1e9, backward / 1e9, there / 1e9, back / 1e9, most)
                for forward, backward, there, back, most in (line[FORWARD_NS : MOST + 1] for line in of_stages)
            ),
            microbatches=self.microbatches,
            here=self.here if self.group else (),
        )

    def write_request(self, request: Request, ahead_S: Sequence[int] = ()) -> None:
        """Write a request over the previous one."""
        if ahead_S:
            self.write_at(bytes(ahead_S).ljust(MAX_STAGES, b"\0"), REQUEST_AT + _WORD.size)
        self.write_at(_WORD.pack(request.word), REQUEST_AT)


def make_switch(
    directory: Path, ranks: Sequence[int], microbatches: int = 0, *, group: str = "", here: Sequence[int] = ()
) -> Path:
    """Create a group's file with the next free number, and remove files of dead groups.

    Args:
        directory: directory of the rings.
        ranks: the group's ranks, in its order.
        microbatches: microbatches of a step, if the group is a pipeline with one stage per rank.
        group: the group's name on all hosts, if it spans several.
        here: then, the places of this host's ranks in the group.

    Raises OSError if the directory is missing, full or read-only, RingError if the group has too many ranks.
    """
    here = here or range(len(ranks))
    document = {
        "group": group,
        "ranks": as_range(ranks),
        "here": as_range(here),
        "microbatches": microbatches,
        "pid": os.getpid(),
        "pid_start_ticks": start_ticks(os.getpid()),
    }
    body = json.dumps(document).encode("ascii")
    head = _PROLOGUE.pack(MAGIC, len(body), crc32(body)) + body
    if len(head) > REQUEST_AT or len(ranks) > (MAX_STAGES if microbatches else MAX_RANKS):
        raise RingError(f"a group of {len(ranks)} ranks: too many for a switch")
    first = ranks[here[0]]
    _sweep(directory, first)
    for number in count(1 + max(map(_number, find_switches(directory, first)), default=-1)):
        path = directory / f"rank-{first}.{number}.switch"
        with contextlib.suppress(FileExistsError):
            os.close(create_whole(path, _sizes(microbatches, len(here))[1], lambda _: head))
            return path
    raise AssertionError


def _sizes(microbatches: int, n_here: int) -> tuple[int, int]:
    """Words per line, and bytes of the file."""
    line_words = SENT_AT + SENT * microbatches if microbatches else LINE_WORDS
    return line_words, REQUEST_AT + LINE_BYTES + _WORD.size * line_words * n_here


def find_switches(directory: Path, first: int | str = "*") -> list[Path]:
    """Switch files in a directory, oldest first, dead groups included; ``first`` is the group's first rank."""
    return sorted((path for path in directory.glob(f"rank-{first}.*.switch") if _number(path) >= 0), key=_number)


def newest_of_each(found: Iterable[SwitchFile]) -> list[SwitchFile]:
    """The newest file of each group: ranks that restart make a new one.

    A rank may be first in several groups, such as its pipeline's and its stage's replicas.
    """
    by_number = sorted(found, key=lambda file: _number(file.path))
    return list({(file.ranks, file.here, file.microbatches > 0): file for file in by_number}.values())


def _number(path: Path) -> int:
    number = path.name.split(".")[-2]
    return int(number) if number.isdecimal() else -1


def _sweep(directory: Path, rank: int) -> None:
    for path in find_switches(directory, rank):
        with contextlib.suppress(OSError, RingError):
            with SwitchFile(path) as file:
                alive = file.maker_alive
            if not alive:
                path.unlink()


T = TypeVar("T")


def joined(
    as_before: str,
    needs: str,
    group: ProcessGroup | None,
    *,
    fits: bool,
    microbatches: int = 0,
    multi_host: bool = False,
) -> Switch | None:
    """Create the group's switch together with all of its ranks; None if sftriage does not watch the job.

    Ranks that share a directory of rings share a file. The result is None on all ranks if one does not ``fits``, if the
    group spans hosts without ``multi_host``, if a host cannot create its file, or if releases of sftriage differ; a
    warning then says ``as_before`` and what the remedy ``needs``.
    """
    # (imported here: agents read switches without torch and without a Monitor)
    import torch.distributed as dist

    from sftriage.trainer.monitor import RINGS_ENV

    def gathered(mine: Any) -> list[Any]:
        every_R: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every_R, mine, group=group)
        return every_R

    group = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    place = ranks.index(dist.get_rank())
    rings = Path(os.environ[RINGS_ENV]) if os.environ.get(RINGS_ENV) else None
    mine = _unless_refused(partial(_identity, rings)) if rings is not None and fits else None
    # (the token gives a restarted group a new name on all of its hosts)
    everything = gathered((__version__, rings is not None, mine, secrets.token_hex(8)))
    release_R, watched_R, host_R, token_R = zip(*everything, strict=True)
    switch, is_multi_host = None, len(set(host_R)) > 1
    if len(set(release_R)) > 1:
        needs = f"the ranks run incompatible releases of sftriage: {', '.join(sorted(set(release_R)))}"
    elif rings is not None and None not in host_R and (multi_host or not is_multi_host):
        here = [at for at, host in enumerate(host_R) if host == mine]
        parts: dict[str, Any] = {"group": f"ranks-{ranks[0]}.{token_R[0]}", "here": here} if is_multi_host else {}
        make = partial(make_switch, rings, ranks, microbatches, **parts)
        name = gathered(made.name if place == here[0] and (made := _unless_refused(make)) else "")[here[0]]
        kind = MultiHostSwitch if is_multi_host else Switch
        switch = _unless_refused(partial(kind, rings / name, place)) if name else None
    if not all(gathered(switch is not None)):
        if True in watched_R and place == watched_R.index(True):
            warn("%s: %s", as_before, needs)
        return None
    return switch


def _identity(rings: Path) -> tuple[str, int, int]:
    found = rings.stat()
    boot_id = BOOT_ID.read_text(encoding="ascii") if BOOT_ID.exists() else socket.gethostname()
    return boot_id, found.st_dev, found.st_ino


def _unless_refused(action: Callable[[], T]) -> T | None:
    try:
        return action()
    except (OSError, RingError) as error:
        warn("sftriage cannot name a straggler here: %s", error)
        return None
