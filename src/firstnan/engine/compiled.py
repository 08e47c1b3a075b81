"""A step that fails only if it is compiled: replays it both ways, and finds the operator that differs.

A replay is traced without the compiler. If it is finite, the compiler may be the reason, or anything else that differs
from one time to the next. So the step has to fail again as often as it is compiled, and to be finite without.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from firstnan.diagnose.rules import only_compiled
from firstnan.engine import isolation
from firstnan.engine.children import Answer, Answering, TurnReplay, heard
from firstnan.engine.loop_replay import StepFailure
from firstnan.engine.turn import Turn, with_batch_first
from firstnan.observe.compiler import compile_again, was_used
from firstnan.observe.patches import eager
from firstnan.observe.sites import site_on_line
from firstnan.records import Origin, Report, Site, Trace
from firstnan.repair import propose
from firstnan.tracing.compiled_graphs import GraphComparison, GraphDifference

if TYPE_CHECKING:
    from firstnan.engine.session import Session

HOW = "the step was run again compiled, which failed, and uncompiled, which was finite"
_MOST = 6
"""How many turns and calls are tried."""
_TIMES = 2
"""How often each outcome has to be the same."""
_NEWS = 5.0
_LONGEST = 180.0
"""How long the comparison of the graphs may take: they are compiled again."""

Outcome = Literal["failed", "finite", ""]
Way = tuple[Turn, int]
"""A turn or call, and how many of its statements to leave out."""


def with_compiler(session: Session, failure: StepFailure, answer: Answer) -> Answer:
    """The answer; if the step fails only compiled, with that as its cause. Asks children."""
    if answer.worth == 3 or failure.trip.noticed.what not in ("loss", "gradient") or not was_used():
        return answer
    for way in islice(_ways(session, failure), _MOST):
        if _outcome(session, failure, way, compiled=True) != "failed":
            continue
        again = [_outcome(session, failure, way, compiled=c) for _ in range(_TIMES) for c in (False, True)]
        if again == ["finite", "failed"] * _TIMES:
            found: GraphDifference | None = _asked(session, failure, way, _compare)
            return Answer(_told(session, failure, found), layers=answer.layers)
        break
    return answer


def _ways(session: Session, failure: StepFailure) -> Iterator[Way]:
    calls = [(call, 0) for call in with_batch_first(failure.calls, session.handouts.latest)]
    if session.handouts.is_ahead:
        yield from calls
    for turn in failure.turns[:1]:
        yield from ((turn, start) for start in turn.starts)
    if not session.handouts.is_ahead:
        yield from calls


def _outcome(session: Session, failure: StepFailure, way: Way, *, compiled: bool) -> Outcome:
    said: Any = _asked(session, failure, way, _run if compiled else _run_uncompiled)
    return said if said in ("failed", "finite") else ""


def _asked(session: Session, failure: StepFailure, way: Way, work: Any) -> Any:
    """What a child finds out with this turn; None if there was no answer."""
    child = isolation.fork()
    if child is None:
        return None
    if isinstance(child, isolation.Channel):
        policy = Answering(session.policy, child)
        session.continue_as_child(policy)
        turn, start = way
        try:
            work(session, policy, TurnReplay(session, failure, turn, start=start, traced=False))
        except Exception:
            if os.environ.get("FIRSTNAN_DEBUG"):
                raise
        policy.leave()
    return heard(child, session)


def _run(session: Session, policy: Answering, replay: TurnReplay) -> None:
    failed = replay.fails_again()
    policy.answer("failed" if failed else "finite" if replay.was_finite else "")


def _run_uncompiled(session: Session, policy: Answering, replay: TurnReplay) -> None:
    eager.ask()
    _run(session, policy, replay)


def _compare(session: Session, policy: Answering, replay: TurnReplay) -> None:
    """Compiles the step once more, and compares each graph with its operators."""

    def working() -> None:  # a compiler says nothing for a long time
        for _ in range(int(_LONGEST / _NEWS)):
            if over.wait(_NEWS):
                return
            policy.working(session)

    def found(difference: GraphDifference) -> None:
        over.set()
        policy.answer(difference)

    over = threading.Event()
    threading.Thread(target=working, daemon=True).start()
    comparison = GraphComparison(found)
    compile_again(comparison.forward, comparison.backward)
    replay.fails_again()


def _told(session: Session, failure: StepFailure, found: GraphDifference | None) -> Report:
    report, found = failure.report, found or GraphDifference()
    origin = _origin(session, found, report) if found.op else None
    cause = only_compiled(found.backend, origin, found.uncompiled, found.earlier, times=_TIMES + 1)
    remedies = propose(origin, Trace(), report.history, (cause,)) if origin is not None else ()
    return replace(report, origin=origin, cause=cause, remedies=remedies, reproduced="deterministic", replay=HOW)


def _origin(session: Session, found: GraphDifference, report: Report) -> Origin:
    return Origin(
        found.phase, found.op, found.aten, site=_site(session, found), module=found.module,
        module_type=found.module_type, inputs=found.read, produced=found.compiled, step=report.step or 0,
    )  # fmt: skip


def _site(session: Session, found: GraphDifference) -> Site | None:
    """The innermost line of the user's own code."""
    for file, line, function in reversed(found.frames):
        if session.microscope.ownership.owns_file(file):
            return site_on_line(file, line, function, found.op)
    return None
