"""Accelerate: one line in your training loop.

::

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    record(accelerator)
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from sftriage.integrations.verdicts import Lead, VerdictLog


def record(accelerator: Any, *, first_step: int = 0, verdicts: bool = True) -> VerdictLog:
    """Record the stages of every step from now on, and log verdicts to the accelerator's trackers.

    A step ends when the optimizer has stepped; steps are numbered as the loop counts them.

    Args:
        accelerator: an `accelerate.Accelerator`, with its trackers (``init_trackers``), if any.
        first_step: the number of the loop's first step, if it resumes from a checkpoint.
        verdicts: whether to log verdicts.

    Returns:
        The log of verdicts. ``end_training`` closes it, and waits briefly for verdicts on the last steps.
    """
    trackers = accelerator.trackers if verdicts and accelerator.is_main_process else ()
    targets = [each.tracker for each in trackers if each.name in ("tensorboard", "wandb", "mlflow")]
    lead = Lead()
    lead.begin(targets, optimizers=True, first_step=first_step)
    end_training = accelerator.end_training

    @wraps(end_training)
    def ends(*args: Any, **kwargs: Any) -> Any:
        lead.stop()
        return end_training(*args, **kwargs)

    # (the trackers are closed there)
    accelerator.end_training = ends
    return lead.log
