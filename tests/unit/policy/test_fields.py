"""The types of fields, and policies with a mistake of every kind: each is refused, where it is, with its reason."""

import re
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.policy.fields import cron_trigger, next_open_s
from sftriage.policy.fields import zone as zone_of
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


STALLED, UNDECIDED, REGRESSED = "label: stalled", "label: needs_evidence", "reason: regressed"
GOOD = HEAD + "  rules: [{name: slow-rank, match: {}, capture: {}}]\n"
RULE = "    - name: r\n      match: {%s}\n      %s\n"


@pytest.mark.parametrize(
    ("match", "fields", "message"),
    [
        ("", "for: 2", ".for: expected steps or a time such as 100 steps, 30s or 5m, got 2"),
        ("", "for: 2 stepz", ".for: expected steps or a time such as 100 steps, 30s or 5m, got '2 stepz'"),
        ("", "for: 30", ".for: expected steps or a time such as 100 steps, 30s or 5m, got 30"),
        ("", "for: 0 steps", ".for: expected 1 step to 1000000 steps, got '0 steps'"),
        ("", "for: 1000001 steps", ".for: expected 1 step to 1000000 steps, got '1000001 steps'"),
        ("", "for: 0 windows", ".for: expected 1 step to 1000000 steps, got '0 windows'"),
        ("", "for: 1001 windows", ".for: expected 1 step to 1000000 steps, got '1001 windows'"),
        ("", "for: 10ms", ".for: expected 1s to 30d, got '10ms'"),
        ("", "for: 31d", ".for: expected 1s to 30d, got '31d'"),
        ("", "four: 2 steps", '.four: unknown field; did you mean "for"?'),
        ("scope: [rnak]", "", ".match.scope[0]: expected rank or host or cohort or all, got 'rnak'; did yo"),
        ("scope: rank", "", ".match.scope: must be a list such as [rank, host], got 'rank'"),
        ("pattern: [cronic]", "", ".match.pattern[0]: expected chronic or recurring or one-off, got 'cronic'; "),
        ("pattern: [one-off]", "capture: {}", ".match.pattern: no capture on one-off alone, because the fault"),
        (
            STALLED,
            "capture: {profiler: torch}",
            ".match.label: no torch capture on stalled, because it starts at a rank's next step",
        ),
        (STALLED, "capture: {profiler: nsys}", ".match.label: no nsys capture on stalled, because it starts at a"),
        ("label: stalled, pattern: [chronic]", "", ".match.pattern: no pattern on stalled: the step has not ended"),
        (STALLED, "for: 2 windows", ".for: no `for` on stalled: a stall is reported once; detection.stalled_after"),
        (STALLED, "for: 30s", ".for: no `for` on stalled: a stall is reported once; detection.stalled_after says"),
        (
            "label: suspect, reason: regressed",
            "",
            ".match.label: no label beside regressed, which is told whatever the label",
        ),
        (REGRESSED, "capture: {}", ".capture: no capture on regressed, because nobody alone is why the job"),
        ("reason: regressed, scope: [rank]", "", ".match.scope: no scope on regressed: it is about the job"),
        ("reason: regressed, pattern: [chronic]", "", ".match.pattern: no pattern on regressed: it is about the job"),
        (
            "reason: regressed",
            "for: 2 windows",
            ".for: no windows on regressed: it is told once enough steps are slower",
        ),
        ("reason: regressed, cost: '>= 5 GPU-hours'", "", ".match.cost: no cost on regressed: it is about the job"),
        ("label: stalled, cost: '>= 5 GPU-hours'", "", ".match.cost: no cost on stalled: the step has not ended"),
        (
            "cost: '>= 5'",
            "",
            ".match.cost: expected a condition with its unit (GPU-hours, or rank-hours) such as >= 5 ",
        ),
        (UNDECIDED, "notify: []", ".match.label: a rule on needs_evidence would do nothing; such windows"),
        (
            UNDECIDED,
            "notify: [{webhook: {url_from_env: A}}]",
            ".match.label: no message on needs_evidence, because such windows come all the time",
        ),
        (
            "",
            "capture: {profiler: tourch}",
            ".capture.profiler: expected auto or torch or nsys or stacks, got 'tourch'; ",
        ),
        (STALLED, "capture: {torch: {}}", ".capture.torch: options of torch do nothing on stalled"),
        (STALLED, "capture: {steps: 3}", ".capture.steps: stacks of a rank that stands still are taken once, from"),
        (
            "",
            "capture: {profiler: torch, nsys: {}}",
            ".capture.nsys: options of nsys do nothing where the profiler is torch",
        ),
        (
            "",
            "capture: {profiler: nsys, torch: {with_stack: true}}",
            ".capture.torch: options of torch do nothing where the profiler is nsys",
        ),
        ("", "capture: {profiler: nsys, nsys: {trace: [cuda, nvtz]}}", ".capture.nsys.trace[1]: expected cuda or "),
        ("", "capture: {profiler: nsys, nsys: {sample: gpu}}", ".capture.nsys.sample: expected none or cpu, got "),
        (
            "",
            "capture: {profiler: stacks, steps: 2, stacks: {native: true}}",
            ".capture.steps: stacks with native frames, or the flight recorder's dump, are taken once, from outside",
        ),
        (
            "",
            "capture: {profiler: stacks, warmup_steps: 2}",
            ".capture.warmup_steps: stacks need no warm-up: no profiler is started",
        ),
        ("", "capture: {ranks: [0], sample: 1}", ".capture.sample: of ranks that are named, all are captured"),
        ("", "capture: {ranks: [3, 1, 3]}", ".capture.ranks: named twice: 3"),
        ("", "capture: {ranks: [-1]}", ".capture.ranks[0]: must be greater than or equal to 0, got -1"),
        ("", "capture: {ranks: 0}", ".capture.ranks: must be a list such as [0, 8], got 0"),
        ("", "capture: {sample: 0}", ".capture.sample: must be greater than or equal to 1, got 0"),
        (
            "",
            "capture: {sample: 3, control_ranks: 1}",
            ".capture.sample: 3 captures at once (sample: 3), but limits.captures_per_day is 2",
        ),
        ("", "capture: {ranks: [0, 1, 2]}", ".capture.ranks: 3 captures at once (ranks: 3), but limits.captures_p"),
        (
            "",
            "notify: [{webhook: {url: 'https://example.org/secret'}}]",
            ".notify[0].webhook.url: an address is a secret and stays out of the policy; say url_from_env or url_fro",
        ),
        ("", "notify: [{webhook: {}}]", ".notify[0].webhook: say where its address is found: either url_from_env"),
        (
            "",
            "notify: [{webhook: {url_from_env: A, url_from_file: /a}}]",
            ".notify[0].webhook: say where its address is found: either url_from_env or url_from_file",
        ),
        ("", "notify: [{webhook: {url_from_file: a}}]", ".notify[0].webhook.url_from_file: "),
        ("", "notify: [{webhook: {url_from_env: A, format: teams}}]", ".notify[0].webhook.format: expected clou"),
        ("", "notify: {webhook: {url_from_env: A}}", ".notify: must be a list such as [{webhook: "),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused_with_its_reason(match, fields, message):
    """GIVEN a rule with one mistake THEN that is what is said, once, and of that field."""
    (line,) = lines_of(HEAD + "  limits: {captures_per_day: 2}\n  rules:\n" + RULE % (match, fields))
    assert line.partition(": spec.rules[0]")[2].startswith(message), line


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            "limits: {captures_per_hour: 0}",
            "limits.captures_per_hour: 0 would allow no capture ever; a policy that is only",
        ),
        ("limits: {captures_per_day: 0}", "limits.captures_per_day: 0 would allow no capture ever"),
        ("limits: {captures_per_run: 0}", "limits.captures_per_run: 0 would allow no capture ever"),
        ("limits: {concurrent_ranks: 0}", "limits.concurrent_ranks: 0 would allow no capture ever"),
        ("limits: {overhead_budget: 0%}", "limits.overhead_budget: 0% would allow no capture ever"),
        ("limits: {overhead_budget: 0.5}", "limits.overhead_budget: expected a percentage such as 5%, got 0.5"),
        ("limits: {overhead_budget: 101%}", "limits.overhead_budget: expected 0.01% to 100%, got '101%'"),
        (
            "on_needs_evidence: {hold: false}",
            "on_needs_evidence.hold: only true: that nothing heavy starts on a window",
        ),
        (
            "on_needs_evidence: {gather: [torch]}",
            "on_needs_evidence.gather[0]: expected bucket_ready or nvml or next_win",
        ),
        ("active: {cron: '* * * *'}", "active.cron: expected minute, hour, day, month and weekday such as "),
        ("active: {cron: '61 * * * *'}", "active.cron: expected minute, hour, day, month and weekday such as "),
        ("active: {cron: '* * * * 1-5'}", "active.cron: expected the weekday by name, such as mon-fri, got '1-5'"),
        ("active: {cron: '* * 31 2 *'}", "active.cron: expected a time that comes, but '* * 31 2 *' never does"),
        ("active: {cron: 5}", "active.cron: expected minute, hour, day, month and weekday such as "),
        (
            "active: {timezone: Europe/Berlni}",
            "active.timezone: expected a time zone such as UTC or Europe/Berlin, got 'Eu",
        ),
        (
            "active: {timezone: ../etc/passwd}",
            "active.timezone: expected a time zone such as UTC or Europe/Berlin, got ",
        ),
        ("mitigate: {remedies: []}", "mitigate.remedies: names no remedy; without mitigate there is advice alone"),
        ("mitigate: {remedies: [take_out]}", "mitigate.remedies[0]: expected"),
        ("mitigate: {remedies: stragglar}", "mitigate.remedies: must be a list such as [stragglar], got 'stragglar'"),
        ("retention: {}", "retention: says neither age nor bytes; without retention traces are kept for ever"),
        ("retention: {age: 14}", "retention.age: expected a duration with its unit"),
        ("retention: {age: 1m}", "retention.age: expected 1h to 3650d, got '1m'"),
        ("retention: {bytes: 50}", "retention.bytes: expected a size with its unit"),
    ],
)
def test_a_field_that_cannot_be_meant_is_refused_with_its_reason(fields, said):
    (line,) = lines_of(GOOD + f"  {fields}\n")
    assert line.partition(": spec.")[2].startswith(said), line
