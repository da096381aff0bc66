"""What is made of the blocks of the overhead bench: estimates, and what they say about the targets. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bench.estimates import Estimate, added, median_of, ratio

BEST_RATIO = 1.00004
"""The most that a step of 50 ms may become: the target."""
CLOCKS = ("wall", "cpu")
PHASES = ("import", "prepare", "start", "run", "stop", "export")
"""Of a capture in the trainer; exporting is done by a thread beside the steps."""
BESIDE = ("threads", "processes")
Figures = dict[str, Any]


def reading(estimate: Estimate, most: float) -> str:
    """What an interval says about a limit: ``met``, ``missed``, or ``not resolved``."""
    if estimate.high <= most:
        return "met"
    return "missed" if estimate.low > most else "not resolved"


def of_modes(blocks: Mapping[str, Sequence[Mapping[str, float]]], clock: str) -> dict[str, Estimate]:
    times = {name: [block[f"{clock}_ns"] for block in taken] for name, taken in blocks.items()}
    return {name: ratio(taken, times["off"]) for name, taken in times.items() if name != "off"}


def added_us(blocks: Mapping[str, Sequence[Mapping[str, float]]], clock: str) -> dict[str, Estimate]:
    times = {name: [block[f"{clock}_ns"] / 1e3 for block in taken] for name, taken in blocks.items()}
    return {name: added(taken, times["off"]) for name, taken in times.items() if name != "off"}


def around_captures(rounds: Sequence[Mapping[str, Any]], clock: int) -> Figures:
    """Steps during and after each capture, by the median of those before it.

    ``null`` is the later two fifths of the steps before a capture against the earlier three, as ``after`` would be if a
    capture did nothing; ``positions`` are the steps after it one by one, and ``worst`` the highest of them.

    Args:
        rounds: the steps around each capture.
        clock: 0 for the wall clock, 1 for the processor time of the training thread.
    """
    before = [[times[clock] for times in one["before"]] for one in rounds]
    after = [[times[clock] for times in one["after"]] for one in rounds]
    busy = [
        [times[clock] for times, state in zip(one["during"], one["states"], strict=True) if state != "idle"]
        for one in rounds
    ]
    base = [float(np.median(one)) for one in before]
    cut = len(before[0]) * 3 // 5
    positions = [ratio([one[at] for one in after], base) for at in range(len(after[0]))]
    worst = max(range(len(positions)), key=lambda at: positions[at].value)
    return {
        "during": ratio([float(np.mean(one)) for one in busy], base),
        "during_steps": float(np.median([len(one) for one in busy])),
        "extra_ms": median_of([(sum(one) - len(one) * step) / 1e6 for one, step in zip(busy, base, strict=True)]),
        "after": ratio([float(np.median(one)) for one in after], base),
        "null": ratio([float(np.median(one[cut:])) for one in before], [float(np.median(one[:cut])) for one in before]),
        "worst_position": worst + 1,
        "worst": positions[worst],
        "positions_above": sum(one.low > 1.0 for one in positions),
        "positions": len(positions),
    }


def pooled(passes: Sequence[Figures]) -> Figures:
    whole: Figures = {}
    for found in passes:
        for phase, more in found.items():
            if isinstance(more, dict):
                for name, blocks in more.items():
                    whole.setdefault(phase, {}).setdefault(name, []).extend(blocks)
            else:
                whole.setdefault(phase, []).extend(more)
    return whole


def figures(found: Figures, step_s: float) -> Figures:
    step_us = step_s * 1e6
    own, cold = (added_us(found[phase], "cpu") for phase in ("small", "cold"))
    # As the target has it: more than calls that do nothing.
    cold["on over none"] = added_us({"off": found["cold"]["none"], "on": found["cold"]["on"]}, "cpu")["on"]
    calls = added(found["calls"]["on"], found["calls"]["none"])
    result: Figures = {
        "own_us": own,
        "own_ratio": {name: one.map(lambda us: 1 + us / step_us) for name, one in own.items()},
        "cold_us": cold,
        "cold_ratio": {name: one.map(lambda us: 1 + us / step_us) for name, one in cold.items()},
        "real": {clock: of_modes(found["real"], clock) for clock in CLOCKS},
        "threads_share": max(0.0, median_of([one["threads_share"] for one in found["steady"]]).value),
        "processes_share": median_of([one["processes_share"] for one in found["steady"]]).value,
        "calls_us": calls.map(lambda ns: ns / 1e3),
        "calls_ratio": calls.map(lambda ns: 1 + ns / 1e3 / step_us),
    }
    if "captures" in found:
        result["captures"] = {
            clock: around_captures(found["captures"], index) for index, clock in enumerate(CLOCKS)
        } | {"count": len(found["captures"])}
        # The first one in a process pays for what is imported and set up once.
        first, *later = found["capture_phases"]
        result["captures"]["first_ms"] = {name: seconds * 1e3 for name, seconds in first.items()}
        result["captures"]["later_ms"] = {
            name: median_of([one[name] * 1e3 for one in later]) for name in PHASES if later
        }
        result["own_after_captures_us"] = added_us(found["small_after"], "cpu")
    return result


def targets(mine: Figures) -> dict[str, str]:
    """What each estimator says about each target of the project."""
    read = {
        "own work, small step": mine["own_ratio"]["on"],
        "own work, cold": mine["cold_ratio"]["on over none"],
        "calls timed in real steps": mine["calls_ratio"],
        "real steps, processor": mine["real"]["cpu"]["on"],
        "real steps, wall": mine["real"]["wall"]["on"],
    }
    found = {f"on/off <= {BEST_RATIO}: {name}": reading(one, BEST_RATIO) for name, one in read.items()}
    for clock in CLOCKS if "captures" in mine else ():
        found[f"after a capture <= before: {clock}"] = reading(mine["captures"][clock]["after"], 1.0)
    return found


def lines(report: Figures) -> Iterator[str]:
    step_ms = report["step_s"] * 1e3
    yield "medians of paired blocks [95% bootstrap interval]. Own work: what a step adds to the processor time of the"
    yield f"training thread, in us, and over {step_ms:g} ms; real: blocks of steps of about {step_ms:g} ms"
    yield ""
    yield _row(
        "tool", "own work, small step", "own work, cold", "cold, ratio", "real, processor", "real, wall", *BESIDE
    )
    columns = [(report["own_us"], 2), (report["cold_us"], 1), (report["cold_ratio"], 5)]
    columns += [(report["real"][clock], 4) for clock in ("cpu", "wall")]
    for mode in report["own_us"]:
        cells = [part[mode].words(digits) if mode in part else "" for part, digits in columns]
        beside = [f"{report[f'{share}_share']:.2%}" if mode == "on" else "" for share in BESIDE]
        yield _row(mode, *cells, *beside)
    cold, share = report["cold_us"]["on over none"].words(2), report["cold_ratio"]["on over none"].words(6)
    yield f"own work in cold steps over calls that do nothing: {cold} us a step, ratio {share}"
    calls, share = report["calls_us"].words(2), report["calls_ratio"].words(6)
    yield f"calls timed one by one inside real steps: {calls} us a step, ratio {share}"
    if "captures" in report:
        yield from _captures(report)
    if counted := report.get("instructions"):
        yield (
            f"instructions: not run: {counted['not_run']}"
            if "not_run" in counted
            else f"instructions a recorded step adds to an empty loop: {counted['added']:.0f} (of {counted['on']:.0f})"
        )
    yield ""
    for target, word in report["targets"].items():
        yield f"{target:<48} {word}"


def _captures(report: Figures) -> Iterator[str]:
    found = report["captures"]
    yield f"{found['count']} captures, against the 50 steps before each:"
    for clock in CLOCKS:
        one = found[clock]
        yield (
            f"  {clock:<5}during ({one['during_steps']:g} steps) {one['during'].words(4)},"
            f" {one['extra_ms'].words(1)} ms in all; 20 steps after {one['after'].words(4)};"
            f" null {one['null'].words(4)}; worst step after: {one['worst_position']},"
            f" {one['worst'].words(4)}; {one['positions_above']} of {one['positions']} above 1"
        )
    yield "  first capture, ms: " + ", ".join(f"{name} {ms:.1f}" for name, ms in found["first_ms"].items())
    yield "  later ones, ms: " + ", ".join(f"{name} {one.words(1)}" for name, one in found["later_ms"].items())
    for mode in ("control", "on"):
        before, after = (report[key][mode].words(2) for key in ("own_us", "own_after_captures_us"))
        yield f"  {mode}: own work in small steps, us: {before} before all captures, {after} after them"


def _row(*cells: str) -> str:
    widths = (23, 26, 26, 28, 26, 26, 9, 9)
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
