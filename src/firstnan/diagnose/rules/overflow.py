"""Numbers beyond the range of their type and why they became so large, and updates that go wrong."""

from __future__ import annotations

import math
from typing import Any

from firstnan.diagnose.rules.base import (
    ANY,
    Explanation,
    Failure,
    Growth,
    counted,
    describe,
    dtype_max,
    falls_without_bound,
    has_zero,
    is_adaptive,
    largest,
    not_growing,
    rule,
    why_large,
)
from firstnan.diagnose.rules.data import writes_nan
from firstnan.diagnose.rules.operators import div_by_zero, zero_over_zero
from firstnan.records import OpEvent, OptimizerHistory, Phase, TensorStat, Trace
from firstnan.records.operator_families import (
    COPIES,
    DIVISIONS,
    EXPONENTIALS,
    FUSED_UPDATES,
    OVERFLOWING,
    SHIFTED,
    STATE_UPDATES,
    VIEWS,
)
from firstnan.records.words import number, optimizer_words, place, shortened

ORDINARY_WEIGHT = 50.0
"""Default initialisers stay near 1; a larger weight in the first steps was put there."""
ORDINARY_GAIN = 5.0
"""How much larger a layer makes its input, roughly; the usual initialisers stay below 2."""
ABSURD_WEIGHT = 1e6
EXP_LIMIT = 88.7
"""exp of more is too large for float32 and bfloat16."""
STEPS_BACK = 5
"""How many operators back the magnitudes are shown."""
NEAR = 1e-3
JUST_BEFORE = 8
"""So many steps before the failure a rate may begin to rise that leaves no time for growth."""
ABSURD_RATE = 10.0
ABSURD_START = 1e20
"""A first loss, and a gradient of it, that no data of an ordinary model has, not even data without any scaling."""
SHOT_UP = 10.0
"""A loss that is so many times larger after a few updates was made so by them, or by its batch."""
LOST = 1e3
"""A loss or weights that grew by this factor over some steps have no way back."""


def overflowed(failure: Failure) -> bool:
    """Finite numbers went in and something beyond the range came out, with no zero denominator to blame."""
    if not failure.bad or failure.fed_by_nonfinite:
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
    reach = failure.reach or 0.0
    if failure.op in SHIFTED:
        return reach > failure.limit / 4
    # NaN from finite numbers is overflow only where the operator adds up: inf - inf inside one matmul.
    return failure.op in OVERFLOWING and (failure.inf > 0 or reach > math.sqrt(failure.limit) / 1e3)


def _operator(failure: Failure) -> str:
    module = failure.origin.module
    module = f'"{module}"' if module[:1].isdigit() else module
    return f"`{failure.code}`" + (f" in {module}" if module else "")


def _sizes(failure: Failure) -> str:
    limit = f"the largest {failure.dtype or 'float32'} is {failure.limit:g}."
    return f"Here {limit}" if failure.reach is None else f"The inputs reach {number(failure.reach)}, and {limit}"


def _magnitudes_before(failure: Failure) -> tuple[str, ...]:
    """How the magnitudes came near the end of the type, operator by operator, as one line of evidence."""
    if failure.event is None or not failure.dtype:
        return ()
    steps, event = [], failure.event
    for _ in range(STEPS_BACK):
        before = [(largest(e.outputs[0]), e) for e in failure.trace.producers(event) if len(e.outputs) == 1]
        known = [(size, e) for size, e in before if size is not None]
        if not known:
            break
        size, event = max(known, key=lambda pair: pair[0])
        share = size / dtype_max(event.outputs[0].dtype)
        if share > NEAR:
            steps.append(f"{event.op} {number(size)} ({100 * share:.2g}%)")
    if not steps:
        return ()
    range_of = f"the range of {failure.dtype} ({failure.limit:g})"
    return (f"magnitudes before it, as a share of {range_of}: {', '.join(reversed(steps))}",)


@rule("exp_overflow")
def exp_overflow(failure: Failure) -> Explanation | None:
    if failure.op not in EXPONENTIALS or not failure.inf or failure.fed_by_nonfinite:
        return None
    top = failure.highest("self")
    if failure.op in ("cosh", "sinh"):  # on both sides of 0
        top = max((largest(s) or 0.0 for s in failure.stats("self")), default=top)
    edge = math.log2(failure.limit) if failure.op == "exp2" else math.log(failure.limit)
    why = (
        f"`{failure.code}` computes {failure.op} of {number(top)}, but in {failure.dtype or 'this type'} "
        f"{failure.op} overflows above {number(edge)}. {counted(failure.inf)} became infinite."
        f"{why_large(failure.trace, failure.event, 'self')}"
    )
    fits_float32 = failure.narrow and top is not None and top < EXP_LIMIT
    return Explanation(why, 0.6 if fits_float32 else 0.92, failure.input_lines("self"))


@rule("low_precision_overflow", phases=ANY)
def low_precision_overflow(failure: Failure) -> Explanation | None:
    if not failure.narrow or not overflowed(failure):
        return None
    if failure.op in EXPONENTIALS and (failure.highest("self") or 0.0) >= EXP_LIMIT:
        return None
    known = failure.event.in_float64 if failure.event is not None else None
    wider = "" if known == "nonfinite" else " In float32 or bfloat16 the result would be finite."
    why = (
        f"{_operator(failure)} computes in {failure.dtype}, and {counted(failure.bad)} overflowed. "
        f"{_sizes(failure)}{wider}"
    )
    confidence = 0.5 if failure.phase == "optimizer" else 0.9
    return Explanation(why, confidence, failure.input_lines() + _magnitudes_before(failure) + _mask_line(failure))


def _mask_line(failure: Failure) -> tuple[str, ...]:
    """The known trap of adding to `finfo.min`, or of adding two such masks."""
    lowest = min((t.min for t in failure.tensors if t.min is not None), default=0.0)
    if failure.op in ("add", "sub") and lowest <= -0.9 * failure.limit:
        return (f"one input holds {number(lowest)}, the lowest {failure.dtype}: a mask that overflows when added to",)
    return ()


@rule("divergence_lr", phases=ANY)
def divergence_lr(failure: Failure) -> Explanation | None:
    growth = failure.growth
    if growth is None or not overflowed(failure) or failure.phase == "input":
        return None
    # An exponential overflows near 88, which a healthy run with an outlier can reach: ask for much clearer growth.
    if _is_unclear(failure, growth) or falls_without_bound(failure.diverging):
        return None
    why = (
        f"{_whose(failure)}{growth.sentences()}{rate_in_use(failure)} {_operator(failure)} is only where the numbers "
        f"left the range of {failure.dtype}."
    )
    # Gradients that grow while loss and weights do not: the depth of the graph, not the learning rate.
    only_gradients = failure.phase == "backward" and failure.growth_of_loss is None
    state = failure.phase == "optimizer" and failure.op in STATE_UPDATES and not _is_lost(failure)
    confidence = 0.6 if failure.narrow or state or only_gradients else 0.93
    return Explanation(why, confidence, (*growth.lines(), *failure.input_lines()))


@rule("divergence_lr", title="The loss falls without bound", phases=ANY - {"input"})
def no_lower_bound(failure: Failure) -> Explanation | None:
    growth = failure.growth
    if growth is None or not overflowed(failure) or not falls_without_bound(failure.diverging):
        return None
    losses = [(s.step, s.loss) for s in failure.diverging.steps if s.loss is not None and math.isfinite(s.loss)]
    (first, before), (last, after) = losses[0], losses[-1]
    why = (
        f"{_whose(failure)}The loss fell from {number(before)} in step {first} to {number(after)} in step {last}, so "
        "it has no lower bound: a term may have the wrong sign. A smaller learning rate only delays the end. "
        f"{_operator(failure)} is only where the numbers left the range of {failure.dtype}."
    )
    return Explanation(why, 0.94, failure.input_lines())


def _is_unclear(failure: Failure, growth: Growth) -> bool:
    return failure.op in EXPONENTIALS and (growth.factor < 1e3 or growth.steps < 4)


def _is_lost(failure: Failure) -> bool:
    """Whether loss and weights are so far gone that where they overflow does not matter."""
    rise = failure.growth_of_loss
    return rise is not None and rise.factor >= LOST and rise.steps >= JUST_BEFORE


def _whose(failure: Failure) -> str:
    """Names the optimizer if it is not the one whose step failed."""
    history = failure.diverging
    if history is failure.history:
        return ""
    return f"It is not this step's optimizer that diverges, but {optimizer_words(history)}. "


def rate_in_use(failure: Failure) -> str:
    """The learning rate, how it rose and where the program sets it, as sentences with a space before them."""
    rise, lr, history = failure.rate_rise, failure.lr(), failure.diverging
    if lr is None:
        return ""
    told = f" {rise.sentence()}" if rise is not None else f" The learning rate is {number(lr)}."
    return f"{told} {rate_set_by(history)}".rstrip()


def rate_set_by(history: OptimizerHistory) -> str:
    """The line that sets the learning rate, as a sentence; empty if it is still the one of the constructor."""
    rates = {record.lr for record in history.steps if record.lr is not None}
    if history.optimizer and "lr_at_start" not in dict(history.settings) and len(rates) == 1:
        return ""
    site = history.rate_set_at
    if site is None:
        return ""
    changes = any(symbol in site.code for symbol in (" *= ", " /= "))
    verb = "sets" if history.optimizer else "changes" if changes else "uses"
    return f"{place(site)} {verb} it: `{shortened(site.code)}`."


@rule("divergence_lr", title="The learning rate rose too far", phases=ANY - {"input"})
def risen_rate(failure: Failure) -> Explanation | None:
    """The rate jumps so far that the next step overflows: there is no time for anything to grow."""
    rise = failure.rate_rise
    if rise is None or failure.growth is not None or not overflowed(failure):
        return None
    if failure.origin.step - rise.first_step > JUST_BEFORE and rise.moves > JUST_BEFORE:
        return None
    found = _largest_weight(failure)
    moved = found is not None and ORDINARY_WEIGHT <= found[2] <= _moved(failure)
    if not moved and (failure.phase != "optimizer" or rise.last < ABSURD_RATE):
        return None
    weight = f" The parameter {found[0]} has magnitudes up to {number(found[2])}." if found is not None else ""
    why = f"{rate_in_use(failure).strip()}{weight} Its updates are that large, and {_operator(failure)} overflows."
    return Explanation(why, 0.6 if failure.narrow else 0.92, rise.lines()[:1])


@rule("divergence_lr", title="The first updates are far too large", phases=ANY - {"optimizer", "input"})
def first_updates(failure: Failure) -> Explanation | None:
    """Too early to call it growth: the weights are as large as the learning rate makes them."""
    found = _largest_weight(failure) if 0 < failure.origin.step <= 4 and overflowed(failure) else None
    ordinary = ORDINARY_GAIN if is_adaptive(failure.diverging) else ORDINARY_WEIGHT
    if found is None or failure.growth is not None or not ordinary <= found[2] <= _moved(failure):
        return None
    name, stat, size = found
    why = (
        f"{_whose(failure)}The updates before step {failure.origin.step} took the parameter {name} to magnitudes up to "
        f"{number(size)}.{rate_in_use(failure)} Products with {name} overflow {failure.dtype} at {_operator(failure)}."
    )
    return Explanation(why, 0.6 if failure.narrow else 0.9, (describe(stat, name),))


@rule("divergence_lr", title="The learning rate may be too high", phases=ANY - {"optimizer", "input"})
def loss_shot_up(failure: Failure) -> Explanation | None:
    """Too few steps for growth, but the updates have made the loss much larger: a lower rate is worth a try."""
    if not overflowed(failure) or (failure.growth is not None and not _is_unclear(failure, failure.growth)):
        return None
    known = [(s.step, s.loss) for s in failure.diverging.steps if s.loss is not None and math.isfinite(s.loss)]
    losses = [(step, loss) for step, loss in known if step < failure.origin.step]
    low = min(losses, key=lambda point: abs(point[1]), default=None)
    if low is None or low[0] == losses[-1][0] or abs(losses[-1][1]) < SHOT_UP * abs(low[1]):
        return None
    rose = f"The loss went from {number(low[1])} in step {low[0]} to {number(losses[-1][1])} in step {losses[-1][0]}."
    return Explanation(f"{rose}{rate_in_use(failure)} {_operator(failure)} overflows after that.", 0.5)


@rule("bad_init", phases=ANY - {"optimizer"})
def bad_init(failure: Failure) -> Explanation | None:
    if not overflowed(failure) or failure.origin.step > 1 or failure.growth is not None:
        return None
    found = _largest_weight(failure)
    if found is None:
        return None
    name, stat, size = found
    if (size < ORDINARY_WEIGHT and _gain(stat) < ORDINARY_GAIN) or size <= _moved(failure):
        return None
    why = (
        f"The parameter {name} holds magnitudes up to {number(size)} in step {failure.origin.step}, before "
        f"training could have grown it. Products with {name} overflow {failure.dtype} at {_operator(failure)}."
    )
    confidence = 0.88 if size >= ABSURD_WEIGHT else 0.7
    if failure.narrow or failure.op in EXPONENTIALS or failure.phase == "backward":
        confidence *= 0.7
    return Explanation(why, confidence, (describe(stat, name),))


@rule("bad_init", title="The first loss is already beyond all bounds", phases=ANY - {"optimizer", "input"})
def absurd_start(failure: Failure) -> Explanation | None:
    """The first update is made with an absurd gradient, and only the step after it overflows."""
    first = failure.diverging.steps[0] if failure.diverging.steps else None
    if first is None or first.step or not 0 < failure.origin.step <= 4 or failure.narrow or not overflowed(failure):
        return None
    loss, norm = first.loss, first.grad_norm
    if loss is None or norm is None or not ABSURD_START <= min(abs(loss), norm) < math.inf:
        return None
    why = (
        f"Before any update, in step 0, the loss is {number(loss)} and its gradient has the norm {number(norm)}: with "
        f"the initial weights, the numbers grow from layer to layer. The first updates are as large as that gradient, "
        f"and {_operator(failure)} overflows in step {failure.origin.step}."
    )
    return Explanation(why, 0.93, (f"loss in step 0: {number(loss)}, gradient norm {number(norm)}",))


def _largest_weight(failure: Failure) -> tuple[str, TensorStat, float] | None:
    """The parameter with the greatest magnitude among those that fed the operator: name, statistics, magnitude."""
    events = (failure.event, failure.origin.forward_event) if failure.phase == "backward" else (failure.event,)
    weights = [w for e in events if e is not None for w in weights_feeding(failure.trace, e)]
    return max(((name, stat, largest(stat) or 0.0) for name, stat in weights), key=lambda w: w[2], default=None)


def _gain(stat: TensorStat) -> float:
    """The factor by which a normally distributed weight scales its input: deviation times the root of the fan-in."""
    return (largest(stat) or 0.0) / 3.5 * math.sqrt(stat.shape[1]) if len(stat.shape) == 2 else 0.0


def _moved(failure: Failure) -> float:
    """How far the updates so far can have moved a weight: plain ones by the gradient, adaptive ones by about 1.

    RMSprop begins with an average of 0: its first updates are up to 1 / sqrt(1 - alpha) times larger. LBFGS moves the
    weights several times in each step, as far as its own factors say.
    """
    if failure.diverging.optimizer in OWN_FACTORS:
        return math.inf
    lr = failure.lr() or 0.0
    before = [s for s in failure.diverging.steps if s is not failure.history.steps[-1] or s.step < failure.origin.step]
    known = [(lr if s.lr is None else s.lr, s.grad_norm) for s in before]
    alpha = dict(failure.diverging.settings).get("alpha", 0.0) if is_adaptive(failure.diverging) else 0.0
    least = 1 / math.sqrt(1 - alpha) if 0 <= alpha < 1 else 1.0
    return 2 * sum(rate * max(least, n) for rate, n in known if n is not None and math.isfinite(n) and rate == rate)


def weights_feeding(trace: Trace, start: OpEvent) -> list[tuple[str, TensorStat]]:
    """The parameters that fed an event, by name; a view's output replaces missing statistics."""
    found = []
    for event in (start, *trace.feeding(start, 200)):
        for operand in event.inputs:
            if operand.role != "parameter":
                continue
            stat = operand.stat
            if stat is None and event.op in VIEWS | COPIES:
                stat = event.outputs[0] if event.outputs else None
            if stat is not None:
                found.append((operand.label or operand.name, stat))
    return found


@rule("exploding_gradient", phases=frozenset({"backward"}))
def exploding_gradient(failure: Failure) -> Explanation | None:
    if failure.event is None or failure.event.in_python_backward or not overflowed(failure):
        return None
    why = (
        f"The forward pass is finite, but the gradient of {_operator(failure)} overflows {failure.dtype} in backward. "
        f"{_sizes(failure)}"
    )
    steps = [s for s in failure.history.steps if s.grad_norm is not None and math.isfinite(s.grad_norm)]
    known = (f"last finite gradient norm: {number(steps[-1].grad_norm)} in step {steps[-1].step}",) if steps else ()
    return Explanation(why, 0.8, failure.input_lines() + _magnitudes_before(failure) + known)


@rule("overflow")
def overflow(failure: Failure) -> Explanation | None:
    if not overflowed(failure) or failure.op in EXPONENTIALS:
        return None
    made = f"produced {counted(failure.bad)} too large for {failure.dtype} from finite inputs"
    if not failure.inf:  # as a norm does: a square is infinite, and Inf / Inf is NaN
        nans = counted(failure.nan, "NaN")
        made = f"produced {nans} from finite inputs: what it computes inside is too large for {failure.dtype}"
    why = f"{_operator(failure)} {made}. {_sizes(failure)}{not_growing(failure.history)}"
    return Explanation(why, 0.6, failure.input_lines() + _magnitudes_before(failure) + _mask_line(failure))


@rule("overflow", phases=ANY)
def overflow_elsewhere(failure: Failure) -> Explanation | None:
    if not failure.inf or failure.nan or failure.fed_by_nonfinite or failure.event is None or not failure.event.born:
        return None
    if failure.event.on_purpose or failure.event.uninitialized or overflowed(failure):
        return None
    infinite = counted(failure.inf, "infinite element")
    why = f"{_operator(failure)} produced {infinite} from finite inputs. {_sizes(failure)}"
    return Explanation(why, 0.25, failure.input_lines())


@rule("overflow", title="Number too large for its type", phases=ANY)
def refused_number(failure: Failure) -> Explanation | None:
    """torch raises an error for a Python number that is larger than the tensor's type can hold."""
    if "without overflow" not in failure.raised:
        return None
    dtype = failure.tensors[0].dtype if failure.tensors else "float32"
    settings = failure.history.settings if failure.phase == "optimizer" else ()
    numbers = (*settings, *(failure.event.scalars if failure.event else ()))
    given = [(name, float(v)) for name, v in numbers if isinstance(v, int | float)]
    name, value = next(((n, v) for n, v in given if abs(v) > dtype_max(dtype)), ("", 0.0))
    what = f"{name} = {number(value)}" if name else "a number"
    owner = f"`{failure.code}`"
    if failure.phase == "optimizer":
        owner = f"{failure.history.optimizer or 'The optimizer'}'s update"
    why = f"{owner} was given {what}, but the largest {dtype} is {dtype_max(dtype):g}."
    return Explanation(why, 0.9, failure.raised_lines())


UPDATES: frozenset[Phase] = frozenset({"optimizer", "parameter"})
RATE_NAMES = ("alpha", "value", "lr", "step_size", "scalars")
OWN_FACTORS = ("LBFGS",)
"""Optimizers that scale their update by products of gradients and earlier updates, besides the learning rate."""


def _numbers(value: Any) -> list[float]:
    found = value if isinstance(value, list | tuple) else [value]
    return [float(v) for v in found if isinstance(v, int | float)]


def _moved_by_gradient(failure: Failure) -> bool:
    """Whether the operator was computed from a gradient or an optimizer state, among other things."""
    if failure.event is None:
        return False
    library = failure.event.library_site
    if library is not None and "optim" in library.file:
        return True
    events = [failure.event, *failure.feeding(6)]
    if any(e.phase == "backward" for e in events):
        return True
    return any(i.role in ("gradient", "state") or i.label.endswith(".grad") for e in events for i in e.inputs)


def _own_factor(failure: Failure) -> tuple[str, float] | None:
    """The non-finite number by which an optimizer scaled its update, where it computes that from gradients."""
    lr = failure.lr()
    if failure.history.optimizer not in OWN_FACTORS or lr is None or not math.isfinite(lr) or failure.event is None:
        return None
    given = ((n, v) for n, numbers in failure.event.scalars if n in RATE_NAMES for v in _numbers(numbers))
    return next(((n, v) for n, v in given if not math.isfinite(v)), None)


@rule("nan_lr", phases=UPDATES)
def nan_lr(failure: Failure) -> Explanation | None:
    given = dict(failure.event.scalars) if failure.event else {}
    names = (*RATE_NAMES, "other") if failure.op == "mul" else RATE_NAMES
    used = [*(("lr", v) for v in _numbers(failure.lr())), *((n, v) for n in names for v in _numbers(given.get(n)))]
    bad = next(((n, v) for n, v in used if not math.isfinite(v)), None)
    if bad is None or (bad[0] != "lr" and (writes_nan(failure) or _own_factor(failure))):
        return None
    before = next((s.lr for s in reversed(failure.history.steps) if s.lr is not None and math.isfinite(s.lr)), None)
    was = f" The last finite learning rate was {number(before)}." if before is not None else ""
    set_by = rate_set_by(failure.history)
    why = (
        f"The learning rate is non-finite: the update in step {failure.origin.step} was scaled by {bad[1]} ({bad[0]})."
        f"{was} {set_by or 'Look at the schedule, or at the code that sets the learning rate.'}"
    )
    return Explanation(why, 0.99, (f"{bad[0]} = {bad[1]}",))


_TINY_EPS = 1e-30
"""An eps below it is 0 for most numbers that it is added to."""


@rule("optimizer_eps", phases=UPDATES)
def optimizer_eps(failure: Failure) -> Explanation | None:
    if not failure.bad:
        return None
    given = _numbers(failure.scalar("eps")) + _numbers(dict(failure.history.settings).get("eps"))
    eps = given[0] if given else None
    fused = failure.op in FUSED_UPDATES
    names = DIVISIONS.get(failure.op, ("grads", "exp_avg_sqs"))
    if fused:
        fits = eps is not None and eps < _TINY_EPS and any(has_zero(t) for t in failure.tensors)
    else:
        fits = failure.op in DIVISIONS and failure.zero_at(names[1])
    # An update that divides something other than a weight divides what the gradient was made into.
    read = failure.event.inputs if failure.event else ()
    update = failure.phase == "optimizer" and not any(i.role == "parameter" for i in read)
    moved = fused or failure.op == "addcdiv" or update or _moved_by_gradient(failure)
    if not fits or (failure.phase == "parameter" and not moved):
        return None
    own = not fused and _in_users_code(failure)
    if own and failure.phase == "parameter" and any(not s.shape for s in failure.stats(names[1])):
        return None  # the norm of a whole gradient: no weight has a denominator of its own
    if own and eps is not None and not _made_with(failure, names[1], eps):
        return None
    shown = f", with eps = {number(eps)}" if eps is not None else ""
    low = " In float16 any eps below 6e-8 is 0." if failure.dtype == "float16" else ""
    where = f"`{failure.code}`" if own else "its update"
    became = "is 0/0 for a weight without a gradient" if failure.nan else "is infinite"
    why = (
        f"{failure.history.optimizer or 'The optimizer'} divides by exactly 0 in {where}{shown}.{low} The result "
        f"{became}: {counted(failure.bad)} of {failure.origin.label or 'the result'} became non-finite."
    )
    return Explanation(why, 0.96 if moved else 0.25, failure.input_lines(*(n for n in names if n)))


def _in_users_code(failure: Failure) -> bool:
    """Whether the operator is in an update that the user wrote, not in one of torch's."""
    if failure.event is None or failure.event.site is None:
        return False
    library = failure.event.library_site
    return library is None or library.file.endswith("torch/_tensor.py")  # `1 / x` is a method in python


def _made_with(failure: Failure, name: str, eps: float) -> bool:
    """Whether eps was added to the argument, or limits it; otherwise that setting has nothing to do with the 0."""
    events = [e for maker in failure.producers(name) for e in (maker, *failure.trace.feeding(maker, 3))]
    if any(math.isclose(v, eps, rel_tol=1e-3) for e in events for _, given in e.scalars for v in _numbers(given)):
        return True
    # The numbers given to an operator with a finite result are not kept. An eps that was added is below the result.
    return eps < _TINY_EPS and any("eps" in e.site.code for e in events if e.site is not None)


@rule("zero_over_zero", phases=frozenset({"optimizer"}))
def zero_over_zero_in_users_update(failure: Failure) -> Explanation | None:
    return zero_over_zero(failure) if _without_eps(failure) else None


@rule("div_by_zero", phases=frozenset({"optimizer"}))
def div_by_zero_in_users_update(failure: Failure) -> Explanation | None:
    return div_by_zero(failure) if _without_eps(failure) else None


def _without_eps(failure: Failure) -> bool:
    """A division in an update that the user wrote, which has nothing to do with an eps: as anywhere else."""
    return _in_users_code(failure) and optimizer_eps(failure) is None


@rule("optimizer_overflow", title="The optimizer's own factors are non-finite", phases=frozenset({"optimizer"}))
def own_factor(failure: Failure) -> Explanation | None:
    factor = _own_factor(failure)
    if factor is None:
        return None
    why = (
        f"{failure.history.optimizer} scaled its update by {factor[1]} ({factor[0]}), a number that it computes from "
        f"products of gradients and earlier updates. These are finite, but a product is not: training has diverged. "
        f"The learning rate is {number(failure.lr())}."
    )
    return Explanation(why, 0.8, (f"{factor[0]} = {factor[1]}",))


@rule("optimizer_overflow", phases=frozenset({"optimizer"}))
def optimizer_overflow(failure: Failure) -> Explanation | None:
    if not failure.bad or not (failure.op in FUSED_UPDATES or overflowed(failure)):
        return None
    squared = " This squares the gradient." if failure.op in ("addcmul", "square", "pow") else ""
    stuck = ""
    if squared and failure.origin.role == "state":
        stuck = " The state stays infinite, so these weights are never updated again, and no NaN shows it."
    why = (
        f"{failure.history.optimizer or 'The optimizer'} computes {failure.op} of numbers up to "
        f"{number(failure.reach)}, and the largest {failure.dtype or 'float32'} is {failure.limit:g}."
        f"{squared} {counted(failure.bad)} of its state or of the weights overflowed, although the gradient is finite."
        f"{stuck}"
    )
    return Explanation(why, 0.85 if failure.op in STATE_UPDATES | FUSED_UPDATES else 0.75, failure.input_lines())
