"""``sftriage analyze``, ``whatif`` and ``advise``: where the time of a recording went, and what would save it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from sftriage.base.files import refusing
from sftriage.commands.options import JsonOption, argument, option, parsed
from sftriage.commands.output import print_json, results, say, tell, write
from sftriage.controller.controller import settings_of, shape_of
from sftriage.controller.replay import verdicts_and_pauses
from sftriage.errors import InputError, UsageError
from sftriage.mitigate.advice import Messages, pipeline_of
from sftriage.model.events import JobPaused
from sftriage.model.verdicts import Verdict
from sftriage.model.windows import plain
from sftriage.policy.fields import size_bytes
from sftriage.reports.texts import frontier_table, time_table, whatif_tables, windows_table
from sftriage.runs.decisions import differences_of
from sftriage.runs.directory import RunDirectory, find_run
from sftriage.runs.hangs import hang_in
from sftriage.runs.operations import load_operations
from sftriage.runs.recordings import RecordedRun, detection_of, load_recording
from sftriage.runs.source import RunSource, rank_hour_price
from sftriage.runs.step_times import TimesReader, attempt_of
from sftriage.runs.summary import advice_lines, advice_of_run, advice_values
from sftriage.runs.timetable import Charges, TimeTable
from sftriage.runs.timetable import time_table as add_up
from sftriage.runs.whatif import HOTTEST, trace_events, whatif_of
from sftriage.stragglers.questions import Question
from sftriage.windows.logs import StepLogs
from sftriage.words.decisions import caused
from sftriage.words.run import event_sentence
from sftriage.words.verdicts import verdict_sentence


def analyze(
    path: Annotated[Path, argument("RUN|FILE.npz", "A run directory, or an .npz with durations_s, stages and sync.")],
    window: int | None = option("N", "Steps per window.", "50, or the run's", min=1),
    stride: int | None = option("N", "Steps from the start of one window to the next.", "10, or the run's", min=1),
    as_json: bool = option("--json", "Print a JSON object per window, one per line; the last has the run's times."),
) -> None:
    """Show where the time of a recording went, window by window, and which ranks and stages are suspects.

    An .npz must hold durations_s (float64 seconds, step x rank x stage; NaN in all stages of a missing step), stages
    and sync (strings). Optional are ready_s, between_s and work (step x rank), outside_s (step x rank x sync stage),
    hosts and cohorts (one string per rank), kinds (one string per step) and first_step; for ranks on devices also
    device_s, device_outside_s, device_between_s and device_ready_s, or on_device.
    """
    recording = load_recording(path)
    detection = detection_of(path)
    options = {name: value for name, value in (("window_steps", window), ("stride_steps", stride)) if value is not None}
    if not path.is_dir():
        # (an .npz has no warm-up; of a run, the same steps are left out as by its controller)
        options["warmup_steps"] = 0
    shape = shape_of(detection, **options)
    say(*map(str, recording.thinned.values()))
    judged = verdicts_and_pauses(recording.windows(shape), settings_of(detection))
    if as_json:
        _print_verdicts(path, recording, judged)
        return
    pairs = list(judged)
    verdicts, pauses = [verdict for verdict, _ in pairs], [pause for _, found in pairs for pause in found]
    if not verdicts:
        tell(f"No window yet: the first needs {shape.warmup_steps} steps of warm-up and {shape.window_steps} more.")
        return
    shown = next((verdict for verdict in reversed(verdicts) if verdict.label == "suspect"), verdicts[-1])
    console = results()
    console.print(windows_table(verdicts))
    console.print(frontier_table(shown))
    console.print(verdict_sentence(shown))
    for pause in pauses:
        console.print(event_sentence(pause))
    if (times := _times(path, recording, pairs)) is not None:
        console.print(time_table(times))
    if RunDirectory(path).decisions.is_file():
        if (differing := differences_of(RunDirectory(path), shown)) is not None:
            console.print(event_sentence(differing))
        if (hang := hang_in(RunDirectory(path))) is not None:
            console.print(f"{caused(hang)} {hang.next_step}")


Judged = tuple[Verdict, Sequence[JobPaused]]


def _print_verdicts(path: Path, recording: RecordedRun, judged: Iterable[Judged]) -> None:
    last: list[Verdict] = []

    def printed() -> Iterator[Judged]:
        for verdict, pauses in judged:
            for before in last:
                print_json(before)
            last[:] = [verdict]
            yield verdict, pauses

    times = _times(path, recording, printed())
    for verdict in last:
        print_json(plain(verdict) | {"times": times and times.values()})


def _times(path: Path, recording: RecordedRun, judged: Iterable[Judged]) -> TimeTable | None:
    """Where the time of a run went; of other recordings, by the verdicts on them."""
    charges, run = Charges.of_judged(judged), RunDirectory(path)
    view = RunSource(lambda: run).view()
    if view.rows:
        return view.times
    if recording.whole is not None:
        attempts = [attempt_of(recording.whole)]
    else:
        attempts = TimesReader(StepLogs(run.steps if run.steps.is_dir() else path)).read(ended=True)
    begin_s = attempts[0].begin_s if attempts else 0.0
    return add_up(begin_s, None, attempts, charges, price=rank_hour_price())


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
    svg: Path | None = option("FILE.svg", "Write the heat map of all workers.", False),
    durations: list[str] | None = option(
        "--set NAME=VALUE", "Replay operations with other durations: seconds, 0.5x or ideal.", False
    ),
    layers: str | None = option(
        "LAYERS", "Replay with these layers on the stages (13,11, or now:then; now: for the best).", False
    ),
    without: list[str] | None = option(
        "--without NAME", "Replay a rank, dp rank or kind as if it were like its peers.", False
    ),
    steps: str | None = option("FIRST:LAST", "Replay these steps only.", False),
    as_json: JsonOption = False,
) -> None:
    """Estimate how fast a job would run without stragglers, and which workers and operations cost it that time.

    Replays the recorded steps with operations at their ideal duration (arXiv 2505.05713): all, all but one worker's,
    and so on. Takes a run directory, an .npz or the heavy traces of all ranks: stages count as operations, cohorts as
    pipeline stages. Or takes a Parquet trace of a hybrid-parallel job, with one row per operation.
    """
    operations = load_operations(paths)
    try:
        shown = whatif_of(operations, Question(tuple(durations or ()), layers, tuple(without or ()), steps))
    except InputError as error:
        raise InputError(f"{paths[0]}: {error}") from error
    say(*(f"{paths[0]}: {note}" for note in shown.operations.notes))
    if timeline is not None:
        events = json.dumps(trace_events(shown.timelines())).encode()
        with refusing(str(timeline)):
            timeline.write_bytes(gzip.compress(events) if timeline.suffix == ".gz" else events)
    if svg is not None and (slowdowns := shown.found.by_worker()):
        from sftriage.web.charts import heat_svg

        with refusing(str(svg)):
            svg.write_text(heat_svg(slowdowns, HOTTEST), encoding="utf-8")
    elif svg is not None:
        say(f"{svg}: not written, as there is no slowdown to draw")
    if as_json:
        print_json(shown.values())
    else:
        write(*shown.lines())
        for table in whatif_tables(shown) if shown.answer is None else ():
            results().print(table)
    if shown.distrust:
        raise typer.Exit(1)


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
        reduced_bytes = parsed("--gradients", size_bytes, gradients)
        if reduced_bytes <= 0:
            raise UsageError(f"--gradients {gradients}: nothing to reduce")
        messages = Messages(reduced_bytes, latency * 1e-6, 1e-9 / bandwidth)
    directory = find_run(run)
    view = RunSource(lambda: directory).view()
    if view.problem:
        raise InputError(view.problem)
    advice = advice_of_run(view, messages, None if pipeline is None else pipeline_of(load_operations([pipeline])))
    if as_json:
        print_json(advice_values(advice))
        return
    write(*advice_lines(advice))
