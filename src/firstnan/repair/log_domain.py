"""Recursions over probabilities (Sinkhorn, forward algorithms of HMMs, CRFs and CTC), rewritten with logarithms.

The positive quantities of one function are held as logarithms: a product becomes a sum, a sum becomes logsumexp.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator

from firstnan.records import Edit, OpEvent, Remedy
from firstnan.records.operator_families import CARRIERS
from firstnan.repair.context import METADATA, FailureContext, Location, remedies_for
from firstnan.repair.source import (
    Expr,
    Function,
    SourceFile,
    is_atom,
    literal_value,
    parameter_names,
    parenthesized,
    replace_node,
)

_DEEPEST = 12
_MOST_EDITS = 20
_LOOPS = (ast.For, ast.While)
_MOVED = CARRIERS | {"T", "mT", "flip", "roll", "index_select", "expand_as", "view_as", "float", "double"}
"""Operators before which the logarithm can be taken."""
_FILLED = ("zeros", "ones", "zeros_like", "ones_like")
_SMALL = 1e-2
"""An addend below this keeps a number away from 0; a logarithm does not need it."""


class _NoLogarithm(Exception):  # noqa: N818 - it is an answer, not an error
    """The expression has no known logarithm."""


class LogDomain:
    """One function with some of its names held as logarithms."""

    def __init__(self, context: FailureContext, source: SourceFile, at: ast.AST) -> None:
        self._context, self._source, self._at = context, source, at
        self.names: dict[str, str] = {}
        """The names that are held as logarithms, and their new names."""
        self._nodes = source.within(at)
        self._derived: set[str] = set()
        """The names that are computed from the first one, or from an exponential."""
        self._recorded: dict[ast.AST | None, list[OpEvent]] | None = None
        self._least = context.epsilon("-1e30", "-1e4")
        self._tiny = context.epsilon("1e-30", "1e-4")
        self._torch = source.spell("torch", at)
        self.uses_exp = False

    # --- which names -------------------------------------------------------------------------------------------

    def hold(self, name: str) -> bool:
        """Holds the name as a logarithm, and whatever it is computed from; False if that is not possible."""
        if not self._derived:
            self._derived = self._computed_from(name)
        if name in self.names:
            return True
        values = self._values(name)
        before = dict(self.names)
        self.names[name] = self._new_name(name)
        try:
            for value in values:
                self.log(value)
        except _NoLogarithm:
            values = []
        if not values:
            self.names = before
        return bool(values)

    def hold_what_follows(self) -> None:
        """Holds what is computed from these names alone as well, as far as its logarithm is taken later."""
        before = dict(self.names)
        more = True
        while more:
            more = any(self._follows(n) and self.hold(n) for n in sorted(self._derived - set(self.names)))
        logs = [n for n in self._nodes if isinstance(n, ast.Call) and self._source.expr(n).op == "log"]
        read = {n.id for log in logs for n in ast.walk(log) if isinstance(n, ast.Name)}
        if not read & (set(self.names) - set(before)):
            self.names = before

    def _follows(self, name: str) -> bool:
        values = self._values(name)
        return bool(values) and all(self._is_product(value) for value in values)

    def _is_product(self, node: ast.AST) -> bool:
        """Whether it is made of held names alone: other factors may be negative."""
        if isinstance(node, ast.Name):
            return node.id in self.names
        expr = self._source.expr(node)
        if expr.op in ("exp", "softmax", "sigmoid"):
            return False  # it does not follow from the names
        if isinstance(node, ast.Subscript | ast.Attribute):
            return self._is_product(node.value)
        if expr.op in ("mul", "div", "matmul", "mv"):
            return all(self._is_product(arg) for arg in expr.args[:2])
        if expr.op == "add":
            return all(self._is_product(arg) or self._is_held(arg) for arg in expr.args[:2])
        return bool(expr.op and expr.args) and self._is_product(expr.args[0])

    def _computed_from(self, name: str) -> set[str]:
        self._derived = {name}
        stores = {n.id for n in self._nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        while True:
            more = {n for n in stores - self._derived if any(self.depends(value) for value in self._values(n))}
            if not more:
                return self._derived
            self._derived |= more

    def _new_name(self, name: str) -> str:
        new = f"log_{name.lstrip('_')}"
        taken = {n.id for n in self._nodes if isinstance(n, ast.Name)}
        return new if new not in taken else f"{new}_"

    def _values(self, name: str) -> list[ast.expr]:
        """Everything that is assigned to it; empty if it comes from elsewhere, or from more than plain assignments."""
        function = self._source.function(self._at)
        if function is not None and name in parameter_names(function):
            return []
        uses = [n for n in self._nodes if isinstance(n, ast.Name) and n.id == name]
        if any(self._source.is_written_by_call(use) for use in uses):
            return []
        found = [self._assigned(use) for use in uses if not isinstance(use.ctx, ast.Load)]
        values = [value for value in found if value is not None]
        return values if len(values) == len(found) else []

    def _assigned(self, store: ast.Name) -> ast.expr | None:
        parent = self._source.parent(store)
        if isinstance(parent, ast.Assign) and parent.targets == [store]:
            return parent.value
        if isinstance(parent, ast.For) and parent.target is store and self.depends(parent.iter):
            return parent.iter  # row by row
        if isinstance(parent, ast.AugAssign) and parent.target is store and isinstance(parent.op, ast.Mult | ast.Div):
            return parent.value
        return None

    @property
    def is_recursion(self) -> bool:
        """Whether one of the names is computed from what it was in the turn before."""
        for loop in (n for n in self._nodes if isinstance(n, _LOOPS)):
            for name in self.names:
                uses = [n for n in ast.walk(loop) if isinstance(n, ast.Name) and n.id == name]
                stores = [self._begin(n) for n in uses if not isinstance(n.ctx, ast.Load)]
                reads = [self._begin(n) for n in uses if isinstance(n.ctx, ast.Load)]
                if stores and reads and min(reads) <= min(stores):
                    return True
        return False

    def _begin(self, node: ast.AST) -> tuple[int, int]:
        """Where its statement begins; several may share a line."""
        statement = self._source.statement(node)
        return statement.lineno, statement.col_offset

    # --- the logarithm of an expression ------------------------------------------------------------------------

    def depends(self, node: ast.AST) -> bool:
        """Whether a name held as a logarithm, or an exponential, is in it."""
        return any(
            (isinstance(n, ast.Name) and n.id in self._derived)
            or (isinstance(n, ast.Call) and self._source.expr(n).op in ("exp", "softmax", "sigmoid"))
            for n in ast.walk(node)
        )

    def log(self, node: ast.expr, depth: int = 0) -> str:
        """The code of its logarithm; raises _NoLogarithm."""
        if depth > _DEEPEST:
            raise _NoLogarithm
        number = literal_value(node)
        if number is not None:
            if number < 0:
                raise _NoLogarithm
            return self._least if number == 0 else f"{math.log(number):.6g}"
        if isinstance(node, ast.Name):
            return self._log_of_name(node)
        if isinstance(node, ast.Subscript):
            return self._inside(node, node.value, depth)
        if isinstance(node, ast.Attribute) and node.attr in ("T", "mT"):
            return self._inside(node, node.value, depth)
        expr = self._source.expr(node)
        rule: Callable[[Expr, int], str] | None = getattr(self, f"_log_of_{expr.op}", None) if expr.op else None
        if rule is not None and (self.depends(node) or expr.op in _FILLED):
            return rule(expr, depth)
        if expr.op in _MOVED and expr.args:
            return self._inside(node, expr.args[0], depth)
        return self._plain(node)

    def _plain(self, node: ast.expr) -> str:
        """The logarithm taken as it is written."""
        if self.depends(node):
            raise _NoLogarithm
        code = self._source.code(node)
        if self._is_number(node):
            function = self._source.reach("math.log", node)
            return f"{function}({code})" if function else f"{self._torch}.log({self._torch}.tensor({code}))"
        if self._has_zeros(node):
            return f"{self._torch}.log({parenthesized(self._source, node)}.clamp_min({self._tiny}))"
        return f"{self._torch}.log({code})"

    def _has_zeros(self, node: ast.expr) -> bool:
        """Whether it held zeros, or less than float32 can tell from them, in the failing step."""
        made = [event.outputs[0] for event in self._events(self._source.value(node)) if event.outputs]
        return any(stat.min is not None and stat.min < float(self._tiny) for stat in made)

    def _is_number(self, node: ast.expr) -> bool:
        """Whether it is a number of Python's: made of literals, lengths and shapes."""
        if isinstance(node, ast.BinOp):
            return self._is_number(node.left) and self._is_number(node.right)
        if not isinstance(node, ast.Name):
            return _is_size(self._source, node)
        assigned = [n for n in self._nodes if isinstance(n, ast.Assign)]
        values = [n.value for n in assigned if any(node.id in _stored(target) for target in n.targets)]
        return bool(values) and all(_is_size(self._source, value) for value in values)

    def _log_of_name(self, node: ast.Name) -> str:
        if node.id in self.names:
            return self.names[node.id]
        if node.id in self._derived and self.hold(node.id):
            return self.names[node.id]
        return self._plain(node)

    def _inside(self, whole: ast.expr, inner: ast.expr, depth: int) -> str:
        """The same view or selection of the logarithm."""
        if not self.depends(inner) and not isinstance(inner, ast.Name):
            return self._plain(whole)
        new = self.log(inner, depth + 1)
        if new.startswith(f"{self._torch}.log(") and isinstance(inner, ast.Name):
            return self._plain(whole)
        (start, end), (a, b) = self._source.span(whole), self._source.span(inner)
        text = self._source.text
        return text[start:a] + _atom(new) + text[b:end]

    def _log_of_exp(self, expr: Expr, depth: int) -> str:
        if any(isinstance(n, ast.Name) and n.id in self.names for n in ast.walk(expr.args[0])):
            raise _NoLogarithm
        return self._source.code(expr.args[0])

    def _log_of_softmax(self, expr: Expr, depth: int) -> str:
        if not isinstance(expr.node, ast.Call) or not isinstance(expr.node.func, ast.Attribute):
            raise _NoLogarithm
        start, end = self._source.span(expr.node)
        after = self._source.span(expr.node.func)[1]
        return self._source.text[start : after - len("softmax")] + "log_softmax" + self._source.text[after:end]

    def _log_of_mul(self, expr: Expr, depth: int) -> str:
        terms = [self.log(arg, depth + 1) for arg in expr.args[:2]]
        return _sum(*(term for term in terms if term != "0")) or "0"

    def _log_of_div(self, expr: Expr, depth: int) -> str:
        top, below = (self.log(arg, depth + 1) for arg in expr.args[:2])
        return f"-{_atom(below)}" if top == "0" else f"{top} - {_atom(below)}"

    def _log_of_pow(self, expr: Expr, depth: int) -> str:
        power = literal_value(expr.args[1]) if len(expr.args) > 1 else None
        if power is None:
            raise _NoLogarithm
        return f"{self._source.code(expr.args[1])} * {_atom(self.log(expr.args[0], depth + 1))}"

    def _log_of_add(self, expr: Expr, depth: int) -> str:
        for one, other in (expr.args[:2], expr.args[1::-1]):
            if 0 <= (literal_value(one) if literal_value(one) is not None else 1.0) < _SMALL:  # type: ignore[operator]
                return self.log(other, depth + 1)
        terms = [self.log(arg, depth + 1) for arg in expr.args[:2]]
        return f"{self._torch}.logaddexp({terms[0]}, {terms[1]})"

    def _log_of_clamp(self, expr: Expr, depth: int) -> str:
        low = literal_value(expr.arg(1, "min"))
        if low is None or not 0 <= low < _SMALL or expr.arg(2, "max") is not None:
            raise _NoLogarithm
        return self.log(expr.args[0], depth + 1)

    _log_of_clamp_min = _log_of_clip = _log_of_clamp

    def _log_of_sum(self, expr: Expr, depth: int) -> str:
        inner = self.log(expr.args[0], depth + 1)
        dim = expr.arg(1, "dim") or expr.keywords.get("axis")
        if dim is None:
            flat = inner if self._dimensions(expr.node) == 1 else f"{_atom(inner)}.flatten()"
            return f"{self._torch}.logsumexp({flat}, dim=0)"
        keep = expr.arg(2, "keepdim") or expr.keywords.get("keepdims")
        tail = f", keepdim={self._source.code(keep)}" if keep is not None else ""
        return f"{self._torch}.logsumexp({inner}, dim={self._source.code(dim)}{tail})"

    def _log_of_matmul(self, expr: Expr, depth: int) -> str:
        """By the operators that torch has used for it in the failing step."""
        ends = [self._source.expr(arg) for arg in expr.args[:2]]
        if ends[0].op == "diag" and ends[0].args:
            return f"{_atom(self.log(ends[0].args[0], depth + 1))}.unsqueeze(-1) + {self.log(expr.args[1], depth + 1)}"
        if ends[1].op == "diag" and ends[1].args:
            return f"{self.log(expr.args[0], depth + 1)} + {_atom(self.log(ends[1].args[0], depth + 1))}"
        left, right = (_atom(self.log(arg, depth + 1)) for arg in expr.args[:2])
        used = {event.op for event in self._events(expr.node)}
        if "mv" in used:
            return f"{self._torch}.logsumexp({left} + {right}, dim=-1)"
        if "mm" in used and "unsqueeze" in used:  # a vector times a matrix
            return f"{self._torch}.logsumexp({left}.unsqueeze(-1) + {right}, dim=0)"
        if used & {"dot", "vdot"}:
            return f"{self._torch}.logsumexp({left} + {right}, dim=0)"
        if used & {"mm", "bmm", "matmul"}:
            return f"{self._torch}.logsumexp({left}.unsqueeze(-1) + {right}.unsqueeze(-3), dim=-2)"
        raise _NoLogarithm

    _log_of_mv = _log_of_matmul

    def _log_of_diag(self, expr: Expr, depth: int) -> str:
        """The diagonal of a matrix; a matrix made of a diagonal has zeros."""
        if self._dimensions(expr.node) != 2 or not isinstance(expr.node, ast.expr):
            raise _NoLogarithm
        return self._inside(expr.node, expr.args[0], depth)

    _log_of_diagonal = _log_of_diag

    def _log_of_prod(self, expr: Expr, depth: int) -> str:
        inner, dim = _atom(self.log(expr.args[0], depth + 1)), expr.arg(1, "dim")
        keep = expr.arg(2, "keepdim")
        tail = f", keepdim={self._source.code(keep)}" if keep is not None else ""
        return f"{inner}.sum({f'dim={self._source.code(dim)}{tail}' if dim is not None else ''})"

    def _events(self, node: ast.AST | None) -> list[OpEvent]:
        """What was recorded in forward for this expression."""
        if self._recorded is None:
            self._recorded = {}
            for event in self._context.failure.trace.events:
                if event.phase == "forward" and event.site is not None and event.site.file == self._source.file:
                    location = self._context.location_of(event.site)
                    self._recorded.setdefault(location.node if location is not None else None, []).append(event)
        return self._recorded.get(node, []) if node is not None else []

    def _dimensions(self, node: ast.AST | None) -> int | None:
        """How many the first tensor has that it reads."""
        read = [i.stat for event in self._events(node)[:1] for i in event.inputs if i.stat is not None]
        return len(read[0].shape) if read else None

    def _log_of_zeros(self, expr: Expr, depth: int) -> str:
        return self._filled(expr, "full", self._least)

    def _log_of_zeros_like(self, expr: Expr, depth: int) -> str:
        return self._filled(expr, "full_like", self._least)

    def _log_of_ones(self, expr: Expr, depth: int) -> str:
        return self._renamed(expr, "ones", "zeros")

    def _log_of_ones_like(self, expr: Expr, depth: int) -> str:
        return self._renamed(expr, "ones_like", "zeros_like")

    def _log_of_new_zeros(self, expr: Expr, depth: int) -> str:
        raise _NoLogarithm

    def _renamed(self, expr: Expr, old: str, new: str) -> str:
        code = self._source.code(expr.node) if expr.node is not None else ""
        head, found, tail = code.partition(f"{old}(")
        if not found:
            raise _NoLogarithm
        return f"{head}{new}({tail}"

    def _filled(self, expr: Expr, name: str, value: str) -> str:
        """`torch.full(shape, value, ...)` for `torch.zeros(...)`."""
        call = expr.node
        if not isinstance(call, ast.Call) or not call.args or expr.called.startswith("."):
            raise _NoLogarithm
        code = self._source.code
        shape = code(call.args[0]) if len(call.args) == 1 else f"({', '.join(code(a) for a in call.args)})"
        if name == "full" and len(call.args) == 1 and not isinstance(call.args[0], ast.Tuple | ast.List):
            if not self._is_number(call.args[0]):
                return f"{code(call)} - {value.removeprefix('-')}"
            shape = f"({shape},)"
        rest = "".join(f", {code(k)}" for k in call.keywords)
        return f"{self._torch}.{name}({shape}, {value}{rest})"

    def _log_of_cat(self, expr: Expr, depth: int) -> str:
        parts, call = expr.args[0], expr.node
        if not isinstance(parts, ast.List | ast.Tuple) or not isinstance(call, ast.Call):
            raise _NoLogarithm
        inner = ", ".join(self.log(part, depth + 1) for part in parts.elts)
        (start, end), (a, b) = self._source.span(call), self._source.span(parts)
        return f"{self._source.text[start:a]}[{inner}]{self._source.text[b:end]}"

    _log_of_stack = _log_of_cat

    def _log_of_where(self, expr: Expr, depth: int) -> str:
        if len(expr.args) != 3 or expr.called.startswith("."):
            raise _NoLogarithm
        one, other = (self.log(arg, depth + 1) for arg in expr.args[1:])
        return f"{self._torch}.where({self._source.code(expr.args[0])}, {one}, {other})"

    # --- the function with logarithms --------------------------------------------------------------------------

    def edits(self) -> list[Edit] | None:
        """All assignments and uses of the names; None if one of them cannot be written with logarithms."""
        try:
            edits, done = self._assignments()
            replaced: set[ast.AST] = set()
            for node in self._nodes:
                held = isinstance(node, ast.Name) and node.id in self.names and isinstance(node.ctx, ast.Load)
                if isinstance(node, ast.Name) and held and node not in done:
                    edits += self._use(node, replaced)
            return edits
        except _NoLogarithm:
            return None

    def _assignments(self) -> tuple[list[Edit], set[ast.AST]]:
        edits: list[Edit] = []
        done: set[ast.AST] = set()
        for node in self._nodes:
            if not isinstance(node, ast.Name) or node.id not in self.names or isinstance(node.ctx, ast.Load):
                continue
            value = self._assigned(node)
            if value is None:
                raise _NoLogarithm
            statement = self._source.statement(node)
            new, text = self.names[node.id], self.log(value)
            if isinstance(statement, ast.AugAssign):
                sign = "+" if isinstance(statement.op, ast.Mult) else "-"
                text = f"{new} {sign} {_atom(text)}"
                edits.append(self._source.edit(*self._source.span(statement), f"{new} = {text}"))
            else:
                edits += [replace_node(self._source, node, new), replace_node(self._source, value, text)]
            done.update(ast.walk(value))
        return edits, done

    def _use(self, node: ast.Name, replaced: set[ast.AST]) -> Iterator[Edit]:
        """The largest expression around a use that has a logarithm: its exponential, or `log` of it without `log`."""
        source = self._source
        whole: ast.expr = node
        parents = source.parents(node)
        if any(parent in replaced for parent in parents):
            return
        first = parents[0]
        if isinstance(first, ast.Attribute) and first.attr in METADATA:
            yield replace_node(source, node, self.names[node.id])
            return
        for parent in parents:
            if isinstance(parent, ast.Attribute) and isinstance(source.parent(parent), ast.Call):
                continue  # the name of a method
            if not isinstance(parent, ast.expr) or not self._is_positive(parent):
                break
            whole = parent
        outer = next((p for p in source.parents(whole) if isinstance(p, ast.Call)), None)
        text = self.log(whole)
        logged = source.expr(outer)
        if isinstance(outer, ast.Call) and logged.op == "log" and logged.args and logged.args[0] is whole:
            whole = outer
        else:
            text = f"{self._torch}.exp({text})"
            self.uses_exp = True
        replaced.update([whole, *ast.walk(whole)])
        yield replace_node(source, whole, text)

    def _is_positive(self, node: ast.expr) -> bool:
        """Whether it has a logarithm that needs no other `log`: a signed factor must stay outside."""
        expr = self._source.expr(node)
        if expr.op in ("mul", "div", "add", "matmul", "mv") and not all(self._is_held(a) for a in expr.args[:2]):
            return False
        if isinstance(node, ast.Tuple | ast.List) or (isinstance(node, ast.Call) and not expr.op):
            return False
        try:
            self.log(node)
        except _NoLogarithm:
            return False
        return self.depends(node)

    def _is_held(self, node: ast.expr) -> bool:
        """Whether it is computed from what is held as logarithms, and from small numbers."""
        number = literal_value(node)
        return self.depends(node) or (number is not None and 0 <= number < _SMALL)


def _stored(target: ast.expr) -> set[str]:
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}


def _is_size(source: SourceFile, node: ast.expr) -> bool:
    """Whether it is a number, a length, a shape or a part of one."""
    if isinstance(node, ast.Tuple):
        return all(_is_size(source, part) for part in node.elts)
    if isinstance(node, ast.Subscript):
        return _is_size(source, node.value)
    if isinstance(node, ast.Attribute):
        return node.attr in ("shape", "ndim")
    if isinstance(node, ast.Call):
        return source.called(node) in ("len", ".size", ".numel", ".dim")
    return literal_value(node) is not None


def _atom(text: str) -> str:
    return text if is_atom(text) else f"({text})"


def _sum(*terms: str) -> str:
    return " + ".join(terms)


@remedies_for(
    "overflow",
    "exp_overflow",
    "low_precision_overflow",
    "div_by_zero",
    "zero_over_zero",
    "log_of_zero",
    "inf_minus_inf",
    "zero_times_inf",
    "where_grad_trap",
    "infinite_derivative",
    "exploding_gradient",
)
def logarithms_in_a_recursion(context: FailureContext) -> Iterator[Remedy]:
    yield from with_logarithms(context, recursion=True)


def with_logarithms(context: FailureContext, *, recursion: bool) -> Iterator[Remedy]:
    """The names that the failing statement computes or reads, held as logarithms.

    Without a recursion only where nothing but logarithms is computed and read."""
    location = context.location
    if location is None or location.expr.library == "numpy":
        return
    source = location.source
    for name in _candidates(location):
        if source.function(location.node) is None and _read_in_functions(source, name):
            continue
        domain = LogDomain(context, source, location.node)
        if not domain.hold(name) or domain.is_recursion is not recursion:
            continue
        domain.hold_what_follows()
        edits = domain.edits()
        if edits is None:
            continue
        if len(edits) <= _MOST_EDITS and (
            recursion or not (domain.uses_exp or any(".log(" in edit.new for edit in edits))
        ):
            names = ", ".join(f"`{one}`" for one in sorted(domain.names))
            yield context.remedy(
                f"Compute {names} as logarithms" if len(domain.names) > 1 else f"Compute {names} as a logarithm",
                "Products become sums and sums become logsumexp, so nothing vanishes or overflows on the way.",
                *edits,
            )
            return


def _read_in_functions(source: SourceFile, name: str) -> bool:
    functions = [n for n in source.nodes if isinstance(n, Function)]
    return any(isinstance(n, ast.Name) and n.id == name for f in functions for n in ast.walk(f))


def _candidates(location: Location[ast.AST]) -> list[str]:
    """What the failing statement assigns, then what it reads."""
    statement = location.source.statement(location.node)
    found = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
    stored = [n.id for n in found if not isinstance(n.ctx, ast.Load)]
    return list(dict.fromkeys([*stored, *(n.id for n in found if isinstance(n.ctx, ast.Load))]))
