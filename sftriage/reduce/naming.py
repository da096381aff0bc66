"""Which names in a trace mark steps and stages: sftriage's own, those the field uses, or those a person says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import translate
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sftriage.errors import InputError, SchemaError
from sftriage.model.windows import StageSchema
from sftriage.traces.documents import first_problem

OWN: Final = "sftriage:"
_STEP: Final = re.compile(r"ProfilerStep#(\d+)")

# Before 2022 the engine's functions had no prefix.
ENGINE: Final = (
    "autograd::engine::evaluate_function*",
    "torch::autograd::AccumulateGrad",
    "*Backward",
    "*Backward[0-9]",
)
COLLECTIVES: Final = (
    "nccl:*",
    "gloo:*",
    "mpi:*",
    "ucc:*",
    "c10d::*",
    "record_param_comms",
    "ncclKernel*",
    "ncclDevKernel*",
)
WAITS: Final = (*COLLECTIVES, "MPI_[BRW]*", "cuda*Synchronize*", "hip*Synchronize*", "*_MultiProcessingDataLoaderIter*")
"""What waits for the device or for other processes, in whatever thread it does."""

IDLES: Final = (
    "*run_backward*",
    "<built-in * sleep>",
    "<built-in * acquire of*",
    "<built-in * poll of*",
    "<built-in * select*",
    "<built-in * recv*",
    "<built-in * wait of*",
    "threading.py(*): wait*",
    "queue.py(*): get",
    # The operating system's own, as nsys names them.
    "*sleep",
    "*poll",
    "epoll_wait*",
    "futex*",
    "select",
    "sem_*wait",
    "pthread_cond_*wait*",
    "pthread_mutex_lock",
    "pthread_join*",
)
"""What waits for something of this process or of the system. Threads that have nothing to do spend their time so: it
counts in the steps' own thread alone."""

OURS: Final = tuple(f"*sftriage/{room}/*.py(*" for room in ("recorder", "profiling", "sampling", "seams"))
"""Python functions of what records and captures the steps, which have no part in what the program does."""

COPIES: Final = ("aten::to", "aten::copy_", "aten::_to_copy")

FIELD: Final[Mapping[str, tuple[str, ...]]] = {
    "data": ("enumerate(DataLoader)*", "## load_batch ##", "data", "dataloader", "data_loading"),
    # TorchRec deals out the next batch's sparse features here.
    "input_dist": ("## sparse_data_dist ##", "## start_sparse_data_dist*"),
    "h2d": ("## copy_batch_to_gpu ##", "## wait_for_batch ##", "h2d"),
    "forward": ("## forward ##", "forward", "DistributedDataParallel.forward", "FullyShardedDataParallel.forward"),
    "backward": ("## backward ##", "backward", "torch/_tensor.py(*): backward"),
    "optimizer": ("## optimizer ##", "## zero_grad ##", "optimizer", "Optimizer.step#*", "Optimizer.zero_grad#*"),
}
"""Annotations that mark a stage wherever they stand; the innermost counts."""

LOOSE: Final[Mapping[str, tuple[str, ...]]] = {"forward": ("nn.Module: *",), "sync": COLLECTIVES}
"""Names that mark a stage only where nothing else does: inside a stage they are part of it."""


class Names(BaseModel):
    """How names mark steps and stages; patterns are those of a shell (``*``, ``?``, ``[abc]``).

    Attributes:
        stages: for each stage the names that mark it; None for those of the field.
        sync: the sync stages; None for those with collectives in them.
        step: the names of steps; None for ``ProfilerStep#N``.
        step_end: names that end a step, where steps have no range of their own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    stages: Annotated[dict[str, list[str]], Field(max_length=31)] | None = None
    sync: list[str] | None = None
    step: str | None = None
    step_end: str | None = None


def matching(names: Sequence[str], patterns: Sequence[str]) -> NDArray[np.bool_]:
    """Of each name whether it fits one of the patterns."""
    return _fitting(names, _compiled(tuple(patterns)))


def steplike(names: Sequence[str]) -> NDArray[np.bool_]:
    """Of each name whether it is that of a step."""
    return _fitting(names, _STEP)


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)) or r"(?!)")


def _fitting(names: Sequence[str], pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    return np.fromiter((pattern.fullmatch(name) is not None for name in names), dtype=np.bool_, count=len(names))


def load_names(path: Path) -> Names:
    """Read `Names` from YAML; raises InputError where that is not possible."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        read = Names.model_validate(values if values is not None else {})
        if read.stages is not None:
            StageSchema.closed(tuple(read.stages), tuple(read.sync or ()))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise InputError(f"{path}: not a map of names: {first_problem(error)}") from None
    except SchemaError as error:
        raise InputError(f"{path}: {error}") from error
    if read.step is not None and read.step_end is not None:
        raise InputError(f"{path}: step and step_end: steps are told by one of them")
    return read
