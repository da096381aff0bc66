"""How long a capture is waited for: what the documentation says is what is done."""

from pathlib import Path

import pytest

from sftriage.agent import captures
from sftriage.runtime import triage

POLICIES = (Path(__file__).parents[3] / "docs" / "policies.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "said",
    [
        f"| {captures.CANCEL_GRACE_S:.0f} | the capture is called off",
        "| {torch:.0f} (`nsys`: {nsys:.0f}, to make its report) | a rank".format(**captures.ANSWER_GRACE_S),
        f"its trainers are given {triage.ENDING_SHARE * triage.ENDING_S:.0f} s",
        f"is waited for {triage.STARTING_S:.0f} s",
    ],
)
def test_the_times_past_a_time_box_are_documented(said):
    assert said in POLICIES
