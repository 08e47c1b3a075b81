"""Operators that call functions of the program (`torch.cond`, `while_loop`), made to work under a dispatch mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._ops import _higher_order_ops
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from firstnan.observe.patches import Patches


def call_chosen_branch(patches: Patches, mode: type[TorchDispatchMode]) -> None:
    """While the patch is in place, `torch.cond` under this mode simply calls the chosen branch.

    Under a mode nothing is compiled, and without the compiler torch (2.6 to 2.15) cannot differentiate `cond`: a
    healthy program would fail. Its operators are also recorded one by one this way.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(op: Any, pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> Any:
            above = _get_current_dispatch_mode()
            transformed = torch._C._functorch.peek_interpreter_stack() is not None  # vmap: both branches may run
            if transformed or torch.compiler.is_compiling() or not (above is None or isinstance(above, mode)):
                return original(op, pred, true_fn, false_fn, operands)
            return (true_fn if pred else false_fn)(*operands)

        return call

    if "cond" in _higher_order_ops:
        patches.put(type(_higher_order_ops["cond"]), "__call__", make)


def accept(mode: type[TorchDispatchMode]) -> None:
    """Lets every higher-order operator that exists by now pass through this mode as one operator.

    Newer versions of torch ask the mode itself (`supports_higher_order_operators`), older ones keep a table.
    """
    if hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        return
    for op in _higher_order_ops.values():
        if mode not in op.python_key_table:
            op.py_impl(mode)(partial(_dispatch, op))


def _dispatch(op: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
    return mode.__torch_dispatch__(op, (), args, kwargs)
