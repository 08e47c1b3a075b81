"""Searches for bad samples where the failing step can be had again only as a turn of its loop, or a function's call.

Each question is a forked child that runs the turn with other samples in the batch. So whatever a framework counts in a
turn is the same in each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from firstnan.engine import isolation
from firstnan.engine.children import Answer, Answering, TurnReplay, heard
from firstnan.engine.loop_replay import StepFailure
from firstnan.engine.parts_replay import PartsReplay
from firstnan.engine.samples.search import ENDED, SampleSearch, begin_search
from firstnan.engine.turn import Turn, holds_batch, with_batch_first

if TYPE_CHECKING:
    from firstnan.engine.session import Session

_MOST = 4
"""How many turns and calls are tried."""


def with_samples(session: Session, failure: StepFailure, answer: Answer) -> Answer:
    """The answer, with the samples that are responsible if they can be found this way."""
    report, latest = answer.report, session.handouts.latest
    searched = report.batch is not None and report.batch.replays and not report.batch.note.startswith(ENDED)
    if answer.worth < 3 or searched or latest is None or not session.policy.searches:
        return answer
    if not answer.before_update and answer.part is None:
        return answer
    for turn in islice(_candidates(session, failure), _MOST):
        search = begin_search(report, session.handouts, in_children=True)
        if search is None:
            break
        while search.goes_on():
            _ask(session, failure, turn, search)
        if search.finding is not None and search.finding.repeated:
            return replace(answer, report=search.told_in(report))
    return answer


def _candidates(session: Session, failure: StepFailure) -> Iterator[Turn]:
    """Whole turns and calls only: what is left out at a later start may be the program's own check of its batch."""
    latest = session.handouts.latest
    assert latest is not None
    for call in with_batch_first(failure.calls, latest):
        if holds_batch(call, latest):
            yield call
    for turn in failure.turns[:1]:
        held = holds_batch(turn, latest)
        # A body that begins without the batch may ask its loader for it.
        if held or (held is not None and not session.handouts.is_ahead):
            yield turn


def _ask(session: Session, failure: StepFailure, turn: Turn, search: SampleSearch) -> None:
    """Runs the turn with the samples that the search asks for, and tells it what came of that."""
    first, child = session.handouts.latest_first()[0], isolation.fork()
    if child is None:
        search.left_by(OSError("no process could be forked"))
        return
    if isinstance(child, isolation.Channel):
        policy = Answering(session.policy, child)
        session.continue_as_child(policy)
        replay: TurnReplay = TurnReplay(session, failure, turn, traced=False, batch=search.batch(first))
        if session.handouts.part is not None:
            replay = PartsReplay(session, failure, turn, batch=search.batch(first))
        failed = replay.fails_again()
        error = replay.error
        numbers = replay.failed_by(error)
        wrong = isinstance(error, Exception) and not numbers
        policy.answer((failed or numbers, repr(error) if wrong else ""))
    said: Any = heard(child, session)
    if said is None or said[1]:
        search.left_by(RuntimeError(said[1] if said else "it did not end"))
    elif said[0]:
        search.failed()
    else:
        search.passed()
