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
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR
from torch.utils.data.dataloader import _BaseDataLoaderIter

from firstnan.observe import collectives

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
    (_BaseDataLoaderIter, "__next__"),
)
"""Replaced while any training is watched."""

COLLECTIVES: tuple[Name, ...] = tuple(
    (owner, name)
    for owner in (torch.distributed, getattr(torch.distributed, "distributed_c10d", None))
    for name in collectives.NAMES
    if hasattr(owner, name)
)
"""Replaced as well, if torch has them: a child that replays the step alone needs what other ranks have contributed."""

ALL_OPTIMIZERS: tuple[Name, ...] = ((Optimizer, "__init__"),)
"""Replaced if all optimizers are watched, not only given ones."""

SCHEDULERS: tuple[Name, ...] = tuple(
    (kind, "__init__") for kind in (LRScheduler, ChainedScheduler, ReduceLROnPlateau, SequentialLR)
)
"""Replaced if given optimizers are watched; those named besides LRScheduler do not call its `__init__`."""

PROGRAM: tuple[Name, ...] = (
    (torch, "compile"),
    (Tensor, "item"),
    (Tensor, "__float__"),
    (Tensor, "numpy"),
    (Tensor, "tolist"),
    (Tensor, "__bool__"),
    *(
        (owner, "destroy_process_group")
        for owner in (torch.distributed, getattr(torch.distributed, "distributed_c10d", None))
        if hasattr(owner, "destroy_process_group")
    ),
)
"""Replaced while a whole program is watched."""

LAYERS: tuple[Name, ...] = ((module, "_has_any_global_hook"),) if hasattr(module, "_has_any_global_hook") else ()
"""Replaced while layers are watched that must not have hooks of their own (`layers/global_hooks.py`)."""

CHANGED_SOURCES: tuple[tuple[str, str], ...] = (
    ("io", "open_code"),
    ("_io", "open_code"),
    ("importlib.machinery", "SourceFileLoader.path_stats"),
    ("multiprocessing.spawn", "get_preparation_data"),
    ("subprocess", "Popen._execute_child"),
)
"""Replaced for good in a process that only tests a change of the program (`runner.py`); by module, since
watching a program imports none of them."""

AS_PYTHON_DOES: tuple[tuple[str, str], ...] = (
    ("sys", "argv"),
    ("sys", "excepthook"),
    ("sys", "last_exc"),
    ("sys", "last_traceback"),
    ("sys", "last_type"),
    ("sys", "last_value"),
)
"""Set by `firstnan run` when the program starts or ends with an error, as python itself does (`runner.py`)."""

OWN_PROCESS: tuple[tuple[str, str], ...] = (
    ("os", "_exit"),
    ("os", "execv"),
    ("os", "execve"),
    ("multiprocessing.spawn", "get_preparation_data"),
)
"""Replaced for good by `firstnan run` in the process that it has started for the program (`runner.py`)."""

FORKED: tuple[tuple[str, str], ...] = (
    ("time", "sleep"),
    ("queue", "Queue.__init__"),
    ("queue", "Queue.put"),
    ("queue", "Queue.join"),
    ("threading", "Condition.__init__"),
    ("threading", "Condition.wait"),
    ("concurrent.futures.thread", "ThreadPoolExecutor.submit"),
    ("http.client", "HTTPConnection.connect"),
    ("http.client", "HTTPSConnection.connect"),
    ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter.__init__"),
    ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter._next_data"),
    ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter._reset"),
    ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter._shutdown_workers"),
)
"""Replaced for good in a forked child, where threads, workers and servers are gone (`forked.py`)."""

COMPARED: tuple[tuple[str, str], ...] = (
    ("torch._dynamo.output_graph", "OutputGraph.call_user_compiler"),
    ("torch._dynamo.backends.common", "aot_module_simplified"),
)
"""Replaced as well in a forked child that compares compiled graphs with their operators (`compiler.py`)."""

COMPILER_SETTINGS: tuple[tuple[str, str], ...] = (
    ("torch._functorch.config", "enable_autograd_cache"),
    ("torch._inductor.config", "compile_threads"),
)
"""Set as well in such a child, if torch has them."""

WORKER: tuple[tuple[str, str], ...] = (("torch.utils.data._utils.worker", "_worker_info"),)
"""Set while a forked child reads a stream as the worker that has made the batch (`forked.py`)."""

RANKS: tuple[tuple[str, str], ...] = (
    ("torch._C._distributed_c10d", "ProcessGroup.allreduce"),
    ("torch._C._distributed_c10d", "ProcessGroup.broadcast"),
    ("torch._C._distributed_c10d", "ProcessGroup.recv"),
    ("torch._C._distributed_c10d", "ProcessGroup.recv_anysource"),
    ("torch._C._distributed_c10d", "ProcessGroup.scatter"),
)
"""Replaced as well in a forked child of one of several ranks (`forked.py`)."""

FILTERED: tuple[tuple[str, str], ...] = (
    ("builtins", "open"),
    ("io", "open"),
    ("os", "open"),
    ("os", "chmod"),
    ("os", "chown"),
    ("os", "link"),
    ("os", "mkdir"),
    ("os", "remove"),
    ("os", "rename"),
    ("os", "replace"),
    ("os", "rmdir"),
    ("os", "symlink"),
    ("os", "truncate"),
    ("os", "unlink"),
    ("os", "utime"),
    ("torch", "save"),
    ("torch.utils.data.dataloader", "DataLoader._get_iterator"),
)
"""Replaced as well in a forked child that the kernel lets change no file (`forked.py`)."""

GUARDED: tuple[tuple[str, str], ...] = (
    *(name for name in FILTERED if name != ("torch.utils.data.dataloader", "DataLoader._get_iterator")),
    ("subprocess", "Popen.__init__"),
    ("http.client", "HTTPConnection.connect"),
    ("http.client", "HTTPSConnection.connect"),
)
"""Replaced while the loop is replayed in the program's own process (`write_guard.py`)."""

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
    (module, "_global_forward_hooks_with_kwargs"),
    (module, "_global_module_registration_hooks"),
)
"""torch's own registries of global hooks that are written to."""

REPLACED = (*TRAINING, *COLLECTIVES, *ALL_OPTIMIZERS, *SCHEDULERS, *PROGRAM, *LAYERS, *TRACED)
