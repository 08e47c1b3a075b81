"""The turns of a step that accumulates the gradients of several batches, where the batches come from no loader.

When the update comes, the variables hold the last batch only. A single process is then run again; one of several ranks
cannot be, so there the variables of each turn are kept until the update, as references.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from firstnan.engine.children import Answer, Answering
from firstnan.engine.conclude import came_from_another_rank
from firstnan.engine.loop_replay import StepFailure
from firstnan.engine.parts_replay import HOW, PartsReplay
from firstnan.engine.policies import REPLAYING, TRIPPED, WATCHING
from firstnan.engine.turn import LeftLoop, Turn, data_in, is_left_out, same_values, turn_at
from firstnan.records import Noticed
from firstnan.tensors.state import tensor_versions

if TYPE_CHECKING:
    from firstnan.engine.session import Session

_MOST_FRAMES = 3
_MOST_TURNS = 64
_MOST_BYTES = 1 << 28
_MOST_STARTS = 12


class _Kept(NamedTuple):
    """A function as it was when it, or what it has called, called backward."""

    code: CodeType
    line: int
    names: dict[str, Any]
    versions: list[int]
    variables: dict[str, Any]
    """Those of its module."""


class KeptTurns:
    """The turns of the step so far, each with the functions that were running, the innermost first."""

    def __init__(self) -> None:
        self.is_on: bool | None = None
        """None until a step has accumulated gradients."""
        self._turns: list[list[_Kept]] = []
        self._sizes: dict[int, int] = {}
        """The bytes of each tensor that is kept, once each."""

    def backward_begins(self, frame: FrameType | None) -> None:
        kept: list[_Kept] = []
        while frame is not None and len(kept) < _MOST_FRAMES:
            if not _is_left_out(frame.f_code):
                # What has a graph is computed again, and its memory would be kept.
                names = {n: v for n, v in frame.f_locals.items() if not isinstance(v, Tensor) or v.grad_fn is None}
                kept.append(_Kept(frame.f_code, frame.f_lineno, names, tensor_versions(names), frame.f_globals))
                self._sizes.update((id(v), v.nbytes) for v in names.values() if isinstance(v, Tensor))
            frame = frame.f_back
        self._turns.append(kept)
        if len(self._turns) > _MOST_TURNS or sum(self._sizes.values()) > _MOST_BYTES:
            self.is_on = False
            self.end()

    def end(self) -> None:
        """The step is over."""
        self._turns, self._sizes = [], {}

    def ways(self, session: Session, failure: StepFailure) -> Iterator[KeptReplay]:
        """Replays of these turns, from earlier and later statements; none if one of the turns is not known."""
        count = session.backwards.since_update
        if not 1 < count == len(self._turns) or any(
            tensor_versions(k.names) != k.versions for t in self._turns for k in t
        ):
            return
        for depth in range(min(map(len, self._turns))):
            frames = [turn[depth] for turn in self._turns]
            if len({(one.code, one.line) for one in frames}) > 1:
                continue
            one = frames[0]
            turn = turn_at(one.code, one.line, one.variables, {**one.variables, **one.names})
            for start in islice(turn.starts, _MOST_STARTS) if turn is not None else ():
                assert turn is not None
                yield KeptReplay(session, failure, turn, start, [kept.names for kept in frames])


class KeptReplay(PartsReplay):
    """Runs each turn of the step again with its variables, until the gradients are bad."""

    def __init__(
        self, session: Session, failure: StepFailure, turn: Turn, start: int, kept: list[dict[str, Any]]
    ) -> None:
        super().__init__(session, failure, turn, start=start)
        self._kept = kept
        self._is_other = False
        """Whether a turn has fetched another batch."""

    def _run(self) -> None:
        session, turn, policy = self._session, self._turn, self._session.policy
        assert isinstance(policy, Answering)
        code = turn.compiled(start=self._start)
        if code is None:
            return
        session.turn_replayed_by(self)
        for phase in (WATCHING, TRIPPED, REPLAYING):
            session.enter(phase)
        names, draws = dict(turn.names), False
        for number, kept in enumerate(self._kept):
            self._number = number
            policy.working(session)
            turn.names.update({**names, **kept})
            self._restore()
            self.begin_trace(None)
            before = session.handouts.random_now()
            try:
                turn.run(code)
                return  # it came to no backward call
            except LeftLoop:
                pass
            except BaseException as error:
                self.error = error
                return
            session.microscope.stop()
            if self._is_other:
                return
            draws = draws or before != session.handouts.random_now()
            if self._explained is not None:
                known = self._explained
                policy.answer(replace(known, report=known.report.with_other_numbers()) if draws else known)
        if not draws:
            policy.answer(Answer(came_from_another_rank(self.failure.report), self.failure.trip.before_update))

    def backward_ended(self, bad: list[Tensor]) -> None:
        """The backward call of the turn is over."""
        session, failure = self._session, self.failure
        with session.microscope.unseen():
            given = {
                name: value for name, value in self._kept[self._number].items() if any(True for _ in data_in(value))
            }
            if not all(same_values(value, self._turn.names.get(name)) for name, value in given.items()):
                self._is_other = True
                raise LeftLoop
        report = session.microscope.conclude(Noticed("gradient"), bad, [], HOW.format(len(self._kept))) if bad else None
        if report is not None:
            before = failure.trip.before_update
            self._explained = Answer(report, before, True, session.layers_seen(), None)
        raise LeftLoop


@cache
def _is_left_out(code: CodeType) -> bool:
    return is_left_out(code)
