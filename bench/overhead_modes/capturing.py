"""Captures of a job in the middle of its steps, asked for through ``sftriage run`` as a person asks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from bench.overhead_modes.modes import Sftriage
from bench.overhead_modes.training import Training

BEFORE_STEPS, AFTER_STEPS = 50, 20
STORED_S = 60.0
MOST_STEPS = 400
"""How long a capture is waited for."""


def timed(step: Callable[[], None]) -> tuple[int, int]:
    """A step's time by the wall clock, and of the processor by the training thread. Stopping a profiler falls in it."""
    began_ns, began_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
    step()
    return time.perf_counter_ns() - began_ns, time.thread_time_ns() - began_cpu_ns


def capture_rounds(tool: Sftriage, training: Training, captures: int, asks: Path) -> list[dict[str, object]]:
    """Steps before, during and after each capture, as [wall, processor] nanoseconds; those after are undisturbed by us.

    ``during`` goes from asking to the answer: waiting to be heard, warming up, recording, and exporting beside steps.
    """
    from sftriage.capture.mailbox import MailboxClient

    assert tool.monitor.info is not None, "it is active"
    step = tool.step_of(tool.monitor, training)
    box = Path(os.environ["SFTRIAGE_RINGS"]) / tool.monitor.info.file_name("mailbox")
    rounds: list[dict[str, object]] = []
    with MailboxClient(box) as client:
        for number in range(captures):
            before = [timed(step) for _ in range(BEFORE_STEPS)]
            ask(asks, number)
            during: list[tuple[int, int]] = []
            states: list[str] = []
            began = False
            while not began or states[-1] != "idle":
                if len(during) == MOST_STEPS:
                    raise SystemExit(f"capture {number} was not made in {MOST_STEPS} steps")
                during.append(timed(step))
                states.append(client.progress().state)
                began = began or states[-1] != "idle"
            after = [timed(step) for _ in range(AFTER_STEPS)]
            rounds.append({"before": before, "during": during, "states": states, "after": after})
    return rounds


def phases_s(run: Path, captures: int) -> list[dict[str, float]]:
    """What importing, preparing, starting, stopping and exporting took in each capture, in their order."""
    end_s = time.monotonic() + STORED_S
    while (
        len(found := sorted(run.glob("captures/[!.]*/manifest.json"), key=lambda path: path.stat().st_mtime)) < captures
    ):
        if time.monotonic() > end_s:
            raise SystemExit(f"{len(found)} of {captures} captures were stored in {STORED_S:.0f} s")
        time.sleep(0.1)
    return [json.loads(path.read_text())["capture"]["timings_s"] for path in found]


def ask(asks: Path, number: int) -> None:
    from sftriage.decisions import ManualRequest
    from sftriage.records import plain

    wanted = ManualRequest(
        request_id=f"overhead-{number}", ranks=(0,), who="bench/overhead.py", reason="what a capture costs"
    )
    asks.mkdir(mode=0o700, exist_ok=True)
    part = asks / f".overhead-{number}"
    part.write_text(json.dumps(plain(wanted)))
    part.replace(asks / f"{wanted.request_id}.json")
