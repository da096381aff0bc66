"""docs/whatif.md has every kind, type of operation and column that there is, and the numbers that decide."""

from pathlib import Path
from typing import get_args

import pytest

from sftriage.runs.whatif import MIN_UNEXPLAINED
from sftriage.whatif import kinds
from sftriage.whatif.arranging import CLOCK_ERROR_S, COLUMNS
from sftriage.whatif.pipeline import TYPES
from sftriage.whatif.slowdown import MIN_SLOWDOWN, WORST_PERCENT
from sftriage.words.whatif import REMEDIES

PAGE = " ".join((Path(__file__).parents[3] / "docs" / "whatif.md").read_text(encoding="utf-8").split())


def test_every_kind_is_documented_and_says_what_to_do():
    codes = set(get_args(kinds.Code))
    assert set(REMEDIES) == codes
    for code in codes:
        assert f"| `{code}` | " in PAGE


@pytest.mark.parametrize("name", [*TYPES, *COLUMNS])
def test_every_type_of_operation_and_column_is_documented(name):
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize(
    "said",
    [
        f"Under S = {MIN_SLOWDOWN} nothing is shared out",
        f"the worst {WORST_PERCENT} % of the workers (at least one",
        f"off by more than {MIN_UNEXPLAINED:.0%}".replace("%", " %"),
        f"M_W ≥ {kinds.MIN_MAIN_SHARE} |",
        f"M_S ≥ {kinds.MIN_MAIN_SHARE}, and of that {kinds.MIN_SHARE} without",
        f"(correlation ≥ {kinds.MIN_CORRELATION})",
        f"take {kinds.SPIKE_RATIO:.0%} and six deviations longer".replace("%", " %"),
        f"is {kinds.MIN_OF_ALL} of the whole slowdown at least",
        f"Clocks of workers may be apart by {CLOCK_ERROR_S * 1e3:.0f} ms",
    ],
)
def test_the_numbers_that_decide_are_documented(said):
    assert said in PAGE
