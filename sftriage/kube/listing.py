"""Reports and captures of a cluster as rows: which job is slow, and where its trace is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sftriage.errors import InputError, UsageError
from sftriage.kube.jobs import JOB_ID_ANNOTATION, JOB_LABEL, annotations_of, labels_of, mapping
from sftriage.kube.objects import Body, Condition, StoredTrace, condition, status_of
from sftriage.model.captures import ENDED
from sftriage.traces.manifest import first_problem
from sftriage.words.kube import CAPTURE_STATES

MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A capture; ``because_of`` are the steps of the window that led to it, None where a person requested it."""

    namespace: str
    name: str
    job: str
    rank: int
    node: str
    stage: str
    because_of: tuple[int, int] | None
    steps: tuple[int, int] | None
    profiler: str
    state: str
    reproduced: str
    cause: str
    store: str
    reference: str
    created: str

    def distance_from(self, step: int) -> int | None:
        """Steps between this capture and a step: 0 if captured, or in the window that led to the capture."""
        spans = [span for span in (self.steps, self.because_of) if span is not None]
        return min((max(first - step, step - last, 0) for first, last in spans), default=None)


def is_of(body: Body, job: str) -> bool:
    """Whether a report or capture belongs to a job, given by name, id on the hub, or name of its objects."""
    names = (
        mapping(body, "spec").get("job"),
        annotations_of(body).get(JOB_ID_ANNOTATION),
        labels_of(body).get(JOB_LABEL),
    )
    return job in names


def job_row(body: Body) -> dict[str, Any]:
    """The state of a job, by its report. Texts are "" and numbers None while they are unknown.

    ``lost_s`` is what stragglers have cost, in seconds of all ranks at once.
    """
    status, watched = status_of(body), condition(body, "Watched")
    return {
        "namespace": body["metadata"]["namespace"],
        "report": body["metadata"]["name"],
        "job": str(mapping(body, "spec").get("job", "")),
        "health": status.get("health", ""),
        "suspect": status.get("suspect", ""),
        "node": status.get("node", ""),
        "pod": status.get("pod", ""),
        "since_step": status.get("since_step"),
        "lost_s": mapping(status, "cost").get("stragglers_s"),
        "captures": status.get("captures_total", 0),
        "watched": None if watched is None else watched.status == "True",
        "summary": f"{_why(watched)} {status.get('summary', '')}".strip(),
    }


def _why(watched: Condition | None) -> str:
    """Why a job is not watched, if there is something to do about it."""
    needs = watched is not None and watched.status == "False" and watched.reason not in ("Ended", "NoRun")
    return watched.message if needs and watched is not None else ""


def trace_row(body: Body) -> TraceRow:
    """A capture, by its object."""
    spec, status = mapping(body, "spec"), status_of(body)
    trigger, stored = mapping(spec, "trigger"), mapping(status, "stored")
    return TraceRow(
        namespace=body["metadata"]["namespace"],
        name=body["metadata"]["name"],
        job=str(spec.get("job", "")),
        rank=int(spec.get("rank", 0)),
        node=status.get("host", ""),
        stage=trigger.get("stage", ""),
        because_of=_span(trigger),
        steps=_span(status),
        profiler=status.get("profiler") or spec.get("profiler", "auto"),
        state=status.get("state", "requested"),
        reproduced=status.get("reproduced", ""),
        cause=status.get("cause", ""),
        store=stored.get("store", ""),
        reference=stored.get("reference", ""),
        created=body["metadata"].get("creationTimestamp", ""),
    )


def _span(holder: Mapping[str, Any]) -> tuple[int, int] | None:
    first, last = holder.get("first_step"), holder.get("last_step")
    return None if first is None or last is None else (int(first), int(last))


def of_step(rows: Iterable[TraceRow], step: int) -> tuple[list[TraceRow], bool]:
    """The captures of a step, or else the nearest one; and whether they contain the step itself."""
    known = [(away, row) for row in rows if (away := row.distance_from(step)) is not None]
    holding = [row for away, row in known if away == 0]
    nearest = sorted(known, key=lambda entry: entry[0])[:1]
    return (holding, True) if holding else ([row for _, row in nearest], False)


def best(bodies: Iterable[Body], step: int | None, rank: int | None) -> Body:
    """The most useful stored capture: the newest with the step and the fault; raises UsageError if none is stored."""
    found = [(trace_row(body), body) for body in bodies]
    stored = [(row, body) for row, body in found if row.store and rank in (None, row.rank)]
    if step is not None:
        stored = [(row, body) for row, body in stored if row.distance_from(step) == 0]
    if not stored:
        of = ("" if rank is None else f" of rank {rank}") + ("" if step is None else f" of step {step}")
        names = [f"{row.name} ({row.state})" for row, _ in found]
        named = ", ".join(names[:MAX_NAMED] + ["..."] * (len(names) > MAX_NAMED))
        others = f"; captures of the job: {named}" if found else ""
        raise UsageError(f"no stored trace{of}{others}")
    fault = {"yes": 2, "partly": 1}
    return max(stored, key=lambda entry: (fault.get(entry[0].reproduced, 0), entry[0].created, entry[0].name))[1]


def stored_of(body: Body) -> StoredTrace:
    """The location of a capture's trace; raises UsageError without one, InputError if its status cannot be read."""
    status, name = status_of(body), body["metadata"]["name"]
    if "stored" not in status:
        state, _, detail = progress_of(body)
        if state == "stored":
            detail = "Only the job's controller has it. Configure a store for the next ones."
        raise UsageError(f"{name} has no trace in a store: {state}. {detail}".strip())
    try:
        return StoredTrace.model_validate(status["stored"])
    except ValidationError as error:
        raise InputError(f"cannot read the location of the trace of {name}: {first_problem(error)}") from None


def progress_of(body: Body) -> tuple[str, bool, str]:
    """The state of a capture, whether it is final, and the detail."""
    status = status_of(body)
    state = str(status.get("state", "requested"))
    if "deletionTimestamp" in body["metadata"]:
        return state, True, "Being deleted."
    return state, state in ENDED, status.get("detail") or CAPTURE_STATES.get(state, "")
