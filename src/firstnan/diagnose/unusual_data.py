"""Says when the numbers of a bad sample are themselves doubtful: then a guard in the code hides what the data shows."""

from __future__ import annotations

import math
from dataclasses import replace

from firstnan.records import Batch, Feature, Report
from firstnan.records.words import number

FAR = 10.0
"""How many times larger than that of any other sample a number is, at least, to be doubtful."""
IGNORED = -100.0
"""torch's ignore_index, which marks targets that do not count."""
BAD_DATA = ("nan_input", "nan_label")


def with_doubt(report: Report) -> Report:
    """The report whose cause also says that a number of the bad sample may be wrong, if one is far from all others."""
    batch, cause, found = report.batch, report.cause, doubtful(report)
    if batch is None or cause is None or found is None:
        return report
    return replace(report, cause=replace(cause, why=f"{cause.why} {_doubt(found, batch)}"))


def doubtful(report: Report, far: float = FAR) -> Feature | None:
    """The number of the bad sample that is farthest from all others, if it is so many times larger."""
    batch, cause = report.batch, report.cause
    if batch is None or cause is None or cause.slug in BAD_DATA or not batch.confirmed:
        return None
    found = max(((_factor(f), f) for f in batch.features), key=lambda pair: pair[0], default=None)
    return found[1] if found is not None and found[0] >= far else None


def _factor(feature: Feature) -> float:
    """How many times larger than any number of the other samples there; 0 if that says nothing."""
    usual = max(abs(feature.low), abs(feature.high))
    says = usual and math.isfinite(feature.value) and feature.value != IGNORED
    return abs(feature.value) / usual if says else 0.0


def _doubt(feature: Feature, batch: Batch) -> str:
    where = feature.member + (str(list(feature.index)) if feature.index else "")
    spread = number(feature.low) + ("" if feature.low == feature.high else f" … {number(feature.high)}")
    others = "most others" if feature.apart else "all others"
    return (
        f"{batch.unit.capitalize()} {feature.sample} has {where} = {number(feature.value)}, {others} have {spread} "
        "there. If that number is wrong (another unit, a fill value), correct the data: a bound in the code only hides "
        "it."
    )
