"""Which part a rank has in a hybrid job, by what its device meshes and process groups say."""

from dataclasses import dataclass

import pytest

from sftriage.seams import models
from sftriage.seams.models import cohort_of, coordinates_of


@dataclass
class Mesh:
    mesh_dim_names: tuple[str, ...] | None
    coordinate: tuple[int, ...] | None

    def get_coordinate(self):
        return self.coordinate


@dataclass
class Stage:
    group_rank: int
    num_stages: int


@dataclass
class Group:
    group_desc: str
    at: int
    ranks: int = 2

    def size(self):
        return self.ranks

    def rank(self):
        return self.at


@pytest.mark.parametrize(
    ("living", "groups", "expected"),
    [
        ([], [], {}),
        ([Mesh(("dp", "pp"), (0, 1))], [], {"pp": 1}),
        ([Mesh(("pp", "dp_shard", "tp"), (2, 0, 1))], [], {"pp": 2, "tp": 1}),
        ([Mesh(None, (0,)), Mesh(("pp",), None)], [], {}),  # no names; a mesh of other ranks
        ([Stage(3, 4)], [], {"pp": 3}),  # a pipeline over all ranks, without a mesh
        ([Stage(0, 1)], [], {}),
        # as Megatron describes its groups; those of several dimensions at once say nothing of one
        ([], [Group("PIPELINE_MODEL_PARALLEL_GROUP", 1), Group("DATA_PARALLEL_GROUP", 1)], {"pp": 1}),
        ([], [Group("TENSOR_MODEL_PARALLEL_GROUP", 1), Group("TENSOR_AND_DATA_PARALLEL_GROUP", 3)], {"tp": 1}),
        ([], [Group("mesh_pp", 0, ranks=1)], {}),  # a pipeline of one stage
        ([], [Group("default_pg", 1), Group("mesh_default", 1), Group("undefined", 0)], {}),
    ],
)
def test_a_rank_s_place_is_read_from_meshes_pipelines_and_groups(monkeypatch, living, groups, expected):
    monkeypatch.setattr(models, "_groups", lambda: [(one.group_desc, one.at) for one in groups if one.ranks > 1])
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
