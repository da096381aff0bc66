"""The objects of ``sftriage.dev/v1alpha1``: what people and sftriage write into them, and what their status says.

A `TriagePolicy` is that of `sftriage.policy.schema`, with a status. ``kubectl explain`` shows the descriptions. Texts
of a status are clipped, so that no server refuses it.
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
from sftriage.words.run import Face
from sftriage.words.verdicts import clock

Body = Mapping[str, Any]
"""An object as the API server has it."""
MAX_SENTENCE, MAX_LINE, MAX_WORD = 2000, 500, 253


class ObjectModel(BaseModel):
    """A part of an object. Kubernetes' own words are in its own case, and those of sftriage as in policies."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, from_attributes=True, use_attribute_docstrings=True
    )

    def plain(self) -> dict[str, Any]:
        """As JSON-ready values; what is not there is left out."""
        return self.model_dump(mode="json", exclude_none=True)


def _clipped(limit: int) -> BeforeValidator:
    def clip(value: object) -> object:
        if not isinstance(value, str):
            return value
        # No server takes half of a surrogate pair, which a file's name may hold.
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
    """One condition of an object, as all of Kubernetes has them."""

    type: Annotated[str, Field(max_length=316)] = Field(description="What it is about, such as `Accepted`.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it is so.")
    reason: Annotated[str, Field(max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Why, as one word for programs."""
    message: Message = Field(description="Why, for people.")
    lastTransitionTime: str = Field(  # as Kubernetes writes it
        description="Since when the status is what it is.", json_schema_extra={"format": "date-time"}
    )
    observedGeneration: Count | None = Field(default=None, description="The generation of the object that it is about.")


class ObservedStatus(ObjectModel):
    """What every status has."""

    observedGeneration: Count | None = None
    """The generation of the object that this status is about."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=8)] = Field(
        default=(), json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    )
    """The latest conditions; `kubectl wait --for=condition=TYPE` waits for one."""


Answer = Literal["True", "False", "Unknown"]


class Now(NamedTuple):
    """A condition as it is now: whether it is so, and why, as a word and in words."""

    type: str
    status: Answer
    reason: str
    message: str


def dated(
    body: Mapping[str, Any], found: Iterable[Now], now_s: float, *, others: bool = False
) -> tuple[Condition, ...]:
    """The conditions of an object, each since when it is so.

    Args:
        body: the object as the server has it: anyone may have written its conditions.
        found: what is so now.
        now_s: seconds since the epoch.
        others: keep the conditions of other types that it has.
    """
    before = {one.type: one for one in readable(status_of(body).get("conditions"))}
    conditions, generation = [], body["metadata"].get("generation")
    for now in found:
        old = before.pop(now.type, None)
        since = clock(now_s) if old is None or old.status != now.status else old.lastTransitionTime
        about = {**now._asdict(), "message": now.message or now.reason}
        conditions.append(Condition(**about, lastTransitionTime=since, observedGeneration=generation))
    return (*conditions, *(before.values() if others else ()))


def readable(conditions: Any) -> list[Condition]:
    """The valid ones of the conditions that an object has."""
    found = []
    for one in conditions if isinstance(conditions, Sequence) else ():
        try:
            found.append(Condition.model_validate(one))
        except ValidationError:
            continue
    return found


def status_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status that an object has; empty where there is none yet."""
    status = body.get("status")
    return status if isinstance(status, Mapping) else {}


def condition(body: Mapping[str, Any], kind: str) -> Condition | None:
    """One condition of an object, as the server has it."""
    return next((one for one in readable(status_of(body).get("conditions")) if one.type == kind), None)


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
"""How far a capture is: one that nobody has answered yet is ``requested``."""

MAX_HOLDS = 16
MAX_CAPTURES = 32
"""Of each so many are named in a report, the newest; all of them are counted."""


class TriagePolicyStatus(ObservedStatus):
    """Whether the policy is in force. `Accepted`: it is valid. `Conflicted`: an older one forbids it."""

    rules: Count | None = Field(default=None, description="How many rules it has; not there while it is not valid.")


class Requester(PolicyModel):
    """Who asked, as the API server knows them."""

    username: str = Field(min_length=1, max_length=1024, description="The user's name.")
    uid: str = Field(default="", max_length=1024, description="The user's uid, where the server has one.")


class CaptureTrigger(PolicyModel):
    """Why sftriage asked: the window of steps, the suspect found in it, and the rule that matched."""

    policy: Name = Field(description="The policy.")
    rule: Name = Field(description="Its rule.")
    label: Cause = Field(default="suspect", description="The verdict.")
    stage: Stage | None = None
    """The stage that the suspect is slow in; not there where all of them are slow alike."""
    first_step: Annotated[int, Field(ge=0, le=2**53)] = Field(description="The first step of the window.")
    last_step: Annotated[int, Field(ge=0, le=2**53)] = Field(description="The last step of the window.")
    gain_s: float | None = Field(default=None, description="Seconds a step that the suspect costs the job.")


class TraceCaptureSpec(ProfilerRun):
    """One capture of one rank, asked for by a policy or by a person. The options are those of a policy's `capture`."""

    job: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[^\x00-\x1f\x7f]+$")]
    """The training job, as `sftriage traces list --job` calls it."""
    rank: Rank = Field(description="The rank to capture.")
    reason: Annotated[str, Field(min_length=1, max_length=2000)]
    """Why; it goes into the trace's manifest."""
    requested_by: Requester | None = None
    """Who asked. Stamped at admission, whatever a client says here; where no admission stamps it, it is not
    believed."""
    trigger: CaptureTrigger | None = None
    """Why sftriage asked; not there where a person did."""


class StoredArtefact(ObjectModel):
    """One file of a trace."""

    name: FileName = Field(description="Its name.")
    size_bytes: Count = Field(description="Its size.")
    sha256: Sha256 = Field(description="What it is known again by.")


class StoredTrace(ObjectModel):
    """Where the trace is; what a deletion of this object deletes, unless it is pinned there."""

    store: Annotated[str, Field(min_length=1, max_length=4096)] = Field(description="The store's URL.")
    reference: Annotated[str, Field(min_length=1, max_length=1024)]
    """Its place there, job/run/capture; what `sftriage traces get` takes."""
    size_bytes: Count = Field(description="The size of all of it.")
    artefacts: Annotated[tuple[StoredArtefact, ...], Field(max_length=16)] = Field(description="Its files.")


class TraceCaptureStatus(ObservedStatus):
    """How far the capture is, and what it shows.

    `Accepted`: the limits allowed it. `Stored`: its trace is there. `Reproduced`: the fault is in it. `Removed`: of one
    that is being deleted, whether its trace is gone.
    """

    state: RequestState = "requested"
    """How far it is: `requested` until somebody answers, then `accepted`, `armed` and `running`; it ends as `stored`,
    `failed`, `refused` or `expired`."""
    profiler: ProfilerChoice = Field(default="auto", description="The profiler: the one chosen, once that is known.")
    host: Word | None = Field(default=None, description="Where the rank ran.")
    first_step: Count | None = Field(default=None, description="The first captured step, warm-up excluded.")
    last_step: Count | None = Field(default=None, description="The last captured step.")
    reproduced: Literal["yes", "no", "partly"] | None = None
    """Whether the fault was there while it was captured."""
    detail: Sentence | None = Field(default=None, description="What there is to say of how it went.")
    cause: Sentence | None = Field(default=None, description="Why the rank is slow, where the trace shows that.")
    cost_s: Number = Field(default=None, description="Seconds of the job's time that it cost, as far as measured.")
    stored: StoredTrace | None = Field(default=None, description="Where its trace is.")


class TriageReportSpec(ObjectModel):
    """Which job the report is of."""

    job: Annotated[str, Field(min_length=1, max_length=253)] = Field(description="The training job.")


class LastVerdict(ObjectModel):
    """The newest window that was judged."""

    label: Label = Field(description="The verdict.")
    reasons: Reasons = ()
    """Why nobody is named, as codes; docs/verdicts.md says what resolves each."""
    first_step: Count = Field(description="The first step of the window.")
    last_step: Count = Field(description="The last step of the window.")
    exposed_s: Number = Field(default=None, description="Seconds that a step of it took.")
    sentence: Sentence = Field(description="All of it in a sentence.")
    outcome: Outcome = Field(description="What was done about it.")


class Hold(ObjectModel):
    """Windows on which nothing heavy was started, for one reason."""

    outcome: Literal["hold", "throttle"]
    """`hold`: nobody can be named, or a rule waits; `throttle`: a limit kept a profiler from starting."""
    reason: ReasonCode = Field(description="The reason, as a code.")
    reasons: Reasons = Field(default=(), description="The verdict's own reasons, where it names nobody.")
    windows: Count = Field(description="On how many windows.")
    last_step: Count = Field(description="The last step of the newest of them.")
    words: Line = Field(description="The newest in a sentence.")
    resolves: Line | None = Field(default=None, description="What would resolve it.")


class ReportedCapture(ObjectModel):
    """One capture of the job."""

    capture_id: Word = Field(description="Its id, which `sftriage traces show` takes.")
    rank: Count = Field(description="The captured rank.")
    state: CaptureState = Field(description="How far it is, or how it ended.")
    reproduced: Literal["yes", "no", "partly"] | None = Field(default=None, description="Whether the fault is in it.")
    cause: Line | None = Field(default=None, description="Why the rank is slow, where the trace shows that.")


class StragglerCost(ObjectModel):
    """What stragglers and captures have cost the job so far, in seconds of all of its ranks at once."""

    stragglers_s: Number = None
    """What those cost that were named: each step counted once, whoever was named first."""
    stragglers_rank_hours: Number = Field(default=None, description="The same, times the ranks that waited.")
    captures_s: Number = Field(default=None, description="What captures cost, as far as that was measured.")


class ReportedAdvice(ObjectModel):
    """What would help against a straggler that stays, and what is done about it."""

    straggler: Word = Field(description="Who it is, and where.")
    late_s: Number = Field(default=None, description="By how much of a step.")
    remedy: Word | None = Field(default=None, description="What would help most; not there where nothing would.")
    saves_s: Number = Field(default=None, description="What that saves of a step, by its model.")
    break_even_s: Number = Field(default=None, description="From how late a straggler on it pays.")
    words: Line | None = Field(default=None, description="It in a sentence.")


class ReportedRemedy(ObjectModel):
    """What was done by itself about a straggler that stays, as the policy allows it."""

    remedy: Word = Field(description="What.")
    state: RemedyState = Field(description="Advised alone, being tried, kept, or undone.")
    rank: Count = Field(description="The straggler.")
    saves_s: Number = Field(default=None, description="What it saves of a step, as far as that was measured.")
    words: Line = Field(description="It in a sentence.")


class TriageReportStatus(ObservedStatus):
    """How the job stands. `Healthy`: nothing is over its threshold. `Watched`: somebody judges its steps now."""

    run: Word | None = Field(default=None, description="The newest run of the job.")
    health: Face | None = Field(default=None, description="How it stands, in one word.")
    summary: Sentence | None = Field(default=None, description="How it stands, in a sentence.")
    since_step: Count | None = Field(default=None, description="Since which step, about.")
    suspect: Word | None = Field(default=None, description="Who is named, and where; not there while nobody is.")
    verdict: LastVerdict | None = Field(default=None, description="The newest window that was judged.")
    windows: Count = Field(default=0, description="How many windows were judged.")
    windows_held: Count = Field(default=0, description="On how many of them something was held or throttled.")
    holds: Annotated[tuple[Hold, ...], Field(max_length=MAX_HOLDS)] = ()
    """Why nothing heavy was started, the newest first; one for each reason."""
    captures: Annotated[tuple[ReportedCapture, ...], Field(max_length=MAX_CAPTURES)] = ()
    """The newest captures, the newest first."""
    captures_total: Count = Field(default=0, description="How many captures there are.")
    cost: StragglerCost = Field(default=StragglerCost(), description="What stragglers and captures have cost.")
    advice: ReportedAdvice | None = None
    """What would help against a straggler that stays; not there while there is none."""
    remedy: ReportedRemedy | None = Field(default=None, description="What was done about one last.")


def capture_of(body: dict[str, Any]) -> tuple[TraceCaptureSpec | None, str]:
    """What a TraceCapture asks for; or None, and what is wrong with it, a line for each mistake."""
    given: Any = body.get("spec")
    try:
        spec = TraceCaptureSpec.model_validate(given)
    except ValidationError as error:
        found = [(one["loc"], str(one["msg"])) for one in error.errors(include_input=False)]
        return None, "\n".join(f"{path_text(('spec', *where))}: {message}" for where, message in found)
    stalled = spec.trigger is not None and spec.trigger.label == "stalled"
    wrong = [f"{path_text(('spec', *where))}: {message}" for where, message in in_capture(given, stalled=stalled)]
    if spec.trigger is not None and spec.trigger.last_step < spec.trigger.first_step:
        wrong.append("spec.trigger.last_step: comes before first_step")
    return (None, "\n".join(wrong)) if wrong else (spec, "")
