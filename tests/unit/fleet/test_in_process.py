"""Agents under one controller: what is asked of whom, what their ranks make together, and what crosses."""

import pickle
from dataclasses import dataclass, field, fields, is_dataclass, replace

import numpy as np
import pytest

from sftriage.controller.gathering import WindowAssembly
from sftriage.decisions import CaptureRequest, CaptureResult, Report, Trigger, WantedCapture
from sftriage.fleet.in_process import InProcess
from sftriage.records import GpuFindings, JobStatus, RankStatus, StageSchema, StepRecord
from sftriage.windows.decoding import StepArrays
from sftriage.windows.gather import Shape
from sftriage.windows.shipped import RankLocation, ReadCounts, Rows
from sftriage.windows.statuses import status_of
from tests.unit.windows.steps import batch

SCHEMA = StageSchema(("data", "backward", "other"), ("backward",))
WHY = Trigger(0, 49, "suspect", "rank", (1,), "data", 0.02, 0.3, 0.9, "default", "ab" * 32, "slow", why="it is slow")


def steps(rank: int, numbers: range = range(4), schema: StageSchema = SCHEMA) -> StepArrays:
    times = (10,) * len(schema.stages), (0,) * len(schema.sync)
    return batch(*(StepRecord(rank, step, 100 * step, 0, *times, True, False) for step in numbers), schema=schema)


def status(*ranks: int, attempt: int = 0, schema: StageSchema = SCHEMA, world_size: int = 4) -> JobStatus:
    of_ranks = tuple(RankStatus(rank, "h", schema.stages[0], 5, 7, 9, 7, False, None) for rank in ranks)
    return status_of(schema, world_size, of_ranks, attempt)


def wanted(rank: int) -> WantedCapture:
    request = CaptureRequest(
        f"w0-49-r{rank}-slow-1", rank, "torch", 5, 1, 60.0, 10**6, {"shapes": True}, labels={"a": "b"}
    )
    return WantedCapture(request, WHY, generation=2, expires_s=30.0)


@dataclass
class Agent:
    """An agent that notes the ranks it is wanted captures of."""

    status: JobStatus | None
    asked: list[list[int]] = field(default_factory=list)
    sent: list[Rows] = field(default_factory=list)
    found: GpuFindings | None = None
    telemetry: ReadCounts = field(default_factory=ReadCounts)

    def rows(self):
        return self.sent

    def statuses(self):
        return self.status

    def want(self, wanted):
        self.asked.append([one.request.rank for one in wanted])

    def reports(self):
        return []

    def gpus(self, ranks):
        return self.found


def test_what_drivers_say_is_put_together_once_all_of_them_have_answered():
    slow = GpuFindings(8.0, ("GPU 0 is too hot",), {1: {"uuid": "GPU-a"}})
    none = GpuFindings(9.0, problem="this host has no NVIDIA driver")
    agents = Agent(None, found=slow), Agent(None)
    fleet = InProcess(agents)
    assert fleet.gpus([1, 2]) is None
    agents[1].found = none
    assert fleet.gpus([1, 2]) == GpuFindings(8.0, slow.remarks, slow.gpus, none.problem)


def test_a_capture_is_wanted_of_the_agent_that_has_its_rank():
    agents = Agent(status(0, 1)), Agent(status(2, 3))
    fleet = InProcess(agents)
    fleet.want([wanted(1), wanted(2)])
    fleet.want([wanted(2)])
    assert [agent.asked for agent in agents] == [[[1], []], [[2], [2]]]


def test_what_an_agent_was_asked_for_is_not_called_off_by_a_rank_that_shows_nothing_for_a_moment():
    agents = Agent(status(0)), Agent(status(1))
    fleet = InProcess(agents)
    fleet.want([wanted(1)])
    # WHEN its agent can tell nothing of the rank, or another one has it
    agents[1].status = None
    fleet.want([wanted(1)])
    agents[0].status = status(0, 1)
    fleet.want([wanted(1)])
    assert [agent.asked for agent in agents] == [[[], [], []], [[1], [1], [1]]]


def test_a_capture_of_a_rank_that_no_agent_has_is_answered_by_one_of_them():
    # (It will say that it has no such rank; nobody waits for an answer for ever.)
    agents = Agent(status(0)), Agent(None)
    InProcess(agents).want([wanted(3)])
    assert [agent.asked for agent in agents] == [[[3]], [[]]]


@pytest.mark.parametrize("newest", [0, 1])
def test_of_a_rank_that_has_moved_the_host_of_its_newest_start_is_asked(newest):
    agents = [Agent(status(0, 1, attempt=0)), Agent(status(0, 1, attempt=0))]
    agents[newest].status = status(0, 1, attempt=1)
    InProcess(agents).want([wanted(1)])
    assert agents[newest].asked == [[1]]
    assert agents[1 - newest].asked == [[]]


@pytest.mark.parametrize("other", [{"schema": StageSchema(("load", "other"))}, {"world_size": 8}])
def test_a_host_whose_ranks_record_other_stages_counts_as_missing(other, caplog):
    # GIVEN two agents that do not agree on what a step is
    foreign = StageSchema(("load", "other")) if "schema" in other else SCHEMA
    sizes = other.get("world_size", 2)
    agents = (
        Agent(status(0, world_size=2), sent=[Rows(0, SCHEMA, 2, {0: RankLocation("a")}, steps(0))]),
        Agent(
            status(1, **{"world_size": 2, **other}),
            sent=[Rows(0, foreign, sizes, {1: RankLocation("b")}, steps(1, schema=foreign))],
        ),
    )
    fleet, gathering = InProcess(agents), WindowAssembly(Shape(4, 4, 0))
    # WHEN their steps are put together THEN the job is judged without the second one's, and it is said once
    (window,) = [*gathering.add(fleet.rows()), *gathering.add(fleet.rows(), ended=True)]
    assert np.isfinite(window.durations_NRS[:, 0]).all()
    assert np.isnan(window.durations_NRS[:, 1]).all()
    assert [one.message for one in caplog.records] == [
        "ranks (1,) record other stages than the others; they count as missing"
    ]
    assert [one.rank for one in fleet.statuses().ranks] == [0]


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other) and one.dtype == other.dtype
    if is_dataclass(one) and type(one) is type(other):
        return all(same(getattr(one, each.name), getattr(other, each.name)) for each in fields(one))
    return one == other


def test_all_that_crosses_comes_out_as_it_went_in():
    some = steps(1)
    result = CaptureResult("c-1", 1, "stored", "", 3, 7, 99, {"run": 0.5}, {"mono_ns": 1, "wall_ns": 2}, "no_nvtx")
    crossing = (
        Rows(1, SCHEMA, 2, {0: RankLocation("a", "pp0"), 1: RankLocation("b")}, some, some[:1], (1,), 5, 6),
        status(0, 1, attempt=3),
        wanted(1),
        Report(result, hangs=True, stored_bytes=99),
        ReadCounts(1, 2, 3, {"path": "problem"}),
    )
    for one in crossing:
        there = pickle.loads(pickle.dumps(one))
        assert same(one, there), one
        assert all(getattr(one, each.name) is not None for each in fields(one)), "a field that nothing is said of"
    # AND this would see a difference
    assert not same(crossing[0], replace(crossing[0], device_steps=some))
