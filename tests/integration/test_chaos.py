"""Parts of a job on two hosts are killed and cut off while its ranks become slow: nothing is lost or twice."""

import pytest

from tests.chaos.checking import actions
from tests.chaos.world import play

pytest.importorskip("nats", reason="many hosts want the extra `nats`")
SEED, SECONDS = 9, 10.0


def test_whatever_befalls_its_parts_each_fault_ends_as_one_decision_with_one_outcome(tmp_path, environment):
    # GIVEN a job on two hosts whose clocks are apart, in which one rank after the other becomes slow
    # WHEN its parts are killed, cut off and starved
    some = actions(SEED, last_s=SECONDS, every_s=1.5, longest_s=3.0)
    outcome, text = play(tmp_path, environment, some, SEED)
    # THEN what it has found is whole
    assert not outcome.problems, f"seed {SEED}\n{text}"
    # AND there was something to be found
    assert outcome.faults
