"""A failing step in one file, written when it fails and replayed anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

LIMIT = 2 << 30


class Wanted(NamedTuple):
    """Where to write capsules and how large they may be; `step` is the failing one, if known."""

    folder: Path
    limit: int = LIMIT
    step: int | None = None
