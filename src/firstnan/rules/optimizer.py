"""Updates that go wrong after a healthy gradient."""

from __future__ import annotations

import math
from typing import Any

from firstnan.records import Phase
from firstnan.rules.base import Finding, rule
from firstnan.rules.division import DIVISIONS
from firstnan.rules.overflow import STATE_OPS, overflowed
from firstnan.rules.scene import Scene, has_zero, is_number, number

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
    name = f"{scene.history.optimizer or 'The optimizer'}"
    shown = f" with eps = {number(eps)}" if eps is not None else ""
    low = " In float16 any eps below 6e-8 is 0." if scene.dtype == "float16" else ""
    result = "Weights that got no gradient then become 0/0" if scene.nan else "The update is infinite"
    why = (
        f"{name} divides the update by a number that is exactly 0{shown}.{low} {result}: "
        f"{scene.nan + scene.inf} element(s) of {scene.origin.label or 'it'}."
    )
    return Finding(why, 0.96 if moved else 0.25, scene.input_lines(*(n for n in names if n)))


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
