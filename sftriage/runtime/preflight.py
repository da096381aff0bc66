"""``sftriage run --check``: what would stop or degrade a job, on each of its hosts, before it starts.

`compared` and `by_check` are pure. `check_host` examines this host, and `check_job` lets all hosts meet at the hub.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from sftriage import __version__
from sftriage.base.files import write_atomically
from sftriage.base.process import cgroups, content_of, run_bounded
from sftriage.errors import CaptureError, SftriageError, UsageError
from sftriage.fleet.host_checks import HostReports, report_in
from sftriage.fleet.hub import AGENTS_FILE, CONTROLLER_FILE, Hub, Subjects, agent_file, token
from sftriage.model.checks import CheckResult, HostReport, State
from sftriage.policy.in_force import PolicySet
from sftriage.runs.directory import DEFAULT_ROOT
from sftriage.runtime.doctor import py_spy_check, recording_checks, torch_check, torch_version
from sftriage.runtime.hosting import file_name, free, host_name, node_number
from sftriage.runtime.hub_server import HubOptions, HubServer, slurm_hosts
from sftriage.runtime.nsys_launch import find_nsys
from sftriage.traces.disk import check_room
from sftriage.words.verdicts import counted

CLOCK_S = 1.0
"""Clocks may differ by this much: the times in logs and manifests of several hosts are then still in order."""
LAST_S = 5.0
"""How much longer than the first host, which waits for missing ones, the others wait for its answer."""
TORCH_S = 60.0
SPARE_FILES, AGENT_FILES = 64, 11
"""Files that a process may have open beside those counted; and those of the agent for each rank (measured)."""
RUN_THREADS, RANK_THREADS = 16, 5
"""Threads of `sftriage run` and torchrun, and of a rank with one thread for operators (measured, without CUDA)."""
MAX_NAMED = 8
_WORST: tuple[State, ...] = ("wrong", "missing", "limited", "ok")
_ORDER = (
    *("hosts", "name", "port", "credentials", "hub", "versions", "clock", "python", "recorder", "rings", "locks"),
    *("disk", "files", "threads", "torch", "nsys", "py-spy", "metrics"),
)
_PROBE = "import torch; print('kineto' if torch.autograd.kineto_available() else 'none')"


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What a run is about to start: ``ranks`` on this host, and the job's hosts (None: unknown).

    ``nsys``: ranks start under Nsight Systems. Of its policies, ``by_nsys``: a rule captures with it; ``samples``: such
    a rule samples the CPU; ``trace_bytes``: the largest trace.
    """

    n_hosts: int | None = 1
    ranks: int = 1
    nsys: bool = False
    by_nsys: bool = False
    samples: bool = False
    trace_bytes: int = 0

    @property
    def world_size(self) -> int:
        return self.ranks * (self.n_hosts or 1)


@dataclass(frozen=True, slots=True)
class FoundCheck:
    """The result of a check on a host."""

    host: str
    what: str
    state: State
    detail: str
    do: str = ""


_NUMBERED = re.compile(r"--(nnodes|nproc[-_]per[-_]node|num[-_]machines|num[-_]processes)(?:=(.+))?")


def plan_of(
    command: Sequence[str], environment: Mapping[str, str], policies: PolicySet, *, nsys: bool, here: bool
) -> JobPlan:
    """The plan of a launcher's command; a job that is only ``here`` has one host."""
    words = {}
    for word, after in pairwise((*command, "")):
        if found := _NUMBERED.fullmatch(word):
            words[found[1].replace("_", "-")] = found[2] or after
    hosts = words.get("nnodes") or words.get("num-machines") or environment.get("PET_NNODES")
    hosts = hosts or environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or ""
    # (torchrun takes MIN:MAX)
    least = hosts.partition(":")[0]
    n_hosts = 1 if here else int(least) if least.isdecimal() else None
    ranks = words.get("nproc-per-node") or environment.get("PET_NPROC_PER_NODE") or ""
    if not ranks and words.get("num-processes", "").isdecimal():
        ranks = str(-(-int(words["num-processes"]) // (n_hosts or 1)))
    captures = [rule.capture for rule in policies.rules if rule.capture is not None]
    with_nsys = [capture for capture in captures if capture.profiler == "nsys"]
    return JobPlan(
        n_hosts=n_hosts,
        ranks=max(1, int(ranks)) if ranks.isdecimal() else _devices() if ranks in ("gpu", "auto", "cpu") else 1,
        nsys=nsys,
        by_nsys=bool(with_nsys),
        samples=any(capture.nsys.sample == "cpu" for capture in with_nsys),
        trace_bytes=max((capture.max_trace_bytes for capture in captures), default=0),
    )


def _devices() -> int:
    """How many ranks torchrun starts on a host if it is to count its devices."""
    with contextlib.suppress(OSError):
        return max(1, len(list(Path("/proc/driver/nvidia/gpus").iterdir())))
    return os.cpu_count() or 1


def compared(reports: Sequence[HostReport], expected: int | None, missing: Sequence[str] = ()) -> list[FoundCheck]:
    """All checks of the hosts that came, the first one leading; ``missing`` names others, where they are known."""
    found = [
        FoundCheck(report.host, check.what, check.state, check.detail, check.do)
        for report in reports
        for check in (*report.checks, *_unlike(report, reports[0]))
    ]
    return [_attendance(reports, expected, missing), *found]


def _attendance(reports: Sequence[HostReport], expected: int | None, missing: Sequence[str]) -> FoundCheck:
    first, came = reports[0].host, counted(len(reports), "host")
    numbers = [report.number for report in reports if report.number is not None]
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        same = ", ".join(report.host for report in reports if report.number == twice[0])
        return FoundCheck(
            first, "hosts", "wrong", f"{same} all have the number {twice[0]}", "give each host its own NODE_RANK"
        )
    if expected is None:
        return FoundCheck(first, "hosts", "ok", f"{came} came; the command does not say how many there are")
    if len(reports) >= expected:
        return FoundCheck(first, "hosts", "ok", f"{came} came")
    absent = missing or [f"number {number}" for number in range(expected) if number not in numbers]
    if not missing and len(numbers) < len(reports):
        absent = []
    named = f"; missing: {_some(absent)}" if absent else ""
    return FoundCheck(
        first,
        "hosts",
        "missing",
        f"{len(reports)} of {expected} hosts came{named}",
        "check the output of those hosts: is the same command up there, with the same --job-id and --hub?",
    )


def _unlike(report: HostReport, first: HostReport) -> Iterator[CheckResult]:
    """How a host differs from the first one."""
    differing = [
        f"{program} {version}, where {first.host} has {first.versions[program]}"
        for program, version in report.versions.items()
        if program in first.versions and version != first.versions[program]
    ]
    if differing:
        yield CheckResult("versions", "wrong", "; ".join(differing), "install the same release on all hosts")
    elif report.versions:
        yield CheckResult("versions", "ok", ", ".join(f"{name} {version}" for name, version in report.versions.items()))
    if report is first:
        return
    if abs(report.ahead_s) - report.margin_s > CLOCK_S:
        way = "ahead of" if report.ahead_s > 0 else "behind"
        yield CheckResult(
            "clock",
            "limited",
            f"{abs(report.ahead_s):,.1f} s {way} the clock of {first.host}",
            "set it by NTP (chronyc makestep)",
        )
    else:
        yield CheckResult("clock", "ok", f"within {max(abs(report.ahead_s) + report.margin_s, 1e-3):.3f} s")


def by_check(found: Sequence[FoundCheck]) -> list[tuple[str, State, str, str]]:
    """A row for each check: its name, its worst state, what was found on which hosts, and what to do."""
    rows = []
    known = [*_ORDER, *(check.what for check in found if check.what not in _ORDER)]
    hosts = {check.host for check in found}
    for what in dict.fromkeys(known):
        checks = [check for check in found if check.what == what]
        if not checks:
            continue
        state = min((check.state for check in checks), key=_WORST.index)
        bad = [check for check in checks if check.state != "ok"] or checks[:1]
        details: dict[str, list[str]] = {}
        for check in bad:
            details.setdefault(check.detail, []).append(check.host)
        named = state != "ok" and len(hosts) > 1 and what != "hosts"
        lines = [f"{_some(names)}: {detail}" if named else detail for detail, names in details.items()]
        if state == "ok" and len(checks) > 1:
            lines[0] += f" (and alike on {counted(len(checks) - 1, 'other host')})"
        rows.append((what, state, "\n".join(lines), "; ".join(dict.fromkeys(check.do for check in bad if check.do))))
    return rows


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def is_ready(found: Sequence[FoundCheck]) -> bool:
    """Whether nothing would stop or degrade the run."""
    return all(check.state == "ok" for check in found)


def check_host(plan: JobPlan, directories: Sequence[Path]) -> Iterator[CheckResult]:
    """Examine this host for a run whose files go into these directories; leaves nothing behind."""
    yield from recording_checks(ranks=plan.ranks)
    yield disk_check(directories, plan.trace_bytes)
    yield files_check(plan, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield threads_check(plan.ranks, threads_left())
    yield _kineto_check()
    yield _nsys_check(plan)
    yield py_spy_check()


def disk_check(directories: Sequence[Path], trace_bytes: int) -> CheckResult:
    """Whether the first existing parents of these directories take files, and have room for a trace."""
    free = []
    for directory in directories:
        there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
        try:
            with tempfile.TemporaryDirectory(prefix="sftriage-check-", dir=there) as place:
                write_atomically(Path(place) / "trial", b"\0" * 4096)
            check_room(there)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            return CheckResult(
                "disk",
                "wrong",
                f"cannot write {there}: {error.strerror}",
                "free space there, or give --out" if full else "start it in another directory, or give --out",
            )
        free.append((shutil.disk_usage(there).free, there))
    free_bytes, there = min(free)
    room = f"{there}, {free_bytes >> 20:,} MiB free"
    if free_bytes < trace_bytes:
        return CheckResult("disk", "limited", f"{room}; a trace may take {trace_bytes >> 20:,} MiB", "free space there")
    return CheckResult("disk", "ok", room)


def files_check(plan: JobPlan, limit: int) -> CheckResult:
    """Whether the limit of open files is enough for the agent, and for a rank that is connected to all others."""
    needed = SPARE_FILES + max(AGENT_FILES * plan.ranks, plan.world_size)
    if limit != resource.RLIM_INFINITY and limit < needed:
        return CheckResult(
            "files",
            "wrong",
            f"a process may open {limit:,} files; {counted(plan.ranks, 'rank')} here need {needed:,}",
            f"ulimit -n {max(65536, needed)} before it starts",
        )
    unlimited = limit == resource.RLIM_INFINITY
    return CheckResult("files", "ok", "unlimited" if unlimited else f"a process may open {limit:,}")


def threads_check(ranks: int, left: int | None) -> CheckResult:
    """Whether ``left`` threads (None: no limit) are enough."""
    needed = RUN_THREADS + RANK_THREADS * ranks
    if left is not None and left < needed:
        return CheckResult(
            "threads",
            "wrong",
            f"{counted(max(0, left), 'thread')} may start; {counted(ranks, 'rank')} here need at least {needed}",
            "raise ulimit -u, or the limit of pids of the container",
        )
    return CheckResult("threads", "ok", "unlimited" if left is None else f"{left:,} may start")


def threads_left() -> int | None:
    """How many threads this user may still start here, by its own limit and those of its cgroups; None: no limit."""
    left = []
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit != resource.RLIM_INFINITY and os.geteuid():
        left.append(limit - _threads_of(os.getuid()))
    for folder in cgroups(Path("/proc/self"), controller="pids", files=("pids.max",)):
        for each in (folder, *folder.parents):
            most, now = (content_of(each / f"pids.{name}").strip() for name in ("max", "current"))
            if most.isdigit() and now.isdigit():
                left.append(int(most) - int(now))
    return min(left, default=None)


def _threads_of(user: int) -> int:
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == user:
                total += len(list((process / "task").iterdir()))
    return total


def _kineto_check() -> CheckResult:
    there = torch_check()
    if there.state != "ok":
        return replace(there, do="run the check with the Python that trains")
    try:
        found = run_bounded([sys.executable, "-c", _PROBE], TORCH_S)
    except CaptureError as error:
        return CheckResult("torch", "wrong", f"{there.detail} does not import: {error}", "reinstall torch")
    if found.status:
        return CheckResult("torch", "wrong", f"{there.detail} does not import: {found.problem()}", "reinstall torch")
    if not found.output.split() or found.output.split()[-1] != "kineto":
        return CheckResult(
            "torch",
            "limited",
            f"{there.detail} has no Kineto: no captures by torch.profiler",
            "install a torch built with USE_KINETO, or capture stacks alone",
        )
    return CheckResult("torch", "ok", f"{there.detail}, with Kineto")


def _nsys_check(plan: JobPlan) -> CheckResult:
    if not plan.nsys:
        if plan.by_nsys:
            return CheckResult(
                "nsys", "limited", "a policy captures by nsys, but the ranks do not start under it", "add --nsys"
            )
        return CheckResult("nsys", "ok", "not used without --nsys")
    try:
        program = find_nsys()
    except UsageError as error:
        return CheckResult("nsys", "missing", str(error), "install it on this host, or leave out --nsys")
    level = content_of(Path("/proc/sys/kernel/perf_event_paranoid")).strip().decode("ascii", "replace")
    if plan.samples and os.geteuid() and level.isdecimal() and int(level) > 2:
        return CheckResult(
            "nsys",
            "limited",
            f"the kernel forbids nsys to sample the CPU (perf_event_paranoid is {level})",
            "sysctl kernel.perf_event_paranoid=2, or `sample: none` in the policy",
        )
    return CheckResult("nsys", "ok", str(program))


@dataclass(frozen=True, slots=True)
class Checked:
    """What this host prints, and whether the whole job is ready. On the first host, ``found`` is of all hosts."""

    found: list[FoundCheck]
    ready: bool
    is_first: bool = True


def check_here(plan: JobPlan, out: Path | None, more: Callable[[], Iterator[CheckResult]]) -> Checked:
    """Check a job on this host alone; ``more`` checks what only its controller needs."""
    checks = (*check_host(plan, [out or Path(DEFAULT_ROOT)]), *more())
    name = socket.gethostname()
    found = compared([HostReport(name, name, None, checks, _versions())], 1)[1:]
    return Checked(found, is_ready(found))


def _versions() -> dict[str, str]:
    torch = torch_version()
    return {"sftriage": __version__, **({} if torch is None else {"torch": torch})}


class HostCheck:
    """This host's part of the check of a job on several hosts, which meet at the hub within ``patience_s``.

    ``more`` checks what only the controller needs. The first host starts the hub for that time, unless one runs
    already; nothing of it remains.
    """

    def __init__(
        self,
        options: HubOptions,
        plan: JobPlan,
        out: Path | None,
        patience_s: float,
        more: Callable[[], Iterator[CheckResult]],
    ) -> None:
        self._options, self._plan, self._more = options, plan, more
        self._end_s = time.monotonic() + patience_s
        self._root = Path(DEFAULT_ROOT)
        self._out = (out or free(self._root / file_name(options.job_id))).absolute()
        self._name, self._places = host_name(os.environ), Subjects.of(options.job_id)
        self._checks: list[CheckResult] = []
        self._server: HubServer | None = None

    def run(self, show: Callable[[Checked], None]) -> bool:
        """Examine this host, meet the others, and ``show`` the results; return whether the job is ready.

        The first host shows its results before the others end: SLURM may kill it once one of them has failed.
        """
        with contextlib.ExitStack() as held:
            if not self._root.exists():
                held.callback(_remove_empty, self._root)
            resolved = self._resolves()
            is_first = resolved and self._options.leads
            if is_first:
                return self._lead(held, show)
            self._checks += check_host(self._plan, [self._root])
            hub = self._connected(held, is_first=False) if resolved else None
            report = self._report()
            status = None if hub is None else report_in(hub, self._places, report, self._left_until_s() + LAST_S)
            if hub is not None and status is None:
                silent = CheckResult(
                    "hub",
                    "wrong",
                    "the first host did not answer",
                    "check its output: is the same command up there, with the same --job-id?",
                )
                report = replace(report, checks=(*report.checks, silent))
            found = compared([report], None)[1:]
            checked = Checked(found, status == 0 and is_ready(found), is_first=False)
        show(checked)
        return checked.ready

    def _lead(self, held: contextlib.ExitStack, show: Callable[[Checked], None]) -> bool:
        hub = self._connected(held, is_first=True) if self._start_hub(held) else None
        # (the others may report while this host examines itself)
        others = None if hub is None else HostReports(hub, self._places)
        self._checks += check_host(self._plan, [self._root, self._out.parent])
        self._checks += self._more()
        checked = self._meet(others, self._report())
        show(checked)
        if others is not None:
            others.dismiss(0 if checked.ready else 1)
        return checked.ready

    def _report(self) -> HostReport:
        return HostReport(self._name, socket.gethostname(), node_number(os.environ), tuple(self._checks), _versions())

    def _left_until_s(self) -> float:
        """The end of the patience, or a moment from now: the host's own checks may have taken all of it."""
        return max(self._end_s, time.monotonic() + LAST_S)

    def _resolves(self) -> bool:
        try:
            self._options.check()
        except UsageError as error:
            wrong = CheckResult(
                "name",
                "wrong",
                str(error),
                "give the name or address of the job's first host" if self._options.hub else "is that server up?",
            )
            self._checks.append(wrong)
            return False
        self._checks.append(CheckResult("name", "ok", ", ".join(name for _, name, _ in self._options.hosts)))
        return True

    def _start_hub(self, held: contextlib.ExitStack) -> bool:
        """Start the hub of ``--hub``; return whether it is up."""
        options = self._options
        if options.hub is None:
            return True
        host, port = options.server
        made = options.credentials
        if made is not None and not made.exists():
            held.callback(made.unlink, missing_ok=True)
        try:
            self._server = options.start(self._out)
        except SftriageError as error:
            user = listener_on(port)
            wrong = CheckResult(
                "port" if user else "hub",
                "wrong",
                f"{error}; {user} listens there" if user else str(error),
                "end that process, or choose another port on all hosts" if user else "",
            )
            self._checks.append(wrong)
            return False
        held.callback(options.forget, self._server)
        self._checks.append(CheckResult("port", "ok", f"the hub starts on {host}:{port}"))
        return True

    def _connected(self, held: contextlib.ExitStack, *, is_first: bool) -> Hub | None:
        """A connection to the hub with this host's credentials; None, with a check that says why, if there is none."""
        agent, options, hub = token(self._name), self._options, None
        own = (CONTROLLER_FILE,) if is_first else (agent_file(agent), AGENTS_FILE)
        inbox = self._places.lead if is_first else self._places.inbox(agent)
        try:
            options.wait_for_secret(self._left_until_s() - time.monotonic())
            hub = Hub(options.address.of(*own), f"sftriage check {agent}", inbox)
            held.callback(hub.close)
            hub.call(hub.connect(), self._left_until_s() - time.monotonic())
        except SftriageError as error:
            refused = hub is not None and hub.refused
            what = "credentials" if refused or hub is None else "hub"
            wrong = CheckResult(
                what,
                "wrong",
                str(error),
                f"compare {options.address.credentials} with the file on the first host" if refused else "",
            )
            self._checks.append(wrong)
            return None
        self._checks.append(CheckResult("credentials", "ok", f"the hub at {options.address.url} takes them"))
        return hub

    def _meet(self, others: HostReports | None, first: HostReport) -> Checked:
        expected, reports = self._plan.n_hosts, [first]
        if others is not None:
            others.wait(lambda: expected is not None and len(others.reports) >= expected - 1, self._left_until_s())
            came = others.reports.values()
            reports += sorted(came, key=lambda report: (report.number is None, report.number or 0, report.host))
        names = {report.name.partition(".")[0] for report in reports}
        missing = [name for name in slurm_hosts() if name.partition(".")[0] not in names]
        found = compared(reports, expected, missing)
        refused = self._server.refused() if self._server is not None and len(reports) != expected else []
        if refused:
            differ = FoundCheck(
                self._name,
                "credentials",
                "wrong",
                f"the hub refused those of {_some(refused)}",
                "copy the same file to all hosts, and give it with --creds",
            )
            found.append(differ)
        return Checked(found, is_ready(found))


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def listener_on(port: int) -> str:
    """The process that listens on a TCP port of this host; "" if it is unknown."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        for line in content_of(Path("/proc/net") / table).decode("ascii", "replace").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(link.readlink()) in sockets for link in (process / "fd").iterdir()):
                name = content_of(process / "comm").decode("utf-8", "replace").strip()
                return f"process {process.name} ({name})"
    return ""
