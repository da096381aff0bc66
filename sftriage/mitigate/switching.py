"""A remedy is switched on all ranks of a group before the same exchange of gradients, or on none: by a mapped file.

``rank-<first rank there>.<number>.switch``, among the rings, is of one group on one host. Where its ranks are on
several hosts, each has such a file, of the ranks that are there. 64-bit words in native byte order::

    0     8   magic
    8     4   length of the document in bytes
    12    4   CRC-32 of the document
    16    n   document: UTF-8 JSON: ``ranks`` of the group, in its order, and the places in it that are ``here``;
              ``microbatches`` of a pipeline's step, or 0; ``pid``, ``pid_start_ticks`` of who made it; ``group``, the
              name of a group on several hosts
    4096      the request: a number of 15 bits, the round that it is for (32 bits), and the value (16)
    4104      how far ahead each stage of a pipeline is to be, a byte each, up to the first zero
    4160      a line for each rank that is here: the words below

A *round* is one backward whose gradients are exchanged, or one step of a pipeline, counted from 1. A value is what is
in force: 0 for nothing, one more than the straggler's place in the group, or from `PLANNED` on the checksum of how far
ahead stages are. A rank that finds another plan than the value's, or has no room for its part, does not vote.

Whoever wants another value asks for it from a round T on that is yet to come: one store. A rank that sees it as round
T - 1 begins says so: it *votes*, before it takes part in that round's exchange. As round T begins, each rank looks at
the votes: if all are for this request, it is in force from there on, and else it never will be. All ranks see the same
votes then, for round T - 1 ended on none before all had begun it, and a vote stands until the round
that it is for is over: until then, nobody votes again. So nothing is exchanged for a switch, nobody waits, a request
that comes too late for one rank comes to nothing on all, and who asked may be gone by then, or ask for something else.

So it is on one host. Across hosts no file has all votes, and votes are exchanged: see `MultiHostSwitch`.
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
"""A request is for the so-manieth round after the newest: all ranks see it in time, unless who asks is held up."""


class Request(NamedTuple):
    """A value to be in force from a round on; ``number`` tells requests apart.

    Both are 0 where the ranks are on several hosts: it is to be in force once all see it.
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
"""Not the same on all hosts, or not known of one that is silent."""


class Setting(NamedTuple):
    """What is to be in force: a value, and of a pipeline how far ahead each stage is."""

    value: int = 0
    ahead_S: tuple[int, ...] = ()

    @classmethod
    def of_plan(cls, ahead_S: Sequence[int]) -> Setting:
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
    """The state of a group, as far as one host knows; `whole_groups` has the whole of a group on several hosts.

    Attributes:
        name: of its file; on several hosts, what all of its files call it.
        ranks: the job's ranks in it, in the group's order.
        round: the newest that a rank has begun; ``all_begun`` is the newest that all have.
        value: in force on all ranks; None while they are between two rounds with different ones.
        since_step: the job's step from which on it is, by the last of them; -1 where unknown.
        request: the last one; `UNLIKE` while hosts have different ones.
        exchange_s: duration of an exchange without waiting and with nothing in force, of ``exchanged_bytes``; 0: none
            yet.
        stages: what microbatches take, of a pipeline.
        microbatches: of its step; 0 of no pipeline.
        here: on several hosts, the places of the ranks of this host; empty on one host.
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
        """What to ask for so that a value comes into force; None where it is, or was asked for and may yet be."""
        if self.here or self.request == UNLIKE:
            return None if self.request.value == value else Request(0, 0, value)
        may_come = self.all_begun < self.request.round
        if (self.request.value if may_come else self.value) == value:
            return None
        return Request(self.request.number % 0x7FFF + 1, self.round + ROUNDS_AHEAD, value)


def whole_groups(told: Iterable[SwitchStatus]) -> list[SwitchStatus]:
    """The groups of a job, by what all of its hosts tell: those of which some rank is not told of are left out."""
    groups: dict[str, list[SwitchStatus]] = {}
    for one in told:
        groups.setdefault(one.name, []).append(one)
    return [whole for some in groups.values() if (whole := _whole(some)) is not None]


def _whole(parts: Sequence[SwitchStatus]) -> SwitchStatus | None:
    first, *others = parts
    if not (others or first.here):
        return first
    here = sorted(place for one in parts for place in one.here)
    if any(one.ranks != first.ranks for one in others) or here != list(range(len(first.ranks))):
        return None
    values, requests = {one.value for one in parts}, {one.request for one in parts}
    return replace(
        first,
        round=max(one.round for one in parts),
        all_begun=min(one.all_begun for one in parts),
        value=first.value if len(values) == 1 else None,
        since_step=max(one.since_step for one in parts),
        request=first.request if len(requests) == 1 else UNLIKE,
        exchange_s=min(one.exchange_s for one in parts),
        exchanged_bytes=max(one.exchanged_bytes for one in parts),
        here=tuple(here),
    )


def as_range(numbers: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Numbers in short: a run of them, as most groups are, is its start, end and step; and whether it is one."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    run = range(numbers[0], numbers[0] + step * len(numbers), step) if numbers and step > 0 else range(0)
    is_range = len(run) > 0 and list(run) == list(numbers)
    return ((run.start, run.stop, run.step) if is_range else tuple(numbers)), is_range


def numbers_of(shortened: tuple[Sequence[int], bool], below: int) -> Sequence[int]:
    """The numbers that `as_range` has shortened: a range takes no room, however long it is.

    Raises ValueError where they are not distinct, not in 0 up to ``below``, or more than a group has ranks.
    """
    short, is_range = shortened
    if not all(type(one) is int for one in short) or (is_range and len(short) != 3):
        raise ValueError(f"{len(short)} numbers that are not ranks")
    found = range(*short) if is_range else tuple(short)
    if isinstance(found, range):
        ends, differ = (*found[:1], *found[-1:]), found.step > 0
    else:
        ends, differ = found, len(set(found)) == len(found)
    if not differ or len(found) > MAX_RANKS or not all(0 <= one < below for one in ends):
        raise ValueError(f"{len(found)} numbers that are not ranks")
    return found


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

SMOOTHED = 8
"""Of so many rounds about, an exchange's time is the mean."""
NO_VOTE = -1
"""That of a rank that cannot do what is asked for."""

VOTES_APART_NS, MOST_ROUNDS_APART = 1_000_000_000, 32
"""Across hosts, votes are about so far apart, and at most so many rounds."""

Cast = Callable[[Sequence[int]], Callable[[], Sequence[int]]]
"""Has the greatest of each of some numbers found over all ranks, of which nobody waits for another here. What it gives
says them, and is called once a later round begins."""

_PROLOGUE = struct.Struct("=8sII")
_WORD = struct.Struct("=q")


class Switch:
    """A rank's end of the file of its group, by its ``place`` there; driven as each round begins, on one thread.

    ``ahead_S`` is how far ahead stages of a pipeline are, by the value in force, if that says so. Raises RingError
    where the file is none of these.
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
                self.ahead_S = self._asked_S
                self._in_force(mine.value, step)
        else:
            asked = Request.of(words[0])
            if asked.round == self._round + 1 and self._accepts(asked.value):
                self._vote = words[line + VOTE] = asked.word
        words[line + ROUND] = self._round
        return self._value

    def _in_force(self, value: int, step: int) -> None:
        self._value = value
        self._words[self._line + SINCE_STEP], self._words[self._line + IN_FORCE] = step, value

    def _accepts(self, value: int) -> bool:
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


class MultiHostSwitch(Switch):
    """The same for a rank of a group on several hosts, each of which has a file of its own. It has no pipeline's plan.

    Rounds are over long before a word comes from one host to the others, so a request is for none: it says what is to
    be in force, and stands. As round T begins, each rank votes for the request that it sees; votes are exchanged among
    all ranks while that round goes on, and counted as the next one begins. What all have voted for is in force from
    there on, and else what was before: all ranks count the same votes, and none waits, for round T ended on none before
    all had voted.

    With its vote each rank says what a round takes it. By the longest, all agree in which round the next vote is: an
    exchange costs more than all else of a round, and requests are rare. ``cast`` exchanges votes; set it before the
    first round.
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
            asked, now_ns = Request.of(words[0]).value, self.clock()
            vote = asked if self._accepts(asked) else NO_VOTE
            # (of the first there is nothing to be said, and the second is at once)
            round_ns = (now_ns - self._cast_ns) // self._rounds_apart if self._cast_ns else VOTES_APART_NS
            self._cast_ns = now_ns
            self._counted = self.cast((vote, -vote, round_ns))
        words[self._line + ROUND] = self._round
        return self._value


class SwitchFile(OpenFile):
    """The file of a group, read and written as one by who asks; methods raise RingError where it is none."""

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
        rounds, values = [one[ROUND] for one in lines], {one[IN_FORCE] for one in lines}
        of_stages = lines if self.microbatches else []
        of_ranks = [] if self.microbatches else lines
        return SwitchStatus(
            name=self.name,
            ranks=self.ranks,
            round=max(rounds),
            all_begun=min(rounds),
            value=values.pop() if len(values) == 1 else None,
            since_step=max(one[SINCE_STEP] for one in lines),
            request=Request.of(request),
            # (who comes last waits for nobody)
            exchange_s=max(0, min((one[EXCHANGE_NS] for one in of_ranks), default=0)) / 1e9,
            exchanged_bytes=max((one[EXCHANGED_BYTES] for one in of_ranks), default=0),
            stages=tuple(
                StageTimes(forward / 1e9, backward / 1e9, there / 1e9, back / 1e9, most)
                for forward, backward, there, back, most in (one[FORWARD_NS : MOST + 1] for one in of_stages)
            ),
            microbatches=self.microbatches,
            here=self.here if self.group else (),
        )

    def ask(self, request: Request, ahead_S: Sequence[int] = ()) -> None:
        """Have a value be in force from a round on, in the place of what was asked for before."""
        if ahead_S:
            self.write_at(bytes(ahead_S).ljust(MAX_STAGES, b"\0"), REQUEST_AT + _WORD.size)
        self.write_at(_WORD.pack(request.word), REQUEST_AT)


def make_switch(
    directory: Path, ranks: Sequence[int], microbatches: int = 0, *, group: str = "", here: Sequence[int] = ()
) -> Path:
    """Make the file of a group, numbered above all there are, and remove those of groups that are gone.

    Args:
        directory: that of the rings.
        ranks: of the group, in its order.
        microbatches: of a step, where the group is a pipeline of a stage a rank.
        group: its name on all of its hosts, where these are several.
        here: then, the places in it of the ranks on this host.

    Raises OSError where the directory is missing, full or read-only, RingError where the group has too many ranks.
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
    """Words of a rank's line, and bytes of the file."""
    line_words = SENT_AT + SENT * microbatches if microbatches else LINE_WORDS
    return line_words, REQUEST_AT + LINE_BYTES + _WORD.size * line_words * n_here


def find_switches(directory: Path, first: int | str = "*") -> list[Path]:
    """The files in a directory, the newest last of those of a first rank; those that gone groups have left, too."""
    return sorted((path for path in directory.glob(f"rank-{first}.*.switch") if _number(path) >= 0), key=_number)


def newest_of_each(found: Iterable[SwitchFile]) -> list[SwitchFile]:
    """The files of groups as they are now: ranks that have joined again have another one than before.

    A rank may be the first one of several groups, as of a pipeline's and of those that have copies of its stage.
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
    wants: str,
    group: ProcessGroup | None,
    *,
    fits: bool,
    microbatches: int = 0,
    multi_host: bool = False,
) -> Switch | None:
    """This rank's end of a new file of the group; None where sftriage does not watch the job. On all ranks at once.

    Each host of the group has a file of its own, of the ranks there; those share it that have one directory of rings.
    None on all ranks, with a warning that says what is ``as_before`` and what the remedy ``wants``, where a rank does
    not fit (``fits``), ranks are on several hosts and it does not work across these, a host has no file, or releases of
    sftriage differ.
    """
    # (not above: agents read switches without torch, and without a Monitor)
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
    # (so that a group that has begun anew is another one on all of its hosts, with another name)
    everything = gathered((__version__, rings is not None, mine, secrets.token_hex(8)))
    release_R, watched_R, host_R, token_R = zip(*everything, strict=True)
    switch, is_multi_host = None, len(set(host_R)) > 1
    if len(set(release_R)) > 1:
        wants = f"the ranks run incompatible releases of sftriage: {', '.join(sorted(set(release_R)))}"
    elif rings is not None and None not in host_R and (multi_host or not is_multi_host):
        here = [at for at, host in enumerate(host_R) if host == mine]
        parts: dict[str, Any] = {"group": f"ranks-{ranks[0]}.{token_R[0]}", "here": here} if is_multi_host else {}
        make = partial(make_switch, rings, ranks, microbatches, **parts)
        name = gathered(made.name if place == here[0] and (made := _unless_refused(make)) else "")[here[0]]
        kind = MultiHostSwitch if is_multi_host else Switch
        switch = _unless_refused(partial(kind, rings / name, place)) if name else None
    if not all(gathered(switch is not None)):
        if True in watched_R and place == watched_R.index(True):
            warn("%s: %s", as_before, wants)
        return None
    return switch


def _identity(rings: Path) -> tuple[str, int, int]:
    found = rings.stat()
    boot_id = BOOT_ID.read_text(encoding="ascii") if BOOT_ID.exists() else socket.gethostname()
    return boot_id, found.st_dev, found.st_ino


def _unless_refused(what: Callable[[], T]) -> T | None:
    try:
        return what()
    except (OSError, RingError) as error:
        warn("sftriage cannot name a straggler here: %s", error)
        return None
