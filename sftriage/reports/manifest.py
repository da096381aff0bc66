"""A capture's manifest, in lines."""

from __future__ import annotations

from sftriage.reports.reduction import finding_lines
from sftriage.traces.manifest import Manifest
from sftriage.words.amounts import counted, milliseconds, size, some_ranks, span
from sftriage.words.captures import CONTROL_PART, PROFILERS, choice_words, cost_sentence, stage_suspected

_TIMES = {"run": "recording"}


def manifest_lines(manifest: Manifest) -> list[str]:
    """What triggered a capture, what it holds, what it cost, and what its trace showed once it was reduced."""
    trigger, capture = manifest.trigger, manifest.capture
    timings = ", ".join(
        f"{_TIMES.get(name, name)} {milliseconds(seconds)}" for name, seconds in capture.timings_s.items()
    )
    rule = f"{trigger.rule} of policy" if trigger.rule else "none, a person asked; under the limits of policy"
    return [
        f"capture     {manifest.capture_id}",
        f"job, run    {manifest.job}, {manifest.run}",
        f"created     {manifest.created_at:%Y-%m-%d %H:%M:%S} UTC",
        f"because     {trigger.why or _why(manifest)}",
        f"rule        {rule} {trigger.policy} (sha256 {trigger.policy_sha256[:12]})",
        f"captured    {span(capture.first_step, capture.last_step)} of rank {capture.rank} on {capture.host}, "
        f"with {_program(manifest)}" + (f" ({capture.detail})" if capture.detail else ""),
        *([f"profiler    {choice_words(trigger.chosen, capture.profiler, trigger.stage)}"] if trigger.chosen else []),
        *([f"follows     {trigger.follows}, the first capture of this suspect"] if trigger.follows else []),
        *([f"followed by {manifest.followed.capture_id}"] if manifest.followed is not None else []),
        *([f"its part    {CONTROL_PART}"] if capture.role == "control" else []),
        f"reproduced  {_reproduced(manifest)}",
        *(f"its GPU     {remark}" for remark in manifest.evidence),
        f"cost        to the job: {_cost(manifest)}",
        f"its time    on rank {capture.rank}: {timings or 'not measured'}",
        *(f"trace       {one.name}, {size(one.size_bytes)}, sha256 {one.sha256}" for one in manifest.artefacts),
        f"may contain {manifest.may_contain}",
        *_found(manifest),
    ]


def _program(manifest: Manifest) -> str:
    once = manifest.capture.profiler == "stacks" and not manifest.sampled
    return "one look at its stacks" if once else PROFILERS[manifest.capture.profiler]


def _reproduced(manifest: Manifest) -> str:
    found = manifest.reproduced
    if found is None:
        return "it cannot be told whether the fault was there"
    whose = "the suspect's fault" if manifest.capture.role == "control" else "the fault"
    due = " in which it was due" if manifest.trigger.period_steps else ""
    there = f"{found.answer}: {whose} was in {found.steps_with} of {counted(found.steps, 'captured step')}{due}"
    before = f"before, it cost the job {milliseconds(found.expected_s)} a step"
    over = f"{milliseconds(abs(found.over_s))} {'longer' if found.over_s >= 0 else 'less'}"
    return f"{there}; the suspect took {over} than its peers ({before})"


def _cost(manifest: Manifest) -> str:
    cost = manifest.cost
    if cost is None:
        return "not known: it is measured once the steps just after the capture have been judged"
    return cost_sentence(cost.cost_s, cost.before_s, cost.first_step, cost.last_step, cost.captures)


def _why(manifest: Manifest) -> str:
    """Why it was captured, of a manifest that does not say it in words yet."""
    trigger = manifest.trigger
    if trigger.label == "asked":
        return "a person asked for it"
    ranks = some_ranks(trigger.ranks)
    return (
        f"{ranks} in {stage_suspected(trigger.label, trigger.stage)} cost {milliseconds(trigger.gain_s)} a step "
        f"({trigger.share:.0%}), in {span(trigger.window.first_step, trigger.window.last_step)}"
    )


def _found(manifest: Manifest) -> list[str]:
    findings = manifest.findings
    if findings is None:
        return []
    lines = [f"found       {line}" for line in finding_lines(findings)]
    stood_out = [share for share in findings.shares[:5] if share.self_s >= 0.05 * findings.suspect.stage_s]
    if stood_out:
        most = (f"{share.name} {milliseconds(share.self_s)}" for share in stood_out)
        lines.append(f"most        {', '.join(most)}")
    return lines
