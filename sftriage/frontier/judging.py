"""Window after window: a verdict on each, and what it teaches about the job."""

from __future__ import annotations

from sftriage.frontier.baseline import Baseline, learned, profile
from sftriage.frontier.segments import complete_steps
from sftriage.frontier.settings import Settings
from sftriage.frontier.verdicts import classify
from sftriage.frontier.whatif import replay
from sftriage.records import Verdict, Window


def judge(window: Window, baseline: Baseline | None, settings: Settings) -> tuple[Verdict, Baseline | None]:
    """The verdict on a window and the baseline after it. A new attempt of the job starts from no baseline."""
    verdict = classify(window, baseline, settings)
    valid_N = complete_steps(window)
    if not valid_N.any():
        return verdict, baseline
    return verdict, learned(baseline, verdict, profile(replay(window), valid_N).typical)
