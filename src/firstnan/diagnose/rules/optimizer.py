"""Updates that go wrong after a healthy gradient."""

from __future__ import annotations

import math
from typing import Any

from firstnan.diagnose.rules.base import Finding, rule
from firstnan.diagnose.rules.division import DIVISIONS, div_by_zero, zero_over_zero
from firstnan.diagnose.rules.overflow import STATE_OPS, overflowed
from firstnan.diagnose.rules.scene import Scene, has_zero, is_number, number
from firstnan.records import Phase

UPDATES: frozenset[Phase] = frozenset({"optimizer", "parameter"})
FUSED = ("adam", "adamw", "adagrad", "sgd", "fused_adam", "fused_adamw", "fused_adagrad", "fused_sgd")
RATE_NAMES = ("alpha", "value", "lr", "step_size")


def _numbers(value: Any) -> list[float]:
    found = value if isinstance(value, list | tuple) else [value]
    return [float(v) for v in found if is_number(v)]


def _moved_by_gradient(scene: Scene) -> bool:
    """A gradient or optimizer state is among what the operator was computed from."""
    if scene.event is None:
        return False
    library = scene.event.library_site
    if library is not None and "optim" in library.file:
        return True
    events = [scene.event, *scene.feeding(6)]
    if any(e.phase == "backward" for e in events):
        return True
    return any(i.role in ("gradient", "state") or i.label.endswith(".grad") for e in events for i in e.inputs)


@rule("nan_lr", phases=UPDATES)
def nan_lr(scene: Scene) -> Finding | None:
    given = dict(scene.event.scalars) if scene.event else {}
    used = [(n, v) for n in (*RATE_NAMES, "scalars") for v in _numbers(given.get(n))]
    if scene.op == "mul":
        used += [("other", v) for v in _numbers(given.get("other"))]
    used += [("lr", v) for v in _numbers(scene.lr())]
    bad = next(((n, v) for n, v in used if not math.isfinite(v)), None)
    if bad is None:
        return None
    before = next((s.lr for s in reversed(scene.history.steps) if s.lr is not None and math.isfinite(s.lr)), None)
    was = f" The last finite learning rate was {number(before)}." if before is not None else ""
    why = (
        f"The update in step {scene.origin.step} was scaled with {bad[1]} ({bad[0]}): the learning rate is "
        f"not finite.{was} The gradients are healthy; the schedule or the code that sets the rate is not."
    )
    return Finding(why, 0.99, (f"{bad[0]} = {bad[1]}",))


@rule("optimizer_eps", phases=UPDATES)
def optimizer_eps(scene: Scene) -> Finding | None:
    if not (scene.nan or scene.inf):
        return None
    given = _numbers(scene.scalar("eps")) + _numbers(dict(scene.history.settings).get("eps"))
    eps = given[0] if given else None
    fused = scene.op in FUSED
    if fused:
        fits = eps is not None and eps < 1e-30 and any(has_zero(t) for t in scene.tensors)
    else:
        fits = scene.op in DIVISIONS and scene.zero_at(DIVISIONS[scene.op][1])
    # An update that divides something else than a weight divides what the gradient was made into.
    read = scene.event.inputs if scene.event else ()
    update = scene.phase == "optimizer" and not any(i.role == "parameter" for i in read)
    moved = fused or scene.op == "addcdiv" or update or _moved_by_gradient(scene)
    if not fits or (scene.phase == "parameter" and not moved):
        return None
    names = DIVISIONS.get(scene.op, ("grads", "exp_avg_sqs"))
    own = not fused and _own_code(scene)
    if own and eps is not None and not _made_with(scene, names[1], eps):
        return None
    name = f"{scene.history.optimizer or 'The optimizer'}"
    shown = f" with eps = {number(eps)}" if eps is not None else ""
    low = " In float16 any eps below 6e-8 is 0." if scene.dtype == "float16" else ""
    result = "Weights that got no gradient then become 0/0" if scene.nan else "The result is infinite"
    what = f"in `{scene.code}`" if own else "the update"
    why = (
        f"{name} divides {what} by a number that is exactly 0{shown}.{low} {result}: "
        f"{scene.nan + scene.inf} element(s) of {scene.origin.label or 'it'}."
    )
    return Finding(why, 0.96 if moved else 0.25, scene.input_lines(*(n for n in names if n)))


def _own_code(scene: Scene) -> bool:
    """The operator stands in an update that the user wrote, not in one of torch's."""
    return scene.event is not None and scene.event.library_site is None and scene.event.site is not None


def _made_with(scene: Scene, name: str, eps: float) -> bool:
    """The argument is a sum with eps, or was kept at it: what else is 0 has nothing to do with that setting."""
    makers = [scene.trace.events[i.producer] for i in scene.operands(name) if i.producer is not None]
    events = [e for maker in makers for e in (maker, *scene.trace.feeding(maker, 3))]
    return any(math.isclose(v, eps, rel_tol=1e-3) for e in events for _, given in e.scalars for v in _numbers(given))


@rule("zero_over_zero", phases=frozenset({"optimizer"}))
def zero_over_zero_in_own_update(scene: Scene) -> Finding | None:
    return _as_anywhere(scene, zero_over_zero(scene))


@rule("div_by_zero", phases=frozenset({"optimizer"}))
def div_by_zero_in_own_update(scene: Scene) -> Finding | None:
    return _as_anywhere(scene, div_by_zero(scene))


def _as_anywhere(scene: Scene, found: Finding | None) -> Finding | None:
    """In an update that the user wrote a division is what it is elsewhere, where no eps has to do with it."""
    return found if _own_code(scene) and optimizer_eps(scene) is None else None


@rule("optimizer_overflow", phases=frozenset({"optimizer"}))
def optimizer_overflow(scene: Scene) -> Finding | None:
    if not (scene.inf or scene.nan) or not (scene.op in FUSED or overflowed(scene)):
        return None
    squared = " It squares the gradient." if scene.op in ("addcmul", "square", "pow") else ""
    why = (
        f"{scene.history.optimizer or 'The optimizer'} computes {scene.op} of numbers up to "
        f"{number(scene.reach)} in {scene.dtype or 'its type'}, which ends at {number(scene.limit)}.{squared} "
        f"{scene.inf + scene.nan} element(s) of its state or of the weights overflowed although the gradient "
        "is finite."
    )
    return Finding(why, 0.85 if scene.op in STATE_OPS or scene.op in FUSED else 0.75, scene.input_lines())
