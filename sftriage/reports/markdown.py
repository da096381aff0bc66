"""A report as Markdown, for a chat or a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sftriage.runs.picture import CaptureNote, Frontier, RunReport
from sftriage.words.amounts import milliseconds
from sftriage.words.captures import caused
from sftriage.words.glance import QUESTIONS

_MEANS_SOMETHING = re.compile(r"([\\`*_{}\[\]<>|#]|:(?=(?:[a-z+-][\w+-]*|100|1234):))")


def markdown(report: RunReport, made: str) -> str:
    """The whole report; ``made`` says by what and when."""
    captures = [line for one in report.captures for line in _capture(one)]
    if report.left_out:
        captures += [f"And {report.left_out:,} captures before these.", ""]
    return "\n".join([*_head(report), *_frontier(report.frontier), *captures, f"_{text(made)}_", ""])


def text(words: str) -> str:
    """Words as they are, whatever they would mean in Markdown."""
    return _MEANS_SOMETHING.sub(r"\\\1", words)


def code(command: str) -> str:
    """A command to copy."""
    return f"`{command}`"


def _head(report: RunReport) -> Iterator[str]:
    yield f"# {text(report.title)}"
    yield ""
    yield ", ".join(f"{name} {text(value)}" for name, value in report.about)
    yield ""
    glance = report.glance
    if glance is None:
        return
    yield f"**{text(glance.outlook.headline)}.** {text(glance.outlook.sentence)}"
    if glance.cause is not None:
        yield from ("", f"**{text(caused(glance.cause))}**")
    yield ""
    for one in glance.answers:
        yield f"- **{QUESTIONS[one.question]}** {text('; '.join((one.text, *one.more)))}"
    if glance.steps:
        yield from ("", "## What to do next", "")
        for number, step in enumerate(glance.steps, start=1):
            yield f"{number}. {text(step.text)}{' ' + code(step.command) if step.command else ''}"
    yield ""


def _frontier(frontier: Frontier | None) -> Iterator[str]:
    if frontier is None:
        return
    yield f"## Where a step's time went, steps {frontier.first_step:,} to {frontier.last_step:,}"
    yield from ("", "| stage | advance | share |", "| --- | ---: | ---: |")
    for stage, advance_s in frontier.advances_s.items():
        share = advance_s / frontier.exposed_s if frontier.exposed_s else 0.0
        yield f"| {text(stage)} | {milliseconds(advance_s)} | {share:.0%} |"
    yield f"| **step** | {milliseconds(frontier.exposed_s)} | 100% |"
    yield ""


def _capture(one: CaptureNote) -> Iterator[str]:
    yield from (f"## {text(one.title)}", "")
    if one.why:
        yield from (text(one.why), "")
    for name, words in one.facts:
        yield f"- **{name}:** {text(words)}"
    yield from (f"- **fetch it:** {code(one.fetch)}", "")
