"""Policies: the schema of ``policies/*.yaml``, the reading of them, and the engine that decides.

`load` and `parse` turn YAML into a checked `TriagePolicy`, `load_set` several files into a `PolicySet`; `decide` turns
a verdict into a recorded decision, and `finished` and `charged` tell the engine what became of a capture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sftriage.lazily import from_modules

if TYPE_CHECKING:
    from sftriage.policy.asking import decide_ask, trigger_of_ask
    from sftriage.policy.beside import decide_beside
    from sftriage.policy.engine import decide
    from sftriage.policy.loading import LoadedPolicy, find, load, parse, shipped
    from sftriage.policy.policy_set import PolicySet, load_set
    from sftriage.policy.problems import PolicyError, Problem
    from sftriage.policy.reasons import RESOLVES, resolves
    from sftriage.policy.schema import TriagePolicy
    from sftriage.policy.state import Failures, Running, State, Streak, charged, finished
    from sftriage.policy.together import in_the_same_steps
    from sftriage.policy.triggers import labelled, trigger
else:
    __getattr__ = from_modules(
        __name__,
        {
            "asking": ("decide_ask", "trigger_of_ask"),
            "beside": ("decide_beside",),
            "engine": ("decide",),
            "loading": ("LoadedPolicy", "find", "load", "parse", "shipped"),
            "policy_set": ("PolicySet", "load_set"),
            "problems": ("PolicyError", "Problem"),
            "reasons": ("RESOLVES", "resolves"),
            "schema": ("TriagePolicy",),
            "state": ("Failures", "Running", "State", "Streak", "charged", "finished"),
            "together": ("in_the_same_steps",),
            "triggers": ("labelled", "trigger"),
        },
    )

__all__ = [
    "RESOLVES",
    "Failures",
    "LoadedPolicy",
    "PolicyError",
    "PolicySet",
    "Problem",
    "Running",
    "State",
    "Streak",
    "TriagePolicy",
    "charged",
    "decide",
    "decide_ask",
    "decide_beside",
    "find",
    "finished",
    "in_the_same_steps",
    "labelled",
    "load",
    "load_set",
    "parse",
    "resolves",
    "shipped",
    "trigger",
    "trigger_of_ask",
]
