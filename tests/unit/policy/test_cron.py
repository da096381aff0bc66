from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from sftriage.policy.fields import cron_trigger, next_open_s
from sftriage.policy.fields import zone as zone_of
from sftriage.words.amounts import clock

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
