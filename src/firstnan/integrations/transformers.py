"""`FirstNaNCallback` for the Trainer of transformers, and for those of TRL that are made of it."""

from __future__ import annotations

from typing import Any

from firstnan.integrations.callback import TrainingCallback


class FirstNaNCallback(TrainingCallback):
    """Finds and explains the first NaN or Inf of a Trainer.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[FirstNaNCallback()])

    The options are those of NaNDetector. With `on_nonfinite="raise"` (the default) `trainer.train()` raises
    NonFiniteError, before the bad update.
    """

    frameworks = ("transformers",)
    base = "TrainerCallback"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        session = self.begin(kwargs["model"], kwargs["optimizer"]).session
        session.when_stopped(self.abandon)  # `on_train_end` does not come after an error

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epoch_begins(int(state.epoch or 0))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end()
