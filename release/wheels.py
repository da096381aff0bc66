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
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLIBC = (2, 17)
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def main() -> int:
    """Build twice, compare, and copy the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory of the results (emptied first)")
    parser.add_argument("--only", choices=MACHINES, help="architecture of the only wheel that is wanted, for an image")
    options = parser.parse_args()
    out, machines = options.out, [MACHINES[options.only]] if options.only else [*MACHINES.values(), None]
    with tempfile.TemporaryDirectory() as once, tempfile.TemporaryDirectory() as again:
        built, repeated = build_all(Path(once), machines), build_all(Path(again), machines)
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


def build_all(folder: Path, machines: Sequence[str | None]) -> list[Path]:
    """Build the source distribution and a wheel for each machine in a folder; return them, sorted."""
    made = folder / "made"
    # (hatchling takes times from this variable, and otherwise a constant)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SFTRIAGE_")}
    _build(ROOT, made, "sdist", clean)
    (source,) = made.glob("*.tar.gz")
    for machine in machines:
        # (a place of its own, so that no build finds what another has left)
        unpacked = folder / str(machine)
        shutil.unpack_archive(source, unpacked)
        _build(unpacked / source.name.removesuffix(".tar.gz"), made, "wheel", {**clean, **_variables(machine, folder)})
    return sorted(made.iterdir())


def _variables(machine: str | None, folder: Path) -> dict[str, str]:
    if machine is None:
        return {"SFTRIAGE_COMPILE": "0"}
    major, minor = GLIBC
    # Debian's pyconfig.h includes that of a directory named after the target, and only this machine's is there.
    (headers := folder / "headers").mkdir(exist_ok=True)
    own = Path(sysconfig.get_config_h_filename()).parents[1] / str(sysconfig.get_config_var("MULTIARCH"))
    (headers / f"{machine}-linux-gnu").symlink_to(own)
    return {
        "SFTRIAGE_COMPILE": "1",
        "SFTRIAGE_PLATFORM": f"manylinux_{major}_{minor}_{machine}",
        "CC": f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{major}.{minor} -I{headers}",
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
