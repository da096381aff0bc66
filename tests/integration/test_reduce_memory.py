"""What `sftriage reduce` takes of memory, measured on the process: a part of the trace, however short its events."""

import os
import subprocess
import sys
from pathlib import Path

from bench.reduce_speed import write_trace

# Both of more events than are unpacked at once.
MEGABYTES = (110, 190)
MOST_FRACTION = 0.4


def peak_mb(path: Path) -> float:
    """The largest resident size of a process that reduces a trace."""
    process = subprocess.Popen(
        [sys.executable, "-m", "sftriage", "reduce", str(path), "--json"], stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_maxrss * 1024 / 1e6


def test_more_of_a_trace_takes_a_fraction_of_its_size(tmp_path):
    # GIVEN two traces of events as short as they come, one of them 80 MB larger
    peaks = []
    for megabytes in MEGABYTES:
        path = tmp_path / "trace.json"
        write_trace(path, megabytes * 1_000_000, 83)
        # WHEN each is reduced in a process of its own
        peaks.append(peak_mb(path))
        path.unlink()
    # THEN the larger one takes so little more that 2 GB take less than 1 GB
    small, large = peaks
    assert large - small < MOST_FRACTION * (MEGABYTES[1] - MEGABYTES[0]), peaks
