"""Builds what a release uploads: `make wheels`.

The wheels are `cp310-abi3` for x86_64 and aarch64, built with Zig's C compiler for glibc 2.17, and a pure one for all
other machines and for free-threaded Pythons, which have no stable ABI. All are built from the unpacked source
distribution, so that it holds what a build needs. Everything is built twice, in two places, and must be equal byte by
byte.
"""

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLIBC = (2, 17)
MACHINES = ("x86_64", "aarch64")


def main() -> int:
    """Build twice, compare, and copy the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory of the results (emptied first)")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as once, tempfile.TemporaryDirectory() as again:
        built, repeated = build_all(Path(once)), build_all(Path(again))
        different = [path.name for path in built if not filecmp.cmp(path, repeated[0].parent / path.name, False)]
        if different or len(built) != len(repeated):
            sys.stderr.write(f"wheels: two builds differ: {', '.join(different)}\n")
            return 1
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        for path in built:
            shutil.copy(path, out)
            sys.stdout.write(f"{out.name}/{path.name}  {path.stat().st_size:,} bytes, built twice, equal\n")
    return 0


def build_all(folder: Path) -> list[Path]:
    """Build the source distribution and all wheels in a folder; return them, sorted."""
    made = folder / "made"
    # (hatchling takes times from this variable, and otherwise a constant)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SFTRIAGE_")}
    _build(ROOT, made, "sdist", clean)
    (source,) = made.glob("*.tar.gz")
    for machine in (*MACHINES, None):
        # (a place of its own, so that no build finds what another has left)
        unpacked = folder / str(machine)
        with tarfile.open(source) as archive:
            archive.extractall(unpacked, filter="data")
        _build(unpacked / source.name.removesuffix(".tar.gz"), made, "wheel", {**clean, **_variables(machine, folder)})
    return sorted(made.iterdir())


def _variables(machine: str | None, folder: Path) -> dict[str, str]:
    if machine is None:
        return {"SFTRIAGE_COMPILE": "0"}
    major, minor = GLIBC
    return {
        "SFTRIAGE_COMPILE": "1",
        "SFTRIAGE_PLATFORM": f"manylinux_{major}_{minor}_{machine}",
        "CC": f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{major}.{minor}",
        # Each build compiles for itself: a shared cache would hide a difference.
        "ZIG_GLOBAL_CACHE_DIR": str(folder / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(folder / "zig"),
    }


def _build(source: Path, to: Path, kind: str, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(to), str(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"wheels: {kind} failed\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
