"""Who a process is in its job: by what a script says, or its launcher, or torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from time import monotonic_ns, time_ns
from typing import Any

from sftriage.base.process import start_ticks
from sftriage.errors import RingError, UsageError
from sftriage.log import warn
from sftriage.model.windows import StageSchema
from sftriage.profiling.session import torch_distributed
from sftriage.recorder.layout import RingInfo, bounded_text

JOB_ENV = "SFTRIAGE_JOB"
HOST_ENV = "SFTRIAGE_HOST"
COHORT_ENV = "SFTRIAGE_COHORT"

LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    # (a batch script has SLURM_NTASKS as well, and is no task)
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
"""Rank, world size and local rank as Open MPI, other MPIs and SLURM say them; ``mpirun`` within SLURM goes first."""


def identified(
    schema: StageSchema,
    numbers: Mapping[str, int | None],
    texts: Mapping[str, str | None],
    environment: Mapping[str, str],
) -> RingInfo | None:
    """Who this process is, by the arguments and else by torchrun's environment; None if the environment is malformed.

    Raises:
        UsageError: an argument makes no sense.
    """
    for name, text in texts.items():
        if text is not None and not isinstance(text, str):
            raise UsageError(f"{name} {text!r}: a text")
    if "RANK" not in environment:  # (Lightning's own launcher sets the WORLD_SIZE alone)
        environment = {**_launched(environment), **environment, **_distributed()}
    try:
        found: dict[str, Any] = {
            name: _number(environment, variable, default) if given is None else given
            for (name, given), (variable, default) in zip(
                {**numbers, "attempt": None}.items(),
                (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("TORCHELASTIC_RESTART_COUNT", 0)),
                strict=True,
            )
        }
        job = environment.get(JOB_ENV) or environment.get("TORCHELASTIC_RUN_ID") or ""
        host = environment.get(HOST_ENV) or os.uname().nodename
        cohort = environment.get(COHORT_ENV) or ""
        return RingInfo(
            **found,
            job=bounded_text(job if texts["job"] is None else texts["job"]),
            host=bounded_text(host if texts["host"] is None else texts["host"]),
            cohort=bounded_text(cohort if texts["cohort"] is None else texts["cohort"]),
            schema=schema,
            started_mono_ns=monotonic_ns(),
            started_wall_ns=time_ns(),
            pid=os.getpid(),
            pid_start_ticks=start_ticks(os.getpid()) or 0,
        )
    except RingError as error:
        if any(value is not None for value in numbers.values()):
            raise UsageError(str(error)) from error
        warn("not recording: %s", error)
        return None


def _distributed() -> dict[str, str]:
    try:
        if (distributed := torch_distributed()) is not None:
            return {"RANK": str(distributed.get_rank()), "WORLD_SIZE": str(distributed.get_world_size())}
    except Exception as error:
        warn("torch.distributed does not say which rank this is: %r", error)
    return {}


def _launched(environment: Mapping[str, str]) -> dict[str, str]:
    for variables in LAUNCHERS:
        if all(name in environment for name in variables[:2]):
            pairs = zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), variables, strict=True)
            return {name: environment[variable] for name, variable in pairs if variable in environment}
    return {}


def _number(environment: Mapping[str, str], variable: str, default: int) -> int:
    text = environment.get(variable, str(default))
    # int() would also take "1_0" and " 1 ".
    if not (text.isascii() and text.isdecimal()):
        raise RingError(f"{variable}={text!r} is not a whole number")
    return int(text)
