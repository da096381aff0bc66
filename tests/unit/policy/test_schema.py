"""The fields of a policy: how each is written, what it means, and what is refused where it is, with its reason."""

import json
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sftriage.policy import fields
from sftriage.policy.captures import Means, choose, computes, options_of
from sftriage.policy.fields import (
    COST,
    DURATION,
    GAIN,
    LASTING,
    PERCENTAGE,
    SIZE,
    Lasting,
    cost,
    cron_trigger,
    fraction,
    gain,
    lasting,
    seconds,
    size_bytes,
)
from sftriage.policy.fields import zone as zone_of
from sftriage.policy.in_force import next_open_s
from sftriage.policy.schema import Capture, TriagePolicy
from sftriage.words.verdicts import clock
from tests.unit.conftest import cases

from .making import make_policy
from .test_loading import HEAD, lines_of

RULE = {"name": "r", "match": {}}


def policy_of(*rules: dict[str, Any], **spec: Any) -> TriagePolicy:
    return make_policy(*(rules or (RULE,)), **spec).loaded[0].policy


HERE = Path(__file__).parent
WHOLE = yaml.safe_load((HERE / "whole.yaml").read_text(encoding="utf-8"))


def test_the_whole_document_is_read():
    spec = TriagePolicy.model_validate(WHOLE).spec
    assert (spec.limits.captures_per_hour, spec.limits.day_limit, spec.limits.captures_per_run) == (4, 20, 50)
    slow, page, deep, _, hang, frames = spec.rules
    assert (slow.lasts(spec.detection).steps, page.lasts(spec.detection).steps, page.capture) == (60, 1, None)
    assert page.notify[0].webhook.url_from_env == "SFTRIAGE_WEBHOOK"
    assert slow.capture is not None
    assert deep.capture is not None
    assert hang.capture is not None
    assert frames.capture is not None
    assert (slow.capture.sample, slow.capture.control_ranks, deep.capture.ranks) == (2, 1, (0, 1))
    off = dict.fromkeys(("record_shapes", "with_stack", "profile_memory"), False)
    assert options_of(slow.capture, Means("torch")) == {"sample_stacks": True, "samples_per_second": 200, **off}
    assert options_of(deep.capture, Means("nsys")) == {"trace": ["cuda"], "sample": "cpu", "sqlite": False}
    assert (hang.capture.sample, hang.capture.control_ranks) == (8, 1)
    assert options_of(frames.capture, Means("stacks", once=True)) == {"native": True}
    assert (spec.limits.overhead_fraction, spec.active.trigger) == (0.005, None)
    assert spec.retention is not None
    assert (spec.retention.age_s, spec.retention.size_bytes) == (14 * 86400, 50 * 2**30)
    assert spec.mitigate is not None
    assert (spec.mitigate.min_saving_fraction, spec.mitigate.cooldown_s) == (0.03, 7200.0)


def test_a_filled_policy_is_equivalent_and_valid():
    """GIVEN every kind of rule WHEN its defaults are filled in THEN it reads as before, and fills in as itself."""
    policy = TriagePolicy.model_validate(WHOLE)
    filled = policy.filled()
    again = TriagePolicy.model_validate(filled)
    assert again == policy
    assert again.filled() == filled
    slow, _, deep, _, hang, frames = filled["spec"]["rules"]
    assert slow["for"] == "60 steps"
    assert not {"nsys", "stacks", "ranks"} & set(slow["capture"])
    assert not {"torch", "stacks", "sample"} & set(deep["capture"])
    assert not {"torch", "nsys", "stacks", "steps", "warmup_steps"} & set(hang["capture"])
    assert frames["capture"]["stacks"] == {"native": True}
    assert "None" not in str(filled)


@pytest.mark.parametrize("text", [0.6, "60%", "60 %"])
def test_a_fraction_may_be_a_percentage(text):
    detection = policy_of(detection={"min_persistence": text}).spec.detection
    assert detection.min_persistence == 0.6


@pytest.mark.parametrize(
    ("limits", "of_day"),
    [
        ({}, 12),
        ({"captures_per_hour": 12}, 12),
        # Who allows more in an hour allows it in a day
        ({"captures_per_hour": 100}, 100),
        ({"captures_per_hour": 100, "captures_per_day": 30}, 30),
        ({"captures_per_hour": 1, "captures_per_run": 2}, 12),
    ],
)
def test_a_day_has_a_default_limit(limits, of_day):
    policy = policy_of(**limits)
    assert policy.spec.limits.day_limit == of_day
    assert policy.filled()["spec"]["limits"]["captures_per_day"] == of_day
    assert policy.filled()["spec"]["limits"].get("captures_per_run") == limits.get("captures_per_run")


@pytest.mark.parametrize(
    ("text", "lasting"),
    [
        ("1 step", Lasting(steps=1)),
        ("250 steps", Lasting(steps=250)),
        ("30s", Lasting(seconds=30.0)),
        ("1h30m", Lasting(seconds=5400.0)),
        ("1 window", Lasting(steps=1)),
        ("2 windows", Lasting(steps=100 + 25)),
        ("5 windows", Lasting(steps=100 + 4 * 25)),
    ],
)
def test_for_is_steps_or_time_and_windows_become_steps(text, lasting):
    spec = policy_of({**RULE, "for": text}, detection={"window_steps": 100, "stride_steps": 25}).spec
    assert spec.rules[0].lasts(spec.detection) == lasting


def test_a_checked_policy_is_immutable():
    policy = policy_of()
    with pytest.raises(ValidationError, match="frozen"):
        policy.spec.limits.captures_per_day = 1000  # type: ignore[misc]  # that it cannot be done is the point


@pytest.mark.parametrize(("given", "expected"), cases(HERE / "runs.txt"))
def test_profilers_and_their_options(given, expected):
    about = yaml.safe_load(f"{{{given}}}")
    capture = Capture.model_validate(about.pop("capture", {}))
    means = choose(capture, **about)
    found = "nothing"
    if means is not None:
        chosen = f" ({means.chosen})" if means.chosen else ""
        found = f"{means.profiler}{' once' if means.once else ''}{chosen}: {json.dumps(options_of(capture, means))}"
    assert found == expected


@pytest.mark.parametrize("stage", ["forward", "h2d", "backward", "optimizer", "model.forward", "fwd_2", "Loss"])
def test_a_stages_name_says_whether_it_computes(stage):
    assert computes(stage)


@pytest.mark.parametrize("stage", ["data", "other", "callback", "forwarding", "lossy"])
def test_other_stages_are_host_work_unless_ranks_wait_in_them(stage):
    assert not computes(stage)
    assert computes(stage, (stage,))


WRITTEN = {fraction: PERCENTAGE, seconds: DURATION, size_bytes: SIZE, lasting: LASTING, gain: GAIN, cost: COST}


@pytest.mark.parametrize(("given", "value"), cases(HERE / "quantities.txt"))
def test_a_text_that_matches_its_pattern_parses(given, value):
    name, _, text = given.partition(": ")
    parse = getattr(fields, name)
    assert repr(parse(text)) == value
    assert re.search(WRITTEN[parse], text)


def test_a_percentage_beyond_floats_is_refused():
    with pytest.raises(ValueError, match="a percentage such as 5%"):
        fraction("9" * 400 + "%")


PIECES = (
    *("0", "5", "12.5", "%", "ms", "s", "m", "h", "d", "Ki", "M", "B", " ", ">=", " and ", " steps", " window", "x"),
    *(" GPU-hours", "rank-hour"),
)


@given(text=st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_a_text_that_parses_matches_its_pattern(text):
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
def test_daylight_saving_neither_closes_a_window_for_good_nor_opens_it_twice(day):
    """GIVEN the days on which Berlin changes its clocks THEN each opening is one, and lies in a minute it names."""
    window = cron_trigger("* 2-3 * * *", zone_of("Europe/Berlin"))
    for minutes in range(0, 24 * 60, 7):
        at_s = (day + timedelta(minutes=minutes)).timestamp()
        opens_s = next_open_s(window, at_s)
        assert opens_s is not None
        assert at_s <= opens_s <= at_s + 86400 + 3600
        assert next_open_s(window, opens_s) == opens_s
        assert datetime.fromtimestamp(opens_s, zone_of("Europe/Berlin")).hour in (2, 3)


def test_times_in_the_far_future_are_shown():
    assert clock(1_800_000_000.5) == "2027-01-15T08:00:00Z"
    assert clock(1e300) == "9999-12-31T23:59:59Z"


@pytest.mark.parametrize("name", ["", "America", "a\0b", "x" * 10_000, None, 5])
def test_an_invalid_time_zone_is_refused(name):
    with pytest.raises(ValueError, match="expected a time zone such as"):
        zone_of(name)


@pytest.mark.parametrize("expression", ["", "@daily", "* * * * * *", "*/0 * * * *", "* * * * noday", "x" * 10_000])
def test_an_invalid_cron_expression_is_refused(expression):
    with pytest.raises(ValueError, match="expected minute, hour, day, month and weekday"):
        cron_trigger(expression, UTC)


@pytest.mark.parametrize(("spec", "message"), cases(HERE / "mistakes.txt"))
def test_a_field_without_effect_is_refused_with_place_and_reason(spec, message):
    rules = "" if "rules:" in spec else ", rules: [{name: r, match: {}, capture: {}}]"
    (line,) = lines_of(HEAD.replace("spec:\n", f"spec: {{{spec}{rules}}}\n"))
    assert line.partition(": spec.")[2] == message
