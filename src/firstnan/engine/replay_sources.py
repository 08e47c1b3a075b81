"""Replays that need no loop: the update alone, or the model's last calls, made again on the spot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from firstnan.diagnose.rules import from_history
from firstnan.engine.microscope import Microscope
from firstnan.engine.model_calls import Call, ModelCalls
from firstnan.engine.recovery import Recovery
from firstnan.gate.gate import Trip
from firstnan.observe.hooks import Hooks
from firstnan.records import Noticed, Report

_OUTSIDE = "the loss code was outside what could be replayed"
_ADVICE = ": take batches from detector.batches(loader), or run the step with detector.step(function), to include it"
_IN_THE_LOSS = "the model's calls were finite when replayed, so the value originated after them, in the loss code"
_FORWARD = "the model's calls were finite when replayed; the gradients that reached them in backward were not kept"
_GIVEN = "the gradient reaching the model's output was already non-finite, so it originated in the loss code"


class ReplaySource(Protocol):
    """A way to have the failing step, or a part of it, again at once; the first that can is used."""

    def can(self, trip: Trip) -> bool: ...

    def replay(self, report: Report, trip: Trip) -> Report:
        """The report with as much more as this replay shows."""
        ...


@dataclass(frozen=True)
class UpdateReplay:
    """The update that made bad parameters out of good gradients: undone, and made again under the tracer."""

    microscope: Microscope
    recovery: Recovery
    hooks: Hooks

    def can(self, trip: Trip) -> bool:
        last = self.microscope.gate.steps.last
        updated = not trip.before_update and trip.noticed.what == "parameter"
        return updated and self.recovery.backup is not None and last is not None and last() is not None

    def replay(self, report: Report, trip: Trip) -> Report:
        last = self.microscope.gate.steps.last
        optimizer = last() if last is not None else None
        assert optimizer is not None
        self.recovery.undo_update()
        tracer = self.microscope.start(in_step=True)
        tracer.in_optimizer, tracer.step = True, report.step or 0
        with self.hooks.muted():
            optimizer.step()
        parameters = [p for p, _ in self.recovery.models.parameters.values()]
        found = self.microscope.conclude(trip.noticed, parameters, [], "the update was replayed")
        return _placed(found, report) if found is not None else report


@dataclass(frozen=True)
class CallReplay:
    """The model's last calls, without the loss code; `advises` where the loop could be written so that all is seen."""

    microscope: Microscope
    calls: ModelCalls
    advises: Callable[[], bool]

    def can(self, trip: Trip) -> bool:
        return bool(self.calls.mine())

    def replay(self, report: Report, trip: Trip) -> Report:
        calls, given = self.calls.mine(), False
        outside = _OUTSIDE + _ADVICE if self.advises() else _OUTSIDE
        for call in reversed(calls):
            outcome = self.calls.make_again(call, self.microscope)
            given = given or outcome.bad_gradient_given
            # Where the gradient that came in was bad already, everything after it is.
            found = None
            if outcome.bad and not given:
                found = self.microscope.conclude(trip.noticed, outcome.bad, [], "the model's last call was replayed")
            if found is not None:
                notes = (*found.notes, outside)
                return replace(_placed(found, report), batch=report.batch or found.batch, notes=notes)
        text = _GIVEN if given else self._why_finite(trip.noticed, calls)
        return replace(report, cause=from_history(report.history), notes=(*report.notes, text, outside))

    def _why_finite(self, noticed: Noticed, calls: list[Call]) -> str:
        unseen = noticed.what == "gradient" and not any(call.gradients for call in calls)
        return _FORWARD if unseen else _IN_THE_LOSS


def _placed(found: Report, first: Report) -> Report:
    """What was found, in the step and batch in which it was noticed first."""
    return replace(found, step=first.step, batch=first.batch, noticed=first.noticed, history=first.history)
