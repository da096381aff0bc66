"""Examines an nsys report that was exported to SQLite, and removes secrets from it.

`sftriage.agent.nsys` runs it as a program (``python -m sftriage.agent.nsys_report FILE``) so that it does not use the
agent's time and memory; it prints one line of JSON. nsys writes into a report the environment of every process that
starts while it collects.
"""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sftriage.base.process import Finished
from sftriage.errors import CaptureError


def complaint_of(found: Finished) -> str:
    """What a failed importer complains of, in its own words."""
    complaint = _COMPLAINT.search(found.output)
    return complaint[1][:200] if complaint else f"exit status {found.status}"


REMOVED = "[removed]"
MAX_STEPS = 10_000

_COMPLAINT = re.compile(r"tag_message\*\] = (.+?)(?:\\n|\n|\"|$)")
_STEP = re.compile(r"ProfilerStep#(\d{1,18})")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_UPPER_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{2,}=")
_NAME = r"[a-z0-9_-]*(?:token|secret|passw(?:or)?d|credential|api[_-]?key|access[_-]?key|private[_-]?key)[a-z0-9_-]*"
# ``name=value``, ``name: value`` and ``--name value``; a number is a count of tokens, not a secret.
_SECRET = re.compile(rf"(?i)({_NAME}\s*[=:]\s*|--?{_NAME}\s+)(?!\[removed\]|[\d.,]+(?:\s|$))\S+")
_BEARER = re.compile(r"(?i)\b(bearer\s+|basic\s+)[a-z0-9._~+/=-]{8,}")
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
_ENVIRONMENT_TABLES = ("META_DATA_CAPTURE", "TARGET_INFO_SYSTEM_ENV")


@dataclass(frozen=True, slots=True)
class ReportContents:
    """The contents of a report: its marked steps, and how many events, GPU kernels and GPUs it has.

    ``environments`` counts the entries of processes' environments that were removed.
    """

    steps: tuple[int, ...]
    events: int
    kernels: int
    gpus: int
    environments: int


def scrubbed(text: str) -> str:
    """A text without environment variables and likely secrets; most texts are unchanged."""
    if is_environment(text):
        return REMOVED
    # (in this order: "Authorization: Bearer X" has a name, and "token: Bearer X" another one)
    for pattern in (_BEARER, _SECRET):
        text = pattern.sub(lambda found: f"{found[1]}{REMOVED}", text)
    return _IN_ADDRESS.sub(REMOVED, text)


def is_environment(text: str) -> bool:
    """Whether a text is a process's environment, or one variable of it, rather than ``key=value`` in a call."""
    if "\0" in text:
        parts = [part for part in text.split("\0") if part]
        return bool(parts) and sum(bool(_VARIABLE.match(part)) for part in parts) * 2 >= len(parts)
    return bool(_UPPER_VARIABLE.match(text))


def examine(path: Path) -> ReportContents:
    """Count the contents of an export, and scrub it in place; raises CaptureError if it cannot."""
    try:
        with sqlite3.connect(f"file:{path}?mode=rw", uri=True) as database:
            # (some of nsys's texts are not valid UTF-8)
            database.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
            # (nsys creates a table only if it has rows)
            names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            tables = {
                name: [row[1] for row in database.execute(f"PRAGMA table_info({_quoted(name)})")] for name in names
            }
            if "StringIds" not in tables:
                raise CaptureError("the export has no strings: it is not from nsys")
            contents = _contents(database, tables)
            environments = _scrub(database, tables)
        # Deleted texts remain in the file until it is rewritten.
        database.execute("VACUUM")
        database.close()
    except sqlite3.Error as error:
        raise CaptureError(f"the report's export cannot be read: {error}") from error
    return ReportContents(**contents, environments=environments)


def check(contents: ReportContents, promised: Sequence[int], traces: Sequence[str], complaint: str = "") -> None:
    """Raise CaptureError if a report lacks a requested trace, or steps that the trainer marked.

    The message says what is missing, and has the importer's complaint.
    """
    why = f"; {unread(complaint)}" if complaint else ""
    missing = sorted(set(promised) - set(contents.steps))
    if missing:
        some = ", ".join(map(str, missing[:10]))
        raise CaptureError(f"the report lacks the NVTX ranges of step{'s' * (len(missing) > 1)} {some}{why}")
    if not contents.events:
        raise CaptureError(f"the report contains no events{why}")
    if "cuda" in traces and contents.gpus and not contents.kernels:
        raise CaptureError(f"the report holds no GPU kernel, though cuda was traced on a host with a GPU{why}")


def unread(complaint: str) -> str:
    """What an importer's complaint means."""
    return f"nsys could not read all that it recorded ({complaint}): use an nsys as new as the job's CUDA"


def _contents(database: sqlite3.Connection, tables: dict[str, list[str]]) -> dict[str, Any]:
    def rows(name: str) -> int:
        if name not in tables:
            return 0
        (count,) = database.execute(f"SELECT count(*) FROM {_quoted(name)}").fetchone()
        return int(count)

    traced = [name for name in tables if name.startswith("CUPTI_") or name in ("NVTX_EVENTS", "OSRT_API")]
    traced += [name for name in tables if name.endswith(("_EVENTS", "_CALLCHAINS")) and name not in traced]
    return {
        "steps": _steps(database, tables),
        "events": sum(map(rows, traced)),
        "kernels": rows("CUPTI_ACTIVITY_KIND_KERNEL"),
        "gpus": rows("TARGET_INFO_GPU") or rows("TARGET_INFO_CUDA_GPU"),
    }


def _steps(database: sqlite3.Connection, tables: dict[str, list[str]]) -> tuple[int, ...]:
    if "NVTX_EVENTS" not in tables:
        return ()
    texts = database.execute(
        "SELECT DISTINCT coalesce(event.text, string.value) AS name FROM NVTX_EVENTS AS event "
        "LEFT JOIN StringIds AS string ON string.id = event.textId "
        "WHERE event.end IS NOT NULL AND name LIKE 'ProfilerStep#%' LIMIT ?",
        (MAX_STEPS,),
    )
    found = (_STEP.fullmatch(text) for (text,) in texts)
    return tuple(sorted(int(number[1]) for number in found if number))


def _scrub(database: sqlite3.Connection, tables: dict[str, list[str]]) -> int:
    count = 0
    database.execute("PRAGMA secure_delete = ON")
    for table, columns in tables.items():
        for column in columns:
            name = _quoted(column)
            texts = database.execute(f"SELECT rowid, {name} FROM {_quoted(table)} WHERE typeof({name}) = 'text'")
            changed = []
            for row, text in texts:
                better = scrubbed(text)
                if table in _ENVIRONMENT_TABLES and column.lower() == "value" and "=" in text:
                    better = REMOVED
                if better != text:
                    count += is_environment(text)
                    changed.append((better.encode("utf-8", "surrogateescape").decode("utf-8", "replace"), row))
            database.executemany(f"UPDATE {_quoted(table)} SET {name} = ? WHERE rowid = ?", changed)
    return count


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def contents_of(output: str) -> ReportContents:
    """Parse the output of `main`; raises CaptureError if it is invalid, or the reason of a failure."""
    try:
        found = json.loads(output.strip().splitlines()[-1])
        if "error" in found:
            raise CaptureError(str(found["error"]))
        return ReportContents(**{**found, "steps": tuple(found["steps"])})
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CaptureError(f"the report could not be examined: {output.strip()[-200:]!r}") from error


def main() -> int:
    """Run the program: see the module."""
    try:
        found = asdict(examine(Path(sys.argv[1])))
    except CaptureError as error:
        found = {"error": str(error)}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
