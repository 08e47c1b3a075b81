"""From a cause to changes of the user's own source that should help, best first; nothing is tried here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from types import ModuleType

from firstnan.diagnose.rules.failure import Failure
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
from firstnan.repair.base import REMEDIES, Desk, Job

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
"""Imported for the candidates that they register; within one slug those of the family named first come first."""
ORDER = [family.__name__ for family in FAMILIES]

MOST = 8
MOST_OF_ONE = 6


def propose(origin: Origin, trace: Trace, history: History, causes: Sequence[Cause]) -> tuple[Remedy, ...]:
    """Candidates for the causes that were found, each change once, the likeliest cause's first."""
    scene, desk = Failure(origin, trace, history), Desk()
    found: dict[str, Remedy] = {}
    for cause in causes:
        for candidate in islice(_candidates(Job(scene, cause, desk)), MOST_OF_ONE):
            found.setdefault(candidate.diff, candidate)
    if not found and causes and (origin.site is None or desk.source(origin.site.file) is None):
        return advice(causes[0].slug)
    return tuple(found.values())[:MOST]


def _candidates(job: Job) -> Iterator[Remedy]:
    for look in sorted(REMEDIES.get(job.cause.slug, []), key=lambda look: ORDER.index(look.__module__)):
        try:
            yield from (candidate for candidate in look(job) if candidate.diff)
        except Exception:  # an odd program must cost no more than this one idea
            continue
