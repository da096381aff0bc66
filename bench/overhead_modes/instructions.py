"""Instructions that a recorded step adds, counted by valgrind: as many however busy the machine is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FEW, MANY = 1000, 5000
_COUNTED = re.compile(r"I\s+refs:\s+([\d,]+)")
_LOOP = """
import sys
from bench.overhead_modes.monitored import steps
steps(sys.argv[1], int(sys.argv[2]), sys.argv[3])
"""


def counted(report: str) -> int:
    """The count in what cachegrind says.

    Raises:
        ValueError: there is none.
    """
    found = _COUNTED.search(report)
    if found is None:
        raise ValueError(f"valgrind counted nothing: {report.strip()[-200:]}")
    return int(found.group(1).replace(",", ""))


def _count(mode: str, steps: int) -> int:
    with tempfile.TemporaryDirectory(prefix="overhead-") as rings:
        command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
        done = subprocess.run(
            [*command, sys.executable, "-c", _LOOP, mode, str(steps), rings],
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return counted(done.stderr)


def measure() -> dict[str, object]:
    """Instructions a step with four stages adds to an empty loop, or why they are not known."""
    if shutil.which("valgrind") is None:
        return {"not_run": "there is no valgrind"}
    wanted = [(mode, steps) for mode in ("on", "none") for steps in (FEW, MANY)]
    try:
        with ThreadPoolExecutor(2) as pool:
            counts = dict(zip(wanted, pool.map(lambda one: _count(*one), wanted), strict=True))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"not_run": str(error)[-300:]}
    a_step = {mode: (counts[mode, MANY] - counts[mode, FEW]) / (MANY - FEW) for mode in ("on", "none")}
    return {"on": a_step["on"], "none": a_step["none"], "added": a_step["on"] - a_step["none"]}
