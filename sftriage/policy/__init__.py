"""Policies: the schema of ``policies/*.yaml``, the reading of them, and the engine that decides.

`load` and `parse` turn YAML into a checked `TriagePolicy`; `decide` turns a verdict into a recorded decision.
"""

from __future__ import annotations

from sftriage.policy.engine import decide, finished, trigger
from sftriage.policy.loading import LoadedPolicy, find, load, parse, shipped
from sftriage.policy.problems import PolicyError, Problem
from sftriage.policy.reasons import RESOLVES, resolves
from sftriage.policy.schema import TriagePolicy
from sftriage.policy.state import Running, State

__all__ = [
    "RESOLVES",
    "LoadedPolicy",
    "PolicyError",
    "Problem",
    "Running",
    "State",
    "TriagePolicy",
    "decide",
    "find",
    "finished",
    "load",
    "parse",
    "resolves",
    "shipped",
    "trigger",
]
