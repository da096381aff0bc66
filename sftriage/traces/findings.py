"""What a manifest says of what filled the suspect stage, and why."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import Field

from sftriage.model.windows import MAX_STAGE_NAME_BYTES
from sftriage.traces.documents import Count, DocumentModel, Number, Rank, Sentence, Word, text

MAX_SHARES = MAX_KERNELS = 20

Kind = Literal["operator", "python", "call", "annotation"]


class StageProfile(DocumentModel):
    """What one rank did in the stage: means a step, in seconds.

    ``working_s``, ``waiting_s`` and ``unseen_s`` sum to ``stage_s``: some thread of the process was in an operator, a
    call or a Python function; none was, but one waited, in a collective, for the device or for another process; or
    there was nothing in the trace but the stage itself. ``device_s`` is how long the device worked on what was launched
    in the stage, whenever it did, ``collective_s`` and ``device_own_s`` how long on collectives and on all else, which
    may be at once; ``device_idle_s`` is how long it had nothing to do before it was through, waiting for its host.
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
    device_own_s: Number | None = None
    device_idle_s: Number | None = None


class Share(DocumentModel):
    """What one name took of the stage as self time, over all threads: means a step. ``control`` is the control rank."""

    name: Word
    kind: Kind
    waits: bool
    self_s: Number
    calls: Number
    control_self_s: Number | None = None


class KernelShare(DocumentModel):
    """What the device took for one kernel, or copy, that was launched in the stage: means a step, collectives apart.

    ``operator`` launched it, and is ``within`` another one, "" where the trace does not say. ``control`` is the control
    rank.
    """

    name: Word
    operator: Word | Literal[""]
    within: Word | Literal[""]
    device_s: Number
    calls: Number
    control_device_s: Number | None = None

    @property
    def words(self) -> str:
        """Its name, and who launches it."""
        by = " in ".join(one for one in (self.operator, self.within) if one)
        return f"{self.name} ({by})" if by else self.name

    @property
    def more_s(self) -> float:
        """By how much it took longer than on the control."""
        return self.device_s - (self.control_device_s or 0.0)


CauseCode = Literal[
    "sleep",
    "dataloader_workers",
    "lock",
    "subprocess",
    "output",
    "database",
    "network",
    "disk",
    "checkpoint",
    "garbage_collection",
    "recompilation",
    "collective",
    "python",
    "operator",
    "kernel",
    "blocked",
    "gil",
    "descheduled",
    "stopped",
    "cgroup_throttled",
    "page_faults",
    "memory_pressure",
    "gpu_throttled",
    "unknown",
]


class PlaceInfo(DocumentModel):
    """A line of the program: in which function and file, and what stands there where that could be read."""

    function: Word
    file: Sentence
    line: Count
    source: Sentence = ""


class CauseInfo(DocumentModel):
    """Why the suspect stage took so long.

    ``code`` says what it is, ``place`` where, ``took_s`` of the stage's ``stage_s`` a step; ``control_s`` is what the
    same place took the rank that it is ``compared_with``, or the suspect's other steps where that is None. It is
    ``sure`` where most of what the stage took longer is in that one place, and enough samples say so.
    """

    code: CauseCode
    sure: bool
    sentence: Sentence
    next_step: Sentence
    place: PlaceInfo | None = None
    compared_with: Rank | None = None
    took_s: Number | None = None
    control_s: Number | None = None

    @property
    def short(self) -> str:
        """It in a few words, for a line of a list: what is called, or is done, and at which line."""
        what = self.code.replace("_", " ")
        if self.place is None:
            return what
        called = _CALLED.search(self.place.source)
        if self.code == "python":
            what = self.place.function
        elif called is not None and self.code in _AT_A_CALL:
            what = called[1]
        return f"{what} at {PurePath(self.place.file).name}:{self.place.line}"


_CALLED = re.compile(r"\b([A-Za-z_][\w.]*)\(")
_AT_A_CALL: frozenset[CauseCode] = frozenset(
    {"sleep", "subprocess", "output", "database", "network", "disk", "checkpoint", "collective"}
)
"""What is done by the call that stands in its line."""


class Findings(DocumentModel):
    """What filled the suspect stage, beside the same stage of a control rank where there is one.

    Where it is known which of the captured steps have the fault, and not all have, those alone are looked at:
    ``of_steps`` is how many there are with the others. ``control`` is another ``rank`` in the same steps, or else the
    other ``steps`` of the suspect itself: ``beside`` says which. ``counted`` is what the kernel counted for the
    suspect's process over its peers', a step (see `model.counters`), of what is known; and as ``gpu_s`` what a lower
    clock of its GPU cost.
    """

    stage: Annotated[str, text(MAX_STAGE_NAME_BYTES)]
    suspect: StageProfile
    control: StageProfile | None = None
    shares: Annotated[tuple[Share, ...], Field(max_length=MAX_SHARES)]
    kernels: Annotated[tuple[KernelShare, ...], Field(max_length=MAX_KERNELS)] = ()
    summary: Sentence
    of_steps: Count | None = None
    beside: Literal["rank", "steps"] = "rank"
    counted: Annotated[dict[Word, Number], Field(max_length=64)] | None = None
    cause: CauseInfo | None = None
