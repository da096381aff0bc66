"""The state of a run as lines that fit a terminal, and the full-screen display of `sftriage watch`."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import textwrap
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite, nan
from types import FrameType

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.live import Live
from rich.text import Text

from sftriage.reports.texts import LABEL_STYLES, OUTCOME_STYLES
from sftriage.runs.captures import captures_of
from sftriage.runs.decisions import CaptureStatus, DecisionGroup, NamedSuspect, WindowRow
from sftriage.runs.source import STALE_S
from sftriage.runs.stalls import Cell, Stall
from sftriage.runs.summary import MAX_CAPTURES, Frontier, RunSummary
from sftriage.traces.manifest import CONTROL
from sftriage.words.run import disk_now, since_words, triage_off
from sftriage.words.verdicts import ago, counted, milliseconds, moment, size, span

WIDE = 60
"""Columns from which on a line shows more than the minimum."""

_MAX_NAME = 18
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEVELS = "▁▂▃▄▅▆▇█"
_UNSEEN = re.compile("[\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufff9-\uffff]")
"""Characters without width, and those that reverse the order of text."""

_HEALTH_STYLES = {
    "healthy": "bold green",
    "unknown": "bold",
    **dict.fromkeys(("held", "regressed"), "bold yellow"),
    "throttled": "bold magenta",
    **dict.fromkeys(("suspect", "captured", "stalled"), "bold red"),
}
_STATE_STYLES = {
    "running": "cyan",
    "stored": "green",
    **dict.fromkeys(("failed", "refused", "expired", "damaged"), "red"),
}
_UPLOADS = {
    "waiting": "to be uploaded",
    "uploading": "uploading",
    "stored": "uploaded",
    "failed": "upload failed",
    "removed": "removed from the store",
}


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the picture: its desired and minimum number of lines, and the function that builds them."""

    wanted: int
    least: int
    build: Callable[[int], list[Text]]


def picture_lines(
    shown: RunSummary,
    place: str,
    now_s: float,
    width: int,
    height: int | None = None,
    *,
    blocks: bool = True,
    footer: str = "",
) -> list[Text]:
    """The run at ``place`` in lines that fit, as many as needed if ``height`` is None; the last is ``footer``.

    ``blocks``: the terminal has the characters that bars are made of.
    """
    parts = _parts(shown, place, width, blocks, now_s)
    counts, apart = _fit(parts, None if height is None else height - bool(footer))
    lines: list[Text] = []
    for part, count in zip(parts, counts, strict=True):
        if apart and lines and count:
            lines.append(Text())
        lines += part.build(count)[:count]
    if footer:
        lines = [*lines[: max(0, (height or len(lines) + 1) - 1)], Text(footer, style="dim")]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def clean(text: str) -> str:
    """Text without characters that control a terminal."""
    return _UNSEEN.sub("?", CONTROL.sub("?", text))


def apportion(values: Sequence[float], total: int) -> list[int]:
    """Whole numbers in the proportion of some values, which sum to ``total``; the largest remainders are rounded up.

    If all values are 0, so is every share.
    """
    whole = sum(values)
    if whole <= 0.0:
        return [0] * len(values)
    exact = [value / whole * total for value in values]
    shares = [floor(share) for share in exact]
    by_remainder = sorted(range(len(values)), key=lambda n: (shares[n] - exact[n], n))
    for n in by_remainder[: total - sum(shares)]:
        shares[n] += 1
    return shares


def _fit(parts: Sequence[_Part], height: int | None) -> tuple[list[int], bool]:
    counts = [part.wanted for part in parts]
    if height is None:
        return counts, True
    while sum(counts) > height:
        spare = [count - part.least for count, part in zip(counts, parts, strict=True)]
        most = max(range(len(parts)), key=lambda n: (spare[n], n))
        if spare[most] <= 0:
            break
        counts[most] -= 1
    return counts, sum(counts) + len(parts) - 1 <= height


def _parts(shown: RunSummary, place: str, width: int, blocks: bool, now_s: float) -> list[_Part]:
    head, about, view = _head(shown, place, width, now_s), _about(shown, place, width), shown.view
    parts = [
        _Part(len(head), len(head), lambda _: head),
        _Part(sum(map(len, about)), len(about), lambda count: _shortened(about, count, width)),
    ]
    if shown.state == "waiting":
        return parts
    if shown.frontier is not None:
        parts.append(_frontier(shown.frontier, shown, width, blocks))
    if shown.decisive is not None:
        stalled = shown.decisive.label == "stalled"
        found, title, style = shown.decisive.suspects, "Suspects", "red"
        if shown.decisive.label == "needs_evidence" and shown.decisive.candidates:
            found, title, style = shown.decisive.candidates, "Candidates, none certain enough to be named", "yellow"
        suspects = [_suspect(suspect, stalled, style) for suspect in found] or [Text("  none", style="dim")]
        if shown.stall is not None:
            parts.append(_stall(shown.stall, width, blocks))
        else:
            parts.append(_listed(title, suspects, len(suspects)))
    if shown.decisions:
        decided = [_decision(entry, width) for entry in shown.decisions]
        parts.append(_listed("Decisions", decided, 0, f"on {counted(view.windows, 'window')}"))
    if known := captures_of(view):
        captures = [_capture(capture) for capture in known[:MAX_CAPTURES]]
        parts.append(_listed("Captures", captures, len(known)))
    telemetry = _telemetry(shown, now_s)
    parts.append(_Part(len(telemetry), 1, lambda _: telemetry))
    return parts


def _listed(title: str, lines: list[Text], total: int, remark: str = "") -> _Part:
    """A titled list. Of ``total`` entries, those that are not shown are counted."""

    def build(count: int) -> list[Text]:
        more = f"{total - count + 1} more" if total > count - 1 else remark
        return [Text(title, style="bold") + Text(f"  {more}" if more else "", style="dim"), *lines]

    return _Part(1 + len(lines), 2, build)


def _shortened(paragraphs: Sequence[list[Text]], count: int, width: int) -> list[Text]:
    """Cut paragraphs to ``count`` lines: each keeps one, the first ones more. A cut paragraph ends with …."""
    counts = [int(n < count) for n in range(len(paragraphs))]
    for n, paragraph in enumerate(paragraphs):
        counts[n] += min(len(paragraph) - counts[n], max(0, count - sum(counts))) if counts[n] else 0
    lines: list[Text] = []
    for paragraph, kept in zip(paragraphs, counts, strict=True):
        lines += paragraph[:kept]
        if 0 < kept < len(paragraph):
            last = paragraph[kept - 1]
            lines[-1] = Text(set_cell_size(last.plain, min(cell_len(last.plain), max(0, width - 2))) + " …", last.style)
    return lines


def _head(shown: RunSummary, place: str, width: int, now_s: float) -> list[Text]:
    info = shown.view.info
    names = () if info is None else (info.job, info.run_id, f"policy {info.policy}")
    title = f"sftriage watch  {' · '.join(clean(name) for name in names if name) or clean(place)}"
    clock = f"{moment(now_s):%H:%M:%S} UTC"
    first = Text(set_cell_size(title, max(0, width - len(clock) - 2)) + "  " + clock if width > 40 else title)
    first.truncate(width)
    second, style = _headline(shown, now_s)
    headline = Text(_cut(second, width))
    headline.stylize(style, 0, len(second.partition("  ")[0]))
    return [first, headline]


def _headline(shown: RunSummary, now_s: float) -> tuple[str, str]:
    if shown.state == "waiting":
        return "Waiting for a run", "bold cyan"
    over = "" if shown.state != "ended" else ", the run has ended"
    if shown.health == "unknown":
        return shown.headline, _HEALTH_STYLES["unknown"]
    if shown.since_step is None or shown.since_s is None:
        return ("Warming up" if shown.state == "warming_up" else "No window was judged") + over, "bold cyan"
    since = f"since {since_words(shown.since_step, shown.until_step)}, {ago(shown.since_s, now_s)}"
    return f"{shown.headline}  {since}{over}", _HEALTH_STYLES.get(shown.health, "bold")


def _about(shown: RunSummary, place: str, width: int) -> list[list[Text]]:
    if shown.state == "waiting":
        return [_wrapped(f"Watching starts when the run begins: {place}", width)]
    if not shown.view.rows and not shown.view.unknown:
        return [_wrapped("The first window is judged after the warm-up steps.", width)]
    paragraphs = [_wrapped(shown.sentence, width)]
    if shown.disturbed:
        paragraphs.append(_wrapped("A capture disturbed the newest windows; these are the ones before.", width, "dim"))
    if shown.health != "healthy":
        if shown.why:
            paragraphs.append(_wrapped(f"Why: {shown.why}", width, "bold"))
        paragraphs += [_wrapped(f"Differs: {line}", width) for line in shown.differs]
        paragraphs.append(_wrapped(f"{shown.done}.", width))
        paragraphs += [_wrapped(f"Next: {step.line}", width, "cyan") for step in shown.steps]
    paragraphs += [_wrapped(sentence, width, "green") for sentence in shown.mended]
    if shown.times:
        paragraphs.append(_wrapped(shown.times, width, "dim"))
    return paragraphs


def _named_stage(row: WindowRow | None) -> str | None:
    if row is None or row.label == "healthy":
        return None
    stages = [suspect.stage for suspect in row.suspects] or (row.regression.stages if row.regression else ())
    return next(iter(stages), None)


def _frontier(frontier: Frontier, shown: RunSummary, width: int, blocks: bool) -> _Part:
    """One bar per stage. Bars, times and shares each sum to the step's; if lines lack, small stages are merged."""
    named = _named_stage(shown.decisive)

    def build(count: int) -> list[Text]:
        trend = count >= 5
        stages = together(frontier.advances_s, max(1, count - 1 - 2 * trend), named)
        values_s = list(stages.values())
        spans = f"{frontier.windows} windows, " if frontier.windows > 1 else ""
        steps = f"  {spans}{span(frontier.first_step, frontier.last_step)}"
        name_width = min(_MAX_NAME if width >= WIDE else 10, max(len("step time"), *map(cell_len, stages)))
        bar_width = max(1, width - name_width - 22)
        bars = apportion(values_s, bar_width * 8)
        tenths = apportion(values_s, round(sum(values_s) * 1e4))
        shares = apportion(values_s, 1000)
        lines = [Text("Frontier", style="bold").append(steps, style="dim")]
        for n, stage in enumerate(stages):
            line = Text(f"  {set_cell_size(clean(stage), name_width)} ")
            bar = "█" * (bars[n] // 8) + _EIGHTHS[bars[n] % 8].strip() if blocks else "#" * round(bars[n] / 8)
            line.append(set_cell_size(bar, bar_width), style="red" if stage == named else "blue")
            line.append(f" {milliseconds(tenths[n] / 1e4):>11} {shares[n] / 10:5.1f}%")
            lines.append(line)
        if trend:
            bars_line, steps_line = _trend(shown, frontier, bar_width, blocks)
            line = Text(f"  {set_cell_size('step time', name_width)} ", style="dim").append(bars_line)
            line.append(f" {milliseconds(sum(tenths) / 1e4):>11} 100.0%", style="dim")
            lines += [line, Text(" " * (name_width + 3)).append(steps_line, style="dim")]
        return lines

    return _Part(3 + len(frontier.advances_s), 3, build)


def _trend(shown: RunSummary, frontier: Frontier, width: int, blocks: bool) -> tuple[Text, str]:
    """What each step took, red from the onset of a fault, and the numbers of steps under it.

    Without step times, windows are drawn instead. They overlap, so they have no onset and no steps.
    """
    times = shown.step_times
    if times is None or not blocks:
        return Text(set_cell_size(_levels(frontier.trend_s[-width:], blocks), width), "dim"), ""
    each = -(-len(times.mean_s) // width)
    known = [
        [value for value in times.mean_s[n : n + each] if isfinite(value)] for n in range(0, len(times.mean_s), each)
    ]
    mean_s = [sum(values) / len(values) if values else nan for values in known]
    bars, at = Text(set_cell_size(_levels(mean_s, blocks), width), "dim"), -1
    if shown.health != "healthy" and shown.since_step is not None and shown.until_step in (None, shown.since_step):
        at = (shown.since_step - times.first_step) // (times.column_steps * each)
        bars.stylize("not dim red", max(0, at), len(mean_s))
    line, last = " " * width, str(times.last_step)
    for position, label in ((at, f"^{shown.since_step}"), (0, str(times.first_step)), (len(mean_s) - len(last), last)):
        end = position + len(label)
        if position >= 0 and end <= width and not line[max(0, position - 1) : end + 1].strip():
            line = line[:position] + label + line[end:]
    return bars, line.rstrip()


def together(advances_s: Mapping[str, float], most: int, named: str | None = None) -> dict[str, float]:
    """At most ``most`` stages in their order: of more, the smallest are merged into one at the end.

    The named stage is not merged, as long as there is a line for it.
    """
    if len(advances_s) <= most:
        return dict(advances_s)
    kept = sorted(advances_s, key=lambda stage: (stage == named, advances_s[stage]), reverse=True)[: most - 1]
    rest = [stage for stage in advances_s if stage not in kept]
    return {
        **{stage: advances_s[stage] for stage in advances_s if stage in kept},
        f"{len(rest)} others": sum(advances_s[stage] for stage in rest),
    }


def _levels(values_s: Sequence[float], blocks: bool) -> str:
    known = sorted(value for value in values_s if isfinite(value))
    top = known[int(0.95 * (len(known) - 1))] if known else 0.0  # a few outliers do not flatten the others
    if top <= 0.0 or not blocks:
        return ""
    return "".join(_LEVELS[min(7, floor(value / top * 8))] if isfinite(value) else " " for value in values_s)


def _suspect(suspect: NamedSuspect, stalled: bool, style: str) -> Text:
    line = Text("  ").append(clean(f"{suspect.who}, {suspect.where}"), style=style)
    gain = f"not moved for {suspect.gain_s:.0f} s" if stalled else f"{milliseconds(suspect.gain_s)} of each slow step"
    gain += "" if stalled else f" ({suspect.share:.0%})"
    line.append(f"  {gain}")
    if not stalled:
        line.append(f"  in {suspect.persistence:.0%} of steps  {clean(suspect.when)}")
    return line


_CELLS: Mapping[Cell, tuple[str, str, str]] = {
    "passed": ("━", "-", "dim"),
    "ahead": (" ", " ", ""),
    "unknown": ("·", ".", "dim"),
    "missing": ("✗", "X", "bold red"),
    "waiting": ("┃", "|", "cyan"),
}
"""For each cell of a stall: what fills it, the same for a terminal without such characters, and its style."""


def _stall(stall: Stall, width: int, blocks: bool) -> _Part:
    """Where in the step each rank is: a column a stage, and a row for the stages' names."""
    name_width = min(_MAX_NAME, max(cell_len(clean(row.name)) for row in stall.rows))
    texts = [row.text for row in stall.rows] if width >= WIDE else [""] * len(stall.rows)
    text_width = max(map(cell_len, texts))
    each = max(2, min(12, (width - name_width - text_width - 5) // max(1, len(stall.stages))))
    lines = [Text(" " * (name_width + 3))]
    for stage in stall.stages:
        lines[0].append(set_cell_size(clean(stage), each - 1) + " ", style="dim")
    # Of a low terminal the last lines are cut.
    for row, text in sorted(zip(stall.rows, texts, strict=True), key=lambda both: both[0].state != "missing"):
        line = Text(f"  {set_cell_size(clean(row.name), name_width)} ")
        for cell in row.cells:
            *marks, style = _CELLS[cell]
            line.append(marks[not blocks] * (each - 1) + " ", style=style)
        lines.append(line.append(f" {text}", style="bold red" if row.state == "missing" else "dim"))
    remark = f"step {stall.step:,}, no rank had moved for {stall.still_s:.0f} s"
    return _listed("Where each rank is", lines, len(lines), remark)


def _decision(entry: DecisionGroup, width: int) -> Text:
    row = entry.row
    line = Text(f"  {moment(row.time_s):%H:%M:%S}  ")
    if width >= WIDE:
        line.append(f"{entry.first_step}-{row.last_step}  ", style="dim")
    line.append(clean(row.outcome), style=OUTCOME_STYLES.get(row.outcome, ""))
    line.append(f" x{entry.windows}" if entry.windows > 1 else "", style="dim")
    reason = "" if row.reason == "healthy" else row.words
    label = ", ".join((row.label, *row.reasons)) if width >= WIDE and row.label not in ("healthy", reason) else ""
    line.append(f"  {clean(reason or label or row.label)}", style="" if reason else LABEL_STYLES.get(row.label, ""))
    return line


def _capture(capture: CaptureStatus) -> Text:
    line = Text("  ").append(clean(capture.state), style=_STATE_STYLES.get(capture.state, ""))
    rank = capture.whose and f"  {capture.whose}"
    line.append(f"{rank}{' (control)' if capture.role == 'control' else ''}  {clean(capture.capture_id)}")
    upload = ": ".join(filter(None, (_UPLOADS.get(capture.upload, ""), clean(capture.upload_reason))))
    facts = [
        span(capture.first_step, capture.last_step)
        if capture.first_step is not None and capture.last_step is not None and capture.state == "stored"
        else "",
        size(capture.size_bytes) if capture.size_bytes else "",
        f"fault in it: {capture.reproduced}" if capture.reproduced else "",
        upload,
        f"requested by {clean(capture.asked_by)}" if capture.asked_by else "",
        clean(capture.detail),
    ]
    line.append("  " if any(facts) else "").append(", ".join(filter(None, facts)), style="dim")
    return line


def _telemetry(shown: RunSummary, now_s: float) -> list[Text]:
    about, newest = shown.view.telemetry, shown.view.rows[-1] if shown.view.rows else None
    recorded = f"{about.ranks} of {about.world_size} ranks are recording"
    facts = [recorded if about.world_size else "no rank has recorded a step"]
    lacking = about.ranks < about.world_size
    if newest is not None and newest.coverage is not None:
        # (rounded down, so that an incomplete share is not shown as 100%)
        facts.append(f"{floor(newest.coverage * 1000) / 10:g}% of the newest window's steps were received")
        lacking = lacking or newest.coverage < 1.0
    if shown.view.skipped:
        facts.append(f"{counted(shown.view.skipped, 'line')} of the journal could not be read")
    lines = [Text("Telemetry  ", style="bold") + Text(", ".join(facts), style="yellow" if lacking else "")]
    judged, late = "no window yet", False
    if newest is not None:
        judged = f"{counted(shown.view.windows, 'window')}, the last {ago(newest.time_s, now_s)}"
        judged += f", restart {newest.attempt}" if newest.attempt else ""
        late = shown.state == "going" and now_s - newest.time_s > STALE_S
    lines.append(Text("Judged     ", style="bold") + Text(judged, style="yellow" if late else ""))
    off, disk = shown.view.failing and triage_off(shown.view.failing), shown.view.disk and disk_now(shown.view.disk)
    alarms = {"Disk       ": disk, "Triage     ": off, "Hosts      ": shown.view.unheard}
    return [*(Text(name, "bold red") + Text(clean(alarm), "red") for name, alarm in alarms.items() if alarm), *lines]


def _wrapped(text: str, width: int, style: str = "") -> list[Text]:
    return [Text(_cut(line, width), style=style) for line in textwrap.wrap(clean(text), max(1, width))]


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)).rstrip() + "…"


_Handler = Callable[[int, FrameType | None], None] | signal.Handlers


class Screen:
    """Shows ``lines`` of a width and height on the terminal's alternate screen until the block ends."""

    def __init__(self, console: Console, lines: Callable[[int, int], list[Text]]) -> None:
        self._live = Live(
            get_renderable=lambda: Text("\n").join(lines(console.width, console.height)),
            console=console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._signals: set[int] = set()
        self._open = contextlib.ExitStack()
        self._keys: int | None = None

    def __enter__(self) -> Screen:
        caught = signal.SIGTERM, signal.SIGTSTP
        self._open.enter_context(_handling(dict.fromkeys(caught, lambda signum, _: self._signals.add(signum))))
        self._open.callback(self._leave)
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def terminated(self) -> bool:
        return signal.SIGTERM in self._signals

    def wait(self, timeout_s: float) -> bool:
        """Draw, and wait for a key or the timeout; return whether to quit.

        Raises:
            KeyboardInterrupt: Ctrl-C.
        """
        self._live.refresh()
        ready, _, _ = select.select([] if self._keys is None else [self._keys], [], [], timeout_s)
        if signal.SIGTSTP in self._signals:
            self._step_aside()
        if self._keys is not None and self._keys in ready:
            keys = os.read(self._keys, 64)
            if not keys:
                self._keys = None
            return self.terminated or b"q" in keys
        return self.terminated

    def _take(self) -> None:
        self._keys = _own_terminal()
        if self._keys is not None:
            self._before = termios.tcgetattr(self._keys)
            # Keys are read one by one and not echoed. Ctrl-C still interrupts.
            tty.setcbreak(self._keys, termios.TCSANOW)
        self._live.start(refresh=True)

    def _leave(self) -> None:
        self._live.stop()
        if self._keys is not None:
            termios.tcsetattr(self._keys, termios.TCSANOW, self._before)

    def _step_aside(self) -> None:
        """Ctrl-Z: give the shell its screen back until it resumes us."""
        self._signals.discard(signal.SIGTSTP)
        self._leave()
        with _handling({signal.SIGTSTP: signal.SIG_DFL}):
            os.kill(os.getpid(), signal.SIGTSTP)
        self._take()


def _own_terminal() -> int | None:
    """The terminal that keys come from, if we are in its foreground: changing it from the background would stop us."""
    try:
        descriptor = sys.stdin.fileno()
        return descriptor if os.tcgetpgrp(descriptor) == os.getpgrp() else None
    except (OSError, ValueError, AttributeError):
        return None


@contextlib.contextmanager
def _handling(handlers: dict[signal.Signals, _Handler]) -> Iterator[None]:
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
