"""Installs sftriage for an image, also for one of another architecture than this machine's: what the Dockerfile runs.

Usage: image.py WHEEL EXTRAS TO. Only this machine's programs run. The hash of every package is in release/locked.txt.
"""

import json
import re
import subprocess
import sys
import venv
from hashlib import sha256
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def main(wheel: Path, extras: str, to: Path) -> None:
    """Make a virtual environment with a wheel of sftriage and what it needs with these extras, for its architecture."""
    venv.create(to, symlinks=True)
    python, (site,) = f"{to}/bin/python", to.glob("lib/python3*/site-packages")
    requirements = f"{locked(extras)}\n{wheel} --hash=sha256:{sha256(wheel.read_bytes()).hexdigest()}\n"
    machine = wheel.stem.partition("manylinux_2_17_")[2]
    # (the newest first, as pip prefers them on such a machine)
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in range(36, 4, -1)]
    pip(
        *(f"--python={python}", "install", "--require-hashes", "--no-deps", "--no-compile", *platforms),
        *(f"--target={site}", "--requirement=/dev/stdin"),
        given=requirements,
    )
    for script in (site / "bin").iterdir():
        script.rename(to / "bin" / script.name)
    (site / "bin").rmdir()
    # (a library that auditwheel has laid out would be damaged)
    libraries = [str(path) for path in site.rglob("*.so") if not path.parent.name.endswith(".libs")]
    run("strip", "--strip-unneeded", f"{to}/bin/py-spy", *libraries)
    sbom = f"{to}/sbom.cdx.json"
    run(f"{sys.prefix}/bin/cyclonedx-py", "environment", python, "--output-reproducible", "-o", sbom)


def locked(extras: str) -> str:
    """What release/locked.txt has of all that these extras need, for pip takes no hashes from constraints."""
    resolve = ("install", "--dry-run", "--ignore-installed", "--report=-", f"--constraint={ROOT / 'constraints.txt'}")
    found = json.loads(pip(*resolve, f"{ROOT}[{extras}]"))["install"]
    names = {canonicalize_name(each["metadata"]["name"]) for each in found} - {"sftriage"}
    every = re.split(r"\n(?=\S)", (ROOT / "release/locked.txt").read_text())
    needed = [each for each in every if each.partition("==")[0] in names]
    assert names == {each.partition("==")[0] for each in needed}, f"not in release/locked.txt: one of {names}"
    return "\n".join(needed)


def pip(*arguments: str, given: str = "") -> str:
    return run(sys.executable, "-m", "pip", "--quiet", "--no-cache-dir", *arguments, given=given)


def run(*command: str, given: str = "") -> str:
    """The standard output of a command that succeeds."""
    return subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
