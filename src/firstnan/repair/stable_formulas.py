"""Stable functions in place of formulas whose intermediate results overflow or vanish."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from firstnan.records import Edit, Remedy
from firstnan.records.operator_families import CARRIERS, words
from firstnan.repair.context import FailureContext, Location, is_in_place, remedies_for
from firstnan.repair.guards import (
    FailingOperation,
    GuardWriter,
    alike,
    failing_operation,
    is_trained,
    without_constants,
)
from firstnan.repair.log_domain import with_logarithms
from firstnan.repair.source import Expr, SourceFile, delete_statement, literal_value, parenthesized, replace_node


@dataclass
class LogForm:
    """Writes the logarithm of an expression without computing the expression, if that is possible."""

    source: SourceFile
    use: ast.AST
    seen: list[ast.AST] = field(default_factory=list)
    """The nodes that the new code replaces."""
    unused: list[ast.stmt] = field(default_factory=list)
    """Assignments that the new code no longer reads."""
    name: str = ""
    """The stable function that was used."""

    def of(self, node: ast.expr, depth: int = 0) -> str | None:
        source = self.source
        self.seen.append(node)
        if depth > 8:
            return None
        if isinstance(node, ast.Name):
            return self._of_name(node, depth)
        if isinstance(node, ast.Subscript):
            return self._around(node, node.value, depth)
        expr = source.expr(node)
        if expr.op in CARRIERS and expr.args:  # the logarithm can be taken before them
            return self._around(node, expr.args[0], depth)
        if expr.op in ("clamp", "clamp_min", "clip") and expr.args:
            return self.of(expr.args[0], depth + 1)
        if expr.op == "add" and 0 < (literal_value(expr.args[1]) or 0) < 1e-2:
            return self.of(expr.args[0], depth + 1)
        return self._known(expr, depth)

    def _of_name(self, name: ast.Name, depth: int) -> str | None:
        """The expression assigned to the name, written out."""
        source, found = self.source, self.source.assigned(name)
        if found is None or found.value is None or not source.unchanged(found.value, self.use):
            return None
        only_here = source.reads(name.id, name) == 1
        if not only_here and not _cheap(source, found.value):
            return None
        text = self.of(found.value, depth + 1)
        if text is not None and only_here:
            self.unused.append(found)
        return text

    def _around(self, whole: ast.expr, inner: ast.expr, depth: int) -> str | None:
        """The same selection of elements from the logarithm."""
        new = self.of(inner, depth + 1)
        if new is None:
            return None
        (start, end), (a, b) = self.source.span(whole), self.source.span(inner)
        return self.source.text[start:a] + new + self.source.text[b:end]

    def _known(self, expr: Expr, depth: int) -> str | None:
        source, functional = self.source, self.source.spell("torch.nn.functional", self.use)
        if expr.op == "softmax" and isinstance(expr.node, ast.Call):
            self.name = "log_softmax"
            return renamed(source, expr.node, "log_softmax")
        if expr.op == "sigmoid" and expr.args:
            self.name = "logsigmoid"
            return f"{functional}.logsigmoid({source.code(expr.args[0])})"
        if expr.op == "exp" and expr.args:
            self.name = "the exponent itself"
            return parenthesized(source, expr.args[0])
        if expr.op == "cosh" and expr.args and _cheap(source, expr.args[0]):
            self.name = "logaddexp"
            x, minus = source.code(expr.args[0]), f"-{parenthesized(source, expr.args[0])}"
            add, log = (source.spell(name, self.use) for name in ("torch.logaddexp", "math.log"))
            return f"({add}({x}, {minus}) - {log}(2))"
        if expr.op == "det" and expr.args:
            self.name = "logdet"
            return f"{source.spell('torch', self.use)}.logdet({source.code(expr.args[0])})"
        if expr.op == "sum" and expr.args:
            return self._sum_of_exp(expr)
        if expr.op == "div":
            parts = [self.of(arg, depth + 1) for arg in expr.args]
            return f"({parts[0]} - {parts[1]})" if None not in parts else None
        if expr.op == "add" and 1 in (literal_value(expr.args[0]), literal_value(expr.args[1])):
            return self.of_one_more(expr.args[literal_value(expr.args[0]) == 1])
        if expr.op == "sub" and literal_value(expr.args[0]) == 1:
            other = source.meaning(expr.args[1])
            if other.op == "sigmoid" and other.args and source.unchanged(other.args[0], self.use):
                self.name = "logsigmoid"
                return f"{functional}.logsigmoid(-{parenthesized(source, other.args[0])})"
        return None

    def of_one_more(self, node: ast.expr) -> str | None:
        """log(1 + node)."""
        other = self.source.meaning(node)
        if other.op != "exp" or not other.args or not self.source.unchanged(other.args[0], self.use):
            return None
        self.seen.append(other.node or self.use)
        self.name = "softplus"
        return f"{self.source.spell('torch.nn.functional', self.use)}.softplus({self.source.code(other.args[0])})"

    def _sum_of_exp(self, expr: Expr) -> str | None:
        source = self.source
        inner, dim = source.meaning(expr.args[0]), expr.arg(1, "dim") or expr.keywords.get("axis")
        if inner.op != "exp" or not inner.args or not source.unchanged(inner.args[0], self.use):
            return None
        self.seen.append(inner.node or self.use)
        self.name = "logsumexp"
        torch, code = source.spell("torch", self.use), source.code(inner.args[0])
        if dim is None:
            return f"{torch}.logsumexp({parenthesized(source, inner.args[0])}.flatten(), dim=0)"
        keep = expr.arg(2, "keepdim")
        tail = f", keepdim={source.code(keep)}" if keep is not None else ""
        return f"{torch}.logsumexp({code}, dim={source.code(dim)}{tail})"


def _cheap(source: SourceFile, node: ast.expr) -> bool:
    """Whether it may be computed twice: it calls no layer and no function of the user's."""
    calls = [source.called(n) for n in ast.walk(node) if isinstance(n, ast.Call)]
    return all(name.startswith((".", "torch.")) for name in calls)


def renamed(source: SourceFile, call: ast.Call, name: str) -> str:
    """The call with another function of the same module."""
    if isinstance(call.func, ast.Name):
        full = source.called(call)
        new = source.spell(f"{full.rsplit('.', 1)[0]}.{name}" if "." in full else f"torch.{name}", call)
        return new + source.text[source.span(call.func)[1] : source.span(call)[1]]
    end = source.span(call.func)[1]
    old = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    start, stop = source.span(call)
    return source.text[start : end - len(old)] + name + source.text[end:stop]


def _stable_log(location: Location[ast.AST], expr: Expr) -> tuple[LogForm, Edit] | None:
    """A stable form of a call of `log` or `log1p`, if its argument has a known form."""
    if expr.op not in ("log", "log1p") or not expr.args or not isinstance(expr.node, ast.expr):
        return None
    source, form = location.source, LogForm(location.source, expr.node)
    text = form.of(expr.args[0]) if expr.op == "log" else form.of_one_more(expr.args[0])
    return (form, replace_node(source, expr.node, text)) if text is not None else None


def _remedy(context: FailureContext, forms: list[tuple[LogForm, Edit]]) -> Remedy:
    name = forms[0][0].name
    unused = dict.fromkeys(s for form, _ in forms for s in form.unused)
    return context.remedy(
        f"Use {name} instead of the logarithm",
        "The result is the same, without the intermediate value whose logarithm is infinite.",
        *(edit for _, edit in forms),
        *(deleted for s in unused if (deleted := delete_statement(forms[0][0].source, s)) is not None),
    )


@remedies_for("log_of_zero", "log_of_negative", "where_grad_trap", "zero_times_inf", "exploding_gradient")
def logarithm_of_a_known_function(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, "log")
    own = _stable_log(found.location, found.expr) if found is not None else None
    if found is None or own is None or found.expr.node is None:
        return
    source = found.location.source
    logs = [source.expr(n) for n in source.within(found.expr.node) if n is not found.expr.node]
    others = [form for e in logs if (form := _stable_log(found.location, e)) is not None]
    if others:
        yield _remedy(context, [own, *others])
    yield _remedy(context, [own])


@remedies_for("exp_overflow", "overflow", "low_precision_overflow", "where_grad_trap", "zero_over_zero")
def exponential_inside_a_known_formula(context: FailureContext) -> Iterator[Remedy]:
    location = context.location
    if location is None or location.expr.op not in ("exp", "cosh", "div", "sum") or not location.expr.args:
        return
    source, node = location.source, location.node
    for other in source.within(node):
        expr = source.expr(other)
        form = _stable_log(location, expr)
        if form is not None and node in form[0].seen:
            yield _remedy(context, [form])
        if isinstance(other, ast.BinOp) and expr.op == "div":
            yield from _sigmoid_by_hand(context, location, expr)


@remedies_for("log_of_zero", "exp_overflow", "overflow", "low_precision_overflow", "div_by_zero", "zero_over_zero")
def logarithm_at_the_end(context: FailureContext) -> Iterator[Remedy]:
    yield from with_logarithms(context, recursion=False)


AROUND_A_SUM = words("unsqueeze add expand_as clamp_min clamp view reshape maximum")


def denominator(source: SourceFile, node: ast.expr) -> ast.expr:
    """What is divided by, through names, new axes and small numbers that keep it away from 0."""
    at = source.value(node)
    while isinstance(at, ast.Subscript) or (source.expr(at).op in AROUND_A_SUM and source.expr(at).args):
        at = source.value(at.value if isinstance(at, ast.Subscript) else source.expr(at).args[0])
    return at


def replaced(source: SourceFile, *changes: tuple[ast.expr, str]) -> list[Edit]:
    """New code for each of these expressions; assignments that nothing reads any more are taken out."""
    edits = [replace_node(source, node, text) for node, text in changes]
    gone = {n for node, _ in changes for n in ast.walk(node)}
    kept = {word for _, text in changes for word in re.findall(r"\w+", text)}
    around = source.within(changes[0][0]) if source.function(changes[0][0]) is not None else source.nodes
    names = {n.id for n in gone if isinstance(n, ast.Name)}
    while names:
        name = names.pop()
        if name in kept:
            continue
        uses = [n for n in around if isinstance(n, ast.Name) and n.id == name]
        stores = [n for n in uses if not isinstance(n.ctx, ast.Load)]
        statement = source.statement(stores[0]) if len(stores) == 1 else None
        if not isinstance(statement, ast.Assign) or statement.targets != stores or statement in gone:
            continue
        pure = all(source.called(c).startswith((".", "torch.")) for c in ast.walk(statement) if isinstance(c, ast.Call))
        deleted = delete_statement(source, statement)
        if pure and deleted is not None and all(n in gone or n in stores for n in uses):
            edits.append(deleted)
            gone.update(ast.walk(statement))
            names |= {n.id for n in ast.walk(statement.value) if isinstance(n, ast.Name)}
    return edits


def _sigmoid_by_hand(context: FailureContext, location: Location[ast.AST], expr: Expr) -> Iterator[Remedy]:
    source = location.source
    below = source.meaning(expr.args[1])
    if literal_value(expr.args[0]) != 1 or below.op != "add" or 1 not in [literal_value(a) for a in below.args]:
        return
    inner = source.meaning(below.args[literal_value(below.args[0]) == 1])
    if inner.op != "exp" or location.node not in (expr.node, inner.node) or not isinstance(expr.node, ast.expr):
        return
    minus = source.expr(inner.args[0])
    argument = source.code(minus.args[0]) if minus.op == "neg" else f"-{parenthesized(source, inner.args[0])}"
    if source.unchanged(inner.args[0], expr.node):
        yield context.remedy(
            "Use sigmoid instead of 1 / (1 + exp(-x))",
            "sigmoid and its gradient are finite for every x.",
            replace_node(source, expr.node, f"{source.spell('torch', expr.node)}.sigmoid({argument})"),
        )


@dataclass(frozen=True)
class Normalised:
    """A division of a vector by its own norm."""

    whole: ast.expr
    vector: ast.expr
    factor: str
    """What else the vector is multiplied by before the division; "" for nothing."""
    dim: str
    """ "" for all of them."""
    norm: ast.expr

    def text(self, source: SourceFile, eps: str) -> str:
        function, vector = source.spell("torch.nn.functional.normalize", self.whole), source.code(self.vector)
        if not self.dim:  # by the norm of all elements
            flat = f"{parenthesized(source, self.vector)}.flatten()"
            return f"{self.factor}{function}({flat}, dim=0{eps}).view_as({vector})"
        return f"{self.factor}{function}({vector}, dim={self.dim}{eps})"


def _normalised(context: FailureContext, source: SourceFile, node: ast.AST) -> Normalised | None:
    """The division at a node as a call of `normalize`, if it is one by the 2-norm of what is divided."""
    expr = source.expr(node)
    if expr.op != "div" or len(expr.args) < 2 or not isinstance(node, ast.expr):
        return None
    if isinstance(node, ast.Call) and is_in_place(node.func):
        return None  # normalize returns its result, and writes nothing
    top, norm = expr.args[0], denominator(source, expr.args[1])
    found = _two_norm(source, norm)
    if found is None:
        return None
    vector, dim = found
    product, factor = source.expr(top), ""
    if product.op == "mul" and ast.dump(product.args[1]) == ast.dump(vector) and isinstance(top, ast.BinOp):
        top, factor = product.args[1], f"{source.code(product.args[0])} * "
    if ast.dump(top) != ast.dump(vector) or not source.unchanged(vector, node):
        return None
    text = source.code(dim) if dim is not None else "0" if _dimensions(context, source, norm) == 1 else ""
    cheap = isinstance(vector, ast.Name | ast.Attribute)  # it is read twice
    return Normalised(node, vector, factor, text, norm) if text or cheap else None


def _two_norm(source: SourceFile, node: ast.expr) -> tuple[ast.expr, ast.expr | None] | None:
    """The vector and the dimension of its 2-norm: `x.norm(dim=1)`, `x.pow(2).sum(1).sqrt()`..."""
    norm = source.expr(node)
    if norm.op == "norm" and norm.args:
        order = norm.arg(1, "p") or norm.keywords.get("ord")
        dim = norm.keywords.get("dim") or (norm.args[2] if len(norm.args) > 2 else None)
        return (norm.args[0], dim) if order is None or literal_value(order) == 2 else None
    half = norm.op == "pow" and len(norm.args) > 1 and literal_value(norm.args[1]) == 0.5
    total = source.meaning(norm.args[0]) if norm.args and (norm.op == "sqrt" or half) else Expr("")
    total = source.expr(denominator(source, total.node)) if isinstance(total.node, ast.expr) else total
    square = source.meaning(total.args[0]) if total.op == "sum" else Expr("")
    twice = square.op == "mul" and ast.dump(square.args[0]) == ast.dump(square.args[1])
    power = square.op == "pow" and len(square.args) > 1 and literal_value(square.args[1]) == 2
    if not (twice or power or square.op == "square"):
        return None
    return square.args[0], total.arg(1, "dim") or total.keywords.get("axis")


def _dimensions(context: FailureContext, source: SourceFile, node: ast.AST) -> int | None:
    """How many dimensions the tensor has that was read there."""
    for event in context.failure.trace.events:
        location = context.location_of(event.site) if event.phase == "forward" else None
        if location is not None and location.node is node:
            return next((len(i.stat.shape) for i in event.inputs if i.stat is not None), None)
    return None


@remedies_for("zero_over_zero", "div_by_zero", "where_grad_trap", "sqrt_grad_at_zero", "infinite_derivative")
def division_by_its_own_norm(context: FailureContext) -> Iterator[Remedy]:
    location = context.location
    if location is None or (location.expr.library == "numpy"):
        return
    source = location.source
    divisions = [n for n in source.within(location.node) if isinstance(n, ast.BinOp | ast.Call)]
    found = [one for n in divisions if (one := _normalised(context, source, n)) is not None]
    here = set(ast.walk(source.statement(location.node)))
    own = [one for one in found if one.whole in here or location.node in ast.walk(one.norm)]
    if not own:
        return
    eps = ", eps=1e-4" if context.dtype == "float16" else ""
    title = "Use normalize, which keeps the norm above 0"
    why = "A vector of zeros stays zero; all others are divided by their norm as before."
    edits = replaced(source, *((one.whole, one.text(source, eps)) for one in found))
    yield context.remedy(title, why, *edits)
    others = _other_divisions(context, location, found)
    if others:
        yield context.remedy(f"{title}, and guard the other denominators", why, *edits, *others)
    if len(found) > len(own):
        edits = replaced(source, *((one.whole, one.text(source, eps)) for one in own))
        yield context.remedy(f"{title}, only here", why, *edits)


@remedies_for("zero_over_zero", "div_by_zero", "where_grad_trap", "sqrt_grad_at_zero")
def cosine_by_hand(context: FailureContext) -> Iterator[Remedy]:
    """`(a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))`."""
    location = context.location
    if location is None:
        return
    source, here = location.source, set(ast.walk(location.source.statement(location.node)))
    for node in source.within(location.node):
        expr = source.expr(node)
        if expr.op != "div" or len(expr.args) < 2 or not isinstance(node, ast.expr):
            continue
        total, below = source.meaning(expr.args[0]), source.expr(denominator(source, expr.args[1]))
        product = source.meaning(total.args[0]) if total.op == "sum" else Expr("")
        norms = [_two_norm(source, source.value(a)) for a in below.args[:2]] if below.op == "mul" else []
        dim = total.arg(1, "dim")
        if product.op != "mul" or dim is None or len(norms) != 2 or None in norms:
            continue
        vectors = sorted(ast.dump(n[0]) for n in norms if n is not None)
        dims = {ast.dump(n[1]) for n in norms if n is not None and n[1] is not None}
        if vectors != sorted(ast.dump(a) for a in product.args) or dims != {ast.dump(dim)}:
            continue
        parts = {n for a in (expr.args[0], expr.args[1]) for n in ast.walk(source.value(a))}
        if not (node in here or location.node in parts) or not all(source.unchanged(a, node) for a in product.args):
            continue
        a, b = (source.code(one) for one in product.args)
        text = f"{source.spell('torch.nn.functional.cosine_similarity', node)}({a}, {b}, dim={source.code(dim)})"
        yield context.remedy(
            "Use cosine_similarity, which keeps the norms above 0",
            "The similarity to a vector of zeros is 0; all others are unchanged.",
            *replaced(source, (node, text)),
        )
        return


def _other_divisions(context: FailureContext, location: Location[ast.AST], known: list[Normalised]) -> list[Edit]:
    """Guards for the other divisions by a tensor in the same function."""
    done = {n for one in known for n in ast.walk(one.whole)}
    found = FailingOperation(context, location, location.expr, GuardWriter(location.source))
    return [guard.edit for guard in alike(found, "div") if guard.node not in done]


@remedies_for("log_of_zero", "zero_times_inf", "xlogy_grad_at_zero", "where_grad_trap")
def product_with_its_own_logarithm(context: FailureContext) -> Iterator[Remedy]:
    """`p * (log(p) - log_q)` where p is 0: its limit is 0, which kl_div and xlogy know."""
    location = context.location
    if location is None or location.expr.library == "numpy":
        return
    source = location.source
    here = set(ast.walk(source.statement(location.node)))
    for node in source.within(location.node):
        expr = source.expr(node)
        if not isinstance(node, ast.BinOp) or expr.op != "mul":
            continue
        for p, other in (expr.args, expr.args[::-1]):
            found = _divergence(source, p, source.meaning(other), node)
            if found is None or not (node in here or location.node in ast.walk(found[1])):
                continue
            if _is_differentiated(context, source, found[1]):  # the derivative of p * log(p) at 0 is infinite
                continue
            text, _, name = found
            title = f"Use {name}, which takes 0 * log(0) as 0"
            yield context.remedy(title, "Where p is above 0, the result is unchanged.", *replaced(source, (node, text)))
            return


def _divergence(source: SourceFile, p: ast.expr, other: Expr, use: ast.AST) -> tuple[str, ast.AST, str] | None:
    """The code of `p * other`, the logarithm of p in it, and the function that is used."""
    if isinstance(other.node, ast.expr) and not source.unchanged(other.node, use):
        return None
    functional, code = source.spell("torch.nn.functional", use), source.code
    log = source.meaning(other.args[0]) if other.op == "sub" else other
    if log.op != "log" or not log.args or not log.node:
        return None
    quotient = source.expr(log.args[0])
    if other.op == "sub" and ast.dump(log.args[0]) == ast.dump(p):
        return f'{functional}.kl_div({code(other.args[1])}, {code(p)}, reduction="none")', log.node, "kl_div"
    if other.op == "log" and quotient.op == "div" and ast.dump(quotient.args[0]) == ast.dump(p):
        form = LogForm(source, use)
        below = form.of(quotient.args[1]) or f"{source.spell('torch', use)}.log({code(quotient.args[1])})"
        return f'{functional}.kl_div({below}, {code(p)}, reduction="none")', log.node, "kl_div"
    if other.op == "log" and ast.dump(log.args[0]) == ast.dump(p):
        return f"{source.spell('torch', use)}.xlogy({code(p)}, {code(p)})", log.node, "xlogy"
    return None


def _is_differentiated(context: FailureContext, source: SourceFile, log: ast.AST) -> bool:
    """Whether p has a gradient, in `log(p)` or `log(p / q)`."""
    argument = source.expr(log).args[0]
    node = argument if source.expr(argument).op == "div" else log
    events = context.failure.trace.events
    for event in (e for e in events if e.grad and e.phase == "forward" and e.op in ("log", "div")):
        location = context.location_of(event.site)
        first = event.inputs[0] if event.inputs else None
        if location is not None and location.node is node and first is not None:
            return first.role == "parameter" or (first.producer is not None and events[first.producer].grad)
    return False


@remedies_for("log_of_negative", "log_of_zero")
def positive_by_construction(context: FailureContext) -> Iterator[Remedy]:
    """`log(F.softplus(sigma))` for a parameter: an update can move sigma below 0, but not its softplus."""
    found = failing_operation(context, "log", "log2", "log10")
    if found is None or not is_trained(found):
        return
    source = found.location.source
    parameter = source.value(without_constants(source, found.expr.args[0]))  # of `nu = self.df`, where it gets its name
    code = source.code(parameter)
    named = ast.Name | ast.Attribute | ast.Subscript  # `self.sigmas[name]` too
    reads = [n for n in ast.walk(source.statement(parameter)) if isinstance(n, named)]
    reads = [n for n in reads if isinstance(n.ctx, ast.Load) and source.code(n) == code]
    positive = f"{source.spell('torch.nn.functional', parameter)}.softplus({code})"
    yield context.remedy(
        f"Use softplus of the parameter `{code}`, which is always above 0",
        "A clamp would leave the parameter below 0, without a gradient from the logarithm. Its first value then has to "
        "be chosen again: softplus(0.54) is 1.",
        *(replace_node(source, n, positive) for n in reads),
    )
