"""What a session is doing, and what may follow."""

from __future__ import annotations

from enum import Enum
from typing import Final


class Phase(Enum):
    WATCHING = "every step passes the gate"
    TRIPPED = "something is not finite; the step is replayed when the loop asks for its next batch"
    REPLAYING = "the failing step runs again, traced"
    COMPARING = "the replay was finite; the step is traced once more, to compare the two"
    SEARCHING = "explained; the step runs again with samples replaced, to see which of them are bad"
    SETTLED = "all is known that will be; nothing of this step is written"


# Looking up a member of a class takes ten times as long as a name of a module, and every step asks.
WATCHING: Final = Phase.WATCHING
TRIPPED: Final = Phase.TRIPPED
REPLAYING: Final = Phase.REPLAYING
COMPARING: Final = Phase.COMPARING
SEARCHING: Final = Phase.SEARCHING
SETTLED: Final = Phase.SETTLED

REPLAYS: Final = frozenset({REPLAYING, COMPARING, SEARCHING})
"""The program's own loop runs a step again."""

TRANSITIONS: Final[dict[Phase, frozenset[Phase]]] = {
    WATCHING: frozenset({TRIPPED, SEARCHING, SETTLED}),
    TRIPPED: frozenset({REPLAYING, SETTLED}),
    REPLAYING: frozenset({COMPARING, SEARCHING, SETTLED}),
    COMPARING: frozenset({SETTLED}),
    SEARCHING: frozenset({COMPARING, SETTLED}),
    SETTLED: frozenset({WATCHING}),
}
