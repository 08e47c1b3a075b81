"""Numbers beyond the range of their type, and why they became so large."""

from __future__ import annotations

import math

from firstnan.diagnose.rules import provenance
from firstnan.diagnose.rules.base import ANY, Finding, rule
from firstnan.diagnose.rules.division import DIVISIONS
from firstnan.diagnose.rules.failure import Failure, describe, dtype_max, largest, number, words
from firstnan.records import OpEvent, TensorStat, Trace

EXPONENTIALS = ("exp", "expm1", "exp2", "sinh", "cosh", "softplus", "logaddexp")
ARITHMETIC = words(
    "mm addmm bmm baddbmm mv addmv dot vdot linear matmul einsum convolution mul add sub rsub sum mean "
    "cumsum prod cumprod square pow addcmul addcdiv div reciprocal norm var std var_mean mse_loss l1_loss "
    "huber_loss smooth_l1_loss lerp to cdist euclidean_dist layer_norm batch_norm group_norm "
    "scaled_dot_product_attention kl_div nansum index_add scatter_add scatter_reduce index_put ldexp "
    "trace cross outer addr addbmm copy"
)
DIFFERENCES = words("log_softmax softmax logsumexp cross_entropy_loss binary_cross_entropy_with_logits")
ORDINARY_WEIGHT = 50.0
"""Default initialisers stay near 1; a weight beyond this in the first steps was put there."""
ORDINARY_GAIN = 5.0
"""How much larger a layer makes what it reads, to a rough estimate; the usual initialisers stay below 2."""
ABSURD_WEIGHT = 1e6
WAY = 5
"""How many operators back the head-room is told."""
NEAR = 1e-3


def overflowed(failure: Failure) -> bool:
    """Finite numbers went in and something beyond the range came out, with no zero denominator to blame."""
    if not (failure.nan or failure.inf) or failure.fed_by_nonfinite:
        return False
    if failure.event is not None and any(v in (math.inf, -math.inf) for _, v in failure.event.scalars):
        return False
    if failure.op in EXPONENTIALS:
        return failure.inf > 0
    if failure.op in DIVISIONS and failure.zero_at(DIVISIONS[failure.op][1]):
        return False
    if failure.op == "pow":
        exponent = failure.at("exponent")
        zero_base = failure.zero_at("self") and exponent is not None and exponent < 0
        return failure.inf > 0 and not zero_base
    if failure.op in DIFFERENCES:  # a softmax subtracts its maximum: twice the range at most
        return failure.reach is not None and failure.reach > failure.limit / 4
    return failure.op in ARITHMETIC and (failure.inf > 0 or _could_overflow(failure))


def _could_overflow(failure: Failure) -> bool:
    """NaN out of finite numbers is overflow only where the operator adds up: inf - inf inside one matmul."""
    reach = failure.reach
    return reach is not None and reach > math.sqrt(failure.limit) / 1e3


def _operator(failure: Failure) -> str:
    return f"`{failure.code}`" + (f" in {failure.origin.module}" if failure.origin.module else "")


def _sizes(failure: Failure) -> str:
    return f"It read magnitudes up to {number(failure.reach)}; {failure.dtype} ends at {number(failure.limit)}."


def headroom(failure: Failure) -> tuple[str, ...]:
    """How the magnitudes came near the end of the type, operator by operator, as one line of evidence."""
    if failure.event is None or not failure.dtype:
        return ()
    steps, event = [], failure.event
    for _ in range(WAY):
        before = [(largest(e.outputs[0]), e) for e in failure.trace.producers(event) if len(e.outputs) == 1]
        known = [(size, e) for size, e in before if size is not None]
        if not known:
            break
        size, event = max(known, key=lambda pair: pair[0])
        share = size / dtype_max(event.outputs[0].dtype)
        if share > NEAR:
            steps.append(f"{event.op} {number(size)} ({100 * share:.2g} %)")
    if not steps:
        return ()
    return (
        f"on the way here, of the range of {failure.dtype} ({number(failure.limit)}): {', '.join(reversed(steps))}",
    )


@rule("exp_overflow")
def exp_overflow(failure: Failure) -> Finding | None:
    if failure.op not in EXPONENTIALS or not failure.inf or failure.fed_by_nonfinite:
        return None
    largest_in = max((s.max for s in failure.stats("self") if s.max is not None), default=failure.at("self"))
    edge = math.log2(failure.limit) if failure.op == "exp2" else math.log(failure.limit)
    why = (
        f"`{failure.code}` takes {failure.op} of {number(largest_in)}. In {failure.dtype or 'this type'} anything "
        f"above {number(edge)} overflows, so {failure.inf} element(s) became infinite."
        f"{provenance.large(failure.trace, failure.event, 'self')}"
    )
    wide_enough = failure.narrow and largest_in is not None and largest_in < 88.7
    return Finding(why, 0.6 if wide_enough else 0.92, failure.input_lines("self"))


@rule("low_precision_overflow", phases=ANY)
def low_precision_overflow(failure: Failure) -> Finding | None:
    if not failure.narrow or not overflowed(failure):
        return None
    if failure.op in EXPONENTIALS:
        top = max((s.max for s in failure.stats("self") if s.max is not None), default=0.0)
        if top >= 88.7:
            return None
    why = (
        f"{_operator(failure)} computes in {failure.dtype}, whose largest number is {number(failure.limit)}, and "
        f"the result is larger: {failure.inf + failure.nan} element(s) overflowed. The numbers it read reach "
        f"{number(failure.reach)}; float32 or bfloat16 would hold the result."
    )
    confidence = 0.5 if failure.phase == "optimizer" else 0.9
    return Finding(why, confidence, failure.input_lines() + headroom(failure) + _mask_line(failure))


def _mask_line(failure: Failure) -> tuple[str, ...]:
    """The known trap of adding to `finfo.min`, or of adding two such masks."""
    lowest = min((t.min for t in failure.tensors if t.min is not None), default=0.0)
    if failure.op in ("add", "sub") and lowest <= -0.9 * failure.limit:
        return (
            f"one operand holds {number(lowest)}, the least number of {failure.dtype}: a mask that overflows when added",
        )
    return ()


@rule("divergence_lr", phases=ANY)
def divergence_lr(failure: Failure) -> Finding | None:
    growth = failure.growth
    if growth is None or not overflowed(failure) or failure.phase == "input":
        return None
    # An exponential overflows near 88, which a healthy run with an outlier can reach: ask for much clearer growth.
    if failure.op in EXPONENTIALS and (growth.factor < 1e3 or growth.steps < 4):
        return None
    lr = failure.lr()
    rate = f" The learning rate is {number(lr)}." if lr is not None else ""
    why = (
        f"Before {_operator(failure)} overflowed in step {failure.origin.step}, {growth.sentence()}: "
        f"{growth.worse()}.{rate} The operator is only where the numbers ran out of range."
    )
    # Gradients that grow while loss and weights stay put are the depth of the graph, not the step size.
    only_gradients = failure.phase == "backward" and failure.growth_of_loss is None
    state = failure.phase == "optimizer" and failure.op in STATE_OPS
    confidence = 0.6 if failure.narrow or state or only_gradients else 0.93
    return Finding(why, confidence, (*growth.lines(), *failure.input_lines()))


@rule("divergence_lr", title="The first updates are far too large", phases=ANY - {"optimizer", "input"})
def first_updates(failure: Failure) -> Finding | None:
    """Too early to call it growth: the weights are as large as the learning rate makes them."""
    found = _largest_weight(failure) if 0 < failure.origin.step <= 4 and overflowed(failure) else None
    if found is None or failure.growth is not None or not ORDINARY_WEIGHT <= found[2] <= _moved(failure):
        return None
    name, stat, size = found
    why = (
        f"In step {failure.origin.step} the parameter {name} holds magnitudes up to {number(size)}, and the updates so "
        f"far took it there: the learning rate is {number(failure.lr())}. Products with it leave the range of "
        f"{failure.dtype} at {_operator(failure)}."
    )
    return Finding(why, 0.6 if failure.narrow else 0.9, (describe(stat, name),))


STATE_OPS = ("addcmul", "mul", "square", "lerp", "pow", "sqrt")
"""What an optimizer uses to update its own state."""


@rule("bad_init", phases=ANY - {"optimizer"})
def bad_init(failure: Failure) -> Finding | None:
    if not overflowed(failure) or failure.origin.step > 1 or failure.growth is not None or failure.event is None:
        return None
    largest_weight = _largest_weight(failure)
    if largest_weight is None:
        return None
    name, stat, size = largest_weight
    if (size < ORDINARY_WEIGHT and _gain(stat) < ORDINARY_GAIN) or size <= _moved(failure):
        return None
    why = (
        f"In step {failure.origin.step}, before any training could have grown it, the parameter {name} holds "
        f"magnitudes up to {number(size)}. Products with it leave the range of {failure.dtype} at "
        f"{_operator(failure)}."
    )
    confident = 0.88 if size >= ABSURD_WEIGHT else 0.7
    if failure.narrow or failure.op in EXPONENTIALS or failure.phase == "backward":
        confident *= 0.7
    return Finding(why, confident, (describe(stat, name),))


def _largest_weight(failure: Failure) -> tuple[str, TensorStat, float] | None:
    """The parameter with the greatest magnitude among those that fed the operator: name, statistics, magnitude."""
    events = (failure.event, failure.origin.forward_event) if failure.phase == "backward" else (failure.event,)
    weights = [w for e in events if e is not None for w in weights_feeding(failure.trace, e)]
    return max(((name, stat, largest(stat) or 0.0) for name, stat in weights), key=lambda w: w[2], default=None)


def _gain(stat: TensorStat) -> float:
    """What a weight of normal spread multiplies the size of its input with: deviation times the root of the fan-in."""
    return (largest(stat) or 0.0) / 3.5 * math.sqrt(stat.shape[1]) if len(stat.shape) == 2 else 0.0


def _moved(failure: Failure) -> float:
    """How far the updates so far can have moved a weight: plain ones by the gradient, adaptive ones by about 1."""
    before = [s for s in failure.history.steps if s.step < failure.origin.step]
    slopes = [s.grad_norm for s in before if s.grad_norm is not None and math.isfinite(s.grad_norm)]
    return 2 * (failure.lr() or 0.0) * sum(max(1.0, slope) for slope in slopes)


def weights_feeding(trace: Trace, start: OpEvent) -> list[tuple[str, TensorStat]]:
    """The parameters that fed an event, by name; a view's own output speaks for a parameter without statistics."""
    found = []
    for event in (start, *trace.feeding(start, 200)):
        for operand in event.inputs:
            if operand.role != "parameter":
                continue
            stat = operand.stat
            if stat is None and event.op in (
                "t",
                "transpose",
                "view",
                "permute",
                "expand",
                "detach",
                "to",
                "unsqueeze",
            ):
                stat = event.outputs[0] if event.outputs else None
            if stat is not None:
                found.append((operand.label or operand.name, stat))
    return found


@rule("exploding_gradient", phases=frozenset({"backward"}))
def exploding_gradient(failure: Failure) -> Finding | None:
    if failure.event is None or failure.event.in_python_backward or not overflowed(failure):
        return None
    why = (
        f"The forward pass stayed finite, but the gradient of {_operator(failure)} left the range of "
        f"{failure.dtype} in backward. {_sizes(failure)}"
    )
    steps = [s for s in failure.history.steps if s.grad_norm is not None and math.isfinite(s.grad_norm)]
    known = (f"last finite gradient norm: {number(steps[-1].grad_norm)} in step {steps[-1].step}",) if steps else ()
    return Finding(why, 0.8, failure.input_lines() + headroom(failure) + known)


@rule("overflow")
def overflow(failure: Failure) -> Finding | None:
    if not overflowed(failure) or failure.op in EXPONENTIALS:
        return None
    why = (
        f"{_operator(failure)} made {failure.inf + failure.nan} element(s) too large for {failure.dtype} out of "
        f"finite numbers. {_sizes(failure)} No growth over the steps before explains it."
    )
    return Finding(why, 0.6, failure.input_lines() + headroom(failure) + _mask_line(failure))


@rule("overflow", phases=ANY)
def overflow_elsewhere(failure: Failure) -> Finding | None:
    if not failure.inf or failure.nan or failure.fed_by_nonfinite or failure.event is None or not failure.event.born:
        return None
    if failure.event.on_purpose or failure.event.uninitialized or overflowed(failure):
        return None
    why = (
        f"{_operator(failure)} produced {failure.inf} infinite element(s) although everything it read was finite. "
        f"{_sizes(failure)}"
    )
    return Finding(why, 0.25, failure.input_lines())


@rule("overflow", title="A number that does not fit its type", phases=ANY)
def refused_number(failure: Failure) -> Finding | None:
    """torch raises where a number of Python's is larger than what the type of the tensor holds."""
    if "without overflow" not in failure.raised:
        return None
    dtype = failure.tensors[0].dtype if failure.tensors else "float32"
    settings = failure.history.settings if failure.phase == "optimizer" else ()
    numbers = (*settings, *(failure.event.scalars if failure.event else ()))
    given = [(name, float(v)) for name, v in numbers if isinstance(v, int | float)]
    name, value = next(((n, v) for n, v in given if abs(v) > dtype_max(dtype)), ("", 0.0))
    what = f"{name} = {number(value)}" if name else "a number"
    owner = (
        f"{failure.history.optimizer or 'The optimizer'}'s update"
        if failure.phase == "optimizer"
        else f"`{failure.code}`"
    )
    why = f"{owner} was given {what}, which {dtype} cannot hold: it ends at {number(dtype_max(dtype))}."
    return Finding(why, 0.9, (f"torch said: {failure.raised}",))
