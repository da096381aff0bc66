"""Lightning: one callback, for ``lightning`` and ``pytorch_lightning``.

::

    trainer = Trainer(callbacks=[SftriageCallback()])

Steps have the numbers that Lightning logs them with (from 0). Verdicts go to the Trainer's loggers of TensorBoard,
Weights & Biases and MLflow.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from sftriage.integrations.verdicts import Lead
from sftriage.trainer.seams.steps import CHECKPOINT, EVALUATION

if TYPE_CHECKING:
    Callback = object
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        from pytorch_lightning import Callback


class SftriageCallback(Callback):
    """Records the stages of every step of a Trainer, and with ``verdicts`` logs verdicts beside its metrics."""

    def __init__(self, *, verdicts: bool = True) -> None:
        self._verdicts = verdicts
        self._lead = Lead()
        self._stepped = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # After the sanity check, before the first training step.
        logs = self._verdicts and trainer.is_global_zero
        self._lead.begin([_tracked(logger) for logger in trainer.loggers] if logs else ())
        self._stepped = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        # A step ends when an optimizer has stepped; before that, gradients are accumulated.
        if trainer.global_step != self._stepped:
            self._stepped = trainer.global_step
            # With several optimizers, Lightning counts a step for each, and logs by batches that stepped.
            epoch = getattr(trainer.fit_loop, "epoch_loop", None)
            logged = getattr(epoch, "_batches_that_stepped", None)
            self._lead.ended(self._stepped if logged is None else logged + 1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._lead.note(EVALUATION)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._lead.note(CHECKPOINT)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._lead.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._lead.stop()


def _tracked(logger: Any) -> Any:
    from sftriage.integrations.trackers import MLflow  # (only if something is logged)

    match type(logger).__name__:
        case "MLFlowLogger":
            return MLflow(logger.experiment, logger.run_id)
        case "TensorBoardLogger" | "WandbLogger":
            return logger.experiment
    return None
