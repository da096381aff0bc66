"""Whether quotas and limits have room for a pod with ours in it."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from sftriage.kube.room import Shortage, amount, shortage

AGENT = {
    "name": "sftriage-agent",
    "restartPolicy": "Always",
    "resources": {"requests": {"cpu": "50m", "memory": "192Mi"}, "limits": {"cpu": "500m", "memory": "384Mi"}},
}
CARRY = {**AGENT, "name": "sftriage-carry", "restartPolicy": None}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("1", 1),
        (2, 2),
        ("50m", "0.05"),
        ("1.5", "1.5"),
        ("1k", 1000),
        ("1Ki", 1024),
        ("3Mi", 3 << 20),
        ("2G", 2 * 10**9),
        ("1e3", 1000),
        ("100n", "0.0000001"),
        ("", None),
        ("many", None),
        (None, None),
        ("1Q", None),
    ],
)
def test_a_quantity_is_read_as_kubernetes_does(said, expected):
    assert amount(said) == (None if expected is None else Decimal(expected))


def body(**resources: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "train", "resources": resources}]}}


def quota(hard: dict[str, str], used: dict[str, str] | None = None) -> dict[str, Any]:
    return {"metadata": {"name": "q"}, "status": {"hard": hard, "used": used or {}}}


def limits(**item: Any) -> dict[str, Any]:
    return {"metadata": {"name": "l"}, "spec": {"limits": [{"type": "Container", **item}]}}


ONE = body(requests={"cpu": "1", "memory": "1Gi"})
CASES = {
    "nothing is limited": (ONE, [], [], None),
    "there is room": (ONE, [quota({"requests.cpu": "1050m"})], [], None),
    "there is room, but not for both": (ONE, [quota({"requests.cpu": "1040m"})], [], ("q", "requests.cpu", "0.05")),
    "others have it": (ONE, [quota({"cpu": "4"}, {"cpu": "3"})], [], ("q", "cpu", "0.05")),
    "what is not asked for is what may be taken": (
        body(limits={"cpu": "1"}),
        [quota({"requests.cpu": "1"})],
        [],
        ("q", "requests.cpu", "0.05"),
    ),
    "of limits": (
        body(limits={"memory": "1Gi"}),
        [quota({"limits.memory": "1300Mi"})],
        [],
        ("q", "limits.memory", None),
    ),
    "pods are counted, and there is one either way": (ONE, [quota({"pods": "1"}, {"pods": "0"})], [], None),
    "GPUs are none of ours": (ONE, [quota({"requests.nvidia.com/gpu": "0"})], [], None),
    "a quota that nobody has looked at yet": (ONE, [{"metadata": {"name": "q"}}], [], None),
    "a container may not be so small": (ONE, [], [limits(min={"memory": "1Gi"})], ("l", "memory", "384Mi")),
    "nor so large": (ONE, [], [limits(max={"cpu": "250m"})], ("l", "cpu", "500m")),
    "nor have so much more than it asks for": (
        ONE,
        [],
        [limits(maxLimitRequestRatio={"cpu": "4"})],
        ("l", "cpu", "500m"),
    ),
    "of pods": (ONE, [], [{"spec": {"limits": [{"type": "Pod", "max": {"cpu": "1m"}}]}}], None),
    "odd ones": ({"spec": None}, [{"status": {"hard": None}}], [{"spec": {"limits": [None]}}], None),
}


@pytest.mark.parametrize(("pod", "quotas", "ranges", "expected"), CASES.values(), ids=CASES)
def test_a_pod_that_would_be_refused_with_ours_is_known(pod, quotas, ranges, expected):
    found = shortage(pod, [CARRY, AGENT], quotas, ranges)
    assert (found is None) == (expected is None)
    if expected is not None and found is not None:
        assert (found.name, found.resource) == expected[:2]
        assert expected[2] is None or found == Shortage(*expected)
