"""Small records of jobs that hang, built from what each rank has called; and the dumps of real ones."""

import re
from pathlib import Path

from sftriage.model.hangs import Call, GroupCalls, HangEvidence, RankEvidence, SourceLine, ThreadEvidence, Wait

DUMPS = Path(__file__).resolve().parents[4] / "shared" / "hangs"
LIBRARY = re.compile(r"(^|/)(site|dist)-packages/|^python3/|^<|^answering.py")
TORCH = "site-packages/torch/distributed/distributed_c10d.py"


def line(function="train", number=91, source="", file="train.py", own=True):
    return SourceLine(function, file, number, source, own)


def library(function, file):
    return SourceLine(function, file, 1)


def call(op="all_reduce", *sizes, number=91, function="train", dtype="Float"):
    sizes = sizes or ((4680,),)
    return Call(op, sizes, tuple(dtype for _ in sizes), (line(function, number),))


GRADIENTS, LOSS = call(), call("all_reduce", (), number=97)
GATHER = call("all_gather", (3,), number=52, function="validate")
STEP = [GRADIENTS, LOSS]


def thread(*frames, main=True, name="MainThread", **wait):
    return ThreadEvidence(name, main, frames or (line(),), Wait(**wait))


def queue_get(number=77):
    return thread(library("wait", "python3/threading.py"), library("get", "python3/queue.py"), line(number=number))


def group(calls, table, pending=1, first=1, name="0", members=None, description=None):
    """``pending``: how many of the last calls have not ended, or which."""
    numbers = range(first + len(calls) - pending, first + len(calls)) if isinstance(pending, int) else pending
    for each in calls:
        if each not in table:
            table.append(each)
    what = description or ("default_pg" if name == "0" else "undefined")
    return GroupCalls(name, what, members, first, tuple(table.index(each) for each in calls), tuple(numbers))


def rank(number, calls=(), pending=1, first=1, others=(), host="node-0", **fields):
    """A rank that answers: calls of the default group; ``others`` are (name, members, calls, pending)."""
    table = []
    groups = [group(list(calls), table, pending if calls else 0, first)]
    groups += [group(list(its), table, waits, 1, name, members) for name, members, its, waits in others]
    known = {"answered": True, "pid": 100 + number, "step": 60, "stage": "backward", **fields}
    known["threads"] = tuple(known.get("threads", (thread(),)))
    return RankEvidence(number, host, calls=tuple(table), groups=tuple(groups), **known)


def silent(number, **fields):
    return RankEvidence(number, fields.pop("host", "node-0"), 100 + number, **fields)


def job(*ranks, world=None, hang=None):
    return HangEvidence(0.0, 1, 60, world or len(ranks), tuple(ranks), hang)


def dumped(dumps):
    """The evidence of a real dump: flight recorder entries and stacks of each rank."""
    pairs = {"1": ((0, 1, 1),), "2": ((2, 3, 1),)}
    ranks = []
    for number, dump in dumps.items():
        table, by_name = [], {}
        for entry in dump["entries"]:
            frames = [
                SourceLine(at["name"], at["filename"], at["line"], own=True)
                for at in entry["frames"]
                if not LIBRARY.search(at["filename"])
            ]
            sizes, dtypes = tuple(map(tuple, entry["input_sizes"])), tuple(entry["input_dtypes"])
            its = Call(entry["profiling_name"].split(":")[-1], sizes, dtypes, tuple(frames[:3]))
            by_name.setdefault(tuple(entry["process_group"]), []).append((entry, its))
        groups = []
        for (name, description), entries in by_name.items():
            waits = [entry["collective_seq_id"] for entry, _ in entries if not entry["retired"]]
            first = entries[0][0]["collective_seq_id"]
            groups.append(group([its for _, its in entries], table, waits, first, name, pairs.get(name), description))
        threads = [
            ThreadEvidence(
                name,
                name == "MainThread",
                tuple(SourceLine(f, file, n, text, not LIBRARY.search(file)) for file, n, f, text in stack),
            )
            for name, stack in dump["stacks"].items()
        ]
        ranks.append(
            RankEvidence(
                int(number),
                "node-0",
                100 + int(number),
                answered=True,
                calls=tuple(table),
                groups=tuple(groups),
                threads=tuple(threads),
            )
        )
    return job(*ranks)
