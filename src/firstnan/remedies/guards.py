"""Keeps what one operation reads inside its domain: for each operator the place, the size and the words."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from firstnan.records import OpEvent, Remedy, TensorStat
from firstnan.remedies.base import Job, Place
from firstnan.remedies.edits import Edit, atom, put
from firstnan.remedies.source import Expr, Source, number
from firstnan.rules.scene import largest

CLAMPS = {"clamp": "min", "clamp_min": "min", "clip": "min", "maximum": "other"}
SHORT = 48
KEEPS = "all others, and their gradients, stay as they are"


def small(dtype: str, wide: str, half: str = "1e-4") -> str:
    """An epsilon that float16 does not round to 0, where the values are float16."""
    return half if dtype == "float16" else wide


@dataclass(frozen=True)
class Pen:
    """Writes the guarded form of an expression, for torch or for numpy as the place asks."""

    source: Source
    numpy: str = ""
    """What numpy is called there, where the values are its arrays."""

    def floor(self, node: ast.expr, low: str) -> Edit:
        """Nowhere below `low`; a clamp that is there already is moved instead of doubled."""
        expr = self.source.expr(node)
        given = expr.arg(1, CLAMPS[expr.op]) if expr.op in CLAMPS else None
        if given is not None and number(given) is not None:
            return put(self.source, given, low)
        return self._clamped(node, "maximum", "clamp_min", low)

    def ceiling(self, node: ast.expr, high: str) -> Edit:
        return self._clamped(node, "minimum", "clamp_max", high)

    def between(self, node: ast.expr, low: str, high: str) -> Edit:
        return self._clamped(node, "clip", "clamp", f"{low}, {high}")

    def nonzero(self, node: ast.expr, eps: str) -> Edit:
        """`eps` in place of what is too near to 0, whatever the sign of the rest."""
        code = self.source.code(node)
        if self.numpy:
            return put(self.source, node, f"{self.numpy}.where({self.numpy}.abs({code}) < {eps}, {eps}, {code})")
        near = f"{atom(self.source, node)}.abs() < {eps}"
        return put(self.source, node, f"{self.source.spell('torch', node)}.where({near}, {eps}, {code})")

    def _clamped(self, node: ast.expr, of_numpy: str, method: str, limits: str) -> Edit:
        if self.numpy:
            return put(self.source, node, f"{self.numpy}.{of_numpy}({self.source.code(node)}, {limits})")
        # `x.log_()` writes into x: what comes before it has to do so too.
        parent = self.source.parent(node)
        in_place = isinstance(parent, ast.Attribute) and parent.attr.endswith("_") and not parent.attr.endswith("__")
        return put(self.source, node, f"{atom(self.source, node)}.{method}{'_' if in_place else ''}({limits})")


@dataclass(frozen=True)
class Spot:
    """One operation to be guarded, and all that is known of what it read."""

    job: Job
    place: Place
    expr: Expr
    pen: Pen
    event: OpEvent | None

    def stat(self, name: str) -> TensorStat | None:
        read = self.event.inputs if self.event else ()
        return next((i.stat for i in read if i.name == name and i.stat is not None), None)

    def named(self, node: ast.AST) -> str:
        """The code of an argument for a title, if it is short."""
        text = " ".join(self.place.code(node).split())
        return f"`{text}`" if len(text) <= SHORT else "the argument"

    def floored(self, node: ast.expr, low: str, of: str) -> Remedy:
        why = f"{of} gets no number below {low}; {KEEPS}."
        return self.job.remedy(f"Keep {self.named(node)} at {low} or above", why, self.pen.floor(node, low))


Guard = Callable[[Spot], Iterator[Remedy]]
GUARDS: dict[str, Guard] = {}


def guard(*ops: str) -> Callable[[Guard], Guard]:
    def register(function: Guard) -> Guard:
        GUARDS.update(dict.fromkeys(ops, function))
        return function

    return register


def spot(job: Job, *ops: str) -> Spot | None:
    """The operation at the origin, if it is one of these (any, without names); in a whole statement the first one."""
    wanted, place = set(ops or GUARDS), job.place
    if place is None:
        return None
    expr = place.expr
    if expr.op not in wanted:
        # A call of torch's own that is another operation has what is wanted somewhere inside of torch.
        inside = [place.source.expr(n) for n in ast.walk(place.node) if isinstance(n, ast.expr | ast.AugAssign)]
        fitting = [e for e in inside if e.op in wanted and e.args]
        if not fitting or (expr.library == "torch" and job.event is not None and job.event.library_site is not None):
            return None
        expr = fitting[0]
    if not expr.args or expr.node is None:
        return None
    numpy = place.source.reach("numpy", expr.node)
    arrays = bool(numpy) and (expr.library == "numpy" or job.event is None)
    return Spot(job, place, expr, Pen(place.source, numpy or "" if arrays else ""), job.event)


def guarded(job: Job, *ops: str) -> Iterator[Remedy]:
    """The candidates for the operation at the origin."""
    found = spot(job, *ops)
    if found is not None:
        yield from GUARDS[found.expr.op](found)


# --- one function a kind of operator ---------------------------------------------------------------------------


@guard("log", "log2", "log10", "xlogy")
def _log(at: Spot) -> Iterator[Remedy]:
    node = at.expr.args[1 if at.expr.op == "xlogy" else 0]
    yield at.floored(node, small(at.job.dtype, "1e-12"), "The logarithm")
    yield at.floored(node, small(at.job.dtype, "1e-6", "1e-3"), "The logarithm")


@guard("log1p", "xlog1py")
def _log1p(at: Spot) -> Iterator[Remedy]:
    node = at.expr.args[1 if at.expr.op == "xlog1py" else 0]
    yield at.floored(node, small(at.job.dtype, "-1 + 1e-6", "-1 + 1e-3"), "The logarithm")
    yield at.floored(node, "0", "The logarithm")


@guard("entr")
def _entropy(at: Spot) -> Iterator[Remedy]:
    node, source, eps = at.expr.args[0], at.place.source, small(at.job.dtype, "1e-12")
    torch = source.spell("torch", node)
    safe = f"-{torch}.xlogy({source.code(node)}, {atom(source, node)}.clamp_min({eps}))"
    assert isinstance(at.expr.node, ast.expr)
    yield at.job.remedy(
        f"Keep {at.named(node)} at {eps} or above inside the logarithm",
        f"The slope of the entropy is -log(p) - 1, and the logarithm gets no number below {eps}.",
        put(source, at.expr.node, safe),
    )


@guard("sqrt", "rsqrt")
def _root(at: Spot) -> Iterator[Remedy]:
    node = at.expr.args[0]
    for eps in (small(at.job.dtype, "1e-12", "1e-6"), small(at.job.dtype, "1e-6", "1e-3")):
        yield at.floored(node, eps, "The root")
    yield at.job.remedy(
        f"Add a small number to {at.named(node)}",
        "The root and its slope 1/(2*sqrt(x)) are finite where the argument is 0.",
        put(at.place.source, node, f"{at.place.code(node)} + {small(at.job.dtype, '1e-12', '1e-6')}"),
    )


@guard("pow")
def _power(at: Spot) -> Iterator[Remedy]:
    if len(at.expr.args) < 2:
        return
    base, exponent = at.expr.args[:2]
    if _whole(at.stat("self")):
        yield at.floored(base, "1", "A count")
    power = number(exponent)
    steep = power is not None and power <= -1
    sizes = ("1e-4", "1e-3") if at.job.dtype == "float16" or steep else ("1e-8", "1e-4")
    if power in (0.5, -0.5):
        sizes = (small(at.job.dtype, "1e-12", "1e-6"), small(at.job.dtype, "1e-6", "1e-3"))
    for eps in sizes:
        yield at.floored(base, eps, "The power")


@guard("acos", "asin", "atanh", "erfinv")
def _arc(at: Spot) -> Iterator[Remedy]:
    node, source = at.expr.args[0], at.place.source
    for eps in ("1e-3",) if at.job.dtype == "float16" else ("1e-6", "1e-4"):
        yield at.job.remedy(
            f"Keep {at.named(node)} between -1 and 1, by {eps}",
            f"{at.expr.op} and its slope are finite there; {KEEPS}.",
            Pen(source, at.pen.numpy).between(node, f"-1 + {eps}", f"1 - {eps}"),
        )


@guard("acosh")
def _acosh(at: Spot) -> Iterator[Remedy]:
    yield at.floored(at.expr.args[0], small(at.job.dtype, "1 + 1e-6", "1 + 1e-3"), "acosh")


@guard("logit")
def _logit(at: Spot) -> Iterator[Remedy]:
    node, eps = at.expr.args[0], small(at.job.dtype, "1e-6", "1e-3")
    why = f"logit and its slope are finite there; {KEEPS}."
    yield at.job.remedy(
        f"Keep {at.named(node)} between 0 and 1, by {eps}", why, at.pen.between(node, eps, f"1 - {eps}")
    )


@guard("lgamma", "digamma", "polygamma", "gammaln")
def _gamma(at: Spot) -> Iterator[Remedy]:
    node = at.expr.args[1 if at.expr.op == "polygamma" else 0]
    for eps in (small(at.job.dtype, "1e-6"), "1e-3"):
        yield at.floored(node, eps, at.expr.op)


@guard("tan")
def _tangent(at: Spot) -> Iterator[Remedy]:
    node = at.expr.args[0]
    why = f"tan is finite strictly inside of -pi/2 and pi/2; {KEEPS}."
    yield at.job.remedy(f"Keep {at.named(node)} inside of -pi/2 and pi/2", why, at.pen.between(node, "-1.57", "1.57"))


@guard("exp", "expm1", "exp2", "sinh", "cosh")
def _exponential(at: Spot) -> Iterator[Remedy]:
    node = at.expr.args[0]
    for high in ("10", "5") if at.job.dtype == "float16" else ("20", "80", "10"):
        title, why = (
            f"Keep {at.named(node)} at {high} or below",
            f"{at.expr.op}({high}) is far inside the range of {at.job.dtype}; {KEEPS}.",
        )
        if at.expr.op in ("sinh", "cosh"):
            yield at.job.remedy(title, why, at.pen.between(node, f"-{high}", high))
        else:
            yield at.job.remedy(title, why, at.pen.ceiling(node, high))


@guard("div", "reciprocal", "floor_divide", "remainder", "fmod")
def _division(at: Spot) -> Iterator[Remedy]:
    below = at.expr.args[0 if at.expr.op == "reciprocal" else 1]
    name = "self" if at.event is not None and at.event.op in ("reciprocal", "rsqrt") else "other"
    stat = at.stat(name)
    eps = small(at.job.dtype, "1e-8")
    if _is_count(at, name):
        yield at.floored(below, "1", "The denominator, a count,")
    if stat is not None and stat.negative:
        why = f"The denominator is {eps} where it was 0; {KEEPS}."
        yield at.job.remedy(f"Keep {at.named(below)} away from 0", why, at.pen.nonzero(below, eps))
    elif not _is_count(at, name):
        yield at.floored(below, eps, "The denominator")
    yield from _nothing_where_zero(at, below, eps)
    if not (stat is not None and stat.negative):
        yield at.floored(below, "1e-3", "The denominator")


def _nothing_where_zero(at: Spot, below: ast.expr, eps: str) -> Iterator[Remedy]:
    """`where(b != 0, a / b, 0)`, with the b in it guarded as well, since backward runs through both branches."""
    whole, source = at.expr.node, at.place.source
    if not isinstance(whole, ast.BinOp) or at.pen.numpy:
        return
    torch, plain = source.spell("torch", whole), atom(source, below)
    safe = f"{torch}.where({plain} == 0, 1.0, {source.code(below)})"
    start, end = source.span(whole)
    inner_start, inner_end = source.span(below)
    text = source.text
    if text[:inner_start].rstrip().endswith("(") and text[inner_end:].lstrip().startswith(")") and inner_end < end:
        safe = f"({safe})" if not text[:inner_start].rstrip()[:-1].rstrip().endswith("/") else safe
    quotient = text[start:inner_start] + safe + text[inner_end:end]
    yield at.job.remedy(
        f"Where {at.named(below)} is 0, the result is 0",
        "What has nothing to be divided by takes no part, in forward and in backward.",
        put(source, whole, f"{torch}.where({plain} == 0, 0.0, {quotient})"),
    )


def _whole(stat: TensorStat | None) -> bool:
    """A tensor of whole numbers that begins at 0: a count."""
    return stat is not None and (stat.dtype.startswith("int") or stat.binary) and not stat.negative


def _is_count(at: Spot, name: str) -> bool:
    if _whole(at.stat(name)):
        return True
    event = at.event
    scalar = dict(event.scalars).get(name) if event is not None else None
    if isinstance(scalar, int):
        return True
    makers = [i.producer for i in event.inputs if i.name == name and i.producer is not None] if event else []
    for maker in (at.job.scene.trace.events[m] for m in makers):
        for op in (maker, *at.job.scene.trace.feeding(maker, 3)):
            if op.op in ("count_nonzero", "bincount"):
                return True
            if op.op == "sum" and any(_binary(at, i.stat, i.producer) for i in op.inputs):
                return True
    return False


def _binary(at: Spot, stat: TensorStat | None, producer: int | None) -> bool:
    """Zeros and ones, by its statistics or because it was made from truth values."""
    if stat is not None and (stat.binary or stat.dtype == "bool" or stat.dtype.startswith("int")):
        return True
    if producer is None:
        return False
    made = at.job.scene.trace.events[producer]
    return any(o.dtype == "bool" for o in made.outputs) or (
        made.op in ("_to_copy", "to", "float", "unsqueeze", "view", "expand")
        and any(i.stat is not None and i.stat.dtype == "bool" for i in made.inputs)
    )


def magnitude(stat: TensorStat | None) -> float:
    return largest(stat) or 0.0
