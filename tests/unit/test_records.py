"""Records that check and work out what passes between rooms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.records import CaptureRequest


def request(steps=5, period=0, phase=0):
    return CaptureRequest("c-1", 0, "torch", steps, 1, 60.0, 2**20, period_steps=period, phase=phase)


@given(steps=st.integers(1, 40), period=st.integers(2, 64), data=st.data(), step=st.integers(0, 10_000))
def test_a_capture_of_what_comes_back_holds_it_and_waits_no_longer_than_for_the_next_time(steps, period, data, step):
    wanted = request(steps, period, data.draw(st.integers(0, period - 1)))
    first = wanted.begins_at(step)
    recorded = range(first, first + steps)
    assert any(one % period == wanted.phase for one in recorded)
    assert step <= first < step + period


@pytest.mark.parametrize(("period", "phase"), [(0, 1), (5, 5), (5, -1), (-1, 0)])
def test_a_phase_is_within_its_period(period, phase):
    with pytest.raises(ValueError, match="phase"):
        request(period=period, phase=phase)
