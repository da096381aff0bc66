"""What a capture that went wrong leads to. Pure."""

from __future__ import annotations

from dataclasses import replace

from sftriage.policy.state import State, opened, started
from sftriage.records import CaptureRequest, Decision, Trigger
from sftriage.words import SENTENCES

STACKS_S = 30.0
"""The time-box of the stacks of a rank that hangs inside its capture."""

_MOST_OF_AN_ID = 93


def decide_beside(
    hung: CaptureRequest, why: Trigger, state: State, now_s: float, *, step: int, attempt: int = 0
) -> tuple[Decision, Trigger, State]:
    """Have the stacks taken of a rank that hangs inside its capture, and the state to pass to the next call.

    No limit is asked: the capture had its place, and this only looks at a process that does nothing. It counts.

    Args:
        hung: the capture.
        why: why it exists.
        state: what the run has done so far.
        now_s: seconds on a clock that a restart does not reset (the Unix epoch).
        step: the step that the rank is in.
        attempt: which start of the job this is.
    """
    request = CaptureRequest(
        capture_id=f"{hung.capture_id[:_MOST_OF_AN_ID]}-stacks",
        rank=hung.rank,
        profiler="stacks",
        steps=1,
        warmup_steps=0,
        max_seconds=STACKS_S,
        max_bytes=hung.max_bytes,
        role=hung.role,
    )
    decision = Decision(
        time_s=now_s,
        first_step=step,
        last_step=step,
        label=why.label,
        outcome="capture",
        reason="rank_hangs",
        rule=why.rule or None,
        parameters={"rank": hung.rank, "capture_id": hung.capture_id},
        requests=(request,),
        attempt=attempt,
    )
    hangs = SENTENCES[decision.reason][0].format_map(decision.parameters)
    because = replace(why, why=f"{hangs}; {why.why}")
    return decision, because, started(opened(state, now_s), "", (request,), now_s)
