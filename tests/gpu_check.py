"""What a GPU host shows of sftriage: every test that wants a GPU, and what device time costs there.

    make gpu-check        or        python tests/gpu_check.py [--report FILE]

The report is printed, and kept in a file that can be pasted into an issue. The exit status is 0 where all passed, and 2
where something is missing without which nothing can be shown.
"""

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCH_STEPS = 3000
LIMIT_S = 3600.0
"""For each part of the report: a driver that hangs is to be in it, and not to keep it from being written."""

MARK = "needs.gpu"
"""What a file has in which tests want a GPU: others are not even imported, for they want more than such a host has."""

NEEDED = ("torch", "sftriage", "numpy", "pytest", "hypothesis")


def missing() -> str:
    """What is not there without which nothing can be shown, and what puts it there; "" where all is."""
    absent = [name for name in NEEDED if find_spec(name) is None]
    if absent:
        how = "pip install -e '.[all]' --group dev, beside the torch that uses your GPU"
        return f"{sys.executable} has no {', '.join(absent)}: {how} (or PYTHON=... names another)"
    import torch

    if torch.cuda.is_available():
        return ""
    built = torch.version.cuda or getattr(torch.version, "hip", None)
    if built is None:
        return f"torch {torch.__version__} is built for CPUs alone: install one for CUDA or ROCm"
    driver = "nvidia-smi is there" if shutil.which("nvidia-smi") else "no nvidia-smi, so perhaps no driver"
    return f"torch {torch.__version__}, built for {built}, sees no GPU ({driver}; CUDA_VISIBLE_DEVICES may hide them)"


def machine() -> list[str]:
    """What it ran on."""
    import torch

    from sftriage.trainer import moments

    lines = [
        f"- Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} CPUs",
        f"- the recorder writes in {moments.FORM.name}" + (moments.WHY_NOT_C and f": {moments.WHY_NOT_C}"),
    ]
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {getattr(torch.version, 'hip', None)}"
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        lines.append(f"- GPU {index}: {about.name}, {about.total_memory / 2**30:.0f} GiB, {built}")
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    for name, command in (("driver", asked), ("nsys", ["nsys", "--version"])):
        found = subprocess.run(command, capture_output=True, text=True) if shutil.which(command[0]) else None
        said = found.stdout.strip().splitlines()[:1] if found is not None else []
        lines.append(f"- {name}: {said[0] if said else 'not found'}")
    if find_spec("pynvml") is None:
        lines.append("- NVML: not found (pip install nvidia-ml-py): what the driver says of a GPU is not shown")
    return lines


def ran(*command: str) -> tuple[int, str]:
    """The exit status of a Python program, and what it said, which is shown as it says it."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = []
    limit = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    try:
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            said.append(line)
        return process.wait(), "".join(said)
    finally:
        limit.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", type=Path, default=ROOT / "gpu-check.md", metavar="FILE", help="(gpu-check.md)")
    given = parser.parse_args()
    if lacking := missing():
        sys.stderr.write(f"gpu-check: {lacking}\n")
        sys.exit(2)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    report = ["# sftriage on a GPU", "", f"- commit {commit.strip() or 'unknown'}", *machine()]
    failed = False
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text("utf-8")]
    for title, command in (
        ("Tests", ("-m", "pytest", "-m", "gpu", "-v", "--durations=0", *files)),
        ("Cost of a boundary", ("-m", "bench", "device_cost", "--steps", str(BENCH_STEPS))),
        ("Cost of a boundary, for programs", ("-m", "bench", "device_cost", "--steps", str(BENCH_STEPS), "--json")),
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
