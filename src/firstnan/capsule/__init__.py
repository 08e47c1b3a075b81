"""A failing step in one file: written when it happens, taken home, played again anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

LIMIT = 2 << 30


class Wanted(NamedTuple):
    """Where capsules go and how large they may be; `step` where it is known which one fails."""

    folder: Path
    limit: int = LIMIT
    step: int | None = None
