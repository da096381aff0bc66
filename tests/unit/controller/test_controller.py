"""Windows in, decisions out; what must not be forgotten survives the controller."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from sftriage.controller.controller import Controller, settings_of
from sftriage.errors import InputError
from sftriage.mitigate.switching import Request, SwitchStatus
from sftriage.model.captures import CaptureResult, Reproduced
from sftriage.model.events import RemedyChanged, Span
from sftriage.model.verdicts import Settings
from sftriage.model.windows import JobStatus, RankStatus, StageSchema, Window
from sftriage.policy.schema import Detection
from sftriage.runs.journal import Journal, read_journal
from sftriage.windows.rings import status_of
from sftriage.words.decisions import reason_sentence, resolution
from tests.unit.policy.making import make_policy

ANY = {"name": "any", "match": {"gain": ">= 5%"}, "capture": {"steps": 3}, "cooldown": "10m"}
SCHEMA = StageSchema(("data", "save", "backward", "other"), ("backward",))


def window(first_step: int, late_s: float = 0.0, attempt: int = 0) -> Window:
    """Twenty steps of four ranks that save nothing; rank 2 is late in data, and the others wait for it in backward."""
    local_R = np.array([0.01, 0.01, 0.01 + late_s, 0.01])
    durations_NRS = np.zeros((20, 4, 4))
    durations_NRS[:, :, 0] = local_R
    durations_NRS[:, :, 2] = 0.02 + local_R.max() - local_R
    return Window(SCHEMA, first_step, durations_NRS, attempt=attempt)


@pytest.fixture
def start(tmp_path):
    """Start a controller in the same place, as after a restart."""

    def start(*rules, **spec) -> Controller:
        journal = Journal(tmp_path / "decisions.jsonl")
        return Controller(make_policy(*(rules or (ANY,)), **spec), journal, tmp_path / "state.json")

    return start


def test_a_suspect_leads_to_a_capture_of_its_rank_linked_to_its_window(start):
    controller = start()
    assert controller.take(window(0), now_s=100.0).decision.outcome == "ignore"
    judged = controller.take(window(20, late_s=0.02), now_s=101.0)
    (request,) = judged.decision.requests
    assert (judged.decision.outcome, request.rank, request.steps) == ("capture", 2, 3)
    trigger = controller.trigger_of(request.capture_id)
    assert (trigger.first_step, trigger.last_step, trigger.stage, trigger.ranks) == (20, 39, "data", (2,))


def test_a_budget_counts_from_the_first_step_of_the_run(start):
    """GIVEN a job of 100 s WHEN a new run takes its steps, and their captures' costs THEN the budget is of 100 s."""
    controller = start(overhead_budget="5%")
    controller.take(window(0), 1000.0, {0: Span(900 * 10**9, 901 * 10**9)})
    controller.take(window(20), 1001.0, {20: Span(920 * 10**9, 921 * 10**9)})
    assert controller.budget(1000.0) == (0.0, pytest.approx(5.0))


def test_a_restart_keeps_cooldowns_and_running_captures(start):
    # GIVEN a capture was started
    first = start()
    (request,) = first.take(window(0, late_s=0.02), now_s=100.0).decision.requests
    # WHEN the controller dies and another one takes over
    second = start()
    # THEN the same suspect is throttled, and after the cooldown captured again
    assert second.take(window(20, late_s=0.02), now_s=101.0).decision.outcome == "throttle"
    second.changed(CaptureResult(request.capture_id, 2, "stored"), 100.0)
    assert second.take(window(40, late_s=0.02), now_s=100.0 + 601).decision.outcome == "capture"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("yes", "already_captured"), ("partly", "already_captured"), ("no", "rule_matched"), (None, "rule_matched")],
)
def test_a_reproduced_suspect_waits_and_others_are_captured_again(start, answer, reason):
    # GIVEN an ended capture, and whether the fault is in its steps, if known
    controller = start()
    (request,) = controller.take(window(0, late_s=0.02), now_s=100.0).decision.requests
    found = None if answer is None else Reproduced(answer, 3, 2, 0.02, 0.02)
    controller.changed(CaptureResult(request.capture_id, 2, "stored", first_step=21, last_step=23), 105.0, found)
    # WHEN the suspect is as it was after the cooldown, also for another controller
    decision = start().take(window(40, late_s=0.02), now_s=701.0).decision
    assert decision.reason == reason
    # THEN the capture that stands for it is named
    assert decision.parameters.get("capture_id") == (request.capture_id if reason == "already_captured" else None)


def test_an_attempt_has_no_baseline_from_the_previous_one(start):
    controller = start()
    for number in range(3):
        controller.take(window(20 * number), now_s=100.0)
    known = controller.take(window(60), now_s=100.0).verdict.numbers["has_baseline"]
    fresh = controller.take(window(0, attempt=1), now_s=100.0).verdict.numbers["has_baseline"]
    assert (known, fresh) == (1.0, 0.0)


def test_an_invalid_state_file_is_refused_in_words(start, tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({"captures": "many"}), encoding="utf-8")
    with pytest.raises(InputError, match="captures"):
        start()


def test_verdicts_use_the_policys_thresholds():
    found = settings_of(Detection(min_gain="7%", min_persistence=0.8, min_coverage=0.5))
    assert found == Settings(pytest.approx(0.07), min_persistence_fraction=0.8, min_coverage_fraction=0.5)


def test_a_restart_keeps_notifications_and_streaks(start):
    page = {"name": "page", "match": {"gain": ">= 5%"}, "notify": [{"webhook": {"url_from_env": "HOOK"}}]}
    slow = {"name": "slow", "match": {"gain": ">= 5%"}, "for": "60 steps", "capture": {"control_ranks": 1}}
    # WHEN each window is judged by another controller
    decisions = [start(page, slow).take(window(20 * n, late_s=0.02), now_s=100.0 + n).decision for n in range(3)]
    # THEN one message is sent, and a suspect that lasted for three windows of 20 steps is captured
    assert [decision.notify for decision in decisions] == [("page",), (), ()]
    assert [decision.outcome for decision in decisions] == ["hold", "hold", "capture"]
    # AND a healthy rank is captured beside the suspect
    assert [(one.rank, one.role) for one in decisions[2].requests] == [(2, "suspect"), (0, "control")]


def test_windows_without_the_straggler_do_not_rule_it_out(start, tmp_path):
    # GIVEN a remedy that is tried on a rank that is always late
    controller = start(mitigate={"remedies": ["stragglar"], "min_saving": "1%"})
    group = SwitchStatus("rank-0.0.switch", (0, 1, 2, 3), 400, 400, 0, -1, Request(0, 0, 0), 0.01, 1 << 20)

    def events_after(*windows):
        for one in windows:
            controller.take(one, now_s=100.0)
        controller.mitigate([group], 100.0)
        changes = [one for one in read_journal(tmp_path / "decisions.jsonl") if isinstance(one, RemedyChanged)]
        return [(one.state, one.reason, one.rank) for one in changes]

    tried = [("trying", "worthwhile", 2)]
    assert events_after(*(window(20 * number, late_s=0.02) for number in range(40))) == tried
    # WHEN its host is silent for more windows than count THEN no event says that it is no longer late
    silent = [window(20 * number) for number in range(40, 52)]
    for one in silent:
        one.durations_NRS[:, 2:] = np.nan
    assert events_after(*silent) == tried
    # AND an event says so once it reports again and is no longer late
    assert events_after(*(window(20 * number) for number in range(52, 62))) == [*tried, ("undone", "gone", 2)]


S = 1_000_000_000


@dataclass(frozen=True)
class Since:
    """The ranks' states since a moment of the controller's clock, as ages at the time of each check."""

    stages: tuple[str | None, ...]
    step: int
    since_s: float

    def at(self, now_ns: int) -> JobStatus:
        age_ns = now_ns - int(self.since_s * S)
        about = age_ns, self.step, age_ns, self.step, False, True
        ranks = [RankStatus(rank, "h", stage, *about) for rank, stage in enumerate(self.stages)]
        return status_of(SCHEMA, len(ranks), tuple(ranks))


@pytest.fixture
def stepping(start, profiler):
    """A controller that knows the job's pace: a step each 0.1 s, the 9th from 0.9 s on."""
    made = start({**ANY, "capture": {"profiler": profiler}}, detection={"stalled_after": "2s"})
    for step in range(10):
        now_ns = int((0.1 * step + 0.01) * S)
        assert made.look(Since(("backward",) * 3, step, 0.1 * step).at(now_ns), now_ns, 100.0) is None
    return made


@pytest.fixture(params=["torch"])
def profiler(request):
    return request.param


def looks(of, job, first_s, last_s, now_s=100.0):
    """Look once a second; what was decided."""
    found = [of.look(job.at(int(second * S)), int(second * S), now_s) for second in np.arange(first_s, last_s)]
    return [one for one in found if one is not None]


def test_a_stall_is_decided_once_and_recorded_with_ranks_stage_and_reason(stepping, tmp_path):
    # WHEN rank 1 stays in data from the first second on, and the others wait
    (judged,) = looks(stepping, Since(("backward", "data", "backward"), 10, 1.0), 1.1, 9.0)
    # THEN it is held, for no rule is about stalls
    decision = judged.decision
    assert (decision.outcome, reason_sentence(decision)) == ("hold", "not_arrived: rank 1 in data")
    assert "py-spy" in resolution(decision)
    # AND the journal has it, once
    (entry,) = read_journal(tmp_path / "decisions.jsonl")
    assert (entry.verdict.label, entry.verdict.suspects[0].rank) == ("stalled", 1)
    assert (entry.decision.first_step, entry.decision.last_step) == (10, 10)
    assert entry.verdict.numbers["threshold_s"] == 2.0


def test_a_captured_rank_does_not_stall_before_its_time_box_ends(stepping):
    # GIVEN rank 2 is being captured, for at most 60 s
    (request,) = stepping.take(window(0, late_s=0.02), now_s=100.0).decision.requests
    assert request.rank == 2
    # WHEN it holds up the others
    held_up = Since(("backward", "backward", "data"), 10, 1.0)
    # THEN that is not a stall, and from its end on it is
    assert looks(stepping, held_up, 1.1, 9.0, now_s=159.0) == []
    assert len(looks(stepping, held_up, 9.1, 12.0, now_s=161.0)) == 1


@pytest.mark.parametrize("profiler", ["stacks"], indirect=True)
def test_stacks_hold_up_no_rank_so_that_it_may_stall_meanwhile(stepping):
    (request,) = stepping.take(window(0, late_s=0.02), now_s=100.0).decision.requests
    assert (request.rank, request.profiler) == (2, "stacks")
    held_up = Since(("backward", "backward", "data"), 10, 1.0)
    assert len(looks(stepping, held_up, 1.1, 9.0, now_s=101.0)) == 1


def test_without_a_time_in_the_policy_the_job_decides(start):
    assert (Detection().stalled_after_s, Detection(stalled_after="20m").stalled_after_s) == (None, 1200)
    made = start()
    for step in range(10):
        made.look(Since(("backward",) * 3, step, 0.1 * step).at(now_ns := int((0.1 * step + 0.01) * S)), now_ns, 100.0)
    (judged,) = looks(made, Since(("backward", "data", "backward"), 10, 1.0), 1.1, 13.0)
    assert judged.verdict.numbers["threshold_s"] == 10.0
