"""Captures in the trainer: torch's profiler, Python stacks alone, or marks for nsys; writes traces into the spool.

`executor` drives a session at step boundaries. `StepSizes` limits the steps of a trace.

A process has one profiler, and starting a second Kineto session beside one that is only warming up can end the process
instead of raising. So `ProfilerGuard` wraps the three entry points that every torch profiler goes through, to detect
the job's own profiler from its first warm-up step on. The wrappers pass everything on unchanged.
"""

from __future__ import annotations

import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from threading import get_ident
from time import monotonic, monotonic_ns, time_ns
from typing import TYPE_CHECKING, Any

from sftriage.base import files
from sftriage.errors import CaptureError
from sftriage.log import warn
from sftriage.model.captures import SAMPLE_STACKS, SAMPLES_PER_SECOND, CaptureRequest
from sftriage.model.windows import OTHER
from sftriage.trainer.sampler import NAME, StackSampler, period_of

if TYPE_CHECKING:
    from sftriage.trainer.layout import RingInfo

_OF_PROFILER = frozenset({"record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules"})
STACK_OPTIONS = frozenset({SAMPLE_STACKS, SAMPLES_PER_SECOND})
OPTIONS = _OF_PROFILER | STACK_OPTIONS
"""The options of a request. The profiler's are off by default: they multiply its memory and its trace."""

RANGE = "SFT_CAPTURE"
"""The range around a capture's steps, for which ``nsys --capture-range=nvtx --nvtx-capture=SFT_CAPTURE@*`` waits."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_.:-]")

SPOOL = "spool"
"""A link to the spool in the directory of the rings, for an environment that does not name the spool."""
_TAIL_BYTES = 8192
_LAST_KEY = b'"traceName"'


class ProfilerGuard:
    """Tracks who holds the process's profiler: the job, a capture, or neither.

    A job's profiler that was prepared and dropped without a stop counts as held: it is safe to refuse a capture.
    """

    def __init__(self) -> None:
        self._installed = False
        self._job_has_profiler = False
        self._on_job_profiler: Callable[[], None] | None = None
        self._our_thread = 0

    def install(self) -> None:
        """Wrap torch's entry points if torch has been imported. A second call does nothing."""
        module = sys.modules.get("torch.autograd.profiler")
        if self._installed or module is None:
            return
        self._installed = True
        for name, holds in (("_prepare_profiler", True), ("_enable_profiler", True), ("_disable_profiler", False)):
            if hasattr(module, name):
                setattr(module, name, self._wrap(getattr(module, name), holds))

    def busy(self) -> str | None:
        """Why no capture can start now, or None."""
        if self._on_job_profiler is not None:
            return "another capture is under way in this process"
        # (torch itself knows a profiler that records on this thread, but not one that is warming up)
        autograd = getattr(getattr(sys.modules.get("torch"), "_C", None), "_autograd", None)
        if self._job_has_profiler or getattr(autograd, "_profiler_enabled", bool)():
            return "a profiler is already running in this process"
        return None

    @property
    def of_job(self) -> bool:
        """Whether the job has a profiler of its own, as far as is known."""
        return self._job_has_profiler

    def hold(self, on_job_profiler: Callable[[], None]) -> None:
        """Take the profiler for a capture, which ``on_job_profiler`` stops when the job starts its own."""
        self._on_job_profiler = on_job_profiler

    def release(self, on_job_profiler: Callable[[], None]) -> None:
        """Give the profiler back if this capture holds it."""
        if self._on_job_profiler == on_job_profiler:
            self._on_job_profiler = None

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Calls into torch's profiler from this thread are the capture's own."""
        self._our_thread = get_ident()
        try:
            yield
        finally:
            self._our_thread = 0

    def _wrap(self, original: Callable[..., Any], holds: bool) -> Callable[..., Any]:
        @wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == self._our_thread:
                return original(*args, **kwargs)
            if holds and self._on_job_profiler is not None:
                try:
                    self._on_job_profiler()
                except Exception as error:
                    warn("a capture could not make way for the job's own profiler: %r", error)
            answer = original(*args, **kwargs)
            self._job_has_profiler = holds
            return answer

        return wrapper


GUARD = ProfilerGuard()
"""The process has one profiler, and so one guard."""


class Session(ABC):
    """One capture's marks, steps and costs. Called on the training thread."""

    def __init__(self) -> None:
        # Functions that close the open marks of the step and its stages, outermost first.
        self._marks: list[Callable[[], object]] = []
        self._started_s = 0.0
        self.steps = 0  # recorded so far
        self.first_step: int | None = None
        self.last_step: int | None = None
        # Seconds that ``import``, ``prepare``, ``start``, ``run`` and ``stop`` took.
        self.timings_s: dict[str, float] = {}
        self.clock: dict[str, int] = {}  # ``mono_ns`` and ``wall_ns``, read together when recording started
        # The rank's step and innermost stage, and since when (monotonic clock, ns).
        self.at = (0, OTHER, 0)

    def prepare(self) -> None:
        """Warm up, if needed: the first steps after this pay for it, and are not recorded."""
        return

    @abstractmethod
    def start(self, capture_id: str, first_step: int, labels: Mapping[str, str]) -> None:
        """Record from here on. A trace with metadata gets the capture's id, the job and these labels."""

    @abstractmethod
    def stop(self) -> None:
        """Stop. Does nothing if it was never prepared, or has been stopped."""

    def _mark(self, name: str) -> Callable[[], object]:
        """Open a mark, if the session has any; returns the function that closes it."""
        return lambda: None

    def begin_step(self, number: int) -> None:
        self._marks.append(self._mark(f"ProfilerStep#{number}"))
        self.last_step = number
        self.at = (number, OTHER, monotonic_ns())

    def end_step(self) -> None:
        self.follow(())
        self._close_marks(0)
        self.steps += 1

    def follow(self, stages: Sequence[str]) -> None:
        """Open and close marks so that those of these stages are open, outermost first."""
        self._close_marks(1 + len(stages))
        for stage in stages[len(self._marks) - 1 :]:
            self._marks.append(self._mark(f"sftriage:{stage}"))
        self.at = (self.at[0], stages[-1] if stages else OTHER, monotonic_ns())

    def _begun(self, first_step: int) -> None:
        self._started_s = monotonic()
        self.clock = {"mono_ns": monotonic_ns(), "wall_ns": time_ns()}
        self.first_step = first_step
        self.at = (first_step, OTHER, self.clock["mono_ns"])

    def _run_ends(self) -> bool:
        """Close all marks; False if nothing runs."""
        if self.first_step is None or "run" in self.timings_s:
            return False
        self.timings_s["run"] = monotonic() - self._started_s
        self._close_marks(0)
        return True

    def _close_marks(self, left: int) -> None:
        while len(self._marks) > left:
            self._marks.pop()()


class TorchSession(Session):
    """torch's profiler with some of `OPTIONS`, from its preparation to a trace in memory."""

    def __init__(
        self, subject: RingInfo, options: Mapping[str, int], guard: ProfilerGuard, *, sample: bool = False
    ) -> None:
        super().__init__()
        period_s = period_of(options)
        options = {name: bool(value) for name, value in options.items() if name in _OF_PROFILER}
        began_s = monotonic()
        profiler = import_module("torch.profiler")
        self.timings_s["import"] = monotonic() - began_s
        activities = [profiler.ProfilerActivity.CPU]
        if sys.modules["torch"].cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        # (the base class of torch.profiler.profile, without a schedule and the step counter that the job may use)
        self._profile = profiler._KinetoProfile(activities=activities, **options)
        self._options, self._subject, self._guard = options, subject, guard
        self.stall_s = 0.0  # of stop and export: torch keeps the GIL for both, on any thread
        self._prepared = False
        self._broken: Exception | None = None
        # (not beside the profiler's own stacks, which would trace the sampler too)
        self.sampler = StackSampler(lambda: self.at, period_s) if sample and not options.get("with_stack") else None

    def prepare(self) -> None:
        began_s = monotonic()
        with self._guard.ours():
            # (in `vars`, which neither imports the compiler nor waits for an import under way)
            compiler = vars(sys.modules["torch"]).get("_inductor")
            if compiler is not None and "config" in vars(compiler):
                self._profile.prepare_trace()
            else:
                # prepare_trace() would import torch's compiler, to read a setting that matters only to its users: 820
                # modules, seconds in which the rank stands still. The rest of it is this.
                backend = sys.modules["torch.autograd.profiler"]
                made = backend.profile(use_kineto=True, use_device=self._profile.use_device, **self._options)
                self._profile.profiler = made
                made._prepare_trace()
        self._prepared = True
        self.timings_s["prepare"] = monotonic() - began_s

    def start(self, capture_id: str, first_step: int, labels: Mapping[str, str]) -> None:
        began_s = monotonic()
        with self._guard.ours():
            self._profile.start_trace()
        self._begun(first_step)
        self.timings_s["start"] = self._started_s - began_s
        self._label("capture_id", capture_id)
        self._label("job", self._subject.job)
        self._label("first_step", str(first_step))
        for name, value in labels.items():
            self._label(_UNSAFE.sub("_", name), value)
        if torch_distributed() is None:
            # (otherwise torch writes it itself)
            ranks = {"backend": "none", "rank": self._subject.rank, "world_size": self._subject.world_size}
            self._profile.add_metadata_json("distributedInfo", json.dumps(ranks))
        if self.sampler is not None:
            self.sampler.start()

    def stop(self) -> None:
        if not self._prepared:
            return
        self._prepared = False
        began_s = monotonic()
        if self.sampler is not None:
            self.sampler.stop()
        try:
            if self._run_ends():
                self._label("last_step", str(self.last_step))
        finally:
            with self._guard.ours():
                # A profiler that is only prepared cannot be stopped: torch's own schedule starts it for this, too.
                if self.first_step is None:
                    self._profile.start_trace()
                try:
                    self._profile.stop_trace()
                except Exception as error:
                    # (the stacks of the steps are useful without a trace)
                    if self.sampler is None:
                        raise
                    self._broken = error
            self.timings_s["stop"] = monotonic() - began_s
            self.stall_s += self.timings_s["stop"]

    def store(self, spool: Path, request: CaptureRequest) -> tuple[int, str]:
        """Write trace and stacks into the spool, on any thread; returns the trace's bytes, and what is missing.

        Raises CaptureError if there are neither stacks nor a whole trace within the allowed bytes.
        """
        size_bytes, missing = 0, []
        try:
            size_bytes = write_trace(self.export, spool, request.capture_id, request.max_bytes)
        except Exception as error:
            if self.sampler is None:
                raise
            missing.append(f"no trace: {error}")
        if self.sampler is not None:
            missing.append(self.sampler.keep(_samples(spool, request), request.max_bytes - size_bytes))
        if not size_bytes and all(missing):
            raise CaptureError("; ".join(missing))
        return size_bytes, "; ".join(filter(None, missing))

    def export(self, path: str) -> None:
        """Write the trace as JSON, on any thread; CaptureError if it is empty."""
        if self._broken is not None:
            raise CaptureError(f"the profiler could not be stopped: {self._broken}")
        if self._profile.profiler.kineto_results.trace_start_ns() <= 0:
            raise CaptureError("the profiler recorded nothing")
        began_s = monotonic()
        self._profile.export_chrome_trace(path)
        self.stall_s += monotonic() - began_s

    def _label(self, name: str, value: str) -> None:
        # Kineto writes values into its JSON unescaped: a backslash would break the whole trace.
        self._profile.add_metadata(f"sftriage.{name}", _UNSAFE.sub("_", value))

    def _mark(self, name: str) -> Callable[[], object]:
        mark = sys.modules["torch.autograd.profiler"].record_function(name)
        mark.__enter__()
        return partial(mark.__exit__, None, None, None)


class SampledSession(Session):
    """Python stacks without a profiler: the job's may run meanwhile. Raises as `period_of` does."""

    def __init__(self, options: Mapping[str, int]) -> None:
        super().__init__()
        self.sampler = StackSampler(lambda: self.at, period_of(options))

    def start(self, capture_id: str, first_step: int, labels: Mapping[str, str]) -> None:
        self._begun(first_step)
        self.sampler.start()
        self.timings_s["start"] = monotonic() - self._started_s

    def stop(self) -> None:
        if self._run_ends():
            self.sampler.stop()

    def store(self, spool: Path, request: CaptureRequest) -> tuple[int, str]:
        """Write the stacks into the spool, on another thread; returns their size in bytes. Raises CaptureError."""
        path = _samples(spool, request)
        if missing := self.sampler.keep(path, request.max_bytes):
            raise CaptureError(missing)
        return path.stat().st_size, ""


class NvtxSession(Session):
    """NVTX ranges for a profiler outside the trainer: around the capture, each step, and each stage.

    NVTX is torch's if torch was built with CUDA, or else that of the ``nvtx`` package, which is imported only now. All
    ranges are in the default domain: torch's NVTX has no other. Raises CaptureError if there is no NVTX in this
    process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._push, self._pop = _nvtx()

    def start(self, capture_id: str, first_step: int, labels: Mapping[str, str]) -> None:
        self._mark(RANGE)
        self._begun(first_step)

    def stop(self) -> None:
        if self._run_ends():
            self._pop()

    def _mark(self, name: str) -> Callable[[], object]:
        self._push(name)
        return self._pop


def _samples(spool: Path, request: CaptureRequest) -> Path:
    return spool / f"{request.capture_id}.{NAME}"


def torch_distributed() -> Any:
    """torch.distributed if the job has initialised it, else None. Imports nothing."""
    distributed = sys.modules.get("torch.distributed")
    initialized = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if initialized else None


def _nvtx() -> tuple[Callable[[str], object], Callable[[], object]]:
    if hasattr(getattr(sys.modules.get("torch"), "_C", None), "_nvtx"):
        torch_nvtx = import_module("torch.cuda.nvtx")
        return torch_nvtx.range_push, torch_nvtx.range_pop
    try:
        package = import_module("nvtx")
        return package.push_range, package.pop_range
    except (ImportError, AttributeError) as error:
        why = "torch has none in this build, and the nvtx package is not installed"
        raise CaptureError(f"no NVTX in the trainer: {why}") from error


def write_trace(export: Callable[[str], object], spool: Path, capture_id: str, max_bytes: int) -> int:
    """Write a trace by ``export`` to ``<spool>/<capture_id>.json``; returns its size in bytes.

    The file gets its name once it is whole on disk; a failure leaves nothing behind. Kineto reports no full disk.
    Raises CaptureError if the trace is not whole or too large, or the name is taken.
    """
    final, partial = spool / f"{capture_id}.json", spool / f"{capture_id}.json.partial"
    if final.exists():
        raise CaptureError(f"a trace named {capture_id} already exists")
    create_spooled(partial)
    try:
        export(str(partial))
        size_bytes = partial.stat().st_size
        if size_bytes > max_bytes:
            raise CaptureError(f"the trace has {size_bytes} bytes; {max_bytes} are allowed")
        if not ends_whole(partial):
            raise CaptureError("the trace was not written whole; the disk may be full")
        # Kineto creates a file of its own, with the process's umask.
        partial.chmod(0o600)
        with partial.open("rb") as file:
            files.permit(file.fileno())
            os.fsync(file.fileno())
        partial.rename(final)
        files.sync_directory(spool)
    except OSError as error:
        raise CaptureError(f"the trace could not be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return size_bytes


def create_spooled(path: Path) -> None:
    """Make a new empty file in the spool, or raise a CaptureError."""
    try:
        os.close(files.create(path))
    except OSError as error:
        raise CaptureError(f"the spool directory {path.parent} cannot be written: {error.strerror}") from error


def ends_whole(trace: Path) -> bool:
    """Whether a Kineto trace is whole: valid JSON follows its last key, or a string and the document end there.

    torch does not escape the path of the trace. Reading hundreds of megabytes as JSON would hold the trainer's GIL.
    """
    with trace.open("rb") as file:
        file.seek(max(0, trace.stat().st_size - _TAIL_BYTES))
        tail = file.read()
    at = tail.rfind(_LAST_KEY)
    try:
        return at >= 0 and bool(json.loads(b"{" + tail[at:]))
    except ValueError:
        return at >= 0 and re.search(rb'[^,:{\s]\s*"\s*\}\s*\Z', tail[at + len(_LAST_KEY) :]) is not None


PROBED_STEPS = 10
"""Before a capture of more than these steps, or of more than one step with options, which multiply the trace, a probe
records one step to learn its cost, unless that is known."""

MAX_STALL_S = 2.0
"""How long the stop and the export of a capture may hold up its rank, and so its group; longer captures are cut.

Torch reads every event when it stops, and again when it writes the trace, and keeps the GIL: 20 to 60 us an operator.
"""

_PLANNED_FRACTION = 0.9
"""The share of the allowed bytes to plan with: steps differ in size."""

_GROWTH = 1.5
"""How much longer a step holds up the rank in a larger trace than in the measured one.

With 400 operators a step: 11 to 19 ms for one alone, 14 for one of ten, 23 of a hundred, 25 of two hundred.
"""

_BLANKS = 2
"""Traces without any step before a probe: the first pays the process's one-time costs, the second is measured."""

Options = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class TraceCost:
    """The cost of some steps: bytes of their trace, and seconds that its stop and export held up the rank.

    ``fixed_s``: the seconds of a trace without any step; 0 if unknown.
    """

    steps: int
    size_bytes: int
    stall_s: float
    fixed_s: float = 0.0


class StepSizes:
    """The cost of a step, by the profiler's options, as last measured."""

    def __init__(self) -> None:
        self._measured: dict[Options, TraceCost] = {}

    def note(self, options: Mapping[str, object], measured: TraceCost) -> None:
        """Keep a measurement with these options; without ``fixed_s``, keep the earlier one's."""
        before = self._measured.get(_key(options))
        if measured.steps > 0 and measured.size_bytes > 0:
            fixed_s = measured.fixed_s or (before.fixed_s if before else 0.0)
            self._measured[_key(options)] = replace(measured, fixed_s=fixed_s)

    def wants_probe(self, request: CaptureRequest) -> bool:
        """Whether to record a step before a capture, to learn its cost."""
        key = _key(request.options)
        return request.steps > (1 if key else PROBED_STEPS) and key not in self._measured

    def limit(self, request: CaptureRequest) -> tuple[int, str]:
        """The steps that a capture may have, and why not all (or "").

        Raises CaptureError if a single step does not fit into its bytes.
        """
        measured = self._measured.get(_key(request.options))
        if measured is None:
            return request.steps, ""
        step_bytes = measured.size_bytes / measured.steps
        if step_bytes > request.max_bytes:
            raise CaptureError(
                f"one step alone makes a trace of {step_bytes:.0f} bytes; {request.max_bytes} are allowed"
            )
        fit = int(_PLANNED_FRACTION * request.max_bytes / step_bytes)
        limits = (
            (request.steps, ""),
            (max(1, fit), f"more would not fit into {request.max_bytes} bytes"),
            (max(1, _in_time(measured)), f"more would hold the rank up for over {MAX_STALL_S:g} s"),
        )
        return min(limits, key=lambda limit: limit[0])


class Probe:
    """One step recorded before a capture and discarded, to learn the cost of a step.

    ``session`` makes a session with the capture's options. The training thread has spent ``took_s`` on it so far.
    """

    def __init__(self, session: Callable[[], TorchSession], spool: Path, capture_id: str) -> None:
        self._make, self._spool, self._capture_id = session, spool, capture_id
        self._session: TorchSession | None = None
        self._fixed_s = self.took_s = 0.0

    def start(self, number: int) -> None:
        began_s = monotonic()
        for _ in range(_BLANKS):
            blank = self._started(number)
            blank.stop()
            self._trace_bytes(blank)
            self._fixed_s = blank.stall_s
        self._started(number)
        self.took_s += monotonic() - began_s

    def finish(self) -> TraceCost:
        """Stop after the step, or raise a CaptureError if nothing could be written."""
        began_s = monotonic()
        session = self._session
        assert session is not None, "a probe is started before it is finished"
        session.stop()
        size_bytes = self._trace_bytes(session)
        self.took_s += monotonic() - began_s
        return TraceCost(1, size_bytes, session.stall_s, self._fixed_s)

    def stop(self) -> None:
        if self._session is not None:
            self._session.stop()

    def _started(self, number: int) -> TorchSession:
        # Assigned first, so that `stop` finds it whatever fails.
        self._session = session = self._make()
        session.prepare()
        session.start(self._capture_id, number, {})
        return session

    def _trace_bytes(self, session: TorchSession) -> int:
        path = self._spool / f"{self._capture_id}.probe"
        create_spooled(path)
        try:
            session.export(str(path))
            size_bytes = path.stat().st_size
        finally:
            path.unlink(missing_ok=True)
        if not size_bytes:
            raise CaptureError("the trace was not written whole; the disk may be full")
        return size_bytes


def _in_time(measured: TraceCost) -> int:
    """The number of steps expected to hold up the rank for `MAX_STALL_S`."""
    step_s = (measured.stall_s - measured.fixed_s) / measured.steps
    steps = (MAX_STALL_S - measured.fixed_s) / step_s if step_s > 0.0 else sys.maxsize
    return int(steps if steps <= measured.steps else max(measured.steps, steps / _GROWTH))


def _key(options: Mapping[str, object]) -> Options:
    return tuple(sorted((name, value) for name, value in options.items() if value and name not in STACK_OPTIONS))
