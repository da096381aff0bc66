"""Runs the measurements of this package.

    python -m bench [NAME [--json] [--quick] [OPTIONS]]

Without a name it lists them. A bench is a module of this package with

``measure(options)``    what it found, as a JSON object; None if it only wrote files.
``show(found)``         the same as lines of text (optional: by default a line for each name).
``arguments(parser)``   adds its own options (optional).
``QUICK``               other defaults under ``--quick``, to try it out (optional).

The runner parses options, adds the machine to what was found, and prints it. The functions below are for the benches.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bench.estimates import plain

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).parent
TMPFS = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
JOBS = ROOT / "tests" / "integration" / "jobs"
"""Training scripts that tests and benches share."""

Taken = TypeVar("Taken")


def say(words: str) -> None:
    """Report progress, beside the figures."""
    print(words, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """The machine and its load at this moment."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def interleaved(
    acts: Mapping[str, Callable[[], Taken]], rounds: int, order: random.Random | None = None
) -> dict[str, list[Taken]]:
    """Run each act once a round, in random order if given, so that a slow machine slows all of them."""
    taken: dict[str, list[Taken]] = {name: [] for name in acts}
    for _ in range(rounds):
        for name in order.sample(sorted(acts), len(acts)) if order else acts:
            taken[name].append(acts[name]())
    return taken


def run(*command: object, timeout_s: float | None = None, **environment: str) -> str:
    """Run a Python script or module of this repository to its end, and return its output.

    Raises:
        SystemExit: it failed; with the end of what it wrote.
        subprocess.TimeoutExpired: it took too long.
    """
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment_of(**environment),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))[:200]} exited {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def ranks(n_ranks: int, script: Path, spec: Mapping[str, Any]) -> Any:
    """Run a script as the ranks of a job over Gloo, and decode the JSON that its first rank prints."""
    return json.loads(run(JOBS / "launch.py", n_ranks, script, json.dumps(spec)))


class Used(NamedTuple):
    """What a process took from start to end."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def used(*command: str, environment: Mapping[str, str] | None = None) -> Used:
    """Run Python with these arguments to its end, and measure it.

    Raises:
        SystemExit: it failed.
    """
    began_s = time.perf_counter()
    null = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    pid = os.posix_spawn(sys.executable, [sys.executable, *command], environment or os.environ, file_actions=null)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"{command[:4]} exited {os.waitstatus_to_exitcode(status)}")
    wall_s = time.perf_counter() - began_s
    return Used(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6)


def environment_of(**more: str) -> dict[str, str]:
    """The environment of a process that imports from this repository, on one thread and the loopback interface."""
    path = os.pathsep.join([str(ROOT), str(JOBS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path, **more}


def add_recordings(parser: argparse.ArgumentParser) -> None:
    """Add ``--keep`` and ``--from``, for a bench that first records and then judges."""
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the recordings in a new directory")
    parser.add_argument("--from", dest="from_", type=Path, metavar="DIR", help="judge kept recordings, record nothing")


def recordings(options: argparse.Namespace, scratch: str, kept: Callable[[Path], Sequence[Path]]) -> Path:
    """The directory of the recordings, by these options.

    Raises:
        SystemExit: it is not empty, or holds no recordings.
    """
    if options.from_ is not None:
        if not kept(options.from_):
            raise SystemExit(f"{options.from_} holds no recordings")
        return options.from_  # type: ignore[no-any-return]
    directory = options.keep or Path(scratch)
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise SystemExit(f"{directory} is not empty")
    return directory  # type: ignore[no-any-return]


def listed(found: Mapping[str, Any]) -> Iterable[str]:
    """A line for each name."""
    width = max(map(len, found))
    for name, value in found.items():
        yield f"{name:{width}}  {value:.3f}" if isinstance(value, float) else f"{name:{width}}  {value}"


def names() -> dict[str, str]:
    """The first line of each bench, by its name."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(part, ast.FunctionDef) and part.name == "measure" for part in module.body):
            found[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one bench, or list them."""
    given, found = list(sys.argv[1:] if arguments is None else arguments), names()
    if not given or given[0] not in found:
        width = max(map(len, found))
        print("\n".join(f"{name:{width}}  {line}" for name, line in found.items()))
        if given and given[0] not in ("-h", "--help"):
            raise SystemExit(f"there is no bench {given[0]!r}")
        return
    sys.exit(_run(given[0], given[1:]))


def _run(name: str, given: list[str]) -> int:
    bench = importlib.import_module(f"bench.{name}")
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"python -m bench {name}", description=bench.__doc__, formatter_class=formatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="little of it, to try it out")
    if hasattr(bench, "arguments"):
        bench.arguments(parser)
    if "--quick" in given:
        parser.set_defaults(**getattr(bench, "QUICK", {}))
    options, before = parser.parse_args(given), machine()
    found: dict[str, Any] | None = bench.measure(options)
    if found is not None:
        found = {"machine": {**before, "load_after": machine()["load"]}, **found}
        lines: Iterable[str] = [json.dumps(plain(found))] if options.json else getattr(bench, "show", listed)(found)
        print("\n".join(lines))
    return 0
