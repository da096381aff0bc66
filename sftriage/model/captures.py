"""Decisions about captures, from a request to its result: frozen records, standard library only.

The trainer's process imports this module: a request is carried out there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from sftriage.model.verdicts import Clock, Pattern, Scope

CAPTURE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
"""The pattern of a capture id: a plain file name, never hidden, without separators."""
Cause = Literal["healthy", "suspect", "stalled", "needs_evidence", "asked"]
"""The cause of a decision: a verdict's label, or a person's request."""
Outcome = Literal["capture", "hold", "throttle", "ignore"]
Profiler = Literal["torch", "nsys", "stacks"]
ProfilerChoice = Literal["auto", "torch", "nsys", "stacks"]
"""The requested profiler; sftriage replaces ``auto`` once the stage and the clock are known."""
ChoiceReason = Literal["", "host_stage", "compute_stage", "device_clock", "whole_rank", "stands_still", "left_open"]
"""Why ``auto`` chose a profiler; "" if it was named."""
LeftOpen = Literal["", "operators", "stacks", "system"]
"""What a capture of the fault lacks and another profiler would show: operators and kernels, Python stacks, or the whole
process; "" if it shows where the time went."""
SAMPLE_STACKS = "sample_stacks"
"""The option that has the trainer sample its Python stacks; torch's ``with_stack`` traces every call."""
WHOLE_JOB, DETAIL = "whole_job", "detail"
"""The options of a capture of a whole job that hangs: it is one, and the ranks whose stacks it has in detail."""
SAMPLES_PER_SECOND = "samples_per_second"
"""The option for the maximum rate; an integer from 1 to 1,000."""
Role = Literal["suspect", "control"]
CaptureState = Literal["accepted", "armed", "running", "stored", "failed", "refused", "expired"]
ENDED: frozenset[CaptureState] = frozenset({"stored", "failed", "refused", "expired"})
"""The final states of a capture."""
CaptureCode = Literal["", "no_nvtx"]
"""The code of a capture's detail, for programs; "" if there is none."""
_OfVerdict = Literal["healthy", "undecided", "standstill", "no_rank_named", "one_off", "contended"]
_OfSystem = Literal["descheduled", "cgroup_throttled", "stopped", "page_faults", "memory_pressure"]
_OfRules = Literal["no_rule_matched", "observe_only", "pending", "rule_matched", "follow_up", "asked", "rank_hangs"]
_OfBudgets = Literal["captures_per_run", "active", "overhead_budget", "captures_per_hour", "captures_per_day"]
_OfEarlier = Literal["place_kept", "already_captured", "cooldown", "after_failures"]
_OfRanks = Literal["rank_busy", "concurrent_ranks", "no_such_rank", "captures_left"]
ReasonCode = Literal[_OfVerdict, _OfSystem, _OfRules, _OfBudgets, _OfEarlier, _OfRanks]
"""The reason of a decision; `words` has the sentence of each."""
Parameter: TypeAlias = str | int | float | bool | tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Trigger:
    """Why a capture exists: the window, the suspect, and the rule of the policy that requested it.

    ``why`` is the reason as a sentence. ``chosen`` is why ``auto`` chose this profiler, and ``follows`` the earlier,
    inconclusive capture of the same suspect. ``clock`` is the verdict's, or "" if unrecorded.
    """

    first_step: int
    last_step: int
    label: Cause
    scope: Scope
    ranks: tuple[int, ...]
    stage: str | None
    gain_s: float
    share: float
    persistence: float
    policy: str
    policy_sha256: str
    rule: str
    pattern: Pattern = "chronic"
    period_steps: int | None = None
    onset_step: int | None = None
    why: str = ""
    chosen: ChoiceReason = ""
    follows: str = ""
    clock: Clock | Literal[""] = ""


@dataclass(frozen=True, slots=True)
class ManualRequest:
    """A person's request for a capture: ``who``, and why. The answer has the same ``request_id``.

    ``options`` has the options of each profiler under its name, as in a policy, with the same defaults.
    """

    request_id: str
    ranks: tuple[int, ...]
    who: str
    reason: str
    profiler: ProfilerChoice = "auto"
    steps: int = 5
    warmup_steps: int = 1
    max_seconds: float = 60.0
    max_bytes: int = 512 * 2**20
    samples_per_second: int = 200
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WantedCapture:
    """A capture ordered from an agent: desired state, reached once, however often the order is repeated.

    Attributes:
        trigger: goes into its manifest.
        generation: the start of the job to which its rank must belong; None: any.
        expires_s: seconds within which it must begin; None: no limit.
        resumed: an earlier process ordered it; it continues, and does not begin again.
        process: boot id, pid, start ticks and rank of its trainer; None: any process of the rank.
        heard: whether the controller already knows that it is stored.
    """

    request: CaptureRequest
    trigger: Trigger
    generation: int | None = None
    expires_s: float | None = None
    resumed: bool = False
    process: tuple[str, int, int, int] | None = None
    heard: bool = False


@dataclass(frozen=True, slots=True)
class Reproduced:
    """Whether the captured steps contain the fault that led to the capture: most of them, some, or none.

    Attributes:
        steps: in how many captured steps the fault was due: all, or one per period of a recurring fault (at least one,
            and as many as have it).
        steps_with, fault_steps: how many captured steps have it, and their numbers.
        over_s: the suspect's time over its peers, in the ``steps`` with the most of it, in seconds a step.
        expected_s: the gain that led to the capture.
    """

    answer: Literal["yes", "no", "partly"]
    steps: int
    steps_with: int
    over_s: float
    expected_s: float
    fault_steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """One time-boxed run of a profiler on one rank, bounded in steps, seconds and bytes, whatever the profiler does.

    With the option `WHOLE_JOB` it is of all ranks: the controller gathers their evidence, and no profiler runs.

    ``options`` are the profiler's, ready for JSON: switches, and for nsys a word and a list of words. ``role``: the
    rank is the suspect, or a healthy peer to compare with. ``labels`` go into the trace, and link it to its trigger.

    With ``period_steps``, the capture begins so that it records a step n with ``n % period_steps == phase``. Without
    (0) it begins at the rank's next step. It records no step before ``first_step``: ranks that are captured together
    record the same steps.

    Raises:
        ValueError: a value is out of bounds, or the id is not a file name.
    """

    capture_id: str
    rank: int
    profiler: Profiler
    steps: int
    warmup_steps: int
    max_seconds: float
    max_bytes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    role: Role = "suspect"
    period_steps: int = 0
    phase: int = 0
    first_step: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the request in every process: it passes through a file."""
        if not CAPTURE_ID.fullmatch(self.capture_id):
            raise ValueError(f"capture id {self.capture_id!r} is not a plain file name")
        if self.profiler not in get_args(Profiler):
            raise ValueError(f"unknown profiler {self.profiler!r}")
        if self.role not in get_args(Role):
            raise ValueError(f"unknown role {self.role!r}")
        if not (1 <= self.steps <= 1000 and 0 <= self.warmup_steps <= 100 and self.rank >= 0):
            raise ValueError(f"steps {self.steps}, warmup_steps {self.warmup_steps} or rank {self.rank} out of bounds")
        if not (self.period_steps == self.phase == 0 or 0 <= self.phase < self.period_steps):
            raise ValueError(f"phase {self.phase} is not in a period of {self.period_steps} steps")
        if not (0 < self.max_seconds <= 3600 and self.max_bytes > 0):
            raise ValueError(f"max_seconds {self.max_seconds} or max_bytes {self.max_bytes} out of bounds")

    @property
    def takes_steps(self) -> bool:
        """Whether the trainer runs it, or marks its steps; otherwise one stack sample is taken from outside."""
        return self.profiler != "stacks" or bool(self.options.get(SAMPLE_STACKS))

    @property
    def of_whole_job(self) -> bool:
        """Whether it gathers what all ranks of a job that hangs report. ``rank`` is one of them, to name it by."""
        return bool(self.options.get(WHOLE_JOB))

    @property
    def detail_ranks(self) -> tuple[int, ...]:
        return tuple(self.options.get(DETAIL, ()))

    def begins_at(self, step: int) -> int:
        """The first step to record, from ``step`` on, so that a recurring fault is in the middle."""
        step = max(step, self.first_step)
        if not self.period_steps or self.steps >= self.period_steps:
            return step
        before = (self.steps - 1) // 2
        to_go = (self.phase - step) % self.period_steps
        # The fault comes soon enough to begin now; otherwise begin half of the steps before it.
        return step if to_go <= before else step + to_go - before


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """The state of a request. ``first_step``..``last_step`` are the recorded steps, without warm-up.

    ``stored``: its trace is complete, in the spool if an executor reports it, in the store once collected.
    ``timings_s``
    is its cost for the rank: ``start``, ``run``, ``stop`` and ``export`` seconds, for torch's profiler also ``import``
        and ``prepare``. ``clock`` maps the host's monotonic clock to wall time: two readings taken together, in
        nanoseconds.
    ``detail`` is for people; ``code`` is for programs.
    """

    capture_id: str
    rank: int
    state: CaptureState
    detail: str = ""
    first_step: int | None = None
    last_step: int | None = None
    size_bytes: int = 0
    timings_s: Mapping[str, float] = field(default_factory=dict)
    clock: Mapping[str, int] = field(default_factory=dict)
    code: CaptureCode = ""


@dataclass(frozen=True, slots=True)
class Report:
    """An agent's report on an ordered capture: ``result`` is its state, with the reason.

    ``hangs``: it was given up, and its rank still runs. ``stored_bytes`` is its size in the store. ``elsewhere``: its
    host has put a copy into the run's remote store, and verified it.
    """

    result: CaptureResult
    hangs: bool = False
    stored_bytes: int = 0
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one window, with its reason and numbers.

    ``requests`` is not empty exactly when ``outcome`` is ``capture``. `words.decisions` makes sentences of ``reason``
    and ``parameters``: why (`reason_sentence`), and what would resolve a hold-off (`resolution`). ``notify`` names the
    rules whose notifications are due, whatever the outcome.
    """

    time_s: float
    first_step: int
    last_step: int
    label: Cause
    outcome: Outcome
    reason: ReasonCode
    rule: str | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    requests: tuple[CaptureRequest, ...] = ()
    attempt: int = 0
    notify: tuple[str, ...] = ()
