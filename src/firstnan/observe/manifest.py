"""Every name of torch and Python that is replaced or hooked while a program is watched, in one place.

`hooks.py` installs what stands in TRAINING and PROGRAM and nothing else; the tests compare all of it, before and
after each test, with what a fresh process shows.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch._ops import _higher_order_ops
from torch.nn.modules import module
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

Name = tuple[Any, str]

TRAINING: tuple[Name, ...] = (
    (torch.autograd, "backward"),
    (torch.autograd, "grad"),
    # `clip_grad_norm_` finds these two by their names in its module, wherever the program has it from.
    (clip_grad, "_get_total_norm"),
    (clip_grad, "_clip_grads_with_norm_"),
    (torch.amp.GradScaler, "scale"),
    (torch.amp.GradScaler, "step"),
    (_BaseDataLoaderIter, "_next_index"),
    (_BaseDataLoaderIter, "_reset"),
)
"""Replaced while any training is watched."""

ALL_OPTIMIZERS: tuple[Name, ...] = ((Optimizer, "__init__"),)
"""Replaced if all optimizers are watched, not only given ones."""

PROGRAM: tuple[Name, ...] = (
    (_BaseDataLoaderIter, "__next__"),
    (torch, "compile"),
    (Tensor, "item"),
    (Tensor, "__float__"),
    (Tensor, "numpy"),
    (Tensor, "tolist"),
    (Tensor, "__bool__"),
)
"""Replaced while a whole program is watched."""

CHANGED_SOURCES: tuple[tuple[str, str], ...] = (
    ("io", "open_code"),
    ("_io", "open_code"),
    ("importlib.machinery", "SourceFileLoader.path_stats"),
    ("multiprocessing.spawn", "get_preparation_data"),
)
"""Replaced for good in a process that only tests a change of the program (`runner.py`); by module, since
watching a program imports none of them."""

TRACED: tuple[Name, ...] = ((type(_higher_order_ops["cond"]), "__call__"),) if "cond" in _higher_order_ops else ()
"""Replaced while operators are recorded (`higher_order.py`)."""

OUTPUT: tuple[Name, ...] = ((sys, "stdout"), (sys, "stderr"))
"""Replaced while a step is replayed (`runner.py`)."""

HOOKS: tuple[Name, ...] = (
    (optimizer, "_global_optimizer_pre_hooks"),
    (optimizer, "_global_optimizer_post_hooks"),
    (module, "_global_forward_pre_hooks"),
    (module, "_global_forward_hooks"),
    (module, "_global_forward_hooks_always_called"),
)
"""torch's own registries of global hooks that are written to."""

REPLACED = (*TRAINING, *ALL_OPTIMIZERS, *PROGRAM, *TRACED)
