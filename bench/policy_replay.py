"""What a decision costs: rules × windows through the engine, against a plain loop over the same rules and windows.

    python bench/policy_replay.py [--rules 1000] [--windows 10000] [--repeats 3] [--json]

Three streams: `elsewhere` (most rules are about other stages), `under` (every rule is about the suspect, and its gain
is under all but one in a hundred thresholds), and `waiting` (every rule matches in each window, and waits for it to
last or for its cooldown). The plain loop asks every rule of every window whether label, scope, stage and gain match,
with the thresholds read beforehand: the least that could be done without looking anything up. Both take turns in one
process, and what counts is their ratio: seconds are this machine's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sftriage.decisions import Suspect, Verdict
from sftriage.policy.engine import decide
from sftriage.policy.loading import LoadedPolicy
from sftriage.policy.policy_set import PolicySet
from sftriage.policy.schema import TriagePolicy
from sftriage.policy.state import State

STAGES = ("data", "h2d", "forward", "backward", "optimizer")
STREAMS = ("elsewhere", "under", "waiting")
PERIOD_S = 1.0


def rule(stream: str, number: int) -> dict[str, Any]:
    match: dict[str, Any] = {"scope": ["rank"]}
    if stream == "elsewhere":
        match |= {"stage": [STAGES[number % len(STAGES)]], "gain": f">= {number % 90 + 1}%"}
    elif stream == "under":
        match |= {"gain": ">= 1%" if number % 100 == 99 else ">= 60%"}
    waits = {"for": "60 steps"} if stream == "waiting" and number % 2 else {}
    return {"name": f"rule-{number}", "match": match, "capture": {"max_seconds": 1}, "cooldown": "1d", **waits}


def policies_of(stream: str, rules: int) -> PolicySet:
    policy = TriagePolicy.model_validate(
        {
            "apiVersion": "sftriage.dev/v1alpha1",
            "kind": "TriagePolicy",
            "metadata": {"name": "bench"},
            "spec": {
                "rules": [rule(stream, number) for number in range(rules)],
                # So that it is the rules that are tried, and not a limit of the run that ends it.
                "limits": {"captures_per_run": 10_000, "captures_per_hour": 10_000, "concurrent_ranks": 1024},
            },
        }
    )
    return PolicySet((LoadedPolicy(policy, "", stream),))


def verdicts_of(windows: int) -> list[Verdict]:
    found = []
    for number in range(windows):
        # A fault changes its place every fifty windows, its gain with every one.
        place = number // 50
        suspect = Suspect("rank", (place % 64,), STAGES[place % 5], 0.02, 0.05 + number % 50 / 100, 0.9)
        found.append(Verdict(number * 10, number * 10 + 49, "suspect", (), (suspect,), 0.07, {}, {}, {}))
    return found


def engine(policies: PolicySet, verdicts: list[Verdict]) -> dict[str, int]:
    state, outcomes = State(), dict.fromkeys(("capture", "hold", "throttle", "ignore"), 0)
    for number, verdict in enumerate(verdicts):
        decision, state = decide(verdict, policies, state, 1e9 + number * PERIOD_S)
        outcomes[decision.outcome] += 1
    return outcomes


def plain_loop(policies: PolicySet, verdicts: list[Verdict]) -> int:
    rules = [
        (one.match.label, one.match.scope, one.match.stage, one.min_share, one.min_gain_s) for one in policies.rules
    ]
    matched = 0
    for verdict in verdicts:
        suspect = verdict.suspects[0]
        first = None
        for label, scope, stage, min_share, min_gain_s in rules:
            if (
                label == verdict.label
                and (not scope or suspect.scope in scope)
                and (not stage or suspect.stage in stage)
                and suspect.share >= min_share
                and suspect.gain_s >= min_gain_s
            ):
                first = first or label
        matched += first is not None
    return matched


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.perf_counter()
    found = run()
    return time.perf_counter() - began_s, found


def measured(stream: str, options: argparse.Namespace) -> dict[str, Any]:
    policies, verdicts = policies_of(stream, options.rules), verdicts_of(options.windows)
    engines_s, loops_s, outcomes = [], [], {}
    for _ in range(options.repeats):
        took_s, outcomes = timed(lambda: engine(policies, verdicts))
        engines_s.append(took_s)
        loops_s.append(timed(lambda: plain_loop(policies, verdicts))[0])
    ratios = [mine / loop for mine, loop in zip(engines_s, loops_s, strict=True)]
    return {
        "stream": stream,
        "engine_s": round(statistics.median(engines_s), 3),
        "plain_loop_s": round(statistics.median(loops_s), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "outcomes": outcomes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rules", type=int, default=1000)
    parser.add_argument("--windows", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found = [measured(stream, options) for stream in STREAMS]
    if options.json:
        about = {"python": platform.python_version(), "rules": options.rules, "windows": options.windows}
        print(json.dumps({**about, "streams": found}))
        return
    for one in found:
        print(
            f"{one['stream']:10} engine {one['engine_s']:7.2f} s, plain loop {one['plain_loop_s']:6.2f} s, "
            f"ratio {one['ratio']:.2f}; {one['outcomes']}"
        )


if __name__ == "__main__":
    main()
