"""``sftriage run`` and ``attach``: a job of one's own, watched; and one taken over that goes on without it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sftriage.commands.cli import arguments
from sftriage.commands.job_options import (
    AutoOption,
    KeepingOptions,
    MetricsOptions,
    OutOption,
    PoliciesOption,
    finish,
    say_begun,
    say_summary,
)
from sftriage.commands.options import CatalogueOption, HubChoice, RunOption, argument, option
from sftriage.commands.output import notices
from sftriage.errors import UsageError
from sftriage.runs.directory import find_run
from sftriage.words.amounts import place

if TYPE_CHECKING:
    from sftriage.runtime.launcher import Launcher
    from sftriage.runtime.local import Keeping, UnderNsys
    from sftriage.runtime.supervisor import Triaged


@dataclass(frozen=True, slots=True)
class NsysChoice:
    """Whether the ranks run under Nsight Systems, and what it traces."""

    nsys: Annotated[
        bool, option("--nsys", "Start every rank under Nsight Systems, for policies that capture with it.")
    ] = False
    nsys_armed: Annotated[
        bool,
        option(
            "--nsys-armed",
            "As --nsys, for ranks whose session cannot be reached from here, as in another container: nsys waits "
            "for a range that the trainer opens. The run directory has to be theirs too.",
        ),
    ] = False
    nsys_trace: Annotated[str, option("LIST", "What nsys traces; it has to be known at the start.")] = "cuda,nvtx,osrt"

    def under(self) -> UnderNsys | None:
        """How the ranks are started; None where they are so without it."""
        from sftriage.runtime.local import UnderNsys

        return UnderNsys(self.nsys_trace, self.nsys_armed) if self.nsys or self.nsys_armed else None


def run(
    command: Annotated[list[str], argument("COMMAND", "The launcher and its arguments, after --.", False)],
    policy: PoliciesOption = None,
    out: OutOption = None,
    job: Annotated[str | None, option("NAME", "Name of the job.", "the script's")] = None,
    auto: AutoOption = False,
    required: Annotated[
        bool, option("--required", "Do not start the job where it cannot be watched; say why instead.")
    ] = False,
    *,
    nsys: NsysChoice,
    keep: KeepingOptions,
    catalogue: CatalogueOption = None,
    metrics: MetricsOptions,
    hub: HubChoice,
) -> None:
    """Run a training job and watch it.

    The trainers have to use sftriage.Monitor, or --auto finds the stages of their steps by itself. Their exit status
    becomes that of this command, and signals that it gets are theirs. Where it cannot watch the job, it says so, and
    the job runs all the same. Of a job on many hosts, run it on each of them, with --job-id and --hub or --nats.
    """
    # Before the imports: from now on, signals are the job's.
    from sftriage.runtime.launcher import Launcher
    from sftriage.runtime.supervisor import leave_with, supervise

    if not command:
        raise UsageError("nothing to run; give the launcher after --, as in: sftriage run -- torchrun train.py")
    if shutil.which(command[0]) is None:
        raise UsageError(f"cannot start {command[0]}: no such program")
    launcher, whole = Launcher(), tuple(command)
    options = hub.options() if arguments(hub) else None

    def prepare() -> Triaged:
        """What watches a job takes a second to import, and more to get ready."""
        from sftriage.policy.loading import find
        from sftriage.runtime.local import job_name

        paths, name = [find(name) for name in policy or ["default"]], job_name(job, command)
        keeping, under = keep.of(name, out), nsys.under()
        if options is None:
            from sftriage.runtime.indexing import checked_catalogue

            keeping = replace(keeping, catalogue=checked_catalogue(catalogue))
            return _on_this_host(whole, name, paths, keeping, under, metrics, auto=auto, required=required)
        from sftriage.controller.policies import PolicyFiles
        from sftriage.runtime.hosting import Copies
        from sftriage.runtime.many_hosts import HostRun

        # (the controller reads them again: what is wrong with them is said here, before the job starts)
        detection = PolicyFiles(paths).current.detection
        told: dict[str, object] = {
            **arguments(keep),
            "--store": keeping.store,
            "--catalogue": catalogue,
            **arguments(metrics),
            "--nsys": under and True,
        }
        given = [name if value is True else f"{name}={value}" for name, value in told.items() if value is not None]
        given += [f"--policy={path}" for path in paths]
        copies = Copies(keeping.store, keeping.drop_local)
        about = (whole, name, options, out, given, copies, under)
        return HostRun(*about, detection=detection, auto=auto, required=required).triaged()

    try:
        status = supervise(launcher, whole, prepare, required=required)
    except BaseException:
        launcher.close()
        raise
    leave_with(status)
    raise typer.Exit(status)


def _on_this_host(
    command: tuple[str, ...],
    name: str,
    policies: list[Path],
    keeping: Keeping,
    under: UnderNsys | None,
    metrics: MetricsOptions,
    *,
    auto: bool,
    required: bool,
) -> Triaged:
    from sftriage.runtime.local import LocalRun
    from sftriage.runtime.supervisor import END_S, is_mistake
    from sftriage.sinks.terminal import Reporter

    reporter = Reporter(notices())
    try:
        metering = metrics.metering()
    except UsageError as error:
        if required or is_mistake(error):
            raise
        reporter.say(f"no {error}")
        metering = MetricsOptions().metering()
    local = LocalRun(
        command,
        name,
        policies,
        lambda info: [reporter, *metering.sinks(info.job, info.run_id, time.time())],
        keeping=keeping,
        nsys=under,
        auto=auto,
        say=reporter.say,
    )
    say_begun(reporter, "watching", local, metering)
    triaged = local.triaged()

    def watch(launcher: Launcher) -> None:
        triaged.watch(launcher)
        if local.steps_seen:
            say_summary(reporter, local)
        finish(local, reporter, lambda: launcher.left_s(END_S - 1.0))

    return replace(triaged, watch=watch)


def attach(
    run: RunOption = None,
    policy: Annotated[
        list[str] | None,
        option(
            "POLICY",
            "A policy file, or the name of one that ships with sftriage. Repeatable.",
            "those that the run started with",
        ),
    ] = None,
    catalogue: CatalogueOption = None,
    *,
    metrics: MetricsOptions,
) -> None:
    """Take over a running job whose `sftriage run` has ended before it, and watch it to its end.

    Nothing is lost by the change: steps are read on where they were left, captures that were under way are collected,
    cooldowns and limits go on. The job itself notices nothing. Ctrl-C lets go of it again.
    """
    from sftriage.policy.loading import find
    from sftriage.runtime.indexing import checked_catalogue
    from sftriage.runtime.launcher import Notes
    from sftriage.runtime.local import TakeOver
    from sftriage.sinks.terminal import Reporter

    # Whoever ends this process ends this, and not the job.
    notes = Notes()
    metering = metrics.metering()
    reporter = Reporter(notices())
    found = find_run(run)
    if found.hub.exists():
        raise UsageError(
            f"its hosts are many; go on with it by: sftriage controller --run {place(found.path)} --hub HEAD"
        )
    taken = TakeOver(
        found,
        [find(name) for name in policy or ()],
        lambda info: [reporter, *metering.sinks(info.job, info.run_id, time.time())],
        checked_catalogue(catalogue),
    )
    say_begun(reporter, "took over the job", taken, metering)
    with contextlib.closing(taken):
        if not taken.watch(lambda: notes.told is not None):
            reporter.say("let go of the job, which goes on; `sftriage attach` takes it over again")
            raise typer.Exit(128 + signal.SIGINT)
    say_summary(reporter, taken)
    finish(taken, reporter)
