"""Numbers beyond the range of their type: this operation in float32, a type with more range, or a bound."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from firstnan.records import Remedy
from firstnan.records.operator_families import MATRIX_PRODUCTS, words
from firstnan.repair.base import Job, Place, remedy
from firstnan.repair.edits import Edit, after, atom, put
from firstnan.repair.numbers import Spelled, literal, written
from firstnan.repair.setup import Setup, clip
from firstnan.repair.source import Source, number

BOUNDS = {"float16": 1e3, "float32": 1e15, "bfloat16": 1e15, "float64": 1e100}
"""What a result may reach: its square still fits, and no healthy number is touched."""
LIMIT_OF_GRADIENT = 1e3
LOSS_SCALE = 1024.0
LOOPS = (ast.For, ast.While, ast.AsyncFor)


# --- float16 -----------------------------------------------------------------------------------------------------


@remedy("low_precision_overflow")
def in_float32(job: Job) -> Iterator[Remedy]:
    """This one operation in float32; what autocast would turn back is kept out of its reach."""
    place = job.place
    if place is None:
        return
    source = place.source
    why = f"float32 reaches 3e38, where {job.dtype} ends at {job.scene.limit:g}; all the rest stays as fast as it is."
    device = _autocast_device(job)
    operands = [(p, o) for p, o in _operands(place)]
    wide = [put(source, o, f"{atom(source, o)}.float()") for _, o in operands]
    if device is not None and not _is_pointwise(job, place):
        edits = _outside_autocast(source, place, device)
        if edits is not None:
            yield job.remedy("This operation in float32, outside autocast", why, edits, *wide)
    if wide:
        yield job.remedy("This operation in float32", why, *wide)


def _operands(place: Place) -> list[tuple[int, ast.expr]]:
    """The tensors that the operation reads, as far as they are written there; each name once."""
    expr = place.expr
    given = [(i, a) for i, a in enumerate(expr.args) if number(a) is None and not isinstance(a, ast.Constant)]
    if expr.called.startswith(".") and isinstance(place.node, ast.Call) and not _is_method(place):
        given = given[1:]  # `self.layer(x)`: the receiver is no tensor
    return given


def _is_method(place: Place) -> bool:
    """`x.sum(-1)` is a method of a tensor, `self.layer(x)` the call of a layer."""
    return place.expr.op in METHODS


METHODS = words(
    "sum mean mul add sub div pow square matmul mm bmm norm var std cumsum prod exp dot mv einsum softmax log_softmax "
    "logsumexp cumprod sqrt rsqrt abs clamp addmm baddbmm t transpose sigmoid tanh relu"
)


def _is_pointwise(job: Job, place: Place) -> bool:
    event = job.event
    return event is not None and event.op not in MATRIX_PRODUCTS and place.expr.op in METHODS


def _autocast_device(job: Job) -> str | None:
    """The device of the program's autocast as it is written there; None where there is no autocast."""
    for source in Setup(job).files:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and source.called(node).rsplit(".", 1)[-1] == "autocast":
                if "cuda.amp" in source.called(node):
                    return '"cuda"'
                if "cpu.amp" in source.called(node):
                    return '"cpu"'
                given = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "device_type")]
                return source.code(given[0]) if given and isinstance(given[0], ast.Constant) else '"cuda"'
    return None


def _outside_autocast(source: Source, place: Place, device: str) -> Edit | None:
    """The statement inside `with torch.autocast(..., enabled=False)`."""
    statement = source.statement(place.node)
    if not isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr):
        return None
    start = source.span(statement)[0]
    if source.text[source.line_start(statement.lineno) : start].strip():
        return None
    head = f"with {source.spell('torch.autocast', statement)}({device}, enabled=False):"
    return Edit(source, start, start, f"{head}\n{source.indent(statement)}    ")


@remedy("low_precision_overflow")
def in_bfloat16(job: Job) -> Iterator[Remedy]:
    """bfloat16 in place of float16, everywhere in a file: the same speed, the range of float32."""
    for source in Setup(job).files:
        edits = []
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr in ("float16", "half"):
                if isinstance(node.value, ast.Name) and source.imported(node.value.id, node) == "torch":
                    edits.append(put(source, node, f"{source.code(node.value)}.bfloat16"))
                elif node.attr == "half":
                    end = source.span(node)[1]
                    edits.append(Edit(source, end - len("half"), end, "bfloat16"))
        yield job.remedy(
            "bfloat16 instead of float16",
            "bfloat16 has the range of float32 and fewer digits; nothing overflows that float32 could hold.",
            *edits,
            kind="setting",
        )


@remedy("low_precision_overflow", "exploding_gradient")
def smaller_loss_scale(job: Job) -> Iterator[Remedy]:
    """The factor by which a program scales its loss itself, where one name serves scaling and unscaling."""
    place = job.place_of(job.scene.history.backward_at)
    call = place.node if place is not None else None
    if place is None or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return
    product = place.source.value(call.func.value)
    for side in (product.left, product.right) if isinstance(product, ast.BinOp) else ():
        found = literal(job.desk, Spelled(place.source, side)) if isinstance(side, ast.Name | ast.Attribute) else None
        value = number(found.node) if found is not None else None
        if found is not None and value is not None and value >= LOSS_SCALE:
            smaller = put(found.source, found.node, written(value / LOSS_SCALE))
            why = "Scaled gradients reach beyond the type; a smaller factor keeps them inside, and unscaling undoes it."
            yield job.remedy(f"Loss scale {written(value / LOSS_SCALE)}", why, smaller, kind="setting")


@remedy("optimizer_overflow")
def state_in_float32(job: Job) -> Iterator[Remedy]:
    """State that an own optimizer keeps in float16 is kept in float32."""
    place = job.place
    for node in ast.walk(place.source.statement(place.node)) if place is not None else ():
        if place is not None and isinstance(node, ast.Call) and place.source.called(node) == ".half":
            assert isinstance(node.func, ast.Attribute)
            text = f"{atom(place.source, node.func.value)}.float()"
            why = f"Squares of gradients reach further than {job.scene.limit:g}; float32 holds them."
            yield job.remedy("Keep the optimizer's state in float32", why, put(place.source, node, text))


# --- bounds ------------------------------------------------------------------------------------------------------


@remedy("overflow")
def bounded(job: Job) -> Iterator[Remedy]:
    """The base of a power, or the result of anything else, held below what the rest can bear."""
    place = job.place
    if place is None or not isinstance(place.node, ast.expr | ast.AugAssign):
        return
    # A bound would only hide a run that diverges, and bad data is no matter of range.
    if job.scene.growth is not None or job.scene.phase not in ("forward", "backward"):
        return
    source, expr = place.source, place.expr
    limit = BOUNDS.get(job.dtype, 1e15)
    why = "Ordinary numbers pass untouched; what is cut gets no gradient, so nothing bad comes back from it."
    if expr.op in ("pow", "square") and expr.args:
        power = _exponent(job, expr.arg(1, "exponent")) if expr.op == "pow" else 2.0
        root = 10.0 ** max(math.floor(math.log10(limit) / max(power, 1.0)), 0) if power else None
        if root:
            text = f"{atom(source, expr.args[0])}.clamp(-{written(root)}, {written(root)})"
            yield job.remedy("Bound the base of the power", why, put(source, expr.args[0], text))
    if isinstance(place.node, ast.expr):
        text = f"{atom(source, place.node)}.clamp(-{written(limit)}, {written(limit)})"
        yield job.remedy("Bound the result", why, put(source, place.node, text))
    reads = [o for _, o in _operands(place)]
    operand = 10.0 ** math.floor(math.log10(limit) / 2)
    edits = [put(source, o, f"{atom(source, o)}.clamp(-{written(operand)}, {written(operand)})") for o in reads]
    yield job.remedy("Bound what it reads", why, *edits)


def _exponent(job: Job, node: ast.expr | None) -> float | None:
    given = number(node)
    if given is not None:
        return given
    event = job.event
    seen = dict(event.scalars).get("exponent") if event is not None else None
    return float(seen) if isinstance(seen, int | float) else None


@remedy("overflow", "low_precision_overflow")
def mean_for_sum(job: Job) -> Iterator[Remedy]:
    """A mean where a sum over many elements ran out of range."""
    place = job.place
    if place is None or place.expr.op != "sum" or not isinstance(place.node, ast.Call):
        return
    function = place.node.func
    start, end = place.source.span(function)
    if place.source.text[start:end].endswith("sum"):
        why = "The mean of numbers in range is in range, however many there are."
        yield job.remedy("Mean instead of sum", why, Edit(place.source, end - len("sum"), end, "mean"))


# --- gradients that grow on their way back ------------------------------------------------------------------------


@remedy("exploding_gradient")
def bounded_on_the_way_back(job: Job) -> Iterator[Remedy]:
    """The gradient cut each time it passes the statement, so that it cannot grow from one passage to the next."""
    place = job.place
    if place is None:
        return
    source, statement = place.source, place.source.statement(place.node)
    why = (
        f"Gradients below {written(LIMIT_OF_GRADIENT)} pass untouched; larger ones are cut at every passage instead of "
        "growing until they overflow."
    )
    title = "Clip the gradient each time it passes here"
    edits = _hooked(source, statement)
    if edits is None:
        return
    clipping = clip(Setup(job), 1.0)
    if clipping is not None:
        yield job.remedy(f"{title}, and before the update", why, *edits, clipping)
    yield job.remedy(title, why, *edits)


def _hooked(source: Source, statement: ast.stmt) -> list[Edit] | None:
    """A hook on what the statement assigns or returns."""
    bound = written(LIMIT_OF_GRADIENT)
    if isinstance(statement, ast.Return) and statement.value is not None:
        start, end = source.span(statement)[0], source.span(statement.value)[0]
        lines = _hook("result", bound)
        return [Edit(source, start, end, "result = "), after(source, statement, *lines, "return result")]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    if len(targets) == 1 and isinstance(targets[0], ast.Name | ast.Attribute) and not isinstance(statement, LOOPS):
        return [after(source, statement, *_hook(source.code(targets[0]), bound))]
    return None


def _hook(name: str, bound: str) -> list[str]:
    return [f"if {name}.requires_grad:", f"    {name}.register_hook(lambda grad: grad.clamp(-{bound}, {bound}))"]


@remedy("exploding_gradient", "overflow")
def saturating_state(job: Job) -> Iterator[Remedy]:
    """A state that feeds on itself, squashed as in an ordinary recurrent cell."""
    place = job.place
    if place is None:
        return
    source, statement = place.source, place.source.statement(place.node)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return
    name = statement.targets[0].id
    feeds_itself = any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(statement.value))
    if feeds_itself and any(isinstance(p, LOOPS) for p in source.parents(statement)):
        text = f"{source.spell('torch.tanh', statement)}({source.code(statement.value)})"
        why = "The state stays between -1 and 1 however long the sequence is, and so does what comes back through it."
        yield job.remedy("Squash the state with tanh", why, put(source, statement.value, text))
