"""A run directory: its layout, and the small record of the run.

::

    RUN/
      run.json         what was run, when, under which policy, and where its rings are
      policy.yaml      the policy it started with; of several the first, and policy-2.yaml and so on the others
      steps/           the steps of every rank, as the agent read them from the rings, older ones thinned; and readings
                       of their counters
      decisions.jsonl  the journal, a line an event; .decisions.jsonl.partial: the next one, if it was cut short
      failures.log     tracebacks of triage, where it failed
      state.json       the policy engine's state, for restarts
      nsys.json        how the ranks were launched under nsys, if they were
      hub.json         of a job on many hosts: its name on their hub
      generations.json     and which processes of its ranks belong together
      asks/            people's capture requests that the controller has not read yet
      spool/           traces on their way from the trainers
      cluster.json     of a job in a Kubernetes cluster: the captures that have objects there
      captures/        one directory per capture: trace and manifest
      catalogue.db     an index of captures/, which can be rebuilt from it
      .lock            held by the process that triages the run
      .reserve         disk space for a last event about a disk that stays full, during the run
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import count, takewhile
from pathlib import Path

from sftriage.base.files import write_atomically
from sftriage.errors import InputError, UsageError
from sftriage.model.windows import plain

RUN_VERSION = 1


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The content of ``run.json``. ``rings`` is the directory of the trainers' rings while the run lasts.

    ``ended_at`` is when the run's watcher noticed its end, "" before or if it never did, None in older versions.
    ``store`` is the URL of the store for copies of its captures; with ``drop_local``, artefacts are removed here once
    they are stored there. ``steps_bytes`` and ``steps_age_s`` limit the kept steps; None: no limit. ``not_recorded``
    is the reason why no step is recorded (yet).
    """

    run_id: str
    job: str
    created_at: str
    command: tuple[str, ...]
    policy: str
    policy_sha256: str
    rings: str
    version: int = RUN_VERSION
    store: str | None = None
    drop_local: bool = False
    steps_bytes: int | None = None
    steps_age_s: float | None = None
    ended_at: str | None = None
    not_recorded: str = ""


class RunDirectory:
    """Paths of one run, as described in the module's docstring. Creates nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.info_file = path / "run.json"
        self.policy_file = path / "policy.yaml"
        self.steps = path / "steps"
        self.decisions = path / "decisions.jsonl"
        self.state = path / "state.json"
        self.nsys = path / "nsys.json"
        self.hub = path / "hub.json"
        self.generations = path / "generations.json"
        self.requests = path / "asks"
        self.spool = path / "spool"
        self.catalogue = path / "catalogue.db"
        self.failures = path / "failures.log"
        self.lock = path / ".lock"

    def policy_files(self) -> tuple[Path, ...]:
        """Copies of the policies that the run started with, in their order."""
        others = takewhile(Path.exists, (self.path / f"policy-{number}.yaml" for number in count(2)))
        return (self.policy_file, *others)


def create(path: Path, info: RunInfo, policy_text: str, *more_policies: str) -> RunDirectory:
    """Make a run directory, private to its owner, with the texts of its policies.

    Raises:
        UsageError: there is a run already, or the directory cannot be made.
    """
    run = RunDirectory(path.absolute())
    if run.info_file.exists():
        raise UsageError(f"{path} already holds a run; name another directory with --out")
    try:
        for directory in (run.path, run.steps, run.spool, run.requests):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(run.policy_file, policy_text)
        for number, text in enumerate(more_policies, start=2):
            write_atomically(run.path / f"policy-{number}.yaml", text)
        write_atomically(run.info_file, _text(info))
    except OSError as error:
        raise UsageError(f"cannot make the run directory {path}: {error.strerror or error}") from error
    return run


def write_info(run: RunDirectory, info: RunInfo) -> None:
    """Change the record of a run.

    Raises:
        UsageError: the run directory cannot be written.
    """
    try:
        write_atomically(run.info_file, _text(info))
    except OSError as error:
        raise UsageError(f"{run.info_file} cannot be written: {error.strerror or error}") from error


def _text(info: RunInfo) -> str:
    return json.dumps(plain(info), indent=2) + "\n"


def read_info(run: RunDirectory) -> RunInfo:
    """The record of a run.

    Raises:
        InputError: ``run.json`` is missing or invalid.
    """
    import msgspec  # not above: most commands only need the path of a run

    try:
        values = json.loads(run.info_file.read_bytes())  # msgspec's decoder refuses half a surrogate pair
        if values["version"] > RUN_VERSION:
            raise InputError(f"{run.info_file}: version {values['version']} is newer than this sftriage understands")
        return msgspec.convert(values, RunInfo)
    except FileNotFoundError as error:
        raise InputError(f"{run.path} is not a run directory: it has no run.json") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{run.info_file}: not a run's record: {error}") from error


DEFAULT_ROOT = "sftriage-runs"


def new_run_id(now: datetime) -> str:
    """A run's name: its start time, and a random part: clusters that share a store may start a job in one second."""
    return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


def find_run(run: Path | None) -> RunDirectory:
    """The selected run directory: by default the newest run in the current directory.

    Args:
        run: a run directory, or the name of one that was started on this machine.

    Raises:
        UsageError: there is none, or the named directory is not a run.
    """
    if run is not None:
        if not run.is_dir():
            named = (started for started in started_runs() if str(run) == started.path.name)
            if (found := next(named, None)) is not None:
                return found
            raise UsageError(f"{run}: no such directory")
        found = RunDirectory(run)
        if not found.info_file.is_file():
            raise UsageError(f"{run} is not a run directory: it has no run.json")
        return found
    here = Path.cwd()
    if RunDirectory(here).info_file.is_file():
        return RunDirectory(here)
    newest = None
    for known in started_runs():
        if known.path.resolve().is_relative_to(here):
            return known
        newest = newest or known
    if newest is not None:
        raise UsageError(
            f"no run was started in {here}; the newest on this machine is {newest.path}: name it with --run"
        )
    raise UsageError("no run was started yet; start one with `sftriage demo` or `sftriage run`, or name one with --run")


def run_so_far(run: Path | None) -> RunDirectory | None:
    """The selected run directory, which may not exist yet if it is named; None as long as no run was started."""
    if run is not None:
        return RunDirectory(run)
    try:
        return find_run(None)
    except UsageError:
        return None


def remember(run: RunDirectory) -> None:
    """Note that a run was started, so that later commands find it. Nothing happens if the home cannot be written."""
    with contextlib.suppress(OSError):
        notes = _notes()
        notes.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with notes.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"path": str(run.path)}) + "\n")


def started_runs() -> Iterator[RunDirectory]:
    """The runs that were started on this machine and still exist, newest first."""
    try:
        lines = _notes().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    known: set[Path] = set()
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            path = Path(json.loads(line)["path"])
            if path not in known and (run := RunDirectory(path)).info_file.is_file():
                known.add(path)
                yield run


def _notes() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "sftriage" / "runs.jsonl"
