"""What a program does about a bad loss by itself: its logs hide it, its loop drops it, or its update is left out."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from firstnan.engine import isolation
from firstnan.engine.children import Answering, messages
from firstnan.engine.handouts import Handouts
from firstnan.engine.policies import Policy
from firstnan.engine.ranks import world
from firstnan.gate.gate import Trip
from firstnan.tensors.finite import has_nan_or_positive_inf, is_finite
from firstnan.tensors.models import leaves_below
from firstnan.tensors.state import local_variables

if TYPE_CHECKING:
    from firstnan.engine.session import Session

_FILTER = "logging_nan_inf_filter"
_IN_THE_LOGS = (
    f"the Trainer's {_FILTER} is on: its logs show an average of earlier losses in place of a NaN or Inf loss"
)


def hidden_by(frame: FrameType | None) -> str:
    """What hides a bad loss, said in one sentence; empty if nothing is known to. No framework is imported.

    A Trainer of transformers is one of the objects whose methods are running. Only what objects hold is looked at: a
    property may do anything.
    """
    while frame is not None:
        arguments = _held(frame.f_locals.get("self")).get("args")
        if _held(arguments).get(_FILTER) is True:
            return _IN_THE_LOGS
        frame = frame.f_back
    return ""


def _held(value: Any) -> dict[str, Any]:
    try:
        return vars(value) if value is not None else {}
    except TypeError:  # it has no attributes of its own
        return {}


_MOST_READ = 1 << 20
"""Elements up to which another tensor than a loss is read."""
_MOST_FRAMES = 4


class UnusedLosses:
    """Looks at the variables of the functions that have called the model, each tensor once."""

    def __init__(self, owns: Callable[[CodeType], bool]) -> None:
        self._owns = owns
        self._seen: deque[weakref.ref[Tensor]] = deque(maxlen=64)

    def find(self, *places: FrameType | None, only_losses: bool = False) -> tuple[str, Tensor] | None:
        """The name and the value of a bad loss in these functions and their callers, or of what one is made of."""
        found = {id(value): (name, value) for frame in self._functions(places) for name, value in _computed(frame)}
        losses = [(name, value) for name, value in found.values() if value.numel() == 1]
        others = [(name, value) for name, value in found.values() if 1 < value.numel() <= _MOST_READ]
        for name, value in losses if only_losses else (*losses, *others):
            if any(ref() is value for ref in self._seen) or (only_losses and not value.is_cpu):
                continue
            self._seen.append(weakref.ref(value))
            # Before a softmax, -inf is a mask.
            if not is_finite(value) if value.numel() == 1 else has_nan_or_positive_inf(value):
                self._seen.extend(weakref.ref(value) for _, value in losses)  # told once
                return name, value
        return None

    def _functions(self, places: tuple[FrameType | None, ...]) -> list[FrameType]:
        found: dict[int, FrameType] = {}
        for place in places:
            frame, left = place, _MOST_FRAMES
            while frame is not None and left:
                if self._owns(frame.f_code):
                    found[id(frame)], left = frame, left - 1
                frame = frame.f_back
        return list(found.values())


def _computed(frame: FrameType) -> Iterator[tuple[str, Tensor]]:
    for name, value in local_variables(frame).items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            yield name, value


_PATIENCE = 4.0
"""Seconds for the rest of a step, and what the program does between two steps; more where its steps take long."""
MOST_BAD = 8
"""Bad losses in a row after which the program counts as failing: it may make no update any more."""


class GoesOn(Answering):
    """The policy of a child in which the program goes on after a bad loss, up to its next update.

    The answer is True if that update has finite gradients of another loss, and the loop has gone on to it. If the
    program ends first, there is none.
    """

    def __init__(self, policy: Policy, channel: isolation.Channel, optimizers: list[Any], handouts: Handouts) -> None:
        super().__init__(policy, channel)
        self._optimizers, self._bad, self._another = optimizers, 0, False
        self._iterator = handouts.iterator_of(handouts.latest) if handouts.latest is not None else None
        self._asked = handouts.requests(self._iterator)

    def before_backward(self, session: Session, roots: list[Tensor]) -> None:
        self._another = self._another or all(is_finite(root) for root in roots)

    def tripped(self, session: Session, trip: Trip) -> bool:
        self._bad += 1
        if trip.noticed.what != "loss" or self._bad >= MOST_BAD:
            self.answer(False)
        self.working(session)
        return False

    def step_ended(self, session: Session) -> None:
        last = session.gate.steps.last
        optimizer = last() if last is not None else None
        if any(optimizer is one for one in self._optimizers):
            self.answer(self._another and not self._has_left_loop(session.handouts))

    def _has_left_loop(self, handouts: Handouts) -> bool:
        """Whether the loop has not asked for the batch after the bad one: it was ended because of that."""
        return self._iterator is not None and handouts.requests(self._iterator) == self._asked


def leaves_out_update(session: Session, trip: Trip) -> bool:
    """Whether the program makes no update with this bad loss but goes on with others; True in the child too.

    A bad loss with finite gradients is never left out: nobody could tell its update from one without it.
    """
    if trip.noticed.what != "loss" or isolation.unavailable() or not world().is_alone or session.gate.scales:
        return False
    optimizers = [o for o in list(session.gate.steps.done) if session.gate.trains(trip.tensors, [o])]
    if not optimizers or session.gate.in_step is not None or session.gate.is_by_hand:
        return False
    child = isolation.fork()
    if not isinstance(child, isolation.Channel):
        return child is not None and True in messages(child, session, _PATIENCE)
    session.continue_as_child(GoesOn(session.policy, child, optimizers, session.handouts))
    try:
        bad = _has_bad_gradients(trip.tensors)
    except Exception:  # some graphs cannot be run backward twice
        bad = False
    if not bad:
        child.leave()
    return True


def _has_bad_gradients(losses: list[Tensor]) -> bool:
    leaves = [leaf for leaf in leaves_below(losses) if leaf.is_floating_point()]
    found = torch.autograd.grad([loss.sum() for loss in losses], leaves, allow_unused=True, retain_graph=True)
    return any(gradient is not None and not is_finite(gradient) for gradient in found)
