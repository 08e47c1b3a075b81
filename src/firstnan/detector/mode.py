"""What a detector is doing."""

from __future__ import annotations

from enum import Enum, auto


class Mode(Enum):
    WATCHING = auto()
    WAITING = auto()
    """Tripped; when this step has been played to its end it is played again."""
    REPLAYING = auto()
    SEARCHING = auto()
    """Explained; played again with samples replaced, to see which of them are bad."""
    SKIPPING = auto()
    """Nothing of this step is written."""
