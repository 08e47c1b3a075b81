"""`FirstNaN`, a callback for the nets of skorch."""

from __future__ import annotations

from typing import Any

from firstnan.integrations.callback import TrainingCallback


class FirstNaN(TrainingCallback):
    """Finds and explains the first NaN or Inf of `net.fit`.

        net = NeuralNetClassifier(Module, callbacks=[FirstNaN()])

    The options are those of NaNDetector. With `on_nonfinite="raise"` (the default) `fit` ends with NonFiniteError,
    before the bad update.
    """

    frameworks = ("skorch.callbacks",)
    base = "Callback"

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:  # noqa: N803 - skorch's name
        self.begin(net.module_, net.optimizer_).session.when_stopped(self.abandon)

    def on_epoch_begin(self, net: Any, **kwargs: Any) -> None:
        self.epoch_begins(len(net.history) - 1)

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:  # noqa: N803 - skorch's name
        self.end()
