"""What a heavy trace shows of one stage on one rank: plain data, so that a manifest can carry it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sftriage.records import MAX_STAGE_NAME_BYTES
from sftriage.traces.fields import Count, Model, Number, Rank, Sentence, Word, text

MAX_SHARES = 20

Kind = Literal["operator", "python", "call", "annotation"]


class StageProfile(Model):
    """What one rank did in the stage: means a step, in seconds.

    ``working_s``, ``waiting_s`` and ``unseen_s`` sum to ``stage_s``: some thread of the process was in an operator, a
    call or a Python function; none was, but one waited, in a collective, for the device or for another process; or
    there was nothing in the trace but the stage itself. ``device_s`` is how long the device worked on what was launched
    in the stage, whenever it did, and ``collective_s`` how much of that were collectives.
    """

    source: Sentence
    rank: Rank | None
    first_step: Count
    last_step: Count
    steps: Count
    step_s: Number
    stage_s: Number
    working_s: Number
    waiting_s: Number
    unseen_s: Number
    device_s: Number
    collective_s: Number
    kernels: Number
    launches: Number
    launch_s: Number


class Share(Model):
    """What one name took of the stage as self time, over all threads: means a step. ``control`` is the control rank."""

    name: Word
    kind: Kind
    waits: bool
    self_s: Number
    calls: Number
    control_self_s: Number | None = None


class Findings(Model):
    """What filled the suspect stage, beside the same stage of a control rank where there is one.

    Where it is known which of the captured steps have the fault, and not all have, those alone are looked at:
    ``of_steps`` is how many there are with the others. ``control`` is another ``rank`` in the same steps, or else the
    other ``steps`` of the suspect itself: ``beside`` says which.
    """

    stage: Annotated[str, text(MAX_STAGE_NAME_BYTES)]
    suspect: StageProfile
    control: StageProfile | None = None
    shares: Annotated[tuple[Share, ...], Field(max_length=MAX_SHARES)]
    summary: Sentence
    of_steps: Count | None = None
    beside: Literal["rank", "steps"] = "rank"
