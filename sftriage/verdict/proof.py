"""Whether the evidence of a pause proves a hang, and when a timeout of a collective would end the job. Pure.

A rank that is busy while the others wait may evaluate or save. A proof is what no healthy job shows: ranks that
disagree on a call that does not end, a dead or stopped rank that others wait for, threads of a rank that wait for each
other's locks, or all ranks in calls that wait for each other. The ranks answer one after the other, so a job that goes
on may show that once: a proof takes two snapshots between which no call of the ranks concerned has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from sftriage.model.hangs import GroupCalls, Hang, HangEvidence, RankEvidence
from sftriage.verdict.blocked import collective_of, in_backward, main_of
from sftriage.verdict.collectives import is_default

_NS_PER_S = 1e9
CONFIRM_S = 2.0
"""The second snapshot of a proof follows this soon."""
FIRST_AGAIN_S, MOST_AGAIN_S, COST_FACTOR = 10.0, 60.0, 10.0
"""Otherwise the time to the next snapshot doubles, within these bounds, and is this many times what gathering took."""
MARGIN_FRACTION, MARGIN_S = 0.1, 15.0
"""What is left of a timeout for the evidence: this share of it, at least this long, and half of it at most."""

_UNEVEN_CALL = "all_gather"
"""NCCL allows it with different sizes on the ranks."""

_PendingCall = tuple[int, str, int]
"""The first call of a rank in a process group that has not ended: the rank, the group, and its number there."""
_Claim = tuple[str, tuple[int, ...], str, int | None, frozenset[_PendingCall]]
"""What a hang is about, and the pending calls of its ranks."""


@dataclass(frozen=True, slots=True)
class PauseSnapshot:
    """What the evidence of all ranks shows at one time of a pause.

    Attributes:
        began_ns, again_ns: when gathering it began, and when to gather the next one.
        interval_s: the time to the next one that doubles.
        claim: a hang that is proved once the next snapshot shows the same; None if there is none.
        proved: whether the snapshot before showed it, too.
        since_ns: the pending calls, with the earliest time at which each can have begun.
        timeout: of the call whose timeout is over first, the timeout in seconds, and when to report it if a snapshot
            from then on has that call, too; None if unknown.
    """

    began_ns: int
    again_ns: int
    interval_s: float
    claim: _Claim | None
    proved: bool
    since_ns: Mapping[_PendingCall, int]
    timeout: tuple[float, int] | None


def before_timeout_s(timeout_s: float) -> float:
    """How long after the begin of a call to report it, so that its evidence is there before its timeout."""
    return max(0.5 * timeout_s, timeout_s - max(MARGIN_FRACTION * timeout_s, MARGIN_S))


def snapshot_of(evidence: HangEvidence, began_ns: int, ended_ns: int, earlier: PauseSnapshot | None) -> PauseSnapshot:
    """The snapshot that evidence shows, gathered from ``began_ns`` to ``ended_ns``, after an ``earlier`` one."""
    confirm_ns, since_ns = int(CONFIRM_S * _NS_PER_S), dict[_PendingCall, int]()
    limits: list[tuple[int, float]] = []
    for rank in evidence.ranks:
        entered_ns = ended_ns - int(rank.in_stage_s * _NS_PER_S)
        new_ns = entered_ns if earlier is None else max(entered_ns, earlier.began_ns)
        for call in _pending(rank):
            is_new = earlier is None or call not in earlier.since_ns
            since_ns[call] = new_ns if earlier is None else earlier.since_ns.get(call, new_ns)
            if rank.timeout_s:
                due_ns = since_ns[call] + int(before_timeout_s(rank.timeout_s) * _NS_PER_S)
                # (a call that is new may have begun just now: the next snapshot shows whether it ends)
                due_ns = max(due_ns, began_ns + confirm_ns) if is_new else due_ns
                limits.append((due_ns, rank.timeout_s))
    report_ns, timeout_s = min(limits, default=(0, 0.0))
    claim = _claim(evidence)
    proved = claim is not None and earlier is not None and earlier.claim == claim
    interval_s = FIRST_AGAIN_S if earlier is None else min(2 * earlier.interval_s, MOST_AGAIN_S)
    again_s = max(interval_s, COST_FACTOR * (ended_ns - began_ns) / _NS_PER_S)
    if claim is not None and (earlier is None or earlier.claim is None):
        again_s = CONFIRM_S
    again_ns = began_ns + int(again_s * _NS_PER_S)
    if began_ns < report_ns < again_ns:
        again_ns = report_ns
    timeout = (timeout_s, report_ns) if limits else None
    return PauseSnapshot(began_ns, again_ns, interval_s, claim, proved, since_ns, timeout)


def _pending(rank: RankEvidence) -> Iterator[_PendingCall]:
    return ((rank.rank, group.name, min(group.pending)) for group in rank.groups if group.pending)


def _claim(evidence: HangEvidence) -> _Claim | None:
    hang = evidence.hang
    by_rank = {rank.rank: rank for rank in evidence.ranks}
    if hang is None or not by_rank.keys() >= {*hang.ranks, *hang.others} or not _is_certain(hang, by_rank, evidence):
        return None
    circle = "circle" in hang.numbers
    about = by_rank if circle else {*hang.ranks, *hang.others}
    calls = frozenset(call for rank in about for call in _pending(by_rank[rank]))
    return hang.kind, hang.ranks, hang.group, hang.number, calls


def _is_certain(hang: Hang, by_rank: Mapping[int, RankEvidence], evidence: HangEvidence) -> bool:
    """Whether no job that goes on can be in this state, other than for a moment."""
    ranks = [by_rank[rank] for rank in hang.ranks]
    match hang.kind:
        case "different_collective" | "different_sizes" | "different_types":
            uneven = hang.kind == "different_sizes" and hang.call is not None and hang.call.op == _UNEVEN_CALL
            both = (_calls_of(by_rank[rank], hang) for rank in (*hang.ranks, *hang.others))
            return not uneven and any(hang.number in calls.pending for calls in both if calls)
        case "skipped" | "extra":
            return _all_inside(hang.group_ranks, hang, by_rank)
        case "elsewhere":
            all_known = len(by_rank) >= evidence.world_size
            return all_known and "circle" in hang.numbers and all(map(_is_blocked, by_rank.values()))
        case "dead":
            return hang.number is not None
        case "absent":
            return bool(hang.others) and all(rank.state == "T" or _is_deadlocked(rank) for rank in ranks)
        case _:
            return False


def _calls_of(rank: RankEvidence, hang: Hang) -> GroupCalls | None:
    """A rank's calls in the group of a hang."""
    found = (group for group in rank.groups if (is_default(group) if not hang.group else group.name == hang.group))
    return next(found, None)


def _all_inside(members: Collection[int], hang: Hang, by_rank: Mapping[int, RankEvidence]) -> bool:
    calls = [_calls_of(by_rank[rank], hang) if rank in by_rank else None for rank in members]
    return bool(calls) and all(of_rank is not None and of_rank.pending for of_rank in calls)


def _is_blocked(rank: RankEvidence) -> bool:
    """Whether the thread that trains waits for a call that has not ended, rather than for its own work."""
    main = main_of(rank.threads)
    waits = main is not None and (bool(collective_of(main.frames)) or in_backward(main.frames))
    return waits and any(group.pending for group in rank.groups)


def _is_deadlocked(rank: RankEvidence) -> bool:
    """Whether the thread that trains waits for a lock in a circle of threads that hold each other's."""
    named = {f"thread {thread.name}": thread for thread in rank.threads}
    if len(named) < len(rank.threads):
        return False
    met, thread = set[str](), main_of(rank.threads)
    while thread is not None and thread.name not in met:
        met.add(thread.name)
        thread = named.get(thread.wait.held_by)
    return thread is not None
