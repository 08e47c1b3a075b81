"""What a rule is given, a failure with the growth before it and the words for both, and what it returns."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from firstnan.diagnose.causes import catalogue, link_to
from firstnan.records import Cause, History, Operand, OpEvent, OptimizerHistory, Origin, Phase, TensorStat, Trace
from firstnan.records.operator_families import (
    CARRIERS,
    COMPARISONS,
    EXCEED_FLOAT64,
    EXTREMES,
    FLOORS,
    MATRIX_PRODUCTS,
    MIXING,
    NORMS,
    RANDOM,
    SPREADS,
    SUMS,
)
from firstnan.records.words import came_with_numbers, number

DTYPE_MAX = {"float16": 65504.0, "bfloat16": 3.39e38, "float32": 3.4028235e38, "float64": 1.797e308}
FLOAT8_MAX = {"e4m3": 448.0, "e5m2": 57344.0, "e8m0": 1.7e38}


def has_zero(stat: TensorStat | None) -> bool:
    return stat is not None and (stat.zeros > 0 or 0 in (stat.smallest, stat.min, stat.max))


def largest(stat: TensorStat | None) -> float | None:
    """The greatest magnitude among the finite elements."""
    ends = [abs(v) for v in (stat.min, stat.max) if v is not None] if stat else []
    return max(ends, default=None)


def dtype_max(dtype: str) -> float:
    if dtype.startswith("float8"):
        return next((v for key, v in FLOAT8_MAX.items() if key in dtype), 448.0)
    return DTYPE_MAX.get(dtype, DTYPE_MAX["float32"])


@dataclass(frozen=True)
class Failure:
    """Answers questions about an origin and its surroundings, also where records are missing."""

    origin: Origin
    trace: Trace
    history: History

    @property
    def phase(self) -> Phase:
        """The phase as the rules see it: an edit of gradients calls operators for their value, as forward does."""
        return "forward" if self.origin.edits_gradient else self.origin.phase

    @cached_property
    def event(self) -> OpEvent | None:
        """The event that made the value; None if the origin's event only read a value that was already bad."""
        event = self.origin.event
        if event is None or self.phase not in ("input", "parameter") or event.born:
            return event
        return None if any(i.guilty and i.producer is None for i in event.inputs) else event

    @cached_property
    def op(self) -> str:
        """The operator that wrote the value: in backward the one inside the derivative, not the forward one."""
        return (self.event.op if self.event else self.origin.op).removeprefix("special_").removeprefix("linalg_")

    def derivative_of(self, family: Collection[str]) -> bool:
        """Whether the differentiated operator is of this family, by the forward event or by the autograd node."""
        return not self._derivative_names.isdisjoint(name.replace("_", "") for name in family)

    @cached_property
    def _derivative_names(self) -> frozenset[str]:
        names = {self.origin.op}
        if self.origin.forward_event is not None:
            names.add(self.origin.forward_event.op)
        if self.event is not None and self.event.node:
            names.add(re.sub(r"Backward\d*$", "", self.event.node))
        plain = {n.lower().replace("_", "").removeprefix("linalg").removeprefix("special") for n in names}
        return frozenset(plain | {n.removesuffix("ex") for n in plain})

    @cached_property
    def code(self) -> str:
        """The user's expression in one short line, else the operator's name."""
        site = self.origin.site or (self.event.site if self.event else None)
        text = " ".join(site.code.split()) if site and site.code else ""
        if not text or (self.origin.library_site and self.origin.library_site.file.startswith("<")):
            # Code that `exec` compiled from text: the call of `exec` is not the operation.
            return f"{self.origin.op or self.op}(...)"
        return text if len(text) <= 80 else text[:77] + "..."

    @cached_property
    def made(self) -> TensorStat | None:
        """What was produced: the first output with a non-finite element."""
        outputs = self.event.outputs if self.event else ()
        bad = next((o for o in outputs if o.bad), None)
        return bad or self.origin.produced or (outputs[0] if outputs else None)

    @property
    def nan(self) -> int:
        return self.made.nan if self.made else 0

    @property
    def inf(self) -> int:
        return self.made.inf if self.made else 0

    @property
    def bad(self) -> int:
        return self.nan + self.inf

    @cached_property
    def raised(self) -> str:
        """torch's error message in one line, if the operator raised one."""
        text = ((self.event.raised or "") if self.event else "").strip()
        return text.splitlines()[0] if text else ""

    @cached_property
    def tensors(self) -> tuple[TensorStat, ...]:
        """The statistics of everything the operator read."""
        own = tuple(i.stat for i in self.event.inputs if i.stat is not None) if self.event else ()
        return own or (() if self.phase == "backward" and self.event else self.origin.inputs)

    @property
    def reads_nan(self) -> bool:
        return any(t.nan for t in self.tensors)

    @cached_property
    def fed_by_nonfinite(self) -> bool:
        """Some of what the value was made from was already non-finite (an in-place op may show its own result)."""
        if self.event is not None and self.event.born:
            return False
        return any(t.bad for t in self.tensors)

    def operands(self, name: str) -> list[Operand]:
        """The operands of that name; for a list argument (`_foreach_` ops) all of its members."""
        found = self.event.inputs if self.event else ()
        return [i for i in found if i.name == name or i.name.startswith((name + "[", name + "."))]

    def producers(self, name: str) -> list[OpEvent]:
        """The events that computed the operands of that name."""
        return [self.trace.events[i.producer] for i in self.operands(name) if i.producer is not None]

    def stats(self, name: str) -> list[TensorStat]:
        own = [i.stat for i in self.operands(name) if i.stat is not None]
        return own or [t for t in self.tensors if t.name == name]

    def stat(self, name: str) -> TensorStat | None:
        return next(iter(self.stats(name)), None)

    def scalar(self, *names: str) -> Any:
        """The first argument of these names that is not a tensor."""
        given = dict(self.event.scalars) if self.event else {}
        return next((given[n] for n in names if n in given), None)

    @cached_property
    def read_at(self) -> dict[str, float]:
        """What each argument held at the first bad element, as far as that is known."""
        return {n: v for n, v in self.event.witness if n != "result"} if self.event else {}

    def at(self, name: str) -> float | None:
        """The value of an argument at the first bad element, if it is known."""
        if name in self.read_at:
            return self.read_at[name]
        value = self.scalar(name)
        if isinstance(value, int | float):
            return float(value)
        stats = self.stats(name)
        stat = stats[0] if len(stats) == 1 else None
        if stat is not None and stat.min is not None and stat.min == stat.max and not stat.bad:
            return stat.min
        return None

    def lowest(self, name: str) -> float | None:
        return min((s.min for s in self.stats(name) if s.min is not None), default=self.at(name))

    def highest(self, name: str) -> float | None:
        return max((s.max for s in self.stats(name) if s.max is not None), default=self.at(name))

    def zero_at(self, name: str) -> bool:
        """Whether that argument is 0 at the bad element or, if that is not known, anywhere."""
        value = self.at(name)
        return value == 0 if value is not None else any(has_zero(s) for s in self.stats(name))

    def negative_at(self, name: str, below: float = 0.0) -> bool:
        value = self.at(name)
        if value is not None:
            return value < below
        return any(s.min is not None and s.min < below for s in self.stats(name))

    @cached_property
    def reach(self) -> float | None:
        """The greatest finite magnitude that the operator read."""
        return max((v for v in map(largest, self.tensors) if v is not None), default=None)

    @cached_property
    def dtype(self) -> str:
        if self.made is not None:
            return self.made.dtype
        return self.tensors[0].dtype if self.tensors else ""

    @cached_property
    def narrow(self) -> bool:
        """The result's type ends far below float32 (bfloat16 has float32's range)."""
        return self.dtype in ("float16", "half") or self.dtype.startswith("float8")

    @cached_property
    def limit(self) -> float:
        return dtype_max(self.dtype)

    @cached_property
    def diverging(self) -> OptimizerHistory:
        """The history of the optimizer whose numbers grew: with several, not always the one whose step failed."""
        found: list[OptimizerHistory] = [h for h in self.history.others if growth(h) is not None]
        if growth(self.history, failing=self.origin.step) is not None:
            found.insert(0, self.history)
        # Too early for growth: the one whose updates are so large that nothing else can have made such weights.
        far = [h for h in (self.history, *self.history.others) if largest_update(h) >= FAR]
        return max(found, key=_divergence, default=max(far, key=largest_update, default=self.history))

    @cached_property
    def growth(self) -> Growth | None:
        return self._growth(gradients=True)

    @cached_property
    def growth_of_loss(self) -> Growth | None:
        """The same without the gradients: loss and weights."""
        return self._growth(gradients=False)

    def _growth(self, *, gradients: bool) -> Growth | None:
        failing = self.origin.step if self.diverging is self.history else None
        return growth(self.diverging, gradients=gradients, failing=failing)

    @cached_property
    def rate_rise(self) -> Growth | None:
        """How the learning rate rose up to the failure, if it did."""
        return rate_rise(self.diverging)

    def witness_lines(self) -> tuple[str, ...]:
        """The values at the first bad element, as one line of evidence."""
        if self.event is None or not self.event.witness:
            return ()
        result = dict(self.event.witness).get("result")
        read = ", ".join(f"{name} = {number(value)}" for name, value in self.read_at.items())
        where = self.event.witness_index or (self.made.first_index if self.made else None)
        at = f"at {list(where)}" if where else "at the first bad element"
        return (f"{at}: {read}" + ("" if result is None else f" -> {number(result)}"),)

    def float64_lines(self) -> tuple[str, ...]:
        """Whether a wider type would have helped, as a line of evidence."""
        known = self.event.in_float64 if self.event is not None else None
        if known is None or not self.event or not self.event.born or self.dtype == "float64":
            return ()
        if came_with_numbers(self.origin) or (known != "finite" and self.op in SPREADS):
            return ()  # nothing was computed, or too few numbers were given: no precision matters
        if known == "finite":
            return (f"the same operation in float64 is finite: only {self.dtype} is too narrow",)
        # Without a pole, an infinite result is only too large. Single products of float32 numbers fit into float64.
        unbounded = self.op in EXCEED_FLOAT64 or (self.op == "pow" and not self.zero_at("self"))
        if self.inf and not self.nan and unbounded:
            return ("the same operation in float64 is infinite too: the result is too large for any precision",)
        return ("the same operation in float64 is non-finite too: it is undefined in any precision",)

    def raised_lines(self) -> tuple[str, ...]:
        return (f"torch said: {self.raised}",) if self.raised else ()

    def input_lines(self, *names: str) -> tuple[str, ...]:
        """A line of evidence for each input of these names (without names: for each)."""
        if not names:
            return tuple(describe(t) for t in self.tensors[:4])
        return tuple(describe(s, n) for n in names for s in self.stats(n)[:1])

    def feeding(self, depth: int = 8) -> list[OpEvent]:
        """The operators before this one, nearest first."""
        return self.trace.feeding(self.event, depth) if self.event else []

    def used_by(self, start: OpEvent, stop: Collection[str], depth: int = 6) -> OpEvent | None:
        """The nearest forward event named in `stop` that the value of `start` flows into, if any within `depth`."""
        distance = {start.index: 0}
        for event in self.trace.events[start.index + 1 :]:
            if event.phase != "forward" or event.op in COMPARISONS:
                continue
            data = [i for i in event.inputs if i.name not in ("condition", "mask", "indices")]
            feeders = [distance[i.producer] for i in data if i.producer in distance]
            if not feeders:
                continue
            if event.op in stop:
                return event
            if event.op not in MIXING and 1 + min(feeders) < depth:
                distance[event.index] = 1 + min(feeders)
        return None

    def same_node(self) -> list[OpEvent]:
        """The later events of the same derivative, in order."""
        if self.event is None or self.event.node is None:
            return []
        mine = (self.event.node, self.event.forward)
        later = self.trace.events[self.event.index + 1 : self.event.index + 40]
        return [e for e in later if (e.node, e.forward) == mine]

    def lr(self) -> float | None:
        """The learning rate, from the optimizer's settings or the last step that recorded one."""
        given = dict(self.diverging.settings).get("lr")
        if isinstance(given, int | float):
            return float(given)
        known = next((s.lr for s in reversed(self.diverging.steps) if s.lr is not None), None)
        if known is None and self.phase == "optimizer" and not self.history.optimizer:
            # The factor of an update that the user wrote.
            factor = self.scalar("alpha", "value", *(("other",) if self.op == "mul" else ()))
            known = abs(float(factor)) if isinstance(factor, int | float) else None
        return known


# --- why a number is 0 or large, and words for numbers -----------------------------------------------------------

COUNTED = SUMS | {"count_nonzero"}


def producer_of(trace: Trace, event: OpEvent, name: str, depth: int = 8) -> tuple[OpEvent | None, Operand | None]:
    """The event that computed an argument, before views and copies; None and the operand if it came from outside."""
    operand = next((i for i in event.inputs if i.name == name), None)
    for _ in range(depth):
        if operand is None or operand.producer is None or operand.role in ("input", "parameter"):
            return None, operand
        event = trace.events[operand.producer]
        source = next((i for i in event.inputs if i.name in ("self", "input", "src")), None)
        if event.op not in CARRIERS | {"neg"} or source is None:
            return event, operand
        operand = source
    return None, operand


def why_zero(trace: Trace, event: OpEvent | None, name: str) -> str:
    """Why an argument is exactly 0, as a sentence with a space before it; "" if that is not known."""
    if event is None:
        return ""
    made_by, operand = producer_of(trace, event, name)
    told = _outside(operand) if made_by is None else _zero_of(trace, made_by)
    return f" The 0 {told}." if told else ""


def why_large(trace: Trace, event: OpEvent | None, name: str) -> str:
    """Why an argument could become so large, as a sentence with a space before it; "" if that is not known."""
    if event is None:
        return ""
    made_by, operand = producer_of(trace, event, name)
    if made_by is None:
        return ""
    if made_by.op in MATRIX_PRODUCTS:
        where = f"{made_by.module} ({made_by.op})" if made_by.module else made_by.op
        return f" The argument is the output of {where}, which is unbounded."
    before = largest(made_by.inputs[0].stat) if made_by.op == "div" and made_by.inputs else None
    after = largest(operand.stat) if operand else None
    if before is None or after is None or after < 2 * before:
        return ""
    return f" A division made the argument large: before it, the numbers reached only {number(before)}."


def _outside(operand: Operand | None) -> str:
    if operand is None or not operand.label:
        return ""
    if operand.role == "input":
        return f"is in the data ({operand.label})"
    return f"is in the parameter {operand.label}" if operand.role == "parameter" else ""


def _zero_of(trace: Trace, event: OpEvent) -> str:
    op, producers = event.op, {e.op for e in trace.producers(event)}
    if op == "softmax":
        return f"is a softmax probability that underflowed{_given(event, 'logits')}"
    if op in ("sigmoid", "exp", "exp2"):
        return f"is {'an' if op[0] == 'e' else 'a'} {op} that underflowed{_given(event, 'arguments')}"
    if op in ("rsub", "sub"):
        return _difference(trace, event)
    if op in ("prod", "cumprod"):
        return f"is a product that underflowed or has a factor of 0{_given(event, 'factors')}"
    if op in FLOORS:
        return f"comes from {op}{_given(event, 'inputs')}"
    if op in NORMS:
        return "is the distance between equal points" if "dist" in op else "is the norm of a zero vector"
    if op == "mul" and producers & NORMS:
        return "is a product with the norm of a zero vector"
    if op in SPREADS:
        return f"is the {'standard deviation' if op.startswith('std') else 'variance'} of equal numbers"
    if op in COUNTED:
        return _sum(trace, event)
    if op == "sqrt":
        before, _ = producer_of(trace, event, "self")
        told = _zero_of(trace, before) if before is not None else ""
        return f"is the square root of a 0 that {told}" if told else ""
    if op == "add" and _adds_nothing(event):
        return "includes an added number that float16 rounds to 0"
    if op == "add" and producers & COUNTED:
        return "is a sum whose terms cancel or are all 0"
    if op == "mse_loss":
        return "is the mean squared error of equal numbers"
    if op in EXTREMES:
        return f"is the result of {op}"
    return f"is a random number drawn by {op}" if op in RANDOM else ""


_BELOW_ONE = {"float64": 36.0, "float32": 16.0, "float16": 7.0, "bfloat16": 5.0}
"""A sigmoid of less is less than 1."""


def _adds_nothing(event: OpEvent) -> bool:
    """Whether a number was added to what is 0 or above, and the sum in float16 is 0 all the same."""
    if len(event.inputs) != 1 or not event.outputs or event.outputs[0].dtype != "float16":
        return False
    known = (stat.min for stat in (event.inputs[0].stat, event.outputs[0]) if stat is not None)
    low = next((v for v in known if v is not None), None)  # of a maximum, and the like, only the sum is known
    return low is not None and low >= 0


def _difference(trace: Trace, event: OpEvent) -> str:
    """1 - p where p has reached 1, a range, or a difference of equal numbers."""
    near = trace.feeding(event, 3)
    p = next((e for e in near if e.op in ("sigmoid", "softmax")), None) if event.op == "rsub" else None
    if p is not None:
        read = next((i.stat for i in p.inputs if i.stat is not None and i.stat.max is not None), None)
        if p.op == "sigmoid" and read is not None and (read.max or 0.0) < _BELOW_ONE.get(read.dtype, 0.0):
            return f"is 1 minus a number that was rounded to 1, computed from a {p.op}{_given(p, 'arguments')}"
        return f"is 1 - p, where p is a {p.op} that reached exactly 1{_given(p, 'arguments')}"
    names = {e.op.removeprefix("a") for e in near}
    if {"max", "min"} <= names or "minmax" in names:
        return "is the range (maximum minus minimum) of equal numbers"
    return "is the difference of two equal numbers"


def _sum(trace: Trace, event: OpEvent) -> str:
    summed = next((i.stat for i in event.inputs if i.stat is not None), None)
    if event.op == "count_nonzero" or (summed is not None and (summed.binary or summed.dtype == "bool")):
        return "is a count, and there was nothing to count"
    near = [e.op for e in trace.feeding(event, 2)]
    if "exp" in near:
        return f"is a {event.op} of exponentials that underflowed"
    if near[:1] and near[0] in ("pow", "square"):
        of = "differences, and every difference is 0" if near[1:2] == ["sub"] else "numbers that are all 0"
        return f"is a {event.op} of powers of {of}"
    return f"is a {event.op} of terms that cancel or are all 0"


def _given(event: OpEvent, what: str) -> str:
    """The range of what an event read, if it is known."""
    stat = next((i.stat for i in event.inputs if i.stat is not None and i.stat.min is not None), None)
    if stat is None:
        return ""
    if stat.min == stat.max:
        return f" (its {what} are all {number(stat.min)})"
    return f" (its {what} range from {number(stat.min)} to {number(stat.max)})"


def counted(count: int, noun: str = "element", plural: str = "") -> str:
    """`1 element`, `3 elements`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def nonfinite(stat: TensorStat | None) -> str:
    """`NaN in 1 and Inf in 2 of 64 elements (first at [6, 3])`."""
    if stat is None or not stat.bad:
        return "non-finite values"
    kinds = " and ".join(
        f"{kind} in {n}" for kind, n in (("NaN", stat.nan), ("Inf", stat.posinf), ("-Inf", stat.neginf)) if n
    )
    where = f" (first at {list(stat.first_index)})" if stat.first_index else ""
    return f"{kinds} of {counted(stat.numel)}{where}"


def describe(stat: TensorStat, name: str = "") -> str:
    """One tensor as a line of evidence, with the counts that are not zero."""
    text = f"{name or stat.name or 'tensor'} {list(stat.shape)} {stat.dtype}"
    if stat.min is not None and stat.max is not None:
        text += f" in [{number(stat.min)}, {number(stat.max)}]"
    if stat.smallest is not None:
        text += f", smallest magnitude {number(stat.smallest)}"
    counts = {
        "zero" if stat.zeros == 1 else "zeros": stat.zeros,
        "negative": stat.negative,
        "NaN": stat.nan,
        "+inf": stat.posinf,
        "-inf": stat.neginf,
    }
    return text + "".join(f", {n} {word}" for word, n in counts.items() if n)


# --- growth: did the loss, the gradients or the weights grow over the steps before? ------------------------------

WINDOW = 40
FEWEST_LOSSES = 6
FAR = 50.0
"""An update that moves weights so far makes them larger than any initialiser does."""
RATE_ROSE = 10.0
TINY = 1e-12
BAND = 3.0
"""Up to this multiple of its earlier maximum a series still counts as ordinary."""

Points = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Growth:
    """A sustained rise that lasts to the end of the history."""

    what: str
    first_step: int
    first: float
    last_step: int
    last: float
    usual: float = math.inf
    """The maximum of the steps up to the first."""
    left_step: int | None = None
    """The step from which on it stayed above `BAND` times `usual`."""
    rises: int = 0
    """How many of the `moves` from one step to the next went up."""
    moves: int = 0

    @property
    def factor(self) -> float:
        return self.last / max(self.first, TINY)

    @property
    def steps(self) -> int:
        return self.last_step - self.first_step

    @property
    def per_step(self) -> float:
        return float(self.factor ** (1 / max(self.steps, 1)))

    def lines(self) -> tuple[str, ...]:
        """How fast it rose, and when it left its ordinary range, as evidence."""
        pace = f"on average the {self.what} grew by a factor of {self.per_step:.3g} per step"
        if self.left_step is None:
            return (pace,)
        usual = f"{BAND:g} times its maximum up to step {self.first_step}"
        return pace, f"from step {self.left_step} on the {self.what} stayed above {BAND * self.usual:.4g}, {usual}"

    def sentences(self) -> str:
        how_often = "every step" if self.rises == self.moves else f"{self.rises} of {self.moves} steps"
        return f"{self.sentence()} It rose in {how_often}."

    def sentence(self) -> str:
        return (
            f"The {self.what} rose from {self.first:.4g} in step {self.first_step} to {self.last:.4g} in step "
            f"{self.last_step}, a factor of {self.factor:.3g}."
        )


def growth(history: OptimizerHistory, *, gradients: bool = True, failing: int | None = None) -> Growth | None:
    """The clearest sustained rise of loss or parameter norm (or, if `gradients`, gradient norm); None if none rose.

    A series that was flat until the `failing` step did not grow: no update lies between, so this batch differs.
    """
    found = []
    for what, points in _series(history).items():
        if what == "gradient norm" and not gradients:
            continue
        rise = _rise(what, points[-WINDOW:])
        if rise is not None and not (rise.last_step == failing and _flat([v for _, v in points[-WINDOW:-1]])):
            found.append(rise)
    return max(found, key=lambda g: g.factor, default=None)


def falls_without_bound(history: OptimizerHistory) -> bool:
    """Whether the last losses are negative and fall from step to step: the optimizer does what it is asked to do."""
    losses = [s.loss for s in history.steps if s.loss is not None and math.isfinite(s.loss)][-WINDOW // 2 :]
    falls = sum(b < a for a, b in itertools.pairwise(losses))
    return len(losses) >= FEWEST_LOSSES and max(losses) < 0 and falls >= 0.8 * (len(losses) - 1)


def is_adaptive(history: OptimizerHistory) -> bool:
    """Whether each weight moves by about the learning rate, however large its gradient is."""
    settings = dict(history.settings)
    return "eps" in settings and "rho" not in settings


def largest_update(history: OptimizerHistory) -> float:
    """About how far one update has moved a weight at most."""
    known = [(s.lr, 1.0 if is_adaptive(history) else s.grad_norm) for s in history.steps]
    moves = [rate * size for rate, size in known if rate is not None and size is not None]
    return max((m for m in moves if math.isfinite(m)), default=0.0)


def rate_rise(history: OptimizerHistory) -> Growth | None:
    """How the learning rate rose to the end of the history, by a factor of 10 or more; None if it did not."""
    points = [(s.step, s.lr) for s in history.steps if s.lr is not None and math.isfinite(s.lr) and s.lr > 0]
    if len(points) < 2:
        return None
    values = [v for _, v in points]
    # Where it is lowest for the last time before its greatest value.
    top = max(range(len(values)), key=lambda i: (values[i], i))
    low = min(range(top + 1), key=lambda i: (values[i], -i))
    if values[top] < RATE_ROSE * values[low] or values[-1] < 0.3 * values[top]:
        return None
    moves = list(itertools.pairwise(values[low : top + 1]))
    rises = sum(b > a for a, b in moves)
    return Growth("learning rate", *points[low], *points[top], rises=rises, moves=len(moves))


def _divergence(history: OptimizerHistory) -> tuple[bool, float, float]:
    """How clearly this optimizer is the one that diverges: its rate rose, its weights grew, its loss grew."""
    weights, rise = _rise("", _series(history)["parameter norm"][-WINDOW:]), growth(history)
    return rate_rise(history) is not None, weights.factor if weights else 0.0, rise.factor if rise else 0.0


def not_growing(history: History) -> str:
    """A sentence with a space before it that says which recorded numbers did not grow; "" if any of them did."""
    recorded = {what: [v for _, v in points] for what, points in _series(history).items() if len(points) > 1}
    layers = [list(track.max_abs) for track in history.layers]
    elsewhere = [[v for _, v in points] for other in history.others for points in _series(other).values()]
    if not recorded or any(_greatest_rise(values) > BAND for values in (*recorded.values(), *layers, *elsewhere)):
        return ""
    *others, last = recorded
    return f" The {', '.join(others) + ' and ' if others else ''}{last} did not grow over the recorded steps."


def _series(history: OptimizerHistory) -> dict[str, Points]:
    """The finite magnitudes of each recorded number, by step."""
    numbers = {
        "loss": [(s.step, s.loss) for s in history.steps],
        "gradient norm": [(s.step, s.grad_norm) for s in history.steps],
        "parameter norm": [(s.step, s.param_norm) for s in history.steps],
    }
    return {
        what: [(step, abs(v)) for step, v in points if v is not None and math.isfinite(v)]
        for what, points in numbers.items()
    }


def _greatest_rise(values: list[float]) -> float:
    """The largest factor between a value and an earlier one."""
    lowest, rise = math.inf, 0.0
    for value in values:
        lowest = min(lowest, value)
        rise = max(rise, value / max(lowest, TINY))
    return rise


def _flat(values: list[float]) -> bool:
    """Long enough to know what is usual, and usual at its end."""
    return len(values) >= 4 and values[-1] <= 3 * statistics.median(values)


def _rise(what: str, points: Points) -> Growth | None:
    """The rise from the lowest point to the end: long and 10-fold, steep, or abrupt in a run that has just begun."""
    if len(points) < 2:
        return None
    values = [v for _, v in points]
    low = min(range(len(points)), key=lambda i: (values[i], -i))
    tail = values[low:]
    if len(tail) < 2 or values[-1] < 0.3 * max(values):
        return None
    rises = sum(b > a for a, b in itertools.pairwise(tail))
    usual = max(values[: low + 1])
    inside = [i for i, v in enumerate(values) if v <= BAND * usual]
    left = points[inside[-1] + 1][0] if inside[-1] + 1 < len(points) else None
    rise = Growth(what, points[low][0], values[low], points[-1][0], values[-1], usual, left, rises, len(tail) - 1)
    # One outlier is not growth: that needs several steps, most of them up, or two in a row that are far away.
    mostly_up = rises >= 0.6 * rise.moves
    far = 1e6 * max(statistics.median(values), TINY)
    long = mostly_up and len(tail) >= 4 and rise.factor >= 10
    steep = len(tail) >= 3 and (mostly_up or values[-2] > far) and values[-1] > far
    abrupt = mostly_up and len(points) <= 4 and rise.factor >= 1e4
    return rise if long or steep or abrupt else None


# --- the list of rules, and what a rule returns ------------------------------------------------------------------

ANY: frozenset[Phase] = frozenset({"forward", "backward", "optimizer", "input", "parameter"})
VALUES: frozenset[Phase] = frozenset({"forward", "input", "parameter"})
"""Where the program itself calls an operator for its value (in a Dataset or for an in-place write too)."""
ELSEWHERE = 0.3
"""The weight of many of these rules in other phases, where torch or the optimizer calls the operator."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A rule that fits: what happened in this run, the numbers, and how sure the rule is."""

    why: str
    confidence: float
    evidence: tuple[str, ...] = ()


Look = Callable[[Failure], Explanation | None]


@dataclass(frozen=True, slots=True)
class Rule:
    slug: str
    title: str
    look: Look
    phases: frozenset[Phase]
    elsewhere: float
    """Confidence outside `phases` is multiplied by this; 0 means the rule is not asked there."""
    user_function: str = ""
    """The name of the user's function, if it is a user's rule."""

    def apply(self, failure: Failure) -> Cause | None:
        """The cause if the rule fits; None if it does not, or if it raises on an odd record."""
        weight = 1.0 if failure.phase in self.phases else self.elsewhere
        if weight and failure.event is not None and failure.event.in_python_backward:
            weight = max(weight, 0.6)  # a backward written by hand calls operators for their value, as forward does
        if not weight:
            return None
        try:
            finding = self.look(failure)
        except Exception as error:  # a rule that raises on an odd record must never cost the user the whole report
            return self._failed(error) if self.user_function else None
        if finding is None:
            return None
        evidence = tuple(dict.fromkeys((*finding.evidence, *failure.witness_lines(), *failure.float64_lines())))
        confidence = min(1.0, max(0.0, finding.confidence * weight))
        return Cause(self.slug, self.title, finding.why, evidence, confidence, link_to(self.slug))

    def _failed(self, error: Exception) -> Cause:
        """Tells the author of the rule; its confidence is 0, so it is not reported as a cause."""
        why = f"your rule {self.user_function} raised {type(error).__name__}: {error}"
        return Cause(self.slug, self.title, why, (), 0.0)


RULES: list[Rule] = []


def rule(
    slug: str, *, title: str = "", phases: frozenset[Phase] = VALUES, elsewhere: float = 0.0
) -> Callable[[Look], Look]:
    """Registers the function below it as a rule; a slug may have several rules, each with its own title."""

    def register(look: Look) -> Look:
        RULES.append(Rule(slug, title or catalogue()[slug].title, look, phases, elsewhere))
        return look

    return register
