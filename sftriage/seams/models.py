"""Which models a process trains, and where its ranks wait for one another. Nothing here imports torch."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

_FSDP = ("FSDPModule", "FullyShardedDataParallel")
_DDP = "DistributedDataParallel"
_GRAPH = "GraphModule"


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


def on_device(models: Iterable[Any]) -> bool:
    """Whether anything of these models is elsewhere than in the host's memory."""
    return any(not parameter.is_cpu for model in models for parameter in model.parameters())


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


def _sharded(module: Any) -> bool:
    return any(map(is_sharded, module.parameters(recurse=False)))


def _is(module: Any, name: str) -> bool:
    """By name: what the job does not use is not imported here."""
    return any(kind.__name__ == name and kind.__module__.startswith("torch.") for kind in type(module).__mro__)
