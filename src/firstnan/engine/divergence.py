"""The report of a training that diverged without a non-finite value."""

from __future__ import annotations

from time import time

from firstnan.diagnose.rules import divergence
from firstnan.engine.conclude import environment
from firstnan.gate.growth_guard import Alarm
from firstnan.records import History, NaNEvent, Noticed, Origin, Report, StepRecord, Trace
from firstnan.repair import propose


def diverged(alarm: Alarm, history: History, last: StepRecord) -> Report:
    """The report of a training that diverged and stayed finite: the steps around the explosion, and the `last` one."""
    assert alarm.since is not None
    site = history.made_at or history.stepped_at or history.rate_set_at
    origin = Origin("optimizer", "", "", site=site, step=alarm.since)
    cause = divergence(history, alarm.since, alarm.before, str(alarm.weights or ""), last)
    return Report(
        "diverged",
        alarm.since,
        origin=origin,
        cause=cause,
        remedies=propose(origin, Trace(), history, [cause]),
        noticed=Noticed("loss"),
        events=(event_of(alarm),),
        history=history,
        environment=environment(),
    )


def event_of(alarm: Alarm) -> NaNEvent:
    return NaNEvent("explosion", alarm.text, alarm.step, grad_norm=alarm.norm, time=time())
