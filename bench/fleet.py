"""What the controller of a large job takes, and how soon it judges: real server, real controller, made-up agents.

The job is measured at ``--sizes`` sizes, each twice as large as the one before, up to ``--ranks``. At each, a NATS
server as `--hub` starts it and `sftriage controller` are processes of their own; the agents are connections of a few
processes that speak the format of real ones (`jobs/fleet_agents.py`). From the second window on, one rank is slow in
`data`; it alone has to be named, and its capture and those of its peers to be requested (agents report them as failed).

Processor time and rows are counted from the first verdict to the end. A step's lag is from its end to the moment at
which the first verdict on it is in the journal: up to a stride of it is waiting for the window. The controller has the
open files that most systems give a process (``--open-files``).
"""

from __future__ import annotations

import argparse
import json
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.estimates import quantile
from bench.fleet_job import SCHEMA, SLOW_STAGE, Shape
from bench.processes import Follower, Line, Use
from bench.runner import HERE, environment_of, say
from sftriage.base.process import die_with_parent, end
from sftriage.model.events import CaptureChanged, WindowJudged
from sftriage.runtime.hub_server import HubServer, make_secret

WARMUP_STEPS, CONTROLS = 5, 3
START_S, END_S = 120.0, 60.0
POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {{name: fleet}}
spec:
  detection: {{window_steps: {window}, stride_steps: {stride}, warmup_steps: {warmup}}}
  rules:
    - name: slow-rank
      match: {{scope: [rank], gain: ">= 5%"}}
      capture: {{profiler: torch, steps: 3, warmup_steps: 0, max_seconds: 60, control_ranks: {controls}}}
  limits: {{captures_per_run: {captures}, captures_per_hour: 100, concurrent_ranks: 8}}
"""


QUICK = {"ranks": 64, "sizes": 1, "seconds": 20.0, "steps_per_second": 10.0, "processes": 2}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=8192)
    parser.add_argument("--ranks-per-agent", type=int, default=8)
    parser.add_argument("--steps-per-second", type=float, default=1.0)
    parser.add_argument("--sizes", type=int, default=4, help="how many sizes, each half of the next one")
    parser.add_argument("--seconds", type=float, default=130.0, help="for how long the job goes on at each")
    parser.add_argument("--window", type=int, default=50, help="steps in a window")
    parser.add_argument("--stride", type=int, default=10, help="steps from one window to the next")
    parser.add_argument("--processes", type=int, default=4, help="that the agents are spread over")
    parser.add_argument("--open-files", type=int, default=1024, help="that the controller may have")


def shape_of(options: argparse.Namespace, ranks: int) -> Shape:
    slow_from = WARMUP_STEPS + options.window + options.stride
    return Shape(ranks, options.ranks_per_agent, options.steps_per_second, ranks // 3, slow_from)


class Fleet:
    def __init__(self, options: argparse.Namespace, shape: Shape, directory: Path) -> None:
        self.options, self.directory = options, directory
        self.run = directory / "run"
        self._held = ExitStack()
        with ExitStack() as held:
            secret = directory / "secret"
            make_secret(secret)
            with socket.create_server(("127.0.0.1", 0)) as free:
                address = free.getsockname()
            self.server = HubServer(address, directory / "nats", secret)
            held.callback(self.server.close)
            url = f"nats://{address[0]}:{address[1]}"
            policy = directory / "policy.yaml"
            numbers = {"window": options.window, "stride": options.stride, "warmup": WARMUP_STEPS}
            policy.write_text(POLICY.format(**numbers, controls=CONTROLS, captures=CONTROLS + 1), encoding="utf-8")
            command = [sys.executable, "-m", "sftriage", "controller", "--job-id", "job", "--nats", url]
            command += ["--creds", secret, "--out", self.run, "--policy", policy]
            self.said = directory / "controller.log"
            with self.said.open("wb") as said:
                self.controller = subprocess.Popen(
                    [str(one) for one in command],
                    env=self._environment(),
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                    preexec_fn=partial(_limited, options.open_files),
                )
            held.callback(end, self.controller, END_S)
            self.agents: list[subprocess.Popen[str]] = []
            each = -(-shape.agents // options.processes)
            about = {"shape": asdict(shape), "job_id": "job", "url": url, "credentials": str(secret)}
            about |= {"agents": each, "seconds": options.seconds}
            for first in range(0, shape.agents, each):
                script = str(HERE / "jobs" / "fleet_agents.py")
                process = subprocess.Popen(
                    [sys.executable, script, json.dumps({**about, "first": first})],
                    env=self._environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                    text=True,
                )
                held.callback(end, process, END_S)
                self.agents.append(process)
            self._held = held.pop_all()

    def close(self) -> None:
        self._held.close()

    def ready(self) -> None:
        deadline_s = time.monotonic() + START_S
        while not self.run.is_dir():
            if self.controller.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(self.said.read_text())
            time.sleep(0.1)
        for process in self.agents:
            assert self._line(process, deadline_s) == "ready\n"

    def begin(self) -> float:
        begin_s = time.time() + 2.0
        self._tell(f"{begin_s}\n")
        return begin_s

    def seen(self) -> list[dict[str, Any]]:
        deadline_s = time.monotonic() + self.options.seconds + START_S
        return [json.loads(self._line(process, deadline_s)) for process in self.agents]

    def end(self) -> int:
        self._tell("\n")
        try:
            return self.controller.wait(END_S + START_S)
        except subprocess.TimeoutExpired:
            self.controller.send_signal(signal.SIGTERM)
            return self.controller.wait(END_S)

    def _tell(self, line: str) -> None:
        for process in self.agents:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()

    def _line(self, process: subprocess.Popen[str], deadline_s: float) -> str:
        assert process.stdout is not None
        there, _, _ = select.select([process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
        if not there or process.poll() is not None:
            raise RuntimeError("the agents hang, or have ended")
        return process.stdout.readline()

    def _environment(self) -> dict[str, str]:
        own = {f"XDG_{what}_HOME": str(self.directory / what.lower()) for what in ("STATE", "CACHE")}
        return environment_of(**own)


def _limited(open_files: int) -> None:
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


class Meter:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.first: tuple[float, Use, Use, float] | None = None
        self.last: tuple[float, Use, Use, float] | None = None

    def note(self, line: Line) -> None:
        if self.first is None and self.last is None and isinstance(line.event, WindowJudged):
            self.first = self._now()

    def stop(self) -> None:
        self.last = self._now()

    def _now(self) -> tuple[float, Use, Use, float]:
        agents_s = sum(Use.of(one.pid).cpu_s for one in self._fleet.agents)
        return time.time(), Use.of(self._fleet.controller.pid), Use.of(self._fleet.server.pid), agents_s


def measure(options: argparse.Namespace) -> dict[str, Any]:
    least = 4 * options.ranks_per_agent
    if options.ranks < least or options.sizes < 1:
        raise SystemExit("at least four agents, and one size")
    # (each agent has a connection)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sizes = []
    for ranks in (options.ranks >> n for n in reversed(range(options.sizes))):
        if ranks >= least:
            sizes.append(at_size(options, shape_of(options, ranks)))
            say(json.dumps(sizes[-1]))
    largest = sizes[-1]
    cores, lag_s = largest.get("controller_cores"), largest["step_to_verdict_p99_s"]
    met = cores is not None and lag_s is not None and cores <= 1.0 and lag_s <= largest["target_lag_s"]
    return {
        "steps_per_second": options.steps_per_second,
        "window_steps": options.window,
        "stride_steps": options.stride,
        "sizes": sizes,
        "target": f"one core, p99 lag under {largest['target_lag_s']:g} s: {'met' if met else 'missed'}",
    }


def at_size(options: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="sftriage-fleet-") as folder:
        fleet = Fleet(options, shape, Path(folder))
        meter = Meter(fleet)
        try:
            fleet.ready()
            begin_s = fleet.begin()
            journal = Follower(fleet.run / "decisions.jsonl", meter.note)
            time.sleep(max(0.0, begin_s + options.seconds - time.time()))
            meter.stop()
            seen = fleet.seen()
            code = fleet.end()
            time.sleep(1.0)
            journal.close()
            said = fleet.said.read_text("utf-8", "replace")
        finally:
            fleet.close()
    found = report(options, shape, journal.lines, seen, meter)
    return found | {"controller_ended_with": code, "said": said[-2000:]}


def report(
    options: argparse.Namespace,
    shape: Shape,
    lines: list[Line],
    seen: list[dict[str, Any]],
    meter: Meter,
) -> dict[str, Any]:
    assert meter.last is not None
    judged = [(line, line.event) for line in lines if isinstance(line.event, WindowJudged)]
    windows = [(line, event) for line, event in judged if event.verdict.label != "stalled"]
    ends_s = next(one["ends_s"] for one in seen if one["ends_s"])
    asked_s = {one.capture_id: line.at_s for line, event in judged for one in event.decision.requests}
    seen_s = {capture_id: at_s for one in seen for capture_id, at_s in one["captures"].items()}
    ended = [line.event.result.state for line in lines if isinstance(line.event, CaptureChanged)]
    named = {(event.verdict.suspects[0].rank, event.verdict.suspects[0].stage)
             for _, event in windows if event.verdict.label == "suspect"}  # fmt: skip
    lags_s, last_lags_s = lags(windows, ends_s)
    requests_s = [seen_s[one] - at_s for one, at_s in asked_s.items() if one in seen_s]
    late_s = [late for one in seen for late in one["late_s"]]
    found: dict[str, Any] = {"ranks": shape.ranks, "agents": shape.agents, "seconds": options.seconds}
    found |= {"windows": len(windows), "steps": len(ends_s), "messages": sum(one["messages"] for one in seen)}
    found["message_bytes"] = round(sum(one["bytes"] for one in seen) / max(1, found["messages"]))
    if meter.first is not None and windows:
        wall_s = meter.last[0] - meter.first[0]
        steps = sum(meter.first[0] < end_s <= meter.last[0] for end_s in ends_s)
        found["rows_per_second"] = round(steps * shape.ranks / wall_s, 1)
        for name, at in (("controller", 1), ("server", 2)):
            cpu_s = meter.last[at].cpu_s - meter.first[at].cpu_s
            found |= {f"{name}_cores": round(cpu_s / wall_s, 4), f"{name}_peak_mib": meter.last[at].peak_bytes >> 20}
        found["agents_cores"] = round((meter.last[3] - meter.first[3]) / wall_s, 4)
        found["controller_open_files"] = meter.last[1].open_files
    for name, values_s in (
        ("step_to_verdict", lags_s),
        ("last_step_to_verdict", last_lags_s),
        ("verdict_to_request", requests_s),
        ("agents_late", late_s),
    ):
        for fraction, short in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
            value = quantile(values_s, fraction)
            found[f"{name}_{short}_s"] = None if value is None else round(value, 3)
    found |= {
        "target_lag_s": options.stride / options.steps_per_second + 2.0,
        "coverage_min": min((event.verdict.numbers.get("coverage", 0.0) for _, event in windows), default=None),
        "planted": [shape.slow_rank, SCHEMA.stages[SLOW_STAGE]],
        "named": sorted(map(list, named), key=str),
        "requests": len(asked_s),
        "captures": {state: ended.count(state) for state in sorted(set(ended))},
    }
    return found


def lags(windows: list[tuple[Line, WindowJudged]], ends_s: list[float]) -> tuple[list[float], list[float]]:
    """From each step's end to the first verdict on it, and from that of each window's last step to its verdict.

    The steps of the first window, which had to fill, are left out.
    """
    every_s, last_s, done = [], [], None
    for line, event in windows:
        last = event.verdict.last_step
        if done is not None and last < len(ends_s):
            every_s += [line.at_s - ends_s[step] for step in range(done + 1, last + 1)]
            last_s.append(line.at_s - ends_s[last])
        done = last
    return every_s, last_s
