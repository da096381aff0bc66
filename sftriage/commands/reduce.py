"""``sftriage reduce``: a heavy trace brought down to the coarse stages, and what it says about the suspect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from sftriage.commands.options import argument, option
from sftriage.commands.output import print_json, results, say
from sftriage.controller.controller import settings_of
from sftriage.errors import InputError, UsageError
from sftriage.policy.schema import Detection
from sftriage.reduce.stages import Names, load_names
from sftriage.reports.tables import (
    agreement_table,
    confirmation_sentence,
    frontier_table,
    shares_table,
    stages_table,
    trace_values,
)
from sftriage.reports.texts import finding_lines
from sftriage.runs.recordings import detection_of
from sftriage.runtime.reducing import (
    Accounted,
    Confirmation,
    Reduced,
    Signal,
    account,
    confirm,
    findings_of,
    load_signal,
    read_all,
    with_manifest,
)
from sftriage.traces.manifest import Findings
from sftriage.words.verdicts import verdict_sentence


def reduce(
    traces: Annotated[list[Path], argument("TRACE...", "Kineto JSON (.gz, .tar.gz) or nsys SQLite.")],
    against: Annotated[
        Path | None, option("PATH", "A run directory, or a capture's manifest.json in one: does the trace agree?")
    ] = None,
    control: Annotated[Path | None, option("TRACE", "The trace of a healthy rank, to lay beside a single one.")] = None,
    names: Annotated[Path | None, option("--map FILE", "YAML that says which names mark steps and stages.")] = None,
    rank: Annotated[list[str] | None, option("FILE=RANK", "The rank of a trace that says none.")] = None,
    stage: Annotated[str | None, option("NAME", "The stage to look into.", "the suspect's")] = None,
    save: Annotated[bool, option("--save", "Note the findings in the capture's manifest.")] = False,
    as_json: Annotated[bool, option("--json", "One JSON object on stdout.")] = False,
) -> None:
    """Reduce heavy traces to the coarse stages of each step, and say what they show.

    With the traces of all ranks the same accounting runs on them as on the recorded signal. With --against, says
    whether trace and signal agree on the same steps. Of a single rank, or of the suspect, lists what filled the stage.
    """
    how = Names() if names is None else load_names(names)
    ranks = _ranks(rank or [])
    signal = None if against is None else load_signal(against)
    detection = detection_of(signal.recording.source) if signal else Detection()
    settings = settings_of(detection)
    reduced = read_all(traces, how, ranks)
    if not reduced.reductions:
        raise InputError("; ".join(refusal.reason for refusal in reduced.refused))
    accounted = account(reduced.reductions, settings)
    signal = with_manifest(signal, reduced)
    manifest = signal.manifest if signal else None
    asked = stage or (manifest.trigger.stage if manifest else None)
    confirmation = None if signal is None else confirm(reduced.reductions, accounted, signal, asked, settings)
    findings = findings_of(reduced, accounted, signal, control, (how, ranks), stage)
    if save:
        _save(signal, findings)
    if as_json:
        print_json(_values(reduced, accounted, confirmation, findings))
    else:
        _print(reduced, accounted, confirmation, findings)


def _ranks(given: list[str]) -> dict[str, int]:
    ranks = {}
    for one in given:
        name, sign, number = one.rpartition("=")
        if not sign or not name or not number.isdecimal():
            raise UsageError(f"--rank {one}: FILE=RANK is meant, as in --rank trace.json.gz=3")
        ranks[name] = int(number)
    return ranks


def _save(signal: Signal | None, findings: Findings | None) -> None:
    if signal is None or signal.manifest is None or findings is None:
        raise UsageError("--save notes findings in a capture's manifest: give --against, and that capture's trace")
    signal.store.note(signal.manifest.capture_id, findings)


def _values(
    reduced: Reduced, accounted: Accounted, confirmation: Confirmation | None, findings: Findings | None
) -> dict[str, Any]:
    return {
        "traces": [trace_values(one) for one in reduced.reductions],
        "refused": list(reduced.refused),
        "verdict": accounted.verdict,
        "no_verdict": accounted.why_not or None,
        "agreement": confirmation,
        "findings": None if findings is None else findings.model_dump(mode="json"),
    }


def _print(
    reduced: Reduced, accounted: Accounted, confirmation: Confirmation | None, findings: Findings | None
) -> None:
    for refusal in reduced.refused:
        say(f"not reduced: {refusal.reason}")
    console = results()
    for one in reduced.reductions:
        console.print(stages_table(one))
        for note in one.notes:
            say(f"{one.trace.source}: {note}")
    if accounted.verdict is not None:
        console.print(frontier_table(accounted.verdict))
        no_verdict = f"No verdict: {accounted.why_not}." if accounted.why_not else ""
        console.print(no_verdict or verdict_sentence(accounted.verdict), soft_wrap=True)
    elif len(reduced.reductions) > 1:
        say(f"no accounting: {accounted.why_not}")
    if confirmation is not None:
        for agreement in confirmation.ranks:
            console.print(agreement_table(agreement))
        console.print(confirmation_sentence(confirmation), soft_wrap=True)
    if findings is not None:
        console.print(shares_table(findings))
        for line in finding_lines(findings):
            console.print(line, soft_wrap=True)
