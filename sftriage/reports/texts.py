"""Why a window was decided as it was, a manifest, a report in Markdown, and a replayed policy: as lines of text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from sftriage.model.captures import Decision, Outcome
from sftriage.model.windows import plain
from sftriage.words import decisions
from sftriage.words.amounts import counted, milliseconds, size, some_ranks, span
from sftriage.words.run import QUESTIONS, remedy_told
from sftriage.words.verdicts import explain, system_sentence, verdict_sentence, when, where, who

if TYPE_CHECKING:
    from sftriage.controller.replay import ReplayedDecision
    from sftriage.model.events import RemedyChanged, WindowJudged
    from sftriage.model.verdicts import Verdict
    from sftriage.runs.report import RunReport
    from sftriage.traces.manifest import Findings, Manifest


def resolves(verdict: Verdict, decision: Decision) -> str:
    """What would resolve a window that was held, or a decision not to capture; "" where there is nothing to say."""
    split = bool(verdict.numbers.get("split"))
    return decisions.advice(verdict.reasons, split=split) if verdict.reasons else decisions.resolution(decision)


def explanation_lines(event: WindowJudged, remedies: Iterable[RemedyChanged] = ()) -> Iterator[str]:
    """The verdict, its numbers against their thresholds, the runner-up, and what would have changed the label.

    ``remedies`` are what had been done about stragglers by then.
    """
    verdict, decision = event.verdict, event.decision
    explanation = explain(verdict)
    yield verdict_sentence(verdict)
    # (what is asked of nothing is no threshold)
    amounts = {"s": milliseconds, "fraction": "{:.1%}".format, "log odds": "{:.1f}".format}
    for check in (one for one in explanation.checks if one.threshold):
        value, threshold = map(amounts[check.unit], (check.value, check.threshold))
        yield f"  {check.what}: {value}, {'reaches' if check.met else 'is under'} the threshold of {threshold}"
    if verdict.suspects:
        first = verdict.suspects[0]
        gain = f"{milliseconds(first.gain_s)} of each slow step ({first.share:.1%})"
        yield f"{'Suspect:  ' if verdict.named else 'Candidate:'} {who(first)}, {where(first)}, {when(first)}: {gain}"
        if done := system_sentence(verdict):
            yield f"System:    {done}"
    if verdict.suspects and explanation.runner_up is None:
        yield "Runner-up: nobody else would save much if mended alone"
    if explanation.runner_up is not None:
        second = explanation.runner_up
        yield f"Runner-up: {who(second)}, {where(second)}: {milliseconds(second.gain_s)} of each ({second.share:.1%})"
    for change in explanation.changes:
        yield f"It would be {change}."
    if what := resolves(verdict, decision):
        yield f"What would resolve it: {what}"
    yield f"Decided: {decision.outcome}: {decisions.reason_sentence(decision)}"
    for remedy in remedies:
        yield f"Remedy: {remedy_told(remedy)}"


_TIMES = {"run": "recording"}


def manifest_lines(manifest: Manifest) -> list[str]:
    """What triggered a capture, what it holds, what it cost, and what its trace showed once it was reduced."""
    trigger, capture = manifest.trigger, manifest.capture
    timings = ", ".join(
        f"{_TIMES.get(name, name)} {milliseconds(seconds)}" for name, seconds in capture.timings_s.items()
    )
    chosen = decisions.choice_words(trigger.chosen, capture.profiler, trigger.stage) if trigger.chosen else ""
    once = capture.profiler == "stacks" and not manifest.sampled
    program = "one look at its stacks" if once else decisions.PROFILERS[capture.profiler]
    rule = f"{trigger.rule} of policy" if trigger.rule else "none, a person asked; under the limits of policy"
    cost = "not known: it is measured once the steps just after the capture have been judged"
    if (found := manifest.cost) is not None:
        cost = decisions.cost_sentence(found.cost_s, found.before_s, found.first_step, found.last_step, found.captures)
    return [
        f"capture     {manifest.capture_id}",
        f"job, run    {manifest.job}, {manifest.run}",
        f"created     {manifest.created_at:%Y-%m-%d %H:%M:%S} UTC",
        f"because     {trigger.why or _why(manifest)}",
        f"rule        {rule} {trigger.policy} (sha256 {trigger.policy_sha256[:12]})",
        f"captured    {span(capture.first_step, capture.last_step)} of rank {capture.rank} on {capture.host}, "
        f"with {program}" + (f" ({capture.detail})" if capture.detail else ""),
        *([f"profiler    {chosen}"] if chosen else []),
        *([f"follows     {trigger.follows}, the first capture of this suspect"] if trigger.follows else []),
        *([f"followed by {manifest.followed.capture_id}"] if manifest.followed is not None else []),
        *([f"its part    {decisions.CONTROL_PART}"] if capture.role == "control" else []),
        f"reproduced  {_reproduced(manifest)}",
        *(f"its GPU     {remark}" for remark in manifest.evidence),
        f"cost        to the job: {cost}",
        f"its time    on rank {capture.rank}: {timings or 'not measured'}",
        *(f"trace       {one.name}, {size(one.size_bytes)}, sha256 {one.sha256}" for one in manifest.artefacts),
        f"may contain {manifest.may_contain}",
        *_found(manifest),
    ]


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


def _why(manifest: Manifest) -> str:
    trigger = manifest.trigger
    if trigger.label == "asked":
        return "a person asked for it"
    ranks, stage = some_ranks(trigger.ranks), decisions.stage_suspected(trigger.label, trigger.stage)
    return (
        f"{ranks} in {stage} cost {milliseconds(trigger.gain_s)} a step "
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


def finding_lines(findings: Findings) -> list[str]:
    """Findings in lines: the summary, and the device's side where there is one."""
    cause = findings.cause
    lines = [findings.summary]
    if cause is not None:
        lines = [decisions.caused(cause), cause.next_step, findings.summary]
    suspect = findings.suspect
    if suspect.kernels or suspect.launches:
        lines.append(
            f"device: {suspect.kernels:.0f} kernels a step, {milliseconds(suspect.device_s)} of work "
            f"({milliseconds(suspect.collective_s)} in collectives), from {suspect.launches:.0f} launches "
            f"that took the host {milliseconds(suspect.launch_s)}"
        )
    most = [one for one in findings.kernels[:3] if one.device_s >= max(5e-5, 0.05 * suspect.device_s)]
    if most:
        lines.append(f"on the device: {', '.join(f'{one.words} {milliseconds(one.device_s)}' for one in most)}")
    return lines


_MEANS_SOMETHING = re.compile(r"([\\`*_{}\[\]<>|#]|:(?=(?:[a-z+-][\w+-]*|100|1234):))")


def markdown(report: RunReport, made: str) -> str:
    """A report for a chat or a pull request; ``made`` says by what and when."""
    return "\n".join([*_head(report), *_found_lines(report), f"_{_text(made)}_", ""])


def _text(words: str) -> str:
    return _MEANS_SOMETHING.sub(r"\\\1", words)


def _head(report: RunReport) -> Iterator[str]:
    yield f"# {_text(report.title)}"
    yield ""
    yield ", ".join(f"{name} {_text(value)}" for name, value in report.about)
    yield ""
    glance = report.glance
    if glance is None:
        return
    yield f"**{_text(glance.headline)}.** {_text(glance.sentence)}"
    if glance.cause is not None:
        yield from ("", f"**{_text(decisions.caused(glance.cause))}**")
    yield ""
    for one in glance.answers:
        yield f"- **{QUESTIONS[one.question]}** {_text('; '.join((one.text, *one.more)))}"
    if glance.steps:
        yield from ("", "## What to do next", "")
        for number, step in enumerate(glance.steps, start=1):
            yield f"{number}. {_text(step.text)}{f' `{step.command}`' if step.command else ''}"
    yield ""


def _found_lines(report: RunReport) -> Iterator[str]:
    if (frontier := report.frontier) is not None:
        yield f"## Where a step's time went, steps {frontier.first_step:,} to {frontier.last_step:,}"
        yield from ("", "| stage | advance | share |", "| --- | ---: | ---: |")
        for stage, advance_s in frontier.advances_s.items():
            share = advance_s / frontier.exposed_s if frontier.exposed_s else 0.0
            yield f"| {_text(stage)} | {milliseconds(advance_s)} | {share:.0%} |"
        yield from (f"| **step** | {milliseconds(frontier.exposed_s)} | 100% |", "")
    for one in report.captures:
        yield from (f"## {_text(one.title)}", "")
        if one.why:
            yield from (_text(one.why), "")
        for name, words in one.facts:
            yield f"- **{name}:** {_text(words)}"
        yield from (f"- **fetch it:** `{one.fetch}`", "")
    if report.left_out:
        yield from (f"And {report.left_out:,} captures before these.", "")


OUTCOMES: tuple[Outcome, ...] = ("capture", "hold", "throttle", "ignore")


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """A replay of policies on a recording, by their names: every window and every stall, in order.

    ``start_s`` is when the first window began.
    """

    policies: tuple[str, ...]
    recording: str
    start_s: float
    replayed: Sequence[ReplayedDecision]

    def text(self) -> str:
        """The timeline, with what follows on one another for the same reason in one line, and the summary."""
        groups = groupby(enumerate(self.replayed), key=lambda numbered: _likeness(*numbered))
        lines = [line for _, group in groups for line in self._lines([one for _, one in group])]
        widths = [*(max(map(len, column)) for column in list(zip(*lines, strict=True))[:-1]), 0]
        aligned = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*aligned, "", *self._summary()]) + "\n"

    def values(self) -> dict[str, Any]:
        return {
            "policies": list(self.policies),
            "recording": self.recording,
            "outcomes": self._counts(),
            "captures": self._captures,
            "notifications": self._messages,
            "windows": [
                {
                    "time_s": one.time_s,
                    "after_s": one.time_s - self.start_s,
                    "label": one.verdict.label,
                    "reasons": list(one.verdict.reasons),
                    "suspect": plain(one.verdict.named),
                    "decision": decisions.decision_values(one.decision),
                    "captured_steps": plain(one.captured_steps),
                }
                for one in self.replayed
            ],
        }

    @property
    def _captures(self) -> int:
        return sum(len(one.decision.requests) for one in self.replayed)

    @property
    def _messages(self) -> int:
        return sum(len(one.decision.notify) for one in self.replayed)

    def _counts(self) -> dict[Outcome, int]:
        counted = Counter(one.decision.outcome for one in self.replayed)
        return {outcome: counted[outcome] for outcome in OUTCOMES}

    def _lines(self, group: list[ReplayedDecision]) -> Iterable[tuple[str, ...]]:
        first, last = group[0].decision, group[-1].decision
        steps = f"{first.first_step}-{last.last_step}" if first.first_step != last.last_step else f"{first.first_step}"
        attempt = f"attempt {first.attempt}, " if first.attempt else ""
        count = counted(len(group), "window") if first.label != "stalled" else "stall"
        about = decisions.reason_sentence(first)
        if first.label == "suspect" and first.outcome != "capture":
            named = group[0].verdict.suspects[0]
            gain = f"{1000 * named.gain_s:.3g} ms a step, {named.pattern}"
            about += f" ({who(named)} in {where(named)}, {gain})"
        yield _elapsed(group[0].time_s - self.start_s), f"{attempt}steps {steps}", count, first.outcome, about
        for request, recorded in zip(first.requests, group[0].captured_steps, strict=True):
            what = f"steps {recorded[0]} to {recorded[1]}, no more" if recorded else "at once, no more"
            healthy = ", healthy, to compare with" if request.role == "control" else ""
            bounds = f"{request.max_seconds:g} s and {size(request.max_bytes)}"
            yield *[""] * 4, f"rank {request.rank}{healthy}: {request.profiler}, {what} than {bounds}"
        for rule in first.notify:
            yield *[""] * 4, f"rule {rule} notifies"

    def _summary(self) -> Iterable[str]:
        yield f"### Policy {', '.join(self.policies)} on {self.recording}"
        yield ""
        if not self.replayed:
            yield "No window: the recording is shorter than the warm-up and one window."
            return
        lasted = _elapsed(max(one.time_s for one in self.replayed) - self.start_s)
        made = [counted(self._captures, "capture")]
        if self._messages:
            made.append(counted(self._messages, "notification"))
        yield f"{counted(len(self.replayed), 'decision')} in {lasted}; {', '.join(made)}."
        yield ""
        yield "| outcome | windows | why |"
        yield "|---|---:|---|"
        for outcome, windows in self._counts().items():
            why = Counter(
                decisions.reason_kind(one.decision) for one in self.replayed if one.decision.outcome == outcome
            )
            said = ", ".join(f"{reason} ({count})" for reason, count in sorted(why.items(), key=lambda one: -one[1]))
            yield f"| {outcome} | {windows} | {said.replace('|', '&#124;')} |"


def _likeness(number: int, one: ReplayedDecision) -> tuple[object, ...]:
    """What windows have in common that are one line. A capture, a message and a stall are lines of their own."""
    decision, verdict = one.decision, one.verdict
    alone = number if decision.requests or decision.notify or verdict.label == "stalled" else None
    named = verdict.suspects[0].identity if verdict.label == "suspect" else None
    # Numbers go up and down from window to window.
    names = {name: value for name, value in decision.parameters.items() if not isinstance(value, (int, float))}
    which = decision.reason, frozenset(decision.parameters), frozenset(names.items())
    return alone, decision.attempt, decision.outcome, decision.rule, which, named


def _elapsed(seconds: float) -> str:
    minutes, rest = divmod(max(0.0, seconds), 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02}:{rest:04.1f}"
