"""The evidence of a job of four ranks on two hosts that hangs at step 60, its capture, and its cause."""

from dataclasses import replace
from pathlib import Path

import msgspec

from sftriage.model.captures import CaptureRequest
from sftriage.model.events import CauseFound, Place
from sftriage.model.hangs import (
    HANG_NAME,
    Call,
    GroupCalls,
    Hang,
    HangEvidence,
    RankEvidence,
    SourceLine,
    ThreadEvidence,
)
from sftriage.traces.manifest import CauseInfo, Manifest, PlaceInfo
from sftriage.traces.store import FileToStore, LocalStore
from sftriage.words.hangs import hang_next_step, hang_sentence
from tests.unit.conftest import manifest_of

WAIT = SourceLine("wait", "/usr/lib/python3.11/threading.py", 327)
REDUCE = Call("all_reduce", ((),), ("Float",), (SourceLine("train", "/job/train.py", 91, own=True),))
GATHER = Call("all_gather", ((3,),), ("Float",), (SourceLine("validate", "/job/train.py", 52, own=True),))
WHOLE_JOB = CaptureRequest("c-9", 2, "stacks", 1, 0, 10.0, 2**29, options={"whole_job": True, "detail": [0, 1, 2, 3]})


def in_call(rank: int, call: Call, stage: str) -> RankEvidence:
    """A rank that waits in the 126th call of the default group."""
    group = GroupCalls("0", "default_pg", ((0, 3, 1),), 125, (-1, 0), (126,))
    main = ThreadEvidence("MainThread", main=True, frames=(WAIT, *call.frames))
    host = f"node-{rank // 2 + 1}"
    return RankEvidence(
        rank, host, 100 + rank, 60, stage, answered=True, calls=(call,), groups=(group,), threads=(main,)
    )


RANKS = tuple(
    in_call(rank, GATHER if rank == 2 else REDUCE, "forward" if rank == 2 else "backward") for rank in range(4)
)
HANG = Hang(
    "different_collective",
    (2,),
    ("node-2",),
    group_ranks=(0, 1, 2, 3),
    number=126,
    call=GATHER,
    others=(0, 1, 3),
    other_call=REDUCE,
    numbers={"hosts": 2.0},
)
EVIDENCE = HangEvidence(1_800_000_000.0, 0, 60, 4, RANKS, HANG)
SENTENCE, NEXT_STEP = hang_sentence(HANG), hang_next_step(HANG)
FOUND = CauseFound(
    1_800_000_061.0, "c-9", 2, HANG.kind, True, SENTENCE, Place("validate", "/job/train.py", 52), next_step=NEXT_STEP
)


def put_hang(root: Path, evidence: HangEvidence = EVIDENCE, *, damaged: bool = False) -> Manifest:
    """Put the capture into the store of a run."""
    content = msgspec.json.encode(evidence)
    path = root / f"c-9.{HANG_NAME}"
    path.write_bytes(b"{" if damaged else content)
    place = PlaceInfo(function="validate", file="/job/train.py", line=52)
    cause = CauseInfo(code=HANG.kind, sure=True, sentence=SENTENCE, next_step=NEXT_STEP, place=place)

    def made(artefacts):
        manifest = manifest_of(
            "c-9", artefacts[0], profiler="stacks", stage=None, first_step=60, steps=1, window=(60, 60)
        )
        trigger = manifest.trigger.model_copy(update={"label": "stalled"})
        return manifest.model_copy(update={"trigger": trigger, "hang": cause})

    return LocalStore(root).put_files("c-9", [FileToStore(path, HANG_NAME, "application/json", compress=False)], made)


def with_hang(**about) -> HangEvidence:
    return replace(EVIDENCE, **about)
