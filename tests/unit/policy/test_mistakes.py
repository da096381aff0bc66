"""Policies with a mistake of every kind: each is refused, where it is, with its reason."""

from __future__ import annotations

import pytest

from .test_loading import HEAD, lines_of

GOOD = HEAD + "  rules: [{name: slow-rank, match: {}, capture: {}}]\n"


RULE = "    - name: r\n      match: {label: %s}\n      %s\n"


@pytest.mark.parametrize(
    ("label", "fields", "said"),
    [
        ("suspect", "for: 2", ".for: expected steps or a time such as 100 steps, 30s or 5m, got 2"),
        ("suspect", "for: 2 stepz", ".for: expected steps or a time such as 100 steps, 30s or 5m, got '2 stepz'"),
        ("suspect", "for: 30", ".for: expected steps or a time such as 100 steps, 30s or 5m, got 30"),
        ("suspect", "for: 0 steps", ".for: expected 1 step to 1000000 steps, got '0 steps'"),
        ("suspect", "for: 1000001 steps", ".for: expected 1 step to 1000000 steps, got '1000001 steps'"),
        ("suspect", "for: 0 windows", ".for: expected 1 step to 1000000 steps, got '0 windows'"),
        ("suspect", "for: 1001 windows", ".for: expected 1 step to 1000000 steps, got '1001 windows'"),
        ("suspect", "for: 10ms", ".for: expected 1s to 30d, got '10ms'"),
        ("suspect", "for: 31d", ".for: expected 1s to 30d, got '31d'"),
        ("suspect", "four: 2 steps", '.four: unknown field; did you mean "for"?'),
        ("suspect, scope: [rnak]", "", ".match.scope[0]: expected rank or host or cohort or all, got 'rnak'; did yo"),
        ("suspect, scope: rank", "", ".match.scope: must be a list such as [rank, host], got 'rank'"),
        (
            "suspect, pattern: [cronic]",
            "",
            ".match.pattern[0]: expected chronic or recurring or one-off, got 'cronic'; ",
        ),
        (
            "suspect, pattern: [one-off]",
            "capture: {}",
            ".match.pattern: no capture on one-off alone, because the fault",
        ),
        (
            "stalled",
            "capture: {profiler: torch}",
            ".match.label: no torch capture on stalled, because it starts at a rank's next step",
        ),
        ("stalled", "capture: {profiler: nsys}", ".match.label: no nsys capture on stalled, because it starts at a"),
        ("stalled, pattern: [chronic]", "", ".match.pattern: no pattern on stalled: the step has not ended"),
        ("stalled", "for: 2 windows", ".for: no `for` on stalled: a stall is reported once; detection.stalled_after"),
        ("stalled", "for: 30s", ".for: no `for` on stalled: a stall is reported once; detection.stalled_after says"),
        ("suspect, reason: regressed", "", ".match.label: no label beside regressed, which is told whatever the label"),
        ("needs_evidence", "notify: []", ".match.label: a rule on needs_evidence would do nothing; such windows"),
        (
            "needs_evidence",
            "notify: [{webhook: {url_from_env: A}}]",
            ".match.label: no message on needs_evidence, because such windows come all the time",
        ),
        (
            "suspect",
            "capture: {profiler: tourch}",
            ".capture.profiler: expected auto or torch or nsys or stacks, got 'tourch'; ",
        ),
        ("stalled", "capture: {torch: {}}", ".capture.torch: options of torch do nothing on stalled"),
        ("stalled", "capture: {steps: 3}", ".capture.steps: stacks of a rank that stands still are taken once, from"),
        (
            "suspect",
            "capture: {profiler: torch, nsys: {}}",
            ".capture.nsys: options of nsys do nothing where the profiler is torch",
        ),
        (
            "suspect",
            "capture: {profiler: nsys, torch: {with_stack: true}}",
            ".capture.torch: options of torch do nothing where the profiler is nsys",
        ),
        (
            "suspect",
            "capture: {profiler: nsys, nsys: {trace: [cuda, nvtz]}}",
            ".capture.nsys.trace[1]: expected cuda or ",
        ),
        (
            "suspect",
            "capture: {profiler: nsys, nsys: {sample: gpu}}",
            ".capture.nsys.sample: expected none or cpu, got ",
        ),
        (
            "suspect",
            "capture: {profiler: stacks, steps: 2, stacks: {native: true}}",
            ".capture.steps: stacks with native frames, or the flight recorder's dump, are taken once, from outside",
        ),
        (
            "suspect",
            "capture: {profiler: stacks, warmup_steps: 2}",
            ".capture.warmup_steps: stacks need no warm-up: no profiler is started",
        ),
        ("suspect", "capture: {ranks: [0], sample: 1}", ".capture.sample: of ranks that are named, all are captured"),
        ("suspect", "capture: {ranks: [3, 1, 3]}", ".capture.ranks: named twice: 3"),
        ("suspect", "capture: {ranks: [-1]}", ".capture.ranks[0]: must be greater than or equal to 0, got -1"),
        ("suspect", "capture: {ranks: 0}", ".capture.ranks: must be a list such as [0, 8], got 0"),
        ("suspect", "capture: {sample: 0}", ".capture.sample: must be greater than or equal to 1, got 0"),
        (
            "suspect",
            "capture: {sample: 3, control_ranks: 1}",
            ".capture.sample: 3 captures at once (sample: 3), but limits.captures_per_day is 2",
        ),
        (
            "suspect",
            "capture: {ranks: [0, 1, 2]}",
            ".capture.ranks: 3 captures at once (ranks: 3), but limits.captures_p",
        ),
        (
            "suspect",
            "notify: [{webhook: {url: 'https://example.org/secret'}}]",
            ".notify[0].webhook.url: an address is a secret and stays out of the policy; say url_from_env or url_fro",
        ),
        (
            "suspect",
            "notify: [{webhook: {}}]",
            ".notify[0].webhook: say where its address is found: either url_from_env",
        ),
        (
            "suspect",
            "notify: [{webhook: {url_from_env: A, url_from_file: /a}}]",
            ".notify[0].webhook: say where its address is found: either url_from_env or url_from_file",
        ),
        ("suspect", "notify: [{webhook: {url_from_file: a}}]", ".notify[0].webhook.url_from_file: "),
        (
            "suspect",
            "notify: [{webhook: {url_from_env: A, format: teams}}]",
            ".notify[0].webhook.format: expected clou",
        ),
        ("suspect", "notify: {webhook: {url_from_env: A}}", ".notify: must be a list such as [{webhook: "),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused_with_its_reason(label, fields, said):
    """GIVEN a rule with one mistake THEN that is what is said, once, and of that field."""
    (line,) = lines_of(HEAD + "  limits: {captures_per_day: 2}\n  rules:\n" + RULE % (label, fields))
    assert line.partition(": spec.rules[0]")[2].startswith(said), line


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
