"""`Monitor`, which a training script creates to record its steps and stages.

::

    monitor = Monitor()
    for batch in loader_of(monitor):
        with monitor.step():
            with monitor.stage("data"): ...
            with monitor.stage("forward"): ...

It records if ``SFTRIAGE_RINGS`` names a directory, and is inert otherwise. Its constructor raises on wrong arguments.
On a full disk or a missing directory it warns once and is inert; no other method ever raises into training.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING, Any

from sftriage.base.process import start_ticks
from sftriage.errors import RingError, SchemaError, UsageError
from sftriage.log import warn
from sftriage.model.windows import StageSchema
from sftriage.trainer import ends, moments
from sftriage.trainer.executor import Answering, CaptureExecutor, Mailbox
from sftriage.trainer.gradients import watch_model
from sftriage.trainer.layout import MAX_SLOTS, RingInfo, bounded_text, claim
from sftriage.trainer.recording import Recording
from sftriage.trainer.session import SPOOL, torch_distributed

if TYPE_CHECKING:
    import torch

    Calls = object
else:
    Calls = moments.FORM.calls

RINGS_ENV = "SFTRIAGE_RINGS"
SPOOL_ENV = "SFTRIAGE_SPOOL"
RUN_ENV = "SFTRIAGE_RUN"
"""The directory of the run, for trainers on the host of the controller."""
DEVICE_ENV = "SFTRIAGE_DEVICE_TIME"
JOB_ENV = "SFTRIAGE_JOB"
HOST_ENV = "SFTRIAGE_HOST"
COHORT_ENV = "SFTRIAGE_COHORT"

LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    # (a batch script has SLURM_NTASKS as well, but is not a task)
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
"""Variables for rank, world size and local rank: of Open MPI, other MPIs and SLURM. ``mpirun`` within SLURM wins."""

_NUMBERS = (
    ("rank", "RANK", 0),
    ("world_size", "WORLD_SIZE", 1),
    ("local_rank", "LOCAL_RANK", 0),
    ("attempt", "TORCHELASTIC_RESTART_COUNT", 0),
)
"""The numbers of a `RingInfo`: their variables in torchrun's environment, and their defaults."""

_ORDINARY = ""
_NOTHING: AbstractContextManager[None] = nullcontext()


class Monitor(Calls):
    """Records the stages of every step of one rank, and carries out the captures requested in its mailbox.

    Args:
        stages: names of a step's stages, in order; ``other`` is added as the last.
        sync: the stages that end in a blocking exchange between the ranks; by default ``backward``, if declared.
        rank: this process's rank; by default ``RANK``, or else that of torch.distributed, if the job has initialised
            it by now, of MPI or of SLURM (see `LAUNCHERS`), or 0. The same goes for ``world_size``, the ranks in the
            job, and ``local_rank``, the rank on its host.
        job: the job's name; by default ``SFTRIAGE_JOB`` or ``TORCHELASTIC_RUN_ID``.
        host: the host's name; by default ``SFTRIAGE_HOST``, or the kernel's host name, which in a pod is the pod's.
        cohort: ranks of one cohort do the same work, and are compared; by default ``SFTRIAGE_COHORT``, or all ranks.
        rings: directory of the ring and the mailbox, preferably on tmpfs; by default ``SFTRIAGE_RINGS``.
        spool: directory for traces; by default ``SFTRIAGE_SPOOL``, or the target of the link ``spool`` in ``rings``,
            which `sftriage agent` creates. Without a spool, captures are refused.
        slots: steps that the ring holds before it overwrites the oldest.
        device_time: also record the GPU's time in each stage once CUDA is in use (see
            `sftriage.trainer.device.DeviceTime`); by default unless ``SFTRIAGE_DEVICE_TIME`` is 0.

    Raises SchemaError if the stages are invalid, and UsageError if another argument is invalid.
    """

    def __init__(
        self,
        stages: Sequence[str] = ("data", "forward", "backward", "optimizer"),
        sync: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        local_rank: int | None = None,
        job: str | None = None,
        host: str | None = None,
        cohort: str | None = None,
        rings: str | os.PathLike[str] | None = None,
        spool: str | os.PathLike[str] | None = None,
        slots: int = 4096,
        device_time: bool | None = None,
    ) -> None:
        self._make_way()
        if isinstance(stages, str) or isinstance(sync, str):
            raise SchemaError("stages and sync are sequences of names, not one string")
        stages = tuple(stages)
        if sync is None:
            sync = ("backward",) if "backward" in stages else ()
        schema = StageSchema.closed(stages, tuple(sync))
        if type(slots) is not int or not 1 <= slots <= MAX_SLOTS:
            raise UsageError(f"slots {slots!r}: 1 to {MAX_SLOTS}")
        numbers = {"rank": rank, "world_size": world_size, "local_rank": local_rank}
        info = _identified(schema, os.environ, **numbers, job=job, host=host, cohort=cohort)
        directory = rings if rings is not None else os.environ.get(RINGS_ENV)
        if device_time is None:
            device_time = os.environ.get(DEVICE_ENV) != "0"
        self._recording: Recording | None = None
        if info is not None and directory:
            self._recording = _open(Path(directory), info, slots, spool or os.environ.get(SPOOL_ENV), device_time)
        self._stages: Mapping[str, AbstractContextManager[None]] = dict.fromkeys(schema.stages, _NOTHING)
        self._step: AbstractContextManager[None] = _NOTHING
        if self._recording is not None:
            self._stages, self._step = self._recording.stages, self._recording.step
            # Runs when the monitor is dropped and at exit; the recording does not keep the monitor alive.
            weakref.finalize(self, self._recording.close)

    def step(
        self, number: int | None = None, kind: str | None = None, work: int | None = None
    ) -> AbstractContextManager[None]:
        """One training step, as a context manager.

        Args:
            number: the job's own number of the step, as in a job resumed from a checkpoint; by default one more than
                the last, from 0.
            kind: the kind of a step that is not ordinary: ``"checkpoint"``, ``"evaluation"``. Only steps of the same
                kind are compared. Printable text of at most 16 bytes.
            work: the amount of work in the step, in tokens or samples. `note` sets kind and work later.
        """
        if (number is None and kind is None and work is None) or self._recording is None:
            return self._step
        # By identity: it costs nothing, and a CUDA tensor passed by mistake does not wait for its device.
        ordinary = (kind is None or kind is _ORDINARY) and work is None
        return _NumberedStep(self._recording, number, None if ordinary else (kind, work))

    def stage(self, name: str) -> AbstractContextManager[None]:
        """One stage of the open step, as a context manager. An unknown name counts as misuse."""
        try:
            return self._stages[name]
        except Exception:
            if self._recording is not None:
                self._recording.misused("no such stage", name)
            return _NOTHING

    # The form in C, whose methods are inherited, calls these for unusual arguments.
    _step_in_python, _stage_in_python = step, stage
    if not TYPE_CHECKING and Calls is not object:
        del step, stage

    def note(self, kind: str | None = None, work: int | None = None) -> None:
        """Set kind and work of the open step, which are often known only once the batch is loaded.

        See `step`. The last value counts, for this step only; None leaves the earlier value.
        """
        if self._recording is not None:
            self._recording.note(kind, work)

    def watch(self, model: torch.nn.Module) -> None:
        """Also record when each step's last gradient is ready on this rank, before it waits for any other.

        Inside DDP's backward the ranks tie: one slow rank makes all of them slow, and durations cannot name it. That
        moment can: it splits ``backward``, or else the first sync stage, into own work and waiting. Call it once before
        the first step, and again after you replace the model or add parameters::

            model = DistributedDataParallel(network)
            monitor.watch(model)

        It hooks parameters (``register_post_accumulate_grad_hook``): all of them for a few steps, to learn which
        gradients come last, and then only those. ``close`` removes the hooks. A step records no moment without a
        backward, just after the order has changed, and under FSDP.

        Args:
            model: everything that is trained, as one module, in DDP or not (``nn.ModuleList`` holds several). A second
                call replaces the first.
        """
        if self._recording is not None:
            watch_model(self._recording, model)

    def declare(self, stage: str, *, sync: bool = False) -> None:
        """Add a stage after the monitor was made: the last before ``other``.

        ``sync``: it ends in a blocking exchange between the ranks. A stage that exists stays unchanged. A stage that
        cannot be declared (a monitor records 32 stages) counts as misuse.
        """
        if self._recording is not None:
            self._recording.declare(stage, sync)

    def join(self, cohort: str) -> None:
        """Set the rank's cohort after the monitor was made."""
        if self._recording is not None:
            self._recording.join(cohort)

    @property
    def info(self) -> RingInfo | None:
        """The rank, job and stages that this monitor records, or None if it is inert."""
        return None if self._recording is None else self._recording.info

    @property
    def active(self) -> bool:
        """Whether steps are being recorded."""
        return self._recording is not None and not self._recording.off

    def close(self) -> None:
        """Stop recording. A second call does nothing; steps and stages after it cost next to nothing."""
        if self._recording is not None:
            self._recording.close()

    def _make_way(self) -> None:
        """Replace automatic recording in this process: a monitor of the script takes precedence."""
        global made_by_hand
        made_by_hand = True
        seams = getattr(sys.modules.get("sftriage.trainer.seams.patches"), "installed", None)
        if seams is not None:
            seams.stop()

    def __getstate__(self) -> tuple[dict[str, object], dict[str, object]]:
        # An inert monitor can be copied and pickled; the form in C needs its attribute passed explicitly.
        return self.__dict__, {"_step": self._step}

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AutomaticMonitor(Monitor):
    """The monitor that the seams (`sftriage.trainer.seams`) make in a script without one."""

    def _make_way(self) -> None:
        global _automatic
        _automatic = weakref.ref(self)


def stage(name: str, *, sync: bool = False) -> AbstractContextManager[None]:
    """A stage of an otherwise unedited script that `sftriage run` does not detect, as a context manager.

    It does nothing in a script with a `Monitor`, in the first two steps, and under ``--no-auto``.

    Args:
        name: a detected stage, or a new one, which becomes the last before ``other``.
        sync: whether a new stage ends in a blocking exchange between the ranks.
    """
    automatic = None if _automatic is None else _automatic()
    if automatic is None or not automatic.active:
        return _NOTHING
    automatic.declare(name, sync=sync)
    return automatic.stage(name)


made_by_hand = False
"""Whether the script has created a monitor."""
_automatic: weakref.ref[AutomaticMonitor] | None = None


class _NumberedStep:
    """A step with a number, kind or work of its own. Most steps have none, and take the quicker path."""

    __slots__ = ("_noted", "_number", "_recording")

    def __init__(self, recording: Recording, number: int | None, noted: tuple[object, object] | None) -> None:
        self._recording, self._number, self._noted = recording, number, noted

    def __enter__(self) -> None:
        self._recording.begin(self._number)
        if self._noted is not None:
            self._recording.note(*self._noted)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._recording.end(kind is not None)


def _open(
    directory: Path, info: RingInfo, slots: int, spool: str | os.PathLike[str] | None, device_time: bool
) -> Recording | None:
    try:
        ring = claim(directory, info, slots)
        try:
            # (an agent may link a spool here later)
            traces = Path(spool or directory / SPOOL).absolute()
            hook = CaptureExecutor(Mailbox(directory, ring.info), ring.info, traces, named=bool(spool))
            answering = None
            with suppress(OSError, RuntimeError):
                answering = Answering(directory, ring.info)
            ends.enrol(directory, info.rank, info.attempt, info.world_size)
            return Recording(ring, hook, answering, device_time=device_time)
        except BaseException:
            # Readers must not wait for a rank that will never record.
            ring.path.unlink(missing_ok=True)
            ring.close()
            raise
    except (OSError, RingError) as error:
        warn("not recording rank %d: %s", info.rank, error)
        return None


def _identified(schema: StageSchema, environment: Mapping[str, str], **arguments: str | int | None) -> RingInfo | None:
    """This process's rank and job, from arguments or the launcher's environment; None if that is malformed."""
    texts = {
        "job": environment.get(JOB_ENV) or environment.get("TORCHELASTIC_RUN_ID") or "",
        "host": environment.get(HOST_ENV) or os.uname().nodename,
        "cohort": environment.get(COHORT_ENV) or "",
    }
    arguments = {name: value for name, value in arguments.items() if value is not None}
    for name in texts.keys() & arguments.keys():
        if not isinstance(arguments[name], str):
            raise UsageError(f"{name} {arguments[name]!r}: a text")
    if "RANK" not in environment:  # (Lightning's own launcher sets only WORLD_SIZE)
        environment = _launched(environment)
    try:
        numbers = {
            name: arguments[name] if name in arguments else _number(environment, variable, default)
            for name, variable, default in _NUMBERS
        }
        found = {name: bounded_text(str(arguments.get(name, texts[name]))) for name in texts}
        info: dict[str, Any] = {**numbers, **found}
        return RingInfo(
            **info,
            schema=schema,
            started_mono_ns=monotonic_ns(),
            started_wall_ns=time_ns(),
            pid=os.getpid(),
            pid_start_ticks=start_ticks(os.getpid()) or 0,
            writer=moments.FORM.name,
        )
    except RingError as error:
        if arguments.keys() - texts.keys():
            raise UsageError(str(error)) from error
        warn("not recording: %s", error)
        return None


def _launched(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with torchrun's variables, from torch.distributed, or else MPI or SLURM."""
    found: dict[str, str] = {}
    variables = next((names for names in LAUNCHERS if all(name in environment for name in names[:2])), ())
    for name, variable in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), variables, strict=False):
        if variable in environment:
            found[name] = environment[variable]
    found |= environment
    try:
        if (distributed := torch_distributed()) is not None:
            found |= {"RANK": str(distributed.get_rank()), "WORLD_SIZE": str(distributed.get_world_size())}
    except Exception as error:
        warn("torch.distributed does not say which rank this is: %r", error)
    return found


def _number(environment: Mapping[str, str], variable: str, default: int) -> int:
    text = environment.get(variable, str(default))
    # int() would also take "1_0" and " 1 ".
    if not (text.isascii() and text.isdecimal()):
        raise RingError(f"{variable}={text!r} is not a whole number")
    return int(text)
