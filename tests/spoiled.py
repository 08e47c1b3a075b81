"""The ways in which a program may write something bad to a gradient after backward."""

from __future__ import annotations

import math

import torch
from torch import Tensor

WAYS = ["in place", "replaced", "accumulated", "through a view", "data replaced", "data"]


def spoil(how: str, weight: Tensor) -> None:
    """Writes something that is not finite to the gradient of this weight, by one of the WAYS."""
    gradient = weight.grad
    assert gradient is not None
    if how == "in place":
        gradient[3, 3] = math.inf
    elif how == "replaced":
        weight.grad = gradient / 0
    elif how == "accumulated":
        (weight * torch.full_like(weight, math.nan)).sum().backward()
    elif how == "through a view":
        gradient.view(-1)[7:8].log_().sub_(math.inf)
    elif how == "data replaced":
        gradient.data = gradient.data.clone()
        gradient.data[-1, -1] = math.inf
    else:
        gradient.data.mul_(math.nan)
