"""What the ranks are doing now goes in; a stall is decided, and on record, once."""

from dataclasses import dataclass

import numpy as np
import pytest

from sftriage.controller.controller import Controller
from sftriage.model.windows import JobStatus, RankStatus, StageSchema, Window
from sftriage.policy.loading import parse
from sftriage.policy.schema import Detection
from sftriage.runs.journal import Journal, read_journal
from sftriage.stalls.verdict import StallSettings
from sftriage.windows.shipped import status_of
from sftriage.words.decisions import reason_sentence, resolution

S = 1_000_000_000
SCHEMA = StageSchema(("data", "save", "backward", "other"), ("backward",))
POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: test}
spec:
  detection: {stalled_after: 2s}
  rules: [{name: any, match: {gain: ">= 5%"}, capture: {steps: 3, max_seconds: 60}, cooldown: 10m}]
"""


def window(first_step: int, late_s: float = 0.0) -> Window:
    """Twenty steps of three ranks that save nothing; rank 2 is late in data."""
    local_R = np.array([0.01, 0.01, 0.01 + late_s])
    durations_NRS = np.zeros((20, 3, 4))
    durations_NRS[:, :, 0] = local_R
    durations_NRS[:, :, 2] = 0.02 + local_R.max() - local_R
    return Window(SCHEMA, first_step, durations_NRS)


@dataclass(frozen=True)
class Since:
    """What the ranks are doing since some moment of the controller's clock, told in ages when it is looked at."""

    stages: tuple[str | None, ...]
    step: int
    since_s: float

    def at(self, now_ns: int) -> JobStatus:
        age_ns = now_ns - int(self.since_s * S)
        ranks = [
            RankStatus(r, "h", stage, age_ns, self.step, age_ns, self.step, False, True)
            for r, stage in enumerate(self.stages)
        ]
        return status_of(SCHEMA, len(ranks), tuple(ranks))


@pytest.fixture
def controller(tmp_path):
    """A controller that has seen the job's pace: a step each 0.1 s, the 9th from 0.9 s on."""
    made = Controller(parse(POLICY, "test.yaml"), Journal(tmp_path / "decisions.jsonl"), tmp_path / "state.json")
    for step in range(10):
        now_ns = int((0.1 * step + 0.01) * S)
        assert made.look(Since(("backward",) * 3, step, 0.1 * step).at(now_ns), now_ns, 100.0) is None
    return made


def journal(tmp_path):
    return list(read_journal(tmp_path / "decisions.jsonl"))


def looks(controller, job, first_s, last_s, now_s=100.0):
    """Look once a second; what was decided."""
    found = [controller.look(job.at(int(second * S)), int(second * S), now_s) for second in np.arange(first_s, last_s)]
    return [one for one in found if one is not None]


def test_a_stall_is_decided_once_and_on_record_with_who_where_and_why(controller, tmp_path):
    # WHEN rank 1 stays in data from the first second on, and the others wait
    (judged,) = looks(controller, Since(("backward", "data", "backward"), 10, 1.0), 1.1, 9.0)
    # THEN it is held, for no rule is about stalls
    decision = judged.decision
    assert (decision.outcome, reason_sentence(decision)) == ("hold", "not_arrived: rank 1 in data")
    assert "py-spy" in resolution(decision)
    # AND the journal has it, once
    (entry,) = journal(tmp_path)
    assert (entry.verdict.label, entry.verdict.suspects[0].rank) == ("stalled", 1)
    assert (entry.decision.first_step, entry.decision.last_step) == (10, 10)
    assert entry.verdict.numbers["threshold_s"] == 2.0


def test_a_rank_that_is_being_captured_is_no_stall_until_its_time_is_up(controller):
    # GIVEN rank 2 is being captured, for at most 60 s and 120 s of grace
    (request,) = controller.take(window(0, late_s=0.02), now_s=100.0).decision.requests
    assert request.rank == 2
    # WHEN it holds up the others
    held_up = Since(("backward", "backward", "data"), 10, 1.0)
    # THEN that is not a stall, and from the deadline on it is
    assert looks(controller, held_up, 1.1, 9.0, now_s=279.0) == []
    assert len(looks(controller, held_up, 9.1, 12.0, now_s=281.0)) == 1


def test_a_stage_that_the_windows_show_unused_is_given_more_time(controller):
    saving = Since(("save", "backward", "backward"), 10, 1.0)
    controller.take(window(0), now_s=100.0)
    assert looks(controller, saving, 1.1, 10.9) == []
    assert len(looks(controller, saving, 11.0, 13.0)) == 1


def test_the_policys_time_is_the_floor_and_never_above_the_others():
    settings = StallSettings(floor_s=Detection(stalled_after="20m").stalled_after_s)
    assert (settings.floor_of("step"), settings.floor_of("outside"), settings.floor_of("start")) == (1200, 1200, 1800)
