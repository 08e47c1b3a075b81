"""Numbers, counts and tensors as words of a report."""

from __future__ import annotations

from firstnan.records import TensorStat
from firstnan.records.words import number


def counted(count: int, noun: str = "element", plural: str = "") -> str:
    """`1 element`, `3 elements`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def nonfinite(stat: TensorStat | None) -> str:
    """`NaN in 1 and Inf in 2 of 64 elements (first at [6, 3])`."""
    if stat is None or not stat.bad:
        return "non-finite values"
    kinds = " and ".join(f"{kind} in {n}" for kind, n in (("NaN", stat.nan), ("Inf", stat.inf)) if n)
    where = f" (first at {list(stat.first_index)})" if stat.first_index else ""
    return f"{kinds} of {counted(stat.numel)}{where}"


def describe(stat: TensorStat, name: str = "") -> str:
    """One tensor as a line of evidence, with the counts that are not zero."""
    text = f"{name or stat.name or 'tensor'} {list(stat.shape)} {stat.dtype}"
    if stat.min is not None and stat.max is not None:
        text += f" in [{number(stat.min)}, {number(stat.max)}]"
    if stat.smallest is not None:
        text += f", smallest magnitude {number(stat.smallest)}"
    counts = {
        "zero" if stat.zeros == 1 else "zeros": stat.zeros,
        "negative": stat.negative,
        "NaN": stat.nan,
        "+inf": stat.posinf,
        "-inf": stat.neginf,
    }
    return text + "".join(f", {n} {word}" for word, n in counts.items() if n)
