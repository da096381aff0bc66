"""What a rule captures: the profiler, how much of it, and each profiler's own options under its own name."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from pydantic import Field

from sftriage.decisions import ProfilerChoice
from sftriage.policy import quantities
from sftriage.policy.contradictions import CONTROL_RANKS, PROFILER, SAMPLE
from sftriage.policy.fields import Listed, PolicyModel, Rank, TraceSize, some_or_left_out


class TorchOptions(PolicyModel):
    """What is recorded beside operators and kernels. What costs time and memory is off unless asked for."""

    sample_stacks: bool = Field(
        default=True,
        description="Sample the Python stacks of all threads, from one in the trainer, and in its DataLoader's "
        "workers: they say where what is no operator took its time. Not beside `with_stack`.",
    )
    record_shapes: bool = Field(default=False, description="Record the shapes of operators' inputs.")
    with_stack: bool = Field(
        default=False, description="Trace every Python call: exact, and several times slower where there are many."
    )
    profile_memory: bool = Field(default=False, description="Record allocations.")


class NsysOptions(PolicyModel):
    """What Nsight Systems records of the process, from outside of it."""

    trace: Listed[Literal["cuda", "nvtx", "osrt", "cublas", "cudnn", "mpi", "ucx"]] | None = Field(
        default=None,
        max_length=7,
        json_schema_extra=some_or_left_out,
        description="The interfaces whose calls are recorded: as a rule those that the ranks were launched with "
        "(`--nsys-trace`), of which these have to be some.",
    )
    sample: Literal["none", "cpu"] = Field(
        default="none", description="Whether the stacks of the process are sampled (`cpu`), which slows it."
    )
    sqlite: bool = Field(default=True, description="Export the report to SQLite too, which other programs can read.")


class StacksOptions(PolicyModel):
    """What is taken along with the Python stacks of all threads. Either means one look from outside, over no steps."""

    native: bool = Field(default=False, description="The frames of C and C++ too; the process stops for longer.")
    flight_recorder: bool = Field(
        default=False, description="The flight recorder of torch.distributed too: the collectives entered and left."
    )

    @property
    def from_outside(self) -> bool:
        """Whether there is something to take that a trainer cannot."""
        return self.native or self.flight_recorder


class ProfilerRun(PolicyModel):
    """One time-boxed run of a profiler, whoever it is of."""

    profiler: ProfilerChoice = Field(
        default=PROFILER,
        description="`auto`: `stacks` where the host does the work, `torch` (or `nsys`, where the job runs under it) "
        "for what computes, and what one leaves open by another; `torch`: operators and kernels, and stacks beside; "
        "`nsys`: Nsight Systems; `stacks`: Python stacks over the steps, or from outside of a rank that takes none.",
    )
    steps: int = Field(default=5, ge=1, le=1000, description="Steps to record.")
    warmup_steps: int = Field(
        default=1, ge=0, le=100, description="Steps the profiler runs before those that count; stacks need none."
    )
    samples_per_second: int = Field(
        default=200,
        ge=1,
        le=1000,
        description="How often stacks are sampled over the steps, at most: sampling has a 40th of the time.",
    )
    max_seconds: int = Field(
        default=60, ge=1, le=3600, description="Seconds after which the capture ends, whatever happens."
    )
    max_bytes: TraceSize = Field(
        default="512Mi",
        description="Size over which a trace is not kept. Of many steps the torch profiler records as many as fit.",
    )
    torch: TorchOptions = Field(default=TorchOptions(), description="Options of the torch profiler.")
    nsys: NsysOptions = Field(default=NsysOptions(), description="Options of Nsight Systems.")
    stacks: StacksOptions = Field(default=StacksOptions(), description="Options of a look from outside.")

    @cached_property
    def max_trace_bytes(self) -> int:
        """``max_bytes`` as a number."""
        return quantities.size_bytes(self.max_bytes)


class Capture(ProfilerRun):
    """One time-boxed run of a profiler on a suspect's ranks."""

    sample: int = Field(
        default=SAMPLE,
        ge=1,
        le=1024,
        description="Of the suspect's ranks only so many: what is slow alike looks alike, and each costs the job.",
    )
    ranks: Listed[Rank] = Field(default=(), max_length=1024, description="These ranks, instead of the suspect's.")
    control_ranks: int = Field(
        default=CONTROL_RANKS, ge=0, le=16, description="So many healthy peers too, in the same steps, to compare with."
    )

    @cached_property
    def wish(self) -> tuple[tuple[int, ...], int, int]:
        """Whom it captures: captures of one wish take the same of a suspect's ranks."""
        return self.ranks, self.sample, self.control_ranks
