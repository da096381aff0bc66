"""The types of fields, and policies with a mistake of every kind: each is refused, where it is, with its reason."""

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.policy.in_force import next_open_s
from sftriage.policy.quantities import (
    AT_ONCE,
    COST,
    DURATION,
    GAIN,
    LASTING,
    PERCENTAGE,
    SIZE,
    Lasting,
    cost,
    fraction,
    gain,
    lasting,
    seconds,
    size_bytes,
)
from sftriage.policy.schema import cron_trigger
from sftriage.policy.schema import zone as zone_of
from sftriage.words.amounts import clock

from .test_loading import HEAD, lines_of

WRITTEN = {fraction: PERCENTAGE, seconds: DURATION, size_bytes: SIZE, lasting: LASTING, gain: GAIN, cost: COST}
READ = {
    fraction: {"5%": 0.05, "0.5%": 0.005, "100 %": 1.0, "0.5 %": 0.005, "0%": 0.0},
    seconds: {"90s": 90, "10m": 600, "1h30m": 5400, "1.5h": 5400, "10ms": 0.01, "1m500ms": 60.5, "2d": 172800},
    size_bytes: {
        "512Mi": 512 * 2**20,
        "1Gi": 2**30,
        "1 GiB": 2**30,
        "500MB": 500_000_000,
        "500M": 500_000_000,
        "1.5 Ki": 1536,
        "7B": 7,
    },
    lasting: {
        "1 step": AT_ONCE,
        "100 steps": Lasting(steps=100),
        "2 windows": Lasting(windows=2),
        "30s": Lasting(seconds=30.0),
    },
    gain: {
        ">= 5%": (0.05, 0.0),
        ">=10ms": (0.0, 0.01),
        ">= 5% and >= 10ms": (0.05, 0.01),
        ">= 10ms and >= 5%": (0.05, 0.01),
        " >= 5% and  >= 10ms ": (0.05, 0.01),
    },
    cost: {">= 5 GPU-hours": 5.0, ">= 1.5 rank-hours": 1.5},
}


@pytest.mark.parametrize(("parse", "text"), [(parse, text) for parse, texts in READ.items() for text in texts])
def test_what_is_written_as_its_pattern_says_is_read(parse, text):
    assert parse(text) == READ[parse][text]
    assert re.search(WRITTEN[parse], text)


A_GAIN, HOURS = "a condition such as >= 5%", "a condition with its unit"


@pytest.mark.parametrize(
    ("parse", "value", "expected"),
    [
        # (the fourth has an Arabic digit, which float() would read)
        *((fraction, value, "a percentage such as 5%") for value in ("5", 0.05, "-5%", "\u0665%", "9" * 400 + "%")),
        *((seconds, value, "a duration with its unit") for value in ("10", 600, "10 minutes", "")),
        (seconds, "30m1h", "the largest first"),
        (seconds, "10m10m", "each unit once"),
        # (Kubernetes reads the last as half a byte)
        *((size_bytes, value, "a size with its unit") for value in ("512", 512, "500m")),
        *((gain, value, A_GAIN) for value in ("5%", "> 5%", None)),
        (gain, ">= 5% or >= 10ms", "a percentage|a duration"),
        (gain, ">= 5% and >= 6%", "the same unit twice"),
        (gain, ">= 5", "a duration with its unit"),
        (cost, ">= 5", "such as >= 5 GPU-hours, got '>= 5'"),
        *((cost, f">= {wrong}", HOURS) for wrong in ("5h", "-5 GPU-hours", "0 GPU-hours", "1e9 GPU-hours")),
        *((cost, value, HOURS) for value in ("5 GPU-hours", 5)),
    ],
)
def test_what_cannot_be_read_says_what_was_expected(parse, value, expected):
    with pytest.raises(ValueError, match=expected):
        parse(value)


PIECES = (
    *("0", "5", "12.5", "%", "ms", "s", "m", "h", "d", "Ki", "M", "B", " ", ">=", " and ", " steps", " window", "x"),
    *(" GPU-hours", "rank-hour"),
)


@given(text=st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_whatever_is_read_is_written_as_its_pattern_says(text):
    """GIVEN any text WHEN a parser takes it THEN a schema with its pattern takes it too."""
    for parse, pattern in WRITTEN.items():
        try:
            parse(text)
        except ValueError:
            continue
        assert re.search(pattern, text), parse


UTC = timezone.utc
FRIDAY = datetime(2027, 1, 15, 8, 0, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("expression", "zone", "opens"),
    [
        ("* * * * *", "UTC", FRIDAY),
        ("0 8 * * *", "UTC", FRIDAY),  # open for all of its minute
        ("1 8 * * *", "UTC", datetime(2027, 1, 15, 8, 1, tzinfo=UTC)),
        ("0-59 20-23 * * mon-fri", "UTC", datetime(2027, 1, 15, 20, tzinfo=UTC)),
        ("* * * * sat,sun", "UTC", datetime(2027, 1, 16, tzinfo=UTC)),
        ("* * * * mon-fri/2", "UTC", FRIDAY),
        ("* 9 * * *", "Europe/Berlin", FRIDAY),
        ("* 10 * * *", "Europe/Berlin", datetime(2027, 1, 15, 9, tzinfo=UTC)),
        ("* * 29 2 *", "UTC", datetime(2028, 2, 29, tzinfo=UTC)),
    ],
)
def test_a_window_is_open_in_the_minutes_that_it_names(expression, zone, opens):
    found = next_open_s(cron_trigger(expression, zone_of(zone)), FRIDAY.timestamp())
    assert found == opens.timestamp()


@pytest.mark.parametrize("day", [datetime(2027, 3, 28, tzinfo=UTC), datetime(2027, 10, 31, tzinfo=UTC)])
def test_clocks_that_change_neither_shut_a_window_for_good_nor_open_it_twice_at_once(day):
    """GIVEN the days on which Berlin changes its clocks THEN each opening is one, and lies in a minute it names."""
    window = cron_trigger("* 2-3 * * *", zone_of("Europe/Berlin"))
    for minutes in range(0, 24 * 60, 7):
        at_s = (day + timedelta(minutes=minutes)).timestamp()
        opens_s = next_open_s(window, at_s)
        assert opens_s is not None
        assert at_s <= opens_s <= at_s + 86400 + 3600
        assert next_open_s(window, opens_s) == opens_s
        assert datetime.fromtimestamp(opens_s, zone_of("Europe/Berlin")).hour in (2, 3)


def test_a_time_is_shown_however_far_it_is():
    assert clock(1_800_000_000.5) == "2027-01-15T08:00:00Z"
    assert clock(1e300) == "9999-12-31T23:59:59Z"


@pytest.mark.parametrize("name", ["", "America", "a\0b", "x" * 10_000, None, 5])
def test_what_is_no_time_zone_says_so(name):
    with pytest.raises(ValueError, match="expected a time zone such as"):
        zone_of(name)


@pytest.mark.parametrize("expression", ["", "@daily", "* * * * * *", "*/0 * * * *", "* * * * noday", "x" * 10_000])
def test_what_is_no_cron_expression_says_so(expression):
    with pytest.raises(ValueError, match="expected minute, hour, day, month and weekday"):
        cron_trigger(expression, UTC)


MISTAKES = (Path(__file__).parent / "mistakes.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(("spec", "message"), list(zip(MISTAKES[::2], MISTAKES[1::2], strict=True)))
def test_a_field_that_cannot_be_meant_is_refused_where_it_is_with_its_reason(spec, message):
    rules = "" if "rules:" in spec else ", rules: [{name: r, match: {}, capture: {}}]"
    (line,) = lines_of(HEAD.replace("spec:\n", f"spec: {{{spec}{rules}}}\n"))
    assert line.partition(": spec.")[2] == message.strip()
