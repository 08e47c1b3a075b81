"""Tensors and numbers of a report as text: what an operator read and wrote, and with which arguments."""

from __future__ import annotations

from typing import Any

from firstnan.records import Origin, TensorStat, encode
from firstnan.records.words import kind, number

_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
_RESULTS = ("result", "output", "out")


def short_dtype(name: str) -> str:
    """`f32` for `torch.float32`."""
    name = name.removeprefix("torch.")
    letters = name.rstrip("0123456789")
    return _DTYPES.get(letters, letters) + name[len(letters) :] if len(letters) < len(name) else name


def tensor_facts(stat: TensorStat) -> list[str]:
    """What is known about the values of a tensor, the most important first."""
    spread = _spread(stat)
    if stat.bad:
        return [bad_elements(stat), *([f"the rest {spread}"] if spread else [])]
    if not stat.numel:
        return ["no elements"]
    facts = [spread] if spread else []
    if (stat.zeros or stat.negative) and stat.min != stat.max:
        facts.append(f"zeros {stat.zeros}  negative {stat.negative}")
    if stat.smallest and stat.smallest < 1e-6:
        facts.append(f"smallest {number(stat.smallest)}")
    if stat.binary and stat.min != stat.max:
        facts.append("only 0 and 1")
    return facts


def _spread(stat: TensorStat) -> str:
    if stat.min is None or stat.max is None:
        return ""
    if stat.min == stat.max:
        return number(stat.min) if stat.numel - stat.bad == 1 else f"all {number(stat.min)}"
    return f"{number(stat.min)} … {number(stat.max)}"


def bad_elements(stat: TensorStat) -> str:
    """`NaN 3, Inf 1 of 512, first at [0, 2]`."""
    if stat.numel == 1:
        return kind(stat)
    kinds = [f"{name} {n}" for name, n in (("NaN", stat.nan), ("Inf", stat.posinf), ("-Inf", stat.neginf)) if n]
    first = f", first at {list(stat.first_index)}" if stat.first_index and stat.bad < stat.numel else ""
    if stat.bad == stat.numel and len(kinds) == 1:
        return f"{kind(stat)}, all {stat.numel}"
    return f"{', '.join(kinds)} of {stat.numel}{first}"


def witness_line(origin: Origin) -> str:
    """The values at the first bad element: `at [6, 3]: self = -0.499 -> nan`."""
    pairs = list(origin.event.witness[:8]) if origin.event else []
    if not pairs:
        return ""
    produced = origin.produced
    results = (*_RESULTS, produced.name) if produced else _RESULTS
    result = f" -> {number(pairs.pop()[1])}" if pairs[-1][0] in results else ""
    at = f"at {list(produced.first_index)}: " if produced and produced.first_index else ""
    read = ", ".join(f"{name} = {number(value)}" for name, value in pairs)
    return f"{at}{read}{result}"


def scalars_line(origin: Origin) -> str:
    """The operator's arguments other than tensors: `with dim = -1, eps = 1e-05`."""
    pairs = [(n, v) for n, v in origin.event.scalars if v is not None][:6] if origin.event else []
    return "with " + ", ".join(f"{name} = {argument(value)}" for name, value in pairs) if pairs else ""


def argument(value: Any) -> str:
    """The value of an argument, the same for a new report and for a loaded one."""
    value = encode(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list):
        return "[" + ", ".join(argument(v) for v in value[:8]) + (", …]" if len(value) > 8 else "]")
    return str(value)[:60]
