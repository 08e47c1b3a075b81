"""The cause of a failure that a replay did not reproduce."""

from __future__ import annotations

from firstnan.diagnose.causes import catalogue
from firstnan.records import Cause

_MACHINE = "faulty hardware, a race, uninitialised memory, or a non-deterministic kernel"
_PROGRAM = "a counter, a cache, its own random generator, the clock, or files"


def transient(replay: str, difference: str = "", *, programs_own: bool | None = None) -> Cause:
    """The cause if `replay` (in words) gave another result; `difference` is the first operator that differed.

    `programs_own` says whether the program itself did something else (True) or got another result for the same (False).
    """
    if programs_own is None:
        rest = f"Possible reasons are {_MACHINE}, or other program state such as a counter or a cache."
    elif programs_own:
        rest = f"So the step depends on other program state, such as {_PROGRAM}."
    else:
        rest = f"The program did the same, so the reason is {_MACHINE}."
    evidence = (f"the first difference: {difference}",) if difference else ()
    entry = catalogue()["transient"]
    return Cause(entry.slug, entry.title, f"{replay}. {rest}", evidence, 0.6 if difference else 0.5, entry.link)
