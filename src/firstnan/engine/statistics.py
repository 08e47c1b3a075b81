"""The magnitudes of each layer's outputs and gradients in the last steps, and which of them grew."""

from __future__ import annotations

import json
import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from firstnan.records import LayerTrack, encode

Phase = Literal["forward", "backward"]

_GREW = 4.0
"""A layer has grown if it exceeds its usual size by this factor; from batch to batch a gradient may well double."""


_Row = tuple[int, float, float, float]
"""One layer in one step: step, norm, min, max."""


class Statistics:
    """A ring buffer of the last `steps` steps of every layer, for forward (outputs) and backward (gradients)."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        # In the order in which the layers first ran.
        self._rings: dict[tuple[str, Phase], deque[_Row]] = {}
        self._lock = threading.Lock()

    def add(self, step: int, layer: str, phase: Phase, norm: float, low: float, high: float) -> None:
        """Adds one call of a layer; the calls of one step are merged into one row."""
        with self._lock:
            ring = self._rings.get((layer, phase))
            if ring is None:
                ring = self._rings[layer, phase] = deque(maxlen=self._steps)
            if ring and ring[-1][0] == step:
                _, before, least, most = ring.pop()
                norm = math.hypot(before, norm)
                # Not min() and max(): whether they keep a NaN depends on the order of their arguments.
                low = low if low < least or low != low else least
                high = high if high > most or high != high else most
            ring.append((step, norm, low, high))

    def layers(self) -> list[str]:
        """Every layer seen so far, in the order in which they first ran."""
        with self._lock:
            return list(dict.fromkeys(layer for layer, _ in self._rings))

    def select(self, pattern: str | None = None) -> list[dict[str, Any]]:
        """The rows of the layers whose path matches a glob or contains the text, layer by layer."""
        return [
            {
                "layer": layer,
                "phase": phase,
                "step": step,
                "norm": norm,
                "max_abs": _max_abs(low, high),
                "min": low,
                "max": high,
            }
            for (layer, phase), rows in self._copy().items()
            if pattern is None or _fits(layer, pattern)
            for step, norm, low, high in rows
        ]

    def dump(self, path: str | os.PathLike[str] | None = None, pattern: str | None = None) -> list[dict[str, Any]]:
        """The rows of all layers; also written as JSON lines if a path is given."""
        rows = self.select(pattern)
        if path is not None:
            from firstnan.records.files import write_whole

            write_whole(path, "".join(json.dumps(encode(row), allow_nan=False) + "\n" for row in rows))
        return rows

    def tracks(self, most: int = 6) -> tuple[LayerTrack, ...]:
        """The layers that grew most up to the last step, in the order in which they began to grow."""
        found = []
        rings = self._copy()
        end = max((rows[-1][0] for rows in rings.values()), default=0)
        for (layer, phase), rows in rings.items():
            steps, sizes = tuple(row[0] for row in rows), tuple(_max_abs(low, high) for _, _, low, high in rows)
            # Backward of the failing step may not have run; a layer that has been idle for longer is not involved.
            if steps[-1] >= end - 1 and (growth := _growth(sizes)):
                factor, left = growth
                track = LayerTrack(layer, phase, steps, tuple(row[1] for row in rows), sizes)
                found.append((factor, steps[left], track))
        # Of those that changed equally, the first ones: the others were only affected by them.
        found.sort(key=lambda f: (-f[0], f[1]))
        return tuple(track for _, _, track in sorted(found[:most], key=lambda f: f[1]))

    def clear(self) -> None:
        with self._lock:
            self._rings.clear()

    def _copy(self) -> dict[tuple[str, Phase], list[_Row]]:
        with self._lock:
            return {key: list(ring) for key, ring in self._rings.items() if ring}


def _fits(layer: str, pattern: str) -> bool:
    return fnmatchcase(layer, pattern) if any(c in pattern for c in "*?[") else pattern in layer


def _max_abs(low: float, high: float) -> float:
    return math.nan if low != low or high != high else max(abs(low), abs(high))


def _growth(sizes: Sequence[float]) -> tuple[float, int] | None:
    """The factor by which the layer exceeds its usual size, and the index at which that began; None if it did not grow.

    The factor is 1.0 if it went from its usual size to NaN or Inf at once.
    """
    # The median of the older half, so neither the growth itself nor a single outlier counts as usual.
    older = sorted(math.inf if math.isnan(v) else v for v in sizes[: (len(sizes) + 1) // 2])
    usual = older[(len(older) - 1) // 2]
    if usual == 0:  # a head that starts at zero grows from its first real size
        usual = min((v for v in sizes if 0 < v < math.inf), default=0.0)
    if usual == math.inf:  # as it always was: a mask
        return None
    left = len(sizes)
    while left and not sizes[left - 1] <= _GREW * usual:
        left -= 1
    if left == len(sizes):
        return None
    return max((v / usual for v in sizes[left:] if math.isfinite(v)), default=1.0), left
