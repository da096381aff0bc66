"""The job's healthy profile: learned from what was healthy, slow to forget."""

import numpy as np
import pytest

from sftriage.frontier import Settings, judge, profile, replay
from sftriage.frontier.baseline import NEW_WINDOW_WEIGHT
from sftriage.frontier.segments import complete_steps

from .windows import Fault, Job, every

SETTINGS = Settings()


def after(n_windows, job=None, *faults, baseline=None):
    """The last verdict, and the baseline after so many windows of a job with these faults."""
    verdict = None
    for seed in range(n_windows):
        verdict, baseline = judge((job or Job()).run(*faults, seed=seed), baseline, SETTINGS)
    return verdict, baseline


def test_healthy_windows_teach_the_medians_of_a_step():
    # GIVEN ten healthy windows, WHEN learned from
    _, baseline = after(10)
    # THEN the levels are the job's: data 20, forward 30, backward none of its own locally, optimizer 8, other 2 ms
    assert baseline.n_windows == 10
    assert baseline.typical.level_S == pytest.approx([0.020, 0.030, 0.0, 0.008, 0.002], rel=0.03, abs=1e-6)
    # (backward: 35 of the rank that is last plus 5 of exchange, less the arrivals' spread)
    assert baseline.typical.sync_S[2] == pytest.approx(0.041, rel=0.05)


@pytest.mark.parametrize(
    "faults",
    [
        (Fault("data", 1, 0.030),),
        (Fault("data", None, 0.030),),
        (Fault("backward", 1, 0.060),),
        (Fault("data", 0, 0.030), Fault("forward", 1, 0.030)),
        (Fault("data", 0, 0.120, every(4)),),
    ],
    ids=["one rank", "all ranks", "inside the sync", "co-critical", "every fourth step"],
)
def test_a_slow_window_teaches_nothing(faults):
    # GIVEN a job with a baseline
    _, known = after(10)
    # WHEN slow windows follow, as many as one likes
    verdict, baseline = after(30, None, *faults, baseline=known)
    # THEN they stay slow, and the baseline stays what it was
    assert verdict.label != "healthy"
    assert baseline is known


def test_one_window_more_or_less_hardly_matters():
    # GIVEN a job known from twenty windows
    _, known = after(20)
    # WHEN a window is a little slower, under every threshold
    window = Job().run(Fault("data", None, 0.010), seed=99)
    verdict, baseline = judge(window, known, SETTINGS)
    # THEN it is healthy, and moves the baseline by its weight
    seen = profile(replay(window), complete_steps(window)).typical
    assert verdict.label == "healthy"
    moved = baseline.typical.level_S - known.typical.level_S
    assert moved == pytest.approx(NEW_WINDOW_WEIGHT * (seen.level_S - known.typical.level_S))
    # AND the first few windows weigh alike
    _, one = after(1)
    _, two = after(2)
    assert two.n_windows == one.n_windows + 1 == 2


def test_a_job_that_only_roams_gets_a_level_but_no_lateness():
    # GIVEN a job in which another rank is late each step, from its first step on
    turns = [Fault("data", rank, 0.040, every(4, rank)) for rank in range(4)]
    # WHEN it is judged for ten windows
    verdict, baseline = after(10, None, *turns)
    # THEN it has a baseline for what its ranks share, and being late is not normal to it
    assert verdict.reasons == ("roaming",)
    assert baseline.n_windows == 10
    assert baseline.typical.level_S[0] == pytest.approx(0.020, rel=0.05)
    assert baseline.typical.lateness_s == 0.0


def test_a_window_without_one_complete_step_teaches_nothing():
    # GIVEN a window from which a rank is missing, WHEN judged
    window = Job().run()
    window.durations_NRS[:, 3] = np.nan
    verdict, baseline = judge(window, None, SETTINGS)
    # THEN it is held, and there is no baseline
    assert verdict.reasons == ("low_coverage",)
    assert baseline is None
