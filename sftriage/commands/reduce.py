"""``sftriage reduce``: heavy traces brought down to stages, compared with a run, and explained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sftriage.commands.options import JsonOption, argument, option
from sftriage.commands.output import print_json, results, say
from sftriage.controller.controller import settings_of
from sftriage.errors import InputError, UsageError
from sftriage.policy.schema import Detection
from sftriage.reduce.stages import Names, load_names
from sftriage.reduce.together import Reduced, read_all
from sftriage.reports.texts import (
    agreement_table,
    confirmation_sentence,
    frontier_table,
    shares_table,
    stages_table,
    trace_values,
)
from sftriage.runs.recordings import detection_of
from sftriage.runtime import reducing
from sftriage.traces.manifest import Findings
from sftriage.words.captures import finding_lines
from sftriage.words.verdicts import verdict_sentence


def reduce(
    traces: Annotated[list[Path], argument("TRACE...", "Kineto JSON (.gz, .tar.gz) or nsys SQLite.")],
    against: Path | None = option(
        "PATH", "A run directory, or a capture's manifest.json in it, to check the trace against."
    ),
    control: Path | None = option("TRACE", "Trace of a healthy rank, to compare a single trace with."),
    names: Path | None = option("--map FILE", "YAML that maps names in traces to steps and stages."),
    rank: list[str] | None = option("FILE=RANK", "Rank of a trace that does not name its own. Repeatable."),
    stage: str | None = option("NAME", "Stage to break down.", "the suspect's"),
    save: bool = option("--save", "Save the findings in the capture's manifest."),
    as_json: JsonOption = False,
) -> None:
    """Reduce heavy traces to the stages of each step, and show what they contain.

    With the traces of all ranks, judges them as it judges recorded steps. With --against, checks whether trace and
    recording agree about the same steps. For a single rank, or the suspect, lists what filled the stage.
    """
    name_map = Names() if names is None else load_names(names)
    ranks = _ranks(rank or [])
    signal = None if against is None else reducing.load_signal(against)
    detection = detection_of(signal.recording.source) if signal else Detection()
    settings = settings_of(detection)
    reduced = read_all(traces, name_map, ranks)
    if not reduced.reductions:
        raise InputError("; ".join(refusal.reason for refusal in reduced.refused))
    accounted = reducing.account(reduced.reductions, settings)
    signal = reducing.with_manifest(signal, reduced)
    manifest = signal.manifest if signal else None
    about = stage or (manifest.trigger.stage if manifest else None)
    confirmation = None if signal is None else reducing.confirm(reduced.reductions, accounted, signal, about, settings)
    findings = reducing.findings_of(reduced, accounted, signal, control, (name_map, ranks), stage)
    if save:
        if signal is None or signal.manifest is None or findings is None:
            raise UsageError("--save writes findings to a capture's manifest: give --against, and that capture's trace")
        signal.store.note(signal.manifest.capture_id, findings)
    if not as_json:
        _print(reduced, accounted, confirmation, findings)
        return
    values = {
        "traces": list(map(trace_values, reduced.reductions)),
        "refused": list(reduced.refused),
        "verdict": accounted.verdict,
        "no_verdict": accounted.why_not or None,
        "agreement": confirmation,
        "findings": None if findings is None else findings.model_dump(mode="json"),
    }
    print_json(values)


def _ranks(texts: list[str]) -> dict[str, int]:
    ranks = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if not name or not number.isdecimal():
            raise UsageError(f"--rank {text}: expected FILE=RANK, such as --rank trace.json.gz=3")
        ranks[name] = int(number)
    return ranks


def _print(
    reduced: Reduced,
    accounted: reducing.Accounted,
    confirmation: reducing.Confirmation | None,
    findings: Findings | None,
) -> None:
    for refusal in reduced.refused:
        say(f"not reduced: {refusal.reason}")
    console = results()
    for reduction in reduced.reductions:
        console.print(stages_table(reduction))
        for note in reduction.notes:
            say(f"{reduction.trace.source}: {note}")
    if accounted.verdict is not None:
        console.print(frontier_table(accounted.verdict))
        sentence = f"No verdict: {accounted.why_not}." if accounted.why_not else verdict_sentence(accounted.verdict)
        console.print(sentence, soft_wrap=True)
    elif len(reduced.reductions) > 1:
        say(f"no verdict: {accounted.why_not}")
    if confirmation is not None:
        for agreement in confirmation.ranks:
            console.print(agreement_table(agreement))
        console.print(confirmation_sentence(confirmation), soft_wrap=True)
    if findings is not None:
        console.print(shares_table(findings))
        for line in finding_lines(findings):
            console.print(line, soft_wrap=True)
