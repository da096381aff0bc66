"""What the status of a TraceCapture says, and what becomes of its trace when it is deleted. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic import ValidationError

from sftriage.kube.fields import Answer, Now, dated, status_of
from sftriage.kube.objects import (
    RequestState,
    StoredArtefact,
    StoredTrace,
    TraceCaptureSpec,
    TraceCaptureStatus,
    capture_of,
)
from sftriage.model.captures import ENDED, CaptureResult
from sftriage.traces.manifest import Manifest, first_problem
from sftriage.words.decisions import caused
from sftriage.words.kube import REPRODUCED, capture_sentence, removal_sentence
from sftriage.words.run import reproduced_words

Body = Mapping[str, Any]
"""An object as the API server has it."""

STORING_S = 600.0
"""Past its time-box, how long a capture may take until its trace is in the store."""


@dataclass(frozen=True, slots=True)
class KnownCapture:
    """What is known of a capture: how far it is, its manifest once it is stored, and where that is.

    ``words`` are what there is to say of one that nobody has answered.
    """

    result: CaptureResult | None = None
    manifest: Manifest | None = None
    store: str = ""
    reference: str = ""
    words: str = ""


def capture_status(body: Body, seen: KnownCapture, now_s: float) -> TraceCaptureStatus:
    """The status of a capture. One whose object makes no sense is refused, whatever is known of it."""
    spec, wrong = capture_of(dict(body))
    result, manifest = seen.result, seen.manifest
    state: RequestState = "refused" if spec is None else "requested" if result is None else result.state
    detail = wrong or (result.detail if result is not None else seen.words)
    found = (*_progress(state, detail, invalid=spec is None), _reproduced(state, manifest))
    generation = body["metadata"].get("generation")
    cause = manifest.cause if manifest is not None else None
    return TraceCaptureStatus(
        observedGeneration=generation,
        conditions=dated(found, status_of(body).get("conditions"), generation, now_s),
        state=state,
        profiler=_profiler(spec, manifest),
        host=None if manifest is None else manifest.capture.host,
        first_step=None if result is None else result.first_step,
        last_step=None if result is None else result.last_step,
        reproduced=None if manifest is None else manifest.holds_fault,
        detail=detail or None,
        cause=None if cause is None or cause.code == "unknown" else caused(cause),
        cost_s=None if manifest is None or manifest.cost is None else manifest.cost.cost_s,
        stored=_stored(seen),
    )


def _profiler(spec: TraceCaptureSpec | None, manifest: Manifest | None) -> Any:
    if manifest is not None:
        return manifest.capture.profiler
    return "auto" if spec is None else spec.profiler


def _progress(state: RequestState, detail: str, *, invalid: bool) -> Iterator[Now]:
    reason, words = "Invalid" if invalid else state.capitalize(), capture_sentence(state, detail)
    accepted: Answer = "Unknown" if state == "requested" else "False" if state == "refused" else "True"
    yield Now("Accepted", accepted, "Accepted" if accepted == "True" else reason, words)
    stored: Answer = "True" if state == "stored" else "False" if state in ENDED else "Unknown"
    yield Now("Stored", stored, reason, words)


def _reproduced(state: RequestState, manifest: Manifest | None) -> Now:
    if manifest is None:
        never = state in ENDED and state != "stored"
        return Now("Reproduced", "Unknown", "NoTrace" if never else "NotYet", REPRODUCED["never" if never else ""])
    found = manifest.reproduced
    if found is None:
        return Now("Reproduced", "Unknown", "NotJudged", REPRODUCED["unjudged"])
    words = reproduced_words(found.answer, manifest.capture.role)
    said = f"{words[0].upper()}{words[1:]}."
    if manifest.holds_fault is None:
        return Now("Reproduced", "Unknown", "Control", said)
    reason = {"yes": "Reproduced", "partly": "PartlyReproduced", "no": "NotReproduced"}[found.answer]
    return Now("Reproduced", "False" if found.answer == "no" else "True", reason, said)


def _stored(seen: KnownCapture) -> StoredTrace | None:
    if seen.manifest is None or not seen.store:
        return None
    files = seen.manifest.artefacts
    return StoredTrace(
        store=seen.store,
        reference=seen.reference,
        size_bytes=sum(one.size_bytes for one in files),
        artefacts=tuple(StoredArtefact(name=one.name, size_bytes=one.size_bytes, sha256=one.sha256) for one in files),
    )


@dataclass(frozen=True, slots=True)
class Removal:
    """What is to become of the trace of an object that is being deleted.

    ``remove`` it from ``stored``; ``release`` the object, for there is nothing to remove; or ``wait`` up to so many
    seconds, for something may come of it yet.
    """

    action: Literal["remove", "release", "wait"]
    words: str
    stored: StoredTrace | None = None
    wait_s: float = 0.0


def removal(body: Body, now_s: float) -> Removal:
    """What is to become of the trace of a capture that is being deleted, by its object alone.

    Whoever ran the capture may be long gone. Of one that runs, the trace would come after its object has gone, and
    nobody would delete it: it is waited for, no longer than it can take.
    """
    status = status_of(body)
    if "stored" in status:
        try:
            stored = StoredTrace.model_validate(status["stored"])
        except ValidationError as error:
            return Removal("wait", removal_sentence("unreadable", problem=first_problem(error)), wait_s=STORING_S)
        return Removal("remove", removal_sentence("stored", place=stored.store), stored)
    if status.get("state") not in ("accepted", "armed", "running"):
        return Removal("release", removal_sentence("nothing"))
    wait_s = _ends_s(body) - now_s
    if wait_s > 0:
        return Removal("wait", removal_sentence("running", wait_s=wait_s), wait_s=wait_s)
    return Removal("release", removal_sentence("unfinished"))


def _ends_s(body: Body) -> float:
    """When a capture that is being deleted has ended at the latest, in seconds since the epoch."""
    spec, _ = capture_of(dict(body))
    box_s = TraceCaptureSpec.model_fields["max_seconds"].default if spec is None else spec.max_seconds
    asked = datetime.fromisoformat(str(body["metadata"]["deletionTimestamp"]).replace("Z", "+00:00"))
    return asked.timestamp() + float(box_s) + STORING_S
