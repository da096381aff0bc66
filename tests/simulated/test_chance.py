"""How often chance names a unit, in the promised number of steps."""

import pytest

from sftriage.model.verdicts import Settings
from sftriage.verdict.sequential import ClearEvent, Evidence, advanced
from tests.unit.verdict.test_sequential import by_chance


@pytest.mark.parametrize("n_units", [2, 1024])
def test_chance_names_no_unit_in_the_promised_number_of_steps(n_units):
    # GIVEN settings that promise one false name in 20,000 steps, and ten times as many, half of them with an event
    settings = Settings(false_names_per_million_steps=50.0)
    named = 0
    for seed in range(10):
        evidence = Evidence(n_units)
        for first in range(0, 20_000, 1000):
            found = [
                ClearEvent(one.step + first, one.unit, one.share) for one in by_chance(1000, seed + first, n_units)
            ]
            evidence = advanced(evidence, found, first + 1000, settings)
            named += sum(one.named for one in evidence.units.values())
    # THEN hardly more are named than that (ten; counted are those that still are at the end of a thousand)
    assert named <= 20
