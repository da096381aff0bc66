"""Every kind of hang, and everything that an absent rank may do, has its sentence and its next step."""
# ruff: noqa: E501 (a sentence a line: it is read as a table)

import signal
from dataclasses import replace
from typing import get_args

import pytest

from sftriage.model.hangs import INTERPRETER, Blocked, BlockedCode, Call, Hang, HangKind, SourceLine
from sftriage.words.hangs import call_words, hang_next_step, hang_sentence, rank_ranges

VALIDATE, TRAIN = SourceLine("validate", "/job/train.py", 52), SourceLine("train", "/job/train.py", 91)
LOOKUP, REFRESH = SourceLine("lookup", "/job/train.py", 58), SourceLine("refresh_cache", "/job/train.py", 52)
ITEM = SourceLine("__getitem__", "/job/data.py", 20)
REDUCE = Call("all_reduce", ((),), ("Float",), (TRAIN,))
SEVEN = Call("all_reduce", ((7,),), ("Float",), (SourceLine("train", "/job/train.py", 93),))
GATHER = Call("all_gather", ((3,),), ("Float",), (VALIDATE,))
ALL, ONE = {"group_ranks": (0, 1, 2, 3), "number": 126}, {"hosts": 1.0}
RANK = {**ALL, "ranks": (2,), "hosts": ("node-3",), "others": (0, 1, 3), "other_call": REDUCE}
TIE = {**ALL, "ranks": (0, 1), "others": (2, 3), "call": GATHER, "other_call": REDUCE, "numbers": {"tie": 1.0}}


def blocked(code: BlockedCode, **about) -> Hang:
    return Hang("absent", **RANK, numbers=ONE, blocked=(Blocked(2, "node-3", code, **{"place": LOOKUP, **about}),))


def hang(kind: HangKind, **about) -> Hang:
    return Hang(kind, **{**RANK, "numbers": ONE, **about})


HANGS: dict[str, Hang] = {
    "different_collective, several hosts": hang("different_collective", call=GATHER, numbers={"hosts": 2.0}),
    "different_collective, one host": hang("different_collective", call=GATHER),
    "different_collective, a tie": Hang("different_collective", **TIE),
    "different_collective, many ranks": hang("different_collective", call=GATHER, ranks=(*range(8), 12), hosts=("a", "b", "c"), group_ranks=tuple(range(64)), others=tuple(sorted({*range(64)} - {*range(8), 12})), numbers={}),
    "different_collective, some ranks unknown": hang("different_collective", call=GATHER, others=(0, 1, 3), group_ranks=tuple(range(8))),
    "different_collective, no lines": hang("different_collective", call=replace(GATHER, frames=()), other_call=replace(REDUCE, frames=())),
    "different_collective, one line": hang("different_collective", call=replace(REDUCE, op="broadcast")),
    "different_sizes": hang("different_sizes", call=SEVEN),
    "different_sizes, one line": hang("different_sizes", call=replace(SEVEN, frames=(TRAIN,)), group="2", group_ranks=(2, 3), others=(3,)),
    "different_sizes, a tie": Hang("different_sizes", **{**TIE, "call": SEVEN}),
    "different_types": hang("different_types", call=replace(REDUCE, dtypes=("Half",))),
    "skipped": hang("skipped", shift=-1),
    "skipped, two ranks and calls": hang("skipped", shift=2, ranks=(2, 3), others=(0, 1)),
    "skipped, a tie": Hang("skipped", **{**TIE, "call": None, "shift": 1}),
    "skipped, how many is unknown": hang("skipped"),
    "skipped, perhaps before": hang("skipped", call=SEVEN, shift=1, numbers={"hosts": 1.0, "before": 1.0}),
    "extra, perhaps before": hang("extra", call=SEVEN, shift=1, numbers={"hosts": 1.0, "before": 1.0}),
    "extra": hang("extra", call=SEVEN, shift=1),
    "elsewhere": hang("elsewhere", call=replace(SEVEN, sizes=((4,),)), elsewhere=("2", 1), elsewhere_ranks=(2, 3), awaited=(3,)),
    "elsewhere, two ranks": hang("elsewhere", ranks=(2, 3), others=(0, 1), elsewhere=("2", 1)),
    "absent, nothing known": hang("absent"),
    "absent, no flight recorder": hang("absent", other_call=None, number=None, group_ranks=()),
    "absent, stacks alone": hang("absent", other_call=Call("", frames=(TRAIN,)), number=None, group_ranks=()),
    "absent, recv in a circle": hang("absent", other_call=None, number=None, group_ranks=(), numbers={"hosts": 1.0, "circle": 1.0}, blocked=(Blocked(2, "a", "recv", LOOKUP, peer=0),)),
    "absent, two ranks": hang("absent", ranks=(1, 2), others=(0, 3), blocked=(Blocked(1, "a", "import", LOOKUP, "find_spec of _bootstrap"), Blocked(2, "a", "import", LOOKUP))),
    "absent, two places": hang("absent", ranks=(1, 2), others=(0, 3), blocked=(Blocked(1, "a", "sleep", LOOKUP), Blocked(2, "a", "lock", REFRESH))),
    "absent, all ranks": hang("absent", ranks=(0, 1, 2, 3), others=(), other_call=None, blocked=tuple(Blocked(rank, "a", "file_lock", LOOKUP, about="shards.lock", held_by="4711") for rank in range(4))),
    "absent, all ranks in two places": hang("absent", ranks=(0, 1), others=(), other_call=None, blocked=(Blocked(0, "a", "send", LOOKUP, peer=1), Blocked(1, "a", "send", REFRESH, peer=0))),
    "absent, two save": hang("absent", ranks=(1, 2), others=(0, 3), blocked=(Blocked(1, "a", "checkpoint", LOOKUP), Blocked(2, "a", "checkpoint", LOOKUP))),
    "absent, two are stopped": hang("absent", ranks=(1, 2), others=(0, 3), blocked=(Blocked(1, "a", "stopped", pid=11), Blocked(2, "a", "stopped", pid=12))),
    "absent, lock": blocked("lock", about="second", held_by="cache-refresher", held_at=REFRESH),
    "absent, semaphore": blocked("lock", about="slots", inside="acquire of threading.py"),
    "absent, the interpreter": blocked("lock", about=INTERPRETER, held_by="thread decoder", held_at=REFRESH),
    "absent, lock without a name": blocked("lock"),
    "absent, queue": blocked("queue", about="inbox", inside="get of queue.py"),
    "absent, full queue": blocked("queue", inside="put of queue.py"),
    "absent, file_lock": blocked("file_lock", about="shards.lock", held_by="4711"),
    "absent, file_lock of a rank in a circle": hang("absent", ranks=(1, 2, 3), others=(0,), numbers={"hosts": 1.0, "circle": 1.0}, blocked=tuple(Blocked(rank, "a", "file_lock", LOOKUP, about="shards.lock", held_by="process 4711 (python)", peer=0) for rank in (1, 2, 3))),
    "absent, event": blocked("event", about="ready"),
    "absent, thread": blocked("thread", about="thread loader", held_at=REFRESH),
    "absent, at its exit": blocked("thread", place=None, inside="_shutdown of threading.py"),
    "absent, subprocess": blocked("subprocess", about="process 4711 (ffmpeg)"),
    "absent, worker at a line": blocked("worker", worker=4711, worker_state="S", worker_at=ITEM),
    "absent, worker in a state": blocked("worker", worker=4711, worker_state="D"),
    "absent, worker stopped": blocked("worker", worker=4711, worker_state="T", worker_at=ITEM),
    "absent, worker gone": blocked("worker", worker=4711, worker_state="gone"),
    "absent, worker unknown": blocked("worker"),
    "absent, recv": blocked("recv", peer=0),
    "absent, recv from an unknown rank": blocked("recv"),
    "absent, send": blocked("send", peer=3),
    "absent, collective": blocked("collective", about="all_to_all"),
    "absent, socket": blocked("socket", about="10.0.0.7:443"),
    "absent, pipe": blocked("pipe"),
    "absent, standard input": blocked("pipe", about="its standard input"),
    "absent, disk": blocked("disk", about="/data/shard-3"),
    "absent, sleep": blocked("sleep"),
    "absent, import": blocked("import"),
    "absent, compile": blocked("compile"),
    "absent, checkpoint": blocked("checkpoint", about="/ckpt/60"),
    "absent, python": blocked("python"),
    "absent, native": blocked("native", inside="matmul of functional.py"),
    "absent, native without a line": blocked("native", place=None, stage="data"),
    "absent, stopped": blocked("stopped", place=None, pid=4711),
    "absent, held by a debugger": blocked("stopped", about="a debugger", pid=4711),
    "absent, stopped on another host": hang("absent", numbers={"hosts": 2.0}, blocked=(Blocked(2, "node-3", "stopped", pid=4711),)),
    "absent, no answer": blocked("unknown", place=None, pid=4711),
    "absent, waits for something unknown": blocked("unknown", inside="wait of selectors.py"),
    "dead, exit status": hang("dead", blocked=(Blocked(2, "node-3", "unknown", step=60, stage="data", exit_status=3),)),
    "dead, killed": hang("dead", blocked=(Blocked(2, "node-3", "unknown", step=60, exit_status=-signal.SIGKILL, about="out of memory"),), numbers={}),
    "dead, no flight recorder": hang("dead", other_call=None, blocked=(Blocked(2, "node-3", "unknown", step=60),)),
    "dead, two ways": hang("dead", ranks=(1, 2), others=(0, 3), blocked=(Blocked(1, "a", "unknown", step=60, exit_status=3), Blocked(2, "a", "unknown", step=60, exit_status=-6))),
    "dead, left early": hang("dead", blocked=(Blocked(2, "node-3", "unknown", step=60, exit_status=0),)),
    "all_inside": hang("all_inside", ranks=(0, 1, 2, 3), hosts=("node-1", "node-2"), others=(), other_call=None, call=REDUCE),
    "all_inside, some have left": hang("all_inside", ranks=(0, 2, 3), others=(1,), other_call=None, call=REDUCE),
    "all_inside, roots": hang("all_inside", ranks=(3,), hosts=("a",), others=(0, 1, 2), other_call=None, call=replace(REDUCE, op="reduce to rank 3"), numbers={"hosts": 1.0}),
    "all_inside, splits": hang("all_inside", ranks=(0, 1, 2, 3), others=(), other_call=None, call=replace(REDUCE, op="all_to_all")),
    "different_collective, several": hang("different_collective", ranks=(1, 3, 4, 5, 6), others=(0, 2), group_ranks=tuple(range(7)), call=GATHER, sides=(((1, 4), GATHER), ((3,), replace(GATHER, op="broadcast")))),
    "different_collective, objects": hang("different_collective", call=replace(GATHER, function="all_gather_object")),
    "different_collective, roots": hang("different_collective", call=replace(REDUCE, op="reduce to rank 3"), other_call=replace(REDUCE, op="reduce to rank 0")),
    "absent, a circle of three": hang("absent", ranks=(0, 1, 2), hosts=("a",), others=(), other_call=None, group="", group_ranks=(), number=None, blocked=tuple(Blocked(n, "a", "recv", VALIDATE, peer=(n + 1) % 3) for n in range(3)), numbers={"circle": 1.0}),
    "absent, a circle that others wait for": hang("absent", ranks=(0, 1), hosts=("a",), others=(2, 3), other_call=None, group="", group_ranks=(), number=None, blocked=tuple(Blocked(n, "a", "recv", VALIDATE, peer=1 - n) for n in range(2)), numbers={"circle": 1.0}),
    "all_inside, stacks alone": hang("all_inside", ranks=(0, 1, 2, 3), number=None, group_ranks=(), others=(), other_call=None, call=Call("", frames=(TRAIN,))),
    "all_inside, a group": hang("all_inside", ranks=(2, 3), group="2", group_ranks=(2, 3), others=(), other_call=None, call=Call("barrier", ((1,),), ("Float",), (TRAIN,))),
    "unknown": Hang("unknown", reason="ranks 1 and 3 do not answer, and no flight recorder is on"),
    "unknown, for an unknown reason": Hang("unknown"),
}  # fmt: skip

WORDS: dict[str, tuple[str, str]] = {
    "different_collective, several hosts": ("Rank 2 on node-3 called all_gather of 3 floats in validate (train.py:52) where the other 3 ranks called all_reduce of 1 float in train (train.py:91), #126 of the default group.", "Make all ranks call the same collectives in the same order: compare train.py:52 with train.py:91."),
    "different_collective, one host": ("Rank 2 called all_gather of 3 floats in validate (train.py:52) where the other 3 ranks called all_reduce of 1 float in train (train.py:91), #126 of the default group.", "Make all ranks call the same collectives in the same order: compare train.py:52 with train.py:91."),
    "different_collective, a tie": ("Ranks 0 and 1 called all_gather of 3 floats in validate (train.py:52), and ranks 2 and 3 called all_reduce of 1 float in train (train.py:91), #126 of the default group.", "Make all ranks call the same collectives in the same order: compare train.py:52 with train.py:91."),
    "different_collective, many ranks": ("Ranks 0 to 7 and 12 on 3 hosts called all_gather of 3 floats in validate (train.py:52) where the other 55 ranks called all_reduce of 1 float in train (train.py:91), #126 of the default group.", "Make all ranks call the same collectives in the same order: compare train.py:52 with train.py:91."),
    "different_collective, some ranks unknown": ("Rank 2 called all_gather of 3 floats in validate (train.py:52) where 3 other ranks called all_reduce of 1 float in train (train.py:91), #126 of the default group.", "Make all ranks call the same collectives in the same order: compare train.py:52 with train.py:91."),
    "different_collective, no lines": ("Rank 2 called all_gather of 3 floats where the other 3 ranks called all_reduce of 1 float, #126 of the default group.", "Make all ranks call the same collectives in the same order."),
    "different_collective, one line": ("Rank 2 called broadcast of 1 float in train (train.py:91) where the other 3 ranks called all_reduce of 1 float in train (train.py:91), #126 of the default group.", "Make all ranks call the same collectives in the same order: find what leads each rank to train.py:91."),
    "different_sizes": ("Rank 2 called all_reduce of 7 floats in train (train.py:93), where the other 3 ranks called it with 1 float in train (train.py:91), #126 of the default group.", "Give the tensor the same size on all ranks: compare train.py:93 with train.py:91."),
    "different_sizes, one line": ("Rank 2 called all_reduce of 7 floats in train (train.py:91), where rank 3 called it with 1 float, #126 of group 2 (ranks 2 and 3).", "Give the tensor the same size on all ranks: find where its size comes from, at train.py:91."),
    "different_sizes, a tie": ("Ranks 0 and 1 called all_reduce of 7 floats in train (train.py:93), and ranks 2 and 3 called all_reduce of 1 float in train (train.py:91), #126 of the default group.", "Give the tensor the same size on all ranks: compare train.py:93 with train.py:91."),
    "different_types": ("Rank 2 called all_reduce of 1 half float in train (train.py:91), where the other 3 ranks called it with 1 float, #126 of the default group.", "Give the tensor the same type on all ranks: find where its type comes from, at train.py:91."),
    "skipped": ("Rank 2 skipped all_reduce of 1 float in train (train.py:91), #126 of the default group, which the other 3 ranks called; it is one call behind since then.", "Call it on every rank or on none: check the conditions, loops and exceptions around train.py:91."),
    "skipped, two ranks and calls": ("Ranks 2 and 3 skipped all_reduce of 1 float in train (train.py:91), #126 of the default group, which ranks 0 and 1 called; they are 2 calls behind since then.", "Call it on every rank or on none: check the conditions, loops and exceptions around train.py:91."),
    "skipped, a tie": ("Ranks 0 and 1 skipped all_reduce of 1 float in train (train.py:91), #126 of the default group, which ranks 2 and 3 called; the two sides are one call apart since then.", "Call it on every rank or on none: check the conditions, loops and exceptions around train.py:91."),
    "skipped, how many is unknown": ("Rank 2 skipped all_reduce of 1 float in train (train.py:91), #126 of the default group, which the other 3 ranks called.", "Call it on every rank or on none: check the conditions, loops and exceptions around train.py:91."),
    "skipped, perhaps before": ("Rank 2 is one call behind the other 3 ranks, since #126 of the default group or before: there it called all_reduce of 7 floats in train (train.py:93) where the other 3 ranks called all_reduce of 1 float in train (train.py:91).", "Make all ranks call the same collectives in the same order: compare train.py:93 with train.py:91."),
    "extra, perhaps before": ("Rank 2 is one call ahead of the other 3 ranks, since #126 of the default group or before: there it called all_reduce of 7 floats in train (train.py:93) where the other 3 ranks called all_reduce of 1 float in train (train.py:91).", "Make all ranks call the same collectives in the same order: compare train.py:93 with train.py:91."),
    "extra": ("Rank 2 called all_reduce of 7 floats in train (train.py:93), #126 of the default group, which the other 3 ranks did not call; it is one call ahead since then.", "Call it on every rank or on none: check the conditions, loops and exceptions around train.py:93."),
    "elsewhere": ("Rank 2 waits for rank 3 in all_reduce of 4 floats in train (train.py:93), #1 of group 2 (ranks 2 and 3), while the other 3 ranks wait for it in all_reduce in train (train.py:91), #126 of the default group.", "Make all members of group 2 (ranks 2 and 3) call it there, and use the groups in the same order on all ranks: compare train.py:93 with train.py:91."),
    "elsewhere, two ranks": ("Ranks 2 and 3 wait in #1 of group 2, while ranks 0 and 1 wait for them in all_reduce in train (train.py:91), #126 of the default group.", "Make all members of group 2 call it there, and use the groups in the same order on all ranks: check train.py:91."),
    "absent, nothing known": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait.", "Check where these processes are on their hosts: `py-spy dump --pid PID`."),
    "absent, no flight recorder": ("Rank 2 keeps 3 other ranks waiting.", "Check where these processes are on their hosts: `py-spy dump --pid PID`."),
    "absent, stacks alone": ("Rank 2 has not reached a collective in train (train.py:91), in which 3 other ranks wait.", "Check where these processes are on their hosts: `py-spy dump --pid PID`."),
    "absent, recv in a circle": ("Rank 2 keeps 3 other ranks waiting: it waits to receive from rank 0 in lookup (train.py:58), and rank 0 waits for it in turn.", "Make rank 0 send what rank 2 receives, in the same order: see train.py:58."),
    "absent, two ranks": ("Ranks 1 and 2 have not reached all_reduce in train (train.py:91), #126 of the default group, in which ranks 0 and 3 wait: they import a module in lookup (train.py:58).", "Import it on every rank before training starts: see train.py:58."),
    "absent, two places": ("Ranks 1 and 2 have not reached all_reduce in train (train.py:91), #126 of the default group, in which ranks 0 and 3 wait: rank 1 sleeps in lookup (train.py:58); rank 2 waits for a lock in refresh_cache (train.py:52).", "Find out why it sleeps there: see train.py:58."),
    "absent, all ranks": ("Ranks 0 to 3 wait for the lock on the file shards.lock in lookup (train.py:58), held by process 4711.", "End the process that holds the lock, or let only one rank take it: see train.py:58."),
    "absent, all ranks in two places": ("Ranks 0 and 1 do not go on: rank 0 waits to send to rank 1 in lookup (train.py:58); rank 1 waits to send to rank 0 in refresh_cache (train.py:52).", "Make rank 1 receive what rank 0 sends, in the same order: see train.py:58."),
    "absent, two save": ("Ranks 1 and 2 have not reached all_reduce in train (train.py:91), #126 of the default group, in which ranks 0 and 3 wait: they save or load a checkpoint in lookup (train.py:58).", "Check where the checkpoint goes; let the others wait for it with a longer timeout: see train.py:58."),
    "absent, two are stopped": ("Ranks 1 and 2 have not reached all_reduce in train (train.py:91), #126 of the default group, in which ranks 0 and 3 wait: they are stopped (SIGSTOP).", "Continue what is stopped: kill -CONT 11 12; then find what stopped it."),
    "absent, lock": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits for the lock `second` in lookup (train.py:58), held by thread cache-refresher in refresh_cache (train.py:52).", "Take locks in the same order in every thread, and never wait while holding one: compare train.py:58 with train.py:52."),
    "absent, semaphore": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits for the semaphore `slots` in lookup (train.py:58).", "Take locks in the same order in every thread, and never wait while holding one: see train.py:58."),
    "absent, the interpreter": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits for the interpreter in lookup (train.py:58), held by thread decoder in refresh_cache (train.py:52).", "Let that call release the interpreter, or run it in a process of its own: compare train.py:58 with train.py:52."),
    "absent, lock without a name": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits for a lock in lookup (train.py:58).", "Take locks in the same order in every thread, and never wait while holding one: see train.py:58."),
    "absent, queue": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits for the queue `inbox` in lookup (train.py:58).", "Find what should fill or empty that queue, and why it stopped; give the call a timeout: see train.py:58."),
    "absent, full queue": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits for room in a queue in lookup (train.py:58).", "Find what should fill or empty that queue, and why it stopped; give the call a timeout: see train.py:58."),
    "absent, file_lock": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits for the lock on the file shards.lock in lookup (train.py:58), held by process 4711.", "End the process that holds the lock, or let only one rank take it: see train.py:58."),
    "absent, file_lock of a rank in a circle": ("Ranks 1 to 3 have not reached all_reduce in train (train.py:91), #126 of the default group, in which rank 0 waits: they wait for the lock on the file shards.lock in lookup (train.py:58), held by rank 0, and rank 0 waits for them in turn.", "Release the lock before the call in which rank 0 waits: see train.py:91."),
    "absent, event": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits for `ready` in lookup (train.py:58).", "Find what should end that wait, and why it did not; give it a timeout: see train.py:58."),
    "absent, thread": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits for thread loader in lookup (train.py:58), which is in refresh_cache (train.py:52).", "Find what that thread waits for; end it before it is joined, or make it a daemon: compare train.py:58 with train.py:52."),
    "absent, at its exit": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it has ended the program, waiting for a thread in _shutdown of threading.py.", "Find what that thread waits for; end it before it is joined, or make it a daemon."),
    "absent, subprocess": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits for process 4711 (ffmpeg) in lookup (train.py:58).", "Check what that process waits for, and give the call a timeout: see train.py:58."),
    "absent, worker at a line": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits in lookup (train.py:58) for DataLoader worker 4711, which is in __getitem__ (data.py:20).", "Check the DataLoader's dataset in that worker, and set `timeout` of the DataLoader: compare train.py:58 with data.py:20."),
    "absent, worker in a state": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits in lookup (train.py:58) for DataLoader worker 4711, which waits for a disk.", "Check the DataLoader's dataset in that worker, and set `timeout` of the DataLoader: see train.py:58."),
    "absent, worker stopped": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits in lookup (train.py:58) for DataLoader worker 4711, which is stopped (SIGSTOP).", "Continue the worker: kill -CONT 4711; then find what stopped it."),
    "absent, worker gone": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits in lookup (train.py:58) for DataLoader worker 4711, which has died.", "Check the kernel log (dmesg) for out-of-memory, and the memory of the loader's workers (/dev/shm too)."),
    "absent, worker unknown": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits in lookup (train.py:58) for a DataLoader worker.", "Check the DataLoader's dataset in that worker, and set `timeout` of the DataLoader: see train.py:58."),
    "absent, recv": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits to receive from rank 0 in lookup (train.py:58).", "Make rank 0 send what rank 2 receives, in the same order: see train.py:58."),
    "absent, recv from an unknown rank": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits to receive from another rank in lookup (train.py:58).", "Make the other rank send what rank 2 receives, in the same order: see train.py:58."),
    "absent, send": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits to send to rank 3 in lookup (train.py:58).", "Make rank 3 receive what rank 2 sends, in the same order: see train.py:58."),
    "absent, collective": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits in all_to_all in lookup (train.py:58).", "Make all ranks call the same collectives in the same order: see train.py:58."),
    "absent, socket": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits for the network (10.0.0.7:443) in lookup (train.py:58).", "Check whether the other end answers, and give the call a timeout: see train.py:58."),
    "absent, pipe": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits for a pipe in lookup (train.py:58).", "Check the process at the other end of the pipe: see train.py:58."),
    "absent, standard input": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits for its standard input in lookup (train.py:58).", "Remove what reads it, such as input() or a breakpoint: see train.py:58."),
    "absent, disk": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it waits for the disk or file system of /data/shard-3 in lookup (train.py:58).", "Check that disk or file system on its host (dmesg, `iostat -x 1`, the NFS server): see train.py:58."),
    "absent, sleep": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it sleeps in lookup (train.py:58).", "Find out why it sleeps there: see train.py:58."),
    "absent, import": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it imports a module in lookup (train.py:58).", "Import it on every rank before training starts: see train.py:58."),
    "absent, compile": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it compiles in lookup (train.py:58).", "Wait for it to compile; raise the group's timeout, or compile before training starts: see train.py:58."),
    "absent, checkpoint": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it saves or loads a checkpoint (/ckpt/60) in lookup (train.py:58).", "Check where the checkpoint goes; let the others wait for it with a longer timeout: see train.py:58."),
    "absent, python": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it computes in lookup (train.py:58).", "Check the loop or the call at train.py:58: `py-spy dump --locals --pid PID` shows its variables."),
    "absent, native": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it computes in lookup (train.py:58), inside matmul of functional.py.", "Check that call at train.py:58: `py-spy dump --native --pid PID` shows the stack inside it."),
    "absent, native without a line": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it computes in native code in stage data.", "Check that call: `py-spy dump --native --pid PID` shows the stack inside it."),
    "absent, stopped": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it is stopped (SIGSTOP).", "Continue what is stopped: kill -CONT 4711; then find what stopped it."),
    "absent, held by a debugger": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it is stopped by a debugger in lookup (train.py:58).", "Find why a debugger stops process 4711."),
    "absent, stopped on another host": ("Rank 2 on node-3 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it is stopped (SIGSTOP).", "Continue what is stopped on node-3: kill -CONT 4711; then find what stopped it."),
    "absent, no answer": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it does not answer.", "Check that process: `py-spy dump --native --pid 4711` shows what it waits for."),
    "absent, waits for something unknown": ("Rank 2 has not reached all_reduce in train (train.py:91), #126 of the default group, in which the other 3 ranks wait: it is in lookup (train.py:58), inside wait of selectors.py.", "Check that process: `py-spy dump --native --pid PID` shows what it waits for."),
    "dead, exit status": ("Rank 2 is dead (exit status 3) since step 60, in stage data; the other 3 ranks wait for it in all_reduce in train (train.py:91), #126 of the default group.", "Check the last output of rank 2; then restart the job."),
    "dead, killed": ("Rank 2 on node-3 is dead (killed by SIGKILL, out of memory) since step 60; the other 3 ranks wait for it in all_reduce in train (train.py:91), #126 of the default group.", "Check the last output of rank 2 on node-3, and the kernel log (dmesg) for out-of-memory; then restart the job."),
    "dead, no flight recorder": ("Rank 2 is dead (its exit status is not known) since step 60; the other 3 ranks wait for it.", "Check the last output of rank 2, and the kernel log (dmesg) for out-of-memory; then restart the job."),
    "dead, two ways": ("Ranks 1 and 2 are dead, rank 1 (exit status 3) since step 60 and rank 2 (killed by SIGABRT) since step 60; ranks 0 and 3 wait for them in all_reduce in train (train.py:91), #126 of the default group.", "Check the last output of ranks 1 and 2; then restart the job."),
    "dead, left early": ("Rank 2 has ended (exit status 0) since step 60; the other 3 ranks wait for it in all_reduce in train (train.py:91), #126 of the default group.", "Make every rank take the same number of steps: check for uneven data, or a `break` on one rank."),
    "all_inside": ("All 4 ranks of the default group are in the same all_reduce of 1 float in train (train.py:91) (#126), and none is missing: the network or the collective itself is stuck.", "Check the network between node-1 and node-2; for NCCL, run the job with NCCL_DEBUG=INFO and read what it logs about transports."),
    "all_inside, some have left": ("Ranks 0, 2 and 3 wait in all_reduce of 1 float in train (train.py:91), #126 of the default group, which rank 1 has left: the network or the collective itself is stuck.", "Check the network between the ranks; for NCCL, run the job with NCCL_DEBUG=INFO and read what it logs about transports."),
    "all_inside, roots": ("Rank 3 waits in reduce to rank 3 of 1 float in train (train.py:91), #126 of the default group, which the other 3 ranks have left: they name different roots, or the network is stuck.", "Check that all ranks name the same root: see train.py:91."),
    "all_inside, splits": ("All 4 ranks of the default group are in the same all_to_all of 1 float in train (train.py:91) (#126), and none is missing: their splits do not match, or the network is stuck.", "Check that all ranks send what the others expect: see train.py:91."),
    "different_collective, several": ("Ranks 1 and 4 called all_gather of 3 floats in validate (train.py:52), rank 3 called broadcast of 3 floats in validate (train.py:52) and 2 more ranks called something else, where ranks 0 and 2 called all_reduce of 1 float in train (train.py:91), #126 of the default group.", "Make all ranks call the same collectives in the same order: compare train.py:52 with train.py:91."),
    "different_collective, objects": ("Rank 2 called all_gather_object (all_gather of 3 floats) in validate (train.py:52) where the other 3 ranks called all_reduce of 1 float in train (train.py:91), #126 of the default group.", "Make all ranks call the same collectives in the same order: compare train.py:52 with train.py:91."),
    "different_collective, roots": ("Rank 2 called reduce to rank 3 of 1 float in train (train.py:91) where the other 3 ranks called reduce to rank 0 of 1 float in train (train.py:91), #126 of the default group.", "Name the same root on all ranks: see train.py:91."),
    "absent, a circle of three": ("Ranks 0 to 2 on a wait for each other: rank 0 waits to receive from rank 1 in validate (train.py:52); rank 1 waits to receive from rank 2 in validate (train.py:52); rank 2 waits to receive from rank 0 in validate (train.py:52).", "Make rank 1 send what rank 0 receives, in the same order: see train.py:52."),
    "absent, a circle that others wait for": ("Ranks 0 and 1 on a wait for each other, and keep ranks 2 and 3 waiting: rank 0 waits to receive from rank 1 in validate (train.py:52); rank 1 waits to receive from rank 0 in validate (train.py:52).", "Make rank 1 send what rank 0 receives, in the same order: see train.py:52."),
    "all_inside, stacks alone": ("All 4 ranks are in the same collective in train (train.py:91), and none is missing: the network or the collective itself is stuck.", "Check the network between the ranks; for NCCL, run the job with NCCL_DEBUG=INFO and read what it logs about transports."),
    "all_inside, a group": ("All 2 ranks of group 2 (ranks 2 and 3) are in the same barrier in train (train.py:91) (#126), and none is missing: the network or the collective itself is stuck.", "Check the network between the ranks; for NCCL, run the job with NCCL_DEBUG=INFO and read what it logs about transports."),
    "unknown": ("Why the job hangs is not known: ranks 1 and 3 do not answer, and no flight recorder is on.", "Compare the stacks of the ranks: `sftriage traces show` lists where each of them is."),
    "unknown, for an unknown reason": ("Why the job hangs is not known.", "Compare the stacks of the ranks: `sftriage traces show` lists where each of them is."),
}  # fmt: skip


@pytest.mark.parametrize("name", HANGS)
def test_GIVEN_a_hang_THEN_its_sentence_and_its_next_step_are_those_of_the_table(name):
    assert (hang_sentence(HANGS[name]), hang_next_step(HANGS[name])) == WORDS[name]


def test_THEN_every_kind_and_every_code_is_in_the_table():
    kinds = {kind for part in get_args(HangKind) for kind in (get_args(part) or (part,))}
    codes = {code for part in get_args(BlockedCode) for code in (get_args(part) or (part,))}
    assert {found.kind for found in HANGS.values()} == kinds
    assert {one.code for found in HANGS.values() if found.kind == "absent" for one in found.blocked} == codes
    assert set(WORDS) == set(HANGS)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1), "0 and 1"),
        ((2, 0, 1), "0 to 2"),
        ((0, 1, 2, 3, 7, 9, 10), "0 to 3, 7, 9 and 10"),
        (range(0, 512, 8), "0, 8, 16, 24, 32 and 59 more"),
        (range(100_000), "0 to 99999"),
    ],
)
def test_GIVEN_ranks_THEN_consecutive_ones_are_a_range_and_many_are_cut_short(ranks, words):
    assert rank_ranges(ranks) == words


@pytest.mark.parametrize(
    ("op", "sizes", "dtypes", "words"),
    [
        ("all_reduce", ((),), ("Float",), "all_reduce of 1 float"),
        ("all_reduce", ((1024, 1024),), ("Half",), "all_reduce of 1,024 x 1,024 half floats"),
        ("_allgather_base", ((4680,),), ("BFloat16",), "all_gather_into_tensor of 4,680 bfloat16s"),
        ("all_to_all", ((3,), (3,)), ("Long",), "all_to_all of 2 tensors of 3 int64s"),
        ("all_to_all", ((3,), (1,)), ("Float", "Int"), "all_to_all of 2 tensors (3 floats and 1 int32)"),
        ("all_to_all", tuple((n,) for n in range(9)), ("Float",), "all_to_all of 9 tensors of 36 elements in total"),
        ("barrier", ((1,),), ("Float",), "barrier"),
        ("all_reduce", (), (), "all_reduce"),
        ("all_reduce", ((2,),), (), "all_reduce of 2 elements"),
    ],
)
def test_GIVEN_a_call_THEN_its_sizes_are_in_words(op, sizes, dtypes, words):
    assert call_words(Call(op, sizes, dtypes)) == words


def test_GIVEN_names_with_control_characters_THEN_none_reaches_the_terminal():
    sentence = hang_sentence(blocked("lock", about="a\x1b[2J", held_by="x\n{y}"))
    assert sentence.isprintable()
    assert "`a?[2J`" in sentence
    assert "thread x?{y}" in sentence
