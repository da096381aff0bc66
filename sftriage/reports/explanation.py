"""Why a window was decided as it was, in lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sftriage.model.captures import Decision
from sftriage.model.events import RemedyChanged, WindowJudged
from sftriage.model.verdicts import Verdict
from sftriage.words.advice import remedy_told
from sftriage.words.amounts import milliseconds
from sftriage.words.decisions import advice, reason_sentence, resolution
from sftriage.words.verdicts import explain, system_sentence, verdict_sentence, when, where, who


def resolves(verdict: Verdict, decision: Decision) -> str:
    """What would resolve a window that was held, or a decision not to capture; "" where there is nothing to say."""
    split = bool(verdict.numbers.get("split"))
    return advice(verdict.reasons, split=split) if verdict.reasons else resolution(decision)


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
    yield f"Decided: {decision.outcome}: {reason_sentence(decision)}"
    for remedy in remedies:
        yield f"Remedy: {remedy_told(remedy)}"
