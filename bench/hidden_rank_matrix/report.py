"""How the matrix went: counts for each rule side by side, and for each row on which ours was not as asked, why."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from bench.hidden_rank_matrix.rivals import RULES
from bench.hidden_rank_matrix.rows import BAR_FRACTION
from bench.hidden_rank_matrix.scoring import HELD, OURS, PART, RIGHT, WRONG, Score, Scored
from sftriage.decisions import Verdict
from sftriage.records import plain

Pick = Callable[[Scored], bool]
Good = Callable[[Score], bool]


def _filled(scored: Scored) -> bool:
    recorded = scored.recorded
    return scored.row.single and recorded.filled(recorded.windows[recorded.judged]) >= BAR_FRACTION


def _of(class_: str, *sorts: str) -> Pick:
    return lambda scored: scored.class_ == class_ and (not sorts or scored.row.sort in sorts)


# Heading, which rows, and what counts. Wrong names and false suspects are better few; all else is better many.
LINES: tuple[tuple[str, Pick, Good], ...] = (
    ("single fault >= 5 %: top-1", _of("named", "local", "split"), lambda score: score.top1),
    ("single fault >= 5 %: top-2", _of("named", "local", "split"), lambda score: score.top2),
    ("single fault >= 5 %: named, with an alarm", _of("named", "local", "split"), lambda score: score.did == RIGHT),
    ("single fault >= 5 %: wrong name", _of("named", "local", "split"), lambda score: score.did == WRONG),
    ("  and >= 5 % over the whole window: top-1", _filled, lambda score: score.top1),
    ("single fault < 5 %: top-1", _of("below", "local", "split"), lambda score: score.top1),
    ("single fault < 5 %: wrong name", _of("below", "local", "split"), lambda score: score.did == WRONG),
    ("slow from outside: top-1 (rank)", _of("named", "outside"), lambda score: score.top1),
    ("slow host: top-1", _of("named", "host"), lambda score: score.top1),
    ("to be held: held", _of("hold"), lambda score: score.did == HELD),
    ("to be held: named something", _of("hold"), lambda score: score.did in (RIGHT, PART, WRONG)),
    ("healthy: false suspects", _of("healthy"), lambda score: score.did in (RIGHT, PART, WRONG)),
    ("healthy: held for nothing", _of("healthy"), lambda score: score.did == HELD),
    ("wrong names anywhere", lambda scored: True, lambda score: score.did == WRONG),
)


def counts(all_scored: Sequence[Scored]) -> dict[str, dict[str, Any]]:
    """For each line the rows it is about, and how many of them count for each rule."""
    ran = [scored for scored in all_scored if scored.scores]
    table: dict[str, dict[str, Any]] = {}
    for heading, pick, good in LINES:
        rows = [scored for scored in ran if pick(scored)]
        table[heading] = {"rows": len(rows)} | {
            name: sum(good(scored.scores[name]) for scored in rows) for name in (OURS, *RULES)
        }
    return table


def ours_over_time(all_scored: Sequence[Scored]) -> dict[str, Any]:
    """Ours in every window, not only in the one that counts."""
    ran = [scored for scored in all_scored if scored.ours is not None]
    asked = [scored.ours.latency_steps for scored in ran if scored.class_ == "named" and scored.ours]
    latencies = [latency for latency in asked if latency is not None]
    onsets = [error for scored in ran if (error := _onset_error(scored)) is not None]
    return {
        "windows": sum(len(scored.ours.verdicts) for scored in ran if scored.ours),
        "windows_with_false_suspect": sum(scored.ours.false_suspects for scored in ran if scored.ours),
        "rows_with_false_suspect": sum(bool(scored.ours.false_suspects) for scored in ran if scored.ours),
        "latency_steps_median": statistics.median(latencies) if latencies else None,
        "latency_steps_most": max(latencies, default=None),
        "onset_error_steps_median": statistics.median(onsets) if onsets else None,
    }


def _onset_error(scored: Scored) -> int | None:
    """How many steps the onset in a right verdict is off, for faults that began within what was recorded."""
    if scored.ours is None or scored.scores[OURS].did != RIGHT or not scored.row.truth.onset:
        return None
    onset = scored.ours.verdicts[scored.recorded.judged].suspects[0].onset_step
    return None if onset is None else abs(onset - scored.row.truth.onset)


def document(all_scored: Sequence[Scored], about: dict[str, Any]) -> dict[str, Any]:
    """The whole matrix as JSON has it."""
    found: dict[str, Any] = _finite(
        {
            **about,
            "rows_run": sum(bool(scored.scores) for scored in all_scored),
            "rows_failed": sum(scored.recorded.outcome.failed is not None for scored in all_scored),
            "counts": counts(all_scored),
            "ours_over_time": ours_over_time(all_scored),
            "rows": [_row_document(scored) for scored in all_scored],
        }
    )
    return found


def _finite(value: Any) -> Any:
    """JSON has no NaN: what is not known is null."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row_document(scored: Scored) -> dict[str, Any]:
    recorded = scored.recorded
    found: dict[str, Any] = {
        "path": str(recorded.path),
        "row": asdict(scored.row),
        "outcome": asdict(recorded.outcome),
        "class": scored.class_,
        "as_expected": scored.as_expected,
        "rules": {name: asdict(score) for name, score in scored.scores.items()},
    }
    if scored.ours is not None:
        window = recorded.windows[recorded.judged]
        found |= {
            "judged_window": recorded.judged,
            "fault_mean_fraction": recorded.filled(window),
            "slowdown_fraction": recorded.slowdown,
            "latency_steps": scored.ours.latency_steps,
            "false_suspects": scored.ours.false_suspects,
            "windows": [
                {"did": did, **plain(verdict)}
                for did, verdict in zip(scored.ours.did, scored.ours.verdicts, strict=True)
            ],
        }
    return found


def text(all_scored: Sequence[Scored], about: dict[str, Any]) -> str:
    """The report as a person reads it."""
    lines = [" ".join(f"{name} {value}" for name, value in about.items() if value is not None), ""]
    lines += _table(counts(all_scored))
    over_time = ours_over_time(all_scored)
    lines += ["", "ours, in every window: " + ", ".join(f"{name} {value}" for name, value in over_time.items()), ""]
    lines += _courses(all_scored)
    unexpected = [scored for scored in all_scored if not scored.as_expected]
    lines += ["", f"ours was not as asked on {len(unexpected)} of {len(all_scored)} rows"]
    for scored in unexpected:
        lines += ["", *why(scored)]
    return "\n".join(lines)


def _table(table: dict[str, dict[str, Any]]) -> list[str]:
    names = (OURS, *RULES)
    wide = max(map(len, table)) + 2
    lines = [f"{'':{wide}}{'rows':>6}" + "".join(f"{name:>19}" for name in names)]
    for heading, found in table.items():
        lines.append(f"{heading:{wide}}{found['rows']:>6}" + "".join(f"{found[name]:>19}" for name in names))
    return lines


def _courses(all_scored: Sequence[Scored]) -> list[str]:
    """Ours on single faults from 5 % on, by place and by course: where the work is."""
    asked = [scored for scored in all_scored if scored.scores and scored.class_ == "named" and scored.row.single]
    lines = []
    for what, part in (("place", 0), ("course", 1)):
        by: dict[str, list[bool]] = {}
        for scored in asked:
            by.setdefault(scored.row.name.split("-")[part], []).append(scored.scores[OURS].top1)
        told = ", ".join(f"{name} {sum(right)}/{len(right)}" for name, right in sorted(by.items()))
        lines.append(f"ours, top-1 by {what}: {told or 'none'}")
    return lines


def why(scored: Scored) -> list[str]:
    """One row on which ours was not as asked: what it is, what was said, and the numbers."""
    recorded, row = scored.recorded, scored.row
    lines = [f"{recorded.path}: {row.words}"]
    if scored.ours is None:
        return [*lines, f"  FAILED: {recorded.outcome.failed or 'no window'}"]
    verdict = scored.ours.verdicts[recorded.judged]
    window = recorded.windows[recorded.judged]
    asked = {"named": _truth_words(scored), "below": "its name or silence", "hold": "a hold", "healthy": "silence"}
    lines.append(
        f"  asked: {asked[scored.class_]}; got: {verdict.label} {list(verdict.reasons)} "
        f"({scored.scores[OURS].did}) in steps {verdict.first_step}-{verdict.last_step}, "
        f"which hold {recorded.filled(window):.1%} of fault a step and are {recorded.slowdown:+.1%} slower"
    )
    lines += [f"  suspect: {said}" for said in scored.scores[OURS].said]
    each = zip(scored.ours.verdicts, scored.ours.did, strict=True)
    lines.append("  windows: " + " ".join(f"{one.first_step}:{did}" for one, did in each))
    lines.append("  numbers: " + number_words(verdict))
    rivals = {name: score for name, score in scored.scores.items() if name != OURS and score.top1}
    lines.append("  top-1 of: " + (", ".join(rivals) or "none of the others"))
    return lines


def _truth_words(scored: Scored) -> str:
    truth = scored.row.truth
    return f"{truth.scope} {list(truth.ranks)} {truth.stage or 'all stages'}"


def number_words(verdict: Verdict) -> str:
    """Every number of a verdict, times in milliseconds."""
    words = [f"exposed {verdict.exposed_s * 1e3:.2f} ms"]
    for name, value in verdict.numbers.items():
        words.append(f"{name[:-2]} {value * 1e3:.2f} ms" if name.endswith("_s") else f"{name} {value:.3g}")
    return ", ".join(words)
