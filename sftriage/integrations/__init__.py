"""Integrations: one line for each training framework, and one for each experiment tracker.

::

    trainer.add_callback(sftriage.integrations.huggingface.SftriageCallback())  # Hugging Face's Trainer
    Trainer(callbacks=[sftriage.integrations.lightning.SftriageCallback()])  # Lightning
    sftriage.integrations.accelerate.record(accelerator)  # Accelerate
    sftriage.integrations.log_verdicts(writer)  # a SummaryWriter of TensorBoard, a run of Weights & Biases or of MLflow

They do nothing unless the job runs under ``sftriage run``. Only the module of a framework imports it.
"""

from __future__ import annotations

from sftriage.integrations.verdicts import VerdictLog, log_verdicts

__all__ = ["VerdictLog", "log_verdicts"]
