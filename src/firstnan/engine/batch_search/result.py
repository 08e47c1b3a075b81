"""What a search for bad batches came to, as data and as text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from firstnan.records import Noticed, TensorStat, encode
from firstnan.report.tensors import tensor_facts

_SHOWN = 8
"""So many are listed; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One thing that was not finite: an input, the loss, a gradient, a parameter, a buffer, or what `step` raised."""

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
            return f"{label}: not finite"
        return f"{label}: {', '.join(tensor_facts(replace(self.tensor, binary=False)))}"


@dataclass(frozen=True, slots=True)
class BadBatch:
    index: int
    """Its place in the loader's order, counted from 0."""
    seen: tuple[Seen, ...] = ()
    """What was not finite, in the order in which it was noticed; empty where the numbers only grew."""
    size: int | None = None
    indices: tuple[int, ...] | None = None
    """Which elements of the dataset it was made of, where the loader's sampler can tell."""

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
    """What `find_bad_batch` came to; false where it found nothing."""

    way: Literal["scan", "checkpoints"]
    """A scan without updates, or a binary search over saved states and a replay with updates."""
    batches: tuple[BadBatch, ...] = ()
    """The first bad batch, or all; of saved states the batch of the step from which training goes wrong."""
    step: int | None = None
    """Saved states: the step from which training goes wrong, counted from 0."""
    why: str = ""
    """Saved states: which number left what is usual, or what was not finite."""
    weights: Seen | None = None
    """The weights (of the first saved state) were bad before anything ran: every batch would fail."""
    replays: int = 0
    """How often `step` was called."""
    again: int = 0
    """Saved states: how many of these calls were steps made again with updates; the others tried a state."""
    of: int | None = None
    """How many batches the loader has, or how many saved states there are."""
    examined: tuple[int, ...] = ()
    """The saved states that were loaded and tried, by step number, in this order."""
    good: int | None = None
    """The last saved state that is known to be good, by step number."""
    wrong: int | None = None
    """The first saved state that is known to be bad; None where all are good."""
    notes: tuple[str, ...] = ()

    @property
    def index(self) -> int | None:
        """Of the first bad batch."""
        return self.batches[0].index if self.batches else None

    def __bool__(self) -> bool:
        return bool(self.batches) or self.wrong is not None or self.weights is not None

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        values: dict[str, Any] = encode(self)
        return values

    def __str__(self) -> str:
        lines = [self._headline(), *self._way(), *(f"  {batch}" for batch in self.batches[:_SHOWN])]
        if len(self.batches) > _SHOWN:
            lines.append(
                f"  and {len(self.batches) - _SHOWN} more: {_listed([b.index for b in self.batches[_SHOWN:]])}"
            )
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def _headline(self) -> str:
        if self.weights is not None:
            when = "before the first batch" if self.way == "scan" else "in the first saved state"
            return f"Not finite {when}: {self.weights}. Every batch would fail: begin from an earlier, good state."
        if self.way == "checkpoints":
            if self.step is None and self.wrong is None:
                return "No step was found from which training goes wrong."
            if self.step is None:
                return f"Training goes wrong between steps {self.good} and {self.wrong}."
            return f"Training goes wrong from step {self.step} on: {self.why}."
        if not self.batches:
            return "No bad batch."
        if len(self.batches) == 1:
            return f"Batch {self.index} is bad."
        return f"{len(self.batches)} bad batches: {_listed([b.index for b in self.batches])}."

    def _way(self) -> list[str]:
        if self.way == "scan":
            of = "" if self.of is None else f" of {self.of}"
            return [f"  {self.replays}{of} batches tried, without updates"] if self.weights is None else []
        lines = [
            f"  {len(self.examined)} of {self.of} saved states examined: those of steps {_listed(self.examined, 32)}"
        ]
        if self.good is not None:
            until = "all are good" if self.wrong is None else f"good up to {self.good}, wrong from {self.wrong} on"
            lines[0] += f"; {until}"
        return [
            *lines,
            f"  step called {self.replays} times: {self.again} steps made again, the rest to try the states",
        ]


def _listed(numbers: Any, most: int = _SHOWN) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown}, … {numbers[-1]}"
