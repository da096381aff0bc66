"""What an assistant is answered: small, in the words that people read, and with what it stands on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sftriage.assistants.places import Places
from sftriage.errors import InputError, UsageError
from sftriage.mitigate.advice import advice_of
from sftriage.records import CAPTURE_ID, plain
from sftriage.reports.explanation import explanation_lines
from sftriage.reports.manifest import manifest_lines
from sftriage.reports.markdown import markdown
from sftriage.runs.advice import advice_lines, advice_values, straggler_of
from sftriage.runs.captures import Damaged
from sftriage.runs.decisions import DecisionGroup, groups_of, why_none, window_of
from sftriage.runs.directory import RunDirectory
from sftriage.runs.following import WindowRow
from sftriage.runs.glance import glance_of, losses_words, on_devices
from sftriage.runs.operations import operations_in
from sftriage.runs.report import run_report
from sftriage.runs.source import View
from sftriage.runs.whatif import whatif_of, whatif_values
from sftriage.traces.keys import shown
from sftriage.traces.manifest import Manifest
from sftriage.traces.rows import CaptureQuery, CaptureRow
from sftriage.words.captures import caused
from sftriage.words.glance import QUESTIONS, reproduced_words

MOST_CHARACTERS = 12_000
"""Of an answer: about three thousand tokens."""
MOST_TEXT = 1000
MOST_LISTED = 20
MOST_NAMED = 4


def runs(places: Places) -> dict[str, Any]:
    """The runs that there are."""
    there = places.runs()
    return _fitting(
        {"runs": [_run(places, run) for run in there[:MOST_LISTED]], "left_out": max(0, len(there) - MOST_LISTED)}
    )


def _run(places: Places, run: RunDirectory) -> dict[str, Any]:
    try:
        view = places.view(run)
    except InputError as error:
        return {"run": run.path.name, "problem": str(error)}
    glance = glance_of(view)
    about = {
        "run": run.path.name,
        "goes_on": view.going,
        "health": glance.outlook.face,
        "says": glance.outlook.sentence,
    }
    info = (
        {} if view.info is None else {"job": view.info.job, "began": view.info.created_at, "policy": view.info.policy}
    )
    return {**about, **info, "steps": _steps(view.rows)}


def health(places: Places, name: str) -> dict[str, Any]:
    """How a run stands."""
    run = places.run(name)
    view = places.view(run)
    glance = glance_of(view)
    losses = [{**plain(one), "rank_hours": one.rank_hours} for one in view.losses.largest[:MOST_NAMED]]
    cost = losses_words(view.losses, on_devices=on_devices(view)) if losses else ""
    return _fitting(
        {
            **_run(places, run),
            "answers": {QUESTIONS[one.question]: "; ".join((one.text, *one.more)) for one in glance.answers},
            "cause": "" if glance.cause is None else caused(glance.cause),
            "do_next": [" ".join(filter(None, (one.text, one.command))) for one in glance.steps],
            "suspects_have_cost": {"says": cost, "largest": losses},
            "cites": _cites(run, view.rows[-1:]),
        }
    )


def verdicts(places: Places, name: str, first_step: int, last_step: int | None) -> dict[str, Any]:
    """The verdicts on the windows that touch some steps, like ones in a row as one."""
    run = places.run(name)
    view = places.view(run)
    end = max((row.last_step for row in view.rows), default=0) if last_step is None else last_step
    if end < first_step:
        raise UsageError(f"steps {first_step} to {end}: the last one comes before the first")
    rows = [row for row in view.rows if row.first_step <= end and row.last_step >= first_step]
    groups = list(reversed(groups_of(rows, view.became)))
    listed = [_group(group) for group in groups[:MOST_LISTED]]
    left_out = len(groups) - len(listed)
    found = {"run": run.path.name, "newest_first": listed, "left_out": left_out, "cites": _cites(run, rows)}
    return _fitting(found if rows else {**found, "why_none": why_none(run, first_step)})


def _group(group: DecisionGroup) -> dict[str, Any]:
    row = group.row
    suspects = [
        {
            "who": one.who,
            "where": one.where,
            "when": one.when,
            "ranks": one.ranks,
            "gain_ms": round(1e3 * one.gain_s, 3),
        }
        for one in (row.suspects or row.candidates)[:MOST_NAMED]
    ]
    return {
        "steps": [group.first_step, row.last_step],
        "windows": group.windows,
        "label": row.label,
        "reasons": row.reasons,
        "says": row.sentence,
        "suspects" if row.suspects else "candidates": suspects,
        "outcome": row.outcome,
        "because": row.words,
        "would_resolve": row.resolves,
        "captures": [one.asked.capture_id for one in group.captures],
    }


def explanation(places: Places, name: str, window: str) -> dict[str, Any]:
    """Why a window was decided as it was."""
    run = places.run(name)
    event = window_of(run, _one_line(window))
    decision = event.decision
    ranks = sorted({rank for one in event.verdict.suspects for rank in one.ranks[:MOST_NAMED]})
    captures = [one.capture_id for one in decision.requests]
    steps = [decision.first_step, decision.last_step]
    cites = {"run": run.path.name, "steps": steps, "ranks": ranks[:MOST_LISTED], "captures": captures[:MOST_LISTED]}
    return _fitting({"lines": list(explanation_lines(event)), "cites": cites}, "lines")


def captures_of_step(places: Places, name: str, step: int) -> dict[str, Any]:
    """The captures of a step, or the nearest, and what was decided about it."""
    run = places.run(name)
    view = places.view(run)
    stored = [one for one in view.captures if isinstance(one, Manifest)]
    far = {one.capture_id: CaptureRow.of(one, "", one.capture_id).distance_from(step) for one in stored}
    holding = [one for one in stored if far[one.capture_id] == 0]
    nearest = min(stored, key=lambda one: far[one.capture_id], default=None)
    rows = [row for row in view.rows if row.first_step <= step <= row.last_step]
    decided = [_group(one) for one in reversed(groups_of(rows, view.became)[-MOST_NAMED:])]
    return _fitting(
        {
            "captures": [_capture(one) for one in holding[:MOST_LISTED]],
            "nearest": None if holding or nearest is None else _capture(nearest),
            "decided": decided,
            "why_none": "" if rows else why_none(run, step),
            "cites": {**_cites(run, rows), "step": step},
        },
        "captures",
    )


def captures(places: Places, name: str, *, in_store: bool) -> dict[str, Any]:
    """The captures of a run, or those of the store, newest first."""
    if in_store:
        if name:
            raise UsageError("name a run, or ask for the store")
        rows = list(reversed(places.stored().find(CaptureQuery())))
        listed = [_row(row) for row in rows[:MOST_LISTED]]
        return _fitting({"captures": listed, "left_out": len(rows) - len(listed)}, "captures")
    run = places.run(name)
    found = places.view(run).captures
    listed = [
        {"capture": one.capture_id, "damaged": one.problem} if isinstance(one, Damaged) else _capture(one)
        for one in found[:MOST_LISTED]
    ]
    return _fitting({"run": run.path.name, "captures": listed, "left_out": len(found) - len(listed)}, "captures")


def _row(row: CaptureRow) -> dict[str, Any]:
    about = {"capture": f"{row.job}/{row.run}/{row.capture_id}", "made": row.created_at, "profiler": row.profiler}
    where = {"rank": row.rank, "host": row.host, "steps": [row.first_step, row.last_step], "stage": row.stage}
    return {**about, **where, "role": row.role, "because": row.why, "reproduced": row.reproduced}


def _capture(manifest: Manifest) -> dict[str, Any]:
    capture, trigger, found = manifest.capture, manifest.trigger, manifest.reproduced
    return {
        "capture": manifest.capture_id,
        "rank": capture.rank,
        "role": capture.role,
        "profiler": capture.profiler,
        "steps": [capture.first_step, capture.last_step],
        "window": [trigger.window.first_step, trigger.window.last_step],
        "because": trigger.why,
        "fault": "" if found is None else reproduced_words(found.answer, capture.role),
        "cause": "" if manifest.cause is None else caused(manifest.cause),
    }


def findings(places: Places, capture: str, name: str, *, in_store: bool) -> dict[str, Any]:
    """What a capture shows of why its rank is slow."""
    if in_store:
        store, reference = places.stored().one(_one_line(capture))
        manifest, _ = store.look(reference)
    else:
        manifest = _manifest(places.view(places.run(name)), capture)
    cause = manifest.cause
    steps = [manifest.capture.first_step, manifest.capture.last_step]
    return _fitting(
        {
            "cause": "" if cause is None else caused(cause),
            "do_next": "" if cause is None else cause.next_step,
            "lines": manifest_lines(manifest),
            "cites": {"captures": [manifest.capture_id], "ranks": [manifest.capture.rank], "steps": steps},
        },
        "lines",
    )


def _manifest(view: View, capture: str) -> Manifest:
    """The capture of that id, or whose id alone begins so."""
    if not CAPTURE_ID.fullmatch(capture):
        raise UsageError(f"{shown(capture)[:200]} is no capture's id")
    named = [one for one in view.captures if one.capture_id.startswith(capture)]
    found = next((one for one in named if one.capture_id == capture), named[0] if len(named) == 1 else None)
    if isinstance(found, Damaged):
        raise UsageError(f"capture {found.capture_id} cannot be read: {found.problem}")
    if found is None:
        raise UsageError(f"{len(named) or 'no'} captures are called {capture}; list_captures has their ids")
    return found


def whatif(places: Places, name: str) -> dict[str, Any]:
    """What a run would take without its stragglers."""
    run = places.run(name)
    shown = whatif_of(operations_in(run.path))
    values = whatif_values(shown.operations, shown.found, shown.kinds)
    slow = sorted((one for one in values["workers"] if one["slowdown"]), key=lambda one: -one["slowdown"])
    kept = {key: values[key] for key in ("S", "M_W", "M_S", "step_s", "ideal_step_s", "unexplained", "notes")}
    steps = [one["step"] for one in values["steps"]]
    ranks = [one["rank"] for one in slow[:MOST_NAMED] if one["rank"] is not None]
    return _fitting(
        {
            "says": shown.lines,
            **kept,
            "kinds": [{key: one[key] for key in ("kind", "share", "hidden_by")} for one in values["kinds"]],
            "slowest_workers": slow[:MOST_LISTED],
            "cites": {"run": run.path.name, "steps": [min(steps), max(steps)], "ranks": ranks},
        },
        "slowest_workers",
    )


def advice(places: Places, name: str) -> dict[str, Any]:
    """What would help against a run's straggler."""
    run = places.run(name)
    view = places.view(run)
    found = advice_of(straggler_of(view), None, None)
    return _fitting({"says": advice_lines(found), **advice_values(found), "cites": _cites(run, view.rows[-1:])}, "says")


def report(places: Places, name: str) -> str:
    """The report of a run, in Markdown, as much of it as an answer holds."""
    run = places.run(name)
    told = markdown(run_report(places.view(run)), f"run {run.path.name}")
    if len(told) <= MOST_CHARACTERS:
        return told
    return f"{told[:MOST_CHARACTERS]}\n\n_Cut here; `sftriage report` has the rest._\n"


def _cites(run: RunDirectory, rows: Sequence[WindowRow]) -> dict[str, Any]:
    """What an answer stands on."""
    named = (rank for row in rows for one in (row.suspects or row.candidates)[:1] for rank in one.ranks)
    asked = (one.capture_id for row in rows for one in row.asked)
    ranks, captures = sorted(set(named)), list(dict.fromkeys(asked))
    return {
        "run": run.path.name,
        "steps": _steps(rows),
        "ranks": ranks[:MOST_LISTED],
        "captures": captures[-MOST_LISTED:],
    }


def _steps(rows: Sequence[WindowRow]) -> list[int]:
    return [min(row.first_step for row in rows), max(row.last_step for row in rows)] if rows else []


def _one_line(text: str) -> str:
    if len(text) > MOST_TEXT or not text.isprintable():
        raise UsageError(f"{shown(text)[:200]}: no such thing")
    return text


def _fitting(values: dict[str, Any], listed: str = "") -> dict[str, Any]:
    """An answer of which no text is too long, and of what it lists as much as it holds; the rest is ``left_out``."""
    values = _cut(values)
    listed = listed or next((name for name, value in values.items() if isinstance(value, list)), "")
    while listed and len(json.dumps(values)) > MOST_CHARACTERS and len(values[listed]) > 1:
        kept = len(values[listed]) // 2
        values["left_out"] = values.get("left_out", 0) + len(values[listed]) - kept
        values[listed] = values[listed][:kept]
    return values


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= MOST_TEXT else f"{value[: MOST_TEXT - 1]}…"
    if isinstance(value, dict):
        return {name: _cut(one) for name, one in value.items()}
    if isinstance(value, Path):
        return str(value)
    return [_cut(one) for one in value] if isinstance(value, Iterable) else value
