"""``sftriage run``, ``attach`` and ``agent``: watch a job on this host. They hand over to `sftriage.runtime`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sftriage.commands import options as shared
from sftriage.commands.cli import arguments
from sftriage.commands.options import argument, option
from sftriage.commands.output import JobOutput, ending_on_sigterm, print_findings, print_json, say
from sftriage.errors import UsageError
from sftriage.runs.directory import find_run
from sftriage.words.verdicts import place

if TYPE_CHECKING:
    from sftriage.model.checks import CheckResult
    from sftriage.runtime.hub_server import HubOptions
    from sftriage.runtime.launcher import Launcher, Triaged
    from sftriage.runtime.nsys_launch import NsysLaunch
    from sftriage.runtime.preflight import Checked


@dataclass(frozen=True, slots=True)
class NsysChoice:
    """Whether and how the ranks run under Nsight Systems."""

    nsys: bool = option("--nsys", "Start every rank under Nsight Systems, for policies that capture with it.")
    nsys_armed: bool = option(
        "--nsys-armed",
        "Like --nsys, for ranks whose session cannot be reached from here (in another container): nsys waits "
        "for an NVTX range that the trainer opens. The ranks must share the run directory.",
    )
    nsys_trace: str = option("LIST", "What nsys traces; fixed at the start.", default="cuda,nvtx,osrt")

    @property
    def is_used(self) -> bool:
        return self.nsys or self.nsys_armed

    def launch(self) -> Callable[[str, Path], NsysLaunch] | None:
        """A function that makes the launch from a run's id and directory."""
        if not self.is_used:
            return None
        from sftriage.runtime.nsys_launch import NsysLaunch

        return partial(NsysLaunch, traces=self.nsys_trace, armed=self.nsys_armed)


def _check_command(command: list[str]) -> None:
    if not command:
        raise UsageError("nothing to run; give the launcher after --, such as: sftriage run -- torchrun train.py")
    if shutil.which(command[0]) is None:
        raise UsageError(f"cannot start {command[0]}: no such program")


@dataclass(frozen=True, slots=True)
class CheckChoice:
    """Whether to check the job's hosts instead of starting the job."""

    check: bool = option(
        "--check", "Start nothing: check this host, and with --hub or --nats all hosts, for what would stop the run."
    )
    seconds: float = option("S", "With --check: wait at most this long for the other hosts.", min=1, default=30.0)
    as_json: bool = option("--json", "With --check: print the results as JSON.")

    def __post_init__(self) -> None:
        if self.as_json and not self.check:
            raise UsageError("--json needs --check")


def run(
    command: Annotated[list[str], argument("COMMAND", "The launcher and its arguments, after --.", False)],
    policy: shared.PoliciesOption = None,
    out: shared.OutOption = None,
    job: str | None = option("NAME", "Name of the job.", "the script's"),
    auto: bool = option("--auto/--no-auto", "Detect the stages of a script without sftriage.Monitor.", default=True),
    required: bool = option("--required", "If the job cannot be watched, do not start it; print why."),
    *,
    nsys: NsysChoice,
    keep: shared.KeepingOptions,
    catalogue: shared.CatalogueOption = None,
    metrics: shared.MetricsOptions,
    hub: shared.HubChoice,
    check: CheckChoice,
) -> None:
    """Run a training job and watch it.

    It finds the steps and stages of an unedited PyTorch script; a sftriage.Monitor in the script takes precedence. This
    command exits with the job's status, and passes signals on to it. If sftriage cannot watch the job, it logs why, and
    the job runs anyway. For a job on many hosts, run this on each of them, with --job-id and --hub or --nats.

    With --check it starts no job: it exits with 1 if something would stop or degrade the run on any host.
    """
    # Before the imports: from now on, signals are the job's.
    from sftriage.runtime.launcher import Launcher, leave_with, supervise

    _check_command(command)
    options = hub.options() if arguments(hub) else None
    if check.check:
        keep.of(job or "job")
        ready = _is_ready(command, policy or ["default"], options, metrics, check, nsys=nsys.is_used, out=out)
        raise typer.Exit(int(not ready))
    launcher, whole = Launcher(), tuple(command)

    def prepare() -> Triaged:
        """Import and prepare what watches the job, which takes more than a second."""
        from sftriage.policy.in_force import PolicyFiles, find
        from sftriage.runtime.local import job_name

        name = job_name(job, command)
        policies = [find(name) for name in policy or ["default"]]
        keeping, launch = keep.of(name), nsys.launch()
        if options is None:
            output = _output(metrics, catalogue, required=required)
            return _on_this_host(whole, name, policies, output, out=out, keeping=keeping, nsys=launch, auto=auto)
        from sftriage.runtime.many_hosts import HostRun

        more = {"--store": keeping.store, "--catalogue": catalogue, "--nsys": True if launch else None}
        # (the controller reads the policies too; mistakes in them are reported here, before the job starts)
        detection = PolicyFiles(policies).current.detection
        here = HostRun(name, options, _forwarded(keep, metrics, more, policies), detection, keeping)
        return here.triaged(whole, out, nsys=launch, auto=auto, required=required)

    try:
        status = supervise(launcher, whole, prepare, required=required)
    except BaseException:
        launcher.close()
        raise
    leave_with(status)
    raise typer.Exit(status)


def _is_ready(
    command: list[str],
    policies: list[str],
    options: HubOptions | None,
    metrics: shared.MetricsOptions,
    check: CheckChoice,
    *,
    nsys: bool,
    out: Path | None,
) -> bool:
    """Print what would stop or degrade a job; return whether it is ready on all hosts."""
    from sftriage.policy.in_force import PolicyFiles, find
    from sftriage.runtime.many_hosts import check_one_per_host
    from sftriage.runtime.preflight import HostCheck, check_here, plan_of

    in_force = PolicyFiles([find(name) for name in policies]).current
    plan = plan_of(command, os.environ, in_force, nsys=nsys, here=options is None)
    more, show = partial(_metrics_check, metrics), partial(_show_checked, as_json=check.as_json)
    with ending_on_sigterm():
        if options is not None:
            check_one_per_host()
            return HostCheck(options, plan, out, check.seconds, more).run(show)
        checked = check_here(plan, out, more)
        show(checked)
        return checked.ready


def _show_checked(checked: Checked, *, as_json: bool) -> None:
    from sftriage.runtime.preflight import by_check

    if as_json:
        print_json(checked.found)
    else:
        # (the first host shows what is well)
        print_findings(row for row in by_check(checked.found) if checked.is_first or row[1] != "ok")
    sys.stdout.flush()
    if not checked.is_first:
        say("all hosts are ready" if checked.ready else "the job is not ready: see the output of its first host")


def _metrics_check(metrics: shared.MetricsOptions) -> Iterator[CheckResult]:
    """Whether the controller can serve and write its metrics."""
    from sftriage.model.checks import CheckResult
    from sftriage.runtime.launcher import is_mistake

    if arguments(metrics):
        try:
            metrics.metering()
            yield CheckResult("metrics", "ok", "they can be served and written")
        except UsageError as error:
            if is_mistake(error):
                raise
            yield CheckResult("metrics", "wrong", str(error), "choose another port or file")


def _forwarded(
    keep: shared.KeepingOptions, metrics: shared.MetricsOptions, more: Mapping[str, object], policies: list[Path]
) -> list[str]:
    """The options for the controller of a job on many hosts."""
    values = {**arguments(keep), **arguments(metrics), **more}.items()
    forwarded = [name if value is True else f"{name}={value}" for name, value in values if value is not None]
    return [*forwarded, *(f"--policy={path}" for path in policies)]


def _output(metrics: shared.MetricsOptions, catalogue: str | None, *, required: bool) -> JobOutput:
    """The output of a job; without metrics if the system refuses them, unless they are ``required``."""
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
        output.say(f"no metrics: {no_metrics}")
        return output


def _on_this_host(command: tuple[str, ...], name: str, policies: list[Path], output: JobOutput, **how: Any) -> Triaged:
    from sftriage.runtime.launcher import END_S
    from sftriage.runtime.local import LocalRun

    local = LocalRun(command, name, policies, output.sinks, **how)
    output.say_begun("watching", local)
    triaged = local.triaged(say=output.say)

    def watch(launcher: Launcher) -> None:
        triaged.watch(launcher)
        output.finish(local, lambda: launcher.left_s(END_S - 1.0), summary=local.recorded_steps > 0)

    return replace(triaged, watch=watch)


def attach(
    run: shared.RunOption = None,
    policy: list[str] | None = option(
        "POLICY", "A policy file, or the name of a shipped policy. Repeatable.", "the run's own"
    ),
    catalogue: shared.CatalogueOption = None,
    *,
    metrics: shared.MetricsOptions,
) -> None:
    """Take over a running job whose `sftriage run` has ended, and watch it to its end.

    Nothing is lost: it resumes reading steps where `sftriage run` stopped, collects captures in progress, and keeps
    cooldowns and limits. The job is not affected. Ctrl-C stops watching it.
    """
    from sftriage.policy.in_force import find
    from sftriage.runtime.copies import checked_catalogue
    from sftriage.runtime.launcher import Notes
    from sftriage.runtime.local import TakeOver

    # Signals end this process, not the job.
    notes = Notes()
    output = JobOutput(metrics.metering(), catalogue=checked_catalogue(catalogue))
    found = find_run(run)
    if found.hub.exists():
        raise UsageError(
            f"the job runs on many hosts; resume with: sftriage controller --run {place(found.path)} --hub HEAD"
        )
    taken = TakeOver(found, [find(name) for name in policy or ()], output.sinks)
    output.say_begun("took over the job", taken)
    with contextlib.closing(taken):
        if not taken.watch(lambda: notes.last_signal is not None):
            output.say("stopped watching, the job continues; resume with `sftriage attach`")
            raise typer.Exit(128 + signal.SIGINT)
    output.finish(taken)


GRACE_S = 3.0
"""How long trainers that get SIGTERM together with their agent may take to end."""


def agent(
    *,
    hub: shared.HubChoice,
    rings: Path | None = option("DIR", "Directory of the trainers' rings.", "$SFTRIAGE_RINGS"),
    directory: Path | None = option("DIR", "Directory for this host's own files.", "one under sftriage-runs"),
    name: str | None = option("NAME", "Name of this host within the job.", "the host name and $NODE_RANK"),
    job: str | None = option("NAME", "Display name of the job.", "the --job-id"),
    store: str | None = option(
        "URL",
        "Upload this host's captures directly to the --store of the job's controller. Credentials come from "
        "the environment.",
        "captures go through the hub",
    ),
    drop_local: shared.DropLocalOption = False,
) -> None:
    """Watch one host of a job on many hosts: send its steps to the hub, and carry out captures of its ranks.

    Use it beside trainers that `sftriage run` does not start. It exits once the host's trainers have ended for good,
    or by SIGTERM or Ctrl-C; the job is not affected.
    """
    from sftriage.runtime.launcher import Notes

    # (a signal for the job, as before a preemption, does not end this process)
    notes = Notes()
    from sftriage.runtime.copies import Keeping
    from sftriage.runtime.ends import JobEnds
    from sftriage.runtime.hosting import HURRY_S, LEAVE_S, AgentHost, host_directory, host_name, left_behind
    from sftriage.runtime.rings import tidy_rings

    options = hub.options()
    if rings is None and (variable := os.environ.get("SFTRIAGE_RINGS")):
        rings = Path(variable)
    if rings is None and directory is None:
        # (a `sftriage run` that ended before its job has left a note of its rings)
        for found, left in islice(left_behind(options.job_id), 1):
            directory, rings, name, job = found, Path(left.rings), left.name, job or left.job
    if rings is None:
        raise UsageError("no directory of rings; give --rings DIR, or set SFTRIAGE_RINGS as for the trainers")
    job = job or options.job_id
    keeping = Keeping(shared.copies_of(job, store, drop_local=drop_local), drop_local)
    options.wait_for_secret(over=lambda: notes.last_signal is not None)
    if notes.last_signal is not None:
        raise typer.Exit(128 + signal.SIGINT)
    name = name or host_name(os.environ)
    where = (directory or host_directory(options.job_id, name, os.environ)).absolute()
    about = rings, where, job, options.job_id, options.address, name, keeping
    with contextlib.closing(JobEnds(rings)) as ends, contextlib.closing(AgentHost(*about)) as host:
        host.start()
        early = not host.watch(ends.of_host, lambda: notes.last_signal is not None)
        # (a signal that ends the job ends its trainers at the same moment)
        if over := not early or host.left_within(GRACE_S):
            over = host.finish(ends.of_host(), *(() if not early else (LEAVE_S + HURRY_S,)), logs=not early)
    if over:
        tidy_rings(rings)
    elif early:
        raise typer.Exit(128 + signal.SIGINT)
