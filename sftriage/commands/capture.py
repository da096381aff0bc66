"""``sftriage capture``: capture ranks of a running job, because somebody wants to see them."""

from __future__ import annotations

import getpass
import secrets
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sftriage.commands.cli import arguments
from sftriage.commands.options import RunOption, meant, option
from sftriage.commands.output import notices, print_json, say, write
from sftriage.errors import CaptureError, UsageError
from sftriage.model.captures import ManualRequest, ProfilerChoice
from sftriage.runs.directory import RunDirectory, find_run, read_info
from sftriage.words.verdicts import place

INTERRUPTED = 128 + 2
"""What a shell says of a command that Ctrl-C ended."""
NOTED_S = 30.0
"""Past its time-box, how long a capture may take to be written out and stored."""


@dataclass(frozen=True, slots=True)
class ProfilerFlags:
    """What single profilers record; None as in a policy that does not say it."""

    sample_stacks: bool | None = option(
        "--sample-stacks/--no-sample-stacks", "torch: sample Python stacks beside.", "sampled"
    )
    record_shapes: bool | None = option("--record-shapes", "torch: the shapes of operators' inputs.")
    with_stack: bool | None = option(
        "--with-stack", "torch: trace every Python call: exact, and several times slower where there are many."
    )
    profile_memory: bool | None = option("--profile-memory", "torch: allocations.")
    nsys_trace: str | None = option(
        "LIST", "The interfaces whose calls are recorded.", "what the ranks were launched with"
    )
    nsys_sample: Literal["none", "cpu"] | None = option("", "Sample the process's stacks (cpu).", "none")
    nsys_sqlite: bool | None = option("--nsys-sqlite/--no-nsys-sqlite", "Export the report to SQLite too.", "exported")
    native: bool | None = option(
        "--native", "stacks: the frames of C and C++ too; one look from outside, and of no steps."
    )
    flight_recorder: bool | None = option(
        "--flight-recorder",
        "stacks: the flight recorder of torch.distributed too; one look from outside, and of no steps.",
    )

    def of(self, profiler: ProfilerChoice) -> dict[str, dict[str, Any]]:
        """Those that were given, by profiler; UsageError for one that ``profiler`` does not have."""
        given: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for name, value in arguments(self).items():
            of_stacks = name in ("--native", "--flight-recorder")
            given["nsys" if name.startswith("--nsys-") else "stacks" if of_stacks else "torch"][name] = value
        for of, its in given.items():
            # (auto looks from outside only where it has to)
            if profiler != of and (profiler != "auto" or of == "stacks"):
                raise UsageError(f"{', '.join(its)}: say --profiler {of} too")
        fields = {
            of: {name.removeprefix("--").removeprefix("nsys-").replace("-", "_"): value for name, value in its.items()}
            for of, its in given.items()
        }
        if self.nsys_trace is not None:
            fields["nsys"]["trace"] = self.nsys_trace.split(",")
        return fields


def capture(
    rank: Annotated[list[int], option("N", "A rank to capture. Repeatable.", min=0)],
    reason: Annotated[str, option("TEXT", "Why; it goes into the manifest.")],
    run: RunOption = None,
    profiler: ProfilerChoice = option(
        "",
        "auto: operators and Python stacks, or from outside where the rank takes no steps. torch: operators "
        "and kernels, and stacks beside. stacks: Python stacks alone. nsys: Nsight Systems.",
        default="auto",
    ),
    steps: int = option("N", "Steps to record.", min=1, max=1000, default=5),
    warmup_steps: int = option(
        "N", "Steps the profiler runs before those; stacks need none.", min=0, max=100, default=1
    ),
    max_seconds: float = option("SECONDS", "When it ends, whatever happens.", min=1, max=3600, default=60.0),
    samples_per_second: int = option(
        "N", "How often stacks are sampled over the steps, at most.", min=1, max=1000, default=200
    ),
    max_bytes: str = option("SIZE", "Size over which a trace is not kept.", default="512Mi"),
    *,
    flags: ProfilerFlags,
    as_json: bool = option("--json", "One object on stdout."),
) -> None:
    """Capture ranks of a job that runs, under the same limits and with the same record as any capture.

    It waits until the traces are stored, and says where. Ctrl-C ends only the waiting. A policy's limits hold: what
    they forbid is refused, with the reason.
    """
    from sftriage.policy.fields import size_bytes

    most_bytes = meant("--max-bytes", size_bytes, max_bytes)
    options = flags.of(profiler)
    directory = find_run(run)
    _refuse_ended(directory)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "somebody"
    ask = ManualRequest(
        *(secrets.token_hex(8), tuple(dict.fromkeys(rank)), user, reason),
        profiler=profiler,
        steps=steps,
        warmup_steps=warmup_steps,
        max_seconds=max_seconds,
        max_bytes=most_bytes,
        samples_per_second=samples_per_second,
        options=options,
    )
    _leave_and_wait(directory, ask, as_json=as_json)


def _leave_and_wait(directory: RunDirectory, ask: ManualRequest, *, as_json: bool) -> None:
    # Imported before the request is left: where Ctrl-C comes while a dataclass is made, CPython ends as if by SIGINT,
    # whoever handles it.
    from sftriage.agent.agent import ANSWER_GRACE_S
    from sftriage.runs import requests

    try:
        with notices().status("asking") as status:
            # In here already: the run can take the request up before this returns.
            requests.leave(directory, ask)
            decision = requests.answer(directory, ask)
            status.update(f"capturing {', '.join(f'rank {one}' for one in ask.ranks)}")
            grace_s = max(ANSWER_GRACE_S[request["profiler"]] for request in decision["requests"])
            ended = requests.ended(directory, decision, ask.max_seconds + grace_s + NOTED_S, status.update)
    except KeyboardInterrupt:
        requests.withdraw(directory, ask)
        say(requests.left_alone(directory, ask))
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json({"decision": decision, "results": ended})
    for result in ended if not as_json else ():
        if result["state"] == "stored":
            where = directory.path / "captures" / result["capture_id"]
            write(f"rank {result['rank']}: {place(where)}")
    bad = [f"rank {one['rank']} {one['state']}: {one['detail']}" for one in ended if one["state"] != "stored"]
    bad += [f"where it hung is in capture {capture_id}" for capture_id in requests.follow_ups(directory, ended)]
    if not ended:
        bad = ["the captures have not ended; `sftriage decisions` will say what became of them"]
    if bad:
        raise CaptureError("; ".join(bad))


def _refuse_ended(directory: RunDirectory) -> None:
    info = read_info(directory)
    rings = Path(info.rings)
    if rings.is_dir():
        return
    from sftriage.runs.liveness import is_watched, watcher_of

    # (where another host watches it, and shares this directory, they are in that one's memory)
    if is_watched(watcher_of(directory, rings)):
        return
    where = place(directory.path)
    if info.ended_at == "":
        # Its sftriage was killed, and another run has swept what its trainers left in memory.
        raise UsageError(f"nobody watches {where}, and its job has ended")
    raise UsageError(f"{where} is a run that has ended")
