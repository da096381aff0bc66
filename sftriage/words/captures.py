"""A stored capture in words: its facts, as `sftriage traces show`, reports and assistants list them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sftriage.words.decisions import CONTROL_PART, PROFILERS, caused, choice_words, cost_sentence
from sftriage.words.verdicts import counted, milliseconds, size, span

if TYPE_CHECKING:
    from sftriage.traces.manifest import Findings, Manifest


def capture_facts(manifest: Manifest) -> list[tuple[str, str]]:
    """What triggered a capture, what it holds, what it cost, and what its reduced trace showed: names and texts."""
    trigger, capture = manifest.trigger, manifest.capture
    timings = ", ".join(
        f"{'recording' if name == 'run' else name} {milliseconds(seconds)}"
        for name, seconds in capture.timings_s.items()
    )
    once = capture.profiler == "stacks" and not manifest.sampled
    program = "one snapshot of its stacks" if once else PROFILERS[capture.profiler]
    rule = f"{trigger.rule} of policy" if trigger.rule else "none, requested by hand; under the limits of policy"
    cost = "unknown: it is measured once the steps just after the capture have been judged"
    if (found := manifest.cost) is not None:
        cost = cost_sentence(found.cost_s, found.before_s, found.first_step, found.last_step, found.captures)
    detail = f" ({capture.detail})" if capture.detail else ""
    steps = f"{span(capture.first_step, capture.last_step)} of rank {capture.rank} on {capture.host}"
    if manifest.of_hang:
        steps, program, cost = f"{span(capture.first_step, capture.last_step)} of every rank", "", ""
    facts = [
        ("capture", manifest.capture_id),
        ("job, run", f"{manifest.job}, {manifest.run}"),
        ("created", f"{manifest.created_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("because", trigger.why or "unknown"),
        ("rule", f"{rule} {trigger.policy} (sha256 {trigger.policy_sha256[:12]})"),
        ("captured", f"{steps}{program and ', with '}{program}{detail}"),
        (
            "profiler",
            choice_words(trigger.chosen, capture.profiler, trigger.stage) if trigger.chosen and program else "",
        ),
        ("follows", f"{trigger.follows}, the first capture of this suspect" if trigger.follows else ""),
        ("followed by", "" if manifest.followed is None else manifest.followed.capture_id),
        ("control", CONTROL_PART if capture.role == "control" else ""),
        ("reproduced", "" if manifest.of_hang else _reproduced(manifest)),
        *(("evidence", remark) for remark in manifest.evidence),
        ("cost", cost and f"to the job: {cost}"),
        ("its time", cost and f"on rank {capture.rank}: {timings or 'not measured'}"),
        *(("trace", f"{file.name}, {size(file.size_bytes)}, sha256 {file.sha256}") for file in manifest.artefacts),
        ("may contain", manifest.may_contain),
    ]
    if manifest.of_hang and (cause := manifest.cause) is not None:
        facts += [("found", caused(cause)), ("found", cause.next_step)]
    if (findings := manifest.findings) is not None:
        facts += [("found", line) for line in finding_lines(findings)]
        stood_out = [share for share in findings.shares[:5] if share.self_s >= 0.05 * findings.suspect.stage_s]
        facts.append(("most", ", ".join(f"{share.name} {milliseconds(share.self_s)}" for share in stood_out)))
    return [(name, text) for name, text in facts if text]


def _reproduced(manifest: Manifest) -> str:
    found = manifest.reproduced
    if found is None:
        return "unknown whether the fault was there"
    whose = "the suspect's fault" if manifest.capture.role == "control" else "the fault"
    due = " in which it was due" if manifest.trigger.period_steps else ""
    steps = f"{found.steps_with} of {counted(found.steps, 'captured step')}{due}"
    over = f"{milliseconds(abs(found.over_s))} {'longer' if found.over_s >= 0 else 'less'}"
    before = f"before, it cost the job {milliseconds(found.expected_s)} a step"
    return f"{found.answer}: {whose} was in {steps}; the suspect took {over} than its peers ({before})"


def finding_lines(findings: Findings) -> list[str]:
    """Findings in lines: the summary, and the device's side where there is one."""
    cause = findings.cause
    lines = [findings.summary]
    if cause is not None:
        lines = [caused(cause), cause.next_step, findings.summary]
    suspect = findings.suspect
    if suspect.kernels or suspect.launches:
        lines.append(
            f"device: {suspect.kernels:.0f} kernels a step, {milliseconds(suspect.device_s)} of work "
            f"({milliseconds(suspect.collective_s)} in collectives), from {suspect.launches:.0f} launches "
            f"that took the host {milliseconds(suspect.launch_s)}"
        )
    least_s = max(5e-5, 0.05 * suspect.device_s)
    if most := [f"{of.words} {milliseconds(of.device_s)}" for of in findings.kernels[:3] if of.device_s >= least_s]:
        lines.append(f"on the device: {', '.join(most)}")
    return lines
