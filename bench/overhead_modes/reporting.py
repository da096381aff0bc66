"""What was found, as one object and as a table. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from bench.overhead_modes.estimating import (
    BEST_RATIO,
    Estimate,
    added,
    added_us,
    around_captures,
    median_of,
    of_modes,
    reading,
)

CLOCKS = ("wall", "cpu")
PHASES = ("import", "prepare", "start", "run", "stop", "export")
"""Of a capture in the trainer; exporting is done by a thread beside the steps."""
BESIDE = ("threads", "processes")
Figures = dict[str, Any]


def pooled(passes: list[Figures]) -> Figures:
    """The blocks of several passes as if of one."""
    whole: Figures = {}
    for found in passes:
        for phase in ("small", "cold", "real", "small_after"):
            for name, blocks in found.get(phase, {}).items():
                whole.setdefault(phase, {}).setdefault(name, []).extend(blocks)
        for phase, part in (("calls", "ns"), ("steady", None), ("captures", None), ("capture_phases", None)):
            if phase in found:
                more = found[phase][part] if part else found[phase]
                whole.setdefault(phase, []).extend(more if isinstance(more, list) else [more])
    return whole


def figures(found: Figures, step_s: float) -> Figures:
    """Every estimate of one tool."""
    step_us = step_s * 1e6
    own, cold = (added_us(found[phase], "cpu") for phase in ("small", "cold"))
    if "none" in found["cold"]:
        # As the target has it: more than calls that do nothing.
        cold["on over none"] = added_us({"off": found["cold"]["none"], "on": found["cold"]["on"]}, "cpu")["on"]
    result: Figures = {
        "own_us": own,
        "own_wall_us": added_us(found["small"], "wall"),
        "own_ratio": {name: one.map(lambda us: 1 + us / step_us) for name, one in own.items()},
        "cold_us": cold,
        "cold_ratio": {name: one.map(lambda us: 1 + us / step_us) for name, one in cold.items()},
        "cold_step_ms": median_of([one["wall_ns"] / 1e6 for one in found["cold"]["off"]]),
        "real_step_ms": median_of([one["wall_ns"] / 1e6 for one in found["real"]["off"]]),
        "real": {clock: of_modes(found["real"], clock) for clock in CLOCKS},
        "threads_share": max(0.0, median_of([one["threads_share"] for one in found["steady"]]).value),
        "processes_share": median_of([one["processes_share"] for one in found["steady"]]).value,
    }
    if "calls" in found:
        on, none, clock = zip(*found["calls"], strict=True)
        calls, floor = added(list(on), list(none)), added(list(clock), list(none))
        result["calls_us"] = calls.map(lambda ns: ns / 1e3)
        result["clock_calls_us"] = floor.map(lambda ns: ns / 1e3)
        result["calls_ratio"] = calls.map(lambda ns: 1 + ns / 1e3 / step_us)
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


def targets(tools: Mapping[str, Figures]) -> Figures:
    """What each estimator says about each target of the project; only those that could be run."""
    mine = tools.get("sftriage", {})
    if "own_ratio" not in mine:
        return {}
    read = {
        "on/off <= 1.00004: own work, small step": reading(mine["own_ratio"]["on"], BEST_RATIO),
        "on/off <= 1.00004: own work, cold": reading(mine["cold_ratio"]["on over none"], BEST_RATIO),
        "on/off <= 1.00004: calls timed in real steps": reading(mine["calls_ratio"], BEST_RATIO),
        "on/off <= 1.00004: real steps, processor": reading(mine["real"]["cpu"]["on"], BEST_RATIO),
        "on/off <= 1.00004: real steps, wall": reading(mine["real"]["wall"]["on"], BEST_RATIO),
    }
    for clock in CLOCKS if "captures" in mine else ():
        read[f"after a capture <= before: {clock}"] = reading(mine["captures"][clock]["after"], 1.0)
    for name, theirs in tools.items():
        if name != "sftriage" and "own_us" in theirs:
            for key, word in (("own_us", "small step"), ("cold_us", "cold")):
                read[f"ahead of {name}: own work, {word}"] = _ahead(mine[key]["on"], theirs[key]["on"])
    return read


def _ahead(ours: Estimate, theirs: Estimate) -> str:
    if ours.high < theirs.low:
        return "met"
    return "missed" if ours.low > theirs.high else "not resolved"


def plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Estimate):
        return {key: round(one, 6) for key, one in asdict(value).items()}
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return round(value, 6) if isinstance(value, float) else value


def lines(report: Figures) -> Iterator[str]:
    """The report for people."""
    step_ms = report["step_s"] * 1e3
    yield f"{report['machine']}; load {report['load_before']} before, {report['load_after']} after"
    yield "medians of paired blocks [95% bootstrap interval]. Own work: what a step adds to the processor time of the"
    yield f"training thread, in us, and over {step_ms:g} ms; real: blocks of steps of about {step_ms:g} ms"
    yield ""
    yield _row(
        ("tool", "own work, small step", "own work, cold", "cold, ratio", "real, processor", "real, wall", *BESIDE)
    )
    for name, one in report["tools"].items():
        if "not_run" in one:
            yield f"{name:<24} not run: {one['not_run']}"
            continue
        for mode in one["own_us"]:
            parts = (
                (one["own_us"], 2),
                (one["cold_us"], 1),
                (one["cold_ratio"], 5),
                (one["real"]["cpu"], 4),
                (one["real"]["wall"], 4),
            )
            cells = [_interval(part[mode], digits) if mode in part else "" for part, digits in parts]
            beside = [f"{one[f'{share}_share']:.2%}" if mode == "on" else "" for share in BESIDE]
            yield _row((f"{name} {mode}", *cells, *beside))
    yield from _sftriage(report)
    yield ""
    for target, word in report["targets"].items():
        yield f"{target:<48} {word}"


def _sftriage(report: Figures) -> Iterator[str]:
    mine = report["tools"].get("sftriage", {})
    if "calls_us" in mine:
        yield ""
        cold, share = _interval(mine["cold_us"]["on over none"], 2), _interval(mine["cold_ratio"]["on over none"], 6)
        yield f"sftriage, own work in cold steps over calls that do nothing: {cold} us a step, ratio {share}"
        calls, share = _interval(mine["calls_us"], 2), _interval(mine["calls_ratio"], 6)
        yield f"sftriage, its calls timed one by one inside real steps: {calls} us a step, ratio {share}"
        yield f"  calls that only read the clock and keep it: {_interval(mine['clock_calls_us'], 2)} us a step"
    if "captures" in mine:
        yield f"sftriage on with a capture, {mine['captures']['count']} captures, against the 50 steps before each:"
        for clock in CLOCKS:
            one = mine["captures"][clock]
            yield (
                f"  {clock:<5}during ({one['during_steps']:g} steps) {_interval(one['during'], 4)},"
                f" {_interval(one['extra_ms'], 1)} ms in all; 20 steps after {_interval(one['after'], 4)};"
                f" null {_interval(one['null'], 4)}; worst step after: {one['worst_position']},"
                f" {_interval(one['worst'], 4)}; {one['positions_above']} of {one['positions']} above 1;"
                f" the step after {_interval(one['next'], 4)}, the one after that {_interval(one['second'], 4)}"
            )
        first, later = mine["captures"]["first_ms"], mine["captures"]["later_ms"]
        yield "  first capture, ms: " + ", ".join(f"{name} {first[name]:.1f}" for name in first)
        yield "  later ones, ms: " + ", ".join(f"{name} {_interval(one, 1)}" for name, one in later.items())
        for mode in ("control", "on"):
            before, after = (_interval(mine[key][mode], 2) for key in ("own_us", "own_after_captures_us"))
            yield f"  {mode}: own work in small steps, us: {before} before all captures, {after} after them"
    counted = report.get("instructions")
    if counted:
        yield (
            f"instructions: not run: {counted['not_run']}"
            if "not_run" in counted
            else f"instructions a recorded step adds to an empty loop: {counted['added']:.0f} (of {counted['on']:.0f})"
        )


def _row(cells: tuple[str, ...]) -> str:
    widths = (23, 26, 26, 28, 26, 26, 9, 9)
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _interval(one: Estimate, digits: int) -> str:
    return f"{one.value:.{digits}f} [{one.low:.{digits}f}, {one.high:.{digits}f}]"
