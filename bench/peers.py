"""Tools that name slow ranks, as their users run them: installed, attached to a job, and read as it runs.

A tool runs the job of `jobs/compared.py` in a terminal of its own, and its output is read with the time at which it
appeared. Peers come from the package index in pinned versions, each into a virtual environment of its own, and share
this interpreter's torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import sys
import sysconfig
import termios
import time
import urllib.parse
import urllib.request
import venv
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.crew import RowFailedError
from bench.jobs.compared import Plan
from bench.processes import Use
from bench.runner import HERE, environment_of, say
from sftriage.model.events import WindowJudged
from sftriage.model.verdicts import NAMING
from sftriage.runs.directory import RunDirectory
from sftriage.runs.journal import read_journal
from tests.integration.processes import descendants, ended, free_port, wait_until

SCRIPT = HERE / "jobs" / "compared.py"
LIMIT_S, SAMPLE_S, POLL_S = 600.0, 0.5, 2.0
ROWS, COLUMNS = 60, 240
"""Of the terminal: wide enough that no sentence is broken."""
_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_])")
_LOADER = ("waiting on the loader", "Prefetch queue starved", "Dataloader stall")


@dataclass(frozen=True, slots=True)
class Name:
    """A rank that a tool named, and the stage if it named one, by a step of the job (its last one: at the end)."""

    rank: int
    stage: str | None
    step: int
    time_s: float | None = None  # since the epoch; None of a rule, which waits for nothing but its window


@dataclass
class Ran:
    """A job that a tool watched: when its steps ended, what the tool named, and what it took beside the trainers."""

    ended_s: Sequence[float]
    names: list[Name] = field(default_factory=list)
    cpu_s: float = 0.0
    peak_bytes: int = 0
    written_bytes: int = 0


class Tool:
    """A tool beside one job, in a folder of its own. Without a tool in it: the bare job.

    Attributes:
        requirements: what `pip` installs for it; empty if this interpreter has it.
    """

    requirements: tuple[str, ...] = ()

    def __init__(self, plan: Plan, ranks: int, folder: Path, python: Path) -> None:
        self.plan, self.ranks, self.folder, self.python = plan, ranks, folder, python
        self.found: list[tuple[float, int, str | None]] = []  # time, rank, stage

    def job(self) -> list[object]:
        return [self.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", self.ranks, SCRIPT]

    def command(self) -> list[object]:
        return self.job()

    def server(self) -> list[object]:
        """A process that it needs beside the job; empty for none."""
        return []

    def ready(self) -> bool:
        """Whether that process answers."""
        return True

    def environment(self) -> dict[str, str]:
        return {}

    def line(self, time_s: float, text: str) -> None:
        """Read a line of the terminal."""

    def poll(self) -> None:
        """Read its live view, while the job runs."""

    def finish(self) -> None:
        """Read what it left."""


class Sftriage(Tool):
    """`sftriage run` with the default policy; the first suspect of each verdict that names one."""

    def command(self) -> list[object]:
        return [sys.executable, "-m", "sftriage", "run", "--out", self.folder / "run", "--", *self.job()]

    def finish(self) -> None:
        for event in read_journal(RunDirectory(self.folder / "run").decisions):
            if isinstance(event, WindowJudged) and event.verdict.label in NAMING:
                suspect = event.verdict.suspects[0]
                ranks = suspect.ranks if suspect.is_single else ()
                self.found += [(event.decision.time_s, rank, suspect.stage) for rank in ranks]


class TraceML(Tool):
    """`traceml run --mode=cli`, its live view in the terminal, then all findings of its `final_summary.json`.

    https://traceopt-ai.github.io/traceml/user_guide/distributed-training/. Its live view averages the last 100 steps,
    and its summary the whole run.
    """

    requirements = ("traceml-ai==0.5.0",)
    _STAGES: Mapping[str, str] = {"input wait": "data", "forward compute": "forward"}
    _KINDS: Mapping[str, str] = {"INPUT_STRAGGLER": "data", "COMPUTE_STRAGGLER": "forward"}
    _NEXT = re.compile(r"Next: Inspect (.+?),? (?:collectives.* )?(?:on|around) r(\d+)\.")
    _issue = ""

    def command(self) -> list[object]:
        traceml = self.python.with_name("traceml")
        ports = "--aggregator-port", free_port(), "--master-port", free_port()
        place = "--logs-dir", self.folder / "logs", "--run-name", "compared"
        return [traceml, "run", SCRIPT, "--nproc-per-node", self.ranks, "--mode", "cli", *place, *ports]

    def line(self, time_s: float, text: str) -> None:
        if found := re.search(r"Issue: ([A-Z -]+?) *(│|$)", text):
            self._issue = found[1]
        elif self._issue.endswith("STRAGGLER") and (found := self._NEXT.search(text)):
            self.found.append((time_s, int(found[2]), self._STAGES.get(found[1])))

    def finish(self) -> None:
        summary = json.loads((self.folder / "logs" / "compared" / "final_summary.json").read_text())
        for issue in summary["step_time"]["issues"]:
            if issue["kind"].endswith("STRAGGLER"):
                self.found += [(time.time(), rank, self._KINDS.get(issue["kind"])) for rank in issue["ranks"]]


class Gpuprof(Tool):
    """`gpuprof serve`, to which every rank pushes, and the insights that its page shows: of the group and of each rank.

    https://github.com/peppe-tringali/gpuprof#distributed-training--first-class. An insight about the loader names a
    rank if at most half of the ranks have it; no other insight of a rank is about a stage.
    """

    requirements = ("gpuprof[server,host]==0.7.1",)
    _SKEW = re.compile(r"(?:Rank skew|Bucket \d+): rank (\d+)")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._port, self._due_s = free_port(), 0.0

    def server(self) -> list[object]:
        place = "--port", self._port, "--db", self.folder / "server.db"
        return [self.python.with_name("gpuprof"), "serve", *place]

    def ready(self) -> bool:
        try:
            return isinstance(self._get("/api/groups"), list)
        except OSError:
            return False

    def environment(self) -> dict[str, str]:
        return {"GPUPROF_SERVER": f"http://127.0.0.1:{self._port}"}

    def poll(self) -> None:
        if time.monotonic() >= self._due_s:
            with contextlib.suppress(OSError):
                self.finish()
            self._due_s = time.monotonic() + POLL_S

    def finish(self) -> None:
        for group in self._get("/api/groups"):
            of_group = self._insights(f"/api/groups/{urllib.parse.quote(group['group_id'])}/insights")
            of_rank = {run["rank"]: self._insights(f"/api/runs/{run['id']}/insights") for run in group["runs"]}
            self.found += [(time.time(), *name) for name in self.named(of_group, of_rank)]

    @classmethod
    def named(cls, of_group: Sequence[str], of_rank: Mapping[int, Sequence[str]]) -> Iterator[tuple[int, str | None]]:
        """The ranks and stages that the titles of insights name."""
        for title in of_group:
            if found := cls._SKEW.match(title):
                yield int(found[1]), "backward" if title.startswith("Bucket") else None
        starved = [rank for rank, titles in of_rank.items() if any(part in one for one in titles for part in _LOADER)]
        if 2 * len(starved) <= len(of_rank):
            yield from ((rank, "data") for rank in starved)

    def _insights(self, path: str) -> list[str]:
        return [one["title"] for one in self._get(path)["insights"]]

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10) as answer:
            return json.load(answer)


TOOLS: dict[str, type[Tool]] = {"bare": Tool, "sftriage": Sftriage, "traceml-ai": TraceML, "gpuprof": Gpuprof}

RESILIENCY = ("nvidia-resiliency-ext==0.4.1", "nvidia-cuda-cupti-cu12")
_DETECT = "from nvidia_resiliency_ext.straggler import Detector; Detector.initialize()"


def refusal(python: Path) -> str:
    """Why nvidia-resiliency-ext's detector does not start here, in its own words; "" if it does.

    https://nvidia.github.io/nvidia-resiliency-ext/straggler_det/usage_guide.html. It needs CUPTI for any section, and
    its report waits for the CUDA device.
    """
    library = Path(sysconfig.get_path("purelib", vars={"base": str(python.parents[1])})) / "nvidia/cuda_cupti/lib"
    environment = environment_of(LD_LIBRARY_PATH=str(library), PYTHONWARNINGS="ignore")
    done = subprocess.run([python, "-c", _DETECT], env=environment, capture_output=True, text=True, check=False)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def installed(requirements: Sequence[str], cache: Path) -> Path:
    """The interpreter that has these packages, and else what this one has; made once.

    Raises:
        subprocess.CalledProcessError: `pip` failed.
    """
    if not requirements:
        return Path(sys.executable)
    name = re.sub(r"[^\w.=-]", "_", requirements[0])
    place = cache / f"{name}-py{sys.version_info.major}.{sys.version_info.minor}"
    python, done = place / "bin" / "python", place / "installed"
    if not done.exists():
        say(f"installing {' '.join(requirements)} into {place}")
        venv.create(place, with_pip=True, clear=True)
        own = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
        (own / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True, stdout=sys.stderr)
        done.touch()
    return python


def watch(name: str, plan: Plan, ranks: int, folder: Path, python: Path) -> Ran:
    """Run a job with a tool beside it, in an empty folder. The launcher and the trainers are no part of the tool.

    Raises:
        RowFailedError: the job failed, or took too long; with the end of its output.
    """
    out = folder / "out"
    out.mkdir(parents=True)
    plan_text = json.dumps(asdict(plan) | {"tool": name, "out": str(out)})
    tool = TOOLS[name](plan, ranks, folder, python)
    environment = environment_of(COMPARED_PLAN=plan_text, HOME=str(folder), TERM="xterm", **tool.environment())
    terminal, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    options: dict[str, Any] = {"cwd": folder, "env": environment, "stdin": inner, "stdout": inner, "stderr": inner}
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, terminal)
        running = []
        with contextlib.closing(os.fdopen(inner)):
            for command in filter(None, (tool.server(), tool.command())):
                running.append(subprocess.Popen(list(map(str, command)), **options))
                stack.enter_context(ended(running[-1]))
                wait_until(tool.ready)
        taken, lines = _followed(tool, terminal, running)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[-1].wait(1.0)
        status = running[-1].poll()
        if status != 0 or not all((out / f"{rank}.json").exists() for rank in range(ranks)):
            output = [line for line in lines if line.strip(" │")][-15:]
            raise RowFailedError("\n".join([f"{shlex.join(map(str, tool.command()))}: status {status}", *output]))
        tool.finish()
    trainers = {int(path.read_text()) for path in out.glob("*.pid")}
    beside = [use for pid, use in taken.items() if pid not in trainers]
    ended_s = json.loads((out / "0.json").read_text())
    return Ran(
        ended_s,
        [Name(rank, stage, bisect_right(ended_s, time_s), time_s) for time_s, rank, stage in tool.found],
        sum(use.cpu_s for use in beside),
        sum(use.peak_bytes for use in beside),
        sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and out not in path.parents),
    )


def _followed(tool: Tool, terminal: int, running: Sequence[subprocess.Popen[Any]]) -> tuple[dict[int, Use], list[str]]:
    """Read the terminal until the job has ended: what each process took, and the lines."""
    taken: dict[int, Use] = {}
    lines: list[str] = []
    rest, deadline_s, sample_s = "", time.monotonic() + LIMIT_S, 0.0
    while time.monotonic() < deadline_s:
        over = running[-1].poll() is not None
        if select.select([terminal], [], [], 0.0 if over else SAMPLE_S)[0]:
            try:
                rest += os.read(terminal, 1 << 16).decode(errors="replace")
            except OSError:  # nothing holds the terminal any more
                break
            *whole, rest = rest.split("\n")
            for line in whole:
                lines.append(_ESCAPE.sub("", line).strip("\r"))
                tool.line(time.time(), lines[-1])
        elif over:
            break
        if time.monotonic() >= sample_s:
            tool.poll()
            for pid in (pid for process in running for pid in (process.pid, *descendants(process.pid))):
                with contextlib.suppress(OSError, KeyError, IndexError):
                    if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:3] != [b"-m", b"torch.distributed.run"]:
                        taken[pid] = Use.of(pid)
            sample_s = time.monotonic() + SAMPLE_S
    return taken, lines
