"""What can be said of a value that a replay did not show again."""

from __future__ import annotations

from firstnan.diagnose.causes import link_to
from firstnan.records import Cause

_MACHINE = (
    "What is left is faulty hardware, a race, memory that was never written, or a kernel that is not deterministic."
)
_PROGRAM = (
    "So it depends on something that the program keeps besides: a counter, a cache, a generator of its own, the clock, "
    "files."
)
_EITHER = (
    "It may be faulty hardware, a race, memory that was never written, a kernel that is not deterministic, or what "
    "the program keeps besides: a counter, a cache, a generator of its own."
)


def transient(replay: str, difference: str = "", *, programs_own: bool | None = None) -> Cause:
    """The cause where `replay` (in words) came out otherwise; `difference` is the first operator that differed."""
    rest = _EITHER if programs_own is None else _PROGRAM if programs_own else _MACHINE
    evidence = (f"the first difference: {difference}",) if difference else ()
    title = "Not the same when the step is played again"
    return Cause("transient", title, f"{replay}. {rest}", evidence, 0.6 if difference else 0.5, link_to("transient"))
