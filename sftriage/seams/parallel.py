"""What ranks do together: where they exchange by themselves, and which of them do the same work. Imports no torch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import Any

C10D = "torch.distributed.distributed_c10d"

_MESH = ("torch.distributed.device_mesh", "DeviceMesh")
_STAGE = ("torch.distributed.pipelining.stage", "_PipelineStageBase")

_DIMENSIONS = {
    "pp": re.compile(r"(mesh_)?(pp|pipe|pipeline|stage)(_.*)?", re.IGNORECASE),
    "tp": re.compile(r"(mesh_)?(tp|tensor)(_(?!and_).*)?", re.IGNORECASE),
}
"""By what device meshes and process groups call them: the stages of a pipeline, and the parts of a tensor."""


def kinds() -> tuple[type, ...]:
    """The types whose objects say which part of a job this rank is, as far as they are imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in (_MESH, _STAGE))
    return tuple(one for one in found if one is not None)


def coordinates_of(living: Iterable[Any]) -> dict[str, int]:
    """This rank's place in a pipeline (``pp``) and among those that share tensors (``tp``), where it has one.

    Args:
        living: objects of `kinds`.
    """
    found: dict[str, int] = {}
    for one in living:
        names = getattr(one, "mesh_dim_names", None)
        # (a rank that is not in a mesh has no coordinate there)
        for name, at in zip(names or (), one.get_coordinate() or () if names else (), strict=False):
            _note(found, name, int(at))
        if isinstance(getattr(one, "group_rank", None), int) and getattr(one, "num_stages", 1) > 1:
            found["pp"] = one.group_rank
    for description, at in _groups():
        _note(found, description, at)
    return found


def cohort_of(coordinates: dict[str, int], *, loads: bool) -> str:
    """The ranks that do the same work as this one, in a word; "" where all may be compared.

    The stages of a pipeline do different work. The ranks of a stage do the same, whether they are replicas or share
    tensors or experts; but where one of those that share tensors loads the batches for all, the others do not.
    """
    parts = [f"pp{coordinates['pp']}"] if "pp" in coordinates else []
    if coordinates.get("tp") and not loads:
        parts.append("fed")
    return "-".join(parts)


def model_cohort(trained: Iterable[Any]) -> str:
    """The same of ranks that exchange by themselves, by what they train and its parameters: ``Decoder-1048576``."""
    return "+".join(f"{type(one).__name__}-{sum(part.numel() for part in one.parameters())}" for one in trained)


def many_ranks() -> bool:
    """Whether there is anybody to wait for, or will be, by what the launcher says."""
    world_size = os.environ.get("WORLD_SIZE", "")
    if world_size.isdecimal() and int(world_size) > 1:
        return True
    distributed = sys.modules.get("torch.distributed")
    return bool(
        distributed is not None
        and distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def _groups() -> Iterable[tuple[str, int]]:
    """The process groups that somebody has described (as Megatron does), and which rank of each this one is."""
    world = getattr(sys.modules.get(C10D), "_world", None)
    for group in list(getattr(world, "pg_map", ())):
        description = getattr(group, "group_desc", "")
        if isinstance(description, str) and group.size() > 1:
            yield description, group.rank()


def _note(found: dict[str, int], name: str, at: int) -> None:
    for dimension, pattern in _DIMENSIONS.items():
        if pattern.fullmatch(name):
            found.setdefault(dimension, at)
