"""Repeats one operator in float64: was the result out of range for its type, or undefined in any type?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firstnan.records import InFloat64
from firstnan.tensors.finite import is_finite, tensors_in
from firstnan.tracing.operators import OpInfo

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
    return "finite" if all(is_finite(t) for _, t in tensors_in(result)) else "nonfinite"


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
