"""What a detector is doing."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final


class Mode(Enum):
    WATCHING = auto()
    WAITING = auto()
    """Tripped; when this step has been played to its end it is played again."""
    REPLAYING = auto()
    SEARCHING = auto()
    """Explained; played again with samples replaced, to see which of them are bad."""
    SKIPPING = auto()
    """Nothing of this step is written."""


# To get at a member of a class takes ten times as long as a name of a module, and a step asks often.
WATCHING: Final = Mode.WATCHING
WAITING: Final = Mode.WAITING
REPLAYING: Final = Mode.REPLAYING
SEARCHING: Final = Mode.SEARCHING
SKIPPING: Final = Mode.SKIPPING
