"""``sftriage analyze``: verdicts on a recording, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sftriage.commands.options import argument, option
from sftriage.commands.output import print_json, results, say, tell
from sftriage.controller.controller import settings_of, shape_of
from sftriage.controller.replay import verdicts_and_pauses
from sftriage.policy.losses import losses_of
from sftriage.reports.tables import frontier_table, windows_table
from sftriage.runs.glance import losses_words
from sftriage.runs.recordings import detection_of, load_recording
from sftriage.words.run import pause_sentence
from sftriage.words.verdicts import verdict_sentence


def analyze(
    path: Annotated[Path, argument("RUN|FILE.npz", "A run directory, or an .npz with durations_s, stages and sync.")],
    window: Annotated[int | None, option("N", "Steps in a window.", "50, or the run's", min=1)] = None,
    stride: Annotated[int | None, option("N", "Steps between windows.", "10, or the run's", min=1)] = None,
    as_json: Annotated[bool, option("--json", "One object a window, a line each.")] = False,
) -> None:
    """Say where the time of a recording went, window by window, and who is to be looked at.

    An .npz holds durations_s (float64 seconds, step x rank x stage; a missing step is NaN in all its stages), stages
    and sync (strings), and optionally ready_s, between_s and work (step x rank), outside_s (step x rank x sync stage),
    hosts and cohorts (a string a rank), kinds (a string a step) and first_step; of ranks on devices also device_s,
    device_outside_s, device_between_s and device_ready_s, or on_device.
    """
    recording = load_recording(path)
    detection = detection_of(path)
    given = {name: value for name, value in (("window_steps", window), ("stride_steps", stride)) if value is not None}
    if not path.is_dir():
        # What somebody else measured is taken as it is; a run leaves out what its controller left out.
        given["warmup_steps"] = 0
    shape = shape_of(detection, **given)
    say(*map(str, recording.thinned.values()))
    judged = verdicts_and_pauses(recording.windows(shape), settings_of(detection))
    if as_json:
        for verdict, _ in judged:
            print_json(verdict)
        return
    every = list(judged)
    seen, paused = [verdict for verdict, _ in every], [pause for _, found in every for pause in found]
    if not seen:
        tell(f"No window yet: one takes {shape.warmup_steps} steps of warm-up and {shape.window_steps} more.")
        return
    shown = next((verdict for verdict in reversed(seen) if verdict.label == "suspect"), seen[-1])
    console = results()
    console.print(windows_table(seen))
    console.print(frontier_table(shown))
    console.print(verdict_sentence(shown))
    for pause in paused:
        console.print(pause_sentence(pause))
    if (losses := losses_of(seen)).by_suspect:
        told = losses_words(losses, on_devices=any(verdict.clock == "device" for verdict in seen))
        console.print(f"{told[:1].upper()}{told[1:]}.")
