"""Does a hang end in a sentence, and is it right? Real jobs over Gloo that hang in many ways, and some that do not.

Each kind is a job of four ranks, or of 8 or 64 where its name says so, under `sftriage run` with the default policy,
which calls a job stalled after 10 s, but in `AS_SHIPPED`: those of `jobs/hanging.py`, and those of
`../shared/hangs/hang.py` if it is there.
A job ends soon after its sentence, or without one some time after its stall. The first sentence is right if its kind
is, and if it names the ranks, the collective and the line; one that is `unknown` is not right, but not wrong either. Of
a healthy job nothing may be reported, or a pause as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from bench.runner import HERE, ROOT, environment_of, say
from sftriage.errors import SftriageError
from sftriage.model.events import CauseFound, Event, JobBroken, WindowJudged
from sftriage.model.hangs import HangKind
from sftriage.policy.in_force import find
from sftriage.runs.directory import RunDirectory
from sftriage.runs.journal import read_journal
from sftriage.words.run import event_sentence
from tests.integration.namespaces import two_hosts
from tests.integration.processes import FORKED, TORCHRUN, descendants, kill

OWN = HERE / "jobs" / "hanging.py"
SHARED = ROOT.parent / "shared" / "hangs" / "hang.py"
STALLED_AFTER_S = 10.0
LIMIT_S, AFTER_STALL_S, ENDING_S = 150.0, 20.0, 8.0
LARGE_LIMIT_S = 400.0
"""How long a job may take, its sentence after its stall, its end; and how long a job of 64 ranks."""
AS_SHIPPED = ("between_steps", "two_hosts", "short_timeout", "healthy_long_evaluation")
"""Kinds under the default policy as it is: the job may be still for minutes, but for a hang that is proved."""
LONG_PAUSE_S = 60.0
QUICK = {"kinds": ["second_epoch", "evaluation"]}

Result = Literal["right", "unknown", "wrong", "nothing"]


@dataclass(frozen=True, slots=True)
class Truth:
    """What is right to report: one of ``kinds``, and in the sentence the ranks, an operation, and a line.

    ``lines`` are texts of which the line has one, ``ops`` operations of which the sentence names one; where there is
    none, none is needed.
    """

    kinds: tuple[str, ...]
    ranks: tuple[int, ...]
    ops: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


def absent(line: str, *ranks: int, op: str = "all_reduce") -> tuple[Truth, ...]:
    """The truth of ranks that have not come to where the others wait."""
    return (Truth(("absent",), ranks, (op,) if op else (), (line,) if line else ()),)


def differs(kinds: str, rank: int, op: str, line: str) -> tuple[Truth, ...]:
    """The truth of a rank that called something else."""
    return (Truth(tuple(kinds.split()), (rank,), (op,), (line,)),)


ABORTED = tuple(Truth(("dead",), (rank,)) for rank in range(4))
"""Gloo aborts the first rank that receives more than it expects, not always the one at fault: the job ends at once."""

HANG_PY: Mapping[str, tuple[Truth, ...]] = {
    "queue": absent("inbox.get()", 2),
    "worker": (Truth(("dead", "absent"), (2,)),),
    "workerstop": absent("x = next(it)", 2),
    "spin": (Truth(("absent",), (2,), ("all_reduce",), ("n = (n * 31", "    while True:")),),
    "locks": absent("with second: pass", 2),
    "flock": absent("fcntl.flock(lock", 0, 1, 2, 3, op=""),
    "sigstop": absent("", 2),
    "exit": (Truth(("dead",), (2,)),),
    "exitspawn": (Truth(("dead",), (2,)),),
    "different": differs("different_collective", 2, "all_gather", "return [dist.all_gather"),
    "skip": (*differs("skipped different_sizes", 2, "all_reduce", "else: dist.all_reduce(loss)"), *ABORTED),
    "shape": differs("different_sizes", 2, "all_reduce", "else: dist.all_reduce(loss)"),
    "op": differs("different_collective", 2, "broadcast", "dist.broadcast(loss, 0)"),
    "reduceop": differs("different_collective", 2, "reduce", "dist.reduce(loss, 0)"),
    "order": differs("different_collective", 2, "all_gather", "if last: dist.all_gather("),
    "subgroup": tuple(Truth(("elsewhere",), (rank,), ("all_reduce",), ("group=pairs[1]",)) for rank in (2, 3)),
    "extra": (*differs("extra different_sizes", 2, "all_reduce", "dist.all_reduce(torch.ones(1))"), *ABORTED),
    "sendrecv": absent("dist.recv(torch.zeros(3), src=0)", 2),
}


def own(kind: str) -> tuple[Truth, ...]:
    """The truth of a kind of `jobs/hanging.py`."""
    line = f"# line: {kind}"
    here: Mapping[str, tuple[Truth, ...]] = {
        "evaluation": differs("different_collective", 2, "all_gather", line),
        "between_steps": differs("different_collective", 2, "all_gather", line),
        "auto_collective": differs("different_collective", 1, "all_gather", line),
        "two_hosts": differs("different_collective", 3, "all_gather", line),
        "uneven": differs("different_collective", 2, "barrier", line),
        "tensor_parallel": tuple(
            Truth(("different_collective",), ranks, ("all_gather",), (line,)) for ranks in ((3,), (2,), (2, 3))
        ),
        "two_faults": (
            *absent("# line: queue_of_two", 1),
            *differs("different_collective", 3, "all_gather", "# line: gather_of_two"),
        ),
        "gloo_aborts": ABORTED,
        "crossed_groups": differs("elsewhere", 3, "all_reduce", line),
        "pair_order": differs("elsewhere", 2, "all_reduce", line),
        "objects": differs("different_collective", 1, "all_gather_object", line),
        # Its root may be another, or what the others sent is lost: neither is certain.
        "roots": differs("all_inside", 3, "reduce", line),
        "two_calls": differs("different_collective", 1, "broadcast", line),
        "barrier_forgotten": differs("skipped different_collective", 2, "barrier", line),
        "exception_caught": differs("skipped different_collective", 2, "all_gather", line),
        "pipeline": absent(line, 1, op=""),
        # A rank that does not answer: its line is known only where it can be read from outside.
        "interpreter_held": absent("", 2),
        "leaves": absent("", 2),
        "fsdp": absent(line, 2, op="all_gather"),
        "healthy_checkpoint": absent(line, 0, op="barrier"),
        "healthy_evaluation": absent(line, 0),
        "healthy_long_evaluation": (),
        "healthy_compile": (),
        "healthy": (),
    }
    ranks = {"worker_fifo": 0, "file_lock": 0, "helper_stopped": 0, "subprocess": 1, "thread": 1, "breakpoint": 3}
    ranks |= {"short_timeout": 0, "http": 3, "one_of_eight": 6, "one_of_64": 41}
    return here[kind] if kind in here else absent(line, ranks.get(kind, 2))


@cache
def own_kinds() -> tuple[str, ...]:
    """The kinds of `jobs/hanging.py`, which imports torch."""
    source = OWN.read_text(encoding="utf-8").partition("\nKINDS: ")[2].partition("\n}\n")[0]
    return tuple(re.findall(r'^    "(\w+)": Way', source, re.M))


def all_kinds() -> tuple[str, ...]:
    if not SHARED.exists():
        say(f"{SHARED} is not there: its kinds are skipped")
    found = (*(HANG_PY if SHARED.exists() else ()), *own_kinds())
    if os.geteuid():
        say("two hosts in network namespaces need root: skipped")
    return tuple(kind for kind in found if kind != "two_hosts" or not os.geteuid())


@dataclass(frozen=True, slots=True)
class Row:
    """One job, and its first sentence.

    ``stalled_s``: how long the job was still when it was reported; ``sentence_s``: how long after that the sentence
    came, for one without a stall after the job began.
    """

    kind: str
    result: Result
    healthy: bool
    code: str = ""
    kind_right: bool = False
    rank_right: bool = False
    collective_right: bool = False
    line_right: bool = False
    stalled_s: float | None = None
    sentence_s: float | None = None
    sentence: str = ""


def ranks_in(sentence: str, world_size: int) -> tuple[int, ...]:
    """The ranks that a sentence names first."""
    if re.match(r"(All|Every)\b", sentence):
        return tuple(range(world_size))
    found = re.search(r"\branks? (\d+(?:(?:,| and| to|-)+ ?\d+)*)", sentence, re.I)
    if found is None:
        return ()
    ranks: list[int] = []
    for first, last in re.findall(r"(\d+)(?:(?: to |-)(\d+))?", found[1]):
        ranks += range(int(first), int(last or first) + 1)
    return tuple(sorted(ranks))


def lines_of(script: Path, texts: Iterable[str]) -> tuple[str, ...]:
    """Patterns of the lines of a script that have one of these texts, or one of these marks among theirs."""

    def is_in(text: str, line: str) -> bool:
        code, mark, kinds = line.partition("# line: ")
        if text.startswith("# line: "):
            return bool(mark) and text.removeprefix("# line: ") in kinds.strip().split(", ")
        return text in code

    found = enumerate(script.read_text(encoding="utf-8").splitlines(), 1)
    return tuple(
        rf"\b{re.escape(script.name)}:{number}\b" for number, line in found if any(is_in(text, line) for text in texts)
    )


def reason_in(event: Event) -> tuple[str, str, float] | None:
    """The kind of a hang, or "dead" of a job that has broken, with the sentence and when it came."""
    if isinstance(event, CauseFound) and event.code in get_args(HangKind):
        return event.code, event.sentence, event.time_s
    if isinstance(event, JobBroken):
        return "dead", event_sentence(event), event.time_s
    return None


def after_start(events: Iterable[Event]) -> Iterator[Event]:
    """Events without stalls of the first two steps, and their sentences: on a busy machine, torch imports that long."""
    starting = False
    for event in events:
        stalled = isinstance(event, WindowJudged) and event.verdict.label == "stalled"
        if isinstance(event, WindowJudged) and stalled:
            starting = event.verdict.first_step <= 1
        if not (starting and (stalled or isinstance(event, CauseFound))):
            yield event


def judged(
    kind: str,
    truths: tuple[Truth, ...],
    events: Iterable[Event],
    script: Path,
    *,
    began_s: float,
    ranks: int,
    finished: bool,
) -> Row:
    """The first sentence about a hang, and which parts of it are right; without one, a healthy job has to finish."""
    healthy, stall = kind.startswith("healthy"), None
    for event in events if healthy else after_start(events):
        if isinstance(event, WindowJudged) and event.verdict.label == "stalled":
            stall = stall or event
        if (reason := reason_in(event)) is not None:
            code, sentence, time_s = reason
            after_s = time_s - (stall.decision.time_s if stall else began_s)
            stalled_s, named = stall.verdict.exposed_s if stall else None, ranks_in(sentence, ranks)
            right = [
                (
                    code in truth.kinds,
                    named == truth.ranks,
                    not truth.ops or any(re.search(rf"\b{op}\b", sentence) for op in truth.ops),
                    not truth.lines or any(re.search(line, sentence) for line in lines_of(script, truth.lines)),
                )
                for truth in truths
            ]
            best = max(right, key=sum, default=(False,) * 4)
            result: Result = "right" if all(best) else "unknown" if code == "unknown" else "wrong"
            return Row(kind, result, healthy, code, *best, stalled_s, after_s, sentence)
    result = "right" if healthy and finished else "nothing"
    return Row(kind, result, healthy, stalled_s=stall.verdict.exposed_s if stall else None)


def policy_text(stalled_after_s: float | None) -> str:
    """The default policy, with this time after which a job is stalled, if given."""
    if stalled_after_s is None:
        return find("default").read_text(encoding="utf-8")
    text = re.sub(r"\n *stalled_after:.*", "", find("default").read_text(encoding="utf-8"))
    return text.replace("  detection:\n", f"  detection:\n    stalled_after: {stalled_after_s:g}s\n", 1)


def settings_of(kind: str) -> dict[str, Any]:
    return {"stalled_after_s": None, "pause_s": LONG_PAUSE_S} if kind in AS_SHIPPED else {}


def command_of(kind: str, folder: Path, launcher: Sequence[str], pause_s: float) -> list[str]:
    """The command of a job."""
    # (64 imports of torch take longer than anything else here)
    launch = [*(FORKED if kind == "one_of_64" else launcher), str(ranks_of(kind))]
    if kind in own_kinds():
        return [*launch, *script_of(kind, folder, pause_s)]
    job = [str(SHARED), "--kind", kind, "--out", str(folder / "dumps")]
    return [sys.executable, *job, "--spawn", "4"] if kind == "exitspawn" else [*launch, *job]


def script_of(kind: str, folder: Path, pause_s: float) -> list[str]:
    return [str(OWN), "--kind", kind, "--folder", str(folder), "--pause-s", f"{pause_s:g}"]


def ranks_of(kind: str) -> int:
    return {"one_of_eight": 8, "one_of_64": 64}.get(kind, 4)


@contextlib.contextmanager
def lock_held(path: Path) -> Iterator[None]:
    """The file lock that all ranks of the kind ``flock`` wait for."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def end(job: subprocess.Popen[bytes]) -> None:
    """End a job, and everything that it has started."""
    below = descendants(job.pid)
    job.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(ENDING_S)
    kill(*below, *descendants(job.pid), job.pid)
    job.wait()


def one_row(
    kind: str,
    folder: Path,
    launcher: Sequence[str] = TORCHRUN,
    stalled_after_s: float | None = STALLED_AFTER_S,
    pause_s: float = 4 * STALLED_AFTER_S,
) -> Row:
    """Run a job until its first sentence, or until none can be expected, and judge it."""
    folder.mkdir(parents=True)
    policy, run = folder / "policy.yaml", folder / "run"
    policy.write_text(policy_text(stalled_after_s), encoding="utf-8")
    began_s = time.time()
    with contextlib.ExitStack() as held, (folder / "log").open("wb") as log:
        if kind == "flock":
            held.enter_context(lock_held(folder / "shards.lock"))
        environment = environment_of(XDG_STATE_HOME=str(folder / "state"), XDG_CACHE_HOME=str(folder / "cache"))
        if kind == "two_hosts":
            hosts, job_id = held.enter_context(two_hosts()), ("--job-id", f"hangs-{os.getpid()}")
            script = script_of(kind, folder, pause_s)
            jobs = hosts.torchrun(folder, environment, job_id, *script, ranks=2, port=29533)
        else:
            command = [sys.executable, "-m", "sftriage", "run", "--policy", str(policy), "--out", str(run), "--"]
            command += command_of(kind, folder, launcher, pause_s)
            jobs = [subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)]
        for job in jobs:
            held.callback(end, job)
        while any(job.poll() is None for job in jobs) and not over(kind, events_of(run), time.time() - began_s):
            time.sleep(0.5)
        # (what follows is of its end)
        finished, events = all(job.poll() == 0 for job in jobs), events_of(run)
    path = OWN if kind in own_kinds() else SHARED
    truths = own(kind) if kind in own_kinds() else HANG_PY[kind]
    row = judged(kind, truths, events, path, began_s=began_s, ranks=ranks_of(kind), finished=finished)
    took = "" if row.sentence_s is None else f", sentence {row.sentence_s:.1f} s later"
    stalled = "no stall" if row.stalled_s is None else f"stalled for {row.stalled_s:.0f} s"
    say(f"{kind:20} {row.result:8} {row.code:20} {stalled}{took}\n    {row.sentence}")
    return row


def events_of(run: Path) -> list[Event]:
    try:
        return list(read_journal(RunDirectory(run).decisions))
    except (OSError, SftriageError):
        return []


def over(kind: str, events: Sequence[Event], age_s: float) -> bool:
    """Whether nothing more is to be expected of a job; a healthy one is left to its end."""
    if age_s > (LIMIT_S if ranks_of(kind) < 64 else LARGE_LIMIT_S):
        return True
    if kind.startswith("healthy"):
        return False
    events = list(after_start(events))
    if any(map(reason_in, events)):
        return True
    stalls = (event for event in events if isinstance(event, WindowJudged) and event.verdict.label == "stalled")
    return any(time.time() - event.decision.time_s > AFTER_STALL_S for event in stalls)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=None, help="kinds, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="jobs at a time")
    parser.add_argument("--keep", type=Path, help="where to keep the runs")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    known = all_kinds()
    kinds = options.kinds or known
    if unknown := [kind for kind in kinds if kind not in known]:
        raise SystemExit(f"unknown kinds {', '.join(unknown)}; choose from {', '.join(known)}")
    with tempfile.TemporaryDirectory(prefix="hangs-", ignore_cleanup_errors=True) as temporary:
        folder = options.keep or Path(temporary)
        with ThreadPoolExecutor(options.jobs) as pool:
            rows = list(pool.map(lambda kind: one_row(kind, folder / kind, **settings_of(kind)), kinds))
    return {**totals(rows), "rows": [asdict(row) for row in rows]}


def totals(rows: list[Row]) -> dict[str, Any]:
    """How many hangs have a right sentence, and how many sentences, of healthy jobs too, are wrong."""
    hangs, healthy = ([row for row in rows if row.healthy is is_healthy] for is_healthy in (False, True))
    waits = [row.sentence_s for row in hangs if row.stalled_s is not None and row.sentence_s is not None]
    return {
        "right": sum(row.result == "right" for row in hangs),
        "unknown": sum(row.result == "unknown" for row in hangs),
        "of": len(hangs),
        "healthy_right": sum(row.result == "right" for row in healthy),
        "healthy_of": len(healthy),
        "wrong": sum(row.result == "wrong" for row in rows),
        "longest_sentence_s": max(waits, default=None),
    }


def show(found: Mapping[str, Any]) -> Iterator[str]:
    """The table, and the totals."""
    parts = ("kind", "rank", "collective", "line")
    yield f"{'job':20} {'result':8} {'reported as':21} {'stalled':>8} {'sentence':>9}  {'  '.join(parts)}"
    for row in found["rows"]:
        times = ("-" if row[name] is None else f"{row[name]:.1f} s" for name in ("stalled_s", "sentence_s"))
        marks = "  ".join(f"{'yes' if row[f'{part}_right'] else '-':{len(part)}}" for part in parts)
        yield "{:20} {:8} {:21} {:>8} {:>9}  {}".format(row["kind"], row["result"], row["code"] or "-", *times, marks)
        if row["sentence"]:
            yield f"    {row['sentence']}"
    yield "right: {right} of {of} hangs, {healthy_right} of {healthy_of} healthy jobs".format(**found)
    yield "unknown: {unknown}; wrong: {wrong}".format(**found)
