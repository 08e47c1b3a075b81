"""One failure as the rules see it: the origin, what fed it, what used it, and the steps before."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from firstnan.diagnose.rules.growth import Growth, growth
from firstnan.records import History, Operand, OpEvent, Origin, Phase, TensorStat, Trace

DTYPE_MAX = {"float16": 65504.0, "bfloat16": 3.39e38, "float32": 3.4028235e38, "float64": 1.797e308}
FLOAT8_MAX = {"e4m3": 448.0, "e5m2": 57344.0, "e8m0": 1.7e38}


def words(text: str) -> frozenset[str]:
    """Names in a row, as a set."""
    return frozenset(text.split())


COMPARISONS = words(
    "gt lt ge le eq ne isnan isinf isfinite isposinf isneginf logical_not logical_and logical_or any all "
    "argmax argmin bitwise_not bitwise_and bitwise_or nonzero"
)
"""Operators whose result says something about a value and does not carry it on."""
BLENDERS = words(
    "sum mean prod mm addmm bmm baddbmm mv dot convolution norm var std softmax log_softmax logsumexp layer_norm "
    "batch_norm group_norm max min amax amin median cumsum scaled_dot_product_attention mse_loss l1_loss nll_loss"
)
"""Operators after which one element is no longer to be told from the others."""

STEEP = words("exp expm1 exp2 sinh cosh prod cumprod ldexp logaddexp softplus")
"""Operators that are defined everywhere and leave the range even of float64 for numbers that float32 holds."""


def number(value: float | None) -> str:
    """A number for reading: four digits, no trailing noise."""
    if value is None:
        return "?"
    return f"{value:.4g}"


def has_zero(stat: TensorStat | None) -> bool:
    return stat is not None and (stat.zeros > 0 or 0 in (stat.smallest, stat.min, stat.max))


def largest(stat: TensorStat | None) -> float | None:
    """The greatest magnitude among the finite elements."""
    ends = [abs(v) for v in (stat.min, stat.max) if v is not None] if stat else []
    return max(ends) if ends else None


def describe(stat: TensorStat, name: str = "") -> str:
    """One tensor as a line of evidence, with the counts that are not zero."""
    text = f"{name or stat.name or 'tensor'} {list(stat.shape)} {stat.dtype}"
    if stat.min is not None and stat.max is not None:
        text += f" in [{number(stat.min)}, {number(stat.max)}]"
    if stat.smallest is not None:
        text += f", smallest magnitude {number(stat.smallest)}"
    counts = {"zero": stat.zeros, "negative": stat.negative, "NaN": stat.nan, "+inf": stat.posinf, "-inf": stat.neginf}
    return text + "".join(f", {n} {word}" for word, n in counts.items() if n)


def dtype_max(dtype: str) -> float:
    if dtype.startswith("float8"):
        return next((v for key, v in FLOAT8_MAX.items() if key in dtype), 448.0)
    return DTYPE_MAX.get(dtype, DTYPE_MAX["float32"])


def is_number(value: Any) -> bool:
    return isinstance(value, int | float)


@dataclass(frozen=True)
class Failure:
    """Reads an origin and its surroundings; every question has an answer also where a record is missing."""

    origin: Origin
    trace: Trace
    history: History

    @property
    def phase(self) -> Phase:
        return self.origin.phase

    @cached_property
    def event(self) -> OpEvent | None:
        """The event that made the value; None where the origin's event only read what was bad from outside."""
        event = self.origin.event
        if event is None or self.phase not in ("input", "parameter") or event.born:
            return event
        return None if any(i.guilty and i.producer is None for i in event.inputs) else event

    @cached_property
    def op(self) -> str:
        """The operator that wrote the value: in backward the one inside the derivative, not the forward one."""
        return (self.event.op if self.event else self.origin.op).removeprefix("special_").removeprefix("linalg_")

    @cached_property
    def family(self) -> frozenset[str]:
        """The names of the differentiated operator: from the forward event and from the node `LinalgQrBackward0`."""
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
        """What was produced: the first output that holds something non-finite."""
        outputs = self.event.outputs if self.event else ()
        bad = next((o for o in outputs if o.bad), None)
        return bad or self.origin.produced or (outputs[0] if outputs else None)

    @property
    def nan(self) -> int:
        return self.made.nan if self.made else 0

    @property
    def inf(self) -> int:
        return self.made.inf if self.made else 0

    @cached_property
    def raised(self) -> str:
        """What torch said, in one line, where the operator raised an error instead of returning."""
        text = ((self.event.raised or "") if self.event else "").strip()
        return text.splitlines()[0] if text else ""

    @cached_property
    def tensors(self) -> tuple[TensorStat, ...]:
        """The statistics of all that the operator read."""
        own = tuple(i.stat for i in self.event.inputs if i.stat is not None) if self.event else ()
        return own or (() if self.phase == "backward" and self.event else self.origin.inputs)

    @cached_property
    def fed_by_nonfinite(self) -> bool:
        """Some of what the value was made from was non-finite already (an in-place op may show its own result)."""
        if self.event is not None and self.event.born:
            return False
        return any(t.bad for t in self.tensors)

    def operands(self, name: str) -> list[Operand]:
        """The operands of that name; for a list argument (`_foreach_` ops) all of its members."""
        found = self.event.inputs if self.event else ()
        return [i for i in found if i.name == name or i.name.startswith((name + "[", name + "."))]

    def stats(self, name: str) -> list[TensorStat]:
        own = [i.stat for i in self.operands(name) if i.stat is not None]
        return own or [t for t in self.tensors if t.name == name]

    def stat(self, name: str) -> TensorStat | None:
        return next(iter(self.stats(name)), None)

    def scalar(self, *names: str) -> Any:
        """The first argument of these names that is no tensor."""
        given = dict(self.event.scalars) if self.event else {}
        return next((given[n] for n in names if n in given), None)

    def at(self, name: str) -> float | None:
        """The value of an argument at the first bad element, if it is known."""
        seen = dict(self.event.witness) if self.event else {}
        if name in seen:
            return seen[name]
        value = self.scalar(name)
        if is_number(value):
            return float(value)
        stats = self.stats(name)
        stat = stats[0] if len(stats) == 1 else None
        if stat is not None and stat.min is not None and stat.min == stat.max and not stat.bad:
            return stat.min
        return None

    def zero_at(self, name: str) -> bool:
        """True if that argument is 0 at the bad element, or, where that is not known, anywhere."""
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
        seen = [v for v in (largest(t) for t in self.tensors) if v is not None]
        return max(seen) if seen else None

    @cached_property
    def dtype(self) -> str:
        if self.made is not None:
            return self.made.dtype
        return self.tensors[0].dtype if self.tensors else ""

    @cached_property
    def narrow(self) -> bool:
        """The result is in a type that ends far below float32 (bfloat16 has float32's range)."""
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
        values = dict(self.event.witness)
        result = values.pop("result", None)
        read = ", ".join(f"{name} = {number(value)}" for name, value in values.items())
        where = self.made.first_index if self.made else None
        at = f"at {list(where)}" if where else "at the first bad element"
        return (f"{at}: {read}" + ("" if result is None else f" -> {number(result)}"),)

    def float64_lines(self) -> tuple[str, ...]:
        """Whether a wider type would have helped, as a line of evidence."""
        known = self.event.in_float64 if self.event is not None else None
        if known is None or not self.event or not self.event.born or self.dtype == "float64":
            return ()
        if known == "finite":
            return (f"the same operator on the same numbers in float64 stays finite: {self.dtype} is too narrow here",)
        if self.inf and not self.nan and self._grows_without_bound:
            return ("the same operator in float64 is infinite too: the number is too large for any precision",)
        return ("the same operator in float64 is non-finite too: undefined in any precision",)

    @property
    def _grows_without_bound(self) -> bool:
        """No pole: an infinite result is only larger than the type. Single products of float32 fit into float64."""
        return self.op in STEEP or (self.op == "pow" and not self.zero_at("self"))

    def input_lines(self, *names: str) -> tuple[str, ...]:
        """A line of evidence for each input of these names (without names: for each)."""
        if not names:
            return tuple(describe(t) for t in self.tensors[:4])
        return tuple(describe(s, n) for n in names for s in self.stats(n)[:1])

    def feeding(self, depth: int = 8) -> list[OpEvent]:
        return self.trace.feeding(self.event, depth) if self.event else []

    def used_by(self, start: OpEvent, stop: frozenset[str], depth: int = 6) -> OpEvent | None:
        """The nearest forward event named in `stop` that the value of `start` flows into, if any within `depth`."""
        carriers = {start.index}
        wave = {start.index: 0}
        for event in self.trace.events[start.index + 1 :]:
            if event.phase != "forward" or event.op in COMPARISONS:
                continue
            data = [i for i in event.inputs if i.name not in ("condition", "mask", "indices")]
            feeders = [i.producer for i in data if i.producer in carriers]
            if not feeders:
                continue
            if event.op in stop:
                return event
            if event.op in BLENDERS:
                continue
            hops = 1 + min(wave[f] for f in feeders if f is not None)
            if hops < depth:
                carriers.add(event.index)
                wave[event.index] = hops
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


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
