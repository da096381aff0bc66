"""How often a real job's slow rank is named, and somebody who is not slow: rates with their intervals, no verdict.

On a machine that does nothing else: what the machine itself does to a rank is in these rates. SOAK_RUNS is how many
runs there are of each kind.
"""

import json
import os
import sys

import pytest

from sftriage.demo.faults import parse_fault

RUNS = int(os.environ.get("SOAK_RUNS", "5"))
STEPS, FAULT_STEP, HEALTHY_STEPS = 300, 120, 2000
WINDOW_STEPS, STRIDE_STEPS = 50, 10
DEADLINE_S = 900
Z95 = 1.96

pytestmark = pytest.mark.timeout(RUNS * DEADLINE_S)


def wilson(count: int, of: int) -> tuple[float, float]:
    """Wilson's interval of a rate, 95 %."""
    if not of:
        return 0.0, 1.0
    rate, square = count / of, Z95**2 / of
    middle, half = rate + square / 2, Z95 * (rate * (1 - rate) / of + square / (4 * of)) ** 0.5
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def report(what: str, count: int, of: int) -> None:
    low, high = wilson(count, of)
    sys.stdout.write(f"\n  {what}: {count} of {of} ({low:.1%} to {high:.1%})")


def named(window: dict) -> tuple:
    suspect = window["suspects"][0]
    return suspect["scope"], suspect["rank"], suspect["stage"]


@pytest.fixture
def demo(start, tmp_path):
    """Run the demo to its end, so many times; what each found."""

    def demo(*faults: str, steps: int = STEPS, runs: int = RUNS) -> list[dict]:
        found = []
        for number in range(runs):
            words = [word for fault in faults for word in ("--fault", fault)]
            process = start("demo", "--json", "--steps", steps, "--out", tmp_path / f"run-{number}", *words)
            out, err = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, err
            found.append(json.loads(out.splitlines()[-1]))
        return found

    return demo


def test_a_healthy_job(demo):
    """Windows that do not overlap, of long runs in which nothing is slow: how many named somebody."""
    outcomes = demo("none", steps=HEALTHY_STEPS)
    apart = [one for outcome in outcomes for one in outcome["windows"][:: WINDOW_STEPS // STRIDE_STEPS]]
    report("windows that named somebody", sum(one["label"] == "suspect" for one in apart), len(apart))
    report("runs with a capture", sum(bool(outcome["captures"]) for outcome in outcomes), len(outcomes))


@pytest.mark.parametrize("fault", ["data:2:40", "forward:0:40", "optimizer:3:40", "other:1:40"])
def test_a_slow_rank(demo, fault):
    injected = parse_fault(fault)
    outcomes = demo(fault)
    who = ("rank", injected.rank, injected.name)
    suspects = [[one for one in outcome["windows"] if one["label"] == "suspect"] for outcome in outcomes]
    captured = [[(c["capture"]["rank"], c["trigger"]["stage"]) for c in outcome["captures"]] for outcome in outcomes]
    report(f"{fault} named", sum(who in map(named, of_run) for of_run in suspects), RUNS)
    report(f"{fault} captured, and nobody else", sum(one == [who[1:]] for one in captured), RUNS)
    wrong = sum(named(one) != who or one["last_step"] < FAULT_STEP for of_run in suspects for one in of_run)
    report("suspects that were somebody or something else", wrong, sum(map(len, suspects)))


@pytest.mark.parametrize(
    ("faults", "reason"), [(["backward:1:40"], "sync_ambiguous"), (["data:2:60", "forward:1:60"], "co_critical")]
)
def test_what_cannot_be_decided(demo, faults, reason):
    outcomes = demo(*faults)
    within = [d for outcome in outcomes for d in outcome["decisions"] if d["first_step"] >= FAULT_STEP]
    held = [d for d in within if d["outcome"] == "hold" and reason in d["parameters"].get("reasons", ())]
    report(f"{' and '.join(faults)} held for {reason}", len(held), len(within))
    report("runs with a capture", sum(bool(outcome["captures"]) for outcome in outcomes), RUNS)
