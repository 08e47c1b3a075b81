"""`FirstNaN`, a callback for the Trainer of Lightning (`lightning` and `pytorch_lightning`)."""

from __future__ import annotations

import contextlib
from typing import Any

from firstnan.integrations.callback import TrainingCallback
from firstnan.records import NaNEvent
from firstnan.report import nonfinite_error


class FirstNaN(TrainingCallback):
    """Finds and explains the first NaN or Inf of `trainer.fit`.

        trainer = Trainer(callbacks=[FirstNaN()])

    The options are those of NaNDetector. With `on_nonfinite="raise"` (the default) `fit` ends with NonFiniteError,
    before the bad update. What is noticed goes to the trainer's loggers too.
    """

    frameworks = ("lightning.pytorch", "pytorch_lightning")
    base = "Callback"

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.prepare(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._trainer = trainer
        self.begin(pl_module, list(trainer.optimizers), on_event=self._log)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epoch_begins(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batch_begins(batch_idx)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        report = self.report
        self.end(exception)
        if self.report is not None and (self.report is not report or report is not None):
            self._log_text(str(nonfinite_error(self.report)))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.abandon()

    def _log(self, event: NaNEvent) -> None:
        counts = self.detector.summary() if self.detector is not None else {}
        names = ("nonfinite", "skipped", "rolled_back", "clipped", "warnings")
        numbers = {f"firstnan/{name}": float(counts[name]) for name in names if counts.get(name)}
        for logger in self._trainer.loggers if numbers else ():
            logger.log_metrics(numbers, step=self._trainer.global_step)

    def _log_text(self, text: str) -> None:
        for logger in self._trainer.loggers:
            with contextlib.suppress(Exception):  # a logger without a place for text, or one that is closed
                logger.experiment.add_text("firstnan", f"```\n{text}\n```", self._trainer.global_step)
