"""Attention written by hand, softmax(q @ k.T / sqrt(d) + mask) @ v: scaled_dot_product_attention instead.

It is offered only where every step from the scores to the result is known and nothing else reads them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from firstnan.records import OpEvent, Remedy
from firstnan.records.operator_families import words
from firstnan.repair.context import FailureContext, remedies_for
from firstnan.repair.literals import nonfinite_constants
from firstnan.repair.softmax_by_hand import softmax_by_hand
from firstnan.repair.source import Expr, SourceFile, literal_value, parenthesized, replace_node
from firstnan.repair.steps import Steps

MOST_STEPS = 12
CONVERSIONS = words("float half bfloat16 to type_as type")
LAST_TWO = ({-1.0, -2.0}, {1.0, 2.0}, {2.0, 3.0})
"""The dimensions that a transposed key swaps: from the end, of 3 dimensions, of 4."""


class _NotAttention(Exception):  # noqa: N818 - it is an answer, not an error
    """The expression is something else."""


@dataclass
class AttentionByHand:
    """The parts of one attention, found from its end to its beginning."""

    context: FailureContext
    source: SourceFile
    whole: ast.expr
    value: ast.expr
    steps: Steps
    query: ast.expr | None = None
    key: ast.expr | None = None
    scale: tuple[str, ast.expr] | None = None
    """`mul` or `div`, and by what."""
    masks: list[str] = field(default_factory=list)
    """True where a key may be read."""
    added: ast.expr | None = None
    condition: ast.expr | None = None
    """The masks apply only then."""
    read: list[ast.expr] = field(default_factory=list)
    """What the new call reads."""

    def follow(self, node: ast.expr, at: ast.AST) -> None:
        """From the scores back to the product of queries and keys; raises _NotAttention."""
        for _ in range(MOST_STEPS):
            if isinstance(node, ast.Name):
                expr, node, at = self._written(node, at)
            else:
                expr = self.source.expr(node)
            if self._is_product(expr):
                return
            node = self._before(expr)
        raise _NotAttention

    def _written(self, name: ast.Name, at: ast.AST) -> tuple[Expr, ast.expr, ast.AST]:
        """The operation that wrote a name last; a mask may depend on a condition."""
        written = self.steps.written(name.id, at)
        if written is None:
            raise _NotAttention
        statement, condition = written
        expr = self.steps.operation(statement)
        if condition is not None:
            masks = expr.op in ("masked_fill", "where", "add")
            if not masks or self.condition is not None or self.masks or self.added is not None:
                raise _NotAttention
            self.condition = condition
        elif self.condition is not None and expr.op in ("masked_fill", "where", "add"):
            raise _NotAttention  # one mask with a condition and one without
        self.steps.take(statement)
        return expr, name, statement

    def _is_product(self, expr: Expr) -> bool:
        """Whether this is `q @ k.transpose(-2, -1)`."""
        if expr.op != "matmul" or len(expr.args) < 2 or expr.keywords:
            return False
        transposed = expr.args[1]
        if isinstance(transposed, ast.Attribute) and transposed.attr == "mT":
            self.key = transposed.value
        else:
            made = self.source.expr(transposed)
            dims = {literal_value(a) for a in made.args[1:3]}
            if made.op != "transpose" or dims not in LAST_TWO or not self._are_last(expr, dims):
                raise _NotAttention
            self.key = made.args[0]
        self.query = expr.args[0]
        self.read += [self.query, self.key]
        return True

    def _are_last(self, product: Expr, dims: set[float | None]) -> bool:
        """Whether these are the last two dimensions of the keys."""
        if min(d for d in dims if d is not None) < 0:
            return True
        made = [e.outputs[0] for e in self._events(product.node) if e.outputs and e.op in ("bmm", "matmul", "view")]
        return bool(made) and len(made[-1].shape) - 1 in dims

    def _before(self, expr: Expr) -> ast.expr:
        """What an operation between product and softmax reads; its own part is noted."""
        if expr.op in CONVERSIONS and expr.called.startswith(".") and expr.args:
            return expr.args[0]
        if expr.op == "masked_fill":
            mask, value = expr.arg(1, "mask"), expr.arg(2, "value")
            if mask is None or value is None or not self._is_minus_infinity(value):
                raise _NotAttention
            self.masks.append(self._negated(mask))
            self.read.append(mask)
            return expr.args[0]
        if expr.op == "where" and len(expr.args) == 3 and expr.called != ".where":
            if not self._is_minus_infinity(expr.args[2]):
                raise _NotAttention
            self.masks.append(parenthesized(self.source, expr.args[0]))
            self.read.append(expr.args[0])
            return expr.args[1]
        if expr.op == "add" and len(expr.args) == 2 and self.added is None and self.scale is None:
            first = self._leads_to_a_product(expr.args[0])
            self.added = expr.args[1 if first else 0]
            self.read.append(self.added)
            return expr.args[0 if first else 1]
        if expr.op in ("mul", "div") and len(expr.args) == 2 and self.scale is None:
            factor, other = expr.args[1], expr.args[0]
            if expr.op == "mul" and not self._leads_to_a_product(other):
                factor, other = other, factor
            self.scale = (expr.op, factor)
            if not self._is_number(expr):
                raise _NotAttention
            self.read.append(factor)
            return other
        raise _NotAttention

    def _leads_to_a_product(self, node: ast.expr, depth: int = 0) -> bool:
        """Whether the scores are on this side of a sum or product: it contains a matrix product, or names one."""
        inside = [n for n in ast.walk(node) if isinstance(n, ast.BinOp | ast.Call)]
        if any(self.source.expr(n).op == "matmul" for n in inside):
            return True
        written = self.steps.written(node.id, node) if isinstance(node, ast.Name) and depth < MOST_STEPS else None
        if written is None:
            return False
        return any(self._leads_to_a_product(arg, depth + 1) for arg in self.steps.operation(written[0]).args[:2]) or (
            self.steps.operation(written[0]).op == "matmul"
        )

    def _is_minus_infinity(self, node: ast.expr) -> bool:
        constants = [n for n, number in nonfinite_constants(self.source, self.source.statement(node)) if number < 0]
        return any(n in constants for n in ast.walk(node))

    def _negated(self, mask: ast.expr) -> str:
        """The opposite of a mask, in the simplest form."""
        if isinstance(mask, ast.UnaryOp) and isinstance(mask.op, ast.Invert):
            return parenthesized(self.source, mask.operand)
        zero = isinstance(mask, ast.Compare) and len(mask.ops) == 1 and literal_value(mask.comparators[0]) == 0
        false = isinstance(mask, ast.Compare) and getattr(mask.comparators[0], "value", None) is False
        if isinstance(mask, ast.Compare) and isinstance(mask.ops[0], ast.Eq) and (zero or false):
            return f"({self.source.code(mask.left)} != {self.source.code(mask.comparators[0])})"
        return f"~{parenthesized(self.source, mask)}"

    def _events(self, node: ast.AST | None) -> list[OpEvent]:
        found = []
        for event in self.context.failure.trace.events:
            if event.phase == "forward" and event.site is not None and event.site.file == self.source.file:
                location = self.context.location_of(event.site)
                if location is not None and location.node is node:
                    found.append(event)
        return found

    def _is_number(self, expr: Expr) -> bool:
        """Whether the scores were multiplied or divided by a number of Python's; a tensor may be trained."""
        made = [e for e in self._events(expr.node) if e.op == expr.op]
        if made:
            return all(len(e.inputs) == 1 for e in made)
        factor = self.scale[1] if self.scale is not None else None
        return literal_value(factor) is not None or self._root() is not None

    def _root(self) -> ast.expr | None:
        """d, if the scores are divided by its square root."""
        if self.scale is None:
            return None
        how, factor = self.scale
        expr = self.source.meaning(factor)
        if how == "mul" and expr.op == "div" and literal_value(expr.args[0]) == 1:
            how, expr = "div", self.source.meaning(expr.args[1])
        power = literal_value(expr.args[1]) if expr.op == "pow" and len(expr.args) > 1 else None
        if power == (0.5 if how == "div" else -0.5):
            return expr.args[0]
        root = how == "div" and expr.called in ("math.sqrt", "numpy.sqrt")
        return expr.args[0] if root and expr.args else None

    def _scale_argument(self) -> str:
        """How the scores are scaled, where that is not known to be the default of the function."""
        if self.scale is None:
            return ", scale=1.0"
        how, factor = self.scale
        root = self._root()
        if root is not None and self._is_width(self.source.value(root)):
            return ""
        code = self.source.code(factor)
        return f", scale={code}" if how == "mul" else f", scale=1 / {parenthesized(self.source, factor)}"

    def _is_width(self, node: ast.expr) -> bool:
        """Whether this is the last size of the queries or keys: `q.size(-1)`, `k.shape[-1]`."""
        at: ast.expr | None = None
        if isinstance(node, ast.Subscript) and literal_value(node.slice) == -1:
            at = node.value.value if isinstance(node.value, ast.Attribute) and node.value.attr == "shape" else None
        elif isinstance(node, ast.Call) and self.source.called(node) == ".size" and len(node.args) == 1:
            last = literal_value(node.args[0]) == -1 and isinstance(node.func, ast.Attribute)
            at = node.func.value if last and isinstance(node.func, ast.Attribute) else None
        read = [ast.dump(part) for part in (self.query, self.key) if part is not None]
        return at is not None and ast.dump(at) in read

    @property
    def text(self) -> str:
        """The new call."""
        assert self.query is not None
        assert self.key is not None
        code = self.source.code
        mask = ""
        if self.masks:
            plain = " & ".join(reversed(self.masks))
            bare = len(self.masks) == 1 and plain.startswith("(") and plain.endswith(")")
            mask = plain[1:-1] if bare and self.condition is None and _is_one(plain) else plain
        elif self.added is not None:
            mask = code(self.added)
        if mask and self.condition is not None:
            mask = f"{mask} if {code(self.condition)} else None"
        function = self.source.spell("torch.nn.functional.scaled_dot_product_attention", self.whole)
        given = ", ".join(code(part) for part in (self.query, self.key, self.value))
        return f"{function}({given}{f', attn_mask={mask}' if mask else ''}{self._scale_argument()})"


def _is_one(text: str) -> bool:
    """Whether the first parenthesis is closed by the last one."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return i == len(text) - 1
    return False


def _attention(context: FailureContext, source: SourceFile, node: ast.AST) -> AttentionByHand | None:
    """The attention that ends at `weights @ values`, if it is one."""
    expr = source.expr(node)
    if expr.op != "matmul" or len(expr.args) != 2 or expr.keywords or not isinstance(node, ast.expr):
        return None
    steps = Steps(source, node)
    weights, at = steps.resolve(expr.args[0])
    for _ in range(2):
        if weights.op in CONVERSIONS and weights.called.startswith(".") and weights.args:
            weights, at = steps.resolve(weights.args[0], at)
    scores = _scores(source, steps, weights)
    if scores is None:
        return None
    found = AttentionByHand(context, source, node, expr.args[1], steps)
    try:
        found.follow(scores, scores)
    except _NotAttention:
        return None
    same = all(source.unchanged(part, node) for part in found.read)
    both = bool(found.masks) and found.added is not None
    return found if same and not both else None


def _scores(source: SourceFile, steps: Steps, weights: Expr) -> ast.expr | None:
    """What the softmax over the last dimension is taken of."""
    if weights.op == "softmax" and weights.args:
        dim = literal_value(weights.arg(1, "dim"))
        return weights.args[0] if dim == -1 else None
    by_hand = softmax_by_hand(source, weights.node) if weights.node is not None else None
    if by_hand is None or literal_value(by_hand.dim) != -1:
        return None
    steps.include(by_hand.steps)
    return by_hand.scores


@remedies_for("fully_masked_softmax", "low_precision_overflow", "overflow", "exp_overflow", "zero_over_zero")
def torch_attention(context: FailureContext) -> Iterator[Remedy]:
    location = context.location
    if location is None or location.expr.library == "numpy":
        return
    source = location.source
    for node in source.within(location.node):
        found = _attention(context, source, node) if isinstance(node, ast.BinOp | ast.Call) else None
        if found is None or location.node not in found.steps.nodes:
            continue
        removed = found.steps.removed()
        if removed is None:
            continue
        masked = "A fully masked row gives 0; " if found.masks or found.added is not None else ""
        yield context.remedy(
            "Use scaled_dot_product_attention",
            f"{masked}{'the' if masked else 'The'} scores are scaled and normalised without leaving the range of the "
            "dtype. Other results are unchanged.",
            replace_node(source, found.whole, found.text),
            *removed,
        )
        return
