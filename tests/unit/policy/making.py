"""Policies and verdicts to try one on the other."""

from typing import Any

import numpy as np

from sftriage.model.captures import CaptureResult, Decision
from sftriage.model.verdicts import Pattern, Scope, Suspect, Verdict
from sftriage.model.windows import JobStatus, StageSchema, SystemCode
from sftriage.policy.engine import decide
from sftriage.policy.in_force import PolicySet
from sftriage.policy.parsing import LoadedPolicy
from sftriage.policy.schema import Limits, TriagePolicy
from sftriage.policy.state import State
from sftriage.words.decisions import reason_sentence

NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z, a Friday
BEGUN = State(started_s=NOW - 1000)
CAPTURING: dict[str, Any] = {"name": "a", "match": {"gain": ">= 5%"}, "capture": {}, "cooldown": "10m"}
OTHER = {**CAPTURING, "name": "b"}


def make_policy(*rules: dict[str, Any], name: str = "p", **spec: Any) -> PolicySet:
    """A policy of these rules; what is a limit's name in ``spec`` is one."""
    limits = {limit: spec.pop(limit) for limit in Limits.model_fields if limit in spec}
    spec = {"rules": list(rules), "limits": limits, **{field: one for field, one in spec.items() if one is not None}}
    head = {"apiVersion": "sftriage.dev/v1alpha1", "kind": "TriagePolicy", "metadata": {"name": name}}
    policy = TriagePolicy.model_validate({**head, "spec": spec})
    return PolicySet((LoadedPolicy(policy, "ab" * 32, "p.yaml"),))


def make_verdict(
    label: str = "suspect",
    *,
    ranks: tuple[int, ...] | None = (2,),
    stage: str | None = "data",
    share: float = 0.3,
    gain_s: float = 0.02,
    first_step: int = 100,
    reasons: tuple[str, ...] = (),
    attempt: int = 0,
    pattern: Pattern = "chronic",
    scope: Scope | None = None,
    onset_step: int | None = None,
    descheduled_fraction: float | None = None,
    contended_fraction: float | None = None,
    system: tuple[SystemCode, float] | None = None,
    host: str | None = None,
) -> Verdict:
    one = len(ranks or ()) == 1
    scope = scope or ("rank" if one else "all")
    suspect = Suspect(
        *(scope, ranks or (), stage, gain_s, share, 0.9),
        pattern=pattern,
        onset_step=onset_step,
        descheduled_fraction=descheduled_fraction,
        contended_fraction=contended_fraction,
        system=system,
        host=host,
    )
    suspects = () if ranks is None else (suspect,)
    return Verdict(
        first_step=first_step,
        last_step=first_step + 49,
        label=label,  # type: ignore[arg-type]  # labels of later versions are tried too
        reasons=reasons,
        suspects=suspects,
        exposed_s=0.07,
        advances_s={},
        leaders={},
        numbers={},
        attempt=attempt,
    )


def job_at(step: int, ranks: int = 4, attempt: int = 0) -> JobStatus | None:
    """A job of some ranks in a step; None of no ranks."""
    doing_VR = np.zeros((10, ranks), dtype=np.int64)
    doing_VR[0], doing_VR[4] = range(ranks), step
    return JobStatus(StageSchema(("data",)), ranks, ("h",), doing_VR, attempt) if ranks else None


def in_a_row(*changes: dict[str, Any]) -> list[Verdict]:
    """Windows of 50 steps, one every 10 from step 100 on, each of the same suspect but for its changes."""
    return [make_verdict(first_step=100 + 10 * number, **change) for number, change in enumerate(changes)]


def played(policy: PolicySet, *verdicts: Verdict, state: State = BEGUN) -> tuple[list[Decision], State]:
    """Verdicts a second apart, through a restart before each."""
    decisions = []
    for number, verdict in enumerate(verdicts):
        decision, state = decide(verdict, policy, State.from_json(state.to_json()), NOW + number)
        decisions.append(decision)
    return decisions, state


def of(capture_id: str, state: str = "failed") -> CaptureResult:
    return CaptureResult(capture_id, 2, state, "why")  # type: ignore[arg-type]  # a table names the states


RULES = {
    "a": CAPTURING,
    "b": OTHER,
    "in": {"name": "in", "match": {"stage": ["data", "h2d"], "gain": ">= 5% and >= 10ms"}, "capture": {}},
    "deep": {"name": "deep", "match": {"gain": ">= 5%"}, "capture": {"profiler": "nsys"}},
    "watch": {"name": "watch", "match": {"gain": ">= 1%"}},
    "stalls": {"name": "stalls", "match": {"label": "stalled"}},
    "late": {"name": "late", "match": {"label": "stalled", "stage": ["data"], "scope": ["rank"]}},
}


def policy_in(case: dict[str, Any]) -> PolicySet:
    """The policy of a case of a text table, whose rules and limits are taken out of it; by default rule a alone."""
    rules = [RULES[one] if isinstance(one, str) else {**CAPTURING, **one} for one in case.pop("rules", ["a"])]
    return make_policy(*rules, **{name: case.pop(name) for name in (*Limits.model_fields, "active") if name in case})


def verdict_in(case: dict[str, Any]) -> Verdict:
    return make_verdict(**{name: tuple(one) if isinstance(one, list) else one for name, one in case.items()})


def outcome(decision: Decision) -> str:
    """What was decided, by which rule, on which ranks and beside which peers, and why."""
    ranks = {role: [str(one.rank) for one in decision.requests if one.role == role] for role in ("suspect", "control")}
    what = [decision.outcome, f"by {decision.rule}" if decision.rule else ""]
    what += [f"{', '.join({one.profiler for one in decision.requests})} of" if decision.requests else ""]
    what += [", ".join(ranks["suspect"]), f"beside {', '.join(ranks['control'])}" if ranks["control"] else ""]
    what += [
        f"and all, in detail {', '.join(map(str, one.detail_ranks))}" for one in decision.requests if one.of_whole_job
    ]
    return f"{' '.join(filter(None, what))}: {reason_sentence(decision)}"
