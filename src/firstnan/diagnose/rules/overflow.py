"""Numbers beyond the range of their type, and why they became so large."""

from __future__ import annotations

import math

from firstnan.diagnose.rules import story
from firstnan.diagnose.rules.base import ANY, Finding, rule
from firstnan.diagnose.rules.division import DIVISIONS
from firstnan.diagnose.rules.scene import Scene, describe, dtype_max, largest, number, words
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


def overflowed(scene: Scene) -> bool:
    """Finite numbers went in and something beyond the range came out, with no zero denominator to blame."""
    if not (scene.nan or scene.inf) or scene.fed_by_nonfinite:
        return False
    if scene.event is not None and any(v in (math.inf, -math.inf) for _, v in scene.event.scalars):
        return False
    if scene.op in EXPONENTIALS:
        return scene.inf > 0
    if scene.op in DIVISIONS and scene.zero_at(DIVISIONS[scene.op][1]):
        return False
    if scene.op == "pow":
        exponent = scene.at("exponent")
        zero_base = scene.zero_at("self") and exponent is not None and exponent < 0
        return scene.inf > 0 and not zero_base
    if scene.op in DIFFERENCES:  # a softmax subtracts its maximum: twice the range at most
        return scene.reach is not None and scene.reach > scene.limit / 4
    return scene.op in ARITHMETIC and (scene.inf > 0 or _could_overflow(scene))


def _could_overflow(scene: Scene) -> bool:
    """NaN out of finite numbers is overflow only where the operator adds up: inf - inf inside one matmul."""
    reach = scene.reach
    return reach is not None and reach > math.sqrt(scene.limit) / 1e3


def _operator(scene: Scene) -> str:
    return f"`{scene.code}`" + (f" in {scene.origin.module}" if scene.origin.module else "")


def _sizes(scene: Scene) -> str:
    return f"It read magnitudes up to {number(scene.reach)}; {scene.dtype} ends at {number(scene.limit)}."


def headroom(scene: Scene) -> tuple[str, ...]:
    """How the magnitudes came near the end of the type, operator by operator, as one line of evidence."""
    if scene.event is None or not scene.dtype:
        return ()
    steps, event = [], scene.event
    for _ in range(WAY):
        before = [(largest(e.outputs[0]), e) for e in scene.trace.producers(event) if len(e.outputs) == 1]
        known = [(size, e) for size, e in before if size is not None]
        if not known:
            break
        size, event = max(known, key=lambda pair: pair[0])
        share = size / dtype_max(event.outputs[0].dtype)
        if share > NEAR:
            steps.append(f"{event.op} {number(size)} ({100 * share:.2g} %)")
    if not steps:
        return ()
    return (f"on the way here, of the range of {scene.dtype} ({number(scene.limit)}): {', '.join(reversed(steps))}",)


@rule("exp_overflow")
def exp_overflow(scene: Scene) -> Finding | None:
    if scene.op not in EXPONENTIALS or not scene.inf or scene.fed_by_nonfinite:
        return None
    largest_in = max((s.max for s in scene.stats("self") if s.max is not None), default=scene.at("self"))
    edge = math.log2(scene.limit) if scene.op == "exp2" else math.log(scene.limit)
    why = (
        f"`{scene.code}` takes {scene.op} of {number(largest_in)}. In {scene.dtype or 'this type'} anything "
        f"above {number(edge)} overflows, so {scene.inf} element(s) became infinite."
        f"{story.large(scene.trace, scene.event, 'self')}"
    )
    wide_enough = scene.narrow and largest_in is not None and largest_in < 88.7
    return Finding(why, 0.6 if wide_enough else 0.92, scene.input_lines("self"))


@rule("low_precision_overflow", phases=ANY)
def low_precision_overflow(scene: Scene) -> Finding | None:
    if not scene.narrow or not overflowed(scene):
        return None
    if scene.op in EXPONENTIALS:
        top = max((s.max for s in scene.stats("self") if s.max is not None), default=0.0)
        if top >= 88.7:
            return None
    why = (
        f"{_operator(scene)} computes in {scene.dtype}, whose largest number is {number(scene.limit)}, and "
        f"the result is larger: {scene.inf + scene.nan} element(s) overflowed. The numbers it read reach "
        f"{number(scene.reach)}; float32 or bfloat16 would hold the result."
    )
    confidence = 0.5 if scene.phase == "optimizer" else 0.9
    return Finding(why, confidence, scene.input_lines() + headroom(scene) + _mask_line(scene))


def _mask_line(scene: Scene) -> tuple[str, ...]:
    """The known trap of adding to `finfo.min`, or of adding two such masks."""
    lowest = min((t.min for t in scene.tensors if t.min is not None), default=0.0)
    if scene.op in ("add", "sub") and lowest <= -0.9 * scene.limit:
        return (
            f"one operand holds {number(lowest)}, the least number of {scene.dtype}: a mask that overflows when added",
        )
    return ()


@rule("divergence_lr", phases=ANY)
def divergence_lr(scene: Scene) -> Finding | None:
    growth = scene.growth
    if growth is None or not overflowed(scene) or scene.phase == "input":
        return None
    # An exponential overflows near 88, which a healthy run with an outlier can reach: ask for much clearer growth.
    if scene.op in EXPONENTIALS and (growth.factor < 1e3 or growth.steps < 4):
        return None
    lr = scene.lr()
    rate = f" The learning rate is {number(lr)}." if lr is not None else ""
    why = (
        f"Before {_operator(scene)} overflowed in step {scene.origin.step}, {growth.sentence()}: "
        f"{growth.worse()}.{rate} The operator is only where the numbers ran out of range."
    )
    # Gradients that grow while loss and weights stay put are the depth of the graph, not the step size.
    only_gradients = scene.phase == "backward" and scene.growth_of_loss is None
    state = scene.phase == "optimizer" and scene.op in STATE_OPS
    confidence = 0.6 if scene.narrow or state or only_gradients else 0.93
    return Finding(why, confidence, (*growth.lines(), *scene.input_lines()))


@rule("divergence_lr", title="The first updates are far too large", phases=ANY - {"optimizer", "input"})
def first_updates(scene: Scene) -> Finding | None:
    """Too early to call it growth: the weights are as large as the learning rate makes them."""
    found = _largest_weight(scene) if 0 < scene.origin.step <= 4 and overflowed(scene) else None
    if found is None or scene.growth is not None or not ORDINARY_WEIGHT <= found[2] <= _moved(scene):
        return None
    name, stat, size = found
    why = (
        f"In step {scene.origin.step} the parameter {name} holds magnitudes up to {number(size)}, and the updates so "
        f"far took it there: the learning rate is {number(scene.lr())}. Products with it leave the range of "
        f"{scene.dtype} at {_operator(scene)}."
    )
    return Finding(why, 0.6 if scene.narrow else 0.9, (describe(stat, name),))


STATE_OPS = ("addcmul", "mul", "square", "lerp", "pow", "sqrt")
"""What an optimizer uses to update its own state."""


@rule("bad_init", phases=ANY - {"optimizer"})
def bad_init(scene: Scene) -> Finding | None:
    if not overflowed(scene) or scene.origin.step > 1 or scene.growth is not None or scene.event is None:
        return None
    largest_weight = _largest_weight(scene)
    if largest_weight is None:
        return None
    name, stat, size = largest_weight
    if (size < ORDINARY_WEIGHT and _gain(stat) < ORDINARY_GAIN) or size <= _moved(scene):
        return None
    why = (
        f"In step {scene.origin.step}, before any training could have grown it, the parameter {name} holds "
        f"magnitudes up to {number(size)}. Products with it leave the range of {scene.dtype} at "
        f"{_operator(scene)}."
    )
    confident = 0.88 if size >= ABSURD_WEIGHT else 0.7
    if scene.narrow or scene.op in EXPONENTIALS or scene.phase == "backward":
        confident *= 0.7
    return Finding(why, confident, (describe(stat, name),))


def _largest_weight(scene: Scene) -> tuple[str, TensorStat, float] | None:
    """The parameter with the greatest magnitude among those that fed the operator: name, statistics, magnitude."""
    events = (scene.event, scene.origin.forward_event) if scene.phase == "backward" else (scene.event,)
    weights = [w for e in events if e is not None for w in weights_feeding(scene.trace, e)]
    return max(((name, stat, largest(stat) or 0.0) for name, stat in weights), key=lambda w: w[2], default=None)


def _gain(stat: TensorStat) -> float:
    """What a weight of normal spread multiplies the size of its input with: deviation times the root of the fan-in."""
    return (largest(stat) or 0.0) / 3.5 * math.sqrt(stat.shape[1]) if len(stat.shape) == 2 else 0.0


def _moved(scene: Scene) -> float:
    """How far the updates so far can have moved a weight: plain ones by the gradient, adaptive ones by about 1."""
    before = [s for s in scene.history.steps if s.step < scene.origin.step]
    slopes = [s.grad_norm for s in before if s.grad_norm is not None and math.isfinite(s.grad_norm)]
    return 2 * (scene.lr() or 0.0) * sum(max(1.0, slope) for slope in slopes)


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
def exploding_gradient(scene: Scene) -> Finding | None:
    if scene.event is None or scene.event.in_python_backward or not overflowed(scene):
        return None
    why = (
        f"The forward pass stayed finite, but the gradient of {_operator(scene)} left the range of "
        f"{scene.dtype} in backward. {_sizes(scene)}"
    )
    steps = [s for s in scene.history.steps if s.grad_norm is not None and math.isfinite(s.grad_norm)]
    known = (f"last finite gradient norm: {number(steps[-1].grad_norm)} in step {steps[-1].step}",) if steps else ()
    return Finding(why, 0.8, scene.input_lines() + headroom(scene) + known)


@rule("overflow")
def overflow(scene: Scene) -> Finding | None:
    if not overflowed(scene) or scene.op in EXPONENTIALS:
        return None
    why = (
        f"{_operator(scene)} made {scene.inf + scene.nan} element(s) too large for {scene.dtype} out of "
        f"finite numbers. {_sizes(scene)} No growth over the steps before explains it."
    )
    return Finding(why, 0.6, scene.input_lines() + headroom(scene) + _mask_line(scene))


@rule("overflow", phases=ANY)
def overflow_elsewhere(scene: Scene) -> Finding | None:
    if not scene.inf or scene.nan or scene.fed_by_nonfinite or scene.event is None or not scene.event.born:
        return None
    if scene.event.on_purpose or scene.event.uninitialized or overflowed(scene):
        return None
    why = (
        f"{_operator(scene)} produced {scene.inf} infinite element(s) although everything it read was finite. "
        f"{_sizes(scene)}"
    )
    return Finding(why, 0.25, scene.input_lines())


@rule("overflow", title="A number that does not fit its type", phases=ANY)
def refused_number(scene: Scene) -> Finding | None:
    """torch raises where a number of Python's is larger than what the type of the tensor holds."""
    if "without overflow" not in scene.raised:
        return None
    dtype = scene.tensors[0].dtype if scene.tensors else "float32"
    settings = scene.history.settings if scene.phase == "optimizer" else ()
    numbers = (*settings, *(scene.event.scalars if scene.event else ()))
    given = [(name, float(v)) for name, v in numbers if isinstance(v, int | float)]
    name, value = next(((n, v) for n, v in given if abs(v) > dtype_max(dtype)), ("", 0.0))
    what = f"{name} = {number(value)}" if name else "a number"
    owner = (
        f"{scene.history.optimizer or 'The optimizer'}'s update" if scene.phase == "optimizer" else f"`{scene.code}`"
    )
    why = f"{owner} was given {what}, which {dtype} cannot hold: it ends at {number(dtype_max(dtype))}."
    return Finding(why, 0.9, (f"torch said: {scene.raised}",))
