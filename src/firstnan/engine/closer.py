"""A closer look where the loop itself cannot be played again: the model's last calls, or the update alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from firstnan.diagnose.rules import from_history
from firstnan.engine.microscope import Microscope
from firstnan.engine.model_calls import Call, LastCalls
from firstnan.engine.recovery import Recovery
from firstnan.observe.training_hooks import TrainingHooks
from firstnan.records import Noticed, Report

_OUTSIDE = "the loss code was outside what could be replayed"
_ADVICE = (
    ": hand out batches with detector.batches(loader), or make the step with detector.step(function), to see it too"
)
_IN_THE_LOSS = "the model's calls are finite when they are made again: the value was born after them, in the loss code"
_FORWARD = "the model's calls are finite when they are made again; what came back to them in backward was not kept"
_GIVEN = "the gradient that came back to the model's output was not finite already: it was born in the loss code"


@dataclass(frozen=True)
class Closer:
    microscope: Microscope
    last_calls: LastCalls
    recovery: Recovery
    hooks: TrainingHooks

    def look(self, report: Report, noticed: Noticed, *, before_update: bool, advise: bool) -> Report:
        """The report with as much more as this can show; `advise` where the loop could be written so that all is."""
        try:
            if not before_update and noticed.what == "parameter" and self.recovery.undo_update():
                return self._update_again(report, noticed)
            calls = self.last_calls.mine()
            outside = _OUTSIDE + _ADVICE if advise else _OUTSIDE
            return self._calls_again(calls, report, noticed, outside) if calls else report
        finally:
            self.microscope.stop()

    def _calls_again(self, calls: list[Call], report: Report, noticed: Noticed, outside: str) -> Report:
        given = False
        for call in reversed(calls):
            outcome = self.last_calls.make_again(call, self.microscope)
            given = given or outcome.bad_gradient_given
            # Where the gradient that came in was bad already, everything behind it is.
            found = None
            if outcome.bad and not given:
                found = self.microscope.conclude(noticed, outcome.bad, [], "the model's last call was made again")
            if found is not None:
                notes = (*found.notes, outside)
                return replace(_placed(found, report), batch=report.batch or found.batch, notes=notes)
        unseen = noticed.what == "gradient" and not any(call.gradients for call in calls)
        text = _GIVEN if given else _FORWARD if unseen else _IN_THE_LOSS
        return replace(report, cause=from_history(report.history), notes=(*report.notes, text, outside))

    def _update_again(self, report: Report, noticed: Noticed) -> Report:
        """The weights are those of before, the gradients still there: the update is made again, under the tracer."""
        steps = self.microscope.gate.steps
        optimizer = steps.last() if steps.last is not None else None
        if optimizer is None:
            return report
        tracer = self.microscope.start(in_step=True)
        tracer.in_optimizer, tracer.step = True, report.step or 0
        with self.hooks.muted():
            optimizer.step()
        parameters = [p for p, _ in self.recovery.models.parameters.values()]
        found = self.microscope.conclude(noticed, parameters, [], "the update was made again")
        return _placed(found, report) if found is not None else report


def _placed(found: Report, first: Report) -> Report:
    """What was found, in the step and batch in which it was noticed first."""
    return replace(found, step=first.step, batch=first.batch, noticed=first.noticed, history=first.history)
