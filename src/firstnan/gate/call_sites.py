"""Where the program creates and steps its optimizers and calls backward; recorded the first time only."""

from __future__ import annotations

from types import FrameType
from typing import Any

from firstnan.observe.sites import Ownership, Spot, resolve
from firstnan.records import Site

_DEEPEST = 64
Chain = tuple[Spot, ...]
"""The callers at that moment, innermost first. Which of them are the user's code is decided for the report."""


class CallSites:
    """Remembers callers as code positions, not frames, so no object of the program is kept alive."""

    def __init__(self) -> None:
        self.backward: Chain = ()
        self._made: dict[int, Chain] = {}
        self._stepped: dict[int, Chain] = {}

    def made(self, optimizer: Any, frame: FrameType | None) -> None:
        """Records the caller of an optimizer's constructor, skipping the constructors of its base classes."""
        while frame is not None and _constructs(frame, optimizer):
            frame = frame.f_back
        self._made[id(optimizer)] = _chain(frame)
        self._stepped.pop(id(optimizer), None)  # a deleted optimizer may have had this id

    def knows_step_of(self, optimizer: Any) -> bool:
        return id(optimizer) in self._stepped

    def stepped(self, optimizer: Any, frame: FrameType | None) -> None:
        self._stepped[id(optimizer)] = _chain(frame)

    def called_backward(self, frame: FrameType | None) -> None:
        self.backward = _chain(frame)

    def of(self, optimizer: Any, ownership: Ownership) -> tuple[Site | None, Site | None, Site | None]:
        """Where the user's code creates this optimizer, steps it, and calls backward."""
        chains = (self._made.get(id(optimizer), ()), self._stepped.get(id(optimizer), ()), self.backward)
        made, stepped, backward = (next((s for s in c if ownership.owns(s[0])), None) for c in chains)
        return made and resolve(made), stepped and resolve(stepped), backward and resolve(backward)


def _chain(frame: FrameType | None) -> Chain:
    found: list[Spot] = []
    while frame is not None and len(found) < _DEEPEST:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _constructs(frame: FrameType, optimizer: Any) -> bool:
    code = frame.f_code
    return code.co_argcount > 0 and frame.f_locals.get(code.co_varnames[0]) is optimizer
