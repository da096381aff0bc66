"""``sftriage capture``: capture ranks of a running job on demand."""

from __future__ import annotations

import getpass
import secrets
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sftriage.commands.cli import arguments
from sftriage.commands.options import JsonOption, RunOption, option, parsed
from sftriage.commands.output import notices, print_json, say, write
from sftriage.errors import CaptureError, UsageError
from sftriage.model.captures import ManualRequest, ProfilerChoice
from sftriage.runs.directory import RunDirectory, find_run, read_info
from sftriage.words.verdicts import place

INTERRUPTED = 128 + 2
"""Exit status of a command that Ctrl-C ended."""
NOTED_S = 30.0
"""Time for a capture to be written and stored, after its time-box."""


@dataclass(frozen=True, slots=True)
class ProfilerFlags:
    """Options of single profilers; None: not set, as in a policy."""

    sample_stacks: bool | None = option(
        "--sample-stacks/--no-sample-stacks", "torch: also sample Python stacks.", "sampled"
    )
    record_shapes: bool | None = option("--record-shapes", "torch: record the shapes of operators' inputs.")
    with_stack: bool | None = option(
        "--with-stack", "torch: trace every Python call: exact, but several times slower if there are many."
    )
    profile_memory: bool | None = option("--profile-memory", "torch: record memory allocations.")
    nsys_trace: str | None = option(
        "LIST", "nsys: interfaces whose calls to record.", "those the ranks were launched with"
    )
    nsys_sample: Literal["none", "cpu"] | None = option("", "nsys: sample the process's stacks (cpu).", "none")
    nsys_sqlite: bool | None = option("--nsys-sqlite/--no-nsys-sqlite", "nsys: also export to SQLite.", "exported")
    native: bool | None = option("--native", "stacks: include C and C++ frames; one snapshot, over no steps.")

    def of(self, profiler: ProfilerChoice) -> dict[str, dict[str, Any]]:
        """The set options, by profiler; UsageError for those that ``profiler`` does not have."""
        fields: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for name, value in arguments(self).items():
            owner = "nsys" if name.startswith("--nsys-") else "stacks" if name == "--native" else "torch"
            # (auto takes a snapshot from outside only if it must)
            if profiler != owner and (profiler != "auto" or owner == "stacks"):
                raise UsageError(f"{name}: add --profiler {owner}")
            fields[owner][name.removeprefix("--").removeprefix("nsys-").replace("-", "_")] = value
        if self.nsys_trace is not None:
            fields["nsys"]["trace"] = self.nsys_trace.split(",")
        return fields


def capture(
    rank: Annotated[list[int], option("N", "A rank to capture. Repeatable.", min=0)],
    reason: Annotated[str, option("TEXT", "Why; saved in the manifest.")],
    run: RunOption = None,
    profiler: ProfilerChoice = option(
        "",
        "torch: operators, kernels and Python stacks. stacks: Python stacks only. nsys: Nsight Systems. auto: "
        "torch, or stacks from outside if the rank takes no steps.",
        default="auto",
    ),
    steps: int = option("N", "Steps to record.", min=1, max=1000, default=5),
    warmup_steps: int = option(
        "N", "Steps the profiler runs before recording; stacks need none.", min=0, max=100, default=1
    ),
    max_seconds: float = option("SECONDS", "End the capture after this, in any case.", min=1, max=3600, default=60.0),
    samples_per_second: int = option("N", "Samples of stacks per second, at most.", min=1, max=1000, default=200),
    max_bytes: str = option("SIZE", "Discard a trace that is larger.", default="512Mi"),
    *,
    flags: ProfilerFlags,
    as_json: JsonOption = False,
) -> None:
    """Capture ranks of a running job, within the limits of its policy.

    Waits until the traces are stored, and prints where; `sftriage traces open` shows them. Ctrl-C ends only the
    waiting. A capture that the limits forbid is refused, with the reason.
    """
    from sftriage.policy.fields import size_bytes

    limit_bytes = parsed("--max-bytes", size_bytes, max_bytes)
    options = flags.of(profiler)
    directory = find_run(run)
    _refuse_ended(directory)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    request = ManualRequest(
        *(secrets.token_hex(8), tuple(dict.fromkeys(rank)), user, reason),
        profiler=profiler,
        steps=steps,
        warmup_steps=warmup_steps,
        max_seconds=max_seconds,
        max_bytes=limit_bytes,
        samples_per_second=samples_per_second,
        options=options,
    )
    _send_and_wait(directory, request, as_json=as_json)


def _send_and_wait(directory: RunDirectory, request: ManualRequest, *, as_json: bool) -> None:
    # Import before sending the request: on Ctrl-C while a dataclass is created, CPython ignores handlers and exits.
    from sftriage.agent.agent import ANSWER_GRACE_S
    from sftriage.runs import requests

    try:
        with notices().status("requesting") as status:
            # Inside the try: the run may accept the request before this returns.
            requests.leave(directory, request)
            decision = requests.answer(directory, request)
            status.update(f"capturing {', '.join(f'rank {rank}' for rank in request.ranks)}")
            grace_s = max(ANSWER_GRACE_S[capture["profiler"]] for capture in decision["requests"])
            ended = requests.ended(directory, decision, request.max_seconds + grace_s + NOTED_S, status.update)
    except KeyboardInterrupt:
        requests.withdraw(directory, request)
        say(requests.after_interrupt(directory, request))
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json({"decision": decision, "results": ended})
    for result in ended if not as_json else ():
        if result["state"] == "stored":
            where = directory.path / "captures" / result["capture_id"]
            write(f"rank {result['rank']}: {place(where)}")
    failed = [result for result in ended if result["state"] != "stored"]
    problems = [f"rank {result['rank']} {result['state']}: {result['detail']}" for result in failed]
    problems += [f"capture {capture_id} shows where it hung" for capture_id in requests.follow_ups(directory, ended)]
    if not ended:
        problems = ["the captures have not ended; see `sftriage decisions` later for their outcome"]
    if problems:
        raise CaptureError("; ".join(problems))


def _refuse_ended(directory: RunDirectory) -> None:
    from sftriage.runs.liveness import is_watched, watcher_of

    info, where = read_info(directory), place(directory.path)
    rings = Path(info.rings)
    # (if another host watches the job and shares this directory, the rings are in that host's memory)
    if not rings.is_dir() and not is_watched(watcher_of(directory, rings)):
        killed = info.ended_at == ""  # (and another run has removed the rings)
        unwatched = f"{where} is not being watched, and its job has ended"
        raise UsageError(unwatched if killed else f"the run {where} has ended")
