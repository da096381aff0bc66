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
"""The requested profiler; sftriage replaces ``auto`` once it knows what there is to see."""
ChoiceReason = Literal["", "host_stage", "compute_stage", "device_clock", "whole_rank", "stands_still", "left_open"]
"""Why ``auto`` chose a profiler; "" if it was named."""
LeftOpen = Literal["", "operators", "stacks", "system"]
"""What a capture that holds its fault does not show and another means would: operators and kernels, Python stacks, or
what only a look at the whole process has; "" where it shows what the time went into."""
SAMPLE_STACKS = "sample_stacks"
"""The option of a capture that has the trainer sample its Python stacks; torch's ``with_stack`` traces every call."""
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

    ``why`` is the reason as a sentence. ``chosen`` is why ``auto`` chose this profiler, and ``follows`` the earlier
    capture of the same suspect that left open what this one should show. ``clock`` is the verdict's, or ""
    if unrecorded.
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

    ``options`` are those of each profiler under its name, as in a policy, with the same defaults.
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
    """A capture ordered from an agent: desired state, which it reaches once, however often the order is repeated.

    Its rank has to be of that ``generation`` (start) of the job, if one is given, and it has to begin within
    ``expires_s`` seconds from now, if there are any. An earlier process requested one that is ``resumed``: it continues
    and does not begin again. The ``trigger`` goes into its manifest. On its way to an agent it is of a
    ``process`` (boot id, pid, start ticks and rank), or of whichever its rank has; that it is stored may have been
    ``heard`` by then.
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

    It was there in ``steps_with`` captured steps, whose numbers are ``fault_steps``, of ``steps`` in which it was due:
    all of them, or, of what comes back, one a period (at least one; more, where it was there more often), whichever
    these are. In so many steps, those in which the suspect was furthest over its peers, it was so by ``over_s`` seconds
    a step, where the gain that led to the capture was ``expected_s``.
    """

    answer: Literal["yes", "no", "partly"]
    steps: int
    steps_with: int
    over_s: float
    expected_s: float
    fault_steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """One time-boxed run of a profiler on one rank. Bounded in steps, seconds and bytes, whatever the profiler does.

    ``options`` are the profiler's, ready for JSON: switches, and for nsys a word and a list of words. ``role`` says
    whether the rank is suspected, or a healthy peer to compare with. ``labels`` say in the trace itself what led to it.

    What comes back is caught: with a ``period_steps``, the capture begins so that a step whose number leaves ``phase``
    over a multiple of it is among those recorded. Without one (0) it begins at the rank's next step. No step before
    ``first_step`` is recorded: ranks that are captured together are so in the same steps.

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
        """Check the request wherever it is made: it passes through a file that another process reads."""
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
        """Whether the trainer runs it, or marks its steps; otherwise stacks are taken once, from outside."""
        return self.profiler != "stacks" or bool(self.options.get(SAMPLE_STACKS))

    def begins_at(self, step: int) -> int:
        """The first step to be recorded, if none before ``step`` can be: with what comes back in the middle."""
        step = max(step, self.first_step)
        if not self.period_steps or self.steps >= self.period_steps:
            return step
        before = (self.steps - 1) // 2
        to_go = (self.phase - step) % self.period_steps
        # It comes soon enough to be recorded from now on, or later than half of the steps.
        return step if to_go <= before else step + to_go - before


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """The state of a request. ``first_step``..``last_step`` are the recorded steps, without warm-up.

    ``stored`` is one whose trace is whole: in the spool where an executor says so, in the store once it was collected.

    ``timings_s`` holds what the capture cost its rank: ``start``, ``run``, ``stop`` and ``export`` seconds, of torch's
    profiler also ``import`` and ``prepare``.
    ``clock`` maps the host's monotonic clock to wall time: two readings taken together, in nanoseconds.
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

    One that ``hangs`` was given up, and its rank is still there. ``stored_bytes`` is its size in the store. Of one that
    is ``elsewhere``, its host has put a copy into the store that its run keeps copies in, and verified it there.
    """

    result: CaptureResult
    hangs: bool = False
    stored_bytes: int = 0
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided about one window, why, and the numbers behind it.

    ``requests`` is not empty exactly when ``outcome`` is ``capture``. `words.decisions` makes sentences of ``reason``
    and ``parameters``: why (`reason_sentence`), and what would resolve a hold-off (`resolution`).
    ``notify`` names the rules whose notifications are due, whatever the outcome is.
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
