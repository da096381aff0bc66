"""``sftriage doctor``: what works on this machine, and what some steps of a job show."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from sftriage.agent.stacks import DUMP_S, reason_of
from sftriage.base.loops import start_thread
from sftriage.base.process import run_bounded
from sftriage.errors import CaptureError, RingError, SftriageError, UsageError
from sftriage.model.checks import CheckResult
from sftriage.model.windows import EXCHANGE, StepRecord
from sftriage.runtime.carrying import REPORTS, under_seams
from sftriage.runtime.first_step import Facts, Processes, reports_in, why_nothing, with_reports
from sftriage.runtime.launcher import Launcher, Triaged, supervise
from sftriage.runtime.rings import TMPFS, make_rings_directory, remove_rings_directory
from sftriage.trainer import moments
from sftriage.trainer.layout import RingInfo, find_rings
from sftriage.trainer.monitor import Monitor
from sftriage.trainer.seams.patches import NAMES
from sftriage.trainer.seams.steps import STAGES
from sftriage.windows.rings import Ring
from sftriage.words.verdicts import counted

_TRIAL_STEPS = 3


def examine(rings_root: Path = TMPFS) -> list[CheckResult]:
    """Run all checks, in the order in which a new user needs them. Leaves nothing behind; does not import torch."""
    nsys = shutil.which("nsys")
    return [
        *recording_checks(rings_root),
        torch_check(),
        CheckResult("nsys", "ok", nsys) if nsys else CheckResult("nsys", "missing", "no captures by Nsight Systems"),
        py_spy_check(),
    ]


def recording_checks(rings_root: Path = TMPFS, ranks: int = 1) -> Iterator[CheckResult]:
    """Whether this many ranks can record here: Python, the form of the recorder, the place of the rings."""
    free_threaded = ", free-threaded" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    version = f"{platform.python_implementation()} {platform.python_version()}"
    yield CheckResult("python", "ok", f"{version}{free_threaded} ({sys.executable})")
    if moments.FORM.name == "C":
        yield CheckResult("recorder", "ok", "in C")
    else:
        yield CheckResult("recorder", "limited", f"in Python, which is slower per step: {moments.WHY_NOT_C}")
    yield from _rings(rings_root, ranks)


def torch_version() -> str | None:
    """The version of torch in this Python; None without any."""
    return next((found.version for found in metadata.distributions(name="torch")), None)


def torch_check() -> CheckResult:
    """Whether there is a torch; does not import it."""
    found = torch_version()
    return CheckResult(
        "torch", "ok" if found else "missing", found or "not in this Python; only the trainers' Python needs it"
    )


def py_spy_check() -> CheckResult:
    """Whether py-spy reads the stacks of a process here, by a trial."""
    program = shutil.which("py-spy", path=search_path())
    if program is None:
        return CheckResult("py-spy", "missing", "no stacks of a rank that hangs", "pip install 'sftriage[stacks]'")
    waiting = [sys.executable, "-I", "-S", "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        process.stdout.readline()
        try:
            found = run_bounded([program, "dump", "--pid", str(process.pid)], DUMP_S)
            why = reason_of(found, process.pid) if found.status else ""
        except CaptureError as error:
            why = str(error)
        process.stdin.close()
    if why:
        return CheckResult("py-spy", "limited", f"no stacks of a rank that hangs: {why}")
    return CheckResult("py-spy", "ok", program)


def _rings(root: Path, ranks: int) -> Iterator[CheckResult]:
    where = root if os.access(root, os.W_OK) else Path(tempfile.gettempdir())
    if where != root:
        yield CheckResult("rings", "limited", f"cannot write {root}: rings are in {where}, perhaps on disk")
    try:
        directory = make_rings_directory(f"check-{os.getpid()}", where)
    except UsageError as error:
        yield CheckResult("rings", "missing", str(error))
        return
    try:
        yield from _trial(directory, where, ranks)
    finally:
        remove_rings_directory(directory, even_written=True)


def _trial(directory: Path, where: Path, ranks: int) -> Iterator[CheckResult]:
    try:
        with Monitor(("trial",), (), rank=0, world_size=1, rings=directory) as monitor:
            for _ in range(_TRIAL_STEPS):
                with monitor.step(), monitor.stage("trial"):
                    pass
            info = monitor.info
            if info is None:
                yield CheckResult("rings", "missing", f"cannot record in {where}: see the warning", _ENLARGE)
                return
            with Ring(directory / info.file_name("ring")) as ring:
                read = len(ring.read().steps)
            rank_bytes = sum(512 * path.lstat().st_blocks for path in directory.iterdir())
    except (OSError, SftriageError) as error:
        yield CheckResult("rings", "missing", str(error))
        return
    if read != _TRIAL_STEPS:
        yield CheckResult("rings", "missing", f"{read} of {_TRIAL_STEPS} steps were read back from {where}")
        return
    # (the trial's own files count as free)
    free_bytes, needed_bytes = shutil.disk_usage(where).free + rank_bytes, ranks * rank_bytes
    room = f"in {where}, {free_bytes >> 20} MiB free"
    if free_bytes < needed_bytes:
        yield CheckResult(
            "rings",
            "missing",
            f"{room}; {counted(ranks, 'rank')} of this host need {-(-needed_bytes >> 20)} MiB",
            _ENLARGE,
        )
    else:
        yield CheckResult("rings", "ok", room)
    if not info.locked:
        yield CheckResult(
            "locks", "limited", "no file locks there: liveness is checked by pid, which fails across containers"
        )


_ENLARGE = "enlarge it: mount -o remount,size=1g /dev/shm, or in a container --shm-size (an emptyDir of medium Memory)"


def search_path() -> str:
    """The search path for programs: first beside this Python."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


_POLL_S = 0.25
_END_S = 30.0
"""How long a job may take to end before it is killed."""

_LAST_WORDS_S = 2.0


@dataclass(frozen=True, slots=True)
class SeamFound:
    """How often a seam fired, over all ranks, and its stage's share of the steps; None if it has no stage."""

    name: str
    fired: int
    share: float | None


@dataclass(frozen=True, slots=True)
class CaptureWorks:
    """Whether a profiler could be used in this job, and why not."""

    profiler: str
    works: bool
    why_not: str


@dataclass(frozen=True, slots=True)
class JobFound:
    """What some steps of a job show.

    ``stages`` has each stage's share of the steps, ``cohorts`` the ranks of each, ``writer`` the form of the recorder
    ("" where nothing was recorded), ``collectives`` calls by function and stage. ``by_hand``: the script has a Monitor.
    """

    seams: tuple[SeamFound, ...]
    stages: Mapping[str, float]
    sync: tuple[str, ...]
    cohorts: Mapping[str, int]
    writer: str
    captures: tuple[CaptureWorks, ...]
    missing: tuple[Missing, ...]
    ranks: int
    steps: int
    models: tuple[str, ...]
    by_hand: bool
    collectives: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Ranks:
    """What the rings of a job hold, and what its processes report (`sftriage.trainer.seams.patches`).

    ``misuse`` counts invalid calls of its recorders.
    """

    infos: tuple[RingInfo, ...]
    steps: tuple[tuple[StepRecord, ...], ...]
    reports: tuple[Mapping[str, Any], ...]
    misuse: int = 0


def try_job(command: Sequence[str], steps: int, patience_s: float) -> JobFound:
    """Run a job until each of its ranks has recorded some steps, or for ``patience_s``, and end it.

    Its output goes to our standard error, until we end it.
    """
    if shutil.which(command[0]) is None:
        raise UsageError(f"cannot start {command[0]}: no such program")
    rings = make_rings_directory(f"doctor-{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory(prefix="sftriage-doctor-") as place, under_seams(Path(place), rings) as added:
            environment = {"SFTRIAGE_RINGS": str(rings), **added}
            known = _run(command, environment, rings, steps, patience_s)
            return found_of(_read_ranks(rings, rings / REPORTS), known)
    finally:
        remove_rings_directory(rings)


def _run(command: Sequence[str], environment: Mapping[str, str], rings: Path, steps: int, patience_s: float) -> Facts:
    """What the processes of a job show, and its exit status if it ended by itself."""
    launcher, ending = Launcher(), threading.Event()
    reading, writing = os.pipe()
    passing_on = start_thread("output", _pass_on, reading, ending)
    processes, free_bytes = Processes(environment), shutil.disk_usage(rings).free

    def watch(launcher: Launcher) -> None:
        deadline_s = time.monotonic() + patience_s
        while not launcher.ended.wait(_POLL_S) and time.monotonic() < deadline_s and not _enough(rings, steps):
            processes.check(launcher.pid)
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if not launcher.ended.is_set():
                ending.set()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(launcher.pid, signum)
            launcher.ended.wait(_END_S)

    job = Triaged(tuple(command), environment, watch, lambda: None)
    try:
        status = supervise(launcher, job.command, lambda: job, required=True, output=writing)
    finally:
        os.close(writing)
        launcher.close()
    # Remaining processes of the job may keep its output open.
    passing_on.join(_LAST_WORDS_S)
    return Facts(
        auto=True,
        torch=len(processes.torch),
        hidden=processes.hidden,
        free_bytes=free_bytes,
        place=str(rings.parent),
        ended_by=launcher.last_signal,
        seconds=patience_s,
        status=None if ending.is_set() else status,
    )


def _pass_on(reading: int, ending: threading.Event) -> None:
    """Print what the job prints, until we end it: a launcher's traceback about that is not about the job."""
    with contextlib.suppress(OSError):
        while text := os.read(reading, 65536):
            if not ending.is_set():
                os.write(2, text)
    os.close(reading)


def _enough(rings: Path, steps: int) -> bool:
    ranks = _read_ranks(rings, None)
    return (
        bool(ranks.infos)
        and len(ranks.infos) >= ranks.infos[0].world_size
        and all(len(records) >= steps for records in ranks.steps)
    )


def _read_ranks(rings: Path, reports: Path | None) -> Ranks:
    """The rings so far, without files that cannot be read."""
    infos, steps, misuse = [], [], 0
    newest = {path.name.split(".")[0]: path for path in find_rings(rings)}
    for path in newest.values():
        with contextlib.suppress(OSError, RingError), Ring(path) as ring:
            batch = ring.read()
            infos.append(ring.info)
            steps.append(tuple(batch.steps.records()))
            misuse += ring.misuse + batch.misuse
    return Ranks(tuple(infos), tuple(steps), tuple(reports_in(reports)) if reports is not None else (), misuse)


_NOTHING_KNOWN = Facts(auto=True)


def found_of(ranks: Ranks, known: Facts = _NOTHING_KNOWN) -> JobFound:
    """What a finished job has shown; ``known`` is what its processes showed from outside."""
    # (launchers and workers also import torch, but do not train)
    trained = [bool(report["rounds"] or report["fired"]["backward"] or report["by_hand"]) for report in ranks.reports]
    trainers = [report for report, did_train in zip(ranks.reports, trained, strict=True) if report["rank"] or did_train]
    fired, collectives = Counter[str](), Counter[str]()
    for report in trainers:
        fired.update(report["fired"])
        collectives.update(report.get("collectives", {}))
    stages = _shares_of(ranks)
    info = ranks.infos[0] if ranks.infos else None
    failed = {name: why for report in trainers for name, why in report["failed"].items()}
    steps = sum(map(len, ranks.steps))
    facts = replace(with_reports(known, ranks.reports), steps=steps, rings=len(ranks.infos), failed=failed, over=True)
    found = JobFound(
        seams=tuple(SeamFound(name, fired[name], stages.get(name)) for name in NAMES),
        stages=stages,
        sync=tuple(name for name in info.schema.sync if name != EXCHANGE or stages.get(name)) if info else (),
        cohorts=Counter(info.cohort for info in ranks.infos),
        writer=info.writer if info else "",
        captures=captures_of(trainers),
        missing=(),
        ranks=len(ranks.infos),
        steps=steps,
        models=tuple(dict.fromkeys(name for report in trainers for name in report["models"])),
        by_hand=facts.by_hand,
        collectives=collectives,
    )
    return replace(found, missing=tuple(_missing_of(found, ranks, facts, sum(trained))))


def _shares_of(ranks: Ranks) -> dict[str, float]:
    if not ranks.infos:
        return {}
    names = ranks.infos[0].schema.stages
    sums = [0] * len(names)
    for info, records in zip(ranks.infos, ranks.steps, strict=True):
        if info.schema.stages == names:
            for record in records:
                sums = [total + ns for total, ns in zip(sums, record.durations_ns, strict=True)]
    return {name: part / max(1, sum(sums)) for name, part in zip(names, sums, strict=True)}


def captures_of(trainers: Sequence[Mapping[str, Any]]) -> tuple[CaptureWorks, ...]:
    """Which profilers a capture could use, as far as can be checked without one."""
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii"))
    except (OSError, ValueError):
        scope = 0
    why_no_spy = "the kernel forbids attaching to processes (ptrace_scope)" if os.geteuid() and scope else ""
    if shutil.which("py-spy", path=search_path()) is None:
        why_no_spy = "not installed: pip install py-spy"
    why_not = {
        "torch": ""
        if trainers and all(trainer["kineto"] for trainer in trainers)
        else "no trainer has a torch with Kineto",
        "stacks": "" if trainers else "no trainer was found",
        "nsys": "" if shutil.which("nsys") else "nsys is not on PATH",
        "py-spy": why_no_spy,
    }
    return tuple(CaptureWorks(profiler, not why, why) for profiler, why in why_not.items())


_MUCH = 0.2
"""The share of the steps outside all stages that is worth reporting."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that was not detected, and the lines of code that would report it."""

    what: str
    lines: tuple[str, ...]


def _missing_of(found: JobFound, ranks: Ranks, facts: Facts, training: int) -> Iterator[Missing]:
    """What is missing from a job of ``training`` processes; what hides everything else comes first."""
    nothing = why_nothing(facts)
    if nothing is not None:
        ended = nothing.code in ("failed", "stopped")
        gap = nothing.words if ended else f"{nothing.words}: no step is recorded"
        yield Missing(gap, _LINES.get(nothing.code, ()))
        return
    if facts.status:
        after = f"{counted(min(map(len, ranks.steps)), 'recorded step')} per rank"
        gap = f"the job exited with status {facts.status} after {after}"
        yield Missing(f"{gap}: see its output above", ())
    if training > 1 and ranks.infos and all(info.world_size == 1 for info in ranks.infos):
        # They do not know each other: each records as rank 0 of 1.
        gap = f"{training} processes train, each as rank 0 of 1"
        yield Missing(f"{gap}: RANK, WORLD_SIZE and torch.distributed give no others", _RANKS)
    yield from _in_monitor(found, ranks) if found.by_hand else _under_seams(found, ranks, facts.failed)


def _under_seams(found: JobFound, ranks: Ranks, failed: Mapping[str, str]) -> Iterator[Missing]:
    for name, why in failed.items():
        yield Missing(f"the seam {name} was switched off: {why}", ())
    fired = {seam.name for seam in found.seams if seam.fired}
    undetected = [name for name in STAGES[:3] if name not in fired and name not in failed]
    for name in undetected:
        yield Missing(_UNDETECTED[name], ("import sftriage", *_around("sftriage", name)))
    if not undetected:
        yield from _elsewhere(found, ("import sftriage", *_around("sftriage", "NAME")))
    schema = ranks.infos[0].schema
    if ranks.infos[0].world_size > 1 and not any(found.stages.get(name) for name in schema.sync):
        gap = "neither DDP nor FSDP is used, and no step waited in a collective of torch.distributed"
        yield Missing(f"no stage waits for the other ranks: {gap}", _EXCHANGE)
    if "forward" in schema.sync:
        yield Missing("no time of the last gradient: FSDP accumulates it after the exchange", ())


def _in_monitor(found: JobFound, ranks: Ranks) -> Iterator[Missing]:
    records = [record for steps in ranks.steps for record in steps]
    # (a rank's last step may be incomplete because the job was ended)
    if incomplete := sum(not record.complete for steps in ranks.steps for record in steps[:-1]):
        gap = f"{incomplete} of {counted(len(records), 'step')} ended by an exception, or never"
        yield Missing(f"{gap}: make one turn of the loop one step", ("with monitor.step():", "    ...  # one turn"))
    if ranks.misuse:
        gap = f"{counted(ranks.misuse, 'invalid call')} of the recorder"
        yield Missing(f"{gap}: see its warnings above (one of each kind)", ())
    schema = ranks.infos[0].schema
    for name in schema.stages[:-1]:
        if not found.stages.get(name):
            yield Missing(f"the stage {name} was declared but never entered", _around("monitor", name))
    yield from _elsewhere(found, _around("monitor", "NAME"))
    if ranks.infos[0].world_size > 1 and not schema.sync:
        yield Missing("no stage is declared to wait for the other ranks (sync)", _SYNC)
    elif schema.sync and all(record.ready_ns is None for record in records):
        gap = f"no time of the last gradient, which separates {schema.sync[0]} from waiting in it"
        yield Missing(f"{gap} (under FSDP there is none)", ("monitor.watch(model)  # once, before the first step",))


def _elsewhere(found: JobFound, lines: tuple[str, ...]) -> Iterator[Missing]:
    share = found.stages.get("other", 0.0)
    if share >= _MUCH:
        gap = f"{share:.0%} of the steps is outside all stages (other)"
        yield Missing(f"{gap}: name the stages between those detected", lines)


_UNDETECTED = {
    "data": "no batch came from a torch DataLoader in the training thread: its time counts as other",
    "forward": "no call of the trained model was detected (`model(...)`, not `model.forward(...)`): its time counts "
    "as other",
    "backward": "no call of backward() was detected (`torch.autograd.grad` is not one): its time counts as other",
}
_INNER = {
    "data": "batch = next(batches)",
    "forward": "loss = loss_of(model(batch))",
    "backward": "loss.backward()",
    "optimizer": "optimizer.step()",
}


def _around(target: str, stage: str) -> tuple[str, ...]:
    return (f'with {target}.stage("{stage}"):', f"    {_INNER.get(stage, '...')}")


_MONITOR = (
    "import sftriage",
    "monitor = sftriage.Monitor()  # once, after init_process_group",
    "while training:",
    "    with monitor.step():",
    *(f"        {line}" for stage in STAGES for line in _around("monitor", stage)),
)
_RANKS = (
    "import sftriage",
    "monitor = sftriage.Monitor(rank=RANK, world_size=WORLD_SIZE)  # as the launcher numbers the processes",
)
_SYNC = ('monitor = sftriage.Monitor(sync=("backward",))  # the stage in which gradients are exchanged',)
_EXCHANGE = (
    "import sftriage",
    'with sftriage.stage("exchange", sync=True):',
    "    ...  # where ranks wait for each other, as to average gradients",
)
_LINES = {
    **dict.fromkeys(("no_optimizer", "no_step", "-I", "-E", "-S", "PYTHONPATH"), _MONITOR),
    **dict.fromkeys(("monitor_unused", "monitor_elsewhere"), _MONITOR[2:]),
}
"""Lines for the script that help, by reason why nothing is recorded."""
