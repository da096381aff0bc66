"""Policies and verdicts to try one on the other."""

from __future__ import annotations

from typing import Any

from sftriage.policy.loading import LoadedPolicy
from sftriage.policy.policy_set import PolicySet
from sftriage.policy.schema import TriagePolicy
from sftriage.records import Pattern, Scope, Suspect, Verdict


def make_policy(*rules: dict[str, Any], active: dict[str, str] | None = None, **limits: int | str) -> PolicySet:
    policy = TriagePolicy.model_validate(
        {
            "apiVersion": "sftriage.dev/v1alpha1",
            "kind": "TriagePolicy",
            "metadata": {"name": "p"},
            "spec": {"rules": list(rules), "limits": limits, **({"active": active} if active else {})},
        }
    )
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
) -> Verdict:
    one = len(ranks or ()) == 1
    scope = scope or ("rank" if one else "all")
    suspects = () if ranks is None else (Suspect(scope, ranks, stage, gain_s, share, 0.9, pattern=pattern),)
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
