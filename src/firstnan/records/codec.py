"""Records as JSON values, and back."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

FORMAT = "firstnan-report"
VERSION = 1


def plain(value: Any) -> Any:
    """`value` with tuples as lists and non-finite numbers as the strings "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "__dataclass_fields__"):
        return plain(asdict(value))
    return str(value)


def number(value: Any) -> Any:
    """The inverse of `plain` for one number."""
    return float(value) if value in ("nan", "inf", "-inf") else value


def dumps(value: Any) -> str:
    return json.dumps(plain(value), indent=1, allow_nan=False)
