"""Without torch: which optimizer ends a step, calls in another order than usual, and what part a rank has in a job."""

import sys
from types import SimpleNamespace

import pytest

from sftriage.trainer.seams.models import C10D, cohort_of, coordinates_of
from sftriage.trainer.seams.steps import CHECKPOINT, COMPILATION, EVALUATION, Rounds, StageSteps
from tests.unit.trainer.conftest import in_a_thread


class Told:
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

    def __init__(self, told, name):
        self._told, self._name = told, name

    def __enter__(self):
        self._told.log.append(self._name)

    def __exit__(self, *_):
        self._told.log.append(f"/{self._name}")


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def steps(told):
    return StageSteps(lambda: told, lambda: None)


def stepped(steps, optimizer):
    steps.optimizer_begins(optimizer)
    steps.optimizer_ended(optimizer)


def begun(steps, told, *optimizers):
    """Two rounds have gone by: the monitor is there, and its first step is open."""
    for optimizer in (*optimizers, *optimizers) if optimizers else (1, 1):
        stepped(steps, optimizer)
    assert told.log == ["step"]
    told.log.clear()


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
    assert "".join("!" if rounds.ends(ord(one)) else "." for one in order) == ends


def test_autograd_may_call_them_in_a_thread_of_its_own(steps, told):
    def backward():
        steps.enter("backward")
        in_a_thread(stepped, steps, 11)
        steps.leave("backward")

    for _ in range(3):
        backward()
    assert told.log == ["step", "backward", "/backward", "/step", "step"]


def test_what_other_threads_do_is_theirs(steps, told):
    begun(steps, told)

    def elsewhere():
        assert not steps.enter("data")
        steps.note(EVALUATION)
        stepped(steps, 1)

    steps.enter("forward")
    in_a_thread(elsewhere)
    assert told.log == ["forward"]
    assert steps.opened == ["forward"]


def test_what_is_open_when_a_stage_is_left_is_left_with_it(steps, told):
    begun(steps, told)
    steps.enter("backward")
    steps.enter("forward")
    steps.leave("backward")
    assert told.log == ["backward", "forward", "/forward", "/backward"]


@pytest.mark.parametrize(
    ("noted", "kind"),
    [
        ((EVALUATION, EVALUATION), ["=evaluation"]),
        ((CHECKPOINT,), ["=checkpoint"]),
        ((EVALUATION, CHECKPOINT), ["=evaluation", "=eval+checkpoint"]),
        ((CHECKPOINT, EVALUATION, COMPILATION), ["=checkpoint", "=eval+checkpoint", "=compilation"]),
    ],
)
def test_a_step_is_of_the_kind_of_all_that_is_done_in_it(steps, told, noted, kind):
    begun(steps, told)
    for one in noted:
        steps.note(one)
    assert told.log == kind
    # AND the next one is an ordinary one
    stepped(steps, 1)
    told.log.clear()
    steps.note(CHECKPOINT)
    assert told.log == ["=checkpoint"]


def test_a_process_that_is_forked_before_it_trains_may_train(steps, told):
    # GIVEN a launcher that has imported torch, and forks its ranks
    steps.abandon()
    begun(steps, told)
    # AND a worker that is forked from one of these
    steps.abandon()
    stepped(steps, 1)
    assert told.log == []


def test_where_there_is_to_be_no_monitor_it_is_asked_for_once_a_round_at_most():
    asked = []
    steps = StageSteps(lambda: asked.append(1), lambda: None)
    for _ in range(5):
        stepped(steps, 1)
    assert len(asked) <= 4
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
def test_stages_of_a_pipeline_are_cohorts_and_who_shares_a_tensor_is_of_one(coordinates, loads, cohort):
    assert cohort_of(coordinates, loads=loads) == cohort
