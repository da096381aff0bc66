"""Parts of a job on two hosts are killed, cut off and starved for minutes: `make soak CHAOS='--seed 7 --rounds 20'`.

A round that fails names its seed: with it, and as many --seconds, the same befalls another job at the same times.
"""

import json
import sys

import pytest

from tests.chaos.checking import actions
from tests.chaos.world import play

pytest.importorskip("nats", reason="many hosts want the extra `nats`")
LONGEST_S = 30.0


def test_each_fault_ends_as_one_decision_with_one_outcome(tmp_path, environment, seed, request):
    seconds = request.config.getoption("--seconds")
    some = actions(seed, last_s=seconds, every_s=4.0, longest_s=LONGEST_S)
    outcome, text = play(tmp_path, environment, some, seed)
    found = {
        "seed": seed,
        "actions": len(some),
        "faults": dict(outcome.faults),
        "captures": dict(outcome.captures),
        "windows": outcome.windows,
        "taken_over": outcome.taken_over,
    }
    sys.stdout.write(f"\n  {json.dumps(found)}")
    assert not outcome.problems, f"--seed {seed} --seconds {seconds}\n{text}"
