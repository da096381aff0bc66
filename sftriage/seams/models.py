"""Which models a process trains, where its ranks wait for one another, and which of them do the same work.

Nothing here imports torch.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

_FSDP = ("FSDPModule", "FullyShardedDataParallel")
_DDP = "DistributedDataParallel"
_GRAPH = "GraphModule"

C10D = "torch.distributed.distributed_c10d"

_MESH = ("torch.distributed.device_mesh", "DeviceMesh")
_STAGE = ("torch.distributed.pipelining.stage", "_PipelineStageBase")

_DIMENSIONS = {
    "pp": re.compile(r"(mesh_)?(pp|pipe|pipeline|stage)(_.*)?", re.IGNORECASE),
    "tp": re.compile(r"(mesh_)?(tp|tensor)(_(?!and_).*)?", re.IGNORECASE),
}
"""By what device meshes and process groups call them: the stages of a pipeline, and the parts of a tensor."""


def living(kinds: tuple[type, ...]) -> list[Any]:
    """The objects of these types, of all that the garbage collector knows: call it once.

    A hook on all modules would be in every submodule's way, have torch warn where a model is compiled, and have it
    compiled again when it goes.
    """
    return [one for one in gc.get_objects() if issubclass(type(one), kinds)]


def outermost(modules: list[Any], parameters: set[int]) -> list[Any]:
    """Those modules that hold any of these parameters (by id) and are part of no other one."""
    parts = {id(part) for module in modules for part in children(module)}
    tops = [one for one in modules if id(one) not in parts and holds(one, parameters)]
    # What the compiler has made of a model holds its parameters too.
    return [one for one in tops if not _is(one, _GRAPH)] or tops


def children(module: Any) -> list[Any]:
    """A module's own parts; one that is half made has none."""
    parts = vars(module).get("_modules")
    return [part for part in (parts or {}).values() if part is not None]


def holds(module: Any, parameters: set[int]) -> bool:
    """Whether any of these parameters (by id) is the module's, or one of its parts'."""
    if "_modules" not in vars(module):
        return False
    return any(id(parameter) in parameters for parameter in module.parameters())


def wrapped(module: Any) -> Any:
    """What DDP or FSDP wraps, which is often called by itself to evaluate; None for any other module."""
    return vars(module)["_modules"].get("module") if _is(module, _DDP) or _is(module, _FSDP[1]) else None


def copiers() -> list[tuple[Any, str]]:
    """Where frameworks copy batches to a device, as far as they are in use: an owner, and a name in it."""
    strategies = [f"{package}.strategies.strategy" for package in ("lightning.pytorch", "pytorch_lightning")]
    found = [(getattr(sys.modules.get(name), "Strategy", None), "batch_to_device") for name in strategies]
    found.append((sys.modules.get("accelerate.data_loader"), "send_to_device"))
    return [(owner, name) for owner, name in found if hasattr(owner, name)]


def exchanged_in(models: Iterable[Any], *, clipping: bool) -> tuple[str, ...]:
    """The stages in which torch has every rank take part; ``clipping`` says that gradients are clipped across ranks."""
    parts = [part for model in models for part in model.modules()]
    if any(_is(part, name) for part in parts for name in _FSDP) or any(map(_sharded, parts)):
        return ("forward", "backward", "optimizer") if clipping else ("forward", "backward")
    return ("backward",) if any(_is(part, _DDP) for part in parts) else ()


def largest_ddp(models: Iterable[Any]) -> Any:
    """The model under DDP with the most parameters; None where none is."""
    found = [model for model in models if any(_is(part, _DDP) for part in model.modules())]
    return max(found, key=lambda model: sum(one.numel() for one in model.parameters()), default=None)


def is_sharded(value: object) -> bool:
    """Whether a tensor is spread over the ranks."""
    return any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


def part_types() -> tuple[type, ...]:
    """The types whose objects say which part of a job this rank is, as far as they are imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in (_MESH, _STAGE))
    return tuple(one for one in found if one is not None)


def coordinates_of(living: Iterable[Any]) -> dict[str, int]:
    """This rank's place in a pipeline (``pp``) and among those that share tensors (``tp``), where it has one.

    Args:
        living: objects of `part_types`.
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
    """Whether the job has other ranks, or will have, by what the launcher says."""
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
    """The process groups that have a description (as Megatron's have), and which rank of each this one is."""
    world = getattr(sys.modules.get(C10D), "_world", None)
    for group in list(getattr(world, "pg_map", ())):
        description = getattr(group, "group_desc", "")
        if isinstance(description, str) and group.size() > 1:
            yield description, group.rank()


def _note(found: dict[str, int], name: str, at: int) -> None:
    for dimension, pattern in _DIMENSIONS.items():
        if pattern.fullmatch(name):
            found.setdefault(dimension, at)


def _sharded(module: Any) -> bool:
    return any(map(is_sharded, module.parameters(recurse=False)))


def _is(module: Any, name: str) -> bool:
    return any(kind.__name__ == name and kind.__module__.startswith("torch.") for kind in type(module).__mro__)
