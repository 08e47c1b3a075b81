"""`FirstNaN`, a callback for the Learner of fastai."""

from __future__ import annotations

from typing import Any

from firstnan.integrations.callback import TrainingCallback


class FirstNaN(TrainingCallback):
    """Finds and explains the first NaN or Inf of `learn.fit`.

        learn = Learner(dls, model, cbs=[FirstNaN()])

    The options are those of NaNDetector. fastai has optimizers of its own, which cannot be held back, so only
    `on_nonfinite="raise"` (the default) and "warn" are possible, unless the Learner uses one of torch's.
    """

    frameworks = ("fastai.callback.core",)
    base = "Callback"
    order = 1000
    """After fastai's own callbacks."""

    def before_fit(self) -> None:
        learn: Any = self.learn  # type: ignore[attr-defined]  # fastai sets it
        # fastai's wrapper of an optimizer of torch holds it as `opt`.
        self.begin(learn.model, getattr(learn.opt, "opt", None)).session.when_stopped(self.abandon)

    def after_fit(self) -> None:
        self.end()

    def after_cancel_fit(self) -> None:
        self.abandon()
