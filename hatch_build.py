"""Builds the recorder's writer in C into the wheel where there is a compiler; where there is none, it goes without.

One binary an architecture: it is built against the stable ABI of CPython 3.10, and runs on every later one.
"""

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("sftriage/trainer/seams/_seam.c")  # which includes the recorder's own
BUILT = Path("sftriage/trainer/_moments.abi3.so")


class MomentsBuildHook(BuildHookInterface[Any]):
    """``SFTRIAGE_COMPILE=0`` builds the wheel without it; ``SFTRIAGE_COMPILE=1`` fails where it cannot be built.

    ``SFTRIAGE_PLATFORM`` is the platform in the wheel's tag, by default this machine's: that of a cross compiler in
    ``CC`` (release/wheels.py).
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say for which machines the wheel is."""
        wanted = os.environ.get("SFTRIAGE_COMPILE", "")
        if self.target_name != "wheel" or wanted == "0":
            return
        try:
            self._compile()
        except (OSError, subprocess.CalledProcessError) as error:
            why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else ""
            if wanted:
                raise RuntimeError(f"the recorder's writer cannot be built in C: {error}\n{why}".rstrip()) from error
            said = f"{error}\n{why}".rstrip()
            self.app.display_warning(f"the recorder's writer is not built in C, but runs in Python: {said}")
            return
        here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        platform = os.environ.get("SFTRIAGE_PLATFORM", here)
        build_data |= {"pure_python": False, "tag": f"cp310-abi3-{platform}"}
        build_data["artifacts"].append(f"/{BUILT}")

    def _compile(self) -> None:
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        include = sysconfig.get_paths()["include"]
        built = Path(self.root) / BUILT
        partial = built.with_suffix(".partial")
        command = [
            *compiler,
            "-O2",
            "-g0",  # debug information has paths of the build in it
            "-fno-plt",  # where caches are cold, a table less to go through
            "-fPIC",
            "-shared",
            f"-I{include}",
            str(Path(self.root) / SOURCE),
            "-o",
            str(partial),
        ]
        subprocess.run(command, check=True, capture_output=True, text=True)
        # A trainer that has the old one loaded keeps it.
        partial.replace(built)
