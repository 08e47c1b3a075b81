"""Weights of zeros that are divided by their own norm (weight and spectral normalisation): other initial values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from firstnan.diagnose.rules.overflow import weights_feeding
from firstnan.records import Edit, OpEvent, Remedy, TensorStat
from firstnan.records.operator_families import NORMS, WEIGHT_NORMS
from firstnan.repair.context import FailureContext, remedies_for
from firstnan.repair.parameters import USUAL_STD
from firstnan.repair.settings import OptimizerSetup
from firstnan.repair.source import SourceFile, literal_value, parenthesized, replace_node

STORED_AS = re.compile(r"(?:\.|^)(?:weight_orig|weight_v|weight_g|parametrizations\.(\w+)\.original\d?)$")
"""How torch calls the weight that a normalisation computes the used one from."""
WEIGHTS = ("weight", "weight_orig", "weight_v", "original", "original0", "original1")
FILLED = {"zeros": "randn", "zeros_like": "randn_like", "new_zeros": ""}
NEAR = 12


@remedies_for("zero_over_zero")
def small_weights_instead_of_zeros(context: FailureContext) -> Iterator[Remedy]:
    for layer, attribute in _zero_weights(context):
        edits = list(_written_zeros(context, layer, attribute))
        if not edits:
            continue
        name = f"{layer}.{attribute}" if layer else attribute
        for edit in edits:
            yield context.remedy(
                f"Start {name} with small random numbers instead of zeros",
                "A weight of zeros has no direction, so it cannot be divided by its norm.",
                edit,
            )
        return


def _zero_weights(context: FailureContext) -> Iterator[tuple[str, str]]:
    """The layer and the attribute of each weight of zeros whose norm is 0 here."""
    event = context.event
    if event is None or context.failure.phase != "forward":
        return
    near = [event, *context.failure.trace.feeding(event, NEAR)]
    normed = any(e.op in NORMS | WEIGHT_NORMS | {"dot", "mv", "sqrt"} for e in near)
    if not normed or not _is_norm(context, event):
        return
    for label in dict.fromkeys([*_labels_of_zeros(context, event), *_labels_by_norm(near)]):
        found = STORED_AS.search(label)
        if found is not None:
            yield _last_name(label[: found.start()]), found.group(1) or "weight"
        else:
            yield _last_name(label.rpartition(".")[0]), label.rpartition(".")[2]


def _labels_of_zeros(context: FailureContext, event: OpEvent) -> Iterator[str]:
    """The parameters whose statistics show zeros; in one that torch divides by the norm of its rows, a row of zeros."""
    direct = {i.label for i in event.inputs if i.role == "parameter"}
    for label, stat in weights_feeding(context.failure.trace, event):
        if stat.min == stat.max == 0 or (label in direct and event.op in WEIGHT_NORMS and stat.zeros):
            yield label


def _labels_by_norm(events: list[OpEvent]) -> Iterator[str]:
    """The parameters of which every norm is 0."""
    for event in events:
        norm = event.outputs[0] if event.op in NORMS and event.outputs else None
        if norm is not None and norm.min == norm.max == 0:
            yield from (i.label for i in event.inputs if i.role == "parameter" and i.label)


def _is_norm(context: FailureContext, event: OpEvent) -> bool:
    """Whether a weight of zeros, or what is computed from it, is divided here."""
    tops: list[TensorStat] = [i.stat for i in event.inputs if i.name in ("self", "v") and i.stat is not None]
    return event.op in WEIGHT_NORMS | {"div"} and any(stat.zeros for stat in tops)


def _last_name(path: str) -> str:
    """`out` of `decoder.out`; "" if the layer only has a number."""
    last = path.rpartition(".")[2]
    return "" if last.isdigit() else last


def _written_zeros(context: FailureContext, layer: str, attribute: str) -> Iterator[Edit]:
    """Edits of the places that write the zeros; those that name the layer first."""
    exact: list[Edit] = []
    others: list[Edit] = []
    for source in OptimizerSetup(context).surroundings:
        for node in source.nodes:
            found = _zeros_at(source, node)
            if found is None:
                continue
            weight, edit = found
            owner, name = _owner_and_name(weight)
            if name != attribute and not (attribute == "weight" and name in WEIGHTS):
                continue
            named = owner == layer or owner == "self" or attribute not in WEIGHTS
            (exact if named else others).append(edit)
    yield from (*exact, *others)


def _owner_and_name(weight: ast.expr) -> tuple[str, str]:
    """`b` and `weight` of `self.b.weight.data`."""
    while isinstance(weight, ast.Attribute) and weight.attr == "data":
        weight = weight.value
    if not isinstance(weight, ast.Attribute):
        return "", getattr(weight, "id", "")
    owner = weight.value
    if isinstance(owner, ast.Attribute) and owner.attr == "weight" and weight.attr.startswith("original"):
        return "", weight.attr  # layer.parametrizations.weight.original
    return getattr(owner, "attr", "") or getattr(owner, "id", ""), weight.attr


def _zeros_at(source: SourceFile, node: ast.AST) -> tuple[ast.expr, Edit] | None:
    """The weight that a node fills with zeros, and the edit that gives it small random numbers."""
    if isinstance(node, ast.Call):
        return _zeros_by_call(source, node)
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult) and literal_value(node.value) == 0:
        return node.target, replace_node(source, node.value, str(USUAL_STD))
    if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.targets[0], ast.Attribute):
        return None
    for call in ast.walk(node.value):
        if isinstance(call, ast.Call) and FILLED.get(source.called_name(call)):
            made, called = source.called_name(call), source.called(call)
            if called != f"torch.{made}":
                return None
            end = source.span(call)[1]
            head = source.code(call.func).removesuffix(made) + FILLED[made]
            text = f"{USUAL_STD} * {head}{source.text[source.span(call.func)[1] : end]}"
            return node.targets[0], replace_node(source, call, text)
    return None


def _zeros_by_call(source: SourceFile, call: ast.Call) -> tuple[ast.expr, Edit] | None:
    called = source.called(call)
    if called in ("torch.nn.init.zeros_", "torch.nn.init.constant_") and call.args:
        value = literal_value(call.args[1]) if len(call.args) > 1 else None
        if called.endswith("constant_") and value != 0:
            return None
        text = f"{source.spell('torch.nn.init.normal_', call)}({source.code(call.args[0])}, std={USUAL_STD})"
        return call.args[0], replace_node(source, call, text)
    if called in (".zero_", ".fill_", ".mul_") and isinstance(call.func, ast.Attribute):
        if called != ".zero_" and (not call.args or literal_value(call.args[0]) != 0):
            return None
        text = f"{parenthesized(source, call.func.value)}.normal_(std={USUAL_STD})"
        return call.func.value, replace_node(source, call, text)
    return None
