"""What a row of a batch is to the user: a sample, a node of a graph, a token of a text."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

_GRAPH = re.compile(r"edge|adj|laplac|graph", re.IGNORECASE)
_TEXT = re.compile(r"(^|[^a-z])(input_ids|tokens?|texts?|chars?|words?|sentences?|documents?)([^a-z]|$)", re.IGNORECASE)


def unit_of(data: Iterable[tuple[str, Tensor]], size: int) -> str:
    """What the `size` rows are, by the names and shapes of the step's data."""
    for name, t in data:
        if _GRAPH.search(name) and t.dim() == 2 and _connects(t, size):
            return "node"
        if _TEXT.search(name) and not t.is_floating_point() and t.numel() == size:
            return "token"
    return "sample"


def _connects(t: Tensor, size: int) -> bool:
    """Whether this is a matrix between `size` nodes, or a list of edges between them."""
    if tuple(t.shape) == (size, size):
        return True
    pairs = 2 in t.shape and t.layout is torch.strided and not t.is_floating_point() and t.dtype != torch.bool
    return pairs and t.numel() > 0 and 0 <= int(t.min()) <= int(t.max()) < size
