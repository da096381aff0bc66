"""A hang in a sentence, and what to do about it. Pure: the same `Hang` always has the same words."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import PurePath
from typing import TYPE_CHECKING

from sftriage.model.hangs import INTERPRETER
from sftriage.words.verdicts import capitalized, counted

if TYPE_CHECKING:
    from sftriage.model.hangs import Blocked, BlockedCode, Call, Hang, HangKind, SourceLine

_MAX_PARTS = 6
"""Single ranks and ranges of ranks that a sentence lists."""
_MAX_BLOCKED = 3
"""Different places of absent ranks that a sentence lists."""

_OPS = {
    **dict.fromkeys(("_allgather_base", "_all_gather_base"), "all_gather_into_tensor"),
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_SPLIT = ("all_to_all", "all_to_all_single", "alltoall")
_NO_SIZES = frozenset({"barrier", "monitored_barrier", "monitoredBarrier"})
_TYPES = {"half": "half float", "int": "int32", "long": "int64", "short": "int16", "char": "int8", "byte": "uint8"}
"""Types of tensors, as a flight recorder has them, in words."""

_STATES = {
    "R": "which computes",
    "S": "which sleeps or waits",
    "D": "which waits for a disk",
    "T": "which is stopped (SIGSTOP)",
    "t": "which a debugger has stopped",
    "Z": "which has ended",
    "gone": "which has died",
}
"""What a DataLoader worker does, by the kernel's letter."""


def hang_sentence(hang: Hang) -> str:
    """Why a job hangs: which rank, in which collective, at which line."""
    text = _SENTENCES[hang.kind](hang)
    # (names of files, locks and threads are the program's own: nothing of them may steer a terminal)
    return "".join(char if char.isprintable() else "?" for char in text)


def hang_next_step(hang: Hang) -> str:
    """What to do about a hang."""
    text = _NEXT_STEPS[hang.kind](hang)
    return "".join(char if char.isprintable() else "?" for char in text)


def rank_ranges(ranks: Sequence[int]) -> str:
    """Ranks by number, consecutive ones as a range, the first of many; "" for none."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    short = [part for found in parts for part in ([found] if len(found) > 2 else [[rank] for rank in found])]
    names = [f"{part[0]} to {part[-1]}" if len(part) > 1 else f"{part[0]}" for part in short]
    if len(short) > _MAX_PARTS:
        names = [*names[: _MAX_PARTS - 1], f"{sum(map(len, short[_MAX_PARTS - 1 :])):,} more"]
    return _joined(names)


def call_words(call: Call) -> str:
    """A collective, and the sizes of its tensors: "all_reduce of 3 floats"."""
    words = " of ".join(filter(None, (_op(call), _sizes(call))))
    return f"{call.function} ({words})" if call.function else words


def ending_words(exit_status: int | None) -> str:
    """How a process has ended; a negative status is a signal."""
    if exit_status is None:
        return "its exit status is not known"
    if exit_status >= 0:
        return f"exit status {exit_status}"
    known = {each.value: each.name for each in signal.Signals}
    return f"killed by {known.get(-exit_status, f'signal {-exit_status}')}"


def group_words(name: str, ranks: Sequence[int] = ()) -> str:
    """A process group and its members; "" is the name of the default one."""
    members = f" ({_ranks(ranks)})" if ranks else ""
    return f"group {name}{members}" if name else "the default group"


def line_words(place: SourceLine) -> str:
    """A line as a name: "train (train.py:91)"."""
    at = _at(place)
    return at if place.function == "<module>" else f"{place.function} ({at})"


def _different(hang: Hang) -> str:
    tie, theirs = hang.numbers.get("tie"), f"called {_call_at(hang.other_call)}"
    mine, beside = f"{_subject(hang)} called {_call_at(hang.call)}", ", and" if tie else " where"
    if hang.sides:
        called = [f"{_ranks(ranks)} called {_call_at(call)}" for ranks, call in hang.sides]
        if more := len(hang.ranks) - sum(len(ranks) for ranks, _ in hang.sides):
            called.append(f"{counted(more, 'more rank')} called something else")
        mine, beside = _joined(called), ", and" if tie else ", where"
    elif not tie and hang.kind != "different_collective" and hang.call and hang.other_call and _sizes(hang.other_call):
        same_line = _place(hang.call) == _place(hang.other_call)
        theirs = f"called it with {_sizes(hang.other_call)}{'' if same_line else _in(_place(hang.other_call))}"
        beside = ", where"
    return f"{capitalized(mine)}{beside} {_others(hang)} {theirs}{_number(hang)}."


def _shifted(hang: Hang) -> str:
    skipped, number, shift = hang.kind == "skipped", _number(hang), abs(hang.shift)
    calls = "one call" if shift == 1 else counted(shift, "call")
    name, is_, they = capitalized(_subject(hang)), _verb(hang.ranks, "is"), "it" if len(hang.ranks) == 1 else "they"
    if hang.numbers.get("before"):
        # (the line at which they part is no longer on record)
        behind = f"{calls} {'behind' if skipped else 'ahead of'} {_others(hang)}"
        there = f"{they} called {_call_at(hang.call)} where {_others(hang)} called {_call_at(hang.other_call)}"
        return f"{name} {is_} {behind}, since {number.removeprefix(', ')} or before: there {there}."
    what = f"{name} {'skipped' if skipped else 'called'} {_call_at(hang.other_call if skipped else hang.call)}{number}"
    beside = f"which {_others(hang)} {'called' if skipped else 'did not call'}"
    if not shift:
        return f"{what}, {beside}."
    if hang.numbers.get("tie"):
        return f"{what}, {beside}; the two sides are {calls} apart since then."
    return f"{what}, {beside}; {they} {is_} {calls} {'behind' if skipped else 'ahead'} since then."


def _elsewhere(hang: Hang) -> str:
    waits, it = ("waits", "it") if len(hang.ranks) == 1 else ("wait", "them")
    waits += f" for {_ranks(hang.awaited)}" if hang.awaited else ""
    where = "another group" if hang.call is None else _call_at(hang.call)
    if hang.elsewhere is not None:
        number = f"#{hang.elsewhere[1]} of {group_words(hang.elsewhere[0], hang.elsewhere_ranks)}"
        where = number if hang.call is None else f"{where}, {number}"
    rest = f"while {_others(hang)} {_verb(hang.others, 'waits')} for {it} in {_call_at(hang.other_call, sizes=False)}"
    return f"{capitalized(_subject(hang))} {waits} in {where}, {rest}{_number(hang)}."


def _absent(hang: Hang) -> str:
    name, has, does = capitalized(_subject(hang)), _verb(hang.ranks, "has"), _blocked(hang)
    others = f"{_others(hang)} {_verb(hang.others, 'waits')}"
    where = f"{_verb(hang.ranks, 'keeps')} {_others(hang)} waiting" if hang.others else ""
    if hang.numbers.get("circle") and len(hang.ranks) > 1:
        where = f"wait for each other{where and ', and '}{where}"
    if hang.other_call is not None:
        waiting = f", in which {others}" if hang.others else ""
        where = f"{has} not reached {_call_at(hang.other_call, sizes=False)}{_number(hang)}{waiting}"
    elif not hang.others:
        if len(does) == 1 and does[0][0] == hang.ranks:
            return f"{name} {does[0][1]}."
        where = where or f"{_verb(hang.ranks, 'does')} not go on"
    it = "it" if len(hang.ranks) == 1 else "they"
    phrases = [f"{it if ranks == hang.ranks else _ranks(ranks)} {phrase}" for ranks, phrase in does]
    return f"{name} {where}{': ' if phrases else ''}{'; '.join(phrases)}."


def _dead(hang: Hang) -> str:
    endings: dict[str, list[int]] = {}
    for blocked in hang.blocked:
        endings.setdefault(_ending(blocked), []).append(blocked.rank)
    it, ended = "it" if len(hang.ranks) == 1 else "them", _verb(hang.ranks, "is") + " dead"
    if _left_early(hang):
        ended = _verb(hang.ranks, "has") + " ended"
    how = next(iter(endings), "")
    if len(endings) > 1:
        each = [f"{_ranks(ranks)}{ending}" for ending, ranks in endings.items()]
        how = f", {_joined(each[:_MAX_BLOCKED])}"
    text = f"{capitalized(_subject(hang))} {ended}{how}"
    if hang.others:
        waiting = f"{_others(hang)} {_verb(hang.others, 'waits')} for {it}"
        where = f" in {_call_at(hang.other_call, sizes=False)}{_number(hang)}" if hang.other_call is not None else ""
        text += f"; {waiting}{where}"
    return f"{text}."


def _left_early(hang: Hang) -> bool:
    """Whether the ranks that have ended did so without an error."""
    return bool(hang.blocked) and all(blocked.exit_status == 0 for blocked in hang.blocked)


def _ending(blocked: Blocked) -> str:
    """How a rank has ended: " (exit status 3) since step 60"."""
    how = ", ".join(filter(None, (ending_words(blocked.exit_status), blocked.about)))
    stage = f", in stage {blocked.stage}" if blocked.stage else ""
    return f" ({how}){f' since step {blocked.step}{stage}' if blocked.step >= 0 else ''}"


def _all_inside(hang: Hang) -> str:
    why = f"{_stuck(hang) or 'the network or the collective itself is stuck'}."
    if hang.others:
        left = f"which {_others(hang)} {_verb(hang.others, 'has')} left"
        there = f"{_verb(hang.ranks, 'waits')} in {_call_at(hang.call)}{_number(hang)}"
        return f"{capitalized(_subject(hang))} {there}, {left}: {why}"
    ranks, call = hang.group_ranks or hang.ranks, hang.other_call or hang.call
    group = f" of {group_words(hang.group, ranks)}" if hang.group or hang.group_ranks else ""
    same = "collective" if call is None else _call_at(call).removeprefix("a ")
    number = f" (#{hang.number})" if hang.number is not None else ""
    return f"All {counted(len(ranks), 'rank')}{group} are in the same {same}{number}, and none is missing: {why}"


def _stuck(hang: Hang) -> str:
    """Why a collective may not end that no rank is missing in, other than by the network; "" if nothing is known."""
    op, _, root = hang.call.op.partition(" ") if hang.call else ("", "", "")
    if op in _ROOTED and (hang.others or not root):
        return "they name different roots, or the network is stuck"
    return "their splits do not match, or the network is stuck" if op in _SPLIT else ""


def _unknown(hang: Hang) -> str:
    return f"Why the job hangs is not known{': ' if hang.reason else ''}{hang.reason.rstrip('.')}."


_SENTENCES: Mapping[HangKind, Callable[[Hang], str]] = {
    **dict.fromkeys(("different_collective", "different_sizes", "different_types"), _different),
    **dict.fromkeys(("skipped", "extra"), _shifted),
    "elsewhere": _elsewhere,
    "absent": _absent,
    "dead": _dead,
    "all_inside": _all_inside,
    "unknown": _unknown,
}


def _subject(hang: Hang) -> str:
    """The ranks at fault, with their hosts if the job has several."""
    named = _joined(hang.hosts) if len(hang.hosts) <= 2 else counted(len(hang.hosts), "host")
    return f"{_ranks(hang.ranks)}{f' on {named}' if _several_hosts(hang) else ''}"


def _several_hosts(hang: Hang) -> bool:
    return bool(hang.hosts) and hang.numbers.get("hosts", 2) > 1


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "some ranks"
    return f"rank{'s' * (len(ranks) != 1)} {rank_ranges(ranks)}"


def _others(hang: Hang) -> str:
    """The ranks that are where they should be: by number if there are two or fewer, or if it is a tie."""
    others = hang.others
    if not others:
        return "other ranks"
    if len(others) <= 2 or hang.numbers.get("tie"):
        return _ranks(others)
    whole = len(others) + len(hang.ranks) == len(hang.group_ranks)
    return f"{'the other ' if whole else ''}{len(others):,} {'' if whole else 'other '}ranks"


def _verb(ranks: Sequence[int], singular: str) -> str:
    """A verb as these ranks need it."""
    return (
        singular
        if len(ranks) == 1
        else {"is": "are", "has": "have", "does": "do"}.get(singular, singular.removesuffix("s"))
    )


def _number(hang: Hang) -> str:
    """The number of the call in its group, as the end of a phrase; "" without a group."""
    group = group_words(hang.group, hang.group_ranks)
    if hang.number is not None:
        return f", #{hang.number} of {group}"
    return f", in {group}" if hang.group or hang.group_ranks else ""


def _op(call: Call) -> str:
    return _OPS.get(call.op, call.op.lstrip("_")) or "a collective"


def _sizes(call: Call) -> str:
    """The sizes of a call's tensors: "3 floats", "8 x 8 half floats", "2 tensors of 3 floats"; "" if unknown."""
    if call.op in _NO_SIZES or not call.sizes:
        return ""
    types = [*call.dtypes, *[call.dtypes[-1] if call.dtypes else ""] * len(call.sizes)]
    tensors = [_tensor(*both) for both in zip(call.sizes, types, strict=False)]
    if len(tensors) == 1:
        return tensors[0]
    if len(set(tensors)) == 1:
        return f"{len(tensors):,} tensors of {tensors[0]}"
    if len(tensors) <= 4:
        return f"{len(tensors)} tensors ({_joined(tensors)})"
    return f"{len(tensors):,} tensors of {sum(map(prod, call.sizes)):,} elements in total"


def _tensor(shape: Sequence[int], dtype: str) -> str:
    name = dtype.lower().removeprefix("torch.")
    noun = f"{_TYPES.get(name, name or 'element')}{'s' * (prod(shape) != 1)}"
    return f"{' x '.join(f'{size:,}' for size in shape) or '1'} {noun}"


def _call_at(call: Call | None, *, sizes: bool = True) -> str:
    """A call and its line."""
    if call is None:
        return "a collective"
    return f"{call_words(call) if sizes else call.function or _op(call)}{_in(_place(call))}"


def _place(call: Call) -> SourceLine | None:
    return call.frames[0] if call.frames else None


def _in(place: SourceLine | None) -> str:
    if place is None:
        return ""
    return f" {'at' if place.function == '<module>' else 'in'} {line_words(place)}"


def _at(place: SourceLine) -> str:
    return f"{PurePath(place.file).name}:{place.line}"


def _joined(names: Iterable[str]) -> str:
    *others, last = [*names] or [""]
    return f"{', '.join(others)} and {last}" if others else last


_DOES: Mapping[BlockedCode, tuple[str, str]] = {
    "lock": ("waits for the lock `{about}`", "waits for a lock"),
    "queue": ("waits for the queue `{about}`", "waits for a queue"),
    "file_lock": ("waits for the lock on the file {about}", "waits for the lock on a file"),
    "event": ("waits for `{about}`", "waits for an event"),
    "thread": ("waits for {about}", "waits for a thread"),
    "subprocess": ("waits for {about}", "waits for another process"),
    "worker": ("waits for DataLoader worker {worker}", "waits for a DataLoader worker"),
    "recv": ("waits to receive from rank {peer}", "waits to receive from another rank"),
    "send": ("waits to send to rank {peer}", "waits to send to another rank"),
    "collective": ("waits in {about}", "waits in a collective"),
    "socket": ("waits for the network ({about})", "waits for the network"),
    "pipe": ("waits for {about}", "waits for a pipe"),
    "disk": ("waits for the disk or file system of {about}", "waits for a disk or file system"),
    "sleep": ("sleeps", "sleeps"),
    "import": ("imports a module", "imports a module"),
    "compile": ("compiles", "compiles"),
    "checkpoint": ("saves or loads a checkpoint ({about})", "saves or loads a checkpoint"),
    "python": ("computes", "computes"),
    "native": ("computes", "computes"),
    "stopped": ("is stopped by {about}", "is stopped (SIGSTOP)"),
    "unknown": ("does not answer", "does not answer"),
}
"""What an absent rank does: if it is known what that is about, and if not."""
_INSIDE = ("unknown", "native", "sleep")
"""Codes that say in which function of a library a rank is."""


def _blocked(hang: Hang) -> list[tuple[tuple[int, ...], str]]:
    """Where the absent ranks are, and what they wait for: ranks of which that is the same together."""
    together: dict[str, list[Blocked]] = {}
    in_turn = hang.others if hang.numbers.get("circle") else ()
    for blocked in hang.blocked:
        together.setdefault(_does(blocked, several=False, in_turn=in_turn), []).append(blocked)
    groups = [*together.values()][:_MAX_BLOCKED]
    return [
        (tuple(one.rank for one in group), _does(group[0], several=len(group) > 1, in_turn=in_turn)) for group in groups
    ]


def _does(blocked: Blocked, *, several: bool, in_turn: Sequence[int]) -> str:
    known, unknown = _DOES[blocked.code]
    about = {"about": blocked.about, "worker": blocked.worker, "peer": blocked.peer}
    phrase = known if all(about[name] not in (None, "") for name in about if f"{{{name}}}" in known) else unknown
    if blocked.code == "unknown" and (blocked.place is not None or blocked.inside):
        phrase = "is"
    if blocked.code == "queue" and blocked.inside.startswith("put"):
        phrase = phrase.replace("for", "for room in", 1)
    if blocked.code == "lock" and blocked.inside == "acquire of threading.py":
        phrase = phrase.replace("lock", "semaphore")
    if blocked.code == "native" and blocked.place is None and not blocked.inside:
        phrase += " in native code"
    if blocked.about == INTERPRETER:
        phrase = "waits for {about}"
    if blocked.inside == "_shutdown of threading.py":
        phrase = "has ended the program, waiting for a thread"
    if several:
        verb, _, rest = phrase.partition(" ")
        phrase = f"{_verb((), verb)} {rest.replace('loads', 'load')}".rstrip()
    phrase = phrase.format_map(about)
    circle = f", and rank {blocked.peer} waits for {'them' if several else 'it'} in turn"
    circle = circle if blocked.peer in in_turn else ""
    if blocked.code == "worker":
        waits, _, worker = phrase.partition(" ")
        return f"{waits}{_spot(blocked)} {worker}{_worker(blocked)}"
    return f"{phrase}{_spot(blocked)}{_holder(blocked)}{circle}"


def _spot(blocked: Blocked) -> str:
    """Where a rank is: its own line, or else the function it is in, or else its stage."""
    if blocked.place is not None:
        inside = f", inside {blocked.inside}" if blocked.code in _INSIDE and blocked.inside else ""
        return f"{_in(blocked.place)}{inside}"
    if blocked.inside:
        return f" in {blocked.inside}"
    return f" in stage {blocked.stage}" if blocked.stage else ""


def _holder(blocked: Blocked) -> str:
    at = _in(blocked.held_at)
    if blocked.code == "file_lock" and blocked.peer is not None:
        return f", held by rank {blocked.peer}{at}"
    if blocked.code in ("thread", "subprocess"):
        return f", which is{at}" if at else ""
    if not blocked.held_by:
        return f", held{at}" if at else ""
    named = blocked.held_by.startswith(("thread ", "process ", "rank "))
    kind = "" if named else "process " if blocked.held_by.isdecimal() or blocked.code == "file_lock" else "thread "
    return f", held by {kind}{blocked.held_by}{at}"


def _worker(blocked: Blocked) -> str:
    if blocked.worker_at is not None and blocked.worker_state not in ("T", "t", "Z", "gone"):
        return f", which is{_in(blocked.worker_at)}"
    return f", {_STATES[blocked.worker_state]}" if blocked.worker_state in _STATES else ""


def _lines(*calls: Call | None) -> list[str]:
    places = [_place(call) for call in calls if call is not None]
    return list(dict.fromkeys(_at(place) for place in places if place is not None))


def _compare(hang: Hang, advice: str, one_line: str) -> str:
    match _lines(hang.call, hang.other_call):
        case [mine, theirs]:
            return f"{advice}: compare {mine} with {theirs}."
        case [line]:
            return f"{advice}: {one_line} {line}."
        case _:
            return f"{advice}."


_SAME_ORDER = "Make all ranks call the same collectives in the same order"


def _call_on_all(hang: Hang) -> str:
    if hang.numbers.get("before"):
        return _compare(hang, _SAME_ORDER, "check")
    lines = _lines(hang.other_call if hang.kind == "skipped" else hang.call)
    around = f" around {lines[0]}" if lines else " on the way to it"
    return f"Call it on every rank or on none: check the conditions, loops and exceptions{around}."


def _group_order(hang: Hang) -> str:
    group = "that group" if hang.elsewhere is None else group_words(hang.elsewhere[0], hang.elsewhere_ranks)
    advice = f"Make all members of {group} call it there, and use the groups in the same order on all ranks"
    return _compare(hang, advice, "check")


def _after_death(hang: Hang) -> str:
    statuses = {blocked.exit_status for blocked in hang.blocked}
    memory = ", and the kernel log (dmesg) for out-of-memory" if statuses & {None, -signal.SIGKILL} else ""
    if _left_early(hang):
        return "Make every rank take the same number of steps: check for uneven data, or a `break` on one rank."
    return f"Check the last output of {_subject(hang)}{memory}; then restart the job."


def _network(hang: Hang) -> str:
    if stuck := _stuck(hang):
        same = "name the same root" if "roots" in stuck else "send what the others expect"
        return _compare(hang, f"Check that all ranks {same}", "see")
    hosts = f" between {_joined(hang.hosts)}" if 1 < len(hang.hosts) <= 4 else " between the ranks"
    return (
        f"Check the network{hosts}; for NCCL, run the job with NCCL_DEBUG=INFO and read what it logs about transports."
    )


def _by_hand(hang: Hang) -> str:
    return "Compare the stacks of the ranks: `sftriage traces show` lists where each of them is."


_UNBLOCK: Mapping[BlockedCode, str] = {
    "lock": "Take locks in the same order in every thread, and never wait while holding one{lines}.",
    "queue": "Find what should fill or empty that queue, and why it stopped; give the call a timeout{lines}.",
    "file_lock": "End the process that holds the lock, or let only one rank take it{lines}.",
    "event": "Find what should end that wait, and why it did not; give it a timeout{lines}.",
    "thread": "Find what that thread waits for; end it before it is joined, or make it a daemon{lines}.",
    "subprocess": "Check what that process waits for, and give the call a timeout{lines}.",
    "worker": "Check the DataLoader's dataset in that worker, and set `timeout` of the DataLoader{lines}.",
    "recv": "Make {peer} send what rank {rank} receives, in the same order{lines}.",
    "send": "Make {peer} receive what rank {rank} sends, in the same order{lines}.",
    "collective": "Make all ranks call the same collectives in the same order{lines}.",
    "socket": "Check whether the other end answers, and give the call a timeout{lines}.",
    "pipe": "Check the process at the other end of the pipe{lines}.",
    "disk": "Check that disk or file system on its host (dmesg, `iostat -x 1`, the NFS server){lines}.",
    "sleep": "Find out why it sleeps there{lines}.",
    "import": "Import it on every rank before training starts{lines}.",
    "compile": "Wait for it to compile; raise the group's timeout, or compile before training starts{lines}.",
    "checkpoint": "Check where the checkpoint goes; let the others wait for it with a longer timeout{lines}.",
    "python": "Check the loop or the call{at}: `py-spy dump --locals --pid {pids}`{on} shows its variables.",
    "native": "Check that call{at}: `py-spy dump --native --pid {pids}`{on} shows the stack inside it.",
    "stopped": "Continue what is stopped{on}: kill -CONT {pids}; then find what stopped it.",
    "unknown": "Check that process: `py-spy dump --native --pid {pids}`{on} shows what it waits for.",
}
"""What to do about an absent rank. ``lines``: the lines to compare, or ""."""


def _unblock(hang: Hang) -> str:
    if not hang.blocked:
        return "Check where these processes are on their hosts: `py-spy dump --pid PID`."
    first = hang.blocked[0]
    on = f" on {first.host}" if first.host and _several_hosts(hang) else ""
    if first.code == "worker" and first.worker is not None and first.worker_state == "T":
        return f"Continue the worker{on}: kill -CONT {first.worker}; then find what stopped it."
    if first.code == "stopped" and first.about:
        return f"Find why {first.about} stops process {'PID' if first.pid is None else first.pid}{on}."
    if first.code == "worker" and first.worker_state in ("gone", "Z"):
        return "Check the kernel log (dmesg) for out-of-memory, and the memory of the loader's workers (/dev/shm too)."
    if first.code == "file_lock" and first.peer is not None:
        lines = _lines(hang.other_call)
        return (
            f"Release the lock before the call in which rank {first.peer} waits{f': see {lines[0]}' if lines else ''}."
        )
    places = (place for place in (first.place, first.worker_at, first.held_at) if place is not None)
    lines = list(dict.fromkeys(map(_at, places)))
    compare = f": compare {lines[0]} with {lines[1]}" if len(lines) == 2 else f": see {lines[0]}" if lines else ""
    if first.about == INTERPRETER:
        return f"Let that call release the interpreter, or run it in a process of its own{compare}."
    if first.about == "its standard input":
        return f"Remove what reads it, such as input() or a breakpoint{compare}."
    peer = "the other rank" if first.peer is None else f"rank {first.peer}"
    alike = [blocked.pid for blocked in hang.blocked if blocked.code == first.code and blocked.pid is not None]
    pids = " ".join(map(str, alike if first.code == "stopped" else alike[:1])) or "PID"
    return _UNBLOCK[first.code].format(
        rank=first.rank, lines=compare, at=f" at {lines[0]}" if lines else "", on=on, peer=peer, pids=pids
    )


_NEXT_STEPS: Mapping[HangKind, Callable[[Hang], str]] = {
    "different_collective": lambda hang: (
        _compare(hang, "Name the same root on all ranks", "see")
        if hang.call and " " in hang.call.op
        else _compare(hang, _SAME_ORDER, "find what leads each rank to")
    ),
    "different_sizes": lambda hang: _compare(
        hang, "Give the tensor the same size on all ranks", "find where its size comes from, at"
    ),
    "different_types": lambda hang: _compare(
        hang, "Give the tensor the same type on all ranks", "find where its type comes from, at"
    ),
    **dict.fromkeys(("skipped", "extra"), _call_on_all),
    "elsewhere": _group_order,
    "absent": _unblock,
    "dead": _after_death,
    "all_inside": _network,
    "unknown": _by_hand,
}
