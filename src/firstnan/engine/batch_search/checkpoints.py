"""For a run that fails late: a binary search over checkpoints, then a replay of the steps after the last good one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from firstnan.engine.batch_search.order import BatchOrder, Fetched
from firstnan.engine.batch_search.result import BadBatch, BatchSearch, Seen
from firstnan.engine.batch_search.training import Everything, SavedState, Training
from firstnan.engine.step_check import Outcome, StepCheck
from firstnan.gate.growth_guard import GrowthGuard
from firstnan.records import words
from firstnan.tensors.finite import norms, readable

_PROBES = 4
"""The most batches tried to find one that is healthy in the first checkpoint."""
_LOSS, _NORM, _NORM_ALONE = 10.0, 100.0, 1e6
"""A state is bad if the loss of the same batch has grown by this factor since the first state; or if the norm of the
gradient or of the parameters has, while the loss is no better."""
_SMALL_LOSS, _SMALL_NORM = 0.1, 1.0
"""Smaller values count as this much: values near zero change by large factors all the time."""
_FEWEST, _MOST = 12, 32
"""The first quarter of a replay, but at least and at most this many steps, shows the usual values. Fewer would not show
how far they vary from batch to batch."""
_VERY_FEW = 4
"""If there are no earlier states to begin from."""
_BACK = 16
"""How many steps earlier a replay begins if it did not show the usual values."""
_ABOVE, _SPREADS = 2.0, 4
"""A number is above its usual range if it exceeds twice the median, and four times the distance (in logs) from the
median to the upper quartile, which is 2.7 standard deviations of a log-normal."""
_FAR, _NEAR = 100.0, 4
"""A number this many times its usual value, up to this many steps earlier, counts too: after a jump the numbers may
look better for a moment."""

Sizes = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One replayed step."""

    step: int
    fetched: Fetched
    seen: tuple[Seen, ...]
    sizes: Sizes
    """The gradient norm, the size of the update, the loss, the norm of the parameters after the update."""

    @property
    def failed(self) -> bool:
        return any(one.noticed.what != "input" for one in self.seen)


def is_healthy(now: Sizes, first: Sizes) -> bool:
    """Whether the numbers of a state are close enough to those of the first state with the same batch."""
    loss, before = now["loss"], first["loss"]
    grown = loss is None or before is None or loss > before
    if loss is not None and before is not None and loss > before + _LOSS * max(abs(before), _SMALL_LOSS):
        return False
    # Norms may grow while training improves: when a density narrows, or a head that starts at zero begins to learn.
    most = _NORM if grown else _NORM_ALONE
    pairs = [(now[name], first[name]) for name in now if name != "loss"]
    return all(a is None or b is None or a <= most * max(b, _SMALL_NORM) for a, b in pairs)


class LateSearch:
    """Finds the first step from which training goes wrong."""

    def __init__(
        self,
        step: StepCheck,
        order: BatchOrder,
        everything: Everything,
        states: Sequence[SavedState],
        training: Training,
        advance: Callable[[str], None],
    ) -> None:
        self._step, self._order, self._everything = step, order, everything
        self._states = sorted(states, key=lambda state: state.step)
        self._training, self._advance = training, advance
        self._first: Sizes = {}
        self._probe: Fetched | None = None
        self._examined: list[int] = []
        self._again = 0
        self._alarmed = False
        """The guard raised an alarm in the steps after the last checkpoint."""
        self._notes: dict[str, None] = {}

    def search(self) -> BatchSearch:
        self._load(0)
        self._examined.append(self._states[0].step)
        bad = self._training.bad_state(optimizers=True)
        if bad is not None:
            return self._result(weights=bad)
        good, wrong = self._bisect() if self._find_probe() else (0, None)
        known: Any = {"good": self._states[good].step, "wrong": None if wrong is None else self._states[wrong].step}
        # A generator cannot repeat earlier batches, so start earlier at once to see the usual values.
        start = good if self._order.repeats else self._state_before(good, self._states[good].step - _BACK)
        rows = self._replay(start, known["wrong"])
        if not rows or not (rows[-1].failed or self._alarmed or self._is_bad()):
            self._tell_healthy(rows, **known)
            return self._result(**known)
        return self._result(**known, **self._first_wrong(start, rows))

    # Checkpoints.

    def _bisect(self) -> tuple[int, int | None]:
        """The last good state and the first bad one, assuming all states before a good one are good and so on."""
        good, wrong = 0, len(self._states)
        while wrong - good > 1:
            middle = (good + wrong) // 2
            self._load(middle)
            self._examined.append(self._states[middle].step)
            good, wrong = (good, middle) if self._is_bad() else (middle, wrong)
        return good, wrong if wrong < len(self._states) else None

    def _state_before(self, state: int, step: int) -> int:
        return max((i for i in range(state) if self._states[i].step <= step), default=0)

    def _load(self, at: int) -> None:
        self._everything.restore()
        state = self._states[at]
        self._advance(f"checkpoint of step {state.step}")
        self._notes |= dict.fromkeys(state.put(self._training))

    def _find_probe(self) -> bool:
        """Finds a batch that is healthy in the first state; all states are tried with it."""
        for fetched in self._order.first(_PROBES):
            outcome = self._try(fetched)
            if not outcome.seen:
                self._probe, self._first = fetched, self._sizes(outcome)
                return True
        return False

    def _is_bad(self) -> bool:
        """Whether the current state of the model is bad."""
        if self._training.bad_state(optimizers=True) is not None:
            return True
        if self._probe is None:
            return False
        outcome = self._try(self._probe)
        return bool(outcome.seen) or not is_healthy(self._sizes(outcome), self._first)

    def _try(self, fetched: Fetched) -> Outcome:
        self._everything.restore_random()
        return self._call(fetched, "a checkpoint", updates=False)

    def _sizes(self, outcome: Outcome) -> Sizes:
        return {"loss": outcome.loss, "gradient": outcome.grad_norm, "parameters": _norm(self._trained())}

    # The steps between two checkpoints.

    def _replay(self, start: int, end: int | None) -> list[CheckpointRow]:
        """Replays the steps after a checkpoint, with updates, until a NaN or step `end`; without `end`, one epoch."""
        self._load(start)
        self._everything.restore_random()
        first = self._states[start].step
        rows: list[CheckpointRow] = []
        guard = GrowthGuard()
        for step, fetched in enumerate(self._order.from_step(first), first):
            if step == end or (end is None and rows and fetched.index == rows[0].fetched.index):
                break
            rows.append(self._make(step, fetched))
            alarm = guard.observe(step, rows[-1].sizes["gradient norm"], rows[-1].sizes["loss"])
            if rows[-1].failed:
                break
            if end is None and alarm is not None and alarm.kind != "spike":
                self._alarmed = True
                break
        return rows

    def _make(self, step: int, fetched: Fetched) -> CheckpointRow:
        self._again += 1
        before = [p.detach().clone() for p in self._trained()]
        outcome = self._call(fetched, f"step {step}", updates=True)
        with torch.no_grad():
            moved = [p.detach() - b for p, b in zip(self._trained(), before, strict=True)]
        sizes: Sizes = {
            "gradient norm": outcome.grad_norm,
            "size of the update": _norm(moved),
            "loss": outcome.loss,
            "norm of the parameters": _norm(self._trained()),
        }
        return CheckpointRow(step, Fetched(fetched.index, None, fetched.indices, fetched.size), outcome.seen, sizes)

    def _call(self, fetched: Fetched, what: str, *, updates: bool) -> Outcome:
        try:
            return self._step(fetched.batch, updates=updates)
        except Exception as error:
            error.add_note(f"firstnan: raised by step(batch) with batch {fetched.index} of the loader ({what})")
            raise
        finally:
            self._advance(what)

    def _trained(self) -> list[Tensor]:
        return [p for p in self._training.parameters if p.requires_grad]

    def _first_wrong(self, start: int, rows: list[CheckpointRow]) -> dict[str, Any]:
        """The step from which on the numbers are unusual; if they are from the start, earlier states are used."""
        end, back = rows[-1].step + 1, _BACK
        found = onset(rows)
        while not found.settled and start > 0 and self._order.repeats:
            start, back = self._state_before(start, self._states[start].step - back), back * 2
            rows = self._replay(start, end)
            found = onset(rows)
        if not found.settled:
            found = onset(rows, _VERY_FEW)
        row, last = rows[found.at], rows[-1]
        if last.failed and last is not row:
            self._notes[f"The first non-finite value appears in step {last.step}: {last.seen[0]}."] = None
        batch = BadBatch(row.fetched.index, row.seen, row.fetched.size, row.fetched.indices)
        return {"step": row.step, "why": found.why, "batches": (batch,)}

    # Notes and the result.

    def _tell_healthy(self, rows: list[CheckpointRow], good: int, wrong: int | None) -> None:
        if not rows:
            note = f"No step was replayed: the loader has no batch for step {good}."
        elif wrong is None:
            note = f"A replay of the {words.count(len(rows), 'step')} after the last checkpoint stayed healthy."
        else:
            note = (
                f"A replay of the {words.count(len(rows), 'step')} before step {wrong} stayed healthy: the original "
                "run had different batches, random numbers or settings."
            )
        self._notes[note] = None

    def _result(self, **found: Any) -> BatchSearch:
        length = self._order.length
        modulo = f", modulo {length}" if length and self._order.repeats else ""
        if self._step.calls:
            self._notes[f"Assumed: batch i of the loader belongs to step i{modulo}."] = None
        if self._order.shuffles:
            self._notes["The loader shuffles, so its order may differ from that of the original run."] = None
        return BatchSearch(
            "checkpoints",
            replays=self._step.calls,
            again=self._again,
            of=len(self._states),
            examined=tuple(self._examined),
            notes=tuple(self._notes),
            **found,
        )


@dataclass(frozen=True, slots=True)
class Onset:
    at: int
    """The row from which on one of the numbers stays above its usual range."""
    why: str
    settled: bool
    """There are enough rows before it to know the usual values, and the number does not rise in them."""


def onset(rows: Sequence[CheckpointRow], fewest: int = _FEWEST) -> Onset:
    """Where the numbers leave the range of the first rows for good."""
    last = len(rows) - 1
    count = min(_MOST, max(fewest, len(rows) // 4))
    known = rows[: min(count, max(1, last))]  # the last row is the one in question
    usual = {name: found for name in rows[0].sizes if (found := Usual.of([r.sizes[name] for r in known]))}
    factors = [{n: u.factor(row.sizes[n]) for n, u in usual.items()} for row in rows]
    """Each number divided by the top of its usual range; up to 1 is usual."""
    levels = [max(of_row.values(), default=0.0) for of_row in factors]
    if _is_data(rows[last]) and max(levels[:last], default=0.0) <= _FAR:
        return Onset(last, str(rows[last].seen[0]), settled=True)
    # Numbers that are usual again at the end have been worst somewhere before.
    at = last if rows[last].failed or levels[last] > 1 else max(range(len(rows)), key=levels.__getitem__)
    unusual = rows[at].failed or levels[at] > 1
    at = at if unusual else last
    while at > 0 and levels[at - 1] > 1:
        at -= 1
    far = [i for i in range(max(0, at - _NEAR), at) if levels[i] > _FAR]
    at = far[0] if far else at
    settled = unusual and at >= count and not any(usual[n].rises for n, f in factors[last].items() if f > 1)
    name = max(factors[at], key=lambda n: factors[at][n], default=None)
    value = rows[at].sizes[name] if name is not None and factors[at][name] > 1 else None
    if name is not None and value is not None and math.isfinite(value):
        why = f"the {name} is {value:.3g}, usually {usual[name].middle:.3g}"
    else:
        why = str(rows[at].seen[0]) if rows[at].seen else "the next checkpoint is bad"
    return Onset(at, why, settled)


@dataclass(frozen=True, slots=True)
class Usual:
    """The usual range of one of the numbers, taken from the first rows of a replay."""

    middle: float
    top: float
    rises: bool
    """Whether the number already rises in these rows."""

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Usual | None:
        known = [v for v in values if v is not None and 0 < v < math.inf]
        half = len(known) // 2
        rises = half > 0 and median(known[half:]) > _ABOVE * median(known[:half])
        known = sorted(known[:half] if rises else known)
        if not known:
            return None
        middle = median(known)
        return cls(middle, middle * max(_ABOVE, (known[len(known) * 3 // 4] / middle) ** _SPREADS), rises)

    def factor(self, value: float | None) -> float:
        if value is None:
            return 0.0
        return value / self.top if math.isfinite(value) else math.inf


def _is_data(row: CheckpointRow) -> bool:
    return bool(row.seen) and row.seen[0].noticed.what == "input"


def _norm(tensors: Sequence[Tensor]) -> float:
    values = [r.double() for t in tensors if (r := readable(t)) is not None and r.numel()]
    return math.hypot(*norms(values).tolist()) if values else 0.0
