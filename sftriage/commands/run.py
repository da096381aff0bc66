"""``sftriage run``, ``attach`` and ``agent``: a job of this host, watched."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sftriage.commands import options as shared
from sftriage.commands.cli import arguments
from sftriage.commands.options import argument, option
from sftriage.commands.output import JobOutput
from sftriage.errors import UsageError
from sftriage.runs.directory import find_run
from sftriage.words.verdicts import place

if TYPE_CHECKING:
    from sftriage.runtime.launcher import Launcher, Triaged
    from sftriage.runtime.nsys_launch import NsysLaunch


@dataclass(frozen=True, slots=True)
class NsysChoice:
    """Whether the ranks run under Nsight Systems, and what it traces."""

    nsys: bool = option("--nsys", "Start every rank under Nsight Systems, for policies that capture with it.")
    nsys_armed: bool = option(
        "--nsys-armed",
        "As --nsys, for ranks whose session cannot be reached from here, as in another container: nsys waits "
        "for a range that the trainer opens. The run directory has to be theirs too.",
    )
    nsys_trace: str = option("LIST", "What nsys traces; it has to be known at the start.", default="cuda,nvtx,osrt")

    def launch(self) -> Callable[[str, Path], NsysLaunch] | None:
        """Makes the launch of a run with that id, in that directory."""
        if not (self.nsys or self.nsys_armed):
            return None
        from sftriage.runtime.nsys_launch import NsysLaunch

        return partial(NsysLaunch, traces=self.nsys_trace, armed=self.nsys_armed)


def run(
    command: Annotated[list[str], argument("COMMAND", "The launcher and its arguments, after --.", False)],
    policy: shared.PoliciesOption = None,
    out: shared.OutOption = None,
    job: str | None = option("NAME", "Name of the job.", "the script's"),
    auto: bool = option(
        "--auto",
        "Find the stages of a training script that does not use sftriage.Monitor, from what torch says of them.",
    ),
    required: bool = option("--required", "Do not start the job where it cannot be watched; say why instead."),
    *,
    nsys: NsysChoice,
    keep: shared.KeepingOptions,
    catalogue: shared.CatalogueOption = None,
    metrics: shared.MetricsOptions,
    hub: shared.HubChoice,
) -> None:
    """Run a training job and watch it.

    The trainers have to use sftriage.Monitor, or --auto finds the stages of their steps by itself. Their exit status
    becomes that of this command, and signals that it gets are theirs. Where it cannot watch the job, it says so, and
    the job runs all the same. Of a job on many hosts, run it on each of them, with --job-id and --hub or --nats.
    """
    # Before the imports: from now on, signals are the job's.
    from sftriage.runtime.launcher import Launcher, leave_with, supervise

    if not command:
        raise UsageError("nothing to run; give the launcher after --, as in: sftriage run -- torchrun train.py")
    if shutil.which(command[0]) is None:
        raise UsageError(f"cannot start {command[0]}: no such program")
    launcher, whole = Launcher(), tuple(command)
    options = hub.options() if arguments(hub) else None

    def prepare() -> Triaged:
        """What watches a job takes a second to import, and more to get ready."""
        from sftriage.policy.in_force import PolicyFiles, find
        from sftriage.runtime.local import job_name

        name = job_name(job, command)
        policies = [find(one) for one in policy or ["default"]]
        keeping, launch = keep.of(name), nsys.launch()
        if options is None:
            output = _output(metrics, catalogue, required=required)
            return _on_this_host(whole, name, policies, output, out=out, keeping=keeping, nsys=launch, auto=auto)
        from sftriage.runtime.many_hosts import HostRun

        more = {"--store": keeping.store, "--catalogue": catalogue, "--nsys": True if launch else None}
        given = _forwarded(keep, metrics, more, policies)
        # (the controller reads them again: mistakes in them are reported here, before the job starts)
        detection = PolicyFiles(policies).current.detection
        here = HostRun(name, options, given, detection, keeping)
        return here.triaged(whole, out, nsys=launch, auto=auto, required=required)

    try:
        status = supervise(launcher, whole, prepare, required=required)
    except BaseException:
        launcher.close()
        raise
    leave_with(status)
    raise typer.Exit(status)


def _forwarded(
    keep: shared.KeepingOptions, metrics: shared.MetricsOptions, more: Mapping[str, object], policies: list[Path]
) -> list[str]:
    """Options that the controller of a job on many hosts is started with."""
    values = {**arguments(keep), **arguments(metrics), **more}.items()
    given = [name if value is True else f"{name}={value}" for name, value in values if value is not None]
    return [*given, *(f"--policy={path}" for path in policies)]


def _output(metrics: shared.MetricsOptions, catalogue: str | None, *, required: bool) -> JobOutput:
    """The output of a job; without metrics where the system refuses them and the job runs all the same."""
    from sftriage.runtime.copies import checked_catalogue
    from sftriage.runtime.launcher import is_mistake
    from sftriage.sinks.metering import Metering

    url = checked_catalogue(catalogue)
    try:
        return JobOutput(metrics.metering(), catalogue=url)
    except UsageError as no_metrics:
        if required or is_mistake(no_metrics):
            raise
        output = JobOutput(Metering(), catalogue=url)
        output.say(f"no {no_metrics}")
        return output


def _on_this_host(command: tuple[str, ...], name: str, policies: list[Path], output: JobOutput, **how: Any) -> Triaged:
    from sftriage.runtime.launcher import END_S
    from sftriage.runtime.local import LocalRun

    local = LocalRun(command, name, policies, output.sinks, **how)
    output.say_begun("watching", local)
    triaged = local.triaged(say=output.say)

    def watch(launcher: Launcher) -> None:
        triaged.watch(launcher)
        output.finish(local, lambda: launcher.left_s(END_S - 1.0), summary=local.steps_seen > 0)

    return replace(triaged, watch=watch)


def attach(
    run: shared.RunOption = None,
    policy: list[str] | None = option(
        "POLICY",
        "A policy file, or the name of one that ships with sftriage. Repeatable.",
        "those that the run started with",
    ),
    catalogue: shared.CatalogueOption = None,
    *,
    metrics: shared.MetricsOptions,
) -> None:
    """Take over a running job whose `sftriage run` has ended before it, and watch it to its end.

    Nothing is lost by the change: steps are read on where they were left, captures that were under way are collected,
    cooldowns and limits go on. The job itself notices nothing. Ctrl-C lets go of it again.
    """
    from sftriage.policy.in_force import find
    from sftriage.runtime.copies import checked_catalogue
    from sftriage.runtime.launcher import Notes
    from sftriage.runtime.local import TakeOver

    # Signals end this process, and not the job.
    notes = Notes()
    output = JobOutput(metrics.metering(), catalogue=checked_catalogue(catalogue))
    found = find_run(run)
    if found.hub.exists():
        raise UsageError(
            f"its hosts are many; go on with it by: sftriage controller --run {place(found.path)} --hub HEAD"
        )
    taken = TakeOver(found, [find(name) for name in policy or ()], output.sinks)
    output.say_begun("took over the job", taken)
    with contextlib.closing(taken):
        if not taken.watch(lambda: notes.told is not None):
            output.say("let go of the job, which goes on; `sftriage attach` takes it over again")
            raise typer.Exit(128 + signal.SIGINT)
    output.finish(taken)


GRACE_S = 3.0
"""How long trainers that are told to end together with their agent may take to do so."""


def agent(
    *,
    hub: shared.HubChoice,
    rings: Path | None = option("DIR", "Where the trainers' rings are.", "$SFTRIAGE_RINGS"),
    directory: Path | None = option("DIR", "For what is this host's own.", "one under sftriage-runs"),
    name: str | None = option("NAME", "Of this host, among those of the job.", "its own, and $NODE_RANK"),
    job: str | None = option("NAME", "Name of the job, for people.", "the --job-id"),
    store: str | None = option(
        "URL",
        "Upload this host's captures from here, to the --store of the job's controller. Credentials come from "
        "the environment.",
        "they go through the hub",
    ),
    drop_local: shared.DropLocalOption = False,
) -> None:
    """Watch one host of a job on many: ship its steps to the job's hub, and carry out the captures asked of its ranks.

    It ends once the host's trainers have come and gone for good, or by SIGTERM or Ctrl-C; the job itself notices
    nothing.
    """
    from sftriage.runtime.launcher import Notes

    # (what is sent to the job, as before it is preempted, this one is not to die of)
    notes = Notes()
    from sftriage.runtime.copies import Keeping
    from sftriage.runtime.hosting import HURRY_S, LEAVE_S, AgentHost, host_directory, host_name, left_behind
    from sftriage.runtime.rings import tidy_rings

    options = hub.options()
    if rings is None and (variable := os.environ.get("SFTRIAGE_RINGS")):
        rings = Path(variable)
    if rings is None and directory is None:
        # Where `sftriage run` has ended before its job, it has left word of them.
        for found, left in islice(left_behind(options.job_id), 1):
            directory, rings, name, job = found, Path(left.rings), left.name, job or left.job
    if rings is None:
        raise UsageError("where are the rings? give --rings DIR, or set SFTRIAGE_RINGS as for the trainers")
    job = job or options.job_id
    keeping = Keeping(shared.copies_of(job, store, drop_local=drop_local), drop_local)
    options.wait_for_secret(over=lambda: notes.told is not None)
    if notes.told is not None:
        raise typer.Exit(128 + signal.SIGINT)
    name = name or host_name(os.environ)
    where = (directory or host_directory(options.job_id, name, os.environ)).absolute()
    with contextlib.closing(AgentHost(rings, where, job, options.job_id, options.address, name, keeping)) as host:
        host.start()
        told = not host.watch(lambda: notes.told is not None)
        # (whoever ends a job ends its trainers too, in the same moment)
        over = host.finish() if not told else host.left_within(GRACE_S) and host.finish(LEAVE_S + HURRY_S, says=False)
    if over:
        tidy_rings(rings)
    elif told:
        raise typer.Exit(128 + signal.SIGINT)
