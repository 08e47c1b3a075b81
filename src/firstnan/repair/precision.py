"""Numbers beyond the range of their dtype: the operation in float32, a dtype with more range, or a bound."""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterator

from firstnan.records import Edit, OpEvent, Remedy
from firstnan.records.operator_families import MATRIX_PRODUCTS, words
from firstnan.repair.context import FailureContext, Location, remedies_for
from firstnan.repair.data import extreme_data, extreme_samples_left_out
from firstnan.repair.literals import find_literal, format_number, scale_number
from firstnan.repair.rates import manual_rates
from firstnan.repair.settings import OptimizerSetup, clip
from firstnan.repair.source import SourceFile, insert_after, literal_value, parenthesized, replace_node, set_argument

BOUNDS = {"float16": 1e3, "float32": 1e15, "bfloat16": 1e15, "float64": 1e100}
"""The largest result: its square still fits, and no healthy number is that large."""
LARGEST_GRADIENT = 1e3
METHODS = words(
    "sum mean mul add sub div pow square matmul mm bmm norm var std cumsum prod exp dot mv einsum softmax log_softmax "
    "logsumexp cumprod sqrt rsqrt abs clamp addmm baddbmm t transpose sigmoid tanh relu"
)
"""Methods of a tensor, in contrast to the layers of a model."""
SUMS = words("sum mean norm vector_norm cumsum prod var std")
MOST_SUMS = 6
LOSS_SCALE = 1024.0
LOOPS = (ast.For, ast.While, ast.AsyncFor)


# --- float16 -----------------------------------------------------------------------------------------------------


@remedies_for("exp_overflow")
def exponentials_in_float64(context: FailureContext) -> Iterator[Remedy]:
    """`cumsum(u * exp(-a)) * exp(a)`: exponentials that cancel are exact in a wider type, and wrong if clamped."""
    location, event = context.location, context.event
    if location is None or event is None or event.in_float64 != "finite" or context.dtype != "float32":
        return
    source = location.source
    statement = source.statement(location.node)
    value = statement.value if isinstance(statement, ast.Assign | ast.Return) else None
    calls = [n for n in ast.walk(value) if isinstance(n, ast.Call)] if value is not None else []
    given = [e.args[0] for e in map(source.expr, calls) if e.op == "exp" and e.library == "torch" and e.args]
    if value is None or len(given) < 2 or not isinstance(value, ast.BinOp | ast.Call):
        return
    edits = [replace_node(source, node, f"{parenthesized(source, node)}.double()") for node in given]
    start, end = source.span(value)
    yield context.remedy(
        "Compute the exponentials of this line in float64",
        "float64 holds exponentials up to exp(709). They cancel later in this line, so the result is exact; a clamp "
        "would silently make it wrong.",
        source.edit(start, start, "("),
        *edits,
        source.edit(end, end, ").float()"),
    )


@remedies_for("low_precision_overflow")
def memory_in_float32(context: FailureContext) -> Iterator[Remedy]:
    """Memory that is written to (`self.returns.copy_(x)`, `buffer[i] = x`) in float32, where the program creates it."""
    found = _memory(context)
    if found is None:
        return
    source, name, call = found
    yield context.remedy(
        f"Keep `{name}` in float32",
        f"float32 holds numbers up to 3e38, {context.dtype} only up to {context.failure.limit:g}.",
        set_argument(source, call, "dtype", source.spell("torch.float32", call)),
    )


def _memory(context: FailureContext) -> tuple[SourceFile, str, ast.Call] | None:
    """The memory that the failing statement writes to, and the only call that creates it, if that names a dtype."""
    location = context.location
    if location is None:
        return None
    source, node = location.source, location.node
    statement, written = source.statement(node), None
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        written = statement.targets[0].value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "copy_":
        written = node.func.value
    if not isinstance(written, ast.Name | ast.Attribute):
        return None
    name = source.code(written)
    made = [n for n in source.nodes if isinstance(n, ast.Assign) and [source.code(t) for t in n.targets] == [name]]
    call = made[0].value if len(made) == 1 else None
    if not isinstance(call, ast.Call) or not any(keyword.arg == "dtype" for keyword in call.keywords):
        return None
    return source, name, call


@remedies_for("low_precision_overflow")
def in_float32(context: FailureContext) -> Iterator[Remedy]:
    """This one operation in float32, outside autocast if that would convert it back."""
    location = context.location
    if location is None:
        return
    source = location.source
    why = f"float32 holds numbers up to 3e38, {context.dtype} only up to {context.failure.limit:g}."
    device = _autocast_device(context)
    if source.is_for_effect(location.node):  # a converted copy would be written to, and lost
        yield from _made_in_float32(context, location, why)
        return
    casts = [replace_node(source, o, f"{parenthesized(source, o)}.float()") for o in _operands(context, location)]
    if device is not None and not _is_pointwise(context, location):
        block = _outside_autocast(source, location, device)
        if block is not None:
            yield context.remedy("Run this operation in float32, outside autocast", why, block, *casts)
    back = _back(context, location) if casts and device is None else None
    if back is not None:  # a matrix product takes no tensors of different dtypes
        yield context.remedy("Run this operation in float32, and convert its result back later", why, *casts, back)
    yield context.remedy("Run this operation in float32", why, *casts)
    sums = [e for n in source.within(location.node) if isinstance(n, ast.Call) and (e := source.expr(n)).op in SUMS]
    summed = [e.args[0] for e in sums if e.args and e.library in ("torch", "") and literal_value(e.args[0]) is None]
    if device is None and 1 < len(summed) <= MOST_SUMS:  # what is computed from the sums is in float32 as well
        edits = [replace_node(source, node, f"{parenthesized(source, node)}.float()") for node in summed]
        yield context.remedy("Run the sums of this function in float32", why, *edits)


def _made_in_float32(context: FailureContext, location: Location[ast.AST], why: str) -> Iterator[Remedy]:
    """The tensor that a call such as `dist.all_reduce(x)` writes to, kept in float32 where it is assigned."""
    source = location.source
    for operand in _operands(context, location)[:1]:
        value = source.value(operand)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "half":
            end = source.span(value.func)[1]
            edit = source.edit(end - len("half"), end, "float")
            yield context.remedy(f"Keep `{source.code(operand)}` in float32", why, edit)


def _back(context: FailureContext, location: Location[ast.AST]) -> Edit | None:
    """The conversion back before the first matrix product or convolution that reads the result with other tensors."""
    source, product = location.source, _product_after(context)
    operand = next((o for o in _operands(context, location) if isinstance(o, ast.Name | ast.Attribute)), None)
    function = source.function(location.node)
    if product is None or operand is None:
        return None
    event, number = product
    user = context.location_of(event.site)
    dtype = f"{source.code(operand)}.dtype"
    if user is not None and source.scope(user.node) is source.scope(location.node) and user.source is source:
        given = user.expr.args if user.expr.op else tuple(getattr(user.node, "args", ()))
        at = number if len(given) > 1 else 0
        return _converted(source, given[at], dtype) if at < len(given) else None
    returned = [n for n in source.within(location.node) if isinstance(n, ast.Return) and n.value is not None]
    value = returned[0].value if len(returned) == 1 and function is not None else None
    if value is None or isinstance(value, ast.Tuple | ast.Dict | ast.List) or not source.unchanged(operand, value):
        return None
    return _converted(source, value, dtype)


def _converted(source: SourceFile, node: ast.expr, dtype: str) -> Edit:
    return replace_node(source, node, f"{parenthesized(source, node)}.to({dtype})")


def _product_after(context: FailureContext) -> tuple[OpEvent, int] | None:
    """The first product in forward that reads what the failing operator wrote, and the number of that argument."""
    start = context.event
    reached = {start.index} if start is not None else set()
    for event in context.failure.trace.events:
        if event.phase != "forward" or start is None or event.index <= start.index:
            continue
        for number, operand in enumerate(event.inputs):
            if operand.producer in reached:
                if event.op in MATRIX_PRODUCTS or event.op.startswith("conv"):
                    return event, number
                reached.add(event.index)
    return None


def _operands(context: FailureContext, location: Location[ast.AST]) -> list[ast.expr]:
    """The tensors that the operation reads."""
    expr = location.expr
    given = [a for a in expr.args if literal_value(a) is None and not isinstance(a, ast.Constant)]
    if expr.called.startswith(".") and isinstance(location.node, ast.Call) and expr.op not in METHODS:
        given = given[1:]  # `model.layer(x)`: the receiver is not a tensor
    if expr.called.endswith("functional_call"):
        given = given[2:]  # a module and its weights
    return [node for node in given if not _is_number(context, location, node)]


def _is_number(context: FailureContext, location: Location[ast.AST], node: ast.expr) -> bool:
    """Whether an argument is a Python number: the operator read fewer tensors than the code has arguments.

    Of `a * b` it is the one that is known to be a number, else the one that did not compute the tensor."""
    event, args = context.event, location.expr.args
    if event is None or location.expr.op != event.op or len(args) != 2 or len(event.inputs) != 1:
        return False
    if event.inputs[0].name == "src":  # of `a.copy_(b)`, which does not read a
        return False
    if find_literal(context.files, Location(location.source, node)) is not None:
        return True
    other = args[1] if node is args[0] else args[0]
    if find_literal(context.files, Location(location.source, other)) is not None or literal_value(other) is not None:
        return False
    method = isinstance(location.node, ast.Call) and node is args[1]
    made = [_produces(context, event, location.source, one) for one in (node, other)]
    if method or made[0] != made[1]:
        return method or made[1]
    if isinstance(node, ast.Attribute) != isinstance(other, ast.Attribute):  # `self.scale * x`
        return isinstance(node, ast.Attribute) == (event.inputs[0].role != "parameter")
    return node is args[1]


def _produces(context: FailureContext, event: OpEvent, source: SourceFile, node: ast.expr) -> bool:
    """Whether the tensor that the operator read was computed at this expression or assigned to this name from it."""
    producer = event.inputs[0].producer
    made = context.location_of(context.failure.trace.events[producer].site) if producer is not None else None
    return made is not None and made.source is source and made.node in (node, source.value(node))


def _is_pointwise(context: FailureContext, location: Location[ast.AST]) -> bool:
    event = context.event
    return event is not None and event.op not in MATRIX_PRODUCTS and location.expr.op in METHODS


def _autocast_device(context: FailureContext) -> str | None:
    """The code for the device of the program's autocast; None if it uses none."""
    for source in OptimizerSetup(context).sources:
        for call in (c for c in source.calls if source.called_name(c) == "autocast"):
            if "cpu.amp" in source.called(call):
                return '"cpu"'
            given = [*call.args[:1], *(k.value for k in call.keywords if k.arg == "device_type")]
            named = "cuda.amp" not in source.called(call) and given and isinstance(given[0], ast.Constant)
            return source.code(given[0]) if named else '"cuda"'
    return None


def _outside_autocast(source: SourceFile, location: Location[ast.AST], device: str) -> Edit | None:
    """The statement inside `with torch.autocast(..., enabled=False)`."""
    statement = source.statement(location.node)
    if not isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr):
        return None
    start = source.span(statement)[0]
    if source.text[source.line_start(statement.lineno) : start].strip():
        return None
    head = f"with {source.spell('torch.autocast', statement)}({device}, enabled=False):"
    return source.edit(start, start, f"{head}\n{source.indent(statement)}    ")


@remedies_for("low_precision_overflow")
def in_bfloat16(context: FailureContext) -> Iterator[Remedy]:
    """bfloat16 instead of float16 in a whole file: as fast, with the range of float32."""
    for source in OptimizerSetup(context).sources:
        edits = []
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and node.attr in ("float16", "half"):
                if isinstance(node.value, ast.Name) and source.imported(node.value.id, node) == "torch":
                    edits.append(replace_node(source, node, f"{source.code(node.value)}.bfloat16"))
                elif node.attr == "half":
                    end = source.span(node)[1]
                    edits.append(source.edit(end - len("half"), end, "bfloat16"))
        yield context.remedy(
            "Use bfloat16 instead of float16",
            "bfloat16 has the range of float32, with fewer digits than float16.",
            *edits,
            kind="setting",
        )


@remedies_for("low_precision_overflow", "exploding_gradient")
def smaller_loss_scale(context: FailureContext) -> Iterator[Remedy]:
    """A smaller loss scale in a program that scales its loss itself, if one name is used to scale and unscale."""
    location = context.location_of(context.failure.history.backward_at)
    call = location.node if location is not None else None
    if location is None or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return
    product = location.source.value(call.func.value)
    for side in (product.left, product.right) if isinstance(product, ast.BinOp) else ():
        if not isinstance(side, ast.Name | ast.Attribute):
            continue
        edit, value = scale_number(context.files, Location(location.source, side), 1 / LOSS_SCALE)
        if value is not None and value >= 1:
            why = "The scaled gradients exceed the range of the dtype; with a smaller scale they stay within it."
            yield context.remedy(f"Lower the loss scale to {format_number(value)}", why, edit, kind="setting")


@remedies_for("optimizer_overflow")
def state_in_float32(context: FailureContext) -> Iterator[Remedy]:
    """float32 for the state of an optimizer in the user's code that keeps it in float16."""
    location = context.location
    for node in ast.walk(location.source.statement(location.node)) if location is not None else ():
        if location is not None and isinstance(node, ast.Call) and location.source.called(node) == ".half":
            assert isinstance(node.func, ast.Attribute)
            text = f"{parenthesized(location.source, node.func.value)}.float()"
            why = f"Squared gradients exceed {context.failure.limit:g}; float32 holds them."
            yield context.remedy(
                "Keep the optimizer's state in float32", why, replace_node(location.source, node, text)
            )


# --- bounds ------------------------------------------------------------------------------------------------------


@remedies_for("overflow", "exploding_gradient")
def smaller_inner_rate(context: FailureContext) -> Iterator[Remedy]:
    """A smaller rate for updates that the step itself computes before it fails: `w - rate * gradient` in a loop."""
    event, events = context.event, context.failure.trace.events
    before = [e for e in events if e.phase == "forward" and (event is None or e.index < event.index)]
    ran = [at for e in before if e.op in ("sub", "add", "sub_", "add_") and (at := context.location_of(e.site))]
    counted = Counter((at.source, at.source.statement(at.node)) for at in ran)
    for setter in manual_rates(context.files, [at.source.file for at in ran]):
        source = setter.at.source
        if counted[source, source.statement(setter.at.node)] < 2:
            continue
        for factor in (0.1, 0.01):
            edit, value = scale_number(context.files, setter.value, factor)
            title = f"Multiply the rate of the updates in this step by {format_number(factor)}"
            if value is not None:
                title = f"Lower the rate of the updates in this step to {format_number(value)}"
            why = "Each of these updates overshoots further than the one before; smaller ones do not."
            yield context.remedy(title, why, edit, kind="setting")
        return


@remedies_for("overflow")
def bounded(context: FailureContext) -> Iterator[Remedy]:
    """A bound on the base of a power, on the result of any other operation, or on what it reads."""
    location = context.location
    if location is None or not isinstance(location.node, ast.expr | ast.AugAssign):
        return
    # A bound would only hide that a run diverges, and does not help against bad data.
    if context.failure.growth is not None or context.failure.phase not in ("forward", "backward"):
        return
    source, expr = location.source, location.expr
    limit = BOUNDS.get(context.dtype, 1e15)
    why = "Ordinary numbers are unchanged; a clamped value gets a gradient of 0."
    extreme = extreme_data(context, limit) is not None
    yield from extreme_samples_left_out(context, limit)
    if expr.op in ("pow", "square") and expr.args:
        power = _exponent(context, expr.arg(1, "exponent")) if expr.op == "pow" else 2.0
        root = 10.0 ** max(math.floor(math.log10(limit) / max(power, 1.0)), 0) if power else None
        if root:
            yield context.remedy("Bound the base of the power", why, _clamped(source, expr.args[0], root))
    # A bound of the loss would leave a whole batch without a gradient because of one bad sample.
    if isinstance(location.node, ast.expr) and not extreme and not source.is_for_effect(location.node):
        yield context.remedy("Bound the result", why, _clamped(source, location.node, limit))
    root = 10.0 ** math.floor(math.log10(limit) / 2)
    operands = _operands(context, location)
    if source.is_for_effect(location.node):  # `x.copy_(y)` writes to x: a bound of that would be lost
        if expr.called.startswith(".") and len(operands) > 1:
            operands = operands[1:]
        if expr.called.endswith("copy_") and len(operands) == 1:
            yield context.remedy("Bound what is written", why, _clamped(source, operands[0], limit))
        return
    yield context.remedy("Bound the inputs", why, *(_clamped(source, o, root) for o in operands))


def _clamped(source: SourceFile, node: ast.expr, bound: float) -> Edit:
    text = format_number(bound)
    return replace_node(source, node, f"{parenthesized(source, node)}.clamp(-{text}, {text})")


def _exponent(context: FailureContext, node: ast.expr | None) -> float | None:
    given = literal_value(node)
    if given is not None:
        return given
    event = context.event
    seen = dict(event.scalars).get("exponent") if event is not None else None
    return float(seen) if isinstance(seen, int | float) else None


@remedies_for("overflow", "low_precision_overflow")
def mean_for_sum(context: FailureContext) -> Iterator[Remedy]:
    """A mean instead of a sum over many elements."""
    location = context.location
    if location is None or location.expr.op != "sum" or not isinstance(location.node, ast.Call):
        return
    function = location.node.func
    start, end = location.source.span(function)
    if location.source.text[start:end].endswith("sum"):
        why = "A mean cannot exceed the range of its inputs, however many there are."
        yield context.remedy(
            "Use the mean instead of the sum", why, location.source.edit(end - len("sum"), end, "mean")
        )


# --- gradients that grow in backward -----------------------------------------------------------------------------


@remedies_for("exploding_gradient")
def bounded_gradient(context: FailureContext) -> Iterator[Remedy]:
    """A bound on the gradient each time it passes the statement, so it cannot grow each time."""
    location = context.location
    if location is None:
        return
    source, statement = location.source, location.source.statement(location.node)
    bound = format_number(LARGEST_GRADIENT)
    why = f"Gradients below {bound} are unchanged; larger ones are clipped each time instead of growing."
    title = "Clip the gradient each time backward passes here"
    edits = _hooked(source, statement)
    if edits is None:
        return
    clipping = clip(OptimizerSetup(context), 1.0)
    if clipping is not None:
        yield context.remedy(f"{title}, and before the update", why, *edits, clipping)
    yield context.remedy(title, why, *edits)


def _hooked(source: SourceFile, statement: ast.stmt) -> list[Edit] | None:
    """A hook on the value that the statement assigns or returns."""
    bound = format_number(LARGEST_GRADIENT)
    if isinstance(statement, ast.Return) and statement.value is not None:
        start, end = source.span(statement)[0], source.span(statement.value)[0]
        lines = _hook("result", bound)
        return [source.edit(start, end, "result = "), insert_after(source, statement, *lines, "return result")]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    if len(targets) == 1 and isinstance(targets[0], ast.Name | ast.Attribute) and not isinstance(statement, LOOPS):
        return [insert_after(source, statement, *_hook(source.code(targets[0]), bound))]
    return None


def _hook(name: str, bound: str) -> list[str]:
    return [f"if {name}.requires_grad:", f"    {name}.register_hook(lambda grad: grad.clamp(-{bound}, {bound}))"]


@remedies_for("exploding_gradient", "overflow")
def bounded_state(context: FailureContext) -> Iterator[Remedy]:
    """A recurrent state, bounded by tanh as in an ordinary recurrent cell."""
    location = context.location
    if location is None:
        return
    source, statement = location.source, location.source.statement(location.node)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return
    name = statement.targets[0].id
    feeds_itself = any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(statement.value))
    if feeds_itself and any(isinstance(p, LOOPS) for p in source.parents(statement)):
        text = f"{source.spell('torch.tanh', statement)}({source.code(statement.value)})"
        why = "The state stays between -1 and 1 however long the sequence is, and its gradient does not grow."
        yield context.remedy("Bound the state with tanh", why, replace_node(source, statement.value, text))


@remedies_for("nan_input", "nan_label")
def wider_integers(context: FailureContext) -> Iterator[Remedy]:
    """A product of integers that has wrapped, computed in a wider type where it is assigned."""
    location = context.location
    wrapped = [i.name for i in context.failure.origin.inputs if i.dtype == "int32"]
    for name in (n for n in ast.walk(location.node) if isinstance(n, ast.Name)) if location is not None else ():
        found = location.source.assigned(name) if location is not None and name.id in wrapped else None
        if location is None or found is None or not isinstance(found.value, ast.BinOp):
            continue
        source, first = location.source, found.value.left
        text = f"{parenthesized(source, first)}.astype({source.spell('numpy.int64', first)})"
        yield context.remedy(
            f"Compute `{name.id}` in int64",
            "Products above the largest number of the type no longer wrap; all others are unchanged.",
            replace_node(source, first, text),
        )
