"""A session over a whole program: to find a failure, to try a change, or to replay a capsule."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Generic, TypeVar

from firstnan.capsule import Wanted
from firstnan.capsule.content import Capsule
from firstnan.capsule.training_objects import TrainingObjects
from firstnan.engine.capsule_replay import CapsuleReplay, from_the_start
from firstnan.engine.capsule_writer import CapsuleWriter
from firstnan.engine.handouts import Handouts
from firstnan.engine.policies import EndProgram
from firstnan.engine.program_values import ProgramValues
from firstnan.engine.restart import Restart
from firstnan.engine.session import Session
from firstnan.engine.trial_policy import Trial
from firstnan.gate.gate import Gate
from firstnan.observe.sites import Ownership
from firstnan.records import Noticed, Report
from firstnan.repair.verdict import TrialOutcome

P = TypeVar("P", bound=EndProgram)


class ProgramWatch(Generic[P]):
    """What `firstnan run` needs of a session."""

    def __init__(
        self,
        policy: P,
        ownership: Ownership,
        gate: Gate,
        *,
        trace_from: int | None = None,
        may_replay: bool = False,
        outputs_decide: bool = False,
        wanted: Wanted | None = None,
        restart: Restart | None = None,
    ) -> None:
        self.policy, handouts = policy, Handouts()
        self.capsules: CapsuleWriter | None = None
        if wanted is not None:
            self.capsules = CapsuleWriter(wanted, gate, handouts, lambda: _training_objects(gate))
        self.values = ProgramValues(ownership, outputs_decide=outputs_decide)
        self.session = Session(
            policy,
            ownership=ownership,
            gate=gate,
            handouts=handouts,
            values=self.values,
            capsules=self.capsules,
            restart=restart,
            trace_from=trace_from,
            through_loop=True,
            may_replay=may_replay,
            say=lambda text: print(text, file=sys.stderr),
        )
        self.values.watch(self.session)
        self.internal_error = self.session.internal_error

    @property
    def unresolved(self) -> bool:
        """The program has to be run again for the whole answer."""
        return self.policy.unresolved

    @property
    def bad_output(self) -> Noticed | None:
        return self.values.bad_output

    def program_failed(self, error: BaseException) -> None:
        self.values.program_failed(error)

    def end(self) -> Report:
        """The program is over: what was found, and torch is as it was."""
        try:
            return self.values.program_ended()
        except Exception as error:  # What was found so far is still to be told.
            self.internal_error(error)
            return self.session.report or Report("clean")
        finally:
            self.session.end()


def watch(
    ownership: Ownership,
    save: Callable[[Report], None],
    *,
    tracing: bool,
    trace_from: int | None,
    outputs_decide: bool,
    may_replay: bool,
    wanted: Wanted | None,
) -> ProgramWatch[EndProgram]:
    """Watches for a failure; `tracing` records every operator from the first line on, or from a step on."""
    found = ProgramWatch(
        EndProgram(save),
        ownership,
        Gate(thorough=tracing),
        trace_from=trace_from,
        may_replay=may_replay,
        outputs_decide=outputs_decide,
        wanted=wanted,
    )
    found.session.begin()
    if tracing:
        found.session.live.begin()
    return found


def watch_trial(
    ownership: Ownership,
    tell: Callable[[TrialOutcome], None],
    *,
    step: int,
    last: int,
    made: tuple[str, int] | None,
) -> ProgramWatch[Trial]:
    """Watches a changed program: every parameter after every update, until some steps past the failing one."""
    gate = Gate(thorough=True)
    found = ProgramWatch(Trial(gate, ownership, step=step, last=last, tell=tell, made=made), ownership, gate)
    found.policy.watch(found.session)
    found.session.begin()
    return found


def watch_capsule(
    ownership: Ownership, save: Callable[[Report], None], capsule: Capsule
) -> ProgramWatch[CapsuleReplay]:
    """Watches a program whose first step is to be a captured one."""
    gate = Gate(thorough=from_the_start(capsule))
    restart = Restart(capsule, gate, lambda: _training_objects(gate), lambda: found.session.restored())
    first = from_the_start(capsule)
    found = ProgramWatch(CapsuleReplay(restart, save), ownership, gate, restart=None if first else restart)
    found.session.begin()
    if first:
        found.session.live.begin()
    return found


def _training_objects(gate: Gate) -> TrainingObjects:
    return TrainingObjects.find(list(gate.steps.done), leaves=gate.leaves)
