"""Weights that are bad from the start: uninitialised memory, a damaged checkpoint, too large initial values."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from firstnan.diagnose.rules.base import largest
from firstnan.diagnose.rules.overflow import weights_feeding
from firstnan.records import Edit, OpEvent, Remedy
from firstnan.repair.context import FailureContext, Location, remedies_for
from firstnan.repair.literals import format_number, replace_number
from firstnan.repair.settings import OptimizerSetup
from firstnan.repair.source import SourceFile, literal_value, parenthesized, replace_node, set_argument

ZEROS = {"empty": "zeros", "empty_like": "zeros_like", "new_empty": "new_zeros"}
LEGACY = ("Tensor", "FloatTensor", "DoubleTensor", "HalfTensor")
USUAL_STD = 0.02
"""The initial standard deviation of most transformers, small enough for any width in use."""
INITIALISERS = ("normal", "uniform", "trunc_normal", "constant", "fill")
LARGE_SHARE = 0.05
"""With more bad weights than this, a tensor is not loaded at all."""


# --- uninitialised memory ----------------------------------------------------------------------------------------


@remedies_for("uninitialized_memory")
def initialised(context: FailureContext) -> Iterator[Remedy]:
    """An initialiser where the memory is allocated: zeros, or random numbers for a trained matrix."""
    location = _allocation(context)
    if location is None:
        return
    source, call = location.source, location.node
    event = context.failure.origin.event
    stat = context.failure.origin.produced or (event.outputs[0] if event is not None and event.outputs else None)
    trained = context.failure.origin.role == "parameter" or context.failure.origin.phase == "parameter"
    matrix = trained and stat is not None and len(stat.shape) >= 2
    why = "The memory held arbitrary values; now it starts with numbers of an ordinary size."
    random: list[tuple[str, str]] = []
    if matrix:
        random.append(("Use Xavier initialisation", f"{_init(source, call, 'xavier_uniform_')}({source.code(call)})"))
    if trained:
        text = f"{_init(source, call, 'normal_')}({source.code(call)}, std={USUAL_STD})"
        random.append((f"Use normal initialisation with std {USUAL_STD}", text))
    zeros = [("Use zeros instead of uninitialised memory", text)] if (text := _zeros(source, call)) else []
    for title, text in [*random, *zeros] if matrix else [*zeros, *random]:
        yield context.remedy(title, why, replace_node(source, call, text))


def _init(source: SourceFile, at: ast.AST, name: str) -> str:
    return source.spell(f"torch.nn.init.{name}", at)


def _allocation(context: FailureContext) -> Location[ast.Call] | None:
    """The call that allocated the memory, at the origin or at what it read."""
    event = context.failure.origin.event
    events: list[OpEvent] = [event, *context.failure.trace.producers(event)] if event is not None else []
    sites = [context.failure.origin.site, *(e.site for e in events if e.uninitialized)]
    for location in filter(None, map(context.location_of, sites)):
        for node in ast.walk(location.node):
            if isinstance(node, ast.Call) and _allocates(location.source, node):
                return Location(location.source, node)
    return None


def _allocates(source: SourceFile, call: ast.Call) -> bool:
    name = source.called_name(call)
    return name in ZEROS or (name in LEGACY and source.called(call).startswith("torch."))


def _zeros(source: SourceFile, call: ast.Call) -> str:
    name = source.called_name(call)
    start, end = source.span(call.func)
    rest = source.text[end : source.span(call)[1]]
    if name in LEGACY:
        return source.spell("torch.zeros", call) + rest
    head = source.text[start:end]
    return head.removesuffix(name) + ZEROS[name] + rest if head.endswith(name) else ""


# --- loaded weights ----------------------------------------------------------------------------------------------


@remedies_for("nan_parameter")
def repaired_weights(context: FailureContext) -> Iterator[Remedy]:
    """The bad numbers of a checkpoint replaced, or the tensors with bad numbers not loaded."""
    stat = context.failure.origin.produced
    for source, call in _loading(context):
        state = call.args[0] if call.args else None
        if state is None:
            continue
        pairs = f"for k, v in {parenthesized(source, state)}.items()"
        filled = f"{source.spell('torch.nan_to_num', call)}(v, posinf=0.0, neginf=0.0)"
        repair = context.remedy(
            "Replace bad values in the loaded weights with 0",
            "All other weights are unchanged; a single weight of 0 is harmless.",
            replace_node(source, state, f"{{k: {filled} {pairs}}}"),
            kind="data",
        )
        finite = f"{source.spell('torch.isfinite', call)}(v).all()"
        skip = context.remedy(
            "Do not load tensors with bad values",
            "They keep their initial values; the checkpoint itself should be written again.",
            replace_node(source, state, f"{{k: v {pairs} if {finite}}}"),
            set_argument(source, call, "strict", "False"),
            kind="data",
        )
        many = stat is not None and stat.bad > LARGE_SHARE * stat.numel
        yield from (skip, repair) if many else (repair, skip)


@remedies_for("nan_parameter")
def repaired_copy(context: FailureContext) -> Iterator[Remedy]:
    """A tensor that is used as a weight directly: `weight.copy_(t)`, `nn.Parameter(t)`, `from_pretrained(t)`."""
    location = context.location
    if location is None:
        return
    source = location.source
    for node in ast.walk(source.statement(location.node)):
        names = ("copy_", "Parameter", "from_pretrained", "from_numpy")
        if isinstance(node, ast.Call) and source.called_name(node) in names and node.args:
            given = node if source.called(node).endswith("from_numpy") else node.args[0]
            text = f"{source.spell('torch.nan_to_num', node)}({source.code(given)}, posinf=0.0, neginf=0.0)"
            yield context.remedy(
                "Replace bad values in these weights with 0",
                "All other weights are unchanged; a single weight of 0 is harmless.",
                replace_node(source, given, text),
                kind="data",
            )


def _loading(context: FailureContext) -> list[tuple[SourceFile, ast.Call]]:
    """The calls of `load_state_dict` of models, the one at the origin first."""
    found: list[tuple[SourceFile, ast.Call]] = []
    for source in OptimizerSetup(context).surroundings:
        for call in source.calls:
            if source.called(call) == ".load_state_dict":
                receiver = source.code(call.func).lower()
                if not any(word in receiver for word in ("opt", "sched", "scaler")):
                    found.append((source, call))
    site = context.failure.origin.site
    return sorted(found, key=lambda f: not (site and f[0].file == site.file and f[1].lineno == site.line))


# --- initial values ----------------------------------------------------------------------------------------------


@remedies_for("bad_init", "exploding_gradient", "overflow")
def smaller_weights(context: FailureContext) -> Iterator[Remedy]:
    """Initial values of an ordinary size for the weights that reach the operator."""
    if context.cause.slug != "bad_init" and context.failure.origin.step > 1:
        return  # the weights have been trained since
    for source, node in _initialisers(context):
        yield from _smaller(context, source, node)


def _initialisers(context: FailureContext) -> Iterator[tuple[SourceFile, ast.AST]]:
    """Where the largest of these weights are written: by an initialiser, a method, a factor or a constructor."""
    names = _names(context)
    for source in OptimizerSetup(context).surroundings:
        for node in source.nodes:
            target = _written_weight(source, node)
            if target is None:
                continue
            last = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
            if isinstance(node, ast.Assign) and last in ("weight", "bias"):
                owner = next((p.name for p in source.parents(node) if isinstance(p, ast.ClassDef)), "")
                if owner != context.failure.origin.module_type:
                    continue  # the weight of another layer
            if last in names or (isinstance(target, ast.Name) and not isinstance(node, ast.Assign)):
                yield source, node


def _names(context: FailureContext) -> list[str]:
    """The attribute names of the weights that reach the origin, the largest weight first."""
    failure, event = context.failure, context.failure.origin.event
    start = [e for e in (event, failure.origin.forward_event) if e is not None]
    weights = [w for e in start for w in weights_feeding(failure.trace, e)]
    weights.sort(key=lambda w: -(largest(w[1]) or 0.0))
    labels = [label for label, _ in weights] or [i.label for e in start for i in e.inputs if i.role == "parameter"]
    parts = [p for label in labels[:4] for p in reversed(label.split(".")[-2:])]
    return list(dict.fromkeys(p for p in parts if not p.isdigit()))


def _written_weight(source: SourceFile, node: ast.AST) -> ast.expr | None:
    """The weight that a node writes: `self.w` in `self.w = Parameter(...)`, in `init.normal_(self.w)`..."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.targets) == 1:
        made = source.called_name(node.value) in ("Parameter", "requires_grad_")
        return node.targets[0] if made else None
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
        return _without_data(node.target)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
        return None
    called = source.called(node)
    if called.startswith("torch.nn.init.") and node.args:
        return _without_data(node.args[0])
    if called in [f".{name}_" for name in (*INITIALISERS, "mul")] and isinstance(node.func, ast.Attribute):
        return _without_data(node.func.value)
    return None


def _without_data(node: ast.expr) -> ast.expr:
    """The weight itself, without `.data` or an index."""
    while isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
        node = node.value
    return node


def _smaller(context: FailureContext, source: SourceFile, node: ast.AST) -> Iterator[Remedy]:
    why = "With weights of an ordinary size, products and gradients stay within the range of the dtype."
    if isinstance(node, ast.Assign):
        assert isinstance(node.value, ast.Call)
        for edit in _smaller_factor(context, source, node.value):
            yield context.remedy("Use smaller initial weights", why, edit, kind="setting")
        return
    if isinstance(node, ast.AugAssign):
        edit = replace_number(context.files, Location(source, node.value), 1.0)
        yield context.remedy("Do not scale the initial weights", why, edit, kind="setting")
        return
    assert isinstance(node, ast.Call)
    called = source.called_name(node).rstrip("_")
    weight = node.args[0] if source.called(node).startswith("torch.nn.init.") else None
    gain = next((k.value for k in node.keywords if k.arg == "gain"), None)
    if gain is not None:
        yield context.remedy(
            "Use gain 1", why, replace_number(context.files, Location(source, gain), 1.0), kind="setting"
        )
        return
    if isinstance(node.func, ast.Attribute) and weight is None:
        weight = node.func.value
    code = source.code(weight) if weight is not None else ""
    if called in INITIALISERS and code.endswith((".weight", ".weight.data")):
        text = f"{_init(source, node, 'kaiming_normal_')}({code})"
        yield context.remedy("Use Kaiming initialisation", why, replace_node(source, node, text), kind="setting")
    for edit in _smaller_scale(context, source, node, called):
        yield context.remedy("Use smaller initial weights", why, edit, kind="setting")


def _smaller_scale(context: FailureContext, source: SourceFile, call: ast.Call, name: str) -> Iterator[Edit]:
    """A small number for the scale of an initialiser."""
    method = source.called(call).startswith(".")
    positions = {"normal": ("std", 2), "trunc_normal": ("std", 2), "constant": ("val", 1), "fill": ("value", 1)}
    positions |= {"mul": ("other", 1), "uniform": ("b", 2)}
    keyword, at = positions.get(name, ("std", 2))
    at -= method
    given = next((k.value for k in call.keywords if k.arg in (keyword, "to")), None)
    given = call.args[at] if given is None and at < len(call.args) else given
    if given is not None:
        yield replace_number(context.files, Location(source, given), 1.0 if name == "mul" else USUAL_STD)


def _smaller_factor(context: FailureContext, source: SourceFile, made: ast.Call) -> Iterator[Edit]:
    """A small factor in `Parameter(100 * torch.randn(...))`, added if there is none."""
    given = made.args[0] if made.args else None
    if source.called_name(made) == "requires_grad_" and isinstance(made.func, ast.Attribute):
        given = made.func.value
    if given is None:
        return
    for node in ast.walk(given):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for side in (node.left, node.right):
                if literal_value(side) is not None or isinstance(side, ast.Name | ast.Attribute):
                    yield replace_number(context.files, Location(source, side), USUAL_STD)
                    return
    made_of = [source.called_name(n) for n in ast.walk(given) if isinstance(n, ast.Call)]
    if any(name in ("randn", "rand", "full", "ones") for name in made_of):
        yield replace_node(source, given, f"{format_number(USUAL_STD)} * {parenthesized(source, given)}")
