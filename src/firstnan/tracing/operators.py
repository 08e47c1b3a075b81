"""What is known about each aten operator before it runs: its common name, what it mutates, what it aliases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from firstnan.records.operator_families import UNWRITTEN

_NAMES = {
    "nll_loss_forward": "nll_loss",
    "nll_loss2d_forward": "nll_loss2d",
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "native_batch_norm": "batch_norm",
    "native_batch_norm_legit": "batch_norm",
    "native_batch_norm_legit_no_training": "batch_norm",
    "cudnn_batch_norm": "batch_norm",
    "miopen_batch_norm": "batch_norm",
    "batch_norm_with_update": "batch_norm",
    "native_dropout": "dropout",
    "to_copy": "to",
    "linalg_vector_norm": "norm",
    "cdist_forward": "cdist",
    "linalg_cholesky_ex": "cholesky",
    "linalg_svd": "svd",
    "linalg_eigh": "eigh",
    "linalg_slogdet": "slogdet",
    "linalg_det": "det",
    "linalg_inv_ex": "inv",
    "linalg_solve_ex": "solve",
    "thnn_fused_lstm_cell": "lstm_cell",
    "thnn_fused_gru_cell": "gru_cell",
    "embedding_bag_forward_only": "embedding_bag",
    "lift_fresh": "tensor",
    "lift_fresh_copy": "tensor",
    "index_put_impl": "index_put",
    "fused_rms_norm": "rms_norm",
}
_MAX_ARGUMENTS = 32
# Types of arguments that are not tensors and hold none.
_NUMBERS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout))
_NUMBER_TYPES = frozenset(("int", "float", "bool", "str", "number", "Device", "Layout", "SymInt"))
# Views that their schema does not declare.
_VIEWS = {"unsafe_view", "reshape_alias"}
# In-place operators that never read what they write to.
_OVERWRITES = {
    "copy", "fill", "zero", "normal", "uniform", "random", "bernoulli", "exponential", "geometric",
    "log_normal", "cauchy",
}  # fmt: skip
# Operators that return finite values for all finite inputs.
_KEEP_FINITE = {
    "relu", "threshold_backward", "tanh", "tanh_backward", "sigmoid", "sigmoid_backward", "hardtanh",
    "hardtanh_backward", "neg", "abs", "sign", "clamp", "clamp_min", "clamp_max", "softmax",
    "max_pool2d_with_indices", "maximum", "minimum", "max", "min", "amax", "amin", "where", "masked_fill", "cat",
    "stack", "clone", "copy", "gather", "index", "index_select", "embedding", "slice_backward", "select_backward",
    "flip", "roll", "repeat", "constant_pad_nd", "zeros", "zeros_like", "ones", "ones_like", "arange", "rand",
    "randn", "rand_like", "randn_like", "randperm", "bernoulli", "new_zeros", "new_ones", "eye", "zero", "sin", "cos",
    "one_hot", "sort", "topk",
}  # fmt: skip


def plain_name(name: str) -> str:
    """The common name of an aten operator: `aten::_log_softmax` -> `log_softmax`."""
    name = name.split("::")[-1].split(".")[0].removeprefix("_foreach_").strip("_")
    if name.startswith(("scaled_dot_product", "flash_attention")):
        return "scaled_dot_product_attention"
    return _NAMES.get(name, name)


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What is fixed for one operator overload."""

    name: str
    aten: str
    arguments: tuple[str, ...]
    tensors: tuple[tuple[int, str], ...]
    """Positions and names of the arguments that may be or hold tensors."""
    mutated: frozenset[str]
    overwritten: frozenset[str]
    """Mutated arguments whose old content is not read: `out=`, the target of a copy."""
    view: bool
    pointwise: bool
    empty: bool
    keeps_finite: bool
    """Returns finite values for all finite inputs, so the result of finite inputs need not be read."""
    ignored: bool
    """Neither computes nor writes, so it is not recorded."""

    @property
    def is_collective(self) -> bool:
        return self.aten.startswith(("c10d", "_c10d"))


KNOWN: dict[int, tuple[OpInfo, Any]] = {}
"""By the id of an operator, because hashing an overload runs Python code; with the operator, which it keeps alive."""


def info(func: Any) -> OpInfo:
    known = KNOWN.get(id(func))
    if known is None:
        known = KNOWN[id(func)] = (_describe(func), func)
    return known[0]


def _describe(func: Any) -> OpInfo:
    if not hasattr(func, "_schema"):
        return _higher_order(func)
    schema = func._schema
    name = plain_name(schema.name)
    mutated = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    if name == "batch_norm":
        mutated |= {"running_mean", "running_var"}  # written in training, which the schema does not declare
    overwritten = frozenset(a.name for a in schema.arguments if a.is_out)
    if schema.name.startswith("c10d::"):  # a collective, whose schema declares no writes
        outputs = frozenset(a.name for a in schema.arguments if a.name.startswith("output") and "split" not in a.name)
        mutated, overwritten = mutated | outputs, overwritten | outputs
    if name in _OVERWRITES and "self" in mutated:
        overwritten |= {"self"}
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns) or name in _VIEWS
    tags = func.tags if hasattr(func, "tags") else ()
    return OpInfo(
        name=name,
        aten=str(func),
        arguments=tuple(a.name for a in schema.arguments),
        tensors=tuple((i, a.name) for i, a in enumerate(schema.arguments) if not _is_number(a.type)),
        mutated=mutated,
        overwritten=overwritten,
        view=view and name != "tensor",
        pointwise=torch.Tag.pointwise in tags,
        empty=name in UNWRITTEN,
        keeps_finite=name in _KEEP_FINITE,
        ignored=name in ("detach", "alias", "is_pinned", "wait_tensor")
        or name.startswith("sym_")
        or schema.name.startswith("profiler::"),
    )


def _higher_order(func: Any) -> OpInfo:
    """An operator that calls functions (`while_loop`, `flex_attention`), which has no schema."""
    name = func.name()
    return OpInfo(
        name=plain_name(name),
        aten=name,
        arguments=tuple(f"argument {i}" for i in range(_MAX_ARGUMENTS)),
        tensors=tuple((i, f"argument {i}") for i in range(_MAX_ARGUMENTS)),
        mutated=frozenset(),
        overwritten=frozenset(),
        view=False,
        pointwise=False,
        empty=False,
        keeps_finite=False,
        ignored=False,
    )


def _is_number(kind: Any) -> bool:
    """Whether an argument of this type of a schema is never a tensor, and holds none."""
    return str(kind).removeprefix("Optional[").removeprefix("List[").rstrip("]") in _NUMBER_TYPES


def tensors_of(op: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensor arguments, named as in the schema."""
    found: list[tuple[str, Tensor]] = []
    count = len(args)
    for position, name in op.tensors:
        if position >= count:
            break
        a = args[position]
        kind = type(a)
        if kind is Tensor or kind is Parameter:
            found.append((name, a))
        elif kind not in _NUMBERS:
            found += _inside(name, a)
    for name, a in kwargs.items():
        if type(a) not in _NUMBERS:
            found += _inside(name, a)
    return found


def _inside(name: str, a: Any) -> list[tuple[str, Tensor]]:
    if isinstance(a, Tensor):
        return [(name, a)]
    if not isinstance(a, list | tuple):
        return []
    if a and isinstance(a[0], list):  # the results of a collective
        return [found for one in a for found in _inside(name, one)]
    return [(name, t) for t in a if isinstance(t, Tensor)]


def arguments_keep_finite(args: tuple[Any, ...]) -> bool:
    """Whether all numbers among the arguments are finite and all floating-point tensors have one dtype."""
    dtype = None
    for a in args:
        if isinstance(a, Tensor):
            if a.is_floating_point():
                if dtype is not None and a.dtype is not dtype:
                    return False
                dtype = a.dtype
        elif type(a) is float and not math.isfinite(a):
            return False
    return True
