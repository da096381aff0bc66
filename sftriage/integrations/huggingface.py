"""Hugging Face's Trainer: one callback.

::

    trainer.add_callback(SftriageCallback())

Steps have the numbers that the Trainer logs them with (``global_step``, from 1). Verdicts go to where its metrics go:
TensorBoard, Weights & Biases and MLflow, if ``report_to`` names them.
"""

from __future__ import annotations

import gc
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from sftriage.integrations.verdicts import Lead, active_runs
from sftriage.trainer.seams.steps import CHECKPOINT, EVALUATION


class SftriageCallback(TrainerCallback):  # type: ignore[misc]  # transformers leaves it untyped
    """Records the stages of every step of a Trainer, and with ``verdicts`` logs verdicts beside its metrics."""

    def __init__(self, *, verdicts: bool = True) -> None:
        self._verdicts = verdicts
        self._lead = Lead()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = self._verdicts and state.is_world_process_zero
        self._lead.begin([*_writers(), *active_runs()] if logs else ())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The Trainer has counted this step already.
        self._lead.ended(state.global_step + 1)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._lead.note(EVALUATION)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._lead.note(CHECKPOINT)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._lead.stop()


def _writers() -> list[Any]:
    """The TensorBoard writers of Trainers: a callback has no access to other callbacks."""
    callbacks = [found for found in gc.get_objects() if issubclass(type(found), TensorBoardCallback)]
    return [callback.tb_writer for callback in callbacks if callback.tb_writer is not None]
