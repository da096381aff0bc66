"""The objects of ``sftriage.dev/v1alpha1``: what people and sftriage write, and what their status contains.

A `TriagePolicy` is that of `sftriage.policy.schema`, with a status. ``kubectl explain`` shows the descriptions. Texts
of a status are clipped, so that the server accepts it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sftriage.model.captures import CaptureState, Cause, Outcome, ProfilerChoice, ReasonCode
from sftriage.model.events import RemedyState
from sftriage.model.verdicts import Label
from sftriage.policy.fields import Name, Rank, Stage
from sftriage.policy.parsing import in_capture, path_text
from sftriage.policy.schema import PolicyModel, ProfilerRun
from sftriage.traces.manifest import FileName, Sha256
from sftriage.words.run import Health
from sftriage.words.verdicts import clock

Body = Mapping[str, Any]
"""An object as the API server returns it."""
MAX_SENTENCE, MAX_LINE, MAX_WORD = 2000, 500, 253


class ObjectModel(BaseModel):
    """A part of an object. Kubernetes' own fields keep its case; those of sftriage are written as in policies."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, from_attributes=True, use_attribute_docstrings=True
    )

    def plain(self) -> dict[str, Any]:
        """As JSON-ready values, without missing ones."""
        return self.model_dump(mode="json", exclude_none=True)


def _clipped(limit: int) -> BeforeValidator:
    def clip(value: object) -> object:
        if not isinstance(value, str):
            return value
        # A server refuses half of a surrogate pair, which a file's name may contain.
        text = value.encode("utf-8", "replace").decode()
        return text if len(text) <= limit else f"{text[: limit - 1]}…"

    return BeforeValidator(clip)


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Sentence = Annotated[str, Field(max_length=MAX_SENTENCE), _clipped(MAX_SENTENCE)]
Line = Annotated[str, Field(max_length=MAX_LINE), _clipped(MAX_LINE)]
Word = Annotated[str, Field(max_length=MAX_WORD), _clipped(MAX_WORD)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[float | None, BeforeValidator(_finite)]
Reasons = Annotated[tuple[Word, ...], Field(max_length=16), BeforeValidator(lambda reasons: reasons[:16])]
Message = Annotated[str, Field(min_length=1, max_length=32_768), _clipped(32_768)]


class Condition(ObjectModel):
    """One condition of an object, in the form usual in Kubernetes."""

    type: Annotated[str, Field(max_length=316)] = Field(description="The condition, such as `Accepted`.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    reason: Annotated[str, Field(max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """The reason, as one word for programs."""
    message: Message = Field(description="The reason, for people.")
    lastTransitionTime: str = Field(  # as Kubernetes writes it
        description="When the status last changed.", json_schema_extra={"format": "date-time"}
    )
    observedGeneration: Count | None = Field(default=None, description="The generation of the object that was checked.")


class ObservedStatus(ObjectModel):
    """Fields of every status."""

    observedGeneration: Count | None = None
    """The generation of the object that this status describes."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=8)] = Field(
        default=(), json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    )
    """The latest conditions; `kubectl wait --for=condition=TYPE` waits for one."""


Answer = Literal["True", "False", "Unknown"]


class Now(NamedTuple):
    """A condition as it is now: whether it holds, and the reason as a word and as a sentence."""

    type: str
    status: Answer
    reason: str
    message: str


def dated(
    body: Mapping[str, Any], found: Iterable[Now], now_s: float, *, others: bool = False
) -> tuple[Condition, ...]:
    """The conditions ``found`` now, each with the time of its last change; ``others`` keeps those of other types.

    ``body`` is the object from the server: anyone may have written its conditions.
    """
    before = {entry.type: entry for entry in readable(status_of(body).get("conditions"))}
    conditions, generation = [], body["metadata"].get("generation")
    for now in found:
        old = before.pop(now.type, None)
        since = clock(now_s) if old is None or old.status != now.status else old.lastTransitionTime
        about = {**now._asdict(), "message": now.message or now.reason}
        conditions.append(Condition(**about, lastTransitionTime=since, observedGeneration=generation))
    return (*conditions, *(before.values() if others else ()))


def readable(conditions: Any) -> list[Condition]:
    """The valid conditions of an object."""
    found = []
    for entry in conditions if isinstance(conditions, Sequence) else ():
        try:
            found.append(Condition.model_validate(entry))
        except ValidationError:
            continue
    return found


def status_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status of an object; empty if it has none yet."""
    status = body.get("status")
    return status if isinstance(status, Mapping) else {}


def condition(body: Mapping[str, Any], kind: str) -> Condition | None:
    """One condition of an object."""
    return next((entry for entry in readable(status_of(body).get("conditions")) if entry.type == kind), None)


GROUP, VERSION = "sftriage.dev", "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"


class Kind(NamedTuple):
    """A kind of object; ``k8s/make_crds.py`` makes its definition."""

    kind: str
    plural: str

    @property
    def crd(self) -> str:
        return f"{self.plural}.{GROUP}"


POLICIES, CAPTURES, REPORTS = KINDS = (
    Kind("TriagePolicy", "triagepolicies"),
    Kind("TraceCapture", "tracecaptures"),
    Kind("TriageReport", "triagereports"),
)

RequestState = Literal["requested", CaptureState]
"""The state of a capture; ``requested`` until a controller answers."""

MAX_HOLDS = 16
MAX_CAPTURES = 32
"""Maximum entries of each in a report, the newest first; the counts include all."""


class TriagePolicyStatus(ObservedStatus):
    """Whether the policy is in force. `Accepted`: it is valid. `Conflicted`: it conflicts with an older policy."""

    rules: Count | None = Field(default=None, description="Number of its rules; missing while the policy is invalid.")


class Requester(PolicyModel):
    """The user who requested the capture, according to the API server."""

    username: str = Field(min_length=1, max_length=1024, description="The user's name.")
    uid: str = Field(default="", max_length=1024, description="The user's uid, if the server has one.")


class CaptureTrigger(PolicyModel):
    """Why sftriage requested the capture: the window, the suspect found in it, and the rule that matched."""

    policy: Name = Field(description="The policy.")
    rule: Name = Field(description="The rule of the policy.")
    label: Cause = Field(default="suspect", description="The label of the verdict.")
    stage: Stage | None = None
    """The stage in which the suspect is slow; missing if all of its stages are slow."""
    first_step: Annotated[int, Field(ge=0, le=2**53)] = Field(description="The first step of the window.")
    last_step: Annotated[int, Field(ge=0, le=2**53)] = Field(description="The last step of the window.")
    gain_s: float | None = Field(default=None, description="Seconds per step that the suspect costs the job.")


class TraceCaptureSpec(ProfilerRun):
    """One capture of one rank, requested by a policy or a person. Its options are those of a policy's `capture`."""

    job: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[^\x00-\x1f\x7f]+$")]
    """The training job, by the name that `sftriage traces list --job` takes."""
    rank: Rank = Field(description="The rank to capture.")
    reason: Annotated[str, Field(min_length=1, max_length=2000)]
    """Why the capture is requested; recorded in the trace's manifest."""
    requested_by: Requester | None = None
    """Who requested the capture. The webhook sets this at admission and ignores what a client writes here. Without the
    webhook the value is not trusted."""
    trigger: CaptureTrigger | None = None
    """Why sftriage requested the capture; missing if a person did."""


class StoredArtefact(ObjectModel):
    """One file of a trace."""

    name: FileName = Field(description="The name of the file.")
    size_bytes: Count = Field(description="The size of the file.")
    sha256: Sha256 = Field(description="The SHA-256 of the file, to verify it.")


class StoredTrace(ObjectModel):
    """Where the trace is stored. Deleting this object deletes the trace, unless it is pinned there."""

    store: Annotated[str, Field(min_length=1, max_length=4096)] = Field(description="The store's URL.")
    reference: Annotated[str, Field(min_length=1, max_length=1024)]
    """The reference of the trace in the store, job/run/capture, which `sftriage traces get` takes."""
    size_bytes: Count = Field(description="The total size.")
    artefacts: Annotated[tuple[StoredArtefact, ...], Field(max_length=16)] = Field(description="Files of the trace.")


class TraceCaptureStatus(ObservedStatus):
    """The progress of the capture, and what it shows.

    `Accepted`: the limits allowed it. `Stored`: its trace is stored. `Reproduced`: the trace contains the fault.
    `Removed`, once the object is being deleted: whether the trace is deleted.
    """

    state: RequestState = "requested"
    """The state: `requested` until a controller answers, then `accepted`, `armed` and `running`; finally `stored`,
    `failed`, `refused` or `expired`."""
    profiler: ProfilerChoice = Field(default="auto", description="The profiler, once sftriage has chosen one.")
    host: Word | None = Field(default=None, description="The host of the rank.")
    first_step: Count | None = Field(default=None, description="The first captured step, warm-up excluded.")
    last_step: Count | None = Field(default=None, description="The last captured step.")
    reproduced: Literal["yes", "no", "partly"] | None = None
    """Whether the captured steps contain the fault."""
    detail: Sentence | None = Field(default=None, description="How the capture went.")
    cause: Sentence | None = Field(default=None, description="Why the rank is slow, if the trace shows it.")
    cost_s: Number = Field(default=None, description="Seconds that the capture cost the job, as far as measured.")
    stored: StoredTrace | None = Field(default=None, description="Where the trace is stored.")


class TriageReportSpec(ObjectModel):
    """The job that the report describes."""

    job: Annotated[str, Field(min_length=1, max_length=253)] = Field(description="The training job.")


class LastVerdict(ObjectModel):
    """The newest judged window."""

    label: Label = Field(description="The label of the verdict.")
    reasons: Reasons = ()
    """Why the verdict names no suspect, as codes; docs/verdicts.md lists what resolves each."""
    first_step: Count = Field(description="The first step of the window.")
    last_step: Count = Field(description="The last step of the window.")
    exposed_s: Number = Field(default=None, description="Seconds per step in the window.")
    sentence: Sentence = Field(description="The verdict as a sentence.")
    outcome: Outcome = Field(description="The decision about the window.")


class Hold(ObjectModel):
    """Windows without a capture, for one reason."""

    outcome: Literal["hold", "throttle"]
    """`hold`: the window names no suspect, or a rule waits; `throttle`: a limit forbade a capture."""
    reason: ReasonCode = Field(description="The reason, as a code.")
    reasons: Reasons = Field(default=(), description="The reasons of the verdict, if it names no suspect.")
    windows: Count = Field(description="Number of such windows.")
    last_step: Count = Field(description="The last step of the newest such window.")
    words: Line = Field(description="The newest such window as a sentence.")
    resolves: Line | None = Field(default=None, description="What would resolve it.")


class ReportedCapture(ObjectModel):
    """One capture of the job."""

    capture_id: Word = Field(description="The id of the capture, which `sftriage traces show` takes.")
    rank: Count = Field(description="The captured rank.")
    state: CaptureState = Field(description="The state of the capture.")
    reproduced: Literal["yes", "no", "partly"] | None = Field(default=None, description="Whether the fault is in it.")
    cause: Line | None = Field(default=None, description="Why the rank is slow, if the trace shows it.")


class StragglerCost(ObjectModel):
    """What stragglers and captures have cost the job so far, in seconds of job time."""

    stragglers_s: Number = None
    """Seconds lost to the named suspects; each step counts once, for the first suspect named."""
    stragglers_rank_hours: Number = Field(default=None, description="The same, multiplied by the ranks that waited.")
    stragglers_cost: Word | None = Field(default=None, description="What that costs, if a rank-hour has a price.")
    captures_s: Number = Field(default=None, description="Seconds lost to captures, as far as measured.")
    wall_s: Number = Field(default=None, description="Seconds that the run has taken so far.")
    useful_s: Number = Field(default=None, description="Those of them that went to useful steps.")


class ReportedAdvice(ObjectModel):
    """What would help against a straggler that stays."""

    straggler: Word = Field(description="The straggler, and its stage.")
    late_s: Number = Field(default=None, description="Seconds per step that it is late.")
    remedy: Word | None = Field(default=None, description="The most effective remedy; missing if none would help.")
    saves_s: Number = Field(default=None, description="Seconds per step that the remedy would save, by its model.")
    break_even_s: Number = Field(default=None, description="Lateness in seconds from which the remedy pays off.")
    words: Line | None = Field(default=None, description="The advice as a sentence.")


class ReportedRemedy(ObjectModel):
    """The remedy that sftriage applied to a straggler that stays, as the policy allows."""

    remedy: Word = Field(description="The remedy.")
    state: RemedyState = Field(description="Advised only, being tried, kept, or undone.")
    rank: Count = Field(description="The straggler.")
    saves_s: Number = Field(default=None, description="Seconds per step that it saves, as far as measured.")
    words: Line = Field(description="The remedy and its state as a sentence.")


class TriageReportStatus(ObservedStatus):
    """The state of the job.

    `Healthy`: nothing exceeds its threshold. `Watched`: a controller judges its steps now. `Injected`: all of its pods
    contain sftriage.
    """

    run: Word | None = Field(default=None, description="The newest run of the job.")
    health: Health | None = Field(default=None, description="The state of the job, in one word.")
    summary: Sentence | None = Field(default=None, description="The state of the job, in a sentence.")
    since_step: Count | None = Field(default=None, description="The step since which this holds, approximately.")
    suspect: Word | None = Field(default=None, description="The suspect and its stage; missing if there is none.")
    node: Word | None = Field(default=None, description="The nodes of the suspect.")
    pod: Word | None = Field(default=None, description="The pods of the job on these nodes.")
    verdict: LastVerdict | None = Field(default=None, description="The newest judged window.")
    windows: Count = Field(default=0, description="Number of judged windows.")
    windows_held: Count = Field(default=0, description="Number of windows with a hold or throttle.")
    holds: Annotated[tuple[Hold, ...], Field(max_length=MAX_HOLDS)] = ()
    """Why nothing was captured, the newest first; one entry for each reason."""
    captures: Annotated[tuple[ReportedCapture, ...], Field(max_length=MAX_CAPTURES)] = ()
    """The newest captures, the newest first."""
    captures_total: Count = Field(default=0, description="Number of captures.")
    cost: StragglerCost = Field(default=StragglerCost(), description="What stragglers and captures have cost.")
    advice: ReportedAdvice | None = None
    """What would help against a straggler that stays; missing while there is none."""
    remedy: ReportedRemedy | None = Field(default=None, description="The newest remedy.")


def capture_of(body: dict[str, Any]) -> tuple[TraceCaptureSpec | None, str]:
    """The spec of a TraceCapture; or None, and its mistakes, one a line."""
    document: Any = body.get("spec")
    try:
        spec = TraceCaptureSpec.model_validate(document)
    except ValidationError as error:
        found = [(problem["loc"], str(problem["msg"])) for problem in error.errors(include_input=False)]
        return None, "\n".join(f"{path_text(('spec', *where))}: {message}" for where, message in found)
    stalled = spec.trigger is not None and spec.trigger.label == "stalled"
    wrong = [f"{path_text(('spec', *where))}: {message}" for where, message in in_capture(document, stalled=stalled)]
    if spec.trigger is not None and spec.trigger.last_step < spec.trigger.first_step:
        wrong.append("spec.trigger.last_step: comes before first_step")
    return (None, "\n".join(wrong)) if wrong else (spec, "")
