"""Installs the wheels of dist/ into fresh environments and uses them: `make wheels-check`.

For each CPython from 3.10 to 3.14 that is found here, and each of its wheels: install it, run a job of two ranks under
`sftriage run`, and see that the slow rank, its stage and its line are named. The wheel for aarch64 is installed beside
an arm64 Python, and records under emulation, if qemu-aarch64-static and mmdebstrap are here.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "release/job.py"
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.13t", "3.14t")
MOST_PACKAGES = 15
"""Packages that `pip install sftriage` brings besides its own."""
QEMU = "qemu-aarch64-static"
DEADLINE_S = 600


def main() -> int:
    """Check every wheel on every Python; the exit status is 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="directory of the wheels")
    parser.add_argument("--python", action="append", help="an interpreter to use, instead of all that are found")
    options = parser.parse_args()
    wheels = sorted(options.dist.resolve().glob("*.whl"))
    if not wheels:
        parser.error(f"{options.dist} has no wheels: make wheels")
    pythons = {path: path for path in options.python or ()} or found_pythons()
    for version in VERSIONS if not options.python else ():
        if version not in pythons:
            say(f"Python {version}: not here, not tried")
    failed = False
    checks = [(f"Python {name}", on_python, path) for name, path in pythons.items()]
    for name, check, path in [*checks, ("aarch64", on_aarch64, None)]:
        try:
            say(*(f"{name}: {line}" for line in check(wheels, path)))
        except (OSError, subprocess.SubprocessError, AssertionError) as error:
            failed = True
            say(f"{name}: FAILED: {error}\n{getattr(error, 'stdout', '') or ''}{getattr(error, 'stderr', '') or ''}")
    return int(failed)


def found_pythons() -> dict[str, str]:
    """The interpreter of each version: of the search path, or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = {}
    for version in VERSIONS:
        named = [path for path in (shutil.which(f"python{version}"),) if path]
        listed = [str(path) for path in sorted(pyenv.glob(f"{version.removesuffix('t')}.*/bin/python{version}"))]
        # (a shim of pyenv is there for versions that are not active, and fails)
        works = [path for path in (*listed, *named) if _works(path)]
        if works:
            found[version] = works[0]
    return found


def on_python(wheels: Sequence[Path], python: str | None) -> list[str]:
    """Use the wheel that pip takes, and the pure one."""
    assert python is not None, "each version has an interpreter"
    with tempfile.TemporaryDirectory() as folder:
        place = ["--no-index", "--find-links", str(wheels[0].parent), "--dest", f"{folder}/taken"]
        output([python, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *place, "sftriage"])
        (taken,) = Path(folder, "taken").glob("*.whl")
        free_threaded = output([python, "-c", "import sysconfig; print(sysconfig.get_config_var('Py_GIL_DISABLED'))"])
        is_pure = free_threaded.strip() == "1"
        assert ("-none-any" in taken.name) == is_pure, f"pip takes {taken.name}"
        pure = next(path for path in wheels if "-none-any" in path.name)
        names = dict.fromkeys([taken.name, pure.name])
        return [_used(wheels[0].parent / name, python, Path(folder, name)) for name in names]


def _used(wheel: Path, python: str, folder: Path) -> str:
    output([python, "-m", "venv", str(folder)])
    inside = str(folder / "bin/python")
    output([inside, "-m", "pip", "install", "--quiet", "--only-binary=:all:", str(wheel)])
    listed = json.loads(output([inside, "-m", "pip", "list", "--format=json"]))
    packages = sorted({package["name"] for package in listed} - {"sftriage", "pip", "setuptools"})
    assert len(packages) <= MOST_PACKAGES, f"{len(packages)} packages: {', '.join(packages)}"
    sftriage = [inside, "-m", "sftriage"]
    recorder = _recorder(output([*sftriage, "doctor", "--json"]), wheel)
    run = str(folder / "run")
    output([*sftriage, "run", "--out", run, "--", inside, str(JOB)])
    state = json.loads(output([*sftriage, "watch", "--run", run, "--once", "--json"]).splitlines()[0])
    assert "ank 1 is slow in data" in state["sentence"], state["sentence"]
    captures = json.loads(output([*sftriage, "traces", "list", "--run", run, "--json"]))
    assert len(captures) == 1, f"{len(captures)} captures; {state['done']}"
    capture = captures[0]
    place = capture["cause"]["place"]
    assert Path(place["file"]).name == JOB.name, place
    output([*sftriage, "traces", "get", capture["capture_id"], "--run", run, "--out", str(folder / "trace")])
    return f"{wheel.name}: {len(packages)} packages, recorder {recorder}; found rank 1, data, line {place['line']}"


def on_aarch64(wheels: Sequence[Path], _python: str | None) -> list[str]:
    """Record under emulation, and read what was recorded."""
    missing = [program for program in (QEMU, "mmdebstrap") if shutil.which(program) is None]
    if missing:
        return [f"not tried: no {' and no '.join(missing)}"]
    (wheel,) = (path for path in wheels if path.name.endswith("_aarch64.whl"))
    with tempfile.TemporaryDirectory() as folder:
        root, site, rings = (f"{folder}/{name}" for name in ("root", "site", "rings"))
        made = [
            "mmdebstrap",
            "--quiet",
            "--variant=extract",
            "--architectures=arm64",
            "--include=python3,libstdc++6",
            "bookworm",
        ]
        output([*made, root])
        platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 28)]
        target = [*platforms, "--python-version=3.11", "--only-binary=:all:", "--target", site]
        output([sys.executable, "-m", "pip", "install", "--quiet", *target, str(wheel)])
        emulated = [QEMU, "-L", root, f"{root}/usr/bin/python3.11"]
        environment = {**os.environ, "PYTHONPATH": site, "SFTRIAGE_RINGS": rings}
        machine = output([*emulated, "-c", "import platform; print(platform.machine())"]).strip()
        assert machine == "aarch64", machine
        recorder = _recorder(output([*emulated, "-m", "sftriage", "doctor", "--json"], environment), wheel)
        Path(rings).mkdir()
        output([*emulated, str(JOB)], environment)
        found = output([*emulated, "-m", "sftriage", "analyze", rings], environment)
        assert "Rank 1 is slow in data" in found, found
    return [f"{wheel.name}: emulated on {platform.machine()}, recorder {recorder}; found rank 1, data"]


def _recorder(checks: str, wheel: Path) -> str:
    """What `sftriage doctor` says of the recorder: in C, unless the wheel is the pure one."""
    (check,) = (one for one in json.loads(checks) if one["what"] == "recorder")
    assert (check["state"] == "ok") == ("-none-any" not in wheel.name), check
    return str(check["detail"])


def _works(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def output(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """The standard output of a command that succeeds."""
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
        cwd=tempfile.gettempdir(),
    )
    return done.stdout


def say(*lines: str) -> None:
    """Print lines now, for there may be minutes between them."""
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
