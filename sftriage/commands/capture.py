"""``sftriage capture``: capture ranks of a running job, because somebody wants to see them."""

from __future__ import annotations

import getpass
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from sftriage.commands.options import RunOption
from sftriage.commands.output import notices, print_json, say, write
from sftriage.errors import CaptureError, UsageError
from sftriage.records import ManualRequest, Profiler
from sftriage.runs.asks import leave, withdraw
from sftriage.runs.directory import RunDirectory, find_run, read_info
from sftriage.words import place

INTERRUPTED = 128 + 2
"""What a shell says of a command that Ctrl-C ended."""
NOTED_S = 30.0
"""Past its time-box, how long a capture may take to be written out and stored."""


def capture(
    rank: Annotated[list[int], typer.Option(metavar="N", min=0, help="A rank to capture. Repeatable.")],
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; it goes into the manifest.")],
    run: RunOption = None,
    profiler: Annotated[Profiler, typer.Option(help="The profiler to run.")] = "torch",
    steps: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Steps to record.")] = 5,
    warmup_steps: Annotated[
        int, typer.Option(metavar="N", min=0, max=100, help="Steps the profiler runs before those.")
    ] = 1,
    max_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, max=3600, help="When it ends, whatever happens.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="One object on stdout.")] = False,
) -> None:
    """Capture ranks of a job that runs, under the same limits and with the same record as any capture.

    It waits until the traces are stored, and says where. Ctrl-C ends only the waiting. A policy's limits hold: what
    they forbid is refused, with the reason.
    """
    # All that is imported here is so before anything is asked for: CPython ends as if by SIGINT, whoever handles it,
    # where Ctrl-C comes while a dataclass is made.
    from sftriage.agent.captures import ANSWER_GRACE_S
    from sftriage.runs import answers

    directory = find_run(run)
    if not Path(read_info(directory).rings).is_dir():
        raise UsageError(f"{place(directory.path)} is a run that has ended")
    ask = ManualRequest(
        request_id=secrets.token_hex(8),
        ranks=tuple(dict.fromkeys(rank)),
        who=_who(),
        reason=reason,
        profiler=profiler,
        steps=steps,
        warmup_steps=warmup_steps,
        max_seconds=max_seconds,
    )
    try:
        with notices().status("asking") as status:
            # In here already: the run can take the request up before this returns.
            leave(directory, ask)
            decision = answers.answer(directory, ask)
            status.update(f"capturing {', '.join(f'rank {one}' for one in ask.ranks)}")
            ended = answers.ended(directory, decision, max_seconds + ANSWER_GRACE_S[profiler] + NOTED_S)
    except KeyboardInterrupt:
        withdraw(directory, ask)
        say(answers.left_alone(directory, ask))
        raise typer.Exit(INTERRUPTED) from None
    _tell(directory, decision, ended, answers.follow_ups(directory, ended), as_json=as_json)


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "somebody"


def _tell(
    directory: RunDirectory,
    decision: dict[str, Any],
    ended: list[dict[str, Any]],
    followed: list[str],
    *,
    as_json: bool,
) -> None:
    if as_json:
        print_json({"decision": decision, "results": ended})
    for result in ended if not as_json else ():
        if result["state"] == "stored":
            where = directory.path / "captures" / result["capture_id"]
            write(f"rank {result['rank']}: {place(where)}")
    bad = [f"rank {one['rank']} {one['state']}: {one['detail']}" for one in ended if one["state"] != "stored"]
    bad += [f"where it hung is in capture {capture_id}" for capture_id in followed]
    if not ended:
        bad = ["the captures have not ended; `sftriage decisions` will say what became of them"]
    if bad:
        raise CaptureError("; ".join(bad))
