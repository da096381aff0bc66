"""What becomes of every heavy trace in a directory: reduced to which stages, or refused for which reason.

    python bench/reduce_survey.py [--json] [DIRECTORY]

The directory is looked through for Kineto JSON (plain, gzip, tar) and SQLite exports; by default it is the one in
SFTRIAGE_TEST_DATA, or shared/data beside the repository.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

from sftriage.reduce.naming import Names
from sftriage.runtime.reducing import read_all

ENDINGS = (".json", ".json.gz", ".tar.gz", ".sqlite")
NO_TRACES = ("ms-", "mw-", "result-")


def directory() -> Path:
    """Where real traces lie."""
    named = os.environ.get("SFTRIAGE_TEST_DATA")
    return Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"


def heavy_traces(where: Path) -> list[Path]:
    """The files there that are heavy traces by their names."""
    named = (path for path in sorted(where.rglob("*")) if path.name.endswith(ENDINGS) and path.is_file())
    return [path for path in named if not path.name.startswith(NO_TRACES)]


def survey(where: Path) -> Iterator[dict[str, object]]:
    """One row a trace."""
    for path in heavy_traces(where):
        found = read_all([path], Names(), {})
        for one in found.reductions:
            lasts = one.steps.end_N - one.steps.start_N
            yield {
                "trace": str(one.trace.source).removeprefix(f"{where}/"),
                "rank": one.trace.rank,
                "steps": len(lasts),
                "step_ms": round(float(lasts.mean()) / 1e6, 2),
                "stages_ms": {stage: round(seconds * 1e3, 2) for stage, seconds in one.mean_s.items()},
                "sync": list(one.schema.sync),
                "off_ns": int(abs(one.durations_ns_NS.sum(axis=1) - lasts).max()),
                "refused": None,
            }
        for refusal in found.refused:
            source, reason = (text.removeprefix(f"{where}/") for text in (refusal.source, refusal.reason))
            yield {"trace": source, "refused": reason.removeprefix(f"{source}: ")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object a trace")
    parser.add_argument("directory", nargs="?", type=Path, default=directory())
    options = parser.parse_args()
    for row in survey(options.directory):
        if options.json:
            print(json.dumps(row))
        elif row["refused"]:
            print(f"{row['trace']}\n    refused: {row['refused']}")
        else:
            stages = ", ".join(f"{stage} {ms}" for stage, ms in row["stages_ms"].items())  # type: ignore[attr-defined]
            print(f"{row['trace']}\n    rank {row['rank']}, {row['steps']} steps of {row['step_ms']} ms: {stages}")


if __name__ == "__main__":
    main()
