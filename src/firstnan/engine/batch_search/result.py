"""The result of a search for bad batches, as data and as text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from firstnan.records import Noticed, TensorStat
from firstnan.records.codec import encode
from firstnan.records.words import count
from firstnan.report.text import tensor_facts

_SHOWN = 8
"""At most this many are listed; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One non-finite input, loss, gradient, parameter or buffer; or an exception that `step` raised."""

    noticed: Noticed
    tensor: TensorStat | None = None

    def __str__(self) -> str:
        what, name = self.noticed.what, self.noticed.name
        if what == "exception":
            return f"step raised {name}"
        label = (
            f"{'the loss' if what == 'loss' else what}{' of' if what == 'gradient' and name else ''} {name}".rstrip()
        )
        if self.tensor is None:
            return f"{label}: non-finite"
        return f"{label}: {', '.join(tensor_facts(replace(self.tensor, binary=False)))}"


@dataclass(frozen=True, slots=True)
class BadBatch:
    index: int
    """Its position in the loader's order, counted from 0."""
    seen: tuple[Seen, ...] = ()
    """What was non-finite, in the order in which it was noticed; empty if the numbers only grew."""
    size: int | None = None
    indices: tuple[int, ...] | None = None
    """The dataset indices of its samples, if the loader's sampler knows them."""

    def __str__(self) -> str:
        facts = [f"batch {self.index}"]
        if self.size is not None:
            facts.append(f"size {self.size}")
        if self.indices is not None:
            facts.append(f"dataset indices {_listed(self.indices)}")
        if {one.noticed.what for one in self.seen} == {"input"}:
            facts.append("the loss and the gradients stayed finite")
        return "\n    ".join([", ".join(facts), *map(str, self.seen)])


@dataclass(frozen=True, slots=True)
class BatchSearch:
    """The result of `find_bad_batch`; false if nothing was found."""

    way: Literal["scan", "checkpoints"]
    """A scan without updates, or a binary search over checkpoints and a replay with updates."""
    batches: tuple[BadBatch, ...] = ()
    """The first bad batch, or all; with checkpoints, the batch of the step from which training goes wrong."""
    step: int | None = None
    """Checkpoints: the step from which training goes wrong, counted from 0."""
    why: str = ""
    """Checkpoints: which number left its usual range, or what was non-finite."""
    weights: Seen | None = None
    """A weight (of the first checkpoint) that was bad before anything ran; every batch would fail."""
    replays: int = 0
    """The number of calls of `step`."""
    groups: int = 0
    """A scan: how many of these calls had several batches at once."""
    again: int = 0
    """Checkpoints: how many of these calls replayed a step with updates; the others tested a checkpoint."""
    of: int | None = None
    """The number of batches in the loader, or of checkpoints."""
    examined: tuple[int, ...] = ()
    """The step numbers of the checkpoints that were loaded and tested, in this order."""
    good: int | None = None
    """The step number of the last checkpoint known to be good."""
    wrong: int | None = None
    """The step number of the first checkpoint known to be bad; None if all are good."""
    notes: tuple[str, ...] = ()

    @property
    def index(self) -> int | None:
        """The index of the first bad batch."""
        return self.batches[0].index if self.batches else None

    def __bool__(self) -> bool:
        return bool(self.batches) or self.wrong is not None or self.weights is not None

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        values: dict[str, Any] = encode(self)
        return values

    def __repr__(self) -> str:
        return f"<BatchSearch: {self._headline()}>"

    def __str__(self) -> str:
        lines = [self._headline(), *self._way(), *(f"  {batch}" for batch in self.batches[:_SHOWN])]
        if len(self.batches) > _SHOWN:
            lines.append(
                f"  and {len(self.batches) - _SHOWN} more: {_listed([b.index for b in self.batches[_SHOWN:]])}"
            )
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def _headline(self) -> str:
        if self.weights is not None:
            when = "before the first batch" if self.way == "scan" else "in the first checkpoint"
            return f"Non-finite {when}: {self.weights}. Every batch would fail; start from an earlier, good state."
        if self.way == "checkpoints":
            if self.step is None and self.wrong is None:
                return "No step found from which training goes wrong."
            if self.step is None:
                return f"Training goes wrong between steps {self.good} and {self.wrong}."
            return f"Training goes wrong from step {self.step} on: {self.why}."
        if not self.batches:
            return "No bad batch found."
        if len(self.batches) == 1:
            return f"Batch {self.index} is bad."
        return f"{len(self.batches)} bad batches: {_listed([b.index for b in self.batches])}."

    def _way(self) -> list[str]:
        if self.way == "scan":
            return [f"  {self._scanned()}"] if self.weights is None else []
        lines = [f"  tested {len(self.examined)} of {self.of} checkpoints, of steps {_listed(self.examined, 32)}"]
        if self.good is not None:
            until = "all are good" if self.wrong is None else f"good up to {self.good}, bad from {self.wrong} on"
            lines[0] += f"; {until}"
        return [
            *lines,
            f"  called step {count(self.replays, 'time')}: {self.again} to replay steps, the rest to test checkpoints",
        ]

    def _scanned(self) -> str:
        of = "" if self.of is None else f" of {self.of}"
        if not self.groups:
            return f"tried {self.replays}{of} batches, without updates"
        tried = f"called step {count(self.replays, 'time')}, {self.groups} of them with several batches at once"
        alone = self.of if self.index is None or len(self.batches) > 1 else self.index + 1
        return f"{tried}, without updates; one by one, {count(alone or 0, 'call')}{of}"


def _listed(numbers: Any, most: int = _SHOWN) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown}, … {numbers[-1]}"
