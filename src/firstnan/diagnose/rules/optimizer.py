"""Updates that go wrong after a healthy gradient."""

from __future__ import annotations

import math
from typing import Any

from firstnan.diagnose.rules.base import Finding, rule
from firstnan.diagnose.rules.division import DIVISIONS, div_by_zero, zero_over_zero
from firstnan.diagnose.rules.failure import Failure, has_zero, is_number, number
from firstnan.diagnose.rules.overflow import STATE_OPS, overflowed
from firstnan.records import Phase

UPDATES: frozenset[Phase] = frozenset({"optimizer", "parameter"})
FUSED = ("adam", "adamw", "adagrad", "sgd", "fused_adam", "fused_adamw", "fused_adagrad", "fused_sgd")
RATE_NAMES = ("alpha", "value", "lr", "step_size")


def _numbers(value: Any) -> list[float]:
    found = value if isinstance(value, list | tuple) else [value]
    return [float(v) for v in found if is_number(v)]


def _moved_by_gradient(failure: Failure) -> bool:
    """A gradient or optimizer state is among what the operator was computed from."""
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
    used = [(n, v) for n in (*RATE_NAMES, "scalars") for v in _numbers(given.get(n))]
    if failure.op == "mul":
        used += [("other", v) for v in _numbers(given.get("other"))]
    used += [("lr", v) for v in _numbers(failure.lr())]
    bad = next(((n, v) for n, v in used if not math.isfinite(v)), None)
    if bad is None:
        return None
    before = next((s.lr for s in reversed(failure.history.steps) if s.lr is not None and math.isfinite(s.lr)), None)
    was = f" The last finite learning rate was {number(before)}." if before is not None else ""
    why = (
        f"The update in step {failure.origin.step} was scaled with {bad[1]} ({bad[0]}): the learning rate is "
        f"not finite.{was} The gradients are healthy; the schedule or the code that sets the rate is not."
    )
    return Finding(why, 0.99, (f"{bad[0]} = {bad[1]}",))


@rule("optimizer_eps", phases=UPDATES)
def optimizer_eps(failure: Failure) -> Finding | None:
    if not (failure.nan or failure.inf):
        return None
    given = _numbers(failure.scalar("eps")) + _numbers(dict(failure.history.settings).get("eps"))
    eps = given[0] if given else None
    fused = failure.op in FUSED
    if fused:
        fits = eps is not None and eps < 1e-30 and any(has_zero(t) for t in failure.tensors)
    else:
        fits = failure.op in DIVISIONS and failure.zero_at(DIVISIONS[failure.op][1])
    # An update that divides something else than a weight divides what the gradient was made into.
    read = failure.event.inputs if failure.event else ()
    update = failure.phase == "optimizer" and not any(i.role == "parameter" for i in read)
    moved = fused or failure.op == "addcdiv" or update or _moved_by_gradient(failure)
    if not fits or (failure.phase == "parameter" and not moved):
        return None
    names = DIVISIONS.get(failure.op, ("grads", "exp_avg_sqs"))
    own = not fused and _own_code(failure)
    if own and eps is not None and not _made_with(failure, names[1], eps):
        return None
    name = f"{failure.history.optimizer or 'The optimizer'}"
    shown = f" with eps = {number(eps)}" if eps is not None else ""
    low = " In float16 any eps below 6e-8 is 0." if failure.dtype == "float16" else ""
    result = "Weights that got no gradient then become 0/0" if failure.nan else "The result is infinite"
    what = f"in `{failure.code}`" if own else "the update"
    why = (
        f"{name} divides {what} by a number that is exactly 0{shown}.{low} {result}: "
        f"{failure.nan + failure.inf} element(s) of {failure.origin.label or 'it'}."
    )
    return Finding(why, 0.96 if moved else 0.25, failure.input_lines(*(n for n in names if n)))


def _own_code(failure: Failure) -> bool:
    """The operator stands in an update that the user wrote, not in one of torch's."""
    return failure.event is not None and failure.event.library_site is None and failure.event.site is not None


def _made_with(failure: Failure, name: str, eps: float) -> bool:
    """The argument is a sum with eps, or was kept at it: what else is 0 has nothing to do with that setting."""
    makers = [failure.trace.events[i.producer] for i in failure.operands(name) if i.producer is not None]
    events = [e for maker in makers for e in (maker, *failure.trace.feeding(maker, 3))]
    return any(math.isclose(v, eps, rel_tol=1e-3) for e in events for _, given in e.scalars for v in _numbers(given))


@rule("zero_over_zero", phases=frozenset({"optimizer"}))
def zero_over_zero_in_own_update(failure: Failure) -> Finding | None:
    return _as_anywhere(failure, zero_over_zero(failure))


@rule("div_by_zero", phases=frozenset({"optimizer"}))
def div_by_zero_in_own_update(failure: Failure) -> Finding | None:
    return _as_anywhere(failure, div_by_zero(failure))


def _as_anywhere(failure: Failure, found: Finding | None) -> Finding | None:
    """In an update that the user wrote a division is what it is elsewhere, where no eps has to do with it."""
    return found if _own_code(failure) and optimizer_eps(failure) is None else None


@rule("optimizer_overflow", phases=frozenset({"optimizer"}))
def optimizer_overflow(failure: Failure) -> Finding | None:
    if not (failure.inf or failure.nan) or not (failure.op in FUSED or overflowed(failure)):
        return None
    squared = " It squares the gradient." if failure.op in ("addcmul", "square", "pow") else ""
    why = (
        f"{failure.history.optimizer or 'The optimizer'} computes {failure.op} of numbers up to "
        f"{number(failure.reach)} in {failure.dtype or 'its type'}, which ends at {number(failure.limit)}.{squared} "
        f"{failure.inf + failure.nan} element(s) of its state or of the weights overflowed although the gradient "
        "is finite."
    )
    return Finding(why, 0.85 if failure.op in STATE_OPS or failure.op in FUSED else 0.75, failure.input_lines())
