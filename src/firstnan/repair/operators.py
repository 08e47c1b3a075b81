"""Changes where one operator fails: stable formulas, masks, reductions, matrices, derivatives, functions of torch."""

from __future__ import annotations

import ast
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from firstnan.records import Edit, OpEvent, Remedy
from firstnan.records.operator_families import CARRIERS, NORMALISERS, SOFTMAXES, SPECTRAL, words
from firstnan.repair.context import FailureContext, Location, remedies_for
from firstnan.repair.guards import (
    GUARDS,
    FailingOperation,
    GuardWriter,
    alike,
    failing_operation,
    is_trained,
    why_below,
)
from firstnan.repair.literals import nonfinite_constants
from firstnan.repair.log_domain import with_logarithms
from firstnan.repair.source import (
    Expr,
    SourceFile,
    changed_text,
    delete_statement,
    insert_before,
    literal_value,
    parenthesized,
    replace_node,
    set_argument,
)

# --- stable functions instead of formulas whose intermediate results overflow or vanish --------------------------


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
            if _is_trained(context, source, found[1]):  # the derivative of p * log(p) at 0 is infinite
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


def _is_trained(context: FailureContext, source: SourceFile, log: ast.AST) -> bool:
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


# --- masks of -inf: a finite number instead, or a lower bound for the scores -------------------------------------

MOST_OPERATORS = 24
MOST_EVENTS = 8
PADDING = ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask")


def mask_events(context: FailureContext) -> list[OpEvent]:
    """The events before the origin that write infinities or NaN on purpose, nearest first."""
    start = context.failure.event or context.event
    if start is None:
        return []
    own = [e for e in (start, context.event) if e is not None]
    around = [*own, *context.failure.trace.feeding(start, MOST_OPERATORS)]
    if context.event is not None and context.event is not start:
        around += context.failure.trace.feeding(context.event, MOST_OPERATORS)
    masks = [e for e in around if e.on_purpose or any(s in (math.inf, -math.inf) for _, s in e.scalars)]
    return list({e.site: e for e in reversed(masks)}.values())[::-1][:MOST_EVENTS]


def _finite_constants(context: FailureContext, low: str, high: str) -> list[Edit]:
    """Finite numbers for the infinities in the statements that write the mask."""
    locations = [context.location_of(event.site) for event in mask_events(context)]
    edits: dict[tuple[str, int], Edit] = {}
    for location in filter(None, [*locations, context.location]):
        source = location.source
        for node, value in nonfinite_constants(source, source.statement(location.node)):
            if math.isinf(value):
                edit = replace_node(source, node, low if value < 0 else high)
                edits.setdefault((source.file, source.span(node)[0]), edit)
    return list(edits.values())


def _why(context: FailureContext, low: str) -> str:
    effects = {
        "masked_label": "a label on a masked class has a large, finite loss",
        "zero_times_inf": "0 times a finite number is 0",
        "inf_minus_inf": "a difference of finite numbers is finite",
    }
    effect = effects.get(context.cause.slug, "only fully masked rows change, and their result is finite")
    return f"exp({low}) is 0 too; {effect}."


@remedies_for("fully_masked_softmax")
def attend_to_nothing(context: FailureContext) -> Iterator[Remedy]:
    """A finite mask, and a weight of 0 for what is masked: a fully masked row would attend to all of it otherwise."""
    location = context.location
    found = failing_operation(context, "softmax")
    layer = context.event.module_type if context.event is not None else ""
    call = found.expr.node if found is not None else location.node if location is not None else None
    if location is None or not isinstance(call, ast.Call) or (found is None and layer != "Softmax"):
        return
    source = location.source
    given = source.expr(call).args if found is not None else tuple(call.args)
    if not given:
        return
    yield from zero_weights(context, source, call, given[0])


def zero_weights(
    context: FailureContext,
    source: SourceFile,
    whole: ast.expr,
    scores: ast.expr,
    softmax: str = "",
    others: Sequence[Edit] = (),
) -> Iterator[Remedy]:
    """A softmax of finite scores, and a weight of 0 for what is masked.

    `whole` is the call of softmax; or what `softmax`, with SCORES for the scores, and the `others` replace.
    """
    low = context.epsilon("-1e9", "-1e4")
    why = "A fully masked row then attends to nothing, instead of to padding or the future; other rows are unchanged."
    by_hand = " Use softmax instead of exp(x) / exp(x).sum()." if softmax else ""
    masks = [m for event in mask_events(context) if (m := mask_of(context, event, whole)) is not None]
    shapes = {out.shape for event in mask_events(context) for out in event.outputs[:1]}
    same = context.event is None or shapes <= {out.shape for out in context.event.outputs[:1]}
    complete = len(masks) == len(mask_events(context)) and same  # a mask that is added may have another shape
    if masks and complete and sum(len(source.code(mask)) for _, mask, _ in masks) <= LONGEST_MASK:
        edits = [replace_node(source, value, low) for _, _, value in masks]
        inside = [edit for edit in edits if is_inside(source, edit, whole)]
        text = softmax.replace("SCORES", source.code(scores)) or source.code(whole)
        for edit in inside[:1] if not softmax else ():
            text = changed_text(source, whole, edit)
        codes = [parenthesized(source, mask) for _, mask, _ in masks]
        mask = " | ".join(codes) if len(codes) > 1 else source.code(masks[0][1])
        if len(inside) < (1 if softmax else 2):
            weights = replace_node(source, whole, f"{text}.masked_fill({mask}, 0.0)")
            title = f"Mask with {low} instead of -inf, and give what is masked a weight of 0"
            yield context.remedy(title, why + by_hand, *(e for e in edits if e not in inside), weights, *others)
            return
    plain = isinstance(scores, ast.Name | ast.Attribute)
    _, name, named = ("", source.code(scores), []) if plain else _named(source, scores, "masked_scores")
    bounded = f"{name}.clamp_min({low})"
    text = softmax.replace("SCORES", bounded) or changed_text(source, whole, replace_node(source, scores, bounded))
    yield context.remedy(
        f"Keep the scores at {low} or above, and give what is masked a weight of 0",
        why + by_hand,
        *named,
        replace_node(source, whole, f"{text}.masked_fill({name}.isneginf(), 0.0)"),
        *others,
    )


LONGEST_MASK = 48


def mask_of(context: FailureContext, event: OpEvent, use: ast.AST) -> tuple[ast.Call, ast.expr, ast.expr] | None:
    """The call of `masked_fill` that writes a mask, with its mask and its value, if both mean the same at `use`."""
    location = context.location_of(event.site)
    if location is None or location.expr.op != "masked_fill" or not isinstance(location.node, ast.Call):
        return None
    mask, value = location.expr.arg(1, "mask"), location.expr.arg(2, "value")
    if mask is None or value is None or not location.source.unchanged(mask, use):
        return None
    if location.source.parent(location.source.statement(location.node)) not in location.source.parents(use):
        return None  # written only under a condition, `if mask is not None`
    constants = [node for node, number in nonfinite_constants(location.source, location.node) if number == -math.inf]
    return (location.node, mask, value) if value in constants else None


def is_inside(source: SourceFile, edit: Edit, node: ast.AST) -> bool:
    (start, end), (a, b) = source.span(node), source.edit_span(edit)
    return start <= a and b <= end


@remedies_for(
    *words("fully_masked_softmax masked_label zero_times_inf logsumexp_grad_all_inf inf_minus_inf where_grad_trap")
)
def finite_mask(context: FailureContext) -> Iterator[Remedy]:
    low = context.epsilon("-1e9", "-1e4")
    if context.cause.slug == "masked_label":
        low = "-1e4"
    edits = _finite_constants(context, low, low.removeprefix("-"))
    yield context.remedy(f"Mask with {low} instead of -inf", _why(context, low), *edits)


@remedies_for("fully_masked_softmax", "logsumexp_grad_all_inf")
def lower_bound_of_the_scores(context: FailureContext) -> Iterator[Remedy]:
    location = context.location
    if location is None:
        return
    found = failing_operation(context, *SOFTMAXES, "softmin", "logsumexp", "logcumsumexp")
    low = context.epsilon("-1e9", "-1e4")
    module_type = context.event.module_type if context.event is not None else ""
    layer = location.expr.called.startswith("self.") and "oftmax" in module_type
    nodes = found.expr.args[:1] if found is not None else location.expr.args[:1] if layer else ()
    both = failing_operation(context, "logaddexp", "logaddexp2")
    if both is not None:
        nodes = both.expr.args[:2]
    edits = [GuardWriter(location.source).floor(node, low) for node in nodes]
    yield context.remedy(f"Keep the scores at {low} or above", _why(context, low), *edits)


@remedies_for("fully_masked_softmax", "inf_minus_inf")
def lower_bound_before_the_statement(context: FailureContext) -> Iterator[Remedy]:
    """exp(x - x.max()) reads x twice, so x is made finite before the statement."""
    location = context.location
    if location is None or location.expr.op != "sub" or not isinstance(location.expr.args[0], ast.Name):
        return
    name, low = location.expr.args[0].id, context.epsilon("-1e9", "-1e4")
    yield context.remedy(
        f"Keep `{name}` at {low} or above",
        _why(context, low),
        insert_before(location.source, location.node, f"{name} = {name}.clamp_min({low})"),
    )


@remedies_for("fully_masked_softmax")
def unmask_empty_rows(context: FailureContext) -> Iterator[Remedy]:
    location = context.location
    if location is None or not isinstance(location.node, ast.Call):
        return
    source, expr = location.source, location.expr
    layer = context.event.module_type if context.event is not None else ""
    if layer == "MultiheadAttention" and _weights_are_unused(source, location.node):
        yield context.remedy(
            "Do not compute the attention weights (need_weights=False)",
            "scaled_dot_product_attention, which is used then, gives a fully masked row a result of 0; other rows are "
            "unchanged.",
            set_argument(source, location.node, "need_weights", "False"),
        )
    for name in PADDING:
        mask = expr.keywords.get(name)
        if mask is not None:
            plain = parenthesized(source, mask)
            yield context.remedy(
                "Unmask fully masked rows",
                "A fully masked row attends to everything; all other rows are unchanged.",
                replace_node(source, mask, f"{plain} & ~{plain}.all(-1, keepdim=True)"),
            )
    if expr.op == "scaled_dot_product_attention":
        mask = expr.arg(3, "attn_mask")
        if mask is None:
            return
        plain, low = parenthesized(source, mask), context.epsilon("-1e9", "-1e4")
        title, why = "Unmask fully masked rows", "Only fully masked rows change."
        yield context.remedy(title, why, replace_node(source, mask, f"{plain} | ~{plain}.any(-1, keepdim=True)"))
        yield context.remedy(title, why, replace_node(source, mask, f"{plain}.clamp_min({low})"))


def _weights_are_unused(source: SourceFile, call: ast.Call) -> bool:
    """Whether nothing reads the second result of the call."""
    parent = source.parent(call)
    if isinstance(parent, ast.Subscript):
        return literal_value(parent.slice) == 0
    target = parent.targets[0] if isinstance(parent, ast.Assign) and len(parent.targets) == 1 else None
    if not isinstance(target, ast.Tuple) or len(target.elts) != 2 or not isinstance(target.elts[1], ast.Name):
        return False
    return not source.reads(target.elts[1].id, call)


@remedies_for("masked_label")
def lower_bound_of_the_logits(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, "cross_entropy", "nll_loss", "gather", "log_softmax")
    if found is not None:
        yield context.remedy(
            "Keep the logits at -1e4 or above",
            "A label on a masked class has a large, finite loss; the loss of other labels is unchanged.",
            found.writer.floor(found.expr.args[0], "-1e4"),
        )


@remedies_for("zero_times_inf", "inf_minus_inf", "where_grad_trap")
def finite_operand(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, "mul", "matmul", "sub", "add", "div")
    if found is None or found.event is None:
        return
    tensors = [i for i in found.event.inputs if i.name in ("self", "other", "mat2", "batch1", "batch2")]
    edits = []
    for operand, node in zip(tensors, found.expr.args, strict=False):
        if operand.stat is not None and operand.stat.neginf:
            edits.append(found.writer.floor(node, "-1e4"))
        elif operand.stat is not None and operand.stat.posinf:
            edits.append(found.writer.ceiling(node, "1e4"))
    if edits:
        yield context.remedy(
            "Bound the infinite operand", "Finite operands are unchanged, and no infinity is left.", *edits
        )


@remedies_for("zero_times_inf")
def zero_for_infinite_elements(context: FailureContext) -> Iterator[Remedy]:
    """A layer that reads infinities, as a maximum over no elements has left them."""
    location, event = context.location, context.event
    if location is None or event is None or not event.module_type or len(location.expr.args) != 1:
        return
    node = location.expr.args[0]
    stats = [i.stat for i in event.inputs if i.stat is not None and i.name not in ("mat2", "weight")]
    if isinstance(node, ast.Name) and any(stat.neginf or stat.posinf for stat in stats):
        change = replace_node(location.source, node, f"{node.id}.masked_fill({node.id}.isinf(), 0.0)")
        yield context.remedy(f"Use 0 for infinite elements of `{node.id}`", "All other elements are unchanged.", change)


@remedies_for("nan_constant")
def finite_constant(context: FailureContext) -> Iterator[Remedy]:
    for value in ("0.0", "1.0"):
        for location in filter(None, (context.location_of(event.site) for event in mask_events(context))):
            source = location.source
            found = nonfinite_constants(source, source.statement(location.node))
            edits = [replace_node(source, node, value) for node, constant in found if math.isnan(constant)]
            if edits:
                title, why = f"Use {value} instead of NaN", "Undefined entries become an ordinary number."
                yield context.remedy(title, why, *edits)
                break


# --- means and variances of too few elements, and impossible CTC alignments --------------------------------------

NLL = ("cross_entropy", "nll_loss")
LOSSES = words(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"
)
SPREADS = ("std", "var", "std_mean", "var_mean")


def constructed(context: FailureContext, call: ast.Call) -> ast.Call | None:
    """The call that created the layer that is called: `self.loss = nn.CrossEntropyLoss(...)`."""
    location = context.location
    if location is None:
        return None
    source, text = location.source, ast.unparse(call.func)
    if isinstance(call.func, ast.Call):  # nn.CrossEntropyLoss()(x, y)
        return call.func
    kind = (context.event.module_type if context.event else "") or ""
    for node in source.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = node.value
            named = any(ast.unparse(t).rsplit(".", 1)[-1] == text.rsplit(".", 1)[-1] for t in node.targets)
            if named and (not kind or source.called(made).endswith(kind)):
                return made
    created = [c for c in source.calls if kind and source.called(c).endswith(kind)]
    return created[0] if len(created) == 1 else None


@remedies_for("empty_reduction")
def loss_of_nothing(context: FailureContext) -> Iterator[Remedy]:
    """cross_entropy in which every target is ignored."""
    location = context.location
    if location is None or not isinstance(location.node, ast.Call) or context.event is None:
        return
    if not context.event.op.startswith(("nll_loss", "cross_entropy")):
        return
    source, call = location.source, location.node
    passed = Expr("", tuple(call.args), location.expr.keywords) if location.expr.op not in NLL else location.expr
    logits, target = passed.arg(0, "input"), passed.arg(1, "target")
    if logits is None or target is None:
        return
    ignored = dict(context.event.scalars).get("ignore_index", -100)
    given = location.expr.keywords.get("ignore_index")
    index = source.code(given) if given is not None else str(ignored)
    if location.expr.op not in NLL:  # a layer, which has the number
        index = f"{source.code(call.func)}.ignore_index"
    counts = f"({parenthesized(source, target)} != {index})"
    inside = f"{source.code(call)} if {counts}.any() else {parenthesized(source, logits)}.sum() * 0.0"
    if location.expr.op in NLL and "weight" not in location.expr.keywords and "reduction" not in location.expr.keywords:
        text = changed_text(source, call, set_argument(source, call, "reduction", '"sum"'))
        yield context.remedy(
            "Divide the summed loss by the number of targets, at least 1",
            "The loss is 0 if all targets are ignored; otherwise it is unchanged.",
            replace_node(source, call, f"{text} / {counts}.sum().clamp_min(1)"),
        )
    yield context.remedy(
        "Use a loss of 0 for a batch without targets",
        "The loss and its gradients are 0 if all targets are ignored; otherwise nothing changes.",
        replace_node(source, call, inside),
    )


@remedies_for("empty_reduction")
def mean_of_nothing(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, "mean")
    if found is None or not isinstance(found.expr.node, ast.Call):
        return
    source, inner, call = found.location.source, found.expr.args[0], found.expr.node
    dim = found.expr.arg(1, "dim") or found.expr.keywords.get("axis")
    plain = parenthesized(source, inner)
    if dim is None:
        count = f"{plain}.size" if found.writer.numpy else f"{plain}.numel()"
    elif literal_value(dim) is not None:
        count = f"{plain}.shape[{source.code(dim)}]"
    else:
        return
    yield context.remedy(
        "Divide the sum by the count, at least 1",
        "The mean of an empty selection and its gradients are 0; any other mean is unchanged.",
        replace_node(source, call, f"{_summed(source, call)} / max({count}, 1)"),
    )


def _summed(source: SourceFile, call: ast.Call) -> str:
    """The call with `sum` instead of `mean`."""
    start, end = source.span(call)
    after = source.span(call.func)[1]
    return source.text[start : after - len("mean")] + "sum" + source.text[after:end]


@remedies_for("empty_reduction")
def loss_over_no_element(context: FailureContext) -> Iterator[Remedy]:
    location = context.location
    if location is None or not isinstance(location.node, ast.Call) or not location.expr.args:
        return
    if context.event is None or context.event.op not in LOSSES:
        return
    source, call, first = location.source, location.node, location.expr.args[0]
    plain = parenthesized(source, first)
    yield context.remedy(
        "Use a loss of 0 for an empty selection",
        "The mean of an empty selection and its gradients are 0; any other mean is unchanged.",
        replace_node(source, call, f"{source.code(call)} if {plain}.numel() else {plain}.sum()"),
    )


@remedies_for("single_sample_variance", "empty_reduction")
def spread_of_one(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, *SPREADS)
    if found is None or not isinstance(found.expr.node, ast.Call):
        return
    source, call, inner = found.location.source, found.expr.node, found.expr.args[0]
    dim = found.expr.keywords.get("dim") or found.expr.keywords.get("axis") or _positional_dim(found.expr)
    plain = parenthesized(source, inner)
    count = f"{plain}.numel()" if dim is None else f"{plain}.shape[{source.code(dim)}]"
    name = "ddof" if found.writer.numpy else "correction"
    if found.writer.numpy and dim is None:
        count = f"{plain}.size"
    is_std = found.expr.op.startswith("std")
    what, factor = ("standard deviation", "sqrt((n - 1) / n)") if is_std else ("variance", "(n - 1) / n")
    unbiased = any(k.arg == "unbiased" for k in call.keywords)
    simple = dim is None or literal_value(dim) is not None
    if simple and not unbiased:
        edit = set_argument(source, call, name, f"min(1, {count} - 1)")
        why = f"The {what} of a single element is 0 instead of 0/0; of more elements it is unchanged."
        yield context.remedy("Use no correction for a single element", why, edit)
        yield from _with_lower_bound(context, found.location, call, edit)
    yield context.remedy(
        "Divide by the count instead of the count minus 1",
        f"The {what} of a single element is 0 instead of 0/0; of n elements it shrinks by {factor}.",
        set_argument(source, call, "unbiased", "False") if unbiased else set_argument(source, call, name, "0"),
    )


def _with_lower_bound(
    context: FailureContext, location: Location[ast.AST], call: ast.Call, edit: Edit
) -> Iterator[Remedy]:
    if location.expr.op.endswith("_mean"):
        return
    eps = context.epsilon("1e-8")
    text = f"{changed_text(location.source, call, edit)}.clamp_min({eps})"
    yield context.remedy(
        f"Use no correction for a single element, and keep the result at {eps} or above",
        f"The result for a single element is {eps} instead of 0/0, so dividing by it is safe.",
        replace_node(location.source, call, text),
    )


def _positional_dim(expr: Expr) -> ast.expr | None:
    given = expr.args[1] if len(expr.args) > 1 else None
    return None if isinstance(given, ast.Constant) and isinstance(given.value, bool) else given


@remedies_for("ctc_infeasible")
def zero_infinity(context: FailureContext) -> Iterator[Remedy]:
    location = context.location
    if location is None or not isinstance(location.node, ast.Call):
        return
    call = location.node if location.expr.op == "ctc_loss" else constructed(context, location.node)
    if call is not None:
        yield context.remedy(
            "Ignore impossible alignments",
            "A target that is too long for its input contributes nothing to the loss and the gradient.",
            set_argument(location.source, call, "zero_infinity", "True"),
        )


# --- matrices that are nearly singular or degenerate: a small number is added to the diagonal --------------------

FACTORED = words(
    "cholesky cholesky_ex logdet slogdet det inverse inv inv_ex pinv solve solve_ex cholesky_inverse lu_factor qr"
)
LONGEST_INLINE = 16
SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)


@remedies_for("log_of_negative", "log_of_zero")
def log_of_the_absolute_determinant(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, "logdet")
    if found is not None and isinstance(found.expr.node, ast.expr):
        source, matrix = found.location.source, found.expr.args[0]
        torch = source.spell("torch", matrix)
        yield context.remedy(
            "Take the logarithm of the absolute determinant",
            "It is defined for a negative determinant too; for a positive one the result is unchanged.",
            replace_node(source, found.expr.node, f"{torch}.linalg.slogdet({source.code(matrix)})[1]"),
        )


@remedies_for("log_of_negative", "log_of_zero")
def positive_by_construction(context: FailureContext) -> Iterator[Remedy]:
    """`log(F.softplus(sigma))` for a parameter: an update can move sigma below 0, but not its softplus."""
    found = failing_operation(context, "log", "log2", "log10")
    if found is None or not is_trained(found):
        return
    source, parameter = found.location.source, found.expr.args[0]
    code = source.code(parameter)
    reads = [n for n in ast.walk(source.statement(parameter)) if isinstance(n, ast.Name | ast.Attribute)]
    reads = [n for n in reads if isinstance(n.ctx, ast.Load) and source.code(n) == code]
    positive = f"{source.spell('torch.nn.functional', parameter)}.softplus({code})"
    yield context.remedy(
        f"Use softplus of the parameter `{code}`, which is always above 0",
        "A clamp would leave the parameter below 0, without a gradient from the logarithm. Its first value then has to "
        "be chosen again: softplus(0.54) is 1.",
        *(replace_node(source, n, positive) for n in reads),
    )


@remedies_for("not_positive_definite", "singular_matrix", "log_of_negative", "log_of_zero", "decomposition_failed")
def add_to_the_diagonal(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, *FACTORED)
    if found is None:
        return
    source, matrix = found.location.source, found.expr.args[0]
    torch, (code, plain, named) = source.spell("torch", matrix), _named(source, matrix)
    eye = f"{torch}.eye({plain}.shape[-1], dtype={plain}.dtype, device={plain}.device)"
    for size in ("1e-6", "1e-4", "1e-2", "0.1"):
        if size == "1e-4" and "cholesky" in found.expr.op:
            smallest = f"{torch}.linalg.eigvalsh({plain}.detach())[..., :1, None]"
            yield context.remedy(
                "Raise the smallest eigenvalue to 1e-6 by adding to the diagonal",
                "A matrix whose eigenvalues are all above 1e-6 is unchanged; any other becomes positive definite.",
                *named,
                replace_node(source, matrix, f"{code} + (1e-6 - {smallest}).clamp_min(0) * {eye}"),
            )
        yield context.remedy(
            f"Add {size} to the diagonal",
            f"Every eigenvalue increases by {size}, so none is 0 or negative through rounding.",
            *named,
            replace_node(source, matrix, f"{code} + {size} * {eye}"),
        )


def _named(source: SourceFile, matrix: ast.expr, name: str = "matrix") -> tuple[str, str, list[Edit]]:
    """The matrix as code in a sum and before a dot; a long expression gets a name on a line before."""
    code = source.code(matrix)
    inside = source.parents(matrix)
    around = inside[: inside.index(source.statement(matrix))]
    movable = not any(isinstance(n, ast.Lambda | ast.comprehension | ast.ListComp | ast.IfExp) for n in around)
    if len(code) <= LONGEST_INLINE or "\n" in code or not movable or not isinstance(source.statement(matrix), SIMPLE):
        return code, parenthesized(source, matrix), []
    return name, name, [insert_before(source, matrix, f"{name} = {code}")]


@remedies_for("degenerate_decomposition", "decomposition_failed")
def tell_equal_values_apart(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, *SPECTRAL, "matrix_rank", "qr")
    if found is None:
        return
    source, matrix = found.location.source, found.expr.args[0]
    torch, (code, plain, named) = source.spell("torch", matrix), _named(source, matrix)
    for size in ("1e-5", "1e-3"):
        steps = f"{torch}.arange(1, {plain}.shape[-1] + 1, device={plain}.device)"
        eye = f"{torch}.eye(*{plain}.shape[-2:], dtype={plain}.dtype, device={plain}.device)"
        yield context.remedy(
            f"Add {size}, twice {size}, ... to the diagonal",
            "Equal values now differ a little, so backward does not divide by a difference of 0.",
            *named,
            replace_node(source, matrix, f"{code} + {size} * {eye} * {steps}"),
        )


# --- finite in forward, infinite in backward: untaken branches of `where`, roots inside a norm -------------------


@remedies_for("where_grad_trap")
def double_where(context: FailureContext) -> Iterator[Remedy]:
    """`where(c, log(x), y)`: the log reads 1 where its branch is not taken; also with a name for `log(x)`."""
    found = failing_operation(context)
    if found is None or not isinstance(found.expr.node, ast.expr):
        return
    source, node = found.location.source, found.expr.node
    argument = found.expr.args[1 if found.expr.op == "div" else 0]
    taken = _where_around(source, node)
    if taken is None:
        return
    condition, first = taken
    if {n.id for n in ast.walk(condition) if isinstance(n, ast.Name)} & _assigned_between(source, node, condition):
        return  # it is not known yet where the operation stands
    one = "0.0" if found.expr.op in ("exp", "acos", "asin", "atanh") else "1.0"
    pair = (source.code(argument), one) if first else (one, source.code(argument))
    text = f"{source.spell('torch', node)}.where({source.code(condition)}, {pair[0]}, {pair[1]})"
    yield context.remedy(
        f"Give {found.expr.op or 'it'} a harmless argument where its branch is not taken",
        "Backward runs through both branches; now the gradient is finite in the one not taken, too.",
        replace_node(source, argument, text),
    )


def _where_around(source: SourceFile, node: ast.expr) -> tuple[ast.expr, bool] | None:
    """The condition of the `where` that discards some of a value, and whether the value is its first branch."""
    inner: ast.AST = node
    for outer in source.parents(node):
        expr = source.expr(outer)
        if expr.op == "where" and len(expr.args) == 3:
            condition, *branches = expr.args if expr.called != ".where" else (expr.args[1], expr.args[0], expr.args[2])
            return (condition, inner is branches[0]) if inner in branches else None
        if isinstance(outer, ast.Assign) and len(outer.targets) == 1 and isinstance(outer.targets[0], ast.Name):
            name = outer.targets[0]
            uses = [n for n in source.within(node) if isinstance(n, ast.Name) and n.id == name.id and n is not name]
            return _where_around(source, uses[0]) if len(uses) == 1 and isinstance(uses[0].ctx, ast.Load) else None
        if isinstance(outer, ast.stmt):
            return None
        inner = inner if isinstance(outer, ast.Attribute) else outer
    return None


def _assigned_between(source: SourceFile, first: ast.AST, last: ast.AST) -> set[str]:
    """The names that are assigned from one statement up to another."""
    start, end = source.statement(first).lineno, source.statement(last).lineno
    stores = [n for n in source.within(first) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
    return {n.id for n in stores if start <= source.statement(n).lineno < end}


@remedies_for("sqrt_grad_at_zero", "where_grad_trap", "infinite_derivative")
def root_inside_a_norm(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, "norm", "cdist", "hypot", "std", "pairwise_distance")
    if found is None or not isinstance(found.expr.node, ast.expr):
        return
    source, expr, node = found.location.source, found.expr, found.expr.node
    eps = context.epsilon("1e-12", "1e-6")
    first = parenthesized(source, expr.args[0])
    second = parenthesized(source, expr.args[1]) if expr.op in ("hypot", "cdist", "pairwise_distance") else ""
    torch = source.spell("torch", node)
    if expr.op == "hypot":
        text = f"{torch}.sqrt({first} ** 2 + {second} ** 2 + {eps})"
    elif expr.op == "cdist":
        text = f"{torch}.sqrt(({first}.unsqueeze(-2) - {second}.unsqueeze(-3)).pow(2).sum(-1) + {eps})"
    elif expr.op == "pairwise_distance":
        text = f"{torch}.sqrt(({first} - {second}).pow(2).sum(-1) + {eps})"
    elif expr.op == "std":
        start, end = source.span(node)
        call = source.text[start:end].replace("std", "var", 1)
        text = f"{torch}.sqrt({call} + {eps})"
    else:
        rest = [source.code(k) for k in getattr(node, "keywords", []) if k.arg in ("dim", "keepdim")]
        text = f"{torch}.sqrt({first}.pow(2).sum({', '.join(rest)}) + {eps})"
    yield context.remedy(
        f"Add {eps} under the root",
        "The gradient of the root is finite at a distance of 0; larger distances are unchanged.",
        replace_node(source, node, text),
    )


@remedies_for("where_grad_trap", "nan_input", "nan_label")
def fill_before_the_arithmetic(context: FailureContext) -> Iterator[Remedy]:
    """NaN in the data that a later mask removes: replaced before it reaches an operator."""
    location, event = context.location, context.event
    if location is None or event is None or context.failure.phase != "backward" or location.expr.op in GUARDS:
        return
    for operand, node in zip(event.inputs, location.expr.args, strict=False):
        if operand.stat is not None and operand.stat.nan:
            torch = location.source.spell("torch", node)
            yield context.remedy(
                "Replace missing values before computing with them",
                "What the mask removes later is finite, so its gradient of 0 stays 0.",
                replace_node(
                    location.source, node, f"{torch}.nan_to_num({location.code(node)}, posinf=0.0, neginf=0.0)"
                ),
            )


# --- operators inside torch's functions, layers and distributions: their argument is guarded ---------------------

WITH_EPS = NORMALISERS | {"normalize", "cosine_similarity"}
UNBOUNDED = ("loc", "logits", "df", "validate_args", "total_count")
DISTRIBUTION_SLUGS = words(
    "log_of_zero log_of_negative div_by_zero zero_over_zero pole sqrt_of_negative pow_of_zero overflow "
    "infinite_derivative where_grad_trap xlogy_grad_at_zero arc_out_of_domain inf_minus_inf zero_times_inf"
)


def _library_file(context: FailureContext) -> str:
    """The file inside torch that called the operator, `distributions/beta.py`."""
    site = context.event.library_site if context.event is not None else None
    return "/".join(site.file.replace(os.sep, "/").split("/")[-2:]) if site is not None else ""


def _takes_eps(source: SourceFile, layer: str) -> bool:
    """Whether a normaliser can be given an eps: torch's can, one of the program's own if its arguments say so."""
    own = [n for n in source.nodes if isinstance(n, ast.ClassDef) and n.name == layer]
    made = [f.args for n in own for f in n.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
    return not own or any(a.arg == "eps" for args in made for a in (*args.args, *args.kwonlyargs))


@remedies_for("zero_over_zero", "div_by_zero", "sqrt_grad_at_zero", "infinite_derivative", "low_precision_overflow")
def eps_of_a_normaliser(context: FailureContext) -> Iterator[Remedy]:
    location = context.location
    if location is None or not isinstance(location.node, ast.Call):
        return
    call: ast.Call | None = location.node if location.expr.op in WITH_EPS else None
    layer = context.event.module_type if context.event is not None else ""
    if call is None and layer.endswith(("Norm", "Norm1d", "Norm2d", "Norm3d")):
        call = constructed(context, location.node) if _takes_eps(location.source, layer) else None
    given = next((k.value for k in call.keywords if k.arg == "eps"), None) if call is not None else None
    if call is None or (given is not None and (literal_value(given) or 0.0) >= 1e-5):
        return
    eps = context.epsilon("1e-5", "1e-3")
    why = f"{eps} is added to the denominator, so equal values give 0 instead of 0/0."
    yield context.remedy(f"Use eps={eps}", why, set_argument(location.source, call, "eps", eps))


@remedies_for("div_by_zero", "zero_over_zero", "overflow", "exp_overflow")
def temperature_of_zero(context: FailureContext) -> Iterator[Remedy]:
    location = context.location
    if location is None or location.expr.op != "gumbel_softmax":
        return
    tau = location.expr.arg(1, "tau")
    if tau is not None:
        for low in ("1e-2", "0.1"):
            why = f"The logits are divided by {low} or more."
            text = f"max({location.code(tau)}, {low})"
            yield context.remedy(
                f"Keep the temperature at {low} or above", why, replace_node(location.source, tau, text)
            )


@remedies_for("exp_overflow")
def exponent_inside_a_loss(context: FailureContext) -> Iterator[Remedy]:
    """`F.poisson_nll_loss(x, y)` computes exp(x) itself."""
    location = context.location
    if location is None or location.expr.library != "torch" or not location.expr.args or location.expr.op == "exp":
        return
    for high in ("10", "5") if context.dtype == "float16" else ("20", "80"):
        edit = GuardWriter(location.source).ceiling(location.expr.args[0], high)
        why = why_below("exp", high, context.dtype)
        yield context.remedy(f"Keep the first argument at {high} or below", why, edit)


@remedies_for(*DISTRIBUTION_SLUGS)
def value_outside_the_support(context: FailureContext) -> Iterator[Remedy]:
    """`dist.log_prob(x)` with x at the boundary of the distribution's support."""
    location, file = context.location, _library_file(context)
    if location is None or not file.startswith("distributions/") or location.expr.op != "log_prob":
        return
    value, eps = location.expr.arg(1, "value"), context.epsilon("1e-6")
    if value is None:
        return
    writer, why = GuardWriter(location.source), "The density is finite there; values inside that range are unchanged."
    if file.endswith(("beta.py", "dirichlet.py", "kumaraswamy.py", "transformed_distribution.py", "transforms.py")):
        edit = writer.between(value, eps, f"1 - {eps}")
        yield context.remedy(f"Keep the value between {eps} and 1 - {eps}", why, edit)
    yield context.remedy(f"Keep the value at {eps} or above", why, writer.floor(value, eps))


@remedies_for(*DISTRIBUTION_SLUGS)
def parameter_of_a_distribution(context: FailureContext) -> Iterator[Remedy]:
    """A scale, rate or concentration that is 0."""
    file = _library_file(context)
    if not file.startswith("distributions/"):
        return
    kind = file.removeprefix("distributions/").removesuffix(".py").replace("_", "")
    for location in _calls(context, kind):
        low, writer = context.epsilon("1e-6"), GuardWriter(location.source)
        scales = [k.value for k in location.node.keywords if k.arg and k.arg not in UNBOUNDED]
        positional = location.node.args[1:] if len(location.node.args) > 1 else location.node.args
        edits = [writer.floor(node, low) for node in [*scales, *positional] if literal_value(node) is None]
        why = f"The density divides by them and takes their logarithm; parameters above {low} are unchanged."
        yield context.remedy(f"Keep the parameters of the distribution at {low} or above", why, *edits)


def _calls(context: FailureContext, kind: str) -> Iterator[Location[ast.Call]]:
    """The calls that create such a distribution."""
    files = {e.site.file for e in context.failure.trace.events if e.site is not None}
    if context.failure.origin.site is not None:
        files.add(context.failure.origin.site.file)
    for source in filter(None, map(context.files.get, sorted(files))):
        yield from (Location(source, call) for call in source.calls if source.called_name(call).lower() == kind)
