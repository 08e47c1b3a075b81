"""Weights that start wrong: memory nobody wrote, a checkpoint with holes, an initialiser that is far too large."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from firstnan.diagnose.rules.failure import largest
from firstnan.diagnose.rules.overflow import weights_feeding
from firstnan.records import OpEvent, Remedy
from firstnan.repair.base import Job, Place, remedy
from firstnan.repair.edits import Edit, argument, atom, put
from firstnan.repair.numbers import Spelled, literal, replaced, written
from firstnan.repair.setup import Setup
from firstnan.repair.source import Source, number

ZEROS = {"empty": "zeros", "empty_like": "zeros_like", "new_empty": "new_zeros"}
LEGACY = ("Tensor", "FloatTensor", "DoubleTensor", "HalfTensor")
SMALL = 0.02
"""The standard deviation that transformers are initialised with: small enough for any width in use."""
DRAWS = ("normal", "uniform", "trunc_normal", "constant", "fill")
MANY = 0.05


# --- memory that nobody wrote -----------------------------------------------------------------------------------


@remedy("uninitialized_memory")
def initialised(job: Job) -> Iterator[Remedy]:
    """The memory gets an initialiser where it is allocated: zeros, or random numbers for a matrix that is learned."""
    place = _allocation(job)
    if place is None:
        return
    source, call = place.source, place.node
    assert isinstance(call, ast.Call)
    event = job.scene.origin.event
    stat = job.scene.origin.produced or (event.outputs[0] if event is not None and event.outputs else None)
    learned = job.scene.origin.role == "parameter" or job.scene.origin.phase == "parameter"
    matrix = learned and stat is not None and len(stat.shape) >= 2
    why = "What the memory held before was never meant; now it holds numbers of an ordinary size from the start."
    drawn = []
    if matrix:
        drawn.append(("Xavier initialisation", f"{_init(source, call, 'xavier_uniform_')}({source.code(call)})"))
    if learned:
        text = f"{_init(source, call, 'normal_')}({source.code(call)}, std={SMALL})"
        drawn.append((f"Normal initialisation (std {SMALL})", text))
    zeros = [("Zeros instead of unwritten memory", text)] if (text := _zeros(source, call)) else []
    for title, text in [*drawn, *zeros] if matrix else [*zeros, *drawn]:
        yield job.remedy(title, why, put(source, call, text))


def _init(source: Source, at: ast.AST, name: str) -> str:
    return source.spell(f"torch.nn.init.{name}", at)


def _allocation(job: Job) -> Place | None:
    """The call that allocated the memory: at the origin, or what it read."""
    event = job.scene.origin.event
    events: list[OpEvent] = [event, *job.scene.trace.producers(event)] if event is not None else []
    sites = [job.scene.origin.site, *(e.site for e in events if e.uninitialized)]
    for place in (job.place_of(s) for s in sites):
        for node in ast.walk(place.node) if place is not None else ():
            if place is not None and isinstance(node, ast.Call) and _allocates(place.source, node):
                return Place(place.source, node)
    return None


def _allocates(source: Source, call: ast.Call) -> bool:
    name = source.called(call).rsplit(".", 1)[-1]
    return name in ZEROS or (name in LEGACY and source.called(call).startswith("torch."))


def _zeros(source: Source, call: ast.Call) -> str:
    name = source.called(call).rsplit(".", 1)[-1]
    start, end = source.span(call.func)
    rest = source.text[end : source.span(call)[1]]
    if name in LEGACY:
        return source.spell("torch.zeros", call) + rest
    head = source.text[start:end]
    return head.removesuffix(name) + ZEROS[name] + rest if head.endswith(name) else ""


# --- weights that came from elsewhere ---------------------------------------------------------------------------


@remedy("nan_parameter")
def mended_weights(job: Job) -> Iterator[Remedy]:
    """Bad numbers of a checkpoint are replaced, or the tensors that hold them are not taken over."""
    stat = job.scene.origin.produced
    for source, call in _loading(job):
        state = call.args[0] if call.args else None
        if state is None:
            continue
        pairs = f"for k, v in {atom(source, state)}.items()"
        filled = f"{source.spell('torch.nan_to_num', call)}(v, posinf=0.0, neginf=0.0)"
        mend = job.remedy(
            "Replace the bad numbers of the loaded weights by 0",
            "All other weights are taken over as they are; a single weight of 0 is harmless.",
            put(source, state, f"{{k: {filled} {pairs}}}"),
            kind="data",
        )
        finite = f"{source.spell('torch.isfinite', call)}(v).all()"
        skip = job.remedy(
            "Do not load the tensors that hold bad numbers",
            "They keep their fresh initialisation; the file itself should be made again.",
            put(source, state, f"{{k: v {pairs} if {finite}}}"),
            argument(source, call, "strict", "False"),
            kind="data",
        )
        many = stat is not None and stat.bad > MANY * stat.numel
        yield from (skip, mend) if many else (mend, skip)


@remedy("nan_parameter")
def mended_copy(job: Job) -> Iterator[Remedy]:
    """A tensor that becomes a weight by itself: `weight.copy_(t)`, `nn.Parameter(t)`, `from_pretrained(t)`."""
    place = job.place
    if place is None:
        return
    source = place.source
    for node in ast.walk(source.statement(place.node)):
        names = ("copy_", "Parameter", "from_pretrained", "from_numpy")
        if isinstance(node, ast.Call) and source.called(node).rsplit(".", 1)[-1] in names and node.args:
            given = node if source.called(node).endswith("from_numpy") else node.args[0]
            text = f"{source.spell('torch.nan_to_num', node)}({source.code(given)}, posinf=0.0, neginf=0.0)"
            yield job.remedy(
                "Replace the bad numbers of these weights by 0",
                "All other weights stay as they are; a single weight of 0 is harmless.",
                put(source, given, text),
                kind="data",
            )


def _loading(job: Job) -> list[tuple[Source, ast.Call]]:
    """The calls of `load_state_dict` for a model: the one at the origin first."""
    found: list[tuple[Source, ast.Call]] = []
    for source in Setup(job).files:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and source.called(node) == ".load_state_dict":
                receiver = source.code(node.func).lower()
                if not any(word in receiver for word in ("opt", "sched", "scaler")):
                    found.append((source, node))
    site = job.scene.origin.site
    return sorted(found, key=lambda f: not (site and f[0].file == site.file and f[1].lineno == site.line))


# --- initialisers -----------------------------------------------------------------------------------------------


@remedy("bad_init", "exploding_gradient", "overflow")
def smaller_weights(job: Job) -> Iterator[Remedy]:
    """The initialiser of the weights that fed the operator, made of an ordinary size."""
    if job.cause.slug == "overflow" and job.scene.origin.step > 1:
        return  # the weights have been trained since
    for source, node in _initialisers(job):
        yield from _tamed(job, source, node)


def _initialisers(job: Job) -> Iterator[tuple[Source, ast.AST]]:
    """Where the largest weights that took part are written: by an initialiser, a method, a factor, a constructor."""
    names = _names(job)
    for source in Setup(job).files:
        for node in ast.walk(source.tree):
            target = _written(source, node)
            if target is None:
                continue
            last = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
            if isinstance(node, ast.Assign) and last in ("weight", "bias"):
                owner = next((p.name for p in source.parents(node) if isinstance(p, ast.ClassDef)), "")
                if owner != job.scene.origin.module_type:
                    continue  # the weight of another layer
            if last in names or (isinstance(target, ast.Name) and not isinstance(node, ast.Assign)):
                yield source, node


def _names(job: Job) -> list[str]:
    """The attributes that the weights behind the origin are kept under, the largest weight's first."""
    scene, event = job.scene, job.scene.origin.event
    start = [e for e in (event, scene.origin.forward_event) if e is not None]
    weights = [w for e in start for w in weights_feeding(scene.trace, e)]
    weights.sort(key=lambda w: -(largest(w[1]) or 0.0))
    labels = [label for label, _ in weights] or [i.label for e in start for i in e.inputs if i.role == "parameter"]
    parts = [p for label in labels[:4] for p in reversed(label.split(".")[-2:])]
    return list(dict.fromkeys(p for p in parts if not p.isdigit()))


def _written(source: Source, node: ast.AST) -> ast.expr | None:
    """The weight that a node writes: `self.w` in `self.w = Parameter(...)`, in `init.normal_(self.w)`..."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.targets) == 1:
        made = source.called(node.value).rsplit(".", 1)[-1] == "Parameter"
        return node.targets[0] if made else None
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
        return _without_data(node.target)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
        return None
    called = source.called(node)
    if called.startswith("torch.nn.init.") and node.args:
        return _without_data(node.args[0])
    if called in [f".{name}_" for name in (*DRAWS, "mul")] and isinstance(node.func, ast.Attribute):
        return _without_data(node.func.value)
    return None


def _without_data(node: ast.expr) -> ast.expr:
    """The weight itself, not its `.data` or a row of it."""
    while isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
        node = node.value
    return node


def _tamed(job: Job, source: Source, node: ast.AST) -> Iterator[Remedy]:
    why = "Weights of an ordinary size keep products, and what comes back through them, inside the range of the type."
    if isinstance(node, ast.Assign):
        assert isinstance(node.value, ast.Call)
        for edit in _smaller_factor(job, source, node.value):
            yield job.remedy("Smaller initial weights", why, edit)
        return
    if isinstance(node, ast.AugAssign):
        yield job.remedy("Weights left at their own size", why, replaced(job.desk, Spelled(source, node.value), 1.0))
        return
    assert isinstance(node, ast.Call)
    called = source.called(node).rsplit(".", 1)[-1]
    weight = node.args[0] if source.called(node).startswith("torch.nn.init.") else None
    gain = next((k.value for k in node.keywords if k.arg == "gain"), None)
    if gain is not None:
        edit = replaced(job.desk, Spelled(source, gain), 1.0)
        yield job.remedy("Gain 1", why, edit)
        return
    if isinstance(node.func, ast.Attribute) and weight is None:
        weight = node.func.value
    if weight is not None and called.rstrip("_") in DRAWS and source.code(weight).endswith((".weight", ".weight.data")):
        function = _init(source, node, "kaiming_normal_")
        text = f"{function}({source.code(weight)})"
        yield job.remedy("Kaiming initialisation", why, put(source, node, text))
    for edit in _smaller_draw(job, source, node, called.rstrip("_")):
        yield job.remedy("Smaller initial weights", why, edit)


def _smaller_draw(job: Job, source: Source, call: ast.Call, name: str) -> Iterator[Edit]:
    """The scale of a draw set to a small number."""
    method = source.called(call).startswith(".")
    positions = {"normal": ("std", 2), "trunc_normal": ("std", 2), "constant": ("val", 1), "fill": ("value", 1)}
    positions |= {"mul": ("other", 1), "uniform": ("b", 2)}
    keyword, at = positions.get(name, ("std", 2))
    at -= method
    given = next((k.value for k in call.keywords if k.arg in (keyword, "to")), None)
    given = call.args[at] if given is None and at < len(call.args) else given
    if given is None:
        return
    small = 1.0 if name == "mul" else SMALL
    value = literal(job.desk, Spelled(source, given))
    yield put(value.source, value.node, written(small)) if value else put(source, given, written(small))


def _smaller_factor(job: Job, source: Source, made: ast.Call) -> Iterator[Edit]:
    """The factor in `Parameter(100 * torch.randn(...))`; without one a factor is added."""
    given = made.args[0] if made.args else None
    if given is None:
        return
    for node in ast.walk(given):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for side in (node.left, node.right):
                if number(side) is not None or isinstance(side, ast.Name | ast.Attribute):
                    yield replaced(job.desk, Spelled(source, side), SMALL)
                    return
    made_of = [source.called(n).rsplit(".", 1)[-1] for n in ast.walk(given) if isinstance(n, ast.Call)]
    if any(name in ("randn", "rand", "full", "ones") for name in made_of):
        yield put(source, given, f"{written(SMALL)} * {atom(source, given)}")
