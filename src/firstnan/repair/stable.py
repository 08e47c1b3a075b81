"""Stable functions instead of formulas whose intermediate results overflow or vanish."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from firstnan.records import Edit, Remedy
from firstnan.records.operator_families import CARRIERS
from firstnan.repair.context import FailureContext, Location, remedies_for
from firstnan.repair.guards import failing_operation
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


@remedies_for("log_of_zero", "log_of_negative", "where_grad_trap", "zero_times_inf")
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
    if location is None or location.expr.op not in ("exp", "div", "sum") or not location.expr.args:
        return
    source, node = location.source, location.node
    for other in source.within(node):
        expr = source.expr(other)
        form = _stable_log(location, expr)
        if form is not None and node in form[0].seen:
            yield _remedy(context, [form])
        if isinstance(other, ast.BinOp) and expr.op == "div":
            yield from _softmax_by_hand(context, location, expr)
            yield from _sigmoid_by_hand(context, location, expr)


def _softmax_by_hand(context: FailureContext, location: Location[ast.AST], expr: Expr) -> Iterator[Remedy]:
    source = location.source
    top, below = source.meaning(expr.args[0]), source.meaning(expr.args[1])
    if top.op != "exp" or below.op != "sum" or not below.args or not isinstance(expr.node, ast.expr):
        return
    inner, dim = source.meaning(below.args[0]), below.arg(1, "dim") or below.keywords.get("axis")
    same = inner.op == "exp" and ast.dump(inner.args[0]) == ast.dump(top.args[0])
    if not same or dim is None or location.node not in (expr.node, top.node, inner.node, below.node):
        return
    if not source.unchanged(top.args[0], expr.node):
        return
    argument = f"{source.code(top.args[0])}, dim={source.code(dim)}"
    yield context.remedy(
        "Use softmax instead of exp(x) / exp(x).sum()",
        "softmax subtracts the largest entry first, so no exponential overflows.",
        replace_node(source, expr.node, f"{source.spell('torch', expr.node)}.softmax({argument})"),
    )


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


@remedies_for("zero_over_zero", "div_by_zero", "where_grad_trap", "sqrt_grad_at_zero")
def division_by_its_own_norm(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, "div")
    if found is None or not isinstance(found.expr.node, ast.expr) or found.writer.numpy:
        return
    source, (top, below) = found.location.source, found.expr.args[:2]
    at = source.value(below)
    while isinstance(at, ast.Subscript) or source.expr(at).op in ("unsqueeze", "add", "expand_as", "clamp_min"):
        at = source.value(at.value if isinstance(at, ast.Subscript) else source.expr(at).args[0])
    norm = source.expr(at)
    dim, order = norm.keywords.get("dim") or (norm.args[2] if len(norm.args) > 2 else None), norm.arg(1, "p")
    if norm.op != "norm" or dim is None or (order is not None and literal_value(order) != 2):
        return
    if ast.dump(norm.args[0]) != ast.dump(top):
        return
    eps = ", eps=1e-4" if context.dtype == "float16" else ""
    text = f"{source.spell('torch.nn.functional', top)}.normalize({source.code(top)}, dim={source.code(dim)}{eps})"
    yield context.remedy(
        "Use normalize, which keeps the norm above 0",
        "A vector of zeros stays zero; all others are divided by their norm as before.",
        replace_node(source, found.expr.node, text),
    )
