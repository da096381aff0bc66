"""The evidence of ranks that hang, and the hang that follows from it: frozen records, standard library only.

A trainer writes its own part as JSON with these names (`sftriage.trainer.evidence`), the agent adds the kernel's view
(`sftriage.agent.hangs`), `sftriage.verdict.hangs` joins the ranks, and `sftriage.words.hangs` writes the sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

_Mismatches = Literal["different_collective", "different_sizes", "different_types", "skipped", "extra"]
_Missing = Literal["elsewhere", "absent", "dead"]
HANG_NAME = "hang.json"
"""The file of a capture of a whole job that hangs: a `HangEvidence`."""
HangKind = Literal[_Mismatches, _Missing, "all_inside", "unknown"]
"""How a job hangs. Ranks disagree on a collective, by what they call, its sizes or its types; some have ``skipped`` one
that the others called, or called an ``extra`` one, and are one behind or ahead since then; some wait ``elsewhere``, in
another group; some are ``absent`` or ``dead``; or all are inside: it is the network, or the collective itself."""

_Locks = Literal["lock", "queue", "file_lock", "event", "thread", "subprocess", "worker"]
_Transfers = Literal["recv", "send", "collective", "socket", "pipe", "disk"]
_Works = Literal["sleep", "import", "compile", "checkpoint", "python", "native", "stopped"]
BlockedCode = Literal[_Locks, _Transfers, _Works, "unknown"]
"""What an absent rank does. ``worker``: it waits for a DataLoader worker. ``python`` and ``native``: it computes."""


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line that a thread is in. ``own``: of the program itself, not of Python, torch or an installed package."""

    function: str
    file: str
    line: int
    source: str = ""
    own: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A collective as the flight recorder has it: equal calls of a rank share one record.

    ``op`` has no backend ("all_reduce"). ``sizes`` and ``dtypes`` are those of the inputs. ``frames`` are a few of the
    program's own, innermost first; the first is the line of the call. ``function`` is what the program called instead,
    if torch makes several calls of it ("all_gather_object").
    """

    op: str
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    frames: tuple[SourceLine, ...] = ()
    function: str = ""


@dataclass(frozen=True, slots=True)
class GroupCalls:
    """A rank's calls in one process group, oldest first.

    Attributes:
        members: ranges of the ranks in it, as first, last and step; None: unknown.
        first: the sequence number of the first call here.
        calls: positions in `RankEvidence.calls`, one for each sequence number from ``first`` on; -1 for an unknown one.
        pending: the sequence numbers of those that have not ended.
    """

    name: str
    description: str
    members: tuple[tuple[int, int, int], ...] | None
    first: int
    calls: tuple[int, ...]
    pending: tuple[int, ...] = ()


Fact = str | int | float | bool
FACTS = "facts-"
"""How a token begins that requests the facts of some ranks, in place of the evidence of a hang."""

INTERPRETER = "the interpreter"
"""What takes the place of a lock's name while a thread in native code keeps all others from running Python."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What a thread waits for, as far as Python and the kernel know. All fields may be empty.

    Attributes:
        state: the kernel's letter of the thread's state: R, S, D, T, t, Z.
        syscall, wchan: the names of its system call and of the kernel function that it sleeps in.
        path: the file, socket or pipe that the system call is about; for a socket the peer's address.
        lock: the name of the lock in the program ("self._cache_lock"), or of a queue if ``is_queue``.
        held_by, held_at: the thread of this process, or the process, that holds that lock, and where it is.
        peer: the rank that a ``recv`` is from, or a ``send`` is to; or the root of a collective, such as a broadcast.
        cpu_fraction: how much of a core the thread used between two looks; None if unknown.
    """

    state: str = ""
    syscall: str = ""
    wchan: str = ""
    path: str = ""
    lock: str = ""
    held_by: str = ""
    held_at: SourceLine | None = None
    peer: int | None = None
    cpu_fraction: float | None = None
    is_queue: bool = False


@dataclass(frozen=True, slots=True)
class ThreadEvidence:
    """One thread; ``frames`` innermost first. ``main``: the one that trains."""

    name: str
    main: bool
    frames: tuple[SourceLine, ...]
    wait: Wait = Wait()  # frozen


@dataclass(frozen=True, slots=True)
class WorkerEvidence:
    """A DataLoader worker, or another child process of a trainer.

    ``problem``: why ``threads`` is empty. ``exit_status`` is negative for a signal; None while it lives.
    """

    pid: int
    state: str
    wchan: str = ""
    threads: tuple[ThreadEvidence, ...] = ()
    problem: str = ""
    exit_status: int | None = None


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """What is known of one rank of a job that hangs.

    Attributes:
        step, stage, in_stage_s: what it does now, by its ring; the stage is None between two steps.
        alive: whether its process is there; None if unknown. ``closed``: it has stopped recording.
        answered: whether ``groups`` and ``threads`` are its own account; ``problem``: why not.
        calls: the distinct calls that ``groups`` refer to; empty without a flight recorder.
        timeout_s: the shortest timeout of its pending calls; None if unknown.
        state, wchan: its process by the kernel, also where it does not answer.
        exit_status: of a rank that has ended, as far as known: negative for a signal.
        facts: what it runs with, by name (`sftriage.trainer.facts`); only in answer to a token of `FACTS`.
    """

    rank: int
    host: str
    pid: int
    step: int = -1
    stage: str | None = None
    in_stage_s: float = 0.0
    alive: bool | None = True
    closed: bool = False
    answered: bool = False
    problem: str = ""
    calls: tuple[Call, ...] = ()
    groups: tuple[GroupCalls, ...] = ()
    threads: tuple[ThreadEvidence, ...] = ()
    workers: tuple[WorkerEvidence, ...] = ()
    timeout_s: float | None = None
    state: str = ""
    wchan: str = ""
    exit_status: int | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Blocked:
    """Where an absent rank is, and what it waits for.

    Attributes:
        place: the program's own line; None if unknown.
        inside: the innermost function below it that is not the program's ("get of queue.py"); "" if there is none.
        about: the lock, file, peer, or worker that it is about; "" if unknown.
        held_by, held_at: who holds it, and where that one is.
        peer: the rank that it receives from or sends to.
        worker: the pid of the DataLoader worker that it waits for, and ``worker_state`` and ``worker_at`` what that one
            does; a state of "gone" for one that has died.
    """

    rank: int
    host: str
    code: BlockedCode
    place: SourceLine | None = None
    inside: str = ""
    about: str = ""
    held_by: str = ""
    held_at: SourceLine | None = None
    peer: int | None = None
    worker: int | None = None
    worker_state: str = ""
    worker_at: SourceLine | None = None
    step: int = -1
    stage: str | None = None
    exit_status: int | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Hang:
    """Why a job hangs.

    Attributes:
        kind: see `HangKind`.
        ranks: the ranks at fault, in order; those inside for ``all_inside``; none for ``unknown``.
        hosts: their hosts, without repetition.
        group: the name of the process group, "" if it is the default one; ``group_ranks`` are its members.
        number: the sequence number of the call in that group at which the ranks part.
        call: what ``ranks`` called there; None if they called nothing. ``sides``: the same by ranks, the most first, if
            they called different things; those of a few only.
        others: the other ranks of the group, which are there, or have left it; ``other_call`` is what they called.
        blocked: where ``ranks`` are, for the first few of them.
        elsewhere: the group in which they wait instead, and the number of the call there; ``elsewhere_ranks`` are that
            group's members, if known, and ``awaited`` those that have not come to it.
        shift: how many calls a rank that ``skipped`` some or called ``extra`` ones is behind or ahead.
        reason: for ``unknown``, why nothing is certain.
    """

    kind: HangKind
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    group: str = ""
    group_ranks: tuple[int, ...] = ()
    number: int | None = None
    call: Call | None = None
    others: tuple[int, ...] = ()
    other_call: Call | None = None
    blocked: tuple[Blocked, ...] = ()
    elsewhere: tuple[str, int] | None = None
    elsewhere_ranks: tuple[int, ...] = ()
    awaited: tuple[int, ...] = ()
    sides: tuple[tuple[tuple[int, ...], Call], ...] = ()
    shift: int = 0
    reason: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HangEvidence:
    """The document of one capture of a whole job that hangs, ``hang.json``: all ranks, and what follows from them."""

    time_s: float
    attempt: int
    step: int
    world_size: int
    ranks: tuple[RankEvidence, ...]
    hang: Hang | None = None
    schema_version: int = 1
