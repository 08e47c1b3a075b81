"""One operator that wrote a non-finite value: what was born there, what was passed on, and the same in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from firstnan.records import InFloat64, TensorStat
from firstnan.records.operator_families import ADDED_PRODUCTS
from firstnan.tensors.finite import histogram, is_finite, readable, stat, tensors_in, unravel
from firstnan.tracing.operators import OpInfo

MOST_ROWS = 64


@dataclass(frozen=True, slots=True)
class Detail:
    inputs: tuple[TensorStat | None, ...]
    guilty: tuple[bool, ...]
    outputs: tuple[TensorStat, ...]
    born: int = 0
    nan_from_inf: int = 0
    on_purpose: bool = False
    witness: tuple[tuple[str, float], ...] = ()
    witness_index: tuple[int, ...] | None = None
    bad_rows: tuple[int, ...] = ()
    in_float64: InFloat64 | None = None


def examine(
    op: OpInfo,
    tensors: list[tuple[str, Tensor]],
    results: list[Tensor],
    scalars: tuple[tuple[str, Any], ...],
    before: dict[int, Tensor] | None = None,
    *,
    histograms: bool = False,
) -> Detail:
    """The full evidence of one call; `before` holds copies of arguments that the call overwrote.

    An overwritten argument without a copy was finite. `histograms`: also of what it read, if it created a value.
    """
    before = before or {}
    overwritten = {id(t) for t in results}
    inputs = [(name, before.get(id(t), None if id(t) in overwritten else t)) for name, t in tensors]
    stats = tuple(stat(name, t) if t is not None else None for name, t in inputs)
    outputs = tuple(stat("result", t) for t in results if readable(t) is not None)
    bad_result = next((t for t in results if (p := readable(t)) is not None and not _all_finite(p)), None)
    if bad_result is None:
        return Detail(stats, tuple(bool(s and s.bad) for s in stats), outputs)
    result = readable(bad_result)
    assert result is not None
    flow = _flow(op, inputs, results, result, scalars, stats, outputs)
    learned = any(t is not None and t.requires_grad for _, t in tensors)
    purpose = _on_purpose(op, scalars, stats, outputs, learned)
    at, witness = _witness(inputs, bad_result, flow) if op.pointwise else (None, ())
    rows = flow.bad_rows
    if not rows and result.dim() and bad_result.dim():
        passed_on = not (flow.born or flow.nan_from_inf)
        source = next((t for (_, t), guilty in zip(inputs, flow.guilty, strict=True) if guilty), None)
        given = readable(source) if passed_on else None
        # An operator like batch norm spreads a value over all rows: the rows it came in are the bad ones.
        if given is None or given.shape[:1] != result.shape[:1]:
            given = result
        rows = _rows(~torch.isfinite(given), given)
    if histograms and not purpose and (flow.born or flow.nan_from_inf):
        stats = tuple(
            replace(s, histogram=histogram(t)) if s is not None and t is not None else s
            for s, (_, t) in zip(stats, inputs, strict=True)
        )
    return Detail(stats, flow.guilty, outputs, flow.born, flow.nan_from_inf, purpose, witness, at, rows)


@dataclass(frozen=True, slots=True)
class _Flow:
    """Which inputs passed on non-finite values, and how many elements became non-finite here."""

    guilty: tuple[bool, ...]
    born: int = 0
    nan_from_inf: int = 0
    bad_rows: tuple[int, ...] = ()


def _flow(
    op: OpInfo,
    inputs: list[tuple[str, Tensor | None]],
    results: list[Tensor],
    result: Tensor,
    scalars: tuple[tuple[str, Any], ...],
    stats: tuple[TensorStat | None, ...],
    outputs: tuple[TensorStat, ...],
) -> _Flow:
    values = [readable(t) if t is not None else None for _, t in inputs]
    if op.name == "where" and len(values) == 3:
        return _by_element(_selected(inputs), result)
    if op.name == "masked_fill" and values[0] is not None:
        return _by_element(_unmasked(inputs), result)
    if op.aten.startswith("aten._foreach_"):
        return _foreach(inputs, results, scalars)
    if op.pointwise or op.name in ("copy", "to", "clone"):
        return _by_element(values, result, scalars)
    # A finite product added to the first argument, which may be a mask.
    if op.name in ADDED_PRODUCTS and values[0] is not None and all(v is None or _all_finite(v) for v in values[1:]):
        return _by_element([values[0], *(None for _ in values[1:])], result)
    flow = _by_tensor(stats, outputs)
    if op.name == "batch_norm" and flow.guilty[0]:
        # Training writes the running statistics and does not read them, so bad ones are not responsible.
        names = [name for name, _ in inputs]
        return replace(flow, guilty=tuple(g and "running" not in n for n, g in zip(names, flow.guilty, strict=True)))
    return flow


def _all_finite(t: Tensor) -> bool:
    return bool(torch.isfinite(t).all())


def _by_tensor(stats: tuple[TensorStat | None, ...], outputs: tuple[TensorStat, ...]) -> _Flow:
    """Judges by whole tensors, for an operator that mixes elements."""
    guilty = tuple(bool(s and s.bad) for s in stats)
    bad, nan = sum(o.bad for o in outputs), sum(o.nan for o in outputs)
    if not any(guilty):
        return _Flow(guilty, born=bad)
    return _Flow(guilty, nan_from_inf=nan if not any(s and s.nan for s in stats) else 0)


def _by_element(values: list[Tensor | None], result: Tensor, scalars: tuple[tuple[str, Any], ...] = ()) -> _Flow:
    """Judges element by element, for an operator whose inputs and result line up."""
    bad = ~torch.isfinite(result)
    numbers = [v for _, v in scalars if isinstance(v, float)]
    known_nan = torch.full_like(bad, any(math.isnan(v) for v in numbers))
    known_inf = torch.full_like(bad, any(math.isinf(v) for v in numbers))
    guilty = []
    for v in values:
        if v is None or _all_finite(v):
            guilty.append(False)
            continue
        try:
            nan, inf = torch.isnan(v).expand(bad.shape), torch.isinf(v).expand(bad.shape)
        except RuntimeError:  # Shapes that do not broadcast, as of a real view of a complex tensor.
            nan, inf = torch.isnan(v).any(), torch.isinf(v).any()
        known_nan |= nan
        known_inf |= inf
        guilty.append(bool((bad & (nan | inf)).any()))
    born = bad & ~known_nan & ~known_inf
    from_inf = torch.isnan(result) & ~known_nan & known_inf
    where = born if bool(born.any()) else from_inf if bool(from_inf.any()) else bad
    return _Flow(tuple(guilty), int(born.sum()), int(from_inf.sum()), _rows(where, result))


def _foreach(
    inputs: list[tuple[str, Tensor | None]], results: list[Tensor], scalars: tuple[tuple[str, Any], ...]
) -> _Flow:
    """Judges each position of the lists by itself: a foreach operator is many calls in one."""
    guilty = [False] * len(inputs)
    born = from_inf = 0
    places: dict[str, list[int]] = {}
    for at, (name, _) in enumerate(inputs):
        places.setdefault(name, []).append(at)
    for i, r in enumerate(results):
        result = readable(r)
        if result is None:
            continue
        mine = [at[i] if len(at) > 1 else at[0] for at in places.values() if len(at) in (1, len(results))]
        flow = _by_element([readable(inputs[at][1]) for at in mine], result, scalars)
        for at, passed_on in zip(mine, flow.guilty, strict=True):
            guilty[at] = guilty[at] or passed_on
        born, from_inf = born + flow.born, from_inf + flow.nan_from_inf
    return _Flow(tuple(guilty), born, from_inf)


def _selected(inputs: list[tuple[str, Tensor | None]]) -> list[Tensor | None]:
    """What `where` selected from each side, with zeros in place of the rest."""
    condition, one, other = (t for _, t in inputs)
    a, b = readable(one), readable(other)
    if condition is None or a is None or b is None:
        return [None, a, b]
    zero = torch.zeros((), dtype=a.dtype, device=a.device)
    return [None, torch.where(condition, a, zero), torch.where(condition, zero.to(b.dtype), b)]


def _unmasked(inputs: list[tuple[str, Tensor | None]]) -> list[Tensor | None]:
    first, mask = inputs[0][1], inputs[1][1]
    a = readable(first)
    if a is None or mask is None:
        return [a, None]
    value = readable(inputs[2][1]) if len(inputs) > 2 else None
    return [a.masked_fill(mask, 0), None, value]


def _rows(where: Tensor, result: Tensor) -> tuple[int, ...]:
    if result.dim() == 0 or where.dim() == 0:
        return ()
    rows = where.reshape(where.shape[0], -1).any(1).nonzero().flatten()
    return tuple(rows[:MOST_ROWS].tolist())


def _witness(
    inputs: list[tuple[str, Tensor | None]], result: Tensor, flow: _Flow
) -> tuple[tuple[int, ...] | None, tuple[tuple[str, float], ...]]:
    """The first element that went wrong here, and what was read and written there; magnitudes of complex numbers."""
    if result.dtype.is_complex or any(t is not None and t.dtype.is_complex for _, t in inputs):
        inputs = [(name, t.detach().abs() if t is not None and t.dtype.is_complex else t) for name, t in inputs]
        result = result.detach().abs()
    r = readable(result)
    if r is None or r.shape != result.shape:
        return None, ()
    bad = torch.isnan(r) if flow.nan_from_inf and not flow.born else ~torch.isfinite(r)
    if flow.born or flow.nan_from_inf:
        known = torch.zeros_like(bad)
        for _, t in inputs:
            v = readable(t)
            if v is not None and v.dim() <= bad.dim():
                known |= (~torch.isfinite(v) if flow.born else torch.isnan(v)).expand(bad.shape)
        bad &= ~known
    if not bool(bad.any()):
        return None, ()
    index = unravel(int(bad.flatten().to(torch.uint8).argmax()), tuple(bad.shape))
    pairs = []
    for name, t in inputs:
        if t is None or t.dim() > len(index) or t.layout is not torch.strided:
            continue
        try:
            pairs.append((name, float(t.detach().expand(result.shape)[index])))
        except RuntimeError:
            continue
    return index, (*pairs, ("result", float(r[index])))


def _on_purpose(
    op: OpInfo,
    scalars: tuple[tuple[str, Any], ...],
    stats: tuple[TensorStat | None, ...],
    outputs: tuple[TensorStat, ...],
    learned: bool,
) -> bool:
    """Whether the program asked for the infinity or NaN: a constant, a mask, the logarithm of a mask."""
    if any(isinstance(v, float) and not math.isfinite(v) for _, v in scalars):
        return True
    if op.name == "tensor":
        return all(o.numel == 1 or (not o.nan and mask_like(o)) for o in outputs)
    # Probabilities computed by the model can be exactly 0 or 1 as well, but are not a mask.
    return op.name == "log" and not learned and all(s is None or (s.binary and s.max == 1) for s in stats)


def mask_like(s: TensorStat) -> bool:
    """Whether infinities of one sign stand among equal elements, as in an additive mask or a distance table."""
    return s.nan == 0 and (s.posinf == 0 or s.neginf == 0) and (s.min is None or s.min == s.max)


def numbers_in(op: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The arguments that are not tensors, by name."""
    found: list[tuple[str, Any]] = []
    for name, value in [*zip(op.arguments, args, strict=False), *kwargs.items()]:
        if isinstance(value, bool | int | float | str):
            found.append((name, value))
        elif isinstance(value, list | tuple) and value and all(isinstance(v, int | float) for v in value):
            found.append((name, list(value)))
    return tuple(found)


_MAX_ELEMENTS = 1 << 22
_NARROWER = (torch.float32, torch.float16, torch.bfloat16)


def in_float64(
    func: Any, op: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], before: dict[int, Tensor]
) -> InFloat64 | None:
    """Whether the same call is finite in float64, None if it cannot be repeated; `before` holds what it overwrote."""
    # Drawing random numbers again would change what the program draws next.
    if not op.aten.startswith("aten.") or op.view or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    given = [t for _, t in tensors_in((args, kwargs)) if t.is_floating_point()]
    named = zip(op.arguments, args, strict=False)
    reread = [t for name, v in named if name in op.mutated - op.overwritten for _, t in tensors_in(v)]
    if not any(t.dtype in _NARROWER for t in given) or sum(t.numel() for t in given) > _MAX_ELEMENTS:
        return None
    if any(id(t) not in before for t in reread):
        return None
    try:
        with torch.no_grad():
            result = func(*_to_float64(args, before), **_to_float64(kwargs, before))
    except Exception:  # there is no float64 kernel
        return None
    if all(is_finite(t) for _, t in tensors_in(result)):
        return "finite"
    # The derivative of attention reads sums that forward has rounded to float32: with the scores in float64 they do
    # not fit together, and exp(score - sum) may overflow although the same step in float64 would not.
    return None if "logsumexp" in op.arguments else "nonfinite"


def _to_float64(value: Any, before: dict[int, Tensor]) -> Any:
    """Copies tensors to float64; a requested dtype becomes float64 too."""
    if isinstance(value, Tensor):
        old = before.get(id(value), value).detach()
        return old.double() if old.dtype in _NARROWER else old.clone()
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROWER else value
    if isinstance(value, list | tuple):
        return type(value)(_to_float64(v, before) for v in value)
    if isinstance(value, dict):
        return {k: _to_float64(v, before) for k, v in value.items()}
    return value
