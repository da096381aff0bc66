"""Where the ranks of a process group part: the first call at which they disagree, and how. Pure numpy.

Calls of all ranks are numbered by their signature: operation, types, sizes and line. Ranks with the same calls are one
row, so that 8,192 ranks that agree are few rows. Two ranks may well call the same collective from different lines;
a line counts only where the calls after it are the others' calls, shifted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sftriage.model.hangs import Call, GroupCalls, RankEvidence

Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]
Aspect = Literal["different_collective", "different_types", "different_sizes"]
PartingKind = Literal[Aspect, "skipped", "extra"]

ASPECTS: tuple[Aspect, ...] = ("different_collective", "different_types", "different_sizes")
UNKNOWN = -1
"""The number of a signature, or of an aspect of it, that nothing can differ from."""
MAX_SHIFT = 64
MAX_TRIALS, MAX_SIDES = 256, 4
"""How often a shift is tried in a group, and for how many different calls under one number."""
CERTAIN_OVERLAP = 3
"""Shifted calls in a row that show a shift by themselves; fewer do with the program's usual order, or the step."""
REALIGNED_CALLS = 3
"""Ranks that agree on the last calls have not parted, whatever they called before."""
_SIZES_DIFFER = ("all_to_all", "alltoall", "gather", "scatter", "send", "recv", "coalesced")
_SIZES_COUNT = ("reduce_scatter", "all_gather")
_ALIASES = {
    "all_gather_into_tensor": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall": "all_to_all",
    "allreduce": "all_reduce",
}


@dataclass(frozen=True, slots=True, eq=False)
class PendingGroup:
    """A process group with calls that have not ended.

    ``rows`` are the calls of the ranks that know it; ``complete``: all members are known.
    """

    name: str
    members: tuple[int, ...]
    rows: Mapping[int, GroupCalls]
    default: bool
    complete: bool = True

    @property
    def label(self) -> str:
        return "" if self.default else self.name


class Parting(NamedTuple):
    """The ranks ``odd`` part from ``others`` at a number. ``tie``: as many on each side; ``before``: or earlier.

    ``sides``: some of what ``odd`` called, by ranks, where it is not all the same.
    """

    kind: PartingKind
    number: int
    odd: tuple[int, ...]
    others: tuple[int, ...]
    call: Call
    other_call: Call
    shift: int = 0
    tie: bool = False
    before: bool = False
    sides: tuple[tuple[tuple[int, ...], Call], ...] = ()


def is_default(group: GroupCalls) -> bool:
    """Whether a group is the one of all ranks."""
    return group.description == "default_pg" or group.name == "0"


def groups_of(ranks: Sequence[RankEvidence], world: Sequence[int]) -> list[PendingGroup]:
    """All groups in which a call has not ended; equal names with different members are different groups."""
    named: dict[str, dict[tuple[tuple[int, int, int], ...] | None, dict[int, GroupCalls]]] = {}
    pending: set[str] = set()
    for rank in ranks:
        for group in rank.groups:
            named.setdefault(group.name, {}).setdefault(group.members, {})[rank.rank] = group
            if group.pending:
                pending.add(group.name)
    found: list[PendingGroup] = []
    for name in pending:
        by_members = named[name]
        unknown = dict(by_members.pop(None, {}))
        for ranges, rows in by_members.items():
            members = sorted({rank for first, last, step in ranges or () for rank in range(first, last + 1, step or 1)})
            rows |= {rank: unknown.pop(rank) for rank in members if rank in unknown}
            found += _group(name, members, rows)
        if unknown:
            default = any(is_default(row) for row in unknown.values())
            members = list(world) if default else sorted(rank for rank, row in unknown.items() if row.calls)
            found += _group(name, members, unknown, complete=default)
    return sorted(found, key=lambda group: (not group.default, group.name, group.members))


def _group(
    name: str, members: Sequence[int], rows: dict[int, GroupCalls], *, complete: bool = True
) -> Iterator[PendingGroup]:
    if any(row.pending for row in rows.values()):
        yield PendingGroup(name, tuple(members), rows, any(is_default(row) for row in rows.values()), complete)


def call_at(rank: RankEvidence, row: GroupCalls, number: int) -> Call | None:
    """What a rank called at a number, as far as its record reaches."""
    at = number - row.first
    if not 0 <= at < len(row.calls) or row.calls[at] < 0:
        return None
    return rank.calls[row.calls[at]]


@cache
def operation(op: str) -> str:
    """The collective, whichever of its functions was called."""
    plain = op.strip("_").removesuffix("_base")
    return _ALIASES.get(plain, plain)


@dataclass(slots=True)
class Signatures:
    """Numbers for the signatures of all ranks' calls, and what each differs in."""

    _ids: dict[object, int] = field(default_factory=dict)
    _calls: list[Call] = field(default_factory=list)
    _tables: dict[int, Ids] = field(default_factory=dict)
    _positions: dict[tuple[int, ...], NDArray[np.intp]] = field(default_factory=dict)
    _aspects: tuple[int, dict[str, Ids]] = field(default_factory=lambda: (-1, {}))

    def row(self, rank: RankEvidence, calls: tuple[int, ...]) -> Ids:
        """A rank's calls as signatures."""
        if (table := self._tables.get(rank.rank)) is None:
            table = np.fromiter((*map(self._number, rank.calls), UNKNOWN), np.int32, len(rank.calls) + 1)
            self._tables[rank.rank] = table
        if (positions := self._positions.get(calls)) is None:
            positions = self._positions[calls] = np.array(calls, np.intp)
        return table[positions]

    def call(self, signature: int) -> Call:
        return self._calls[signature]

    def line(self, signature: int) -> object:
        return _lines(self._calls[signature])

    def aspects(self) -> dict[str, Ids]:
        """For each aspect a number by signature; the last is for an unknown call. ``uneven``: sizes of all_gather."""
        if self._aspects[0] == len(self._calls):
            return self._aspects[1]
        names: dict[object, int] = {}
        columns: dict[str, list[int]] = {aspect: [] for aspect in (*ASPECTS, "uneven")}
        for call in self._calls:
            op = operation(call.op)
            uneven = op == "all_gather"
            counts = tuple(map(prod, _sizes(call)))  # (of elements: 2 x 3 floats go together with 6)
            values = (op, frozenset(call.dtypes), () if uneven else counts, call.sizes if uneven else ())
            for column, value in zip(columns.values(), values, strict=True):
                column.append(names.setdefault(value, len(names)) if value else UNKNOWN)
        aspects = {name: np.array([*column, UNKNOWN], np.int32) for name, column in columns.items()}
        self._aspects = len(self._calls), aspects
        return aspects

    def _number(self, call: Call) -> int:
        key = (call.op, _sizes(call), call.dtypes, _lines(call))
        number = self._ids.setdefault(key, len(self._calls))
        if number == len(self._calls):
            self._calls.append(call)
        return number


def parting_of(
    group: PendingGroup, by_rank: Mapping[int, RankEvidence], signatures: Signatures, front: int, missing: bool
) -> Parting | None:
    """Where the ranks of a group part, at ``front`` or before; None if they agree.

    ``front`` is the first number that has not ended, ``missing`` whether ranks have not come to it: then calls after it
    explain nothing.
    """
    recorded = {rank: row for rank, row in group.rows.items() if row.calls}
    start = max((row.first for row in recorded.values() if row.first <= front), default=front)
    stop = max((row.first + len(row.calls) for row in recorded.values()), default=front)
    rows: dict[bytes, tuple[Ids, list[int]]] = {}
    for number, row in recorded.items():
        ids = signatures.row(by_rank[number], row.calls)
        ids = (
            ids[start - row.first :]
            if row.first <= start
            else np.pad(ids, (row.first - start, 0), "constant", constant_values=UNKNOWN)
        )
        rows.setdefault(ids.tobytes(), (ids, []))[1].append(number)
    if len(rows) < 2:
        return None
    ids_CN = np.full((len(rows), stop - start), UNKNOWN, np.int32)
    for at, (ids, _) in enumerate(rows.values()):
        ids_CN[at, : len(ids)] = ids
    stream = _Streams(group, ids_CN, [ranks for _, ranks in rows.values()], start, by_rank, signatures, front - start)
    earlier = any(row.first > 1 for row in recorded.values())
    found = stream.shifted() or stream.different(missing)
    return found and found._replace(before=earlier and found.number == start)


@dataclass(slots=True, eq=False)
class _Streams:
    """The calls of a group's ranks side by side: C rows of ranks that call the same, N numbers from ``start`` on."""

    group: PendingGroup
    ids_CN: Ids
    ranks_C: list[list[int]]
    start: int
    by_rank: Mapping[int, RankEvidence]
    signatures: Signatures
    front: int
    trials: int = 0

    def different(self, missing: bool) -> Parting | None:
        """The first call of the last stretch in which ranks call what cannot go together."""
        aspects = self.signatures.aspects()
        last = self.front + 1 if missing else self.ids_CN.shape[1]
        differ_N = np.zeros(last, dtype=bool)
        for aspect in ASPECTS:
            differ_N |= _differ(aspects[aspect][self.ids_CN[:, :last]])
        at_K = np.flatnonzero(differ_N)
        if not len(at_K):
            return None if missing else self._uneven(aspects["uneven"])
        if self.front - at_K[-1] >= REALIGNED_CALLS:
            return None
        gaps = np.flatnonzero(np.diff(at_K) > REALIGNED_CALLS)
        at = int(at_K[gaps[-1] + 1] if len(gaps) else at_K[0])
        aspect = next(name for name in ASPECTS if _differ(aspects[name][self.ids_CN[:, at : at + 1]])[0])
        return self._votes(at, aspects[aspect], aspect)

    def _uneven(self, uneven: Ids) -> Parting | None:
        """An all_gather of different sizes that does not end, where the ranks had no such before."""
        sizes_CN = uneven[self.ids_CN[:, : self.front + 1]]
        differ_N = _differ(sizes_CN)
        if not differ_N[-1] or differ_N[:-1].any():
            return None
        return self._votes(self.front, uneven, "different_sizes")

    def _votes(self, at: int, aspect: Ids, kind: PartingKind) -> Parting:
        most, *rest = self._sides(at, aspect)
        sides = self._sides(at)
        others = next(side for side in sides if side[0] in most)  # (the same may be called at several lines)
        odd = sorted(rank for side in rest for rank in side)
        called = [(tuple(side), self._call(side, at)) for side in sides if side[0] in odd]
        return Parting(
            kind,
            self.start + at,
            tuple(odd),
            tuple(others),
            called[0][1],
            self._call(others, at),
            tie=len(rest[0]) == len(most),
            sides=tuple(called[:MAX_SIDES]) if len(called) > 1 else (),
        )

    def _sides(self, at: int, aspect: Ids | None = None) -> list[list[int]]:
        """The ranks that called at a number, sorted, by what they called; most of them first."""
        sides: dict[int, list[int]] = {}
        for ranks, signature in zip(self.ranks_C, self.ids_CN[:, at].tolist(), strict=True):
            value = signature if aspect is None else int(aspect[signature])
            if value != UNKNOWN:
                sides.setdefault(value, []).extend(ranks)
        return sorted(map(sorted, sides.values()), key=lambda side: (-len(side), side))

    def _call(self, ranks: Sequence[int], at: int) -> Call:
        """What the first of these ranks called."""
        found = call_at(self.by_rank[ranks[0]], self.group.rows[ranks[0]], self.start + at)
        assert found is not None  # its signature is known
        return found

    def shifted(self) -> Parting | None:
        """The first call from which on some ranks call what the others call, that many calls later or earlier."""
        tried: set[bytes] = set()
        for at in np.flatnonzero(_differ(self.ids_CN)).tolist():
            column = np.unique(self.ids_CN[:, at]).tobytes()
            if column in tried:
                continue
            tried.add(column)
            most, *rest = self._sides(at)
            for odd in rest[:MAX_SIDES]:
                if shift := self._shift(at, odd, most):
                    return self._behind(at, odd, most, shift, tie=len(rest[0]) == len(most))
                if self.trials > MAX_TRIALS:
                    return None
        return None

    def _behind(self, at: int, odd: list[int], others: list[int], shift: int, *, tie: bool) -> Parting:
        """The shift as a parting. Of as many ranks on each side, those are behind that left out a usual call."""
        if tie:
            mine, theirs = (self.ids_CN[self._rows(ranks)[0]] for ranks in (odd, others))
            past = mine[:at]
            usual = [at > 0 and _follows(past[:-1], past[-1], ids[at]) for ids in (mine, theirs)]
            tie = usual[0] == usual[1] or usual[shift > 0] is not True
            if not tie and shift < 0:
                odd, others, shift = others, odd, -shift
        kind: PartingKind = "skipped" if shift > 0 else "extra"
        calls = self._call(odd, at), self._call(others, at)
        return Parting(kind, self.start + at, tuple(odd), tuple(others), *calls, abs(shift), tie)

    def _shift(self, at: int, odd: list[int], others: list[int]) -> int:
        """How many calls ``odd`` are behind from there on; negative: ahead; 0: neither, or they do not agree on it."""
        usual = max(self._rows(others), key=lambda row: (_length(self.ids_CN[row]), len(self.ranks_C[row])))
        rows = self._rows(odd)
        self.trials += len(rows)
        if self.trials > MAX_TRIALS:
            return 0
        shifts = {self._shift_of(at, row, usual) for row in rows}
        return shifts.pop() if len(shifts) == 1 else 0

    def _rows(self, ranks: Sequence[int]) -> list[int]:
        chosen = set(ranks)
        return [row for row, of in enumerate(self.ranks_C) if of[0] in chosen]

    def _shift_of(self, at: int, odd: int, usual: int) -> int:
        mine, theirs = self.ids_CN[odd], self.ids_CN[usual]
        mine, theirs = mine[: _length(mine)], theirs[: _length(theirs)]
        a, b, past = mine[at:], theirs[at:], theirs[:at]
        steps = self.by_rank[self.ranks_C[odd][0]].step, self.by_rank[self.ranks_C[usual][0]].step
        ahead = steps[0] - steps[1] if min(steps) >= 0 else 0
        moved = self.signatures.line(int(a[0])) != self.signatures.line(int(b[0]))
        both = min(len(a), len(b))
        if both > 1 and _alike(a[1:both], b[1:both]):
            return 0  # they agree on what follows: it was another call in the same place
        skipped = self._first(a, b, lambda k: moved and (_follows(past, b[k - 1], a[0]) or ahead > 0))
        usually = len(past) > 0 and _follows(past[:-1], past[-1], b[0])  # what the others called was due
        extra = self._first(b, a, lambda _: moved and usually)
        if skipped and (not extra or skipped < extra):
            return skipped
        if extra and (not skipped or extra < skipped):
            return -extra
        if skipped and extra:  # the program repeats two calls: only their steps differ
            fewer = ahead or (len(b) - len(a) if mine[-1] == theirs[-1] else 0)
            return skipped if fewer > 0 else -extra if fewer < 0 else 0
        return self._by_step(a, b, ahead, usually, _follows(past, b[0], a[0])) if moved else 0

    def _first(self, a: Ids, b: Ids, confirmed: Callable[[int], bool]) -> int:
        """By how many calls ``b`` has to move up to be ``a``; 0 if it never is."""
        near = b[1 : MAX_SHIFT + 1]
        for k in (np.flatnonzero((near == a[0]) | (near == UNKNOWN)) + 1).tolist():
            overlap = min(len(a), len(b) - k)
            if _alike(a[:overlap], b[k : k + overlap]) and (overlap >= CERTAIN_OVERLAP or confirmed(k)):
                return k
        return 0

    def _by_step(self, a: Ids, b: Ids, ahead: int, usually: bool, then: bool) -> int:
        """Of ranks that have come no further: the same number in another step is a call too few, or too many."""
        if ahead == 1 and len(b) == 1 and then:
            return 1
        ops = (operation(self.signatures.call(int(ids[0])).op) for ids in (a, b))
        if ahead == -1 and len(a) == 1 and len(set(ops)) == 1 and usually:
            return -1
        return 0


def _differ(values_CN: Ids) -> Mask:
    """Where known values of a column differ."""
    known_CN = values_CN >= 0
    highest_N = values_CN.max(axis=0, initial=UNKNOWN)
    lowest_N = np.where(known_CN, values_CN, np.iinfo(np.int32).max).min(axis=0, initial=np.iinfo(np.int32).max)
    differ_N: Mask = known_CN.any(axis=0) & (highest_N > lowest_N)
    return differ_N


def _sizes(call: Call) -> tuple[tuple[int, ...], ...]:
    """Its sizes, where they may matter."""
    return () if _sizes_differ(call.op) else call.sizes


@cache
def _sizes_differ(op: str) -> bool:
    plain = operation(op)
    return plain not in _SIZES_COUNT and any(part in plain for part in _SIZES_DIFFER)


def _lines(call: Call) -> tuple[tuple[str, int], ...]:
    return tuple([(frame.file, frame.line) for frame in call.frames])


def _alike(a: Ids, b: Ids) -> bool:
    return bool(np.all((a == b) | (a == UNKNOWN) | (b == UNKNOWN)))


def _follows(past: Ids, first: int, then: int) -> bool:
    """Whether two calls came one after the other before."""
    return bool(np.any((past[:-1] == first) & (past[1:] == then)))


def _length(ids: Ids) -> int:
    known = np.flatnonzero(ids >= 0)
    return int(known[-1]) + 1 if len(known) else 0
