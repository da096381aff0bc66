"""Without torch: which optimizer ends a step, calls in another order than usual, and what part a rank has in a job."""

import sys
from types import SimpleNamespace

import pytest

from sftriage.trainer.seams.models import C10D, cohort_of, coordinates_of
from sftriage.trainer.seams.steps import CHECKPOINT, COMPILATION, EVALUATION, Rounds, StageSteps
from tests.unit.trainer.conftest import in_a_thread


class MonitorLog:
    def __init__(self) -> None:
        self.log: list[str] = []

    def step(self, number=None):
        return _Reentered(self, "step")

    def stage(self, name):
        return _Reentered(self, name)

    def note(self, kind):
        self.log.append(f"={kind}")

    def close(self):
        self.log.append("closed")


class _Reentered:
    """As a monitor's own: one object is entered again and again."""

    def __init__(self, monitor, name):
        self._monitor, self._name = monitor, name

    def __enter__(self):
        self._monitor.log.append(self._name)

    def __exit__(self, *_):
        self._monitor.log.append(f"/{self._name}")


@pytest.fixture
def monitor():
    return MonitorLog()


@pytest.fixture
def steps(monitor):
    return StageSteps(lambda: monitor, lambda: None)


def stepped(steps, optimizer):
    steps.optimizer_begins(optimizer)
    steps.optimizer_ended(optimizer)


def begun(steps, monitor, *optimizers):
    """Two rounds have gone by: the monitor is there, and its first step is open."""
    for optimizer in (*optimizers, *optimizers) if optimizers else (1, 1):
        stepped(steps, optimizer)
    assert monitor.log == ["step"]
    monitor.log.clear()


@pytest.mark.parametrize(
    ("order", "ends"),
    [
        ("aaaa", ".!!!"),  # one optimizer
        ("ababab", "...!.!"),  # two, one after the other: the second one ends a step
        ("abcabcabc", ".....!..!"),
        ("ddgddgddg", ".!.!!.!!."),  # a critic that steps twice
        ("aaabbbb", ".!!.!!!"),  # another one takes over
    ],
)
def test_a_step_ends_with_the_last_optimizer_of_a_round(order, ends):
    rounds = Rounds()
    assert "".join("!" if rounds.ends(ord(letter)) else "." for letter in order) == ends


def test_autograd_may_step_optimizers_in_its_own_thread(steps, monitor):
    def backward():
        steps.enter("backward")
        in_a_thread(stepped, steps, 11)
        steps.leave("backward")

    for _ in range(3):
        backward()
    assert monitor.log == ["step", "backward", "/backward", "/step", "step"]


def test_other_threads_do_not_count(steps, monitor):
    begun(steps, monitor)

    def elsewhere():
        assert not steps.enter("data")
        steps.note(EVALUATION)
        stepped(steps, 1)

    steps.enter("forward")
    in_a_thread(elsewhere)
    assert monitor.log == ["forward"]
    assert steps.opened == ["forward"]


def test_leaving_a_stage_leaves_the_stages_inside_it(steps, monitor):
    begun(steps, monitor)
    steps.enter("backward")
    steps.enter("forward")
    steps.leave("backward")
    assert monitor.log == ["backward", "forward", "/forward", "/backward"]


@pytest.mark.parametrize(
    ("noted", "kind"),
    [
        ((EVALUATION, EVALUATION), ["=evaluation"]),
        ((CHECKPOINT,), ["=checkpoint"]),
        ((EVALUATION, CHECKPOINT), ["=evaluation", "=eval+checkpoint"]),
        ((CHECKPOINT, EVALUATION, COMPILATION), ["=checkpoint", "=eval+checkpoint", "=compilation"]),
    ],
)
def test_a_steps_kind_covers_everything_in_it(steps, monitor, noted, kind):
    begun(steps, monitor)
    for seam in noted:
        steps.note(seam)
    assert monitor.log == kind
    # AND the next one is an ordinary one
    stepped(steps, 1)
    monitor.log.clear()
    steps.note(CHECKPOINT)
    assert monitor.log == ["=checkpoint"]


def test_a_process_that_is_forked_before_it_trains_may_train(steps, monitor):
    # GIVEN a launcher that has imported torch, and forks its ranks
    steps.abandon()
    begun(steps, monitor)
    # AND a worker that is forked from one of these
    steps.abandon()
    stepped(steps, 1)
    assert monitor.log == []


def test_without_a_monitor_begin_is_called_once_a_round_at_most():
    begun_rounds = []
    steps = StageSteps(lambda: begun_rounds.append(1), lambda: None)
    for _ in range(5):
        stepped(steps, 1)
    assert len(begun_rounds) <= 4
    assert steps.enter("forward")


def mesh(names, at):
    return SimpleNamespace(mesh_dim_names=names, get_coordinate=lambda: at)


def stage(rank, stages):
    return SimpleNamespace(group_rank=rank, num_stages=stages)


def group(description, at, ranks=2):
    return SimpleNamespace(group_desc=description, size=lambda: ranks, rank=lambda: at)


@pytest.mark.parametrize(
    ("living", "groups", "expected"),
    [
        ([], [], {}),
        ([mesh(("dp", "pp"), (0, 1))], [], {"pp": 1}),
        ([mesh(("pp", "dp_shard", "tp"), (2, 0, 1))], [], {"pp": 2, "tp": 1}),
        ([mesh(None, (0,)), mesh(("pp",), None)], [], {}),  # no names; a mesh of other ranks
        ([stage(3, 4)], [], {"pp": 3}),  # a pipeline over all ranks, without a mesh
        ([stage(0, 1)], [], {}),
        # as Megatron describes its groups; those of several dimensions at once say nothing of one
        ([], [group("PIPELINE_MODEL_PARALLEL_GROUP", 1), group("DATA_PARALLEL_GROUP", 1)], {"pp": 1}),
        ([], [group("TENSOR_MODEL_PARALLEL_GROUP", 1), group("TENSOR_AND_DATA_PARALLEL_GROUP", 3)], {"tp": 1}),
        ([], [group("mesh_pp", 0, ranks=1)], {}),  # a pipeline of one stage
        ([], [group("default_pg", 1), group("mesh_default", 1), group("undefined", 0)], {}),
    ],
)
def test_a_rank_s_place_is_read_from_meshes_pipelines_and_groups(monkeypatch, living, groups, expected):
    monkeypatch.setitem(sys.modules, C10D, SimpleNamespace(_world=SimpleNamespace(pg_map=groups)))
    assert coordinates_of(living) == expected


@pytest.mark.parametrize(
    ("coordinates", "loads", "cohort"),
    [
        ({}, True, ""),
        ({"tp": 1}, True, ""),  # each loads its own: all do the same
        ({"tp": 1}, False, "fed"),  # one loads for all
        ({"tp": 0}, False, ""),
        ({"pp": 0, "tp": 0}, True, "pp0"),
        ({"pp": 1, "tp": 1}, False, "pp1-fed"),
    ],
)
def test_stages_of_a_pipeline_are_cohorts_and_ranks_that_share_a_tensor_share_one(coordinates, loads, cohort):
    assert cohort_of(coordinates, loads=loads) == cohort
