"""Updates that go wrong although the gradient is finite."""

from __future__ import annotations

import math
from typing import Any

from firstnan.diagnose.rules.base import Finding, rule
from firstnan.diagnose.rules.division import div_by_zero, zero_over_zero
from firstnan.diagnose.rules.failure import Failure, has_zero
from firstnan.diagnose.rules.overflow import overflowed
from firstnan.diagnose.rules.wording import counted
from firstnan.records import Phase
from firstnan.records.operator_families import DIVISIONS, FUSED_UPDATES, STATE_UPDATES
from firstnan.records.words import number

UPDATES: frozenset[Phase] = frozenset({"optimizer", "parameter"})
RATE_NAMES = ("alpha", "value", "lr", "step_size", "scalars")


def _numbers(value: Any) -> list[float]:
    found = value if isinstance(value, list | tuple) else [value]
    return [float(v) for v in found if isinstance(v, int | float)]


def _moved_by_gradient(failure: Failure) -> bool:
    """Whether the operator was computed from a gradient or an optimizer state, among other things."""
    if failure.event is None:
        return False
    library = failure.event.library_site
    if library is not None and "optim" in library.file:
        return True
    events = [failure.event, *failure.feeding(6)]
    if any(e.phase == "backward" for e in events):
        return True
    return any(i.role in ("gradient", "state") or i.label.endswith(".grad") for e in events for i in e.inputs)


@rule("nan_lr", phases=UPDATES)
def nan_lr(failure: Failure) -> Finding | None:
    given = dict(failure.event.scalars) if failure.event else {}
    names = (*RATE_NAMES, "other") if failure.op == "mul" else RATE_NAMES
    used = [(n, v) for n in names for v in _numbers(given.get(n))] + [("lr", v) for v in _numbers(failure.lr())]
    bad = next(((n, v) for n, v in used if not math.isfinite(v)), None)
    if bad is None:
        return None
    before = next((s.lr for s in reversed(failure.history.steps) if s.lr is not None and math.isfinite(s.lr)), None)
    was = f" The last finite learning rate was {number(before)}." if before is not None else ""
    why = (
        f"The learning rate is not finite: the update in step {failure.origin.step} was scaled by {bad[1]} ({bad[0]})."
        f"{was} Look at the schedule, or at the code that sets the learning rate."
    )
    return Finding(why, 0.99, (f"{bad[0]} = {bad[1]}",))


@rule("optimizer_eps", phases=UPDATES)
def optimizer_eps(failure: Failure) -> Finding | None:
    if not failure.bad:
        return None
    given = _numbers(failure.scalar("eps")) + _numbers(dict(failure.history.settings).get("eps"))
    eps = given[0] if given else None
    fused = failure.op in FUSED_UPDATES
    names = DIVISIONS.get(failure.op, ("grads", "exp_avg_sqs"))
    if fused:
        fits = eps is not None and eps < 1e-30 and any(has_zero(t) for t in failure.tensors)
    else:
        fits = failure.op in DIVISIONS and failure.zero_at(names[1])
    # An update that divides something other than a weight divides what the gradient was made into.
    read = failure.event.inputs if failure.event else ()
    update = failure.phase == "optimizer" and not any(i.role == "parameter" for i in read)
    moved = fused or failure.op == "addcdiv" or update or _moved_by_gradient(failure)
    if not fits or (failure.phase == "parameter" and not moved):
        return None
    own = not fused and _in_users_code(failure)
    if own and eps is not None and not _made_with(failure, names[1], eps):
        return None
    shown = f", with eps = {number(eps)}" if eps is not None else ""
    low = " In float16 any eps below 6e-8 is 0." if failure.dtype == "float16" else ""
    where = f"`{failure.code}`" if own else "its update"
    became = "is 0/0 for a weight without a gradient" if failure.nan else "is infinite"
    why = (
        f"{failure.history.optimizer or 'The optimizer'} divides by exactly 0 in {where}{shown}.{low} The result "
        f"{became}: {counted(failure.bad)} of {failure.origin.label or 'the result'} became non-finite."
    )
    return Finding(why, 0.96 if moved else 0.25, failure.input_lines(*(n for n in names if n)))


def _in_users_code(failure: Failure) -> bool:
    """Whether the operator is in an update that the user wrote, not in one of torch's."""
    return failure.event is not None and failure.event.library_site is None and failure.event.site is not None


def _made_with(failure: Failure, name: str, eps: float) -> bool:
    """Whether eps was added to the argument, or limits it; otherwise that setting has nothing to do with the 0."""
    events = [e for maker in failure.makers(name) for e in (maker, *failure.trace.feeding(maker, 3))]
    return any(math.isclose(v, eps, rel_tol=1e-3) for e in events for _, given in e.scalars for v in _numbers(given))


@rule("zero_over_zero", phases=frozenset({"optimizer"}))
def zero_over_zero_in_users_update(failure: Failure) -> Finding | None:
    return zero_over_zero(failure) if _without_eps(failure) else None


@rule("div_by_zero", phases=frozenset({"optimizer"}))
def div_by_zero_in_users_update(failure: Failure) -> Finding | None:
    return div_by_zero(failure) if _without_eps(failure) else None


def _without_eps(failure: Failure) -> bool:
    """A division in an update that the user wrote, which has nothing to do with an eps: as anywhere else."""
    return _in_users_code(failure) and optimizer_eps(failure) is None


@rule("optimizer_overflow", phases=frozenset({"optimizer"}))
def optimizer_overflow(failure: Failure) -> Finding | None:
    if not failure.bad or not (failure.op in FUSED_UPDATES or overflowed(failure)):
        return None
    squared = " This squares the gradient." if failure.op in ("addcmul", "square", "pow") else ""
    why = (
        f"{failure.history.optimizer or 'The optimizer'} computes {failure.op} of numbers up to "
        f"{number(failure.reach)}, and the largest {failure.dtype or 'float32'} is {failure.limit:g}."
        f"{squared} {counted(failure.bad)} of its state or of the weights overflowed, although the gradient is finite."
    )
    return Finding(why, 0.85 if failure.op in STATE_UPDATES | FUSED_UPDATES else 0.75, failure.input_lines())
