"""Divisions by zero, in all the forms that aten gives them, and products of zero and infinity."""

from __future__ import annotations

import math

from firstnan.diagnose.rules import story
from firstnan.diagnose.rules.base import Finding, rule
from firstnan.diagnose.rules.scene import Scene, has_zero, number

# (numerator, denominator) by operator; `1 / x` reaches aten as reciprocal(x), then mul.
DIVISIONS: dict[str, tuple[str, str]] = {
    "div": ("self", "other"),
    "true_divide": ("self", "other"),
    "floor_divide": ("self", "other"),
    "remainder": ("self", "other"),
    "fmod": ("self", "other"),
    "addcdiv": ("tensor1", "tensor2"),
    "reciprocal": ("", "self"),
    "rsqrt": ("", "self"),
}
NORMALISERS = ("layer_norm", "group_norm", "batch_norm", "instance_norm", "weight_norm_interface")
PRODUCTS = ("mul", "mm", "addmm", "bmm", "baddbmm", "dot", "mv", "addmv", "prod", "cumprod", "addcmul", "convolution")
ONE_BY_ONE = ("sub", "rsub", "add", "div")
ELSEWHERE = 0.3


@rule("zero_over_zero", elsewhere=ELSEWHERE)
def zero_over_zero(scene: Scene) -> Finding | None:
    if scene.op not in DIVISIONS or not scene.nan:
        return None
    top, bottom = DIVISIONS[scene.op]
    if not top or not scene.zero_at(bottom) or not scene.zero_at(top):
        return None
    named = story.zero(scene.trace, scene.event, bottom) or " Nothing keeps the denominator away from 0."
    why = f"`{scene.code}` divides 0 by 0 in {scene.nan} element(s), and 0/0 is NaN. The denominator is 0.{named}"
    return Finding(why, 0.95, scene.input_lines(top, bottom))


@rule("zero_over_zero", title="Normalising values that are all equal")
def normalise_constant(scene: Scene) -> Finding | None:
    if scene.op not in NORMALISERS or not scene.nan or scene.fed_by_nonfinite:
        return None
    eps = scene.scalar("eps")
    if eps is None and scene.op != "weight_norm_interface":
        return None
    if eps is not None and eps > 1e-30:
        return None
    why = (
        f"`{scene.code}` divides by a spread or norm that is 0, with eps = {number(eps or 0.0)}. Values that "
        f"are all equal then give 0/0, here {scene.nan} NaN."
    )
    return Finding(why, 0.9, scene.input_lines())


@rule("div_by_zero", elsewhere=ELSEWHERE)
def div_by_zero(scene: Scene) -> Finding | None:
    if scene.op not in DIVISIONS or not (scene.inf or scene.op in ("fmod", "remainder")):
        return None
    top, bottom = DIVISIONS[scene.op]
    if not scene.zero_at(bottom):
        return None
    count = sum(s.zeros for s in scene.stats(bottom)) or scene.inf
    numerator = f"{number(scene.at(top))} " if top and scene.at(top) is not None else ""
    named = story.zero(scene.trace, scene.event, bottom)
    result = f"{scene.inf} infinite" if scene.inf else f"{scene.nan} NaN"
    why = (
        f"`{scene.code}` divides {numerator}by a number that is exactly 0 in {count} element(s).{named} "
        f"That gives {result} element(s)."
    )
    return Finding(why, 0.94, scene.input_lines(*(n for n in (top, bottom) if n)))


@rule("zero_times_inf", elsewhere=ELSEWHERE)
def zero_times_inf(scene: Scene) -> Finding | None:
    if scene.op not in PRODUCTS or not scene.nan or scene.event is None:
        return None
    constant = scene.scalar("other", "value")
    scalar_inf = constant in (float("inf"), float("-inf"))
    infinite = scalar_inf or any(t.inf for t in scene.tensors)
    values = [v for n, v in scene.event.witness if n != "result"]
    zero = constant == 0 or (0 in values if values else any(has_zero(t) for t in scene.tensors))
    if not infinite or not zero or any(t.nan for t in scene.tensors):
        return None
    why = (
        f"`{scene.code}` multiplies an infinity by 0, and 0 * inf is NaN ({scene.nan} element(s)). The "
        "infinity is there on purpose, as a mask: a mask of infinities must be filled in or added, never "
        "multiplied."
    )
    return Finding(why, 0.92, scene.input_lines())


@rule("inf_minus_inf")
def inf_minus_inf(scene: Scene) -> Finding | None:
    if scene.op not in ("sub", "rsub", "add", "sum", "mean", "cumsum", "div", "var", "std") or not scene.nan:
        return None
    infinite = sum(t.inf for t in scene.tensors)
    if not infinite or any(t.nan for t in scene.tensors):
        return None
    seen = [v for n, v in scene.event.witness if n != "result"] if scene.event is not None else []
    if seen and scene.op in ONE_BY_ONE and not any(math.isinf(v) for v in seen):
        return None  # the infinities are elsewhere in it
    kind = "divides one infinity by another" if scene.op == "div" else "subtracts one infinity from another"
    why = (
        f"`{scene.code}` reads {infinite} infinite element(s) and {kind}. That has no value, so {scene.nan} "
        "element(s) became NaN."
    )
    return Finding(why, 0.6, scene.input_lines())


@rule("inf_minus_inf", title="An operator that has no value for infinity")
def no_value_for_infinity(scene: Scene) -> Finding | None:
    if scene.event is None or not scene.event.nan_from_inf or any(t.nan for t in scene.tensors):
        return None
    infinite = sum(t.inf for t in scene.tensors)
    why = (
        f"`{scene.code}` reads {infinite} infinite element(s), for which {scene.op} has no value: {scene.nan} "
        "element(s) became NaN. The infinity was put there on purpose, or belongs to a mask."
    )
    return Finding(why, 0.2, scene.input_lines())
