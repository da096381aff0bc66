"""Records a run directory as the installed version writes it: `python -m tests.releases.record`, before a release.

The job is real: four ranks train, rank 2 becomes slow in data, and torch.profiler captures it. The run directory goes
into ``VERSION.tar.xz``, and the answers of that version's own commands into ``VERSION.json``. Later versions are held
to them (tests/unit/test_releases.py). A recording of a released version stays as it is.
"""

import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sftriage import __version__
from sftriage.policy.in_force import find

HERE = Path(__file__).parent
MAX_BYTES = 300_000
FIELDS = {
    "decisions": ("first_step", "last_step", "label", "outcome", "reason", "rule"),
    "traces list": (
        *("capture_id", "job", "rank", "stage", "first_step", "last_step", "profiler", "rule"),
        *("reproduced", "sha256", "onset_step", "state"),
    ),
}
"""Commands whose answers last, and their fields that do. Sentences may change."""


def answers(json_of: Callable[..., Any], run: Path) -> dict[str, Any]:
    """What a version answers about a run."""
    listed = {
        command: [
            {field: row[field] for field in fields} for row in json_of(*command.split(), "--json", "--run", str(run))
        ]
        for command, fields in FIELDS.items()
    }
    causes = [row["cause"] for row in json_of("traces", "list", "--json", "--run", str(run))]
    return {**listed, "causes": [{"code": cause["code"], "source": cause["place"]["source"]} for cause in causes]}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        policy, run = Path(folder) / "policy.yaml", Path(folder) / "run"
        text = find("default").read_text().replace(" steps: 5", " steps: 2")
        policy.write_text(text.replace("profiler: auto", "profiler: torch"))
        _printed("demo", "--steps", "160", "--fault", "data:2:200", "--out", str(run), "--policy", str(policy))
        recorded = answers(lambda *words: json.loads(_printed(*words)), run)
        path = HERE / f"{__version__}.tar.xz"
        with tarfile.open(path, "w:xz", preset=9) as archive:
            archive.add(run, "run", filter=_owned_by_root)
    if path.stat().st_size > MAX_BYTES or len(recorded["causes"]) != 1:
        sys.exit(f"{path}: {path.stat().st_size} bytes, {len(recorded['causes'])} captures: record it again")
    (HERE / f"{__version__}.json").write_text(json.dumps(recorded, indent=1) + "\n")


def _printed(*words: str) -> str:
    return subprocess.run([sys.executable, "-m", "sftriage", *words], check=True, capture_output=True, text=True).stdout


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


if __name__ == "__main__":
    main()
