"""Whether a namespace's quotas and limits have room for a pod with what is added to it. Pure.

A pod that they refuse is one that does not start: it is left alone instead. Others are made in the same moment, so
that a quota may still be used up between this look and the server's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from sftriage.kube.pods import items, mapping, text

_SUFFIXES = {
    "": Decimal(1),
    "k": Decimal(1000),
    **{name: Decimal(1000) ** -power for power, name in enumerate("mun", 1)},
    **{name: Decimal(1000) ** power for power, name in enumerate("MGTPE", 2)},
    **{f"{name}i": Decimal(1024) ** power for power, name in enumerate("KMGTPE", 1)},
}
_RESOURCES = ("cpu", "memory")


@dataclass(frozen=True, slots=True)
class Shortage:
    """What there is no room for: by which object, of which resource, and how much of it is added."""

    name: str
    resource: str
    amount: str

    def words(self) -> dict[str, str]:
        """For a sentence."""
        return {"name": self.name, "resource": self.resource, "amount": self.amount}


def amount(value: Any) -> Decimal | None:
    """A quantity of Kubernetes; None where it is none."""
    said = str(value).strip()
    digits = said.rstrip("numkKMGTPEi")
    try:
        return Decimal(digits) * _SUFFIXES[said[len(digits) :]]
    except (InvalidOperation, KeyError):
        return None


def shortage(
    pod: Mapping[str, Any],
    added: Iterable[Mapping[str, Any]],
    quotas: Iterable[Mapping[str, Any]],
    limits: Iterable[Mapping[str, Any]],
) -> Shortage | None:
    """Why a pod would be refused with these containers, though perhaps not without; None where it would not be.

    ``quotas`` and ``limits`` are the ResourceQuotas and LimitRanges of its namespace.
    """
    ours = list(added)
    found = next(_of_quotas(pod, ours, quotas), None)
    return next(_of_limits(ours, limits), None) if found is None else found


def _of_quotas(
    pod: Mapping[str, Any], ours: list[Mapping[str, Any]], quotas: Iterable[Mapping[str, Any]]
) -> Iterator[Shortage]:
    # (what runs and ends before the others is of no account beside them)
    stays = [one for one in ours if one.get("restartPolicy") == "Always"]
    theirs = list(items(mapping(pod, "spec"), "containers"))
    for quota in quotas:
        hard, used = mapping(quota, "status", "hard"), mapping(quota, "status", "used")
        for name in hard:
            kind, _, resource = name.rpartition(".")
            if resource not in _RESOURCES or kind not in ("", "requests", "limits"):
                continue
            more = _sum(stays, kind or "requests", resource)
            room = (amount(hard[name]) or Decimal(0)) - (amount(used.get(name, 0)) or Decimal(0))
            if more and _sum(theirs, kind or "requests", resource) + more > room:
                yield Shortage(text(mapping(quota, "metadata"), "name"), name, f"{more.normalize():f}")


def _sum(containers: Iterable[Mapping[str, Any]], kind: str, resource: str) -> Decimal:
    return sum((_of(one, kind, resource) or Decimal(0) for one in containers), Decimal(0))


def _of(container: Mapping[str, Any], kind: str, resource: str) -> Decimal | None:
    said = mapping(container, "resources", kind).get(resource)
    if said is None and kind == "requests":
        # (what is not asked for is what may be taken)
        said = mapping(container, "resources", "limits").get(resource)
    return None if said is None else amount(said)


def _of_limits(ours: list[Mapping[str, Any]], limits: Iterable[Mapping[str, Any]]) -> Iterator[Shortage]:
    for limit in limits:
        name = text(mapping(limit, "metadata"), "name")
        for item in items(mapping(limit, "spec"), "limits"):
            if item.get("type") != "Container":
                continue
            for container in ours:
                for resource in _RESOURCES:
                    if _refused(container, item, resource):
                        said = mapping(container, "resources", "limits").get(resource)
                        yield Shortage(name, resource, str(said))


def _refused(container: Mapping[str, Any], item: Mapping[str, Any], resource: str) -> bool:
    asks, takes = (_of(container, kind, resource) or Decimal(0) for kind in ("requests", "limits"))
    least, most, ratio = (amount(mapping(item, name).get(resource)) for name in ("min", "max", "maxLimitRequestRatio"))
    return (
        (least is not None and asks < least)
        or (most is not None and takes > most)
        or (ratio is not None and (asks == 0 or takes / asks > ratio))
    )
