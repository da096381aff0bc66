"""The seams: the places in torch that show where each part of an unedited script's step begins and ends.

The `sitecustomize` of `sftriage.trainer.seams.site` calls `imported`, a framework's callback calls `lead`. Both change
torch in the trainer's process:

===========  =========================================================================================================
data         ``DataLoader.__iter__``, and ``__next__`` of its iterators; notes that a loader starts its workers anew
forward      a hook on each outermost model that is trained, none on its parts
backward     ``torch.autograd.backward``, which ``Tensor.backward`` calls
ready        `Monitor.watch`, under DDP
h2d          the functions of Accelerate and Lightning that copy a batch to the device
exchange     blocking collectives, and waits for the others, wherever the script or a library calls them; the stage
             around one does not include its time
optimizer    hooks before and after the step of every optimizer, ``GradScaler.step`` and ``clip_grad_norm_``
evaluation   a kind of step: a trained model is called without gradients, or in its evaluation mode
checkpoint   a kind of step: ``torch.save``, and ``torch.distributed.checkpoint``
compilation  a kind of step: ``torch.compile`` has compiled something
===========  =========================================================================================================

``SFTRIAGE_SEAMS=-data,-ready`` switches seams off by name, ``off`` all of them. A seam that raises is switched off with
one warning, and the wrapped call goes on. A monitor that the script creates replaces them all at any time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from pathlib import Path
from time import monotonic
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from sftriage.log import warn
from sftriage.trainer import ends
from sftriage.trainer.seams import models
from sftriage.trainer.seams.hooks import AROUND, REMAPS, Exchanges, Models, Optimizers, Replaced, uncompiled
from sftriage.trainer.seams.steps import (
    CHECKPOINT,
    COMPILATION,
    EVALUATION,
    EXCHANGE,
    H2D,
    LOADED,
    OF_LOADER,
    STAGES,
    StageSteps,
)

if TYPE_CHECKING:
    from sftriage.trainer.monitor import Monitor

RINGS_ENV = "SFTRIAGE_RINGS"
SEAMS_ENV = "SFTRIAGE_SEAMS"
REPORT_ENV = "SFTRIAGE_SEAMS_REPORT"
"""A directory in which each process keeps a report of its seams for `sftriage doctor`."""
_REPORT_EVERY_S, _REPORT_LATER_S, _REPORT_OFTEN_S = 0.25, 5.0, 60.0
"""Seconds from one report of a process to the next: at first, and after the first minute without a step."""
_OLDEST_TORCH = 2, 4
_COMPILER = tuple(os.path.join("torch", part, "") for part in ("_dynamo", "_inductor"))  # noqa: PTH118 (of frames)
NAMES = ("data", H2D, "forward", "backward", "ready", EXCHANGE, "optimizer", EVALUATION, CHECKPOINT, COMPILATION)

LOOK_ROUNDS = 4
"""The first steps, after each of which a model that was not called is replaced by its parts."""


class Seams:
    """All seams of this process except those that are ``off``."""

    def __init__(self, off: frozenset[str] = frozenset()) -> None:
        self.on = set(NAMES) - off
        self.fired = dict.fromkeys(NAMES, 0)  # uses of each seam that is not a stage
        # Known after the first round: the stages that wait for other ranks, the rank's cohort, the types of the models.
        self.sync: tuple[str, ...] = ()
        self.cohort = ""
        self.trained: tuple[str, ...] = ()
        self.failed: dict[str, str] = {}  # why seams were switched off
        self.steps = StageSteps(self._begin, self._step_ends)
        self._torch = torch = sys.modules["torch"]
        # (true while the compiler traces the calling code; it takes the result as a constant)
        self.tracing: Callable[[], bool] = torch.compiler.is_dynamo_compiling
        self.gradients: Callable[[], bool] = torch.is_grad_enabled
        self.replaced = Replaced(self)
        self.models, self.optimizers, self.exchanges = Models(self), Optimizers(self), Exchanges(self)
        self.counters: dict[str, dict[str, int]] = {}  # the compiler's, once it is imported
        self.compiled = 0  # frames compiled by the end of the last step

    def install(self) -> None:
        """Install the seams; those that this torch lacks are left out with a warning."""
        if _made_by_hand():
            self.stop()
            return
        if tuple(map(int, self._torch.__version__.split(".")[:2])) < _OLDEST_TORCH:
            # (no warning: the script may create a Monitor; `sftriage run` reports this if it does not)
            self.failed["optimizer"] = "it needs torch {}.{} or later".format(*_OLDEST_TORCH)
            self.stop()
            return
        for name, install in (
            ("optimizer", self.optimizers.install),
            ("backward", lambda: self.replaced.stage(self._torch.autograd, "backward", "backward")),
            ("data", self._data),
            (EXCHANGE, self.exchanges.install),
            (CHECKPOINT, lambda: self.replaced.wrap(self._torch, "save", CHECKPOINT, self._saves)),
            ("forward", self.models.install),
        ):
            if name in self.on:
                with self.guarded(name):
                    install()
        os.register_at_fork(after_in_child=self.steps.abandon)

    def stop(self) -> None:
        """Remove the seams; those that others have wrapped meanwhile stay, and do nothing."""
        self.on.clear()
        LOADED.clear()
        self.optimizers.remove()
        self.replaced.undo()
        self.models.remove()
        self.steps.stop()

    @contextlib.contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """Switch the seam off if the block raises, and drop the exception."""
        try:
            yield
        except Exception as error:
            self.fail(name, error)

    def fail(self, name: str, error: Exception) -> None:
        """Switch a seam off that raised; without the optimizer's no step ends, so with it all of them."""
        if name in self.on:
            self.on.discard(name)
            self.failed[name] = repr(error)
            warn("switched off the seam %s in this process: %r", name, error)
            self.steps.forget(name)
            if name == "optimizer":
                self.stop()

    def checkpoints(self) -> None:
        """Install the seams of torch.distributed.checkpoint, which was just imported."""
        if CHECKPOINT in self.on:
            with self.guarded(CHECKPOINT):
                saver = sys.modules["torch.distributed.checkpoint.state_dict_saver"]
                for name in ("save", "async_save"):
                    if hasattr(saver, name):
                        self.replaced.wrap(saver, name, CHECKPOINT, self._saves)

    def evaluates(self) -> None:
        if EVALUATION in self.on:
            self._note(EVALUATION)

    def _note(self, kind: str) -> None:
        self.fired[kind] += 1
        self.steps.note(kind)

    def _saves(self, *_: object, **__: object) -> bool:
        self._note(CHECKPOINT)
        return False

    def _data(self) -> None:
        loader = sys.modules["torch.utils.data.dataloader"]
        self.replaced.wrap(loader.DataLoader, "__iter__", "data", self._loads, self._loaded)
        self.replaced.stage(loader._BaseDataLoaderIter, "__next__", "data")

    def _loads(self, *_: object, **__: object) -> bool:
        # (an evaluation loop may call parts of the model instead of the model)
        if self.steps.monitor is not None and self.models.set_to_evaluate():
            self.evaluates()
        return self.steps.enter("data")

    def _loaded(self, _: object, loader: Any) -> None:
        self.steps.leave("data")
        LOADED.append({name: getattr(loader, name) for name in OF_LOADER})
        if loader.num_workers and not loader.persistent_workers:
            from sftriage.model.windows import LOADER_START

            self.steps.note(LOADER_START)

    def _begin(self) -> Monitor | None:
        """Make a monitor: the first round has ended, and has shown what is trained."""
        from sftriage.trainer import moments
        from sftriage.trainer import monitor as recorder

        monitor = None
        try:
            trained = self._find_trained()
            self.compiled = self._compilations()
            cohort = None if os.environ.get(recorder.COHORT_ENV) else self.cohort
            monitor = recorder.AutomaticMonitor(self.steps.stages, self.sync, cohort=cohort)
            uncompiled(*vars(moments.Stage).values(), *vars(moments.Log).values())
            if not monitor.active:
                self.stop()
                return None
            watched = models.largest_ddp(trained) if "ready" in self.on else None
            if "backward" in self.sync and "forward" not in self.sync and watched is not None:
                monitor.watch(watched)
                self.fired["ready"] += 1
            return monitor
        except Exception as error:
            self.fail("optimizer", error)
            self.stop()
            if monitor is not None:
                monitor.close()
            return None

    def _find_trained(self) -> list[Any]:
        """Find the trained models, the stages in which ranks wait for one another, and the rank's cohort."""
        optimizers = [made for reference in self.optimizers.stepped.values() if (made := reference()) is not None]
        self.optimizers.stepped.clear()
        trained = {id(tensor) for made in optimizers for group in made.param_groups for tensor in group["params"]}
        module, parts = self._torch.nn.Module, models.part_types()
        objects = models.living((module, *parts))
        found = models.outermost([living for living in objects if isinstance(living, module)], trained)
        self.trained = tuple(type(model).__name__ for model in found)
        self.models.hook(found)
        on_device = any(not parameter.is_cpu for model in found for parameter in model.parameters())
        if H2D in self.on and on_device and (copiers := models.copiers()):
            for owner, name in copiers:
                self.replaced.stage(owner, name, H2D)
            self.steps.stages = ("data", H2D, *STAGES[1:])
        exchanged = models.exchanged_in(found, clipping=self.optimizers.clip_across_ranks)
        if "forward" in exchanged:
            self.exchanges.within = frozenset(exchanged)
        elif self.exchanges.in_backward:
            exchanged = ("backward",)
        self.sync = tuple(stage for stage in exchanged if stage in self.on)
        if models.many_ranks():
            at = models.coordinates_of([living for living in objects if isinstance(living, parts)])
            self.cohort = models.cohort_of(at, loads=self.steps.entered["data"] > 0)
            if not exchanged:
                self.cohort = self.cohort or models.model_cohort(found)
            if EXCHANGE in self.on:
                # (a rank may exchange at any time, and all ranks need the same stages)
                self.steps.stages = (*self.steps.stages[:-1], EXCHANGE, self.steps.stages[-1])
                self.sync = (*self.sync, EXCHANGE)
        return found

    def _step_ends(self) -> None:
        compiled = self._compilations()
        if compiled != self.compiled:
            self.compiled = compiled
            if self.steps.counting is not None:
                self.steps.counting.compiled = compiled
            self._note(COMPILATION)
        if self.steps.rounds <= LOOK_ROUNDS + 1:
            with self.guarded("forward"):
                self.models.look_inside()
        elif not self.steps.steady["optimizer"] and self.steps.turns.alone:
            self._settle(self.steps.turns.alone)

    def _settle(self, optimizer: int) -> None:
        """Hand the steady job's seams over to the form in C."""
        steps = self.steps
        steps.settle(*(stage for stage in steps.stages if stage in self.on))
        form = sys.modules["sftriage.trainer.moments"].FORM
        make, spans = form.seam, list(steps.spans.values())
        if make is None or steps.counting is not None or not all(isinstance(span, form.stage) for span in spans):
            return
        with self.guarded("optimizer"):
            more = (self._leave, steps.stepping, steps.kinds, self.counters, self.gradients)

            def made(role: int, stage: str, slow: object, about: object = None) -> Any:
                return make(role, steps.spans[stage], steps.opened, steps.steady[stage], stage, slow, *more, about)

            steps.counting = self.optimizers.settle(made, optimizer)
            for owner, name, stage, original, slow in self.replaced.stages:
                if stage in self.on and getattr(owner, name) is slow:
                    seam: Any = wraps(original)(made(AROUND, stage, slow, original))
                    # (pickle it by name, like a function)
                    seam.__reduce_ex__ = lambda _, name=original.__qualname__: name
                    self.replaced.put(owner, name, seam)
            self.models.settle(made)

    def _leave(self, stage: str) -> None:
        with self.guarded(stage):
            self.steps.leave(stage)

    def _compilations(self) -> int:
        """Frames that the compiler has compiled; 0 if that seam is off."""
        if not self.counters and COMPILATION in self.on:
            self.counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", self.counters)
        compiled = self.counters.get("frames")
        return 0 if compiled is None else compiled.get("total", 0)


def lead() -> Seams | None:
    """The seams for a framework that marks where steps end, installed if needed; None if nothing is recorded."""
    global installed
    if not os.environ.get(RINGS_ENV) or os.environ.get(SEAMS_ENV) == "off":
        return None
    if installed is not None and (installed.steps.rounds or not installed.on):  # (of an earlier training)
        installed.stop()
        installed = None
    if "torch.distributed" in sys.modules:
        # (before the seams are installed, which would miss its import)
        with contextlib.suppress(ImportError):
            import_module(REMAPS)
    imported("torch")
    if installed is not None and "torch.distributed.checkpoint.state_dict_saver" in sys.modules:
        installed.checkpoints()
    return installed


def imported(name: str) -> None:
    """Install the seams of a module of torch, which was just imported."""
    global installed
    if name == "torch":
        off = switched_off(os.environ.get(SEAMS_ENV, ""))
        if installed is None:
            installed = Seams(off)
            installed.install()
            with contextlib.suppress(Exception):
                ends.watch(Path(os.environ[RINGS_ENV]))
            if directory := os.environ.get(REPORT_ENV):
                _keep_report(installed, Path(directory))
    elif installed is not None:
        (installed.exchanges.remaps if name == REMAPS else installed.checkpoints)()


def _keep_report(seams: Seams, directory: Path) -> None:
    """Keep a report up to date until the directory is gone: a process may end at any time."""
    # (not in every process that imports torch)
    from sftriage.base.files import write_atomically
    from sftriage.base.loops import start_thread

    written = ""

    def write() -> None:
        nonlocal written
        worker_of = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", None)
        if directory.is_dir() and (worker_of is None or worker_of() is None):
            report = json.dumps(_report(seams))
            if report != written:
                with contextlib.suppress(OSError):
                    write_atomically(directory / f"{os.getpid()}.json", report, synced=False)
                    written = report

    def keep() -> None:
        waiting, begun_s = threading.Event(), monotonic()
        while directory.is_dir():
            write()
            waiting.wait(_REPORT_EVERY_S if monotonic() < begun_s + _REPORT_OFTEN_S else _REPORT_LATER_S)

    def begin() -> None:
        # (a fork of a training rank does not train)
        if not seams.steps.rounds and directory.is_dir():
            start_thread("doctor", keep)

    begin()
    atexit.register(write)
    # A launcher may have imported torch before it forks its ranks.
    os.register_at_fork(after_in_child=begin)


def _report(seams: Seams) -> dict[str, object]:
    torch = sys.modules["torch"]
    kineto = getattr(torch.autograd, "kineto_available", None)
    return {
        "pid": os.getpid(),
        "rank": os.environ.get("RANK", ""),
        "torch": str(torch.__version__),
        "fired": seams.fired | seams.steps.entered,
        "failed": dict(seams.failed),
        "rounds": seams.steps.rounds,
        "models": list(seams.trained),
        "collectives": {f"{name} in {stage}": n for (name, stage), n in dict(seams.exchanges.calls).items()},
        "by_hand": _made_by_hand(),
        "kineto": bool(kineto is not None and kineto()),
        "compiling": _compiles(),
    }


def _made_by_hand() -> bool:
    # (the recorder may be half imported just now)
    return getattr(sys.modules.get("sftriage.trainer.monitor"), "made_by_hand", False)


def _compiles() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = () if frame is None else walk_stack(frame)
    return any(part in each.f_code.co_filename for each, _ in frames for part in _COMPILER)


def switched_off(text: str) -> frozenset[str]:
    """The names of the seams that a value of `SEAMS_ENV` such as ``-data,-ready`` switches off."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name[:1] != "-" or name[1:] not in NAMES]
    if wrong:
        warn("%s=%s: give -NAME of %s, separated by commas; ignored: %s", SEAMS_ENV, text, NAMES, ", ".join(wrong))
    return frozenset(name[1:] for name in names if name not in wrong)


installed: Seams | None = None
