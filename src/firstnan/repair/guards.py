"""Keeps what one operation reads inside its domain: for each operator the place, the size and the words."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from firstnan.records import OpEvent, Remedy, TensorStat
from firstnan.repair.base import Job, Place
from firstnan.repair.edits import Edit, atom, put
from firstnan.repair.makers import BOUNDED, CARRIERS, Binding, binding, made_at
from firstnan.repair.source import Expr, Source, number

CLAMPS = {"clamp": "min", "clamp_min": "min", "clip": "min", "maximum": "other"}
SHORT = 48
MOST_ALIKE = 8
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
    scalar: bool = False
    """The value is a number of Python's."""

    def floor(self, node: ast.expr, low: str) -> Edit:
        """Nowhere below `low`; a clamp that is there already is moved instead of doubled."""
        expr = self.source.expr(node)
        given = expr.arg(1, CLAMPS[expr.op]) if expr.op in CLAMPS else None
        now, wanted = number(given), number(ast.parse(low, mode="eval").body)
        if given is not None and now is not None and (wanted is None or now < wanted):
            return put(self.source, given, low)
        if self.scalar:
            return put(self.source, node, f"max({self.source.code(node)}, {low})")
        return self._clamped(node, "maximum", "clamp_min", low)

    def ceiling(self, node: ast.expr, high: str) -> Edit:
        return self._clamped(node, "minimum", "clamp_max", high)

    def between(self, node: ast.expr, low: str, high: str) -> Edit:
        expr = self.source.expr(node)
        if expr.op == "clamp" and len(expr.args) == 3 and all(number(a) is not None for a in expr.args[1:]):
            return put(self.source, node, f"{atom(self.source, expr.args[0])}.clamp({low}, {high})")
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


Writer = Callable[[Pen, ast.expr], Edit]


@dataclass(frozen=True)
class Idea:
    """One guard, as it is written at the operation itself, and how it would be written elsewhere."""

    title: str
    why: str
    node: ast.expr
    edit: Edit
    write: Writer
    operand: str | None
    """What the tracer calls the argument; None where the guard makes sense at the operation only."""
    carriers: frozenset[str] = CARRIERS
    """What may lie between this guard and the operation, where the argument is made."""


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

    def idea(self, title: str, why: str, node: ast.expr, write: Writer, operand: str | None = "self") -> Idea:
        return Idea(title.replace("IT", self.named(node)), why, node, write(self.pen, node), write, operand)

    def floored(self, node: ast.expr, low: str, of: str, operand: str | None = "self") -> Idea:
        why = f"{of} gets no number below {low}; {KEEPS}."
        return self.idea(f"Keep IT at {low} or above", why, node, lambda pen, at: pen.floor(at, low), operand)


Guard = Callable[[Spot], Iterator[Idea]]
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
        if hasattr(place.node, "body"):  # a loop that takes bad data: what stands in it is not meant
            return None
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
    """Guards for the operation at the origin: there, at all of its kind in the function, where its argument is made.

    The last comes first where that is a name which is read elsewhere too."""
    found = spot(job, *ops)
    ideas = list(GUARDS[found.expr.op](found)) if found is not None else []
    if found is None or not ideas:
        return
    bound = binding(job, found.place.source, ideas[0].node, ideas[0].operand) if ideas[0].operand else None
    made = [r for idea in ideas if (r := _where_made(job, found, idea, bound)) is not None]
    local = [job.remedy(idea.title, idea.why, idea.edit) for idea in ideas]
    if bound is not None:  # others read it too: a guard here would leave them as they are
        yield from made
    yield local[0]
    yield from _everywhere(job, found)
    if bound is None:
        yield from made[:1]
    yield from local[1:]
    if bound is None:
        yield from made[1:]


def _where_made(job: Job, found: Spot, idea: Idea, bound: Binding | None) -> Remedy | None:
    """The same guard where its argument is made."""
    if idea.operand is None:
        return None
    if bound is None:
        maker = made_at(job, idea.operand, idea.carriers)
        if maker is None or not isinstance(maker.node, ast.expr):
            return None
        edit = idea.write(Pen(maker.source, found.pen.numpy), maker.node)
        line = maker.source.statement(maker.node).lineno
    else:
        given, line = (
            bound.guarded(lambda node: idea.write(replace(found.pen, source=bound.source), node), idea.edit),
            bound.line,
        )
        if given is None:
            return None
        edit = given
    return job.remedy(f"{idea.title}, where it is made (line {line})", idea.why, edit)


def _everywhere(job: Job, found: Spot) -> Iterator[Remedy]:
    """The same guard at every operation of this kind in the function: what one of them met, the next one may."""
    source, node = found.place.source, found.expr.node
    around = source.within(node) if node is not None else []
    like = [source.expr(n) for n in around if isinstance(n, ast.Call | ast.BinOp)]
    like = [e for e in like if e.op == found.expr.op and e.library == found.expr.library and e.args]
    firsts = [next(GUARDS[e.op](replace(found, expr=e)), None) for e in like]
    ideas = {i.edit.start: i for i in firsts if i is not None}
    if 1 < len(ideas) <= MOST_ALIKE:
        own = next(iter(ideas.values()))
        title = f"The same for all {len(ideas)} of `{found.expr.op}` around it"
        yield job.remedy(title, own.why, *(i.edit for i in ideas.values()))


# --- one function a kind of operator ---------------------------------------------------------------------------


@guard("log", "log2", "log10", "xlogy")
def _log(at: Spot) -> Iterator[Idea]:
    second = at.expr.op == "xlogy"
    for eps in (small(at.job.dtype, "1e-12"), small(at.job.dtype, "1e-6", "1e-3")):
        yield at.floored(at.expr.args[second], eps, "The logarithm", "other" if second else "self")


@guard("log1p", "xlog1py")
def _log1p(at: Spot) -> Iterator[Idea]:
    second = at.expr.op == "xlog1py"
    for low in (small(at.job.dtype, "-1 + 1e-6", "-1 + 1e-3"), "0"):
        yield at.floored(at.expr.args[second], low, "The logarithm", "other" if second else "self")


@guard("entr")
def _entropy(at: Spot) -> Iterator[Idea]:
    eps = small(at.job.dtype, "1e-12")

    def write(pen: Pen, node: ast.expr) -> Edit:
        code, plain = pen.source.code(node), atom(pen.source, node)
        whole = pen.source.parent(node) if isinstance(pen.source.parent(node), ast.Call) else at.expr.node
        assert isinstance(whole, ast.expr)
        return put(pen.source, whole, f"-{pen.source.spell('torch', node)}.xlogy({code}, {plain}.clamp_min({eps}))")

    why = f"The slope of the entropy is -log(p) - 1, and the logarithm gets no number below {eps}."
    yield at.idea(f"Keep IT at {eps} or above inside the logarithm", why, at.expr.args[0], write, None)


@guard("sqrt", "rsqrt")
def _root(at: Spot) -> Iterator[Idea]:
    node = at.expr.args[0]
    for eps in (small(at.job.dtype, "1e-12", "1e-6"), small(at.job.dtype, "1e-6", "1e-3")):
        yield at.floored(node, eps, "The root")
    tiny = small(at.job.dtype, "1e-12", "1e-6")
    yield at.idea(
        f"Add {tiny} to IT",
        "The root and its slope 1/(2*sqrt(x)) are finite where the argument is 0.",
        node,
        lambda pen, inner: put(pen.source, inner, f"{pen.source.code(inner)} + {tiny}"),
    )


@guard("pow")
def _power(at: Spot) -> Iterator[Idea]:
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
def _arc(at: Spot) -> Iterator[Idea]:
    for eps in ("1e-3",) if at.job.dtype == "float16" else ("1e-6", "1e-4"):
        yield _inside(at, f"-1 + {eps}", f"1 - {eps}")


def _inside(at: Spot, low: str, high: str) -> Idea:
    why = f"{at.expr.op} and its slope are finite there; {KEEPS}."
    return at.idea(f"Keep IT between {low} and {high}", why, at.expr.args[0], lambda pen, x: pen.between(x, low, high))


@guard("acosh")
def _acosh(at: Spot) -> Iterator[Idea]:
    yield at.floored(at.expr.args[0], small(at.job.dtype, "1 + 1e-6", "1 + 1e-3"), "acosh")


@guard("logit")
def _logit(at: Spot) -> Iterator[Idea]:
    eps = small(at.job.dtype, "1e-6", "1e-3")
    yield _inside(at, eps, f"1 - {eps}")


@guard("lgamma", "digamma", "polygamma", "gammaln")
def _gamma(at: Spot) -> Iterator[Idea]:
    node = at.expr.args[1 if at.expr.op == "polygamma" else 0]
    for eps in (small(at.job.dtype, "1e-6"), "1e-3"):
        yield at.floored(node, eps, at.expr.op)


@guard("gammainc", "gammaincc", "igamma", "igammac")
def _incomplete_gamma(at: Spot) -> Iterator[Idea]:
    if len(at.expr.args) > 1:
        yield at.floored(at.expr.args[1], small(at.job.dtype, "1e-6"), "The logarithm in its derivative", "other")


@guard("tan")
def _tangent(at: Spot) -> Iterator[Idea]:
    yield _inside(at, "-1.57", "1.57")


@guard("exp", "expm1", "exp2", "sinh", "cosh")
def _exponential(at: Spot) -> Iterator[Idea]:
    for high in ("10", "5") if at.job.dtype == "float16" else ("20", "80", "10"):
        yield _below(at, high)


def _below(at: Spot, high: str) -> Idea:
    why = f"{at.expr.op}({high}) is far inside the range of {at.job.dtype}; {KEEPS}."
    if at.expr.op in ("sinh", "cosh"):
        return _inside(at, f"-{high}", high)
    idea = at.idea(f"Keep IT at {high} or below", why, at.expr.args[0], lambda pen, x: pen.ceiling(x, high))
    # Near the end of the range, arithmetic behind the guard may lead beyond it.
    return replace(idea, carriers=BOUNDED) if float(high) < 80 else idea


@guard("div", "reciprocal", "floor_divide", "remainder", "fmod")
def _division(at: Spot) -> Iterator[Idea]:
    if at.expr.op != "reciprocal" and len(at.expr.args) < 2:
        return
    below = at.expr.args[0 if at.expr.op == "reciprocal" else 1]
    name = "self" if at.event is not None and at.event.op in ("reciprocal", "rsqrt") else "other"
    if at.event is not None and name in dict(at.event.scalars):
        at = replace(at, pen=replace(at.pen, scalar=True))
    stat, eps = at.stat(name), small(at.job.dtype, "1e-8")
    yield from _under_the_root(at, below)
    if _is_count(at, name):
        yield at.floored(below, "1", "The denominator, a count,", name)
    elif stat is not None and stat.negative:
        why = f"The denominator is {eps} where it was 0; {KEEPS}."
        yield at.idea("Keep IT away from 0", why, below, lambda pen, x: pen.nonzero(x, eps), name)
    else:
        yield at.floored(below, eps, "The denominator", name)
    if not at.pen.scalar:
        yield from _nothing_where_zero(at, below)
    if stat is None or not stat.negative:
        yield at.floored(below, "1e-3", "The denominator", name)


def _under_the_root(at: Spot, below: ast.expr) -> Iterator[Idea]:
    """A denominator that is itself a root: a guard around it would leave the infinite slope of the root at 0."""
    root = at.place.source.meaning(below)
    half = root.op == "pow" and len(root.args) > 1 and number(root.args[1]) == 0.5
    if root.args and (root.op == "sqrt" or half) and root.called != "math.sqrt":
        yield at.floored(root.args[0], small(at.job.dtype, "1e-12", "1e-6"), "The root in the denominator", None)


def _nothing_where_zero(at: Spot, below: ast.expr) -> Iterator[Idea]:
    """`where(b == 0, 0, a / b)`, with the b in it guarded as well, since backward runs through both branches."""
    whole = at.expr.node
    if not isinstance(whole, ast.BinOp) or at.pen.numpy or len(at.place.code(below)) > SHORT:
        return

    def write(pen: Pen, node: ast.expr) -> Edit:
        source = pen.source
        torch, plain = source.spell("torch", node), atom(source, node)
        safe = f"{torch}.where({plain} == 0, 1.0, {source.code(node)})"
        quotient = f"{atom(source, whole.left)} / {safe}"
        return put(source, whole, f"{torch}.where({plain} == 0, 0.0, {quotient})")

    why = "What has nothing to be divided by takes no part, in forward and in backward."
    yield at.idea("Where IT is 0, the result is 0", why, below, write, None)


def _whole(stat: TensorStat | None) -> bool:
    """A tensor of whole numbers that begins at 0: a count."""
    return stat is not None and stat.dtype.startswith("int") and not stat.negative


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
