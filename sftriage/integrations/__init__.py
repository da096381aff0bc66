"""sftriage beside what people train with and look at: a line for each framework, and one for each experiment tracker.

::

    trainer.add_callback(sftriage.integrations.huggingface.SftriageCallback())  # Hugging Face's Trainer
    Trainer(callbacks=[sftriage.integrations.lightning.SftriageCallback()])  # Lightning
    sftriage.integrations.accelerate.record(accelerator)  # Accelerate
    sftriage.integrations.log_verdicts(writer)  # a SummaryWriter of TensorBoard, a run of Weights & Biases or of MLflow

All of it is inert where the job does not run under ``sftriage run``. A framework is imported by its own module alone.
"""

from __future__ import annotations

from sftriage.integrations.verdicts import VerdictLog, log_verdicts

__all__ = ["VerdictLog", "log_verdicts"]
