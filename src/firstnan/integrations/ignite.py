"""`FirstNaN`, a handler for an ignite engine that trains."""

from __future__ import annotations

import sys
from typing import Any

from torch.nn import Module

from firstnan.integrations.callback import TrainingCallback


class FirstNaN(TrainingCallback):
    """Finds and explains the first NaN or Inf of an engine's training.

        FirstNaN(model, optimizer).attach(trainer)

    The options are those of NaNDetector. With `on_nonfinite="raise"` (the default) `trainer.run` ends with
    NonFiniteError, before the bad update.
    """

    def __init__(self, model: Module, optimizer: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self._model, self._optimizer = model, optimizer

    def attach(self, engine: Any) -> None:
        events = sys.modules["ignite.engine"].Events
        engine.add_event_handler(events.STARTED, self._started)
        engine.add_event_handler(events.EPOCH_STARTED, self._epoch_started)
        engine.add_event_handler(events.COMPLETED, self._completed)

    def _started(self, engine: Any) -> None:
        # With a handler for exceptions, the engine would no longer raise them.
        self.begin(self._model, self._optimizer).session.when_stopped(self.abandon)

    def _epoch_started(self, engine: Any) -> None:
        self.epoch_begins(engine.state.epoch - 1)

    def _completed(self, engine: Any) -> None:
        self.end()
