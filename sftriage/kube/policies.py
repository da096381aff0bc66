"""Which policies of a namespace are in force, and what the status of each says of that. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import yaml

from sftriage.kube.fields import Now, dated, status_of
from sftriage.kube.objects import TriagePolicyStatus
from sftriage.policy.loading import MAX_SHOWN, LoadedPolicy, PolicyError, PolicySet, Problem, parse
from sftriage.words.kube import POLICIES

Body: TypeAlias = Mapping[str, Any]
"""An object as the API server has it."""


def loaded(body: Body) -> LoadedPolicy:
    """The policy of an object, checked as a file of the command line is; its source is its name.

    Raises:
        PolicyError: it is not one; with every problem in it, and no places, for nobody sees the text of an object.
    """
    name = str(body["metadata"]["name"])
    try:
        # (through JSON, for what is there twice is not to be written as an alias, which no policy has)
        said = json.loads(json.dumps({word: body.get(word) for word in ("apiVersion", "kind", "metadata", "spec")}))
        found = parse(yaml.safe_dump(said, allow_unicode=True, sort_keys=False), name)
    except PolicyError as error:
        raise PolicyError(name, [replace(one, line=0, column=0) for one in error.problems]) from None
    return replace(found, places={})


@dataclass(frozen=True, slots=True)
class Standing:
    """How one policy stands: itself, where it is valid; else its ``error``; what it conflicts with; the wanted status.

    One is ``in_force`` that is valid and conflicts with none that is older.
    """

    body: Body
    policy: LoadedPolicy | None
    error: str
    conflict: str
    status: TriagePolicyStatus

    @property
    def in_force(self) -> bool:
        """Whether jobs of its namespace run under it."""
        return self.policy is not None and not self.conflict

    @property
    def changed(self) -> bool:
        """Whether its status says something else than is so."""
        return dict(status_of(self.body)) != self.status.plain()


def standings(bodies: Iterable[Body], now_s: float) -> list[Standing]:
    """How the policies of one namespace stand, the oldest first.

    All of them are in force together. Of two that cannot be, the older one is, so that a policy that comes later never
    takes another out of force; of the same age, the first by name.
    """
    found: list[Standing] = []
    in_force: tuple[LoadedPolicy, ...] = ()
    for body in sorted(bodies, key=_age):
        policy, error, conflict = None, "", ""
        try:
            policy = loaded(body)
        except PolicyError as refused:
            error = _lines(refused.problems)
        else:
            conflict = _conflict(in_force, policy)
            in_force = in_force if conflict else (*in_force, policy)
        found.append(Standing(body, policy, error, conflict, _status(body, policy, error, conflict, now_s)))
    return found


def _age(body: Body) -> tuple[str, str]:
    # (the server writes times such that the text of an older one is less)
    return str(body["metadata"].get("creationTimestamp", "")), str(body["metadata"]["name"])


def _conflict(in_force: tuple[LoadedPolicy, ...], policy: LoadedPolicy) -> str:
    try:
        PolicySet((*in_force, policy))
    except PolicyError as error:
        return _lines(error.problems)
    return ""


def _lines(problems: Sequence[Problem]) -> str:
    lines = [f"{one.path}: {one.message}" if one.path else one.message for one in problems[:MAX_SHOWN]]
    more = len(problems) - MAX_SHOWN
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)


def _status(body: Body, policy: LoadedPolicy | None, error: str, conflict: str, now_s: float) -> TriagePolicyStatus:
    found = list(_found(policy, error, conflict))
    generation = body["metadata"].get("generation")
    return TriagePolicyStatus(
        observedGeneration=generation,
        conditions=dated(found, status_of(body).get("conditions"), generation, now_s),
        rules=None if policy is None else len(policy.policy.spec.rules),
    )


def _found(policy: LoadedPolicy | None, error: str, conflict: str) -> Iterable[Now]:
    if policy is None:
        yield Now("Accepted", "False", "Invalid", error)
        yield Now("Conflicted", "Unknown", "Invalid", POLICIES["not_compared"])
        return
    yield Now("Accepted", "True", "Valid", POLICIES["valid"])
    if conflict:
        yield Now("Conflicted", "True", "Conflicts", f"{POLICIES['conflicts']}\n{conflict}")
    else:
        yield Now("Conflicted", "False", "InForce", POLICIES["in_force"])
