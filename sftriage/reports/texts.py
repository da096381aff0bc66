"""Tables and lines of text that commands print: verdicts, decisions, captures, traces, replayed policies.

Functions take records and return rich tables or strings; nothing here prints.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, get_args

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from sftriage.model.captures import Decision, Outcome
from sftriage.model.verdicts import Verdict
from sftriage.model.windows import plain
from sftriage.words import decisions, verdicts
from sftriage.words.captures import capture_facts
from sftriage.words.differences import difference_lines
from sftriage.words.verdicts import every, milliseconds, numbers, size, slow_stage, span, subject, verdict_sentence

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import JustifyMethod

    from sftriage.controller.replay import ReplayedDecision
    from sftriage.model.events import CauseFound, DifferencesFound, RemedyChanged, WindowJudged
    from sftriage.reduce.stages import Reduction
    from sftriage.reduce.together import Agreement
    from sftriage.runs.timetable import TimeTable
    from sftriage.runs.whatif import WhatIf
    from sftriage.runtime.reducing import Confirmation
    from sftriage.traces.catalogue import CaptureRow
    from sftriage.traces.manifest import Findings, Manifest
    from sftriage.traces.store import StoreCondition

LABEL_STYLES = {"healthy": "green", "suspect": "bold red", "stalled": "bold red", "needs_evidence": "yellow"}
OUTCOME_STYLES = {"capture": "bold red", "hold": "yellow", "throttle": "magenta", "ignore": "dim"}


def titled(title: str, left: Sequence[str], right: Sequence[str] = (), **options: Any) -> Table:
    """A table with a title over its left edge, whose ``left`` columns come first, and the ``right`` are numbers."""
    table = Table(title=title, title_justify="left", **options)
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    return table


def frontier_table(verdict: Verdict) -> Table:
    """Where a window's exposed time went, stage by stage."""
    clock = f", {verdict.clock} clock" if verdicts.CLOCKS[verdict.clock] else ""
    title = f"Frontier, {span(verdict.first_step, verdict.last_step)}{clock}"
    table = titled(title, ["stage"], ["advance", "share", "leader"])
    for stage, advance_s in verdict.advances_s.items():
        share, leader = advance_s / verdict.exposed_s if verdict.exposed_s else 0.0, verdict.leaders[stage]
        led = "(together)" if stage in verdict.sync else "" if leader is None else f"rank {leader}"
        table.add_row(stage, milliseconds(advance_s), f"{share:.0%}", led)
    table.add_section()
    table.add_row("exposed", milliseconds(verdict.exposed_s), "100%", "")
    return table


def time_table(times: TimeTable) -> Table:
    """Where a run's time went."""
    from sftriage.words.run import time_row_detail, time_row_name  # (imports msgspec)

    numbers = ["time", "share", "rank-hours", *["cost"] * bool(times.price)]
    table = titled(f"Where {verdicts.lasted(times.wall_s)} went", ["", ""], numbers)
    for row in times.rows:
        about = time_row_name(row), time_row_detail(row), verdicts.lasted(row.seconds), f"{times.share(row):.1%}"
        table.add_row(*about, f"{row.rank_hours:.2g}", *[times.money(row.rank_hours)] * bool(times.price))
    return table


def windows_table(judged: Sequence[Verdict]) -> Table:
    """One row per window."""
    again = any(verdict.attempt for verdict in judged)
    table = titled(
        "Windows", ["attempt"] * again + ["steps", "verdict", "a step", "suspect", "since", "gain", "how often"]
    )
    for column in table.columns:
        column.justify = "right" if column.header in ("a step", "since", "gain", "how often") else "left"
    for verdict in judged:
        label, suspected = ": ".join(filter(None, (verdict.label, ", ".join(verdict.reasons)))), list[str]()
        for suspect in verdict.suspects[:1]:
            how_often = every(suspect.period_steps) if suspect.period_steps else f"{suspect.persistence:.0%}"
            named = f"{subject(suspect)}, {slow_stage(suspect)}{'' if verdict.named else ' (candidate)'}"
            since = "" if suspect.onset_step is None else str(suspect.onset_step)
            suspected = [named, since, f"{milliseconds(suspect.gain_s)} ({suspect.share:.0%})", how_often]
        table.add_row(
            *[str(verdict.attempt + 1)] * again,
            numbers(verdict.first_step, verdict.last_step),
            Text(label, LABEL_STYLES[verdict.label]),
            milliseconds(verdict.step_s),
            *suspected,
        )
    return table


def decisions_table(decided: Sequence[dict[str, Any]]) -> Table:
    """One row per decision, as `decision_values` returns them."""
    again = any(decision["attempt"] for decision in decided)
    table = titled("Decisions", ["time (UTC)", *["attempt"] * again, "steps", "label", "outcome", "reason"])
    for decision in decided:
        became = [
            f"rank {result['rank']}: {result['state']}" + (f", {result['detail']}" if result["detail"] else "")
            for result in decision["results"]
        ]
        table.add_row(
            f"{verdicts.moment(decision['time_s']):%H:%M:%S}",
            *[str(decision["attempt"] + 1)] * again,
            numbers(decision["first_step"], decision["last_step"]),
            Text(decision["label"], LABEL_STYLES.get(decision["label"], "")),
            Text(decision["outcome"], OUTCOME_STYLES[decision["outcome"]]),
            "; ".join([decision["words"], *became]),
        )
    return table


_FOLDED = {"job": 12, "cause": 32}
_DISPENSABLE = frozenset({"host", "reproduced", "size", "because of window", "created (UTC)"})


def captures_table(rows: Sequence[CaptureRow], conditions: Sequence[StoreCondition | None], width: int) -> Table:
    """One row per capture, with its run if there are several, its host if it is not this one, its state if damaged.

    Users copy ids of captures and runs, so none is ever wrapped. `sftriage traces show` has the columns that do not
    fit.
    """
    states = [condition.state if condition else "" for condition in conditions]
    several = len({(row.job, row.run) for row in rows}) > 1
    cells = {
        "job": [row.job for row in rows] if several else [],
        "run": [row.run for row in rows] if several else [],
        "capture": [row.capture_id for row in rows],
        "state": states if set(states) - {"", "whole"} else [],
        "rank": [str(row.rank) for row in rows],
        "host": [row.host for row in rows] if {row.host for row in rows} - {socket.gethostname()} else [],
        "suspect stage": list(map(_stage_of, rows)),
        "cause": [row.why_slow.short if row.why_slow else "" for row in rows] if any(row.cause for row in rows) else [],
        "captured steps": [numbers(row.first_step, row.last_step) for row in rows],
        "reproduced": ["" if row.role == "control" else row.reproduced or "" for row in rows],
        "size": [size(row.size_bytes) for row in rows],
        "because of window": [
            "(requested)" if row.label == "asked" else numbers(row.window_first_step, row.window_last_step)
            for row in rows
        ],
        "created (UTC)": [row.created_at[:19].replace("T", " ") for row in rows],
    }
    # Every cell has a space on either side, and a line.
    left, widths = width - 1, {name: _width(name, texts) for name, texts in cells.items() if texts}
    if left < sum(needed + 3 for name, needed in widths.items() if name not in _DISPENSABLE):
        return _captures_list({name: cells[name] for name in widths})
    for name, needed in list(widths.items()):
        if name in _DISPENSABLE and needed + 3 > left:
            del widths[name]
        else:
            left -= needed + 3
    table = titled("Captures", ())
    for name, needed in widths.items():
        # The remaining width goes to names that would otherwise take two lines.
        more = len(name) - needed if needed < len(name) <= needed + left else 0
        left -= more
        justify: JustifyMethod = "right" if name in ("rank", "size") else "left"
        table.add_column(name, justify=justify, overflow="fold", width=needed + more)
    for texts in zip(*(cells[name] for name in widths), strict=True):
        table.add_row(*texts)
    return table


def _stage_of(row: CaptureRow) -> str:
    if row.role == "control":
        return "(control)"
    return decisions.stage_suspected(row.label, row.stage) + (" (follow-up)" if row.follows_up else "")


def _width(name: str, texts: Sequence[str]) -> int:
    widest = max(map(cell_len, texts))
    return max(min(widest, _FOLDED.get(name, widest)), *map(len, name.split()))


def _captures_list(cells: Mapping[str, Sequence[str]]) -> Table:
    """The captures if a table does not fit: several lines per capture, none truncated."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column("name")
    table.add_column("value", overflow="fold")
    for texts in zip(*cells.values(), strict=True):
        for name, text in zip(cells, texts, strict=True):
            if text:
                table.add_row(name, text)
        table.add_section()
        table.add_row()
    return table


ORIGINS = {
    "sftriage": "marked by sftriage",
    "names": "recognised by common names",
    "map": "assigned by the name map",
}


def trace_values(reduction: Reduction) -> dict[str, Any]:
    """A reduction as JSON values."""
    trace, steps = reduction.trace, reduction.steps
    return {
        **{name: getattr(trace, name) for name in ("source", "rank", "world_size", "job", "capture_id")},
        "origin": reduction.origin,
        "stages": reduction.schema.stages,
        "sync": reduction.schema.sync,
        "steps": steps.number_N.tolist(),
        "start_ns": steps.start_N.tolist(),
        "step_ns": (steps.end_N - steps.start_N).tolist(),
        "durations_ns": reduction.durations_ns_NS.tolist(),
        "mean_s": reduction.mean_s,
        "absolute": trace.absolute,
        "notes": reduction.notes,
    }


def stages_table(reduction: Reduction) -> Table:
    """The times of each stage of a trace."""
    steps = reduction.steps
    whose = "a trace of unknown rank" if reduction.trace.rank is None else f"rank {reduction.trace.rank}"
    title = f"Stages of {whose}, steps {steps.number_N[0]} to {steps.number_N[-1]}, {ORIGINS[reduction.origin]}"
    caption = {"caption": reduction.trace.source, "caption_justify": "left"}
    table = titled(title, ["stage"], ["mean", "least", "most", "share"], **caption)
    lasts_N = steps.end_N - steps.start_N
    for stage, its_N in zip(reduction.schema.stages, reduction.durations_ns_NS.T, strict=True):
        name = f"{stage} (sync)" if stage in reduction.schema.sync else stage
        table.add_row(name, *_times(its_N), f"{its_N.mean() / lasts_N.mean():.0%}")
    table.add_section()
    table.add_row("step", *_times(lasts_N), "100%")
    return table


def _times(ns_N: NDArray[Any]) -> list[str]:
    return [milliseconds(float(value) * 1e-9) for value in (ns_N.mean(), ns_N.min(), ns_N.max())]


def agreement_table(agreement: Agreement) -> Table:
    """Trace against signal, stage by stage."""
    title = f"Rank {agreement.rank}, trace against signal, steps {agreement.first_step} to {agreement.last_step}"
    table = titled(title, ["stage"], ["trace", "signal", "difference", "allowed"])
    table.add_column("agrees")
    for stage in agreement.stages:
        times = (milliseconds(stage.trace_s), milliseconds(stage.signal_s), f"{stage.difference_s * 1e3:+.2f} ms")
        agrees = Text("yes") if stage.agrees else Text("no", "bold red")
        table.add_row(stage.stage, *times, milliseconds(stage.allowed_s), agrees)
    return table


def confirmation_sentence(confirmation: Confirmation) -> str:
    """Whether the heavy trace agrees with the coarse signal."""
    parts = []
    for agreement in confirmation.ranks:
        part = f"rank {agreement.rank}: {agreement.agrees}"
        for stage in agreement.stages:
            if stage.stage == agreement.stage:
                part += f", {stage.stage} {milliseconds(stage.trace_s)} against {milliseconds(stage.signal_s)}"
        off = [f"{stage.stage} {stage.difference_s * 1e3:+.1f} ms" for stage in agreement.stages if not stage.agrees]
        parts.append(part + (f"; different: {', '.join(off)}" if off else ""))
    if confirmation.verdict is not None:
        same = "the same" if confirmation.verdicts_agree else f"different: {verdict_sentence(confirmation.verdict)}"
        parts.append(f"the signal's verdict on these steps is {same}")
    return f"agrees: {confirmation.agrees} ({'; '.join(parts)})"


def shares_table(findings: Findings) -> Table:
    """What the suspect stage's time was spent on, as self time."""
    rank = "" if findings.suspect.rank is None else f" of rank {findings.suspect.rank}"
    beside = "control" if findings.beside == "rank" else "other steps"
    numbers = ["self", beside, "calls"] if findings.control else ["self", "calls"]
    table = titled(f"What filled {findings.stage}{rank}, self time a step", ["name", "what"], numbers)
    table.columns[0].overflow = "fold"
    for share in findings.shares:
        control = [] if findings.control is None else [milliseconds(share.control_self_s or 0.0)]
        kind = f"{share.kind}, waits" if share.waits else share.kind
        calls = f"{share.calls:.1f}" if share.calls else ""
        table.add_row(share.name, kind, milliseconds(share.self_s), *control, calls)
    return table


def resolves(verdict: Verdict, decision: Decision) -> str:
    """What would resolve a held window, or a decision not to capture; "" if nothing would."""
    split = bool(verdict.numbers.get("split"))
    return decisions.advice(verdict.reasons, split=split) if verdict.reasons else decisions.resolution(decision)


def explanation_lines(
    event: WindowJudged,
    remedies: Iterable[RemedyChanged] = (),
    hang: CauseFound | None = None,
    differences: DifferencesFound | None = None,
) -> Iterator[str]:
    """The verdict, its numbers against their thresholds, the runner-up, and what would have changed the label.

    ``remedies`` are the remedies tried by then, ``hang`` is why a stalled job hangs, if it is known, and
    ``differences`` what differs between the suspect and its peers.
    """
    from sftriage.words.run import event_sentence

    verdict, decision = event.verdict, event.decision
    explanation = verdicts.explain(verdict)
    if hang is not None:
        yield f"{decisions.caused(hang)} {hang.next_step}"
    yield verdict_sentence(verdict)
    # (a threshold of 0 is none)
    amounts = {"s": milliseconds, "fraction": "{:.1%}".format, "log odds": "{:.1f}".format}
    for check in (check for check in explanation.checks if check.threshold):
        value, threshold = map(amounts[check.unit], (check.value, check.threshold))
        yield f"  {check.what}: {value}, {'reaches' if check.met else 'is under'} the threshold of {threshold}"
    if verdict.suspects:
        first = verdict.suspects[0]
        gain = f"{milliseconds(first.gain_s)} of each slow step ({first.share:.1%})"
        named = f"{subject(first)}, {slow_stage(first)}, {verdicts.timing(first)}"
        yield f"{'Suspect:  ' if verdict.named else 'Candidate:'} {named}: {gain}"
        if done := verdicts.system_sentence(verdict):
            yield f"System:    {done}"
        yield from (f"Differs:   {line}" for line in (difference_lines(differences) if differences else ()))
    if verdict.suspects and explanation.runner_up is None and verdict.label != "stalled":
        yield "Runner-up: no other rank would save much if fixed alone"
    if (second := explanation.runner_up) is not None:
        gain = f"{milliseconds(second.gain_s)} of each ({second.share:.1%})"
        yield f"Runner-up: {subject(second)}, {slow_stage(second)}: {gain}"
    for change in explanation.changes:
        yield f"It would be {change}."
    if hang is None and (advice := resolves(verdict, decision)):
        yield f"What would resolve it: {advice}"
    yield f"Decided: {decision.outcome}: {decisions.reason_sentence(decision)}"
    yield from (f"Remedy: {event_sentence(remedy)}" for remedy in remedies)


def manifest_lines(manifest: Manifest) -> list[str]:
    """What triggered a capture, what it holds, what it cost, and what its reduced trace showed."""
    return [f"{name:12}{text}" for name, text in capture_facts(manifest)]


_MAX_PARTS = 5


def whatif_tables(shown: WhatIf) -> Iterator[Table]:
    """A heat map of the workers' slowdowns, and the operations that cost most; nothing without stragglers."""
    from sftriage.runs.whatif import HOTTEST, step
    from sftriage.stragglers.slowdown import MIN_SLOWDOWN

    def cell(slowdown: float) -> Text:
        heat = min(1.0, (slowdown - 1.0) / (HOTTEST - 1.0))
        fade = round(200 * (1.0 - heat))
        pale, dark = f"black on rgb(255,{fade},{fade})", f"bold white on rgb(200,{fade // 2},{fade // 2})"
        return Text(f"{slowdown:.2f}", "" if slowdown < MIN_SLOWDOWN else pale if heat < 0.6 else dark)

    heat, found = shown.heat(), shown.found
    if heat is None:
        return
    part = f", the slowest {heat.shown} of {heat.workers}" if heat.shown < heat.workers else ""
    table = titled(f"Slowdown by worker{part}", ["stage"], heat.columns)
    for stage, slowdowns in heat.rows.items():
        table.add_row(stage, *map(cell, slowdowns))
    yield table
    slowest = sorted(found.by_part.items(), key=lambda pair: -pair[1])[:_MAX_PARTS]
    table = titled("Slowdown by operation, all others at their ideal", ["operations"], ["slowdown", "step time"])
    for name, slowdown in (*slowest, ("all", found.s)):
        table.add_row(name, f"{slowdown:.3f}", step(slowdown * found.ideal_s), end_section=name == slowest[-1][0])
    yield table


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
        """The timeline, with consecutive decisions for the same reason in one line, and the summary."""
        groups = groupby(enumerate(self.replayed), key=lambda numbered: _likeness(*numbered))
        lines = [line for _, group in groups for line in self._lines([replayed for _, replayed in group])]
        widths = [*(max(map(len, column)) for column in list(zip(*lines, strict=True))[:-1]), 0]
        aligned = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*aligned, "", *self._summary()]) + "\n"

    def values(self) -> dict[str, Any]:
        return {
            "policies": list(self.policies),
            "recording": self.recording,
            "outcomes": self._counts(),
            **dict(zip(("captures", "notifications"), self._totals(), strict=True)),
            "windows": [
                {
                    "time_s": window.time_s,
                    "after_s": window.time_s - self.start_s,
                    "label": window.verdict.label,
                    "reasons": list(window.verdict.reasons),
                    "suspect": plain(window.verdict.named),
                    "decision": decisions.decision_values(window.decision),
                    "captured_steps": plain(window.captured_steps),
                }
                for window in self.replayed
            ],
        }

    def _totals(self) -> tuple[int, int]:
        taken = [window.decision for window in self.replayed]
        return sum(len(decision.requests) for decision in taken), sum(len(decision.notify) for decision in taken)

    def _counts(self) -> dict[Outcome, int]:
        counted = Counter(window.decision.outcome for window in self.replayed)
        return {outcome: counted[outcome] for outcome in get_args(Outcome)}

    def _lines(self, group: list[ReplayedDecision]) -> Iterable[tuple[str, ...]]:
        first, last = group[0].decision, group[-1].decision
        steps = f"{first.first_step}-{last.last_step}" if first.first_step != last.last_step else f"{first.first_step}"
        attempt = f"attempt {first.attempt}, " if first.attempt else ""
        count = verdicts.counted(len(group), "window") if first.label != "stalled" else "stall"
        about = decisions.reason_sentence(first)
        if first.label == "suspect" and first.outcome != "capture":
            named = group[0].verdict.suspects[0]
            gain = f"{1000 * named.gain_s:.3g} ms a step, {named.pattern}"
            about += f" ({subject(named)} in {slow_stage(named)}, {gain})"
        yield _elapsed(group[0].time_s - self.start_s), f"{attempt}steps {steps}", count, first.outcome, about
        for request, recorded in zip(first.requests, group[0].captured_steps, strict=True):
            box = f"steps {recorded[0]} to {recorded[1]}, at most" if recorded else "at once, at most"
            healthy = ", healthy, for comparison" if request.role == "control" else ""
            bounds = f"{request.max_seconds:g} s and {size(request.max_bytes)}"
            yield *[""] * 4, f"rank {request.rank}{healthy}: {request.profiler}, {box} {bounds}"
        for rule in first.notify:
            yield *[""] * 4, f"rule {rule} notifies"

    def _summary(self) -> Iterable[str]:
        yield f"### Policy {', '.join(self.policies)} on {self.recording}"
        yield ""
        if not self.replayed:
            yield "No window: the recording is shorter than the warm-up and one window."
            return
        lasted = _elapsed(max(window.time_s for window in self.replayed) - self.start_s)
        captures, messages = self._totals()
        made = verdicts.counted(captures, "capture") + (
            f", {verdicts.counted(messages, 'notification')}" * bool(messages)
        )
        yield f"{verdicts.counted(len(self.replayed), 'decision')} in {lasted}; {made}."
        yield ""
        yield "| outcome | windows | why |"
        yield "|---|---:|---|"
        for outcome, windows in self._counts().items():
            taken = (window.decision for window in self.replayed if window.decision.outcome == outcome)
            why = Counter(map(decisions.reason_kind, taken)).most_common()
            reasons = ", ".join(f"{reason} ({count})" for reason, count in why)
            yield f"| {outcome} | {windows} | {reasons.replace('|', '&#124;')} |"


def _likeness(number: int, replayed: ReplayedDecision) -> tuple[object, ...]:
    """What windows of one line have in common. A capture, a message and a stall each get their own line."""
    decision, verdict = replayed.decision, replayed.verdict
    alone = number if decision.requests or decision.notify or verdict.label == "stalled" else None
    named = verdict.suspects[0].identity if verdict.label == "suspect" else None
    # Numbers vary from window to window.
    names = {name: value for name, value in decision.parameters.items() if not isinstance(value, (int, float))}
    which = decision.reason, frozenset(decision.parameters), frozenset(names.items())
    return alone, decision.attempt, decision.outcome, decision.rule, which, named


def _elapsed(seconds: float) -> str:
    minutes, rest = divmod(max(0.0, seconds), 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02}:{rest:04.1f}"
