"""What a GPU host shows of sftriage: every test that wants a GPU, and what device time costs there.

    make gpu-check        or        python tests/gpu_check.py [--report FILE]

The report is printed, and kept in a file that can be pasted into an issue. The exit status is 0 where all passed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCH_STEPS = 3000


def machine() -> list[str]:
    """What it ran on."""
    import torch

    lines = [f"- Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} CPUs"]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        lines.append(f"- GPU {index}: {about.name}, {about.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    for name, command in (("driver", asked), ("nsys", ["nsys", "--version"])):
        found = subprocess.run(command, capture_output=True, text=True) if shutil.which(command[0]) else None
        said = found.stdout.strip().splitlines()[:1] if found is not None else []
        lines.append(f"- {name}: {said[0] if said else 'not found'}")
    return lines


def ran(*command: str) -> tuple[int, str]:
    """The exit status of a Python program, and what it said, which is shown as it says it."""
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        sys.stdout.write(line)
        said.append(line)
    return process.wait(), "".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", type=Path, default=ROOT / "gpu-check.md", metavar="FILE", help="(gpu-check.md)")
    given = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("gpu-check: torch sees no GPU here (a build of torch for CPUs alone sees none anywhere)")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    report = ["# sftriage on a GPU", "", f"- commit {commit.strip() or 'unknown'}", *machine()]
    failed = False
    for title, command in (
        ("Tests", ("-m", "pytest", "-m", "gpu", "-v", "--durations=0", "tests/unit", "tests/integration")),
        ("Cost of a boundary", ("tests/bench/device_cost.py", "--steps", str(BENCH_STEPS))),
        ("Cost of a boundary, for programs", ("tests/bench/device_cost.py", "--steps", str(BENCH_STEPS), "--json")),
    ):
        status, said = ran(*command)
        failed |= status != 0
        report += [
            "",
            f"## {title}: {'ok' if status == 0 else f'exit status {status}'}",
            "",
            "```",
            said.rstrip(),
            "```",
        ]
    given.report.write_text("\n".join(report) + "\n", encoding="utf-8")
    sys.stdout.write(f"\nThe report is in {given.report}\n")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
