"""Which rank of a job went first, by how all of them ended: pure.

When one rank ends, the exchanges of the others fail, and their launcher ends them. These are consequences: a rank went
first if its end is none. Ends are timed by whoever noticed them, so those within `TIE_S` count as simultaneous.
"""

from __future__ import annotations

import re
import signal
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import Literal, get_args

from msgspec.structs import replace

from sftriage.model.ends import HostEnds, RankEnd
from sftriage.model.events import Departed, Departure, JobBroken, Place
from sftriage.model.hangs import GroupCalls, Hang, HangEvidence, RankEvidence
from sftriage.trainer.stacks import is_own
from sftriage.verdict.collectives import PartingKind
from sftriage.verdict.hangs import hang_of

TIE_S = 0.25
"""Launchers check their ranks every 0.1 s."""

MAX_MESSAGE, MAX_OTHERS = 200, 8
"""Characters of a message, and groups of ranks that followed."""

_CLOSED = "the connection was closed"
_FAILED = {
    "Connection reset by peer": "Connection reset by peer",
    "Connection closed by peer": "Connection closed by peer",
    "Broken pipe": "Broken pipe",
    "Connection was likely closed": _CLOSED,
    "failed to recv, got 0 bytes": _CLOSED,
    "remote process exited or there was a network error": "remote process exited or there was a network error",
    "ncclRemoteError": "ncclRemoteError",
    "communicator was aborted": "communicator was aborted",
    "collective operation timeout": "timed out",
    "imed out": "timed out",
    "ocket Timeout": "timed out",
}
"""Parts of messages of exceptions from an exchange that failed, and the reason in words."""
_FAILED_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_OF_PYTHON = {"ConnectionResetError", "ConnectionAbortedError", "BrokenPipeError", "EOFError", "TimeoutError"}
"""Exceptions from connections of the program itself, such as to a DataLoader worker."""
_IN_CONCERT = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGABRT}
"""Signals that several ranks get at once: as their job is ended, or as NCCL aborts an exchange that takes too long."""
_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? (\d+)")
_BY_SIGNAL = re.compile(r"is killed by signal: ([^.]+)")
_WITH_STATUS = re.compile(r"exited unexpectedly with exit code (\d+)")
_IN_WORKER = re.compile(r"Caught (\w+) in DataLoader worker process")
_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


@dataclass(frozen=True, slots=True)
class JobEnd:
    """What is known of the end of an attempt besides its ranks.

    ``signalled_s``: when the job got the first signal that ends it. ``succeeded``: this attempt ended with exit
    status 0.
    """

    attempt: int = 0
    world_size: int = 1
    succeeded: bool = False
    restarted: bool = False
    signalled_s: float | None = None


_Class = Literal["first", "followed", "ended", "left", "unknown", "alive"]


def broken_in(hosts: Sequence[HostEnds], time_s: float) -> list[JobBroken]:
    """Which rank of a job went first, by attempts that ended early; times of all hosts are on the same clock."""
    attempts: defaultdict[int, list[RankEnd]] = defaultdict(list)
    for end in (end for host in hosts for end in host.ranks):
        attempts[end.attempt].append(end)
    world_size = max((host.world_size for host in hosts), default=1)
    succeeded = all(host.status == 0 for host in hosts)
    signalled_s = min((host.signalled_s for host in hosts if host.signalled_s is not None), default=None)
    found = []
    for attempt, ends in sorted(attempts.items()):
        restarted = attempt != max(attempts)
        job = JobEnd(attempt, world_size, succeeded and not restarted, restarted, signalled_s)
        found.append(broken_by(sorted(ends, key=lambda end: end.rank), job, time_s))
    return [event for event in found if event is not None]


def broken_by(ranks: Sequence[RankEnd], job: JobEnd, time_s: float) -> JobBroken | None:
    """Which rank of an attempt went first; None if all is well, or if the job was ended from outside."""
    if job.succeeded:
        return None
    classes = {end.rank: _class_of(end) for end in ranks}
    first = _first(ranks, classes)
    failed = [end for end in ranks if classes[end.rank] == "followed" and end not in first]
    raised = [end for end in ranks if classes[end.rank] == "first" and end.error]
    noticed_s = min((end.time_s for end in first or failed or raised if end.time_s is not None), default=time_s)
    margin_s = TIE_S + max((end.margin_s for end in ranks), default=0.0)
    if not (first or failed or raised) or (job.signalled_s is not None and noticed_s >= job.signalled_s - margin_s):
        return None
    others = [end for end in ranks if end not in first and end not in failed and classes[end.rank] != "alive"]
    return JobBroken(
        time_s=noticed_s,
        attempt=job.attempt,
        first=_grouped(map(_departure_of, first)),
        others=(*_grouped(map(_gave_up, failed)), *_grouped(map(_departure_of, others)))[:MAX_OTHERS],
        world_size=job.world_size,
        restarted=job.restarted,
        mismatch=_mismatch(ranks, job.world_size),
    )


def _class_of(end: RankEnd) -> _Class:
    """Whether a rank may have gone first, followed since an exchange failed, was ended, or left in order."""
    if end.alive:
        return "alive"
    if end.error == "KeyboardInterrupt":
        return "ended"
    if end.error:
        return "followed" if reason_of(end) else "first"
    if end.status is None:
        return "ended" if end.sent else "unknown"
    if end.status == 0:
        return "left"
    return "ended" if end.sent else "first"


def _first(ranks: Sequence[RankEnd], classes: Mapping[int, _Class]) -> list[RankEnd]:
    """The ranks that may have gone first; none if all ends are consequences."""

    def of(wanted: _Class) -> list[RankEnd]:
        return [end for end in ranks if classes[end.rank] == wanted]

    found, unknown = _earliest(of("first")), of("unknown")
    if certain := [end for end in found if not _may_follow(end)]:
        return certain
    earlier = [end for end in unknown if not _is_later(end, _first_s(found))]
    if len(found) == 1 and not earlier:
        return found
    if any(end.status is None or -end.status not in _IN_CONCERT for end in found):
        return [] if earlier else found
    failed = _earliest(of("followed"))
    if found or not failed:
        return []
    failed_s = _first_s(failed)
    if left := [end for end in of("left") if not _is_later(end, failed_s)]:
        return left
    # Where a connection was lost at first, the rank that reports none has closed it. After a timeout, it was ended.
    if any("timed out" in reason_of(end) for end in failed):
        return []
    if silent := [end for end in unknown if end.silent]:
        return silent if len(silent) == len(unknown) and len({end.host for end in silent}) == 1 else []
    gone = _earliest([end for end in unknown if not _is_later(end, failed_s)], 0.0)
    return gone if len(gone) == 1 and (gone[0].time_s is not None or not of("ended")) else []


def _first_s(ends: Iterable[RankEnd]) -> float | None:
    return min((end.time_s for end in ends if end.time_s is not None), default=None)


def _is_later(end: RankEnd, than_s: float | None) -> bool:
    """Whether an end certainly came after a time, perhaps of another host."""
    return None not in (end.time_s, than_s) and (end.time_s or 0.0) - end.margin_s > (than_s or 0.0) + TIE_S


def _earliest(found: Collection[RankEnd], tie_s: float = TIE_S) -> list[RankEnd]:
    """The ends that no other certainly precedes. Times of one host are exact among each other."""
    first_s, of_host_s = _first_s(found) or 0.0, dict[str, float]()
    for end in found:
        if end.time_s is not None:
            of_host_s[end.host] = min(end.time_s, of_host_s.get(end.host, end.time_s))
    return [
        end
        for end in found
        if end.time_s is None or end.time_s <= min(of_host_s[end.host], first_s + end.margin_s) + tie_s
    ]


def _may_follow(end: RankEnd) -> bool:
    """Whether another rank's end may have led to an end that looks like a first one."""
    if _worker_of(end) is not None:
        return False
    if end.error:
        return end.sync or end.error in _OF_PYTHON
    return end.status is None or -end.status in _IN_CONCERT or (end.sync and end.status > 0)


def reason_of(end: RankEnd) -> str:
    """How an exchange failed by an exception, in words; "" if it is no consequence of another rank's end."""
    if _worker_of(end) is not None:
        return ""
    for text in (f"{end.error}: {end.message}", *end.chain):
        if text.partition(":")[0] in _OF_PYTHON:
            continue
        for phrase, words in _FAILED.items():
            if phrase in text:
                return words
        if text.partition(":")[0] in _FAILED_TYPES:
            return _first_line(text)
    return ""


def _worker_of(end: RankEnd) -> int | None:
    """The DataLoader worker whose end an exception reports."""
    for text in (end.message, *end.chain):
        if (found := _WORKER.search(text)) is not None:
            return int(found[1])
    if end.error in _OF_PYTHON:
        return next((worker for worker, status in end.workers.items() if status < 0), None)
    return None


def _departure_of(end: RankEnd) -> Departure:
    how: Departed = "silent" if end.silent else "died"
    if end.status is not None:
        how = "killed" if end.status < 0 else "exited" if end.status else "left"
    known = Departure((end.rank,), how, (end.host,) if end.host else (), end.status, stage=end.stage, step=end.step)
    if end.out_of_memory:
        known = replace(known, out_of_memory=end.out_of_memory, limit_bytes=end.limit_bytes)
    if (worker := _worker_of(end)) is not None:
        return replace(known, how="worker", worker=worker, status=_status_of_worker(end, worker))
    if not end.error or end.error == "KeyboardInterrupt":
        return known
    error, message, place = end.error, _first_line(end.message), end.place
    if (caught := _IN_WORKER.match(end.message)) is not None:
        # (its message is the worker's traceback)
        last = end.message.rstrip().rpartition("\n")[2]
        error, message = caught[1], last.partition(": ")[2]
        places = [Place(function, file, int(line)) for file, line, function in _LINE.findall(end.message)]
        place = next((place for place in reversed(places) if is_own(place.file)), place)
    return replace(known, how="raised", error=error, message=message, place=place)


def _gave_up(end: RankEnd) -> Departure:
    gave_up = replace(_departure_of(end), how="gave_up", status=None, message=reason_of(end))
    return replace(gave_up, error=end.error, place=end.place)


def _status_of_worker(end: RankEnd, worker: int) -> int | None:
    if worker in end.workers:
        return end.workers[worker]
    for text in (end.message, *end.chain):
        if (found := _WITH_STATUS.search(text)) is not None:
            return int(found[1])
        if (found := _BY_SIGNAL.search(text)) is not None:
            return next((-signum for signum in signal.Signals if signal.strsignal(signum) == found[1]), None)
    return None


def with_memory(end: RankEnd, killed: Collection[int], limit_bytes: int | None, *, by_cgroup: bool) -> RankEnd:
    """Add to an end whether the kernel killed its process, or its worker, for lack of memory.

    ``killed`` are processes that its log names; ``by_cgroup``: the cgroup counts such a kill.
    """
    worker = _worker_of(end)
    if end.out_of_memory or (end.status if worker is None else _status_of_worker(end, worker)) != -signal.SIGKILL:
        return end
    if (worker or end.pid) in killed:
        return with_fields(end, out_of_memory="kernel_log", limit_bytes=limit_bytes)
    return with_fields(end, out_of_memory="cgroup", limit_bytes=limit_bytes) if by_cgroup else end


def _mismatch(ranks: Sequence[RankEnd], world_size: int) -> Hang | None:
    """How the last calls of ranks whose exchange failed disagree; None if they agree, or too few are known."""
    if sum(bool(end.groups) for end in ranks) < 2:
        return None
    evidence = tuple(
        RankEvidence(
            *(end.rank, end.host, end.pid, end.step),
            answered=bool(end.groups),
            calls=end.calls,
            groups=tuple(map(_with_pending, end.groups)),
        )
        for end in ranks
    )
    hang = hang_of(HangEvidence(0.0, 0, 0, world_size, evidence))
    return hang if hang.kind in get_args(PartingKind) else None


def _with_pending(group: GroupCalls) -> GroupCalls:
    """A group whose last call counts as not ended: a failed call does not count as pending where it was recorded."""
    last = group.first + len(group.calls) - 1
    return with_fields(group, pending=group.pending or (last,)) if group.calls else group


def _grouped(departures: Iterable[Departure]) -> tuple[Departure, ...]:
    """Departures that differ only in their ranks and hosts, as one; the largest group first.

    Exchanges that failed in one place have the most frequent reason.
    """
    groups: dict[Departure, list[Departure]] = {}
    for departure in departures:
        key = replace(departure, ranks=(), hosts=())
        groups.setdefault(replace(key, error="", message="") if key.how == "gave_up" else key, []).append(departure)
    found = []
    for group in groups.values():
        (error, message), _ = Counter((each.error, each.message) for each in group).most_common(1)[0]
        ranks = tuple(sorted(rank for each in group for rank in each.ranks))
        hosts = tuple(dict.fromkeys(host for each in group for host in each.hosts))
        found.append(replace(group[0], ranks=ranks, hosts=hosts, error=error, message=message))
    return tuple(sorted(found, key=lambda departure: (-len(departure.ranks), departure.ranks)))


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:MAX_MESSAGE]
