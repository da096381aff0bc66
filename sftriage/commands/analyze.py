"""``sftriage analyze``, ``whatif``, ``advise``, ``reduce``: where the time of recordings and heavy traces went."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from rich.table import Table
from rich.text import Text

from sftriage.base.files import refusing
from sftriage.commands.options import JsonOption, argument, meant, option
from sftriage.commands.output import print_json, results, say, tell, write
from sftriage.controller.controller import settings_of, shape_of
from sftriage.controller.replay import verdicts_and_pauses
from sftriage.errors import InputError, UsageError
from sftriage.mitigate.advice import Messages, pipeline_of
from sftriage.policy.fields import size_bytes
from sftriage.policy.schema import Detection
from sftriage.policy.state import losses_of
from sftriage.reduce.stages import Names, load_names
from sftriage.reduce.together import Reduced, read_all
from sftriage.reports.texts import (
    agreement_table,
    confirmation_sentence,
    finding_lines,
    frontier_table,
    shares_table,
    stages_table,
    titled,
    trace_values,
    windows_table,
)
from sftriage.runs.directory import find_run
from sftriage.runs.recordings import detection_of, load_recording
from sftriage.runs.source import RunSource
from sftriage.runs.summary import advice_lines, advice_of_run, advice_values, losses_words
from sftriage.runs.whatif import HOTTEST, WhatIf, load_operations, step, trace_events, whatif_of
from sftriage.runtime import reducing
from sftriage.stragglers.slowdown import MIN_SLOWDOWN
from sftriage.traces.manifest import Findings
from sftriage.words.run import event_sentence
from sftriage.words.verdicts import verdict_sentence


def analyze(
    path: Annotated[Path, argument("RUN|FILE.npz", "A run directory, or an .npz with durations_s, stages and sync.")],
    window: int | None = option("N", "Steps per window.", "50, or the run's", min=1),
    stride: int | None = option("N", "Steps from the start of one window to the next.", "10, or the run's", min=1),
    as_json: bool = option("--json", "Print one JSON object per window, one per line."),
) -> None:
    """Show where the time of a recording went, window by window, and which ranks and stages are suspects.

    An .npz must hold durations_s (float64 seconds, step x rank x stage; NaN in all stages of a missing step), stages
    and sync (strings). Optional are ready_s, between_s and work (step x rank), outside_s (step x rank x sync stage),
    hosts and cohorts (one string per rank), kinds (one string per step) and first_step; for ranks on devices also
    device_s, device_outside_s, device_between_s and device_ready_s, or on_device.
    """
    recording = load_recording(path)
    detection = detection_of(path)
    given = {name: value for name, value in (("window_steps", window), ("stride_steps", stride)) if value is not None}
    if not path.is_dir():
        # A foreign recording has no warm-up to leave out; a run leaves out what its controller left out.
        given["warmup_steps"] = 0
    shape = shape_of(detection, **given)
    say(*map(str, recording.thinned.values()))
    judged = verdicts_and_pauses(recording.windows(shape), settings_of(detection))
    if as_json:
        for verdict, _ in judged:
            print_json(verdict)
        return
    every = list(judged)
    verdicts, paused = [verdict for verdict, _ in every], [pause for _, found in every for pause in found]
    if not verdicts:
        tell(f"No window yet: the first needs {shape.warmup_steps} steps of warm-up and {shape.window_steps} more.")
        return
    shown = next((verdict for verdict in reversed(verdicts) if verdict.label == "suspect"), verdicts[-1])
    console = results()
    console.print(windows_table(verdicts))
    console.print(frontier_table(shown))
    console.print(verdict_sentence(shown))
    for pause in paused:
        console.print(event_sentence(pause))
    if (losses := losses_of(verdicts)).by_suspect:
        text = losses_words(losses, on_devices=any(verdict.clock == "device" for verdict in verdicts))
        console.print(f"{text[:1].upper()}{text[1:]}.")


def whatif(
    paths: Annotated[
        list[Path],
        argument(
            "TRACE.parquet|RUN|FILE.npz|TRACE...",
            "A recording of all ranks, or heavy traces of all ranks (as for sftriage reduce).",
        ),
    ],
    timeline: Path | None = option(
        "FILE.json[.gz]", "Write a typical step, measured and without stragglers, for Perfetto's viewer.", False
    ),
    as_json: bool = option("--json", "Print one JSON object."),
) -> None:
    """Estimate how fast a job would run without stragglers, and which workers and operations cost it that time.

    Replays the recorded steps with operations at their ideal duration (arXiv 2505.05713): all, all but one worker's,
    and so on. Takes a run directory, an .npz or the heavy traces of all ranks: stages count as operations, cohorts as
    pipeline stages. Or takes a Parquet trace of a hybrid-parallel job, with one row per operation.
    """
    operations = load_operations(paths)
    say(*(f"{paths[0]}: {note}" for note in operations.notes))
    try:
        shown = whatif_of(operations)
    except InputError as error:
        raise InputError(f"{paths[0]}: {error}") from error
    if timeline is not None:
        events = json.dumps(trace_events(shown.timelines())).encode()
        with refusing(str(timeline)):
            timeline.write_bytes(gzip.compress(events) if timeline.suffix == ".gz" else events)
    if as_json:
        print_json(shown.values())
        return
    write(*shown.lines())
    console = results()
    for table in _whatif_tables(shown):
        console.print(table)


MAX_PARTS = 5


def _whatif_tables(shown: WhatIf) -> Iterator[Table]:
    heat, found = shown.heat(), shown.found
    if heat is None:
        return
    some = f", the slowest {heat.shown} of {heat.there}" if heat.shown < heat.there else ""
    table = titled(f"Slowdown by worker{some}", ["stage"], [f"dp {dp}" for dp in heat.dps])
    for pp, slowdowns in heat.rows.items():
        table.add_row(f"pp {pp}", *map(_cell, slowdowns))
    yield table
    slowest = sorted(found.by_part.items(), key=lambda one: -one[1])[:MAX_PARTS]
    table = titled("Slowdown by operation, all others at their ideal", ["operations"], ["slowdown", "step time"])
    for part, slowdown in slowest:
        table.add_row(part, f"{slowdown:.3f}", step(slowdown * found.ideal_s))
    table.add_section()
    table.add_row("all", f"{found.s:.3f}", step(found.s * found.ideal_s))
    yield table


def _cell(slowdown: float) -> Text:
    if slowdown < MIN_SLOWDOWN:
        return Text(f"{slowdown:.2f}")
    heat = min(1.0, (slowdown - 1.0) / (HOTTEST - 1.0))
    fade = round(200 * (1.0 - heat))
    return Text(
        f"{slowdown:.2f}",
        style=f"black on rgb(255,{fade},{fade})" if heat < 0.6 else f"bold white on rgb(200,{fade // 2},{fade // 2})",
    )


def advise(
    run: Path | None = argument("RUN", "Run directory.", "the newest run started here"),
    gradients: str | None = option("SIZE", "Bytes that ranks all-reduce per step, such as 500Mi.", False),
    bandwidth: float = option("GB/S", "Bandwidth of a rank's link, each way.", min=1e-6, max=1e6, default=25.0),
    latency: float = option("US", "Latency of a message, in microseconds.", min=0.0, max=1e9, default=10.0),
    pipeline: Path | None = option("TRACE.parquet", "Operations of the job's pipeline (as for whatif).", False),
    as_json: JsonOption = False,
) -> None:
    """Estimate what would help against a straggler that stays, and by how much, with the assumptions of each model.

    It considers removing the rank, giving it less work, and all-reducing around it (StragglAR, arXiv 2505.23523); in a
    pipeline with slow links, running stages further ahead (Adaptra, arXiv 2504.19232). It does not change the job.
    """
    messages = None
    if gradients is not None:
        reduced_bytes = meant("--gradients", size_bytes, gradients)
        if reduced_bytes <= 0:
            raise UsageError(f"--gradients {gradients}: nothing to reduce")
        messages = Messages(reduced_bytes, latency * 1e-6, 1e-9 / bandwidth)
    directory = find_run(run)
    view = RunSource(lambda: directory).view()
    if view.problem:
        raise InputError(view.problem)
    recorded = None if pipeline is None else pipeline_of(load_operations([pipeline]))
    advice = advice_of_run(view, messages, recorded)
    if as_json:
        print_json(advice_values(advice))
        return
    write(*advice_lines(advice))


def reduce(
    traces: Annotated[list[Path], argument("TRACE...", "Kineto JSON (.gz, .tar.gz) or nsys SQLite.")],
    against: Path | None = option(
        "PATH", "A run directory, or a capture's manifest.json in one, to check the trace against."
    ),
    control: Path | None = option("TRACE", "Trace of a healthy rank, to compare a single trace with."),
    names: Path | None = option("--map FILE", "YAML that maps names in traces to steps and stages."),
    rank: list[str] | None = option("FILE=RANK", "Rank of a trace that does not name its own. Repeatable."),
    stage: str | None = option("NAME", "Stage to break down.", "the suspect's"),
    save: bool = option("--save", "Save the findings in the capture's manifest."),
    as_json: bool = option("--json", "Print one JSON object."),
) -> None:
    """Reduce heavy traces to the stages of each step, and show what they contain.

    With the traces of all ranks, judges them as it judges recorded steps. With --against, checks whether trace and
    recording agree about the same steps. For a single rank, or the suspect, lists what filled the stage.
    """
    how = Names() if names is None else load_names(names)
    ranks = _ranks(rank or [])
    signal = None if against is None else reducing.load_signal(against)
    detection = detection_of(signal.recording.source) if signal else Detection()
    settings = settings_of(detection)
    reduced = read_all(traces, how, ranks)
    if not reduced.reductions:
        raise InputError("; ".join(refusal.reason for refusal in reduced.refused))
    accounted = reducing.account(reduced.reductions, settings)
    signal = reducing.with_manifest(signal, reduced)
    manifest = signal.manifest if signal else None
    named = stage or (manifest.trigger.stage if manifest else None)
    confirmation = None if signal is None else reducing.confirm(reduced.reductions, accounted, signal, named, settings)
    findings = reducing.findings_of(reduced, accounted, signal, control, (how, ranks), stage)
    if save:
        if signal is None or signal.manifest is None or findings is None:
            raise UsageError("--save writes findings to a capture's manifest: give --against, and that capture's trace")
        signal.store.note(signal.manifest.capture_id, findings)
    if not as_json:
        _print(reduced, accounted, confirmation, findings)
        return
    values = {
        "traces": [trace_values(one) for one in reduced.reductions],
        "refused": list(reduced.refused),
        "verdict": accounted.verdict,
        "no_verdict": accounted.why_not or None,
        "agreement": confirmation,
        "findings": None if findings is None else findings.model_dump(mode="json"),
    }
    print_json(values)


def _ranks(given: list[str]) -> dict[str, int]:
    ranks = {}
    for one in given:
        name, sign, number = one.rpartition("=")
        if not sign or not name or not number.isdecimal():
            raise UsageError(f"--rank {one}: expected FILE=RANK, such as --rank trace.json.gz=3")
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
    for one in reduced.reductions:
        console.print(stages_table(one))
        for note in one.notes:
            say(f"{one.trace.source}: {note}")
    if accounted.verdict is not None:
        console.print(frontier_table(accounted.verdict))
        no_verdict = f"No verdict: {accounted.why_not}." if accounted.why_not else ""
        console.print(no_verdict or verdict_sentence(accounted.verdict), soft_wrap=True)
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
