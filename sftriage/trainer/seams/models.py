"""Finds the models a process trains, the stages in which its ranks wait for one another, and the rank's cohort.

The seams call it once, after the first round. Imports no torch.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

_FSDP = ("FSDPModule", "FullyShardedDataParallel")
_DDP = "DistributedDataParallel"
_GRAPH = "GraphModule"

C10D = "torch.distributed.distributed_c10d"

# Names of device meshes and process groups, by what their ranks share: a pipeline, or a tensor.
_DIMENSIONS = {
    "pp": re.compile(r"(mesh_)?(pp|pipe|pipeline|stage)(_.*)?", re.IGNORECASE),
    "tp": re.compile(r"(mesh_)?(tp|tensor)(_(?!and_).*)?", re.IGNORECASE),
}


def living(kinds: tuple[type, ...]) -> list[Any]:
    """All objects of these types that the garbage collector knows: call it once.

    A hook on all modules would slow every submodule, and make torch warn about compiled models and compile them again.
    """
    return [found for found in gc.get_objects() if issubclass(type(found), kinds)]


def outermost(modules: list[Any], parameters: set[int]) -> list[Any]:
    """The modules that hold any of these parameters (by id) and are part of no other module."""
    parts = {id(part) for module in modules for part in children(module)}
    tops = [module for module in modules if id(module) not in parts and holds(module, parameters)]
    # A graph that the compiler has made of a model holds its parameters too.
    return [module for module in tops if not _is(module, _GRAPH)] or tops


def children(module: Any) -> list[Any]:
    """A module's parts; none before its ``__init__`` has run."""
    parts = vars(module).get("_modules")
    return [part for part in (parts or {}).values() if part is not None]


def holds(module: Any, parameters: set[int]) -> bool:
    """Whether the module, or one of its parts, has any of these parameters (by id)."""
    return "_modules" in vars(module) and any(id(parameter) in parameters for parameter in module.parameters())


def wrapped(module: Any) -> Any:
    """The module inside DDP or FSDP, which scripts often call to evaluate; None for any other module."""
    return vars(module)["_modules"].get("module") if _is(module, _DDP) or _is(module, _FSDP[1]) else None


def copiers() -> list[tuple[Any, str]]:
    """The functions, as owner and name, with which the imported frameworks copy batches to a device."""
    strategies = [f"{package}.strategies.strategy" for package in ("lightning.pytorch", "pytorch_lightning")]
    found = [(getattr(sys.modules.get(name), "Strategy", None), "batch_to_device") for name in strategies]
    found.append((sys.modules.get("accelerate.data_loader"), "send_to_device"))
    return [(owner, name) for owner, name in found if hasattr(owner, name)]


def exchanged_in(models: Sequence[Any], *, clipping: bool) -> tuple[str, ...]:
    """The stages in which torch makes all ranks take part; ``clipping``: it clips gradients across ranks."""
    if any(map(shards, models)):
        return ("forward", "backward", "optimizer") if clipping else ("forward", "backward")
    return ("backward",) if largest_ddp(models) is not None else ()


def largest_ddp(models: Sequence[Any]) -> Any:
    """The model under DDP with the most parameters, or None."""
    found = [model for model in models if any(_is(part, _DDP) for part in model.modules())]
    return max(found, key=lambda model: sum(parameter.numel() for parameter in model.parameters()), default=None)


def shards(model: Any) -> bool:
    """Whether its parameters are spread over the ranks: gradients are accumulated only after an exchange."""
    fully = any(_is(module, name) for module in modules_of(model) for name in _FSDP)
    return fully or any(map(is_sharded, model.parameters()))


def modules_of(model: Any) -> list[Any]:
    """A model and all modules in it; none if it is not a module."""
    modules = getattr(model, "modules", None)
    return list(modules()) if callable(modules) else []


def is_sharded(value: object) -> bool:
    """Whether a tensor is spread over the ranks."""
    return any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


def part_types() -> tuple[type, ...]:
    """The imported types whose objects show which part of a job this rank is."""
    mesh = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)
    stage = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
    return tuple(kind for kind in (mesh, stage) if kind is not None)


def coordinates_of(living: Iterable[Any]) -> dict[str, int]:
    """This rank's place in a pipeline (``pp``) and among ranks that share tensors (``tp``); takes `part_types`."""
    found: dict[str, int] = {}
    for part in living:
        names = getattr(part, "mesh_dim_names", None)
        for name, at in zip(names or (), part.get_coordinate() or () if names else (), strict=False):
            _note(found, name, int(at))
        if isinstance(getattr(part, "group_rank", None), int) and getattr(part, "num_stages", 1) > 1:
            found["pp"] = part.group_rank
    for description, at in _groups():
        _note(found, description, at)
    return found


def cohort_of(coordinates: dict[str, int], *, loads: bool) -> str:
    """The name of the cohort that does the same work as this rank; "" if all ranks may be compared.

    Stages of a pipeline do different work. The ranks of a stage do the same, as replicas or sharing tensors or experts,
    unless a rank loads the batches for all that share its tensors.
    """
    parts = [f"pp{coordinates['pp']}"] if "pp" in coordinates else []
    if coordinates.get("tp") and not loads:
        parts.append("fed")
    return "-".join(parts)


def model_cohort(trained: Iterable[Any]) -> str:
    """The cohort of ranks whose script exchanges gradients, by the trained models: ``Decoder-1048576``."""
    return "+".join(f"{type(model).__name__}-{sum(part.numel() for part in model.parameters())}" for model in trained)


def many_ranks() -> bool:
    """Whether the job has other ranks, by its launcher or torch.distributed."""
    from sftriage.trainer.session import torch_distributed  # (part of the recorder, imported after the first step)

    world_size = os.environ.get("WORLD_SIZE", "")
    if world_size.isdecimal() and int(world_size) > 1:
        return True
    distributed = torch_distributed()
    return distributed is not None and bool(distributed.get_world_size() > 1)


def _groups() -> Iterable[tuple[str, int]]:
    """The process groups with a description (as Megatron's have), and this one's rank in each."""
    world = getattr(sys.modules.get(C10D), "_world", None)
    for group in list(getattr(world, "pg_map", ())):
        description = getattr(group, "group_desc", "")
        if isinstance(description, str) and group.size() > 1:
            yield description, group.rank()


def _note(found: dict[str, int], name: str, at: int) -> None:
    for dimension, pattern in _DIMENSIONS.items():
        if pattern.fullmatch(name):
            found.setdefault(dimension, at)


def _is(module: Any, name: str) -> bool:
    return any(kind.__name__ == name and kind.__module__.startswith("torch.") for kind in type(module).__mro__)
