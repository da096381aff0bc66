"""A job on this host, watched: the launcher, and triage beside it in the same process."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from sftriage.controller.controller import in_force
from sftriage.controller.policies import PolicyFiles
from sftriage.errors import UsageError
from sftriage.policy.loading import LoadedPolicy
from sftriage.policy.policy_set import PolicySet
from sftriage.recorder.layout import bounded_text
from sftriage.runs.directory import DEFAULT_ROOT, RunInfo, create, new_run_id, remember
from sftriage.runs.liveness import note_launcher
from sftriage.runtime.indexing import indexing_of
from sftriage.runtime.launcher import Launcher
from sftriage.runtime.nsys_launch import NsysLaunch
from sftriage.runtime.rings import make_rings_directory, remove_rings_directory
from sftriage.runtime.triage import Triage, this_host
from sftriage.runtime.uploads import uploads_of
from sftriage.sinks.stream import Sink

log = logging.getLogger("sftriage")


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where what is found is kept.

    Attributes:
        out: the run directory to make; by default a new one under ``sftriage-runs`` here.
        store: where copies of its captures are kept; by default nowhere.
        drop_local: the artefacts go from here once they are there.
        catalogue: one that many jobs share, and that is told of its captures; by default none.
    """

    out: Path | None = None
    store: str | None = None
    drop_local: bool = False
    catalogue: str | None = None


@dataclass(frozen=True, slots=True)
class UnderNsys:
    """How every rank starts under Nsight Systems: see `NsysLaunch`."""

    traces: str
    armed: bool = False


class LocalRun:
    """One run of a job on this host.

    Args:
        command: the launcher and its arguments.
        job: the job's name.
        policy: the policy, several that are in force together, or files that are watched for other ones.
        policy_texts: the policies as they were read, at least one.
        sinks: makes the subscribers to what happens, of what is run.
        keeping: where what is found is kept.
        nsys: how the ranks start under Nsight Systems; by default they do not.

    Raises:
        UsageError: there is no such launcher or no nsys, or the run directory cannot be made. No rings are left behind.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        job: str,
        policy: LoadedPolicy | PolicySet | PolicyFiles,
        policy_texts: Sequence[str],
        sinks: Callable[[RunInfo], Sequence[Sink]],
        *,
        keeping: Keeping | None = None,
        nsys: UnderNsys | None = None,
    ) -> None:
        if command and shutil.which(command[0]) is None:
            raise UsageError(f"cannot start {command[0]}: no such program")
        now = datetime.now(timezone.utc)
        run_id = new_run_id(now)
        keeping = keeping or Keeping()
        self._command, self._job = command, job
        self._rings = make_rings_directory(run_id)
        policies = in_force(policy)
        info = RunInfo(
            run_id=run_id,
            job=job,
            created_at=now.isoformat(timespec="seconds"),
            command=command,
            policy=", ".join(one.policy.metadata.name for one in policies.loaded),
            policy_sha256=policies.loaded[0].sha256,
            rings=str(self._rings),
            store=keeping.store,
            drop_local=keeping.drop_local,
        )
        try:
            self.directory = create(keeping.out or Path(DEFAULT_ROOT) / run_id, info, *policy_texts)
            self._nsys = None
            if nsys is not None:
                self._nsys = NsysLaunch(run_id, nsys.traces, self.directory.path, armed=nsys.armed)
                self._command = self._nsys.command(command)
            fleet = this_host(self.directory, info, self._nsys.place if self._nsys else None)
            self.uploads = uploads_of(self.directory, info)
            self.indexing = indexing_of(self.directory.path, keeping.catalogue)
            kept = [sink for sink in (self.uploads, self.indexing) if sink is not None]
            self._triage = Triage(self.directory, info, policy, fleet, [*sinks(info), *kept])
        except BaseException:
            remove_rings_directory(self._rings)
            raise

    def execute(self, environment: Mapping[str, str] | None = None, output: int | None = None) -> int:
        """Run the job to its end; its exit status.

        Args:
            environment: added to the trainers' environment.
            output: descriptor for the job's standard output and error, if they are not to go where ours do.

        Raises:
            UsageError: the launcher cannot be started.
        """
        place = {
            "SFTRIAGE_RINGS": str(self._rings),
            "SFTRIAGE_SPOOL": str(self.directory.spool),
            "SFTRIAGE_JOB": self._job,
        }
        if self._nsys is not None:
            place |= self._nsys.environment({**os.environ, **(environment or {})})
        try:
            # Before any thread is started: the child is forked from here.
            launcher = Launcher(self._command, {**(environment or {}), **place}, output)
            try:
                remember(self.directory)
                note_launcher(self._rings, launcher.pid)
                self._triage.start()
            except Exception:
                log.exception("the job goes on without triage, which could not begin")
            status = launcher.wait()
            self._triage.finish()
            return status
        finally:
            self._triage.close()
            remove_rings_directory(self._rings)
            if self._nsys is not None and not self._rings.exists():
                self._nsys.close()

    @property
    def steps_seen(self) -> int:
        """Steps read so far, over all ranks."""
        return self._triage.steps_seen


def job_name(job: str | None, command: list[str]) -> str:
    """The job's name: the one that was given, or one made of its command.

    Raises:
        UsageError: the one that was given could not be printed everywhere.
    """
    if job is None:
        return bounded_text(job_of(command))
    if not (job.strip() and job.isprintable()):
        raise UsageError(f"--job {job!r}: a name in printable characters")
    return job


def job_of(command: list[str]) -> str:
    """A name for the job: that of its script or module, or else of the launcher."""
    for before, word in zip(["", *command], command, strict=False):
        if word.endswith(".py") or before == "-m":
            return Path(word).name.removesuffix(".py").rpartition(".")[2]
    return Path(command[0]).name
