"""One failure as the rules see it: the origin, what fed it and where its numbers came from, and the words for them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from firstnan.diagnose.rules.growth import Growth, growth
from firstnan.records import History, Operand, OpEvent, Origin, Phase, TensorStat, Trace
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
from firstnan.records.words import number

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
        return self.origin.phase

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
        if not text:
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

    def makers(self, name: str) -> list[OpEvent]:
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
    def growth(self) -> Growth | None:
        return growth(self.history, failing=self.origin.step)

    @cached_property
    def growth_of_loss(self) -> Growth | None:
        """The same without the gradients: loss and weights."""
        return growth(self.history, gradients=False, failing=self.origin.step)

    def witness_lines(self) -> tuple[str, ...]:
        """The values at the first bad element, as one line of evidence."""
        if self.event is None or not self.event.witness:
            return ()
        result = dict(self.event.witness).get("result")
        read = ", ".join(f"{name} = {number(value)}" for name, value in self.read_at.items())
        where = self.made.first_index if self.made else None
        at = f"at {list(where)}" if where else "at the first bad element"
        return (f"{at}: {read}" + ("" if result is None else f" -> {number(result)}"),)

    def float64_lines(self) -> tuple[str, ...]:
        """Whether a wider type would have helped, as a line of evidence."""
        known = self.event.in_float64 if self.event is not None else None
        if known is None or not self.event or not self.event.born or self.dtype == "float64":
            return ()
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
        given = dict(self.history.settings).get("lr")
        if isinstance(given, int | float):
            return float(given)
        return next((s.lr for s in reversed(self.history.steps) if s.lr is not None), None)


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
    op, makers = event.op, {e.op for e in trace.producers(event)}
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
    if op == "mul" and makers & NORMS:
        return "is a product with the norm of a zero vector"
    if op in SPREADS:
        return f"is the {'standard deviation' if op.startswith('std') else 'variance'} of equal numbers"
    if op in COUNTED:
        return _sum(trace, event)
    if op == "add" and makers & COUNTED:
        return "is a sum whose terms cancel or are all 0"
    if op == "mse_loss":
        return "is the mean squared error of equal numbers"
    if op in EXTREMES:
        return f"is the result of {op}"
    return f"is a random number drawn by {op}" if op in RANDOM else ""


def _difference(trace: Trace, event: OpEvent) -> str:
    """1 - p where p has reached 1, a range, or a difference of equal numbers."""
    near = trace.feeding(event, 3)
    p = next((e for e in near if e.op in ("sigmoid", "softmax")), None) if event.op == "rsub" else None
    if p is not None:
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
    kinds = " and ".join(f"{kind} in {n}" for kind, n in (("NaN", stat.nan), ("Inf", stat.inf)) if n)
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
