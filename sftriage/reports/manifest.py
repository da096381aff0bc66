"""A capture's manifest, in lines."""

from __future__ import annotations

from sftriage.reports.reduction import finding_lines
from sftriage.traces.manifest import Manifest
from sftriage.words import CONTROL_PART, milliseconds, size, stage_suspected


def manifest_lines(manifest: Manifest) -> list[str]:
    """What triggered a capture, what it holds, what it cost, and what its trace showed once it was reduced."""
    trigger, capture = manifest.trigger, manifest.capture
    timings = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in capture.timings_s.items())
    rule = f"{trigger.rule} of policy" if trigger.rule else "none, a person asked; under the limits of policy"
    return [
        f"capture     {manifest.capture_id}",
        f"job, run    {manifest.job}, {manifest.run}",
        f"created     {manifest.created_at:%Y-%m-%d %H:%M:%S} UTC",
        f"because     {trigger.why or _why(manifest)}",
        f"rule        {rule} {trigger.policy} (sha256 {trigger.policy_sha256[:12]})",
        f"captured    steps {capture.first_step} to {capture.last_step} of rank {capture.rank} on {capture.host}, "
        f"{capture.profiler} profiler" + (f" ({capture.detail})" if capture.detail else ""),
        *([f"its part    {CONTROL_PART}"] if capture.role == "control" else []),
        f"reproduced  {_reproduced(manifest)}",
        *(f"its GPU     {remark}" for remark in manifest.evidence),
        f"cost        {timings or 'not measured'} on that rank; {_cost(manifest)}",
        *(f"trace       {one.name}, {size(one.size_bytes)}, sha256 {one.sha256}" for one in manifest.artefacts),
        f"may contain {manifest.may_contain}",
        *_found(manifest),
    ]


def _reproduced(manifest: Manifest) -> str:
    found = manifest.reproduced
    if found is None:
        return "not told"
    whose = "the suspect's fault " if manifest.capture.role == "control" else ""
    due = " that it was due in" if manifest.trigger.period_steps else ""
    return (
        f"{found.answer}: {whose}in {found.steps_with} of {found.steps} captured steps{due}, "
        f"{milliseconds(found.over_s)} over its peers a step ({milliseconds(found.expected_s)} before)"
    )


def _cost(manifest: Manifest) -> str:
    cost = manifest.cost
    if cost is None or cost.cost_s is None or cost.before_s is None:
        return "for the job not known"
    steps = f"steps {cost.first_step} to {cost.last_step}, of {milliseconds(cost.before_s)} before"
    if cost.cost_s <= 0.0:
        return f"for the job nothing that was seen ({steps})"
    shared = "" if cost.captures == 1 else f", shared by {cost.captures} captures"
    return f"{milliseconds(cost.cost_s)} for the job ({steps}{shared})"


def _why(manifest: Manifest) -> str:
    """Why it was captured, of a manifest that does not say it in words yet."""
    trigger = manifest.trigger
    if trigger.label == "asked":
        return "a person asked for it"
    ranks = ", ".join(map(str, trigger.ranks[:8])) + (", ..." if len(trigger.ranks) > 8 else "")
    return (
        f"rank {ranks} in {stage_suspected(trigger.label, trigger.stage)} cost {milliseconds(trigger.gain_s)} a step "
        f"({trigger.share:.0%}), steps {trigger.window.first_step} to {trigger.window.last_step}"
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
