"""Why a job hangs: the evidence of all its ranks in, one `Hang` out. Pure.

In each process group whose calls do not end, ranks either disagree (`collectives`), or some have not come to the call
that the others are in. Those may wait for others in turn: in another group, for a message, or for a file that another
rank has locked. The waits are followed to the ranks that wait for no rank, and `blocked` tells where these are. What
the evidence does not show is unknown: a rank that gave none is neither missing nor innocent.

`torch.distributed.flight_recorder` compares dumps of NCCL after a job has failed. It knows neither ranks without a
dump, nor what an absent rank does, nor calls that are shifted.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sftriage.model.hangs import Blocked, Call, Hang, HangEvidence, HangKind, RankEvidence
from sftriage.verdict.blocked import DEAD_STATES, ROOTED, blocked_of, collective_of, in_backward, in_transfer, main_of
from sftriage.verdict.collectives import MAX_SIDES, Parting, PendingGroup, Signatures, call_at, groups_of, parting_of
from sftriage.words.verdicts import some_ranks

MAX_BLOCKED = 8
"""Ranks for which a hang tells where they are."""
_Waits = dict[int, list[int]]
"""What waits for what: ranks, by their number, and the calls of fronts, as -1 for the first, -2, and so on."""
_RANKS_WAITS = ("recv", "send", "collective")
MAX_KEYS = 64
"""Ranks of a circle of waits of which each is tried as the one at fault."""
_PROCESS = re.compile(r"^(?:process )?(\d+)\b")


@dataclass(frozen=True, slots=True, eq=False)
class _Front:
    """The first call of a group that has not ended; without a group, as far as stacks show it.

    ``waiting`` are the ranks in it or in a later call, ``missing`` those that have not come to it, ``unsure`` those
    without evidence.
    """

    group: PendingGroup | None
    number: int | None
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    unsure: tuple[int, ...]

    @property
    def certain(self) -> bool:
        """Whether all members are known to be in it, if none is missing."""
        return not self.unsure and (self.group is None or self.group.complete)


def hang_of(evidence: HangEvidence) -> Hang:
    """Why the job hangs: its ranks disagree, or wait for ranks that are elsewhere, or for none."""
    job = _Job(evidence)
    fronts = [job.front(group) for group in job.groups]
    hang = job.parted(fronts) or job.cause([*fronts, *job.front_by_stacks(fronts)])
    return replace(hang, numbers={"hosts": len({rank.host for rank in evidence.ranks}), **hang.numbers})


@dataclass(slots=True, eq=False)
class _Job:
    evidence: HangEvidence
    by_rank: dict[int, RankEvidence] = field(init=False)
    world: list[int] = field(init=False)
    groups: list[PendingGroup] = field(init=False)
    ranks_by_pid: dict[tuple[str, int], int] = field(init=False)
    _blocked: dict[int, Blocked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_rank = {rank.rank: rank for rank in self.evidence.ranks}
        self.ranks_by_pid = {(rank.host, rank.pid): rank.rank for rank in self.evidence.ranks}
        self.world = sorted({*self.by_rank, *range(self.evidence.world_size)})
        self.groups = groups_of(self.evidence.ranks, self.world)

    def blocked(self, rank: int) -> Blocked:
        if rank not in self._blocked:
            known = self.by_rank[rank]
            found = blocked_of(known)
            holder = _PROCESS.search(found.held_by)
            peer = self.ranks_by_pid.get((known.host, int(holder[1]))) if holder else found.peer
            self._blocked[rank] = replace(found, peer=None if peer == rank else peer)
        return self._blocked[rank]

    # What is known of a rank

    def dead(self, rank: int) -> bool:
        known = self.by_rank.get(rank)
        if known is None:
            return False
        # (a rank that leaves gives up its ring before its process ends, which may hang then)
        gone = known.alive is False and not known.state
        return gone or known.exit_status is not None or known.state in DEAD_STATES

    def unsure(self, rank: int) -> bool:
        """Whether a rank that has no call there may still be in it."""
        known = self.by_rank.get(rank)
        if known is None:
            return True
        if self.dead(rank) or (known.answered and any(group.calls for group in known.groups)):
            return False
        if main := main_of(known.threads):
            return bool(collective_of(main.frames)) or _idle_in_backward(known)
        return known.answered or not known.state

    # Groups

    def front(self, group: PendingGroup) -> _Front:
        """The first number at which a call has not ended, and which ranks have come to it."""
        number = min(min(row.pending) for row in group.rows.values() if row.pending)
        arrived = {rank for rank, row in group.rows.items() if row.first + len(row.calls) > number}
        away = [rank for rank in group.members if rank not in arrived]
        unsure = tuple(rank for rank in away if self.unsure(rank))
        missing = tuple(sorted(set(away) - set(unsure)))
        waiting = tuple(sorted(rank for rank in arrived if group.rows[rank].pending))
        return _Front(group, number, waiting, missing, unsure)

    def front_by_stacks(self, fronts: Sequence[_Front]) -> Iterable[_Front]:
        """The ranks in a collective that no flight recorder has, by their main thread, and the others."""
        recorded = {rank for front in fronts for rank in front.waiting}
        inside, missing, unsure = list[int](), list[int](), list[int]()
        for rank in self.world:
            if rank not in recorded and self._in_collective(rank):
                inside.append(rank)
            else:
                (unsure if rank not in recorded and self.unsure(rank) else missing).append(rank)
        if inside and (not fronts or any({*inside} & {*front.missing} for front in fronts)):
            yield _Front(None, None, tuple(inside), tuple(missing), tuple(unsure))

    def _in_collective(self, rank: int) -> bool:
        """Whether its main thread is in a collective, by its stack."""
        known = self.by_rank.get(rank)
        if known is None or self.dead(rank) or not (main := main_of(known.threads)):
            return False
        return bool(collective_of(main.frames)) or (not known.calls and _idle_in_backward(known))

    def parted(self, fronts: Sequence[_Front]) -> Hang | None:
        """The group whose ranks disagree; of several the largest, but one in which a majority agrees.

        Of as many on each side, neither explains that others wait for one of them in another group.
        """
        signatures, found = Signatures(), list[tuple[_Front, Parting]]()
        for front in fronts:
            if front.group and front.number is not None:
                missing = bool(front.missing or front.unsure)
                parting = parting_of(front.group, self.by_rank, signatures, front.number, missing)
                if parting and not (parting.tie and self._crossed(front, fronts)):
                    found.append((front, parting))
        if not found:
            return None
        front, parting = max(found, key=lambda each: (not each[1].tie, len(each[1].odd) + len(each[1].others)))
        hang = self._hang(parting.kind, parting.odd, front, parting.others)
        flags = {"tie": parting.tie, "before": parting.before}
        return replace(
            hang,
            number=parting.number,
            call=parting.call,
            other_call=parting.other_call,
            blocked=(),
            sides=parting.sides,
            shift=parting.shift,
            numbers={name: 1.0 for name, holds in flags.items() if holds},
        )

    def _crossed(self, front: _Front, fronts: Sequence[_Front]) -> bool:
        """Whether ranks that a call lacks wait in another group, which lacks ranks of that call in turn."""
        return any({*front.missing} & {*each.waiting} and {*each.missing} & {*front.waiting} for each in fronts)

    # Waits

    def cause(self, fronts: Sequence[_Front]) -> Hang:
        """Follow the waits to the ranks that wait for no rank, or to the group in which all are, or around a circle."""
        waits = self._waits(fronts)
        targets = {target for of in waits.values() for target in of}
        ends = sorted(target for target in targets if not waits.get(target))
        ranks = [rank for rank in ends if rank >= 0]
        known = [rank for rank in ranks if not self.unsure(rank)]
        if known:
            return self._absent(known, fronts, waits)
        if ranks:
            return self._unknown(f"no evidence from {some_ranks(ranks)}")
        if complete := [fronts[-1 - end] for end in ends]:
            return self._complete(complete, fronts, waits)
        return self._circle(fronts, waits) if waits else self._alone()

    def _waits(self, fronts: Sequence[_Front]) -> _Waits:
        waits: _Waits = defaultdict(list)
        for at, front in enumerate(fronts):
            for rank in front.waiting:
                waits[rank].append(-1 - at)
            waits[-1 - at] = list(front.missing)
        for known in self.evidence.ranks:
            blocks = known.threads and known.rank not in waits and not self.dead(known.rank)
            if blocks and (peer := self.blocked(known.rank).peer) is not None:
                waits[known.rank].append(peer)
        return waits

    def _absent(self, ends: Sequence[int], fronts: Sequence[_Front], waits: _Waits) -> Hang:
        """Ranks that wait for no rank, while others wait for them."""
        dead = self._first_dead(ends)
        certain = [rank for rank in ends if self.by_rank[rank].answered or self.blocked(rank).code != "unknown"]
        local = [rank for rank in certain if self.blocked(rank).code not in _RANKS_WAITS]
        ends = dead or local or certain or ends
        chosen = set(ends)
        front = max(fronts, key=lambda each: (bool(chosen & {*each.missing}), len(each.waiting)), default=None)
        if front and not chosen & {*front.missing}:
            front = None
        ranks = sorted(chosen & {*front.missing}) if front else ends
        if not dead and not certain and front and len(ranks) > 1 and 2 * len(ranks) >= len(ranks) + len(front.waiting):
            return self._unknown(f"{some_ranks(ranks)} do not answer")
        others = front.waiting if front else _waiting_for(ranks, waits)
        return self._hang("dead" if dead else "absent", ranks, front, others)

    def _first_dead(self, ranks: Sequence[int]) -> list[int]:
        """Of these the dead ones; where some have failed, not those that a launcher ended then, nor those that left."""
        dead = [rank for rank in ranks if self.dead(rank)]
        failed = [rank for rank in dead if self.by_rank[rank].exit_status not in (None, 0, -15, 143)]
        return failed or dead

    def _complete(self, complete: Sequence[_Front], fronts: Sequence[_Front], waits: _Waits) -> Hang:
        """No rank is missing in these: it is the network, or the collective itself."""
        unrecorded = {rank for front in fronts if not front.group and front.missing for rank in front.waiting}
        if stuck := [front for front in fronts if front.group and unrecorded & {*front.missing}]:
            front = max(stuck, key=lambda each: len(each.waiting))
            return self._hang("absent", sorted(unrecorded & {*front.missing}), front, front.waiting)
        certain = [front for front in complete if front.certain]
        if not certain:
            if unsure := {rank for front in complete for rank in front.unsure}:
                return self._unknown(f"no evidence from {some_ranks(sorted(unsure))}")
            lacking = [front for front in fronts if front.missing]
            if not lacking:
                return self._unknown("which ranks are in that group is not known")
            front = max(lacking, key=lambda each: len(each.waiting))
            return self._elsewhere(front, front.missing, fronts, waits)
        front = max(certain, key=lambda each: len(each.waiting))
        if front.group is None:
            return self._by_functions(front)
        rows, number = front.group.rows, front.number or 0
        inside = [rank for rank in front.group.members if rank in rows and number in rows[rank].pending]
        found = {rank: self._with_root(rank, call_at(self.by_rank[rank], rows[rank], number)) for rank in inside}
        rooted = {rank: call for rank, call in found.items() if call and call.op.partition(" ")[2]}
        hang = self._by_operations(front, rooted, len(front.group.members)) if rooted else None
        if hang is None:
            left = [rank for rank in front.group.members if rank not in found]
            named = rooted if left else {*found} - {*rooted}
            hang = replace(self._hang("all_inside", inside, front, left), call=found[min(named or found)])
        return replace(hang, number=number)

    def _with_root(self, rank: int, call: Call | None) -> Call | None:
        """A call with its root, which no recorder has, by the stack of a rank that is in it."""
        main = main_of(self.by_rank[rank].threads)
        if not call or call.op not in ROOTED or not main or main.wait.peer is None:
            return call
        inside = collective_of(main.frames) == call.op
        return replace(call, op=f"{call.op} {ROOTED[call.op]} rank {main.wait.peer}") if inside else call

    def _by_functions(self, front: _Front) -> Hang:
        """All ranks are in collectives, of which only the functions are known."""
        calls = {rank: self._call_by_stack(rank) for rank in front.waiting}
        several = any(len(rank.groups) > 1 for rank in self.evidence.ranks)
        ops = {call.op for call in calls.values()}
        if len(ops) > 1 and (several or "" in ops):
            return self._unknown("the ranks are in different collectives, perhaps of different groups")
        hang = self._by_operations(front, calls, len(calls))
        return hang or replace(self._hang("all_inside", front.waiting, front, ()), call=calls[front.waiting[0]])

    def _by_operations(self, front: _Front, calls: Mapping[int, Call], n_ranks: int) -> Hang | None:
        """Ranks that are in different operations at a time; None if they are in the same.

        Of ``n_ranks``, most have to be in one, if any is to be at fault.
        """
        (usual, most), *rest = Counter(call.op for call in calls.values()).most_common()
        if not rest:
            return None
        by_line = defaultdict[object, list[int]](list)
        for rank, call in calls.items():
            by_line[call.op, call.frames[:1]].append(rank)
        sides = sorted(by_line.values(), key=lambda side: -len(side))
        others = next(side for side in sides if calls[side[0]].op == usual)
        called = [(tuple(side), calls[side[0]]) for side in sides if calls[side[0]].op != usual]
        odd = sorted(rank for side, _ in called for rank in side)
        return replace(
            self._hang("different_collective", odd, front, others),
            call=called[0][1],
            other_call=calls[others[0]],
            sides=tuple(called[:MAX_SIDES]) if len(called) > 1 else (),
            blocked=(),
            numbers={"tie": 1.0} if 2 * most <= n_ranks or rest[0][1] == most else {},
        )

    def _circle(self, fronts: Sequence[_Front], waits: _Waits) -> Hang:
        """Each waits for another: at fault are ranks without whose wait there were no circle, where most wait."""
        circle = _circle_of(waits)
        numbers = {"circle": 1.0}
        ranks = sorted(node for node in circle if node >= 0)
        inside = [front for at, front in enumerate(fronts) if -1 - at in circle]
        if not inside:
            return replace(self._hang("absent", ranks, None, _waiting_for(ranks, waits)), numbers=numbers)
        keys = {rank for rank in ranks[:MAX_KEYS] if not _circle_of({**waits, rank: []})} or {*waits}
        reached = _reached(keys, waits)
        inside = [front for at, front in enumerate(fronts) if -1 - at in reached and keys & {*front.missing}]
        front, *rest = sorted(inside, key=lambda each: -len(each.waiting))
        if rest and len(rest[0].waiting) == len(front.waiting) and keys & {*front.missing} != keys & {*rest[0].missing}:
            numbers["tie"] = 1.0
            front = max((front, rest[0]), key=lambda each: min(each.missing))  # (do not name the lowest rank)
        hang = self._elsewhere(front, sorted(keys & {*front.missing}), fronts, waits)
        return replace(hang, numbers=numbers)

    def _elsewhere(self, front: _Front, missing: Sequence[int], fronts: Sequence[_Front], waits: _Waits) -> Hang:
        """The ranks that a call lacks wait in another one; or for a message."""
        away = {rank: fronts[-1 - node] for rank in missing for node in waits[rank] if node < 0}
        if not away or all(front.group is None for front in away.values()):
            return self._hang("absent", missing, front, front.waiting)
        most = Counter(fronts.index(each) for each in away.values()).most_common(1)[0][0]
        ranks = [rank for rank in missing if away.get(rank) is fronts[most]]
        other = fronts[most]
        hang = self._hang("elsewhere", ranks, front, front.waiting)
        if other.group:
            number = min(other.group.rows[ranks[0]].pending)
            call = call_at(self.by_rank[ranks[0]], other.group.rows[ranks[0]], number)
            where = (other.group.label, number)
            hang = replace(hang, elsewhere=where, elsewhere_ranks=other.group.members, call=call, awaited=other.missing)
        return hang

    def _alone(self) -> Hang:
        """No rank waits for another, as far as is known."""
        if dead := self._first_dead(self.world):
            if len(dead) == len(self.world) > 1:
                return self._unknown("all ranks have ended")
            return self._hang("dead", dead, None, [rank for rank in self.world if not self.dead(rank)])
        unsure = [rank for rank in self.world if self.unsure(rank)]
        if unsure:
            return self._unknown(f"no evidence from {some_ranks(unsure)}")
        inside = [rank for rank in self.world if in_transfer(main_of(self.by_rank[rank].threads))]
        if inside and len(inside) < len(self.world):  # (point-to-point calls, whose peers are not known)
            return self._hang("absent", [rank for rank in self.world if rank not in inside], None, inside)
        codes = {self.blocked(rank).code for rank in self.world}
        if len(codes) == 1 and "unknown" not in codes:
            return self._hang("absent", self.world, None, ())
        hang = self._unknown("no rank is in a collective, and they wait for different things")
        return replace(hang, blocked=tuple(self.blocked(rank) for rank in self.world[:MAX_BLOCKED]))

    # Records

    def _hang(self, kind: HangKind, ranks: Collection[int], front: _Front | None, others: Collection[int]) -> Hang:
        """The record, without what ``ranks`` called; the call of the others is the one that most of them are in."""
        group, number, call = (front.group, front.number, None) if front else (None, None, None)
        if front and group and set(others) == {*front.waiting}:
            first = {rank: min(group.rows[rank].pending) for rank in front.waiting}
            number = min(Counter(first.values()).items(), key=lambda most: (-most[1], most[0]))[0]
            others = [rank for rank in front.waiting if first[rank] == number]
            call = call_at(self.by_rank[others[0]], group.rows[others[0]], number)
        elif front and not group:
            call = self._call_by_stack(front.waiting[0])
        return Hang(
            kind,
            tuple(ranks),
            tuple(dict.fromkeys(self.by_rank[rank].host for rank in ranks if rank in self.by_rank)),
            group.label if group else "",
            group.members if group else (),
            number,
            None,
            tuple(others),
            call,
            tuple(self.blocked(rank) for rank in [*ranks][:MAX_BLOCKED] if rank in self.by_rank),
        )

    def _call_by_stack(self, rank: int) -> Call:
        main = main_of(self.by_rank[rank].threads)
        frames = main.frames if main else ()
        return Call(collective_of(frames), frames=tuple(frame for frame in frames if frame.own)[:3])

    def _unknown(self, reason: str) -> Hang:
        return Hang("unknown", reason=reason)


def _idle_in_backward(rank: RankEvidence) -> bool:
    """Whether a rank without a flight recorder may be in a collective of its backward pass."""
    main = main_of(rank.threads)
    return main is not None and in_backward(main.frames) and (main.wait.cpu_fraction or 0.0) < 0.5


def _waiting_for(ranks: Sequence[int], waits: _Waits) -> list[int]:
    """The ranks that wait for these, directly or through others."""
    reverse: dict[int, list[int]] = defaultdict(list)
    for node, targets in waits.items():
        for target in targets:
            reverse[target].append(node)
    return sorted(node for node in _reached(ranks, reverse) - set(ranks) if node >= 0)


def _reached(nodes: Collection[int], waits: Mapping[int, Sequence[int]]) -> set[int]:
    """These nodes, and what they wait for, directly or through others."""
    found, new = set(nodes), [*nodes]
    while new:
        more = [node for node in waits.get(new.pop(), ()) if node not in found]
        found.update(more)
        new += more
    return found


def _circle_of(waits: _Waits) -> list[int]:
    """The nodes of a circle of waits, in their order; none if there is none."""
    circling = {node for node, targets in waits.items() if targets}
    waiting: dict[int, list[int]] = defaultdict(list)
    for node in circling:
        for target in waits[node]:
            waiting[target].append(node)
    left = {node: len(waits[node]) for node in circling}
    ended = [node for node in waiting if node not in circling]
    while ended:
        for node in waiting[ended.pop()]:
            left[node] -= 1
            if not left[node]:
                ended.append(node)
    at = next((node for node, count in left.items() if count), None)
    path: dict[int, int] = {}
    while at is not None and at not in path:
        path[at] = len(path)
        at = next(target for target in waits[at] if left.get(target))
    return [*path][path[at] :] if at is not None else []
