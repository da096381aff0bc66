import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.traces.findings import Findings, StageProfile
from sftriage.web.charts import WIDTH, bars_of

NAMES = ("step_s", "stage_s", "working_s", "waiting_s", "unseen_s", "device_s", "collective_s", "launch_s")


def side(rank: int | None = 2, **about: float) -> StageProfile:
    numbers = {**dict.fromkeys(NAMES, 0.01), **about}
    counts = {"first_step": 160, "last_step": 164, "steps": 5, "kernels": 0.0, "launches": 0.0}
    return StageProfile(source="trace", rank=rank, **counts, **numbers)


def findings(suspect: StageProfile | None = None, control: StageProfile | None = None) -> Findings:
    suspect = suspect or side(stage_s=0.05, working_s=0.01, waiting_s=0.03, unseen_s=0.01)
    return Findings(
        stage="data", suspect=suspect, control=control or side(0, waiting_s=0.0), shares=(), summary="It slept."
    )


def test_both_ranks_are_drawn_on_one_scale():
    # GIVEN a suspect whose stage took 50 ms, and a control's of 20 ms
    captured, control = bars_of(findings())
    # THEN the longer one fills the drawing, and the parts of each follow one another
    assert [(part.x, part.width) for part in captured.parts] == [(0, 200), (200, 600), (800, 200)]
    assert sum(part.width for part in control.parts) == pytest.approx(400)
    assert (captured.title, captured.rank, control.title, control.rank) == ("captured", 2, "control", 0)


def test_other_steps_of_the_captured_rank_are_not_called_its_control():
    found = findings(control=side(2)).model_copy(update={"of_steps": 12, "beside": "steps"})
    assert [(bar.title, bar.rank) for bar in bars_of(found)] == [("captured", 2), ("its other steps", 2)]


def test_without_findings_there_is_nothing_to_draw():
    assert bars_of(None) == ()


ANY = st.floats(allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(*[ANY] * 6)
def test_whatever_a_manifest_says_the_drawing_holds_it(a, b, c, d, e, f):
    sides = side(working_s=a, waiting_s=b, unseen_s=c), side(0, working_s=d, waiting_s=e, unseen_s=f)
    for bar in bars_of(findings(*sides)):
        assert all(0 <= part.x <= WIDTH + 0.1 and 0 <= part.width <= WIDTH for part in bar.parts)
