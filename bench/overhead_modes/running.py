"""Starts each tool's job as the tool's documentation says, and reads what it found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sftriage.runs.directory import RunDirectory

JOB = Path(__file__).with_name("job.py")
ROOT = Path(__file__).parents[2]
LIMIT_S = 480.0
LAST_WORDS = 3

# Nothing starts by itself, and nothing that is asked for has to wait.
POLICY = """\
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata:
  name: overhead
spec:
  rules:
    - name: never
      match:
        label: suspect
        scope: [rank]
        gain: ">= 100%"
  limits:
    captures_per_run: 1000
    captures_per_hour: 1000
    overhead_budget: 100%
"""


class NotRunError(Exception):
    """A tool could not be measured; the message says why."""


def command(tool: str, place: Path, peers: str) -> list[str]:
    """How a job is started under a tool.

    Raises:
        NotRunError: there is no such program.
    """
    if tool == "sftriage":
        policy = place / "policy.yaml"
        policy.write_text(POLICY)
        run = [sys.executable, "-m", "sftriage", "run", "--policy", str(policy), "--out", str(place / "run")]
        return [*run, "--", sys.executable, str(JOB)]
    if tool == "traceml-ai":
        program = Path(peers).parent / "traceml"
        if not program.exists():
            raise NotRunError(f"no traceml beside {peers}: install traceml-ai there, or name a Python that has it")
        return [str(program), "run", str(JOB), "--logs-dir", str(place / "logs"), "--run-name", "overhead"]
    return [peers if tool == "gpuprof" else sys.executable, str(JOB)]


def measured(tool: str, peers: str, plan: Mapping[str, object]) -> dict[str, Any]:
    """What a job under a tool found.

    Raises:
        NotRunError: it could not be run, or did not end well.
    """
    with tempfile.TemporaryDirectory(prefix="overhead-") as directory:
        place = Path(directory)
        out = place / "found.json"
        whole = {
            **plan,
            "tool": tool,
            "root_pid": os.getpid(),
            "out": str(out),
            "asks": str(RunDirectory(place / "run").asks),
        }
        environment = {
            **os.environ,
            "OVERHEAD_PLAN": json.dumps(whole),
            "PYTHONPATH": str(ROOT),
            "KINETO_LOG_LEVEL": "6",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": directory,
        }
        said = place / "said"
        with said.open("wb") as log:
            process = subprocess.Popen(
                command(tool, place, peers), cwd=place, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                status = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                raise NotRunError(f"no end after {LIMIT_S:.0f} s") from None
            finally:
                _end(process)
        if status or not out.exists():
            lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()]
            raise NotRunError(f"exit status {status}: {' | '.join(lines[-LAST_WORDS:])}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it, if it has not ended: it may be frozen, see `modes`."""
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
