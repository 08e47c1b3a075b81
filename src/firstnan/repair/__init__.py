"""From a cause to edits of the user's source, the most promising first; nothing is tried here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from types import ModuleType

from firstnan.diagnose.rules.base import Failure
from firstnan.records import Cause, History, Origin, Remedy, Trace
from firstnan.repair import (
    data,
    derivatives,
    domain,
    library,
    linalg,
    masks,
    parameters,
    precision,
    reductions,
    schedules,
    settings,
    stable,
)
from firstnan.repair.advice import advice
from firstnan.repair.context import PROPOSERS, FailureContext, SourceFiles
from firstnan.repair.source import as_patch

__all__ = ["propose"]

FAMILIES: tuple[ModuleType, ...] = (
    stable,
    masks,
    reductions,
    linalg,
    derivatives,
    library,
    schedules,
    settings,
    parameters,
    precision,
    domain,
    data,
)
"""Imported for the candidates they register; for one cause, those of the family named first come first."""
ORDER = [family.__name__ for family in FAMILIES]

MOST = 8
MOST_PER_CAUSE = 6


def propose(origin: Origin, trace: Trace, history: History, causes: Sequence[Cause]) -> tuple[Remedy, ...]:
    """Candidates for the causes that were found, without repetition, those of the likeliest cause first."""
    failure, files = Failure(origin, trace, history), SourceFiles()
    found: dict[str, Remedy] = {}
    for cause in causes:
        for candidate in islice(_candidates(FailureContext(failure, cause, files)), MOST_PER_CAUSE):
            found.setdefault(candidate.diff, candidate)
    if not found and causes and (origin.site is None or files.get(origin.site.file) is None):
        return advice(causes[0].slug)
    return tuple(found.values())[:MOST]


def _candidates(context: FailureContext) -> Iterator[Remedy]:
    """Those whose edits are valid, with their diffs."""
    proposers = PROPOSERS.get(context.cause.slug, [])
    for proposer in sorted(proposers, key=lambda proposer: ORDER.index(proposer.__module__)):
        try:
            for candidate in proposer(context):
                edits, diff = as_patch(candidate.edits, context.files.get)
                if diff:
                    yield replace(candidate, edits=edits, diff=diff)
        except Exception:  # an unusual program must not cost the other candidates
            continue
