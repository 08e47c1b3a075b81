"""Arguments outside the domain of a function or at its boundary, and divisions by zero: guarded."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from firstnan.records import Edit, OpEvent, Remedy, TensorStat
from firstnan.records.operator_families import words
from firstnan.records.syntax import parse
from firstnan.repair.context import (
    BOUNDED,
    CARRIERS,
    Binding,
    FailureContext,
    Location,
    binding,
    is_in_place,
    producer_of,
    remedies_for,
    unpacked,
)
from firstnan.repair.literals import find_literal, format_number
from firstnan.repair.source import (
    Expr,
    Function,
    SourceFile,
    insert_before,
    literal_value,
    parameter_names,
    parenthesized,
    replace_node,
)

CLAMPS = {"clamp": "min", "clamp_min": "min", "clip": "min", "maximum": "other"}
LONGEST_IN_TITLE = 48
MOST_ALIKE = 8


@dataclass(frozen=True)
class GuardWriter:
    """Writes the guarded form of an expression, for torch, numpy or a Python number."""

    source: SourceFile
    numpy: str = ""
    """The local name of numpy if the values are its arrays."""
    scalar: bool = False
    """The value is a Python number."""

    def floor(self, node: ast.expr, low: str) -> Edit:
        """At least `low`; an existing clamp is changed instead of adding a second one."""
        expr = self.source.expr(node)
        given = expr.arg(1, CLAMPS[expr.op]) if expr.op in CLAMPS else None
        now, wanted = literal_value(given), literal_value(parse(low, "eval").body)
        if given is not None and now is not None and (wanted is None or now < wanted):
            return replace_node(self.source, given, low)
        if self.scalar:
            return replace_node(self.source, node, f"max({self.source.code(node)}, {low})")
        return self._clamped(node, "maximum", "clamp_min", low)

    def plus(self, node: ast.expr, number: str) -> Edit:
        method = isinstance(parent := self.source.parent(node), ast.Attribute) and parent.value is node
        text = f"{self.source.code(node)} + {number}"
        return replace_node(self.source, node, f"({text})" if method else text)

    def ceiling(self, node: ast.expr, high: str) -> Edit:
        return self._clamped(node, "minimum", "clamp_max", high)

    def between(self, node: ast.expr, low: str, high: str) -> Edit:
        expr = self.source.expr(node)
        if expr.op == "clamp" and len(expr.args) == 3 and all(literal_value(a) is not None for a in expr.args[1:]):
            return replace_node(self.source, node, f"{parenthesized(self.source, expr.args[0])}.clamp({low}, {high})")
        return self._clamped(node, "clip", "clamp", f"{low}, {high}")

    def nonzero(self, node: ast.expr, eps: str) -> Edit:
        """`eps` in place of values near 0; other values keep their sign."""
        code, library = self.source.code(node), self.numpy or self.source.spell("torch", node)
        size = f"{library}.abs({code})" if self.numpy else f"{parenthesized(self.source, node)}.abs()"
        return replace_node(self.source, node, f"{library}.where({size} < {eps}, {eps}, {code})")

    def _clamped(self, node: ast.expr, of_numpy: str, method: str, limits: str) -> Edit:
        if self.numpy:
            return replace_node(self.source, node, f"{self.numpy}.{of_numpy}({self.source.code(node)}, {limits})")
        # `x.log_()` writes into x, so a clamp before it has to do so too.
        method += "_" * is_in_place(self.source.parent(node))
        return replace_node(self.source, node, f"{parenthesized(self.source, node)}.{method}({limits})")


WriteGuard = Callable[[GuardWriter, ast.expr], Edit]


@dataclass(frozen=True)
class Guard:
    """One guard at the operation itself, and how to write it elsewhere."""

    title: str
    why: str
    node: ast.expr
    edit: Edit
    write: WriteGuard
    operand: str | None
    """The tracer's name of the argument; None if the guard makes sense only at the operation."""
    carriers: frozenset[str] = CARRIERS
    """The operators that may come between the guard and the operation, if the guard is elsewhere."""


@dataclass(frozen=True)
class FailingOperation:
    """One operation that needs a guard."""

    context: FailureContext
    location: Location[ast.AST]
    expr: Expr
    writer: GuardWriter

    @property
    def event(self) -> OpEvent | None:
        return self.context.event

    def stat(self, name: str) -> TensorStat | None:
        read = self.event.inputs if self.event else ()
        return next((i.stat for i in read if i.name == name and i.stat is not None), None)

    def guard(self, title: str, why: str, node: ast.expr, write: WriteGuard, operand: str | None = "self") -> Guard:
        """The guard of one argument, whose code replaces `IT` in the title if it is short."""
        text = " ".join(self.location.code(node).split())
        title = title.replace("IT", f"`{text}`" if len(text) <= LONGEST_IN_TITLE else "the argument")
        return Guard(title, why, node, write(self.writer, node), write, operand)

    def floor(self, node: ast.expr, low: str, operand: str | None = "self", what: str = "Inputs") -> Guard:
        why = f"{what} above {low} and their gradients are unchanged."
        return self.guard(f"Keep IT at {low} or above", why, node, lambda writer, x: writer.floor(x, low), operand)

    def count(self, node: ast.expr, operand: str = "self") -> Guard:
        return replace(self.floor(node, "1", operand), why="A count of 0 becomes 1; all other counts are unchanged.")


GuardRule = Callable[[FailingOperation], Iterator[Guard]]
GUARDS: dict[str, GuardRule] = {}


def guards_for(*ops: str) -> Callable[[GuardRule], GuardRule]:
    def register(function: GuardRule) -> GuardRule:
        GUARDS.update(dict.fromkeys(ops, function))
        return function

    return register


def failing_operation(context: FailureContext, *ops: str) -> FailingOperation | None:
    """The operation at the origin if it is one of these (by default any with a guard); the first in a statement."""
    wanted, location, event = set(ops or GUARDS), context.location, context.event
    if location is None:
        return None
    expr = location.expr
    if expr.op not in wanted or (event is None and _divides_by_a_number(expr)):
        if hasattr(location.node, "body"):  # a loop over bad data: its body is not the origin
            return None
        # Another function of torch's calls the wanted operation in its own source, not in the user's.
        inside = [location.source.expr(n) for n in ast.walk(location.node) if isinstance(n, ast.expr | ast.AugAssign)]
        fitting = [e for e in inside if e.op in wanted and e.args and not _divides_by_a_number(e)]
        if not fitting or (expr.library == "torch" and event is not None and event.library_site is not None):
            return None
        expr = fitting[0]
    if not expr.args or expr.node is None:
        return None
    numpy = location.source.reach("numpy", expr.node) or ""
    arrays = expr.library == "numpy" or event is None
    return FailingOperation(context, location, expr, GuardWriter(location.source, numpy if arrays else ""))


def _divides_by_a_number(expr: Expr) -> bool:
    return expr.op == "div" and literal_value(expr.args[-1]) not in (None, 0)


def guarded(context: FailureContext, *ops: str) -> Iterator[Remedy]:
    """Guards at the operation, at all operations of its kind in the function, and where its argument is computed.

    The last comes first if the argument is a name that is also read elsewhere."""
    found = failing_operation(context, *ops)
    guards = list(GUARDS[found.expr.op](found)) if found is not None else []
    if found is None or not guards:
        return
    yield from _of_both_logarithms(found)
    bound = binding(context, found.location.source, guards[0].node, guards[0].operand) if guards[0].operand else None
    earlier = [r for guard in guards if (r := _where_computed(found, guard, bound)) is not None]
    local = [context.remedy(guard.title, guard.why, guard.edit) for guard in guards]
    elsewhere = bound is not None or unpacked(found.location.source, guards[0].node) is not None
    if elsewhere:  # a guard at the operation would not cover the other reads
        yield from earlier
    yield from _in_the_statement(found)
    yield local[0]
    yield from _everywhere(found)
    yield from _in_other_functions(found, guards[0])
    if not elsewhere:
        yield from earlier[:1]
    yield from local[1:]
    if not elsewhere:
        yield from earlier[1:]


def _where_computed(found: FailingOperation, guard: Guard, bound: Binding | None) -> Remedy | None:
    """The same guard where its argument is computed."""
    context, edit, title = found.context, None, guard.title
    if guard.operand is None:
        return None
    if bound is not None:
        writer = replace(found.writer, source=bound.source)
        edit, line = bound.guarded(lambda node: guard.write(writer, node), guard.edit), bound.line
    else:
        producer = producer_of(context, guard.operand, guard.carriers)
        if producer is None or not isinstance(producer.node, ast.expr):
            return _where_unpacked(found, guard)
        edit = guard.write(GuardWriter(producer.source, found.writer.numpy), producer.node)
        line = producer.source.statement(producer.node).lineno
        if guard.carriers is BOUNDED:  # maybe not the same numbers
            code, made = found.location.source.code(guard.node), producer.source.code(producer.node)
            title = title.replace(f"`{code}`", f"`{made}`")
    title = f"{title}, where it is computed (line {line})"
    return context.remedy(title, guard.why, edit) if edit is not None else None


def _where_unpacked(found: FailingOperation, guard: Guard) -> Remedy | None:
    """The guard on a separate line after `a, b = ...`, if the argument is `b` times or plus a number."""
    source = found.location.source
    bound = unpacked(source, guard.node) if guard.carriers is BOUNDED else None
    if bound is None:
        return None
    (name,) = (n for n in ast.walk(guard.node) if isinstance(n, ast.Name))
    edit = bound.guarded(lambda node: guard.write(found.writer, node), guard.write(found.writer, name))
    title = guard.title.replace(f"`{source.code(guard.node)}`", f"`{name.id}`")
    return found.context.remedy(f"{title}, where it is computed (line {bound.line})", guard.why, edit) if edit else None


def _of_both_logarithms(found: FailingOperation) -> Iterator[Remedy]:
    """`x` itself where log(x) and log(1 - x) or log1p(-x) read it: a guard of one of them leaves the other."""
    source, own = found.location.source, _logarithm_of(found.location.source, found.expr)
    if own is None or found.writer.numpy or is_trained(found):
        return
    scope, name = source.scope(found.location.node), own[0]
    calls = [n for n in source.within(found.location.node) if isinstance(n, ast.Call) and source.scope(n) is scope]
    uses = [(n, *form) for n in calls if (form := _logarithm_of(source, source.expr(n))) and form[0].id == name.id]
    statements = {source.statement(call): None for call, _, _ in uses}
    if {left for _, _, left in uses} != {True, False} or isinstance(scope, ast.Lambda):
        return
    if len(statements) == 1 and len({source.expr(call).op for call, _, _ in uses}) == 1:
        return  # guards of both stand in one line
    first = min(statements, key=lambda s: s.lineno)
    local = (
        scope is source.tree
        or (isinstance(scope, Function) and name.id in parameter_names(scope))
        or source.assigned(name, first) is not None
    )
    nested = all(source.parent(first) in source.parents(s) for s in statements)
    if not local or not nested or not all(source.unchanged(use, call) for call, use, _ in uses):
        return
    eps = {"float16": "1e-3", "bfloat16": "1e-2"}.get(found.context.dtype, "1e-6")
    yield found.context.remedy(
        f"Keep `{name.id}` between {eps} and 1 - {eps}",
        "Its logarithm and that of 1 minus it are both finite in this range; numbers in it are unchanged.",
        insert_before(source, first, f"{name.id} = {name.id}.clamp({eps}, 1 - {eps})"),
    )


def _logarithm_of(source: SourceFile, expr: Expr) -> tuple[ast.Name, bool] | None:
    """The `x` of log(x) and True; of log(1 - x) or log1p(-x) and False."""
    given = expr.args[0] if expr.op in ("log", "log1p") and expr.args else None
    if expr.op == "log" and isinstance(given, ast.Name):
        return given, True
    inner = source.expr(given)
    if expr.op == "log" and (inner.op != "sub" or literal_value(inner.args[0]) != 1):
        return None
    if expr.op == "log1p" and inner.op != "neg":
        return None
    name = inner.args[-1] if inner.args else None
    return (name, False) if isinstance(name, ast.Name) else None


def _in_the_statement(found: FailingOperation) -> Iterator[Remedy]:
    """The same guard at every operation of this kind in the failing statement, if it is there more than once."""
    source = found.location.source
    statement = source.statement(found.location.node)
    here = [g for g in alike(found, found.expr.op) if source.statement(g.node) is statement]
    if 1 < len(here) <= MOST_ALIKE and not hasattr(statement, "body"):
        own = next(
            (g for g in here if found.location.code(g.node) in map(found.location.code, found.expr.args)), here[0]
        )
        others = f"the other {len(here) - 1} uses of" if len(here) > 2 else "the other"
        title = f"{own.title}, and the same for {others} `{found.expr.op}` in this line"
        yield found.context.remedy(title, own.why, *(guard.edit for guard in here))


def _everywhere(found: FailingOperation) -> Iterator[Remedy]:
    """The same guard at every operation of this kind in the function: the others may fail in the same way."""
    guards = alike(found, found.expr.op)
    if 1 < len(guards) <= MOST_ALIKE:
        own = next(
            (g for g in guards if found.location.code(g.node) in map(found.location.code, found.expr.args)), None
        )
        both = own is not None and len(guards) == 2
        title = f"{'the other use' if both else f'all {len(guards)} uses'} of `{found.expr.op}` in this function"
        title = f"{own.title}, and the same for {title}" if own is not None else f"The same for {title}"
        yield found.context.remedy(title, guards[0].why, *(guard.edit for guard in guards))


def _in_other_functions(found: FailingOperation, guard: Guard) -> Iterator[Remedy]:
    """The same guard in every function of the file that reads the same expression in this way, and ran in this step."""
    source, expr = found.location.source, found.expr
    ran = [found.context.location_of(e.site) for e in found.context.failure.trace.events if e.phase == "forward"]
    ran_nodes = {at.node: at for at in ran if at is not None and at.source is source}
    like = [e for e in (source.expr(node) for node in ran_nodes) if e.op == expr.op and e.args and e.node is not None]
    others = [
        other
        for e in like
        if e.node is not None and source.scope(e.node) is not source.scope(found.location.node)
        for other in [next(GUARDS[e.op](replace(found, expr=e)), None)]
        if other is not None and source.code(other.node) == source.code(guard.node)
    ]
    if 0 < len(others) < MOST_ALIKE:
        functions = len({source.scope(g.node) for g in (guard, *others)})
        edits = {(g.edit.line, g.edit.column): g.edit for g in (guard, *others)}
        yield found.context.remedy(f"{guard.title}, in {functions} functions", guard.why, *edits.values())


def alike(found: FailingOperation, op: str) -> list[Guard]:
    """The first guard of each operation of this kind in the function."""
    source = found.location.source
    like = [source.expr(n) for n in source.within(found.location.node) if isinstance(n, ast.Call | ast.BinOp)]
    like = [e for e in like if e.op == op and e.args and (op != found.expr.op or e.library == found.expr.library)]
    if op == "div":
        like = [e for e in like if _divides_by_a_tensor(found, e)]
    like = [e for e in like if e.node is found.expr.node or not _is_whole_power(e)]
    firsts = [(e, next(GUARDS[e.op](replace(found, expr=e)), None)) for e in like]
    wanted = [g for e, g in firsts if g is not None and (e.node is found.expr.node or not _has_floor(source, g.node))]
    return list({(guard.edit.line, guard.edit.column): guard for guard in wanted}.values())


def _is_whole_power(expr: Expr) -> bool:
    """A square or a cube, which every number has: a bound of its base would only change it."""
    exponent = literal_value(expr.arg(1, "exponent")) if expr.op == "pow" else None
    return exponent is not None and exponent >= 0 and exponent == int(exponent)


def _has_floor(source: SourceFile, node: ast.expr) -> bool:
    """Whether the program keeps it above 0 already: `x.clamp(min=1e-5)`."""
    expr = source.expr(node)
    low = literal_value(expr.arg(1, CLAMPS[expr.op])) if expr.op in CLAMPS else None
    return low is not None and low > 0


def _divides_by_a_tensor(found: FailingOperation, expr: Expr) -> bool:
    """Whether a division was recorded there: in Python it may divide numbers, or by one."""
    if found.writer.numpy or expr.node is found.expr.node:
        return True
    for event in found.context.failure.trace.events:
        if event.op == "div" and any(i.name == "other" for i in event.inputs):
            location = found.context.location_of(event.site)
            if location is not None and location.node is expr.node:
                return True
    return False


# --- a small number that the program adds itself -----------------------------------------------------------------


def _floors(
    at: FailingOperation, node: ast.expr, bounds: tuple[str, ...], operand: str | None = "self", what: str = "Inputs"
) -> Iterator[Guard]:
    """Lower bounds, the first one first; for `x + eps` one of x at 0, and none below eps after it.

    The whole sum at 1e-12 or above would undo the eps: its inverse root would be a million."""
    read = at.stat(operand or "self")
    if read is not None and read.dtype.startswith("complex"):  # which have no order
        low = max(bounds, key=float)
        why = f"Numbers that are large compared with {low} change by no more than that."
        yield at.guard(f"Add {low} to IT", why, node, lambda writer, x: writer.plus(x, low), operand)
        return
    yield from _larger_epsilon(at, node, bounds[0])
    own = _own_epsilon(at, node)
    if own is not None:
        direct = operand if at.location.source.statement(own[0]) is at.location.source.statement(node) else None
        why = f"Inputs above 0 and their gradients are unchanged; the {own[1]:g} that is added stays the smallest sum."
        yield replace(at.floor(own[0], "0", direct), why=why)
    for low in bounds:
        if own is None or float(low) > own[1]:
            yield at.floor(node, low, operand, what)


def _own_epsilon(at: FailingOperation, node: ast.expr) -> tuple[ast.expr, float] | None:
    """The x and the eps of `x + eps`, if eps is a positive number and x has gone below 0."""
    total = at.location.source.value(node)
    for one, found, number in _added_numbers(at, total):
        if SMALLEST.get(at.context.narrowest, 0.0) < number <= LARGEST_EPSILON:
            written = isinstance(total, ast.BinOp) and found.node in (total.left, total.right)
            return (one, number) if _may_be_negative(at, total) and (written or _is_negative(at)) else None
    return None


def _added_numbers(at: FailingOperation, total: ast.expr) -> Iterator[tuple[ast.expr, Location[ast.expr], float]]:
    """The x of `x + number`, where that number is written, and the number."""
    if isinstance(total, ast.BinOp) and isinstance(total.op, ast.Add):
        for one, other in ((total.left, total.right), (total.right, total.left)):
            found = find_literal(at.context.files, Location(at.location.source, other))
            number = literal_value(found.node) if found is not None else None
            if found is not None and number is not None:
                yield one, found, number


def _larger_epsilon(at: FailingOperation, node: ast.expr, low: str) -> Iterator[Guard]:
    """A number that the dtype can hold, in place of an eps that it rounds to 0."""
    for _, found, number in _added_numbers(at, at.location.source.value(node)):
        if 0 < number < SMALLEST.get(at.context.narrowest, 0.0) / 2:
            title = f"Add {low} instead of {format_number(number)}, which {at.context.narrowest} rounds to 0"
            why = "The program's own guard against 0 has an effect again."
            yield replace(
                at.floor(node, low, None), title=title, why=why, edit=replace_node(found.source, found.node, low)
            )


LARGEST_EPSILON = 1e-2
SMALLEST = {"float16": 6e-8, "bfloat16": 1e-38, "float32": 1e-38}
"""Below it a number may be rounded to 0 when it is added."""


def _may_be_negative(at: FailingOperation, total: ast.expr) -> bool:
    """Whether what the sum reads has gone below 0, or is not known."""
    for event in reversed(at.context.failure.trace.events):
        if event.op == "add" and event.phase == "forward":
            location = at.context.location_of(event.site)
            if location is not None and location.node is total:
                seen = [i.stat.min for i in event.inputs if i.stat is not None and i.stat.min is not None]
                return not seen or min(seen) < 0
    return True


def _is_negative(at: FailingOperation) -> bool:
    """Whether the operator has read numbers below 0, or that is unknown.

    A sum that is 0 and never below holds no eps: the one that was found by its name belongs to another object."""
    read = [i.stat.min for i in (at.context.event.inputs if at.context.event else ()) if i.stat is not None]
    known = [low for low in read if low is not None]
    return not known or min(known) < 0


# --- one function per kind of operator ---------------------------------------------------------------------------


@guards_for("log", "log2", "log10", "xlogy")
def _log(at: FailingOperation) -> Iterator[Guard]:
    second = at.expr.op == "xlogy"
    if is_trained(at):
        return  # below a clamp it has no gradient from here any more
    node, operand = _shared_factor(at.location.source, at.expr.args[second]), "other" if second else "self"
    bounds = at.context.epsilon("1e-12"), at.context.epsilon("1e-6", "1e-3")
    if at.event is not None and at.event.region == "data" and _is_count(at, operand):
        yield at.count(node, operand)  # the logarithm of 1e-12 would be far from that of all counts
    yield from _floors(at, node, bounds, operand)


def _shared_factor(source: SourceFile, node: ast.expr) -> ast.expr:
    """`var` of `2 * math.pi * var` if it is read elsewhere too, where it may fail in the same way; else the node."""
    at = without_constants(source, node)
    return at if isinstance(at, ast.Name) and source.reads(at.id, at) > 1 else node


def without_constants(source: SourceFile, node: ast.expr) -> ast.expr:
    """`var` of `2 * math.pi * var`; the node itself if it has no such factor, or not one other."""
    at = node
    while isinstance(at, ast.BinOp) and isinstance(at.op, ast.Mult):
        sides = [side for side in (at.left, at.right) if not _is_positive_constant(source, side)]
        if len(sides) != 1:
            return node
        at = sides[0]
    return at


def _is_positive_constant(source: SourceFile, node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return all(_is_positive_constant(source, side) for side in (node.left, node.right))
    number = literal_value(node)
    if number is not None:
        return number > 0
    return isinstance(node, ast.Attribute) and node.attr in ("pi", "e", "tau") and isinstance(node.value, ast.Name)


@guards_for("log1p", "xlog1py")
def _log1p(at: FailingOperation) -> Iterator[Guard]:
    node, operand = (at.expr.args[1], "other") if at.expr.op == "xlog1py" else (at.expr.args[0], "self")
    yield at.floor(node, at.context.epsilon("-1 + 1e-6", "-1 + 1e-3"), operand)
    stat = at.stat(operand)
    if stat is None or stat.negative <= 1:  # more of them, as in log1p(-p), are what is meant
        yield at.floor(node, "0", operand)


@guards_for("entr")
def _entropy(at: FailingOperation) -> Iterator[Guard]:
    eps = at.context.epsilon("1e-12")

    def write(writer: GuardWriter, node: ast.expr) -> Edit:
        source, parent = writer.source, writer.source.parent(node)
        whole = parent if isinstance(parent, ast.Call) else at.expr.node
        assert isinstance(whole, ast.expr)
        clamped = f"{parenthesized(source, node)}.clamp_min({eps})"
        return replace_node(source, whole, f"-{source.spell('torch', node)}.xlogy({source.code(node)}, {clamped})")

    why = f"The gradient of the entropy is -log(p) - 1; the logarithm reads no value below {eps}."
    yield at.guard(f"Keep IT at {eps} or above inside the logarithm", why, at.expr.args[0], write, None)


@guards_for("sqrt", "rsqrt")
def _root(at: FailingOperation) -> Iterator[Guard]:
    node, tiny = at.expr.args[0], at.context.epsilon("1e-12", "1e-6")
    yield from _floors(at, node, (tiny, at.context.epsilon("1e-6", "1e-3")))
    if _own_epsilon(at, node) is not None:
        return
    yield at.guard(
        f"Add {tiny} to IT",
        "The root and its gradient 1/(2*sqrt(x)) are finite at an input of 0.",
        node,
        lambda writer, x: writer.plus(x, tiny),
    )


@guards_for("pow")
def _power(at: FailingOperation) -> Iterator[Guard]:
    if len(at.expr.args) < 2:
        return
    base, exponent = at.expr.args[:2]
    if _is_count(at, "self"):
        yield at.count(base)
    power = literal_value(exponent)
    steep = power is not None and power <= -1
    sizes = ("1e-4", "1e-3") if at.context.dtype == "float16" or steep else ("1e-8", "1e-4")
    if power in (0.5, -0.5):
        sizes = (at.context.epsilon("1e-12", "1e-6"), at.context.epsilon("1e-6", "1e-3"))
    yield from _floors(at, base, sizes)


@guards_for("acos", "asin", "atanh", "erfinv")
def _arc(at: FailingOperation) -> Iterator[Guard]:
    for eps in ("1e-3",) if at.context.dtype == "float16" else ("1e-6", "1e-4"):
        yield _inside(at, f"-1 + {eps}", f"1 - {eps}")


def _inside(at: FailingOperation, low: str, high: str) -> Guard:
    why = f"{at.expr.op} and its gradient are finite in this range; inputs inside it are unchanged."
    title, node = f"Keep IT between {low} and {high}", at.expr.args[0]
    return at.guard(title, why, node, lambda writer, x: writer.between(x, low, high))


@guards_for("acosh")
def _acosh(at: FailingOperation) -> Iterator[Guard]:
    yield at.floor(at.expr.args[0], at.context.epsilon("1 + 1e-6", "1 + 1e-3"))


@guards_for("logit")
def _logit(at: FailingOperation) -> Iterator[Guard]:
    eps = at.context.epsilon("1e-6", "1e-3")
    yield _inside(at, eps, f"1 - {eps}")


@guards_for("lgamma", "digamma", "polygamma", "gammaln")
def _gamma(at: FailingOperation) -> Iterator[Guard]:
    node = at.expr.args[1 if at.expr.op == "polygamma" else 0]
    for eps in (at.context.epsilon("1e-6"), "1e-3"):
        yield at.floor(node, eps)


@guards_for("gammainc", "gammaincc", "igamma", "igammac")
def _incomplete_gamma(at: FailingOperation) -> Iterator[Guard]:
    if len(at.expr.args) > 1:
        yield at.floor(at.expr.args[1], at.context.epsilon("1e-6"), "other")


@guards_for("tan")
def _tangent(at: FailingOperation) -> Iterator[Guard]:
    yield _inside(at, "-1.57", "1.57")


@guards_for("exp", "expm1", "exp2", "sinh", "cosh")
def _exponential(at: FailingOperation) -> Iterator[Guard]:
    bounds = ("10", "5") if at.context.dtype == "float16" else ("20", "80", "10", "2")
    stat = at.stat("self")
    yield _below(at, bounds[0])
    underflows = stat is not None and stat.min is not None and stat.min < -4 * float(bounds[0])
    if underflows and at.expr.op not in ("sinh", "cosh"):
        # Others underflow to 0, where a root or a logarithm that follows has no finite gradient.
        yield _inside(at, f"-{bounds[0]}", bounds[0])
    for high in bounds[1:]:
        yield _below(at, high)


def why_below(op: str, high: str, dtype: str) -> str:
    """Why an exponent is kept at or below a number."""
    return f"{op}({high}) is well within the range of {dtype}; inputs below {high} and their gradients are unchanged."


def _below(at: FailingOperation, high: str) -> Guard:
    if at.expr.op in ("sinh", "cosh"):
        return _inside(at, f"-{high}", high)
    why, node = why_below(at.expr.op, high, at.context.dtype), at.expr.args[0]
    stat = at.stat("self")
    if at.event is not None and at.event.in_float64 == "finite" and stat is not None and stat.max is not None:
        # The exact number is one that the program could have used, and later code may divide by it again.
        why = f"{why} Those above it, here up to {stat.max:.4g}, are cut: what is computed from them is too small."
    guard = at.guard(f"Keep IT at {high} or below", why, node, lambda writer, x: writer.ceiling(x, high))
    # Near the end of the range, arithmetic after the guard could still exceed it.
    return replace(guard, carriers=BOUNDED) if float(high) < 80 else guard


@guards_for("div", "reciprocal", "floor_divide", "remainder", "fmod")
def _division(at: FailingOperation) -> Iterator[Guard]:
    if at.expr.op != "reciprocal" and len(at.expr.args) < 2:
        return
    below = _shared_factor(at.location.source, at.expr.args[0 if at.expr.op == "reciprocal" else 1])
    name = "self" if at.event is not None and at.event.op in ("reciprocal", "rsqrt") else "other"
    if at.event is not None and name in dict(at.event.scalars):
        at = replace(at, writer=replace(at.writer, scalar=True))
    stat, eps = at.stat(name), at.context.epsilon("1e-8")
    yield from _root_in_denominator(at, below)
    # Data that was divided by nearly 0 would be finite, and far from all others.
    first = at.event is None and at.context.failure.inf > 0
    if first:
        yield from _zero_where_undefined(at, below)
    if _is_count(at, name):
        yield at.count(below, name)
    elif stat is not None and stat.negative:
        why = f"Denominators closer to 0 than {eps} become {eps}; all others are unchanged."
        yield at.guard("Keep IT away from 0", why, below, lambda writer, x: writer.nonzero(x, eps), name)
    else:
        yield from _floors(at, below, (eps,), name, "Denominators")
    if not at.writer.scalar and not first:
        yield from _zero_where_undefined(at, below)
    if stat is None or not stat.negative:
        yield at.floor(below, "1e-3", name, "Denominators")


def _root_in_denominator(at: FailingOperation, below: ast.expr) -> Iterator[Guard]:
    """A denominator that is a root: a guard around it would leave the infinite gradient of the root at 0."""
    root = at.location.source.meaning(below)
    half = root.op == "pow" and len(root.args) > 1 and literal_value(root.args[1]) == 0.5
    if root.args and (root.op == "sqrt" or half) and root.called != "math.sqrt":
        yield from _floors(at, root.args[0], (at.context.epsilon("1e-12", "1e-6"),), None)


def _zero_where_undefined(at: FailingOperation, below: ast.expr) -> Iterator[Guard]:
    """`where(b == 0, 0, a / b)`, with that b guarded too, since backward runs through both branches."""
    whole = at.expr.node
    if not isinstance(whole, ast.BinOp) or len(at.location.code(below)) > LONGEST_IN_TITLE:
        return
    if _read_at_a_pole(at.location.source, whole):
        return

    def write(writer: GuardWriter, node: ast.expr) -> Edit:
        source = writer.source
        library, plain = writer.numpy or source.spell("torch", node), parenthesized(source, node)
        safe = f"{library}.where({plain} == 0, 1.0, {source.code(node)})"
        quotient = f"{parenthesized(source, whole.left)} / {safe}"
        return replace_node(source, whole, f"{library}.where({plain} == 0, 0.0, {quotient})")

    why = "Elements with a denominator of 0 contribute nothing, neither to the result nor to the gradient."
    yield at.guard("Where IT is 0, the result is 0", why, below, write, None)


def _read_at_a_pole(source: SourceFile, node: ast.expr) -> bool:
    """Whether a logarithm, or a division by it, reads the result: a 0 there is no better."""
    around = source.parent(node)
    if isinstance(around, ast.BinOp):
        return isinstance(around.op, ast.Div) and around.right is node
    call = source.parent(around) if isinstance(around, ast.Attribute) else around  # `(p / q).log()`
    read = source.expr(call) if isinstance(call, ast.Call) else None
    return read is not None and read.op in POLES_AT_ZERO and node in read.args[:1]


POLES_AT_ZERO = words("log log2 log10 rsqrt reciprocal lgamma digamma")


def _is_integer_count(stat: TensorStat | None) -> bool:
    """A tensor of integers without negative ones."""
    return stat is not None and stat.dtype.startswith("int") and not stat.negative


def _is_count(at: FailingOperation, name: str) -> bool:
    if _is_integer_count(at.stat(name)):
        return True
    event, trace = at.event, at.context.failure.trace
    scalar = dict(event.scalars).get(name) if event is not None else None
    if isinstance(scalar, int):
        return True
    producers = [i.producer for i in event.inputs if i.name == name and i.producer is not None] if event else []
    wave = [trace.events[p] for p in producers]
    for _ in range(4):
        wave = [op for op in wave if op.op not in _FRACTIONS]
        if any(_counts(at, op) for op in wave):
            return True
        wave = [made for op in wave for made in trace.producers(op)]
    return False


_FRACTIONS = words("div reciprocal mean var std pow sqrt rsqrt exp log sigmoid softmax log_softmax mm addmm bmm")
"""What these make of counts are no counts."""


def _counts(at: FailingOperation, op: OpEvent) -> bool:
    if op.op == "sum":
        return any(_is_binary(at, i.stat, i.producer) for i in op.inputs)
    if op.op == "to" and at.event is not None and at.event.region == "data":  # of a tensor of integers
        return any(_is_integer_count(i.stat) for i in op.inputs)
    return op.op in ("count_nonzero", "bincount") or (op.op in ("index_add", "scatter_add") and _counts_rows(at, op))


def _counts_rows(at: FailingOperation, op: OpEvent) -> bool:
    """Whether ones are added to zeros, as for the degrees of nodes."""
    given = [i for i in op.inputs if i.name in ("self", "source", "src")]
    return len(given) == 2 and all(_is_binary(at, i.stat, i.producer) for i in given)


def _is_binary(at: FailingOperation, stat: TensorStat | None, producer: int | None) -> bool:
    """Zeros and ones, by its statistics, because it was made so, or because it was converted from booleans."""
    if stat is not None and (stat.binary or stat.dtype == "bool" or stat.dtype.startswith("int")):
        return True
    if producer is None:
        return False
    made = at.context.failure.trace.events[producer]
    if made.op in ("ones", "ones_like", "new_ones", "zeros", "zeros_like", "new_zeros"):
        return True
    return any(o.dtype == "bool" for o in made.outputs) or (
        made.op in ("_to_copy", "to", "float", "unsqueeze", "view", "expand")
        and any(i.stat is not None and i.stat.dtype == "bool" for i in made.inputs)
    )


def is_trained(at: FailingOperation) -> bool:
    """Whether the argument is a parameter, or a multiple of it: updates can move it below 0 again."""
    given = without_constants(at.location.source, at.expr.args[0]) if at.expr.args else None
    if at.event is None or not isinstance(given, ast.Name | ast.Attribute):
        return False
    read = [i for i in at.event.inputs if i.name == "self"]
    for _ in range(MOST_ALIKE if given is not at.expr.args[0] else 0):
        makers = [at.context.failure.trace.events[i.producer] for i in read if i.producer is not None]
        if len(makers) != 1 or makers[0].op != "mul" or len(makers[0].inputs) != 1:
            break
        read = list(makers[0].inputs)
    return bool(read) and all(i.role == "parameter" for i in read)


STEEP = words("log log2 log10 sqrt rsqrt pow div reciprocal exp expm1 acos asin atanh")


GUARDED_SLUGS = words(
    "log_of_zero log_of_negative sqrt_of_negative pow_of_zero pow_of_negative arc_out_of_domain pole div_by_zero "
    "zero_over_zero exp_overflow sqrt_grad_at_zero pow_grad_at_zero acos_grad_at_one "
    "xlogy_grad_at_zero where_grad_trap custom_backward infinite_derivative unexplained"
)


@remedies_for(*GUARDED_SLUGS)
def guard_the_argument(context: FailureContext) -> Iterator[Remedy]:
    yield from guarded(context)


@remedies_for("log_of_zero", "div_by_zero", "zero_over_zero")
def softplus_instead_of_relu(context: FailureContext) -> Iterator[Remedy]:
    """A variance or rate that is a relu: 0 for half of all inputs, and without a gradient that could raise it."""
    event, events = context.event, context.failure.trace.events
    name = "other" if event is not None and event.op in ("div", "xlogy") else "self"
    for _ in range(MOST_ALIKE):
        read = [i.producer for i in event.inputs if i.name == name] if event is not None else []
        event = events[read[0]] if read and read[0] is not None else None
        if event is None or event.op not in CARRIERS | {"mul", "relu"} or event.phase != "forward":
            return
        name = "self"
        location = context.location_of(event.site) if event.op == "relu" else None
        if location is None:
            continue
        expr = location.expr
        if expr.op == "relu" and expr.args and isinstance(location.node, ast.expr):
            source = location.source
            text = f"{source.spell('torch.nn.functional.softplus', location.node)}({source.code(expr.args[0])})"
            yield context.remedy(
                "Use softplus instead of relu, which is always above 0",
                "A relu is exactly 0 for every negative input, and no gradient moves it away from there.",
                replace_node(source, location.node, text),
            )
        return


@remedies_for("nan_input", "nan_label")
def guard_numpy_code(context: FailureContext) -> Iterator[Remedy]:
    """A line of a Dataset that computes bad values with numpy, where no torch operator was recorded."""
    if context.failure.origin.event is None:
        yield from guarded(context)


@remedies_for("exploding_gradient", "overflow", "low_precision_overflow")
def guard_a_steep_function(context: FailureContext) -> Iterator[Remedy]:
    expr = context.location.expr if context.location is not None else None
    # A square is too large because its base is: no lower bound helps.
    power = literal_value(expr.arg(1, "exponent")) if expr is not None and expr.op == "pow" else None
    if expr is not None and expr.op in STEEP and (power is None or power < 1):
        yield from guarded(context)
