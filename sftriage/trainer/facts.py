"""What this process runs with, as facts by name: threads, types, loaders, limits, versions, environment.

The thread that answers requests (`executor.Answering`) calls `answer`; the controller compares a slow rank with its
peers (`sftriage.verdict.differences`). Nothing here imports a module, calls a driver, reads files outside ``/proc`` and
``/sys``, or runs code of the program. A fact that cannot be read is left out. Of the environment, only variables that
can change how fast a program runs are read, and `HIDDEN` stands for what may be a secret.
"""

from __future__ import annotations

import gc
import inspect
import os
import platform
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from types import BuiltinFunctionType, FrameType, FunctionType, GetSetDescriptorType, ModuleType, NoneType
from typing import Any

from sftriage.base.bounds import printable
from sftriage.base.process import cgroups, content_of
from sftriage.model.hangs import Fact
from sftriage.trainer.locks import attribute, variables
from sftriage.trainer.seams.steps import LOADED, OF_LOADER
from sftriage.trainer.session import GUARD
from sftriage.trainer.stacks import is_own
from sftriage.trainer.waits import training_thread

MAX_VARIABLES, MAX_NAME, MAX_VALUE, MAX_NUMBER = 128, 64, 200, 1 << 53
MAX_PARAMETERS, MAX_FRAMES, MAX_OBJECTS, MAX_PARTS, MAX_CGROUPS, MAX_JOINED = 10_000, 128, 5_000, 500, 32, 4
HIDDEN = "(hidden)"

_VARIABLES = re.compile(
    r"(?!CUDA_VISIBLE_DEVICES$|OMP_PLACES$|GOMP_CPU_AFFINITY$|KMP_AFFINITY$)"
    r"((G?OMP|KMP|MKL|OPENBLAS|BLIS|NUMEXPR|TBB|ATEN|(TC|JE)?MALLOC|(PY)?TORCH(INDUCTOR|DYNAMO)?|TRITON|CUDA|CUDNN|CUBLAS"
    r"|HSA|[NR]CCL|GLOO|UCX|FI|TOKENIZERS)_|LD_PRELOAD$|NVIDIA_TF32_OVERRIDE$|PYTHON(MALLOC|DEVMODE|TRACEMALLOC)$)"
)
"""All but those that give each rank a device or cores of its own."""
_SECRET_NAME = re.compile(r"TOKEN(?!IZERS_)|SECRET|PASS|KEY|CREDENTIAL|AUTH")
_SECRET = re.compile(r"://[^/]*@|(?=[\w+=-]*\d[\w+=-]*\d)(?=[\w+=-]*[A-Za-z])[\w+=-]{24,}")
"""A URL with credentials, or a long word of letters and digits."""
_PLAIN = frozenset(
    map(id, (str, bytes, int, float, bool, NoneType, FunctionType, BuiltinFunctionType, ModuleType, FrameType))
)
_POLICIES = {os.SCHED_OTHER: "other", os.SCHED_FIFO: "fifo", os.SCHED_RR: "rr", os.SCHED_BATCH: "batch"}


def answer() -> dict[str, Fact]:
    """The facts of this process: bounded in number and size, and ready for JSON."""
    found: dict[str, Fact] = {}
    for part in (_single, _environment, _objects):
        with suppress(Exception):
            for name, value in part():
                if isinstance(value, str):
                    found[name] = printable(value[:MAX_VALUE])
                elif isinstance(value, int | float) and abs(value) < MAX_NUMBER:
                    found[name] = value
    return found


def _single() -> Iterator[tuple[str, object]]:
    for name, read in _FACTS.items():
        with suppress(Exception):
            yield name, read()


def _environment() -> Iterator[tuple[str, object]]:
    # (iterating over it copies the names at once)
    names = (name for name in sorted(os.environ) if _VARIABLES.match(name) and len(printable(name)) <= MAX_NAME)
    for name in islice(filter(str.isprintable, names), MAX_VARIABLES):
        value = os.environ.get(name, "")
        secret = len(value) > MAX_VALUE or _SECRET_NAME.search(name) or _SECRET.search(value)
        yield name, HIDDEN if secret else value


def _objects() -> Iterator[tuple[str, object]]:
    """Facts of the DataLoaders and of the optimizers that the training thread knows."""
    # (classes by id: the hash of a class may be the program's own code)
    loaders = _classes("torch.utils.data.dataloader", "DataLoader", "_BaseDataLoaderIter")
    optimizers = _classes("torch.optim.optimizer", "Optimizer")
    known = _known(loaders | optimizers)
    # (the iterator of a loop may outlive its loader)
    of_loaders = [(found, before) for found in known if id(type(found)) in loaders for before in ("", "_")]
    for name in OF_LOADER:
        values = [attribute(found, before + name) for found, before in of_loaders]
        values += [loader[name] for loader in list(LOADED)]
        yield name, _joined(value for value in values if isinstance(value, int))
    groups = [attribute(found, "param_groups") for found in known if id(type(found)) in optimizers]
    tensors = (tensor for some in groups if isinstance(some, list) for group in some for tensor in group["params"])
    with _torch()._C.DisableTorchFunctionSubclass():
        yield "parameter_types", _joined(str(tensor.dtype)[6:] for tensor in islice(tensors, MAX_PARAMETERS))


def _known(wanted: frozenset[int]) -> list[object]:
    """The objects of these classes to which the variables of the training thread lead.

    (Python's garbage collector knows all objects, but holds the interpreter for as long as it lists them.)
    """
    left, found, visited = deque[object](), list[object](), set[int]()
    for frame in _frames():
        left += variables(frame).values()
        if is_own(frame.f_code.co_filename):
            left += list(frame.f_globals.values())
    passed = _PLAIN | _classes("torch", "Tensor") | _classes("torch.nn.modules.module", "Module")
    while left and len(visited) < MAX_OBJECTS:
        one = left.popleft()
        if id(one) in visited or id(type(one)) in passed or issubclass(type(one), type):
            continue
        visited.add(id(one))
        if id(type(one)) in wanted:
            found.append(one)
        left += _parts(one)
    return found


def _parts(one: object) -> Collection[object]:
    """What a container or an object holds; nothing of a large one."""
    if type(one) is list or type(one) is tuple:
        return one if len(one) <= MAX_PARTS else ()
    descriptor = inspect.getattr_static(one, "__dict__", None)
    held = descriptor.__get__(one) if isinstance(descriptor, GetSetDescriptorType) else one
    return list(held.values()) if type(held) is dict and len(held) <= MAX_PARTS else ()


def _frames() -> list[FrameType]:
    """The frames of the training thread, innermost first."""
    frame = sys._current_frames().get(training_thread())
    return [] if frame is None else [each for each, _ in islice(walk_stack(frame), MAX_FRAMES)]


def _classes(module: str, *names: str) -> frozenset[int]:
    """Classes of a module, and those derived from them, by id; none where it is not imported."""
    found = [getattr(sys.modules.get(module), name, None) for name in names]
    for top in found:
        found += type.__subclasses__(top) if isinstance(top, type) else ()
    return frozenset(map(id, found))


def _joined(values: Iterable[Fact]) -> Fact | None:
    """One fact of several objects: the value that they share, or all values in words."""
    known = set(values)
    return next(iter(known), None) if len(known) < 2 else " and ".join(sorted(map(str, known))[:MAX_JOINED])


def _torch() -> Any:
    return sys.modules["torch"]


def _cpu_limit() -> float | None:
    """The limit of the cgroups of this process, in cores; None without any."""
    limits = list[float]()
    for folder in _cgroups():
        quota, period = (*content_of(folder / "cpu.max").split(), b"", b"")[:2]
        if not quota:
            quota, period = (content_of(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit():
            limits.append(round(int(quota) / int(period), 2))
    return min(limits, default=None)


def _memory_limit_bytes() -> int | None:
    limits = [content_of(folder / "memory.max").strip() for folder in _cgroups()]
    return min((int(limit) for limit in limits if limit.isdigit()), default=None)


def _cgroups() -> list[Path]:
    return [each for folder in cgroups(Path("/proc/self")) for each in (folder, *folder.parents)][:MAX_CGROUPS]


def _traced_by() -> str | None:
    """What follows the calls or lines of the program, or records its operations."""
    monitoring: Any = getattr(sys, "monitoring", None)
    tools = [monitoring.get_tool(number) for number in range(6)] if monitoring is not None else []
    tools += ["sys.settrace"] * any(frame.f_trace is not None for frame in _frames())
    tools += ["tracemalloc"] * getattr(sys.modules.get("tracemalloc"), "is_tracing", bool)()
    return ", ".join(filter(None, [*tools, "torch.profiler" if GUARD.of_job else ""])) or None


_FACTS: Mapping[str, Callable[[], object]] = {
    "cores": lambda: len(os.sched_getaffinity(os.getpid())),
    "cpu_limit": _cpu_limit,
    "memory_limit_bytes": _memory_limit_bytes,
    "nice": lambda: os.getpriority(os.PRIO_PROCESS, os.getpid()),
    "scheduling": lambda: _POLICIES.get(os.sched_getscheduler(os.getpid()), "idle"),
    "torch_threads": lambda: _torch().get_num_threads(),
    "interop_threads": lambda: _torch().get_num_interop_threads(),
    "default_type": lambda: str(_torch().get_default_dtype())[6:],
    "matmul_precision": lambda: _torch().get_float32_matmul_precision(),
    "deterministic": lambda: _torch().are_deterministic_algorithms_enabled(),
    "cudnn_benchmark": lambda: _torch()._C._get_cudnn_benchmark(),
    "detect_anomaly": lambda: _torch().is_anomaly_enabled(),
    "gc": lambda: str(gc.get_threshold()) if gc.isenabled() else "off",
    "traced_by": _traced_by,
    "python": platform.python_version,
    "torch": lambda: str(_torch().__version__),
    "cuda": lambda: _torch().version.cuda,
    "nccl": lambda: ".".join(map(str, _torch().cuda.nccl.version())),
    "numpy": lambda: sys.modules["numpy"].__version__,
    "kernel": lambda: os.uname().release,
}
