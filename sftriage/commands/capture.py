"""``sftriage capture``: capture ranks of a running job, because somebody wants to see them."""

from __future__ import annotations

import getpass
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from sftriage.commands.options import RunOption
from sftriage.commands.output import notices, print_json, results
from sftriage.errors import CaptureError, UsageError
from sftriage.records import ManualRequest, Profiler, plain
from sftriage.runs.asks import leave
from sftriage.runs.directory import RunDirectory, find_run, read_info
from sftriage.words import decision_values, place

POLL_S = 0.1
ANSWER_S = 15.0
"""Who runs the job looks for asks four times a second; a long turn of its loop is over by then."""
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
    path = leave(directory, ask)
    try:
        with notices().status("asking") as status:
            decision = _answer(directory, ask, path)
            status.update(f"capturing {', '.join(f'rank {one}' for one in ask.ranks)}")
            from sftriage.agent.captures import ANSWER_GRACE_S

            grace_s = ANSWER_GRACE_S[profiler] + NOTED_S
            ended = _waited(lambda: _ended(directory, _ids(decision)), max_seconds + grace_s)
    except KeyboardInterrupt:
        path.unlink(missing_ok=True)
        notices().print(f"sftriage: {_left_alone(directory, ask)}", soft_wrap=True, markup=False)
        raise typer.Exit(INTERRUPTED) from None
    _tell(directory, decision, ended or [], as_json=as_json)


def _answer(directory: RunDirectory, ask: ManualRequest, path: Path) -> dict[str, Any]:
    """The decision to capture.

    Raises:
        UsageError: nobody answers; the ask is withdrawn.
        CaptureError: it is another decision.
    """
    decision: dict[str, Any] | None = _waited(lambda: _decision(directory, ask), ANSWER_S)
    if decision is None:
        path.unlink(missing_ok=True)
        raise UsageError(
            f"nobody answers in {place(directory.path)}: does `sftriage run` still watch the job? If not, "
            "`sftriage attach` takes over"
        )
    if decision["outcome"] != "capture":
        raise CaptureError(f"not captured: {decision['words']}. {decision['resolves']}".strip())
    return decision


def _left_alone(directory: RunDirectory, ask: ManualRequest) -> str:
    """What becomes of a capture that is waited for no longer."""
    decision, where = _decision(directory, ask), f"--run {place(directory.path)}"
    ids = [] if decision is None else _ids(decision)
    if not ids:
        return f"withdrawn before it was answered; `sftriage decisions {where}` shows it if it was taken up just now"
    shown = ", ".join(f"`sftriage traces show {capture_id} {where}`" for capture_id in ids)
    return f"the capture goes on by itself, and is stored once it has ended: {shown}"


def _ids(decision: dict[str, Any]) -> list[str]:
    return [request["capture_id"] for request in decision["requests"]]


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "somebody"


def _waited(look: Callable[[], Any], deadline_s: float) -> Any:
    """What ``look`` finds, as soon as it finds something; None if it does not."""
    end_s = time.monotonic() + deadline_s
    while (found := look()) is None and time.monotonic() < end_s:
        time.sleep(POLL_S)
    return found


def _decision(directory: RunDirectory, ask: ManualRequest) -> dict[str, Any] | None:
    from sftriage.events import ManualRequestDecided
    from sftriage.runs.decisions import decided_in
    from sftriage.runs.journal import read_journal

    decided = decided_in(list(read_journal(directory.decisions)))
    manual = (
        one for one in decided if isinstance(one, ManualRequestDecided) and one.request.request_id == ask.request_id
    )
    found = next(manual, None)
    return None if found is None else decision_values(found.decision)


def _ended(directory: RunDirectory, ids: list[str]) -> list[dict[str, Any]] | None:
    """What became of the captures, once all of them have ended."""
    from sftriage.runs.decisions import results_in
    from sftriage.runs.journal import read_journal

    results = results_in(list(read_journal(directory.decisions)))
    return [plain(results[capture_id]) for capture_id in ids] if results.keys() >= set(ids) else None


def _follow_ups(directory: RunDirectory, ended: list[dict[str, Any]]) -> list[str]:
    """The captures that these have led to: the stacks of a rank that hung."""
    from sftriage.events import FollowUpDecided
    from sftriage.runs.decisions import decided_in
    from sftriage.runs.journal import read_journal

    ids = {result["capture_id"] for result in ended}
    decided = decided_in(list(read_journal(directory.decisions)))
    led = [one.decision for one in decided if isinstance(one, FollowUpDecided) and one.capture_id in ids]
    return [request.capture_id for decision in led for request in decision.requests]


def _tell(directory: RunDirectory, decision: dict[str, Any], ended: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json({"decision": decision, "results": ended})
    for result in ended if not as_json else ():
        if result["state"] == "stored":
            where = directory.path / "captures" / result["capture_id"]
            results().print(f"rank {result['rank']}: {place(where)}", soft_wrap=True, markup=False)
    bad = [f"rank {one['rank']} {one['state']}: {one['detail']}" for one in ended if one["state"] != "stored"]
    bad += [f"where it hung is in capture {capture_id}" for capture_id in _follow_ups(directory, ended)]
    if not ended:
        bad = ["the captures have not ended; `sftriage decisions` will say what became of them"]
    if bad:
        raise CaptureError("; ".join(bad))
