"""One operator once more in float64: tells what is out of range for its type from what is undefined in any."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firstnan.records import InFloat64
from firstnan.tensors.finite import is_finite, tensors_in
from firstnan.tracing.operators import OpInfo

_MOST = 1 << 22
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


def in_float64(
    func: Any, op: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], before: dict[int, Tensor]
) -> InFloat64 | None:
    """What the same call gives in float64; `before` holds what it overwrote. None where it cannot be made again."""
    # Another draw of random numbers would change what the program draws next.
    if not op.aten.startswith("aten.") or op.view or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    given = [t for _, t in tensors_in((args, kwargs)) if t.is_floating_point()]
    named = zip(op.arguments, args, strict=False)
    reread = [t for name, v in named if name in op.mutated - op.overwritten for _, t in tensors_in(v)]
    if not any(t.dtype in _NARROW for t in given) or sum(t.numel() for t in given) > _MOST:
        return None
    if any(id(t) not in before for t in reread):
        return None
    try:
        with torch.no_grad():
            result = func(*_wide(args, before), **_wide(kwargs, before))
    except Exception:  # no kernel for it: then nothing is known
        return None
    return "finite" if all(is_finite(t) for _, t in tensors_in(result)) else "nonfinite"


def _wide(value: Any, before: dict[int, Tensor]) -> Any:
    """Copies in float64; a type that was asked for becomes float64 too."""
    if isinstance(value, Tensor):
        old = before.get(id(value), value).detach()
        return old.double() if old.dtype in _NARROW else old.clone()
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROW else value
    if isinstance(value, list | tuple):
        return type(value)(_wide(v, before) for v in value)
    if isinstance(value, dict):
        return {k: _wide(v, before) for k, v in value.items()}
    return value
