"""Who finds the hidden rank: ours and other rules on real jobs with faults drawn from a seed, side by side.

Each row is one DDP job over Gloo, a process a rank, recorded by the real recorder; 50 rows of 4 ranks take about a
quarter of an hour on two cores. Of 50 rows 30 have one fault in a local stage, 5 one in the backward with the split of
the last ready gradient, 3 a slow host, 6 are to be held, and 6 are healthy (`drawing.py`). Kept rows are run
directories: `--from` judges them again, and `sftriage analyze` reads them too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.crew import Crew
from bench.drawing import SHARES, draw
from bench.rivals import RULES, Named, says
from bench.rows import BAR_FRACTION, STRIDE_STEPS, WARMUP_STEPS, WINDOW_STEPS, Outcome, Row, Truth
from bench.runner import add_recordings, recordings, say
from sftriage.model.verdicts import Settings, Suspect, Verdict
from sftriage.model.windows import Window
from sftriage.runs.recordings import load_recording
from sftriage.verdict.judging import judge
from sftriage.windows.gather import Shape

OURS = "ours"
FULL_FRACTION = 0.85
"""A window with this much of the most that any window has of the fault is as full of it as any."""
RIGHT, PART, WRONG, HELD, QUIET = "right", "part", "wrong", "held", "quiet"
"""The verdict of a rule: it named the truth; some of it (a rank at fault, but no stage, or one rank of several);
something that is not at fault; said that it cannot know; or nothing."""
EXPECTED = {"named": {RIGHT}, "below": {RIGHT, HELD, QUIET}, "hold": {HELD}, "healthy": {QUIET}}
QUICK = {"rows": 3, "steps": 120}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=50, help="jobs to run")
    parser.add_argument("--ranks", type=int, default=4, help="processes of each job, from 2")
    parser.add_argument("--seed", type=int, default=0, help="what the rows are drawn from")
    parser.add_argument("--steps", type=int, default=180, help="steps of each job, from 120")
    parser.add_argument("--sorts", nargs="+", choices=SHARES, default=list(SHARES))
    add_recordings(parser)


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """A row as it was recorded: what it is, how running it went, and its windows in order."""

    path: Path
    row: Row
    outcome: Outcome
    windows: tuple[Window, ...]

    @property
    def judged(self) -> int:
        """The window that counts: the last that is as full of the fault as any; -1 where there is no window."""
        fills = [self.filled(window) for window in self.windows]
        full = [index for index, filled in enumerate(fills) if filled >= FULL_FRACTION * max(fills)]
        return full[-1] if full else -1

    def filled(self, window: Window) -> float:
        """The mean delay of a window's steps as it was meant, as a fraction of the healthy step."""
        steps = range(window.first_step, window.last_step + 1)
        return sum(delay.fraction_at(step) for delay in self.row.delays for step in steps) / len(steps)

    @property
    def class_(self) -> str:
        """What a rule should do: ``named``, ``below`` (too little to have to be named), ``hold`` or ``healthy``."""
        if self.row.truth.label != "suspect":
            return "hold" if self.row.truth.label == "needs_evidence" else "healthy"
        return "named" if self.row.sort == "host" or self.row.fraction >= BAR_FRACTION else "below"


@dataclass(frozen=True, slots=True)
class Score:
    """A rule's verdict on a row, in the window that counts, and whether the truth is its first candidate."""

    did: str
    top1: bool


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    recorded: Recorded
    scores: dict[str, Score]
    verdicts: tuple[Verdict, ...] = ()
    did: tuple[str, ...] = ()

    @property
    def as_expected(self) -> bool:
        return OURS in self.scores and self.scores[OURS].did in EXPECTED[self.recorded.class_]

    @property
    def latency_steps(self) -> int | None:
        """Steps from the onset to the last step of the first window that named the truth; None if none did."""
        right = [verdict.last_step for verdict, did in zip(self.verdicts, self.did, strict=True) if did == RIGHT]
        return right[0] - self.recorded.row.truth.onset if right else None


def read_row(path: Path, shape: Shape) -> Recorded:
    document = json.loads((path / "row.json").read_text(encoding="utf-8"))
    outcome = Outcome(**document["outcome"])
    windows = () if outcome.failed else tuple(load_recording(path).windows(shape))
    return Recorded(path, msgspec.convert(document["row"], Row), outcome, windows)


def kept_rows(directory: Path) -> list[Path]:
    return sorted(path.parent for path in directory.rglob("row.json"))


def score(recorded: Recorded, settings: Settings) -> Scored:
    """Every rule on one row. A row without windows has no scores."""
    row, at = recorded.row, recorded.judged
    if at < 0:
        return Scored(recorded, {})
    verdicts: list[Verdict] = []
    past = None
    for window in recorded.windows:
        verdict, past = judge(window, past, settings)
        verdicts.append(verdict)
    did = tuple(
        verdict_did(verdict, row, recorded.filled(window))
        for verdict, window in zip(verdicts, recorded.windows, strict=True)
    )
    scores = {OURS: Score(did[at], did[at] == RIGHT)}
    for name, rule in RULES.items():
        said = says(rule, recorded.windows[: at + 1])
        first = named_is(said.ranked[0], row.truth) if said.ranked else WRONG
        scores[name] = Score(first if said.alarm else QUIET, first == RIGHT)
    return Scored(recorded, scores, tuple(verdicts), did)


def verdict_did(verdict: Verdict, row: Row, filled: float) -> str:
    """What a verdict did with its window; ``filled`` is 0 before the onset, where there is nothing to name."""
    if verdict.label == "healthy":
        return QUIET
    if verdict.label != "suspect" or not verdict.suspects:
        return HELD
    return suspect_is(verdict.suspects[0], row) if filled > 0.0 else WRONG


def suspect_is(suspect: Suspect, row: Row) -> str:
    truth = row.truth
    at_fault = bool(suspect.ranks) and set(suspect.ranks) <= set(truth.ranks)
    if truth.label != "suspect":
        return PART if at_fault and suspect.scope != "all" else WRONG
    if not at_fault:
        return WRONG
    if suspect.scope == truth.scope and set(suspect.ranks) == set(truth.ranks) and suspect.stage == truth.stage:
        return RIGHT
    return PART if suspect.stage in (truth.stage, None) or truth.stage is None else WRONG


def named_is(named: Named, truth: Truth) -> str:
    """Whether a rival's candidate is right. Rivals know ranks only: any rank of a slow host is the host."""
    if named.rank not in truth.ranks:
        return WRONG
    if truth.label != "suspect":
        return PART
    return RIGHT if truth.stage in (named.stage, None) else WRONG


def run_rows(options: argparse.Namespace, out: Path) -> None:
    rows = draw(options.rows, options.ranks, options.seed, options.steps, options.sorts)
    crew = Crew(options.ranks, out)
    try:
        for row in rows:
            say(f"row {row.number + 1} of {len(rows)}: {row.words}")
            crew.run(row)
    finally:
        crew.close()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.ranks < 2 or options.rows < 1 or options.steps < 120:
        raise SystemExit("from 2 ranks, 1 row and 120 steps on")
    with tempfile.TemporaryDirectory(prefix="hidden-rank-") as scratch:
        directory = recordings(options, scratch, kept_rows)
        if options.from_ is None:
            run_rows(options, directory)
        shape = Shape(WINDOW_STEPS, STRIDE_STEPS, WARMUP_STEPS)
        scored = [score(read_row(path, shape), Settings()) for path in kept_rows(directory)]
        return document(scored)


Pick = Callable[[Recorded], bool]


def _of(class_: str, *sorts: str) -> Pick:
    return lambda recorded: recorded.class_ == class_ and (not sorts or recorded.row.sort in sorts)


# Heading, which rows, and what counts. Wrong names and false suspects are better few; all else is better many.
LINES: tuple[tuple[str, Pick, Callable[[Score], bool]], ...] = (
    ("single fault >= 5 %: top-1", _of("named", "local", "split"), lambda score: score.top1),
    ("single fault >= 5 %: named, with an alarm", _of("named", "local", "split"), lambda score: score.did == RIGHT),
    ("single fault >= 5 %: wrong name", _of("named", "local", "split"), lambda score: score.did == WRONG),
    ("single fault < 5 %: top-1", _of("below", "local", "split"), lambda score: score.top1),
    ("single fault < 5 %: wrong name", _of("below", "local", "split"), lambda score: score.did == WRONG),
    ("slow host: top-1", _of("named", "host"), lambda score: score.top1),
    ("to be held: held", _of("hold"), lambda score: score.did == HELD),
    ("healthy: false suspects", _of("healthy"), lambda score: score.did in (RIGHT, PART, WRONG)),
    ("wrong names anywhere", lambda recorded: True, lambda score: score.did == WRONG),
)


def counts(all_scored: Sequence[Scored]) -> dict[str, dict[str, int]]:
    """For each line the number of its rows, and how many of them count for each rule."""
    table = {}
    for heading, pick, good in LINES:
        rows = [scored for scored in all_scored if scored.scores and pick(scored.recorded)]
        table[heading] = {"rows": len(rows)} | {
            name: sum(good(scored.scores[name]) for scored in rows) for name in (OURS, *RULES)
        }
    return table


def document(all_scored: Sequence[Scored]) -> dict[str, Any]:
    return {
        "rows_run": sum(bool(scored.scores) for scored in all_scored),
        "counts": counts(all_scored),
        "windows": sum(len(scored.did) for scored in all_scored),
        "windows_with_false_suspect": sum(scored.did.count(WRONG) for scored in all_scored),
        "rows": [
            {
                "path": str(scored.recorded.path),
                "row": asdict(scored.recorded.row),
                "failed": scored.recorded.outcome.failed,
                "class": scored.recorded.class_,
                "as_expected": scored.as_expected,
                "rules": {name: asdict(score) for name, score in scored.scores.items()},
                "did": scored.did,
                "label": scored.verdicts[scored.recorded.judged].label if scored.verdicts else None,
                "latency_steps": scored.latency_steps,
            }
            for scored in all_scored
        ],
    }


def show(found: dict[str, Any]) -> Iterator[str]:
    names, wide = (OURS, *RULES), max(map(len, found["counts"])) + 2
    yield f"{'':{wide}}{'rows':>6}" + "".join(f"{name:>19}" for name in names)
    for heading, of in found["counts"].items():
        yield f"{heading:{wide}}{of['rows']:>6}" + "".join(f"{of[name]:>19}" for name in names)
    yield f"ours: {found['windows_with_false_suspect']} of {found['windows']} windows with a false suspect"
    unexpected = [row for row in found["rows"] if not row["as_expected"]]
    yield f"ours was not as expected on {len(unexpected)} of {len(found['rows'])} rows"
    for row in unexpected:
        failed = f"FAILED: {row['failed'] or 'no window'}"
        yield f"  {row['path']}: {row['row']['sort']}/{row['row']['name']}"
        did = f"expected {row['class']}, got {row['label']}: {' '.join(row['did'])}"
        yield f"    {did if row['did'] else failed}"
