"""Each cause: failures where it must be named first, and near misses where it must not."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from firstnan.diagnose.rules import explain, from_history
from firstnan.diagnose.rules.base import RULES, Failure, growth
from firstnan.records import History, LayerTrack, Operand, OpEvent, Origin, Site, StepRecord, TensorStat, Trace

NAN, INF = math.nan, math.inf
Case = tuple[Origin, Trace, History]


def stat(
    name: str = "self", *values: float, dtype: str = "float32", shape: tuple[int, ...] | None = None
) -> TensorStat:
    """The statistics of a tensor with these elements."""
    finite = [v for v in values if math.isfinite(v)]
    return TensorStat(
        name,
        (len(values),) if shape is None else shape,
        dtype,
        min=min(finite, default=None),
        max=max(finite, default=None),
        smallest=min((abs(v) for v in finite), default=None),
        zeros=finite.count(0),
        negative=sum(v < 0 for v in finite),
        nan=sum(math.isnan(v) for v in values),
        posinf=values.count(INF),
        neginf=values.count(-INF),
        binary=bool(finite) and set(finite) <= {0, 1},
    )


def reads(
    name: str, *values: float, producer: int | None = None, role: Any = None, label: str = "", **kw: Any
) -> Operand:
    return Operand(name, stat(name, *values, **kw), producer, role, label)


class TraceBuilder:
    """Builds a trace operator by operator; the last one is the origin."""

    def __init__(self) -> None:
        self.events: list[OpEvent] = []

    def op(self, op: str, *inputs: Operand, out: TensorStat | tuple[TensorStat, ...], **kw: Any) -> int:
        outputs = out if isinstance(out, tuple) else (out,)
        if "born" not in kw and not any(i.stat and i.stat.bad for i in inputs):
            kw["born"] = sum(o.bad for o in outputs)
        kw.setdefault("phase", "forward")
        site = Site("train.py", 10 + len(self.events), code=f"{op}(x)")
        event = OpEvent(
            len(self.events), op, f"aten.{op}.default", step=7, inputs=inputs, outputs=outputs, site=site, **kw
        )
        self.events.append(event)
        return event.index

    def case(self, phase: Any = None, history: History | None = None, step: int = 7, **kw: Any) -> Case:
        event = self.events[-1]
        forward = self.events[event.forward] if event.forward is not None else None
        named = forward or event
        origin = Origin(
            phase or event.phase,
            named.op,
            named.aten,
            event=event,
            forward_event=forward,
            site=named.site,
            step=step,
            **kw,
        )
        return origin, Trace(tuple(self.events)), history or History()


def one(
    op: str, *inputs: Operand, out: TensorStat, phase: Any = None, history: History | None = None, **kw: Any
) -> Case:
    """A trace of a single operator."""
    builder = TraceBuilder()
    at = {k: kw.pop(k) for k in ("step", "label") if k in kw}
    if phase == "optimizer":
        kw["phase"] = "optimizer"
    builder.op(op, *inputs, out=out, **kw)
    return builder.case(phase, history, **at)


def derivative(forward: Operand, of: str, out: TensorStat, node: str, op: str, *inputs: Operand, **kw: Any) -> Case:
    """A finite forward operator, what used it (`then`), and the operator inside its derivative."""
    builder = TraceBuilder()
    then = kw.pop("then", "mul")
    at = builder.op(of, forward, out=out)
    builder.op(then, reads("self", 1.0, producer=at), out=stat("result", 1.0))
    kw.setdefault("made", stat("result", NAN, 1.0))
    builder.op(op, *inputs, out=kw.pop("made"), phase="backward", node=node, forward=at, **kw)
    return builder.case()


def only_gradients(*norms: float) -> History:
    return History(tuple(StepRecord(i, loss=0.4, grad_norm=v) for i, v in enumerate(norms)), "Adam", (("lr", 1e-3),))


def steps(*losses: float, lr: float | None = 0.1) -> History:
    return History(tuple(StepRecord(i, loss=v, grad_norm=v, lr=lr) for i, v in enumerate(losses)), "SGD", (("lr", lr),))


def users_update(eps: float | None, *given: tuple[str, float]) -> Case:
    """A division by a norm that is 0, in an optimizer that the user wrote."""
    builder = TraceBuilder()
    norm = builder.op("norm", reads("self", 0.0), out=stat("result", 0.0), phase="optimizer", scalars=given)
    divided = (reads("self", 2.0), reads("other", 0.0, producer=norm))
    seen = (("self", 2.0), ("other", 0.0), ("result", INF))
    builder.op("div", *divided, out=stat("result", INF), phase="optimizer", witness=seen)
    return builder.case(history=History((), "Lamb", (("lr", 0.1), *((("eps", eps),) if eps is not None else ()))))


def with_infinity(*seen: tuple[str, float]) -> Case:
    """A quotient that reads zeros and infinities, with the values at the bad element."""
    read = (reads("self", 0.0, INF), reads("other", 0.0, INF))
    return one("div", *read, out=stat("result", NAN, 0.0), witness=(*seen, ("result", NAN)), born=1)


def buffered(label: str) -> Case:
    """A buffer that was bad before the step."""
    return Origin("input", "", "", produced=stat(label, NAN), role="buffer", label=label, step=3), Trace(), History()


TOO_LARGE = "RuntimeError: value cannot be converted to type float without overflow"


def refusal(op: str, text: str, phase: Any = "optimizer", **settings: float) -> Case:
    """An operator that raised an error instead of returning."""
    history = History((), "SGD", tuple(settings.items()))
    given = (("alpha", -1e39),)
    return one(op, reads("self", 1.0), out=stat("self", 1.0), phase=phase, history=history, raised=text, scalars=given)


FLAT = steps(1.0, 0.9, 1.1, 0.8, 0.9)
RISING = steps(1.0, 1e4, 1e9, 1e14, 1e18)
DIV = (("self", 0.0), ("other", 0.0), ("result", NAN))
r = reads


def w(*values: float, **kw: Any) -> TensorStat:
    """What an operator wrote."""
    return stat("result", *values, **kw)


def uninitialized() -> Case:
    builder = TraceBuilder()
    builder.op("empty", out=stat("result", NAN, NAN), uninitialized=True, born=0)
    return builder.case("parameter", label="bank.weight")


def logdet(sign: float) -> Case:
    builder = TraceBuilder()
    det = builder.op("slogdet", r("A", 1.0, -1.0), out=(stat("sign", sign), stat("logabsdet", 0.5)))
    const = builder.op("scalar_tensor", out=stat("result", NAN, shape=()), on_purpose=True, scalars=(("s", NAN),))
    builder.op(
        "where", r("condition", 1.0, dtype="bool"), r("self", NAN, producer=const), r("other", 0.5, producer=det),
        out=stat("result", NAN), born=0,
    )  # fmt: skip
    return builder.case()


def batch(read_by: str, module: str) -> Case:
    """A batch of two tensors; the model reads batch[0], and `read_by` reads the bad one, batch[1]."""
    builder = TraceBuilder()
    pred = builder.op("addmm", r("mat1", 1.0, role="input", label="batch[0]"), out=stat("result", 1.0), module="fc")
    bad = r("target", NAN, 1.0, role="input", label="batch[1]")
    builder.op(
        read_by, r("self", 1.0, producer=pred), replace(bad, guilty=True), out=stat("result", NAN), module=module
    )
    return builder.case("input", label="batch[1]", produced=stat("batch[1]", NAN, 1.0), role="input")


def backward_mm(history: History) -> Case:
    origin, trace, _ = POSITIVE["exploding_gradient"][0]()
    return origin, trace, history


def minus(maker: str) -> Case:
    """A row of -inf, minus what `maker` made of it."""
    builder = TraceBuilder()
    x = builder.op("masked_fill", r("self", 1.0, 2.0), out=w(-INF, -INF), on_purpose=True, born=0)
    top = builder.op(maker, r("self", -INF, -INF, producer=x), out=w(-INF), born=0)
    row, other = r("self", -INF, -INF, producer=x), r("other", -INF, producer=top)
    builder.op("sub", row, other, out=w(NAN, NAN), nan_from_inf=2)
    return builder.case()


SQRT = ("SqrtBackward0", "div")
POSITIVE: dict[str, list[Callable[[], Case]]] = {
    "log_of_zero": [
        lambda: one("log", r("self", 0.0, 2.0), out=w(-INF, 0.7), witness=(("self", 0.0), ("result", -INF))),
        lambda: one("log1p", r("self", -1.0, 2.0), out=w(-INF, 1.1)),
        lambda: one("xlogy", r("self", 1.0, 1.0), r("other", 0.0, 2.0), out=w(-INF, 0.7)),
        lambda: one("slogdet", r("A", 0.0, 1.0), out=w(-INF)),
    ],
    "log_of_negative": [
        lambda: one("log", r("self", -0.5, 2.0), out=w(NAN, 0.7)),
        lambda: one("log1p", r("self", -1.5, 2.0), out=w(NAN, 1.1)),
        lambda: logdet(-1.0),
    ],
    "sqrt_of_negative": [
        lambda: one("sqrt", r("self", -1e-7, 2.0), out=w(NAN, 1.4)),
        lambda: one("rsqrt", r("self", -1.0, 2.0), out=w(NAN, 0.7)),
    ],
    "div_by_zero": [
        lambda: one("div", r("self", 1.0, 1.0), r("other", 0.0, 2.0), out=w(INF, 0.5)),
        lambda: one("div", r("self", 1.0), out=w(INF), scalars=(("other", 0.0),)),
        lambda: one("reciprocal", r("self", 0.0, 2.0), out=w(INF, 0.5)),
        lambda: one("rsqrt", r("self", 0.0, 2.0), out=w(INF, 0.7)),
    ],
    "zero_over_zero": [
        lambda: one("div", r("self", 0.0, 1.0), r("other", 0.0, 2.0), out=w(NAN, 0.5), witness=DIV),
        lambda: one("layer_norm", r("input", 3.0, 3.0), out=w(NAN, NAN), scalars=(("eps", 0.0),)),
        lambda: one("div", r("self", 0.0), r("other", 0.0), out=w(NAN), witness=DIV, phase="input"),
        lambda: one("div", r("self", 0.0), r("other", 0.0), out=w(NAN), witness=DIV, phase="parameter"),
    ],
    "zero_times_inf": [
        lambda: one("mul", r("self", 0.0, 1.0), r("other", -INF, -INF), out=w(NAN, -INF), nan_from_inf=1),
        lambda: one(
            "mul", r("self", 0.0, 1.0), out=w(NAN, -INF), scalars=(("other", -INF),), on_purpose=True
        ),
    ],
    "inf_minus_inf": [lambda: one("sub", r("self", INF), r("other", INF), out=w(NAN), nan_from_inf=1)],
    "exp_overflow": [
        lambda: one("exp", r("self", 1.0, 120.0), out=w(2.7, INF)),
        lambda: one("exp", r("self", 120.0, dtype="float16"), out=w(INF, dtype="float16")),
        lambda: one("exp", r("self", 120.0), out=w(INF), history=steps(6.0, 6.1, 9e3, 6.0, 5.5, 6.0)),
    ],
    "fully_masked_softmax": [
        lambda: one(
            "softmax", r("self", -INF, -INF, 1.0, 2.0, shape=(2, 2)), out=w(NAN, NAN, 0.3, 0.7, shape=(2, 2)),
            scalars=(("dim", 1),), nan_from_inf=2,
        ),
        lambda: minus("amax"),
    ],
    "masked_label": [
        lambda: one("nll_loss", r("self", -0.1, -INF), r("target", 1.0, dtype="int64"), out=w(INF, shape=())),
        lambda: one("gather", r("self", -0.1, -INF), out=w(-INF), scalars=(("dim", 1),)),
    ],
    "empty_reduction": [
        lambda: one("mean", r("self"), out=w(NAN, shape=())),
        lambda: one(
            "nll_loss", r("self", -0.5, -0.9), r("target", -100.0, -100.0, dtype="int64"),
            out=w(NAN, shape=()), scalars=(("ignore_index", -100),),
        ),
    ],
    "single_sample_variance": [
        lambda: one("std", r("self", 3.0), out=w(NAN, shape=())),
        lambda: one("var", r("self", 3.0, 4.0, shape=(2, 1)), out=w(NAN, NAN), scalars=(("dim", [1]),)),
    ],
    "ctc_infeasible": [lambda: one("ctc_loss", r("log_probs", -1.0, -2.0), out=w(INF))],
    "sqrt_grad_at_zero": [
        lambda: derivative(
            r("self", 0.0, 1.0), "sqrt", w(0.0, 1.0), *SQRT, r("self", 0.0, 1.0), r("other", 0.0, 2.0),
            witness=DIV,
        ),
        lambda: derivative(
            r("self", 0.0, 1.0), "hypot", w(0.0, 1.0), "HypotBackward0", "div", r("self", 0.0, 1.0),
            r("other", 0.0, 2.0), witness=DIV,
        ),
        # The diagonal of a distance matrix meets `gt` and, as a condition only, `where`: nothing is thrown away.
        lambda: derivative(
            r("self", 0.0, 1.0), "sqrt", w(0.0, 1.0), *SQRT, r("self", 0.0, 1.0), r("other", 0.0, 2.0),
            witness=DIV, then="gt",
        ),
    ],
    "pow_grad_at_zero": [
        lambda: derivative(
            r("self", 0.0, 1.0), "pow", w(0.0, 1.0), "PowBackward0", "pow", r("self", 0.0, 1.0),
            made=w(INF, 1.0), scalars=(("exponent", -0.5),),
        )
    ],
    "acos_grad_at_one": [
        lambda: derivative(
            r("self", 1.0, 0.0), "acos", w(0.0, 1.57), "AcosBackward0", "rsqrt", r("self", 0.0, 1.0),
            made=w(INF, 1.0),
        )
    ],
    "xlogy_grad_at_zero": [
        lambda: derivative(
            r("self", 0.0, 1.0), "xlogy", w(0.0, 0.0), "XlogyBackward0", "div", r("self", 0.0, 1.0),
            r("other", 0.0, 1.0), witness=DIV,
        )
    ],
    "logsumexp_grad_all_inf": [
        lambda: derivative(
            r("self", -INF, -INF), "logsumexp", w(-INF), "LogsumexpBackward0", "sub", r("self", -INF, -INF),
            r("other", -INF), made=w(NAN, NAN), nan_from_inf=2,
        )
    ],
    "where_grad_trap": [
        lambda: derivative(
            r("self", 0.0, 1.0), "log", w(-INF, 0.0), "LogBackward0", "div", r("self", 0.0, 1.0),
            r("other", 0.0, 1.0), witness=DIV, then="where",
        ),
        lambda: derivative(
            r("self", 0.0, 1.0), "sqrt", w(0.0, 1.0), *SQRT, r("self", 0.0, 1.0), r("other", 0.0, 2.0),
            witness=DIV, then="masked_fill",
        ),
        lambda: derivative(
            r("self", 99.0, 1.0), "exp", w(INF, 2.7), "ExpBackward0", "mul", r("self", 0.0, 1.0),
            r("other", INF, 2.7), witness=(("self", 0.0), ("other", INF), ("result", NAN)), then="where",
            nan_from_inf=1,
        ),
    ],
    "degenerate_decomposition": [
        lambda: derivative(
            r("A", 1.0, 1.0), "svd", w(1.0, 1.0), "LinalgSvdBackward0", "div", r("self", 0.0, 0.0),
            r("other", 0.0, 1.0), witness=DIV,
        )
    ],
    "custom_backward": [
        lambda: derivative(
            r("self", 0.0, 1.0), "cumprod", w(0.0, 1.0), "CumProdBackward", "div", r("self", 0.0, 1.0),
            r("other", 0.0, 1.0), witness=DIV, in_python_backward=True,
        )
    ],
    "exploding_gradient": [
        lambda: derivative(
            r("self", 1e15, 1.0), "mm", w(1e20), "MmBackward0", "mm", r("self", 1e25, 1.0),
            r("mat2", 1e15, 1.0), made=w(INF, 1.0),
        )
    ],
    "divergence_lr": [
        lambda: one("pow", r("self", 1e22), out=w(INF), scalars=(("exponent", 2),), history=RISING),
        lambda: one("addmm", r("mat1", 1e22), r("mat2", 1e20), out=w(INF), history=steps(2.0, 3e9, lr=1e6)),
        lambda: one("exp", r("self", 120.0), out=w(INF), history=steps(1.0, 40.0, 900.0, 1e4, 1e5, 2e6)),
    ],
    "low_precision_overflow": [
        lambda: one("mm", r("self", 900.0, dtype="float16"), out=w(INF, dtype="float16")),
        lambda: one("to", r("self", 1e6), out=w(INF, dtype="float16")),
        lambda: one("exp", r("self", 20.0, dtype="float16"), out=w(INF, dtype="float16")),
        lambda: derivative(  # gradients that a hook compresses
            r("self", 1.0), "mm", w(1.0), "MmBackward0", "to", r("self", 1e6), made=w(INF, dtype="float16"),
            in_python_backward=True,
        ),
    ],
    "bad_init": [
        lambda: one(
            "addmm", r("mat1", 1e20), r("mat2", 1e25, role="parameter", label="fc.weight"), out=w(INF), step=0
        )
    ],
    "uninitialized_memory": [uninitialized],
    "nan_parameter": [lambda: (Origin("parameter", "", "", produced=stat("w", NAN), label="w"), Trace(), History())],
    "nan_input": [
        lambda: (Origin("input", "", "", produced=stat("batch[0]", NAN), label="batch[0]"), Trace(), History()),
        lambda: batch("addmm", "fc2"),
    ],
    "nan_label": [
        lambda: batch("mse_loss", ""),
        lambda: (Origin("input", "", "", produced=stat("y", NAN), label="batch['label']"), Trace(), History()),
    ],
    "optimizer_eps": [
        lambda: one(
            "addcdiv", r("self", 1.0), r("tensor1", 0.0), r("tensor2", 0.0), out=w(NAN), phase="optimizer",
            witness=(("tensor1", 0.0), ("tensor2", 0.0), ("result", NAN)),
        ),
        lambda: one(
            "div", r("self", 0.0, role="gradient"), r("other", 0.0, role="state"), out=w(NAN),
            phase="optimizer", witness=DIV,
        ),
    ],
    "optimizer_overflow": [
        lambda: one("addcmul", r("self", 0.0), r("tensor1", 1e30), out=w(INF), phase="optimizer"),
        lambda: one(
            "add", r("self", 1.0), r("other", 2.0), out=w(NAN), phase="optimizer", scalars=(("alpha", NAN),),
            history=replace(steps(1.0), optimizer="LBFGS"),
        ),
    ],
    "nan_lr": [
        lambda: one(
            "add", r("self", 1.0), r("other", 2.0), out=w(NAN), phase="optimizer", scalars=(("alpha", NAN),)
        ),
        lambda: one(
            "addcdiv", r("tensor1", 0.0), r("tensor2", 0.0), out=w(NAN), phase="optimizer",
            history=steps(1.0, 1.0, lr=NAN),
        ),
    ],
    "pow_of_zero": [lambda: one("pow", r("self", 0.0, 2.0), out=w(INF, 0.5), scalars=(("exponent", -1.5),))],
    "pow_of_negative": [lambda: one("pow", r("self", -1.0, 2.0), out=w(NAN, 1.2), scalars=(("exponent", 0.3),))],
    "pole": [
        lambda: one("lgamma", r("self", 0.0, 2.0), out=w(INF, 0.0), witness=(("self", 0.0), ("result", INF))),
        lambda: one("atanh", r("self", 1.0, 0.2), out=w(INF, 0.2)),
    ],
    "arc_out_of_domain": [lambda: one("acos", r("self", 1.0000001, 0.2), out=w(NAN, 1.3))],
    "not_positive_definite": [
        lambda: one("cholesky", r("self", -1.0, 1.0), out=w(1.0), raised="linalg: not positive-definite")
    ],
    "singular_matrix": [
        lambda: one("inv", r("A", 0.0, 1.0), out=w(INF, NAN), raised="linalg.inv: matrix is singular")
    ],
    "overflow": [
        lambda: one("mul", r("self", 1e30), r("other", 1e30), out=w(INF), history=FLAT),
        lambda: one("mul", r("self", 1e30, dtype="bfloat16"), out=w(INF, dtype="bfloat16")),
        lambda: one("div", r("self", 1e30), r("other", 1e-30), out=w(INF), history=FLAT),
    ],
    "nan_constant": [
        lambda: one(
            "where", r("condition", 1.0), r("self", NAN, role="constant"), r("other", 1.0), out=w(NAN), born=0
        ),
        lambda: one("full", out=w(NAN), scalars=(("fill_value", NAN),), on_purpose=True, born=0),
    ],
    "unexplained": [lambda: one("mystery", r("self", 1.0), out=w(NAN))],
}  # fmt: skip

# The same operator, told so that another cause is right: (must not be first, must be first, case).
NEAR_MISSES: list[tuple[str, str, Callable[[], Case]]] = [
    ("log_of_zero", "log_of_negative", POSITIVE["log_of_negative"][0]),
    ("div_by_zero", "zero_over_zero", POSITIVE["zero_over_zero"][0]),
    ("zero_over_zero", "overflow", POSITIVE["overflow"][2]),
    ("exp_overflow", "low_precision_overflow", POSITIVE["low_precision_overflow"][2]),
    ("low_precision_overflow", "exp_overflow", POSITIVE["exp_overflow"][1]),
    ("divergence_lr", "exp_overflow", POSITIVE["exp_overflow"][2]),
    ("low_precision_overflow", "overflow", POSITIVE["overflow"][1]),
    ("divergence_lr", "overflow", POSITIVE["overflow"][0]),
    ("masked_label", "empty_reduction", POSITIVE["empty_reduction"][1]),
    ("nan_label", "nan_input", POSITIVE["nan_input"][1]),
    ("nan_input", "nan_label", POSITIVE["nan_label"][0]),
    ("where_grad_trap", "sqrt_grad_at_zero", POSITIVE["sqrt_grad_at_zero"][0]),
    ("sqrt_grad_at_zero", "where_grad_trap", POSITIVE["where_grad_trap"][1]),
    ("nan_constant", "log_of_negative", POSITIVE["log_of_negative"][2]),
    ("optimizer_eps", "nan_lr", POSITIVE["nan_lr"][1]),
    ("nan_lr", "optimizer_overflow", POSITIVE["optimizer_overflow"][1]),
    ("fully_masked_softmax", "inf_minus_inf", lambda: minus("cumsum")),
    (
        "bad_init",
        "overflow",
        lambda: one(
            "addmm", r("mat1", 1e30), r("mat2", 1e12, role="parameter"), out=w(INF), step=60, history=FLAT
        ),
    ),
    (
        "bad_init",
        "overflow",
        lambda: one("addmm", r("mat1", 1e38), r("mat2", 9.0, role="parameter"), out=w(INF), step=0),
    ),
    (
        "single_sample_variance",
        "overflow",
        lambda: one("var", r("self", 1e30, -1e30), out=w(INF), scalars=(("correction", 1),)),
    ),
    (
        "single_sample_variance",
        "empty_reduction",
        lambda: one("std", r("self"), out=w(NAN, shape=())),
    ),
    (
        "pow_of_negative",
        "overflow",
        lambda: one("pow", r("self", -1e30, 2.0), out=w(INF, 4.0), scalars=(("exponent", 2),)),
    ),
    (
        "pow_grad_at_zero",
        "exploding_gradient",
        lambda: derivative(
            r("self", 1e20, 1.0), "pow", w(1e30), "PowBackward0", "mul", r("self", 1e20, 1.0),
            r("other", 1e22, 1.0), made=w(INF, 1.0),
        ),
    ),
    ("divergence_lr", "exploding_gradient", lambda: backward_mm(only_gradients(5.0, 1e3, 1e5, 1e7, 1e9))),
    ("exploding_gradient", "divergence_lr", lambda: backward_mm(RISING)),
    (
        "optimizer_overflow",
        "log_of_negative",
        lambda: one("log", r("self", -0.5, 2.0), out=w(NAN, 0.7), phase="optimizer"),
    ),
    (
        "exploding_gradient",
        "low_precision_overflow",
        lambda: derivative(
            r("self", 300.0, dtype="float16"), "mm", w(9.0, dtype="float16"), "MmBackward0", "mm",
            r("self", 300.0, dtype="float16"), r("mat2", 300.0, dtype="float16"), made=w(INF, dtype="float16"),
        ),
    ),
    (
        "optimizer_eps",
        "zero_over_zero",
        lambda: one(
            "div", r("self", 0.0, role="parameter"), r("other", 0.0), out=w(NAN), phase="optimizer", witness=DIV
        ),
    ),
    ("nan_label", "nan_input", lambda: buffered("batch['label']")),
    ("inf_minus_inf", "zero_over_zero", lambda: with_infinity(("self", 0.0), ("other", 0.0))),
    ("zero_over_zero", "inf_minus_inf", lambda: with_infinity(("self", INF), ("other", INF))),
    ("unexplained", "decomposition_failed", lambda: refusal("linalg_svd", "The algorithm failed to converge")),
    ("unexplained", "decomposition_failed", lambda: refusal("mul", "linalg.eigh: no convergence")),
    ("decomposition_failed", "overflow", lambda: refusal("add", TOO_LARGE)),
    ("decomposition_failed", "unexplained", lambda: refusal("add", "The size of tensor a (3) must match")),
    ("optimizer_eps", "div_by_zero", lambda: users_update(1e-6)),
    ("div_by_zero", "optimizer_eps", lambda: users_update(None)),
    ("div_by_zero", "optimizer_eps", lambda: users_update(1e-6, ("other", 1e-6))),
    (
        "optimizer_eps",
        "optimizer_overflow",
        lambda: one("addcdiv", r("tensor1", 1e30), r("tensor2", 1e-20), out=w(INF), phase="optimizer"),
    ),
    (
        "zero_times_inf",
        "overflow",
        lambda: one("mul", r("self", 0.0, 1e30), r("other", 2.0, 1e30), out=w(0.0, INF)),
    ),
    (
        "pole",
        "arc_out_of_domain",
        lambda: one("atanh", r("self", 1.5, 0.2), out=w(NAN, 0.2)),
    ),
    (
        "nan_parameter",
        "zero_over_zero",
        POSITIVE["zero_over_zero"][3],
    ),
]  # fmt: skip


def positives() -> list[Any]:
    return [
        pytest.param(slug, make, id=f"{slug}-{i}") for slug, makes in POSITIVE.items() for i, make in enumerate(makes)
    ]


@pytest.mark.parametrize(("slug", "make"), positives())
def test_the_cause_is_named_first(slug: str, make: Callable[[], Case]) -> None:
    causes = explain(*make())
    assert causes[0].slug == slug, [(c.slug, c.confidence) for c in causes]


@pytest.mark.parametrize(
    ("wrong", "right", "make"), [pytest.param(*n, id=f"{n[0]}-not-{i}") for i, n in enumerate(NEAR_MISSES)]
)
def test_a_near_miss_is_told_apart(wrong: str, right: str, make: Callable[[], Case]) -> None:
    causes = explain(*make())
    assert causes[0].slug == right != wrong, [(c.slug, c.confidence) for c in causes]


def test_every_rule_is_shown_by_a_case() -> None:
    fallbacks = {"infinite_derivative", "decomposition_failed"}
    assert {r.slug for r in RULES} - fallbacks == set(POSITIVE) - {"unexplained"}


@pytest.mark.parametrize(("slug", "make"), positives())
def test_causes_are_complete_ordered_and_unique(slug: str, make: Callable[[], Case]) -> None:
    causes = explain(*make())
    assert [c.confidence for c in causes] == sorted((c.confidence for c in causes), reverse=True)
    assert len({c.slug for c in causes}) == len(causes)
    for cause in causes:
        assert cause.title
        assert cause.why.count(". ") + cause.why.count(": ") >= 1, cause
        assert 0 < cause.confidence <= 1
        assert "None" not in cause.why
        assert "  " not in cause.why


def test_sentences_hold_the_numbers_of_this_run() -> None:
    cause = explain(*POSITIVE["exp_overflow"][0]())[0]
    assert "120" in cause.why
    assert "88.7" in cause.why
    grown = explain(*POSITIVE["divergence_lr"][0]())[0]
    assert "1e+18" in grown.why
    assert "learning rate is 0.1" in grown.why
    log = explain(*POSITIVE["log_of_zero"][0]())[0]
    assert any("self = 0 -> -inf" in line for line in log.evidence)
    assert any("1 zero" in line for line in log.evidence)


def stripped(case: Case, keep: set[str]) -> Case:
    """The same case with records missing: statistics, witnesses, sites."""
    origin, trace, history = case

    def poor(event: OpEvent) -> OpEvent:
        inputs = event.inputs if "stats" in keep else tuple(replace(i, stat=None) for i in event.inputs)
        return replace(event, inputs=inputs, witness=event.witness if "witness" in keep else (), site=None, scalars=())

    events = tuple(poor(e) for e in trace.events)
    event = events[origin.event.index] if origin.event else None
    forward = events[origin.forward_event.index] if origin.forward_event else None
    return replace(origin, event=event, forward_event=forward, site=None), Trace(events), history


@pytest.mark.parametrize("keep", [set(), {"stats"}, {"witness"}])
@pytest.mark.parametrize(("slug", "make"), positives())
def test_no_rule_raises_on_missing_records(slug: str, make: Callable[[], Case], keep: set[str]) -> None:
    for case in (make(), stripped(make(), keep)):
        failure = Failure(*case)
        for rule in RULES:
            rule.look(failure)  # explain() would hide an error; here it must show
        assert explain(*case)
    bare = replace(make()[0], event=None, forward_event=None, site=None)
    assert explain(bare, Trace(), History())


def test_a_rule_that_fails_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(failure: Failure) -> None:
        raise ZeroDivisionError

    broken_rules = [replace(r, look=broken) if r.slug == "log_of_zero" else r for r in RULES]
    monkeypatch.setattr("firstnan.diagnose.rules.RULES", broken_rules)
    assert explain(*POSITIVE["log_of_zero"][0]())[0].slug != "log_of_zero"
    assert explain(*POSITIVE["exp_overflow"][0]())[0].slug == "exp_overflow"


@pytest.mark.parametrize(("losses", "rate"), [((14.0, 1384.0), True), ((14.0, 100.0), False), ((1384.0, 14.0), False)])
def test_a_loss_that_shot_up_makes_the_rate_the_second_cause(losses: tuple[float, ...], rate: bool) -> None:
    origin, trace, history = one("exp", r("self", 120.0), out=w(INF), history=steps(*losses))
    causes = explain(replace(origin, step=2), trace, history)
    assert [c.slug for c in causes] == ["exp_overflow", "divergence_lr"][: 1 + rate]


def test_growth_is_a_sustained_rise_to_the_end() -> None:
    rise = growth(steps(5.0, 1.0, 10.0, 100.0, 1e3, INF))
    assert rise is not None
    assert (rise.first_step, rise.last_step) == (1, 4)
    assert rise.factor == pytest.approx(1e3)
    assert growth(steps(1.0, 1.0, 9e3, 1.0, 1.1, 0.9)) is None  # one outlier in the middle
    assert growth(steps(*[1.0] * 20, 9e5)) is None  # one outlier at the end
    assert growth(steps(3.0, 2.0, 1.5, 1.2)) is None
    assert growth(steps(1.0)) is None
    assert growth(History()) is None
    assert growth(only_gradients(5.0, 1e3, 1e5, 1e7, 1e9)) is not None
    assert growth(only_gradients(5.0, 1e3, 1e5, 1e7, 1e9), gradients=False) is None


def test_every_step_is_said_only_of_every_step() -> None:
    steadily, mostly = growth(steps(1.0, 10.0, 100.0, 1e3, 1e4)), growth(steps(1.0, 10.0, 9.0, 1e3, 1e4, 9e5))
    assert steadily is not None
    assert mostly is not None
    assert steadily.sentences().endswith("It rose in every step.")
    assert mostly.sentences().endswith("It rose in 4 of 5 steps.")


def test_a_plateau_far_above_the_rest_is_growth() -> None:
    """Two steps in a row that are far away are not one outlier, even if only one of them rose."""
    rise = growth(steps(1.0, 1.1, 0.9, 1.0, 1.0, 1e9, 1e9))
    assert rise is not None
    assert (rise.first_step, rise.last_step, rise.rises, rise.moves) == (2, 6, 2, 4)
    assert growth(steps(*[1.0] * 5, 1e9, 1.0)) is None


@pytest.mark.parametrize(
    "history",
    [
        RISING,
        steps(*[1.0] * 5, 1e9, 1e9),
        steps(*[1.0] * 5, 1e9, 1.0),
        steps(*[1.0] * 20, 1e9),
        only_gradients(5.0, 1e3, 1e5, 1e7, 1e9),
        History(
            (StepRecord(0, loss=1.0), StepRecord(1, loss=1.0)),
            layers=(LayerTrack("fc", "forward", (0, 1), (1, 1e9), (1, 1e9)),),
        ),
    ],
)
def test_an_overflow_after_growth_never_denies_the_growth(history: History) -> None:
    causes = explain(*one("mul", reads("self", 1e30), out=w(INF), history=history))
    assert "overflow" in [c.slug for c in causes]
    assert not any("did not grow" in c.why for c in causes)


def test_an_overflow_without_growth_says_what_did_not_grow() -> None:
    cause = explain(*one("mul", reads("self", 1e30), out=w(INF), history=FLAT))[0]
    assert cause.why.endswith("The loss and gradient norm did not grow over the recorded steps.")
    unknown = explain(*one("mul", reads("self", 1e30), out=w(INF)))[0]
    assert "grow" not in unknown.why


def test_history_alone_names_only_clear_growth() -> None:
    cause = from_history(RISING)
    assert cause is not None
    assert cause.slug == "divergence_lr"
    assert cause.why == (
        "The loss rose from 1 in step 0 to 1e+18 in step 4, a factor of 1e+18. It rose in every step. "
        "The operator that failed was not traced."
    )
    assert from_history(FLAT) is None
    assert from_history(steps(1.0, 10.0, 100.0, 1e3, 1e4)) is None


@pytest.mark.parametrize(
    ("op", "value", "result", "says"),
    [
        ("exp", 1e34, INF, "too large for any precision"),
        ("pow", 1e30, INF, "too large for any precision"),
        ("pow", 0.0, INF, "undefined in any precision"),
        ("log", 0.0, -INF, "undefined in any precision"),
        ("log", -1.0, NAN, "undefined in any precision"),
    ],
)
def test_too_large_is_not_undefined(op: str, value: float, result: float, says: str) -> None:
    seen = (("self", value), ("result", result))
    failure = Failure(*one(op, reads("self", value), out=stat("result", result), witness=seen, in_float64="nonfinite"))
    (line,) = failure.float64_lines()
    assert line.endswith(says)


def test_a_division_in_a_users_update_is_explained_as_a_division() -> None:
    (cause,) = explain(*users_update(1e-6))
    assert cause.why.startswith("`div(x)` divides 2 by exactly 0: 1 element became infinite.")
    assert "eps" not in cause.why
    assert explain(*users_update(None))[0].why.startswith("Lamb divides by exactly 0 in `div(x)`.")


def test_a_number_that_torch_refuses_is_named() -> None:
    says = "'s update was given lr = 1e+39, but the largest float32 is 3.40282e+38."
    assert explain(*refusal("add", TOO_LARGE, lr=1e39))[0].why == "SGD" + says
    assert "given alpha = -1e+39" in explain(*refusal("add", TOO_LARGE, lr=0.1))[0].why
    assert explain(*refusal("add", TOO_LARGE, "forward", lr=1e39))[0].why.startswith("`add(x)` was given alpha")
    (other,) = explain(*refusal("add", "RuntimeError: sizes\ndiffer"))
    assert other.evidence[0] == "torch said: RuntimeError: sizes"
    assert "raised an error instead of returning a value" in other.why


def test_a_cause_without_support_is_no_alternative() -> None:
    assert [c.slug for c in explain(*with_infinity(("self", 0.0), ("other", 0.0)))] == ["zero_over_zero"]
    (cause,) = explain(*buffered("weight"))
    assert cause.title == "Non-finite value in a buffer"
    assert cause.why.startswith("The buffer weight contains NaN in 1 of 1 element, before step 3 computes anything.")
    assert "from an earlier step, or from code" in cause.why


def test_the_operator_inside_a_backward_by_hand_is_explained_too() -> None:
    assert [c.slug for c in explain(*POSITIVE["custom_backward"][0]())] == ["custom_backward", "zero_over_zero"]


def test_rules_do_not_import_torch() -> None:
    code = "import sys, firstnan.diagnose.rules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bad_state_before_the_first_step_was_loaded() -> None:
    bad = stat("exp_avg_sq of w", NAN)
    origin = Origin("parameter", "", "", produced=bad, inputs=(bad,), role="state", label="exp_avg_sq of w", step=0)
    why = explain(origin, Trace(), History())[0].why
    assert why.endswith("before step 0 computes anything. It was loaded with the state, probably from a checkpoint.")


def test_weights_of_samples_are_not_called_targets() -> None:
    """Both meet the model's output only; soft targets are multiplied with it as well."""
    told = []
    for op in ("mul", "mse_loss"):
        origin, trace, history = batch(op, "")
        assert origin.produced is not None
        told.append(explain(replace(origin, inputs=(origin.produced,)), trace, history)[0].why)
    assert [why.startswith("The targets or weights of this batch") for why in told] == [True, False]
