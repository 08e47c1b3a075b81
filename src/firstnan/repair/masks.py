"""Masks of -inf: a finite number that is as good, or a floor under what the softmax reads."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from firstnan.records import OpEvent, Remedy
from firstnan.records.operator_families import SOFTMAXES
from firstnan.repair.base import Job, Place, remedy
from firstnan.repair.edits import Edit, atom, before, put
from firstnan.repair.guards import Pen, small, spot
from firstnan.repair.source import Source

FAR = 24
MOST = 8
PADDING = ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask")
INFINITE = frozenset({"math.inf", "torch.inf", "numpy.inf", "math.nan", "torch.nan", "numpy.nan"})


def literal(source: Source, node: ast.AST) -> float | None:
    """The value of `float("-inf")`, `-math.inf`, `torch.nan`...; None where it is anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = literal(source, node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float" and node.args:
        text = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
        try:
            value = float(text) if isinstance(text, str) else 0.0
        except ValueError:
            return None
        return None if math.isfinite(value) else value
    if isinstance(node, ast.Attribute | ast.Name):
        parts = ast.unparse(node).split(".")
        base = source.imported(parts[0], node)
        full = ".".join([base, *parts[1:]]) if base else ""
        return float(full.rsplit(".", 1)[1]) if full in INFINITE else None
    return None


def literals(source: Source, root: ast.AST) -> list[tuple[ast.expr, float]]:
    """The outermost such constants below a node, with the names in it that were given one."""
    value = literal(source, root)
    if value is not None and isinstance(root, ast.expr):
        return [(root, value)]
    if isinstance(root, ast.Name | ast.Attribute) and isinstance(root.ctx, ast.Load):
        statement = source.assigned(root)
        given = statement.value if statement is not None else _constant(source, root)
        found = literal(source, given) if given is not None else None
        if given is not None and found is not None:
            return [(given, found)]
    return [pair for child in ast.iter_child_nodes(root) for pair in literals(source, child)]


def _constant(source: Source, name: ast.expr) -> ast.expr | None:
    """What a module constant, a class attribute or `self.x` is given anywhere in the file, if only once."""
    text = ast.unparse(name)
    given = [
        n.value for n in source.nodes if isinstance(n, ast.Assign) and any(ast.unparse(t) == text for t in n.targets)
    ]
    return given[0] if len(given) == 1 else None


def makers(job: Job) -> list[OpEvent]:
    """The events before the origin that put infinities or NaN there on purpose, nearest first."""
    start = job.scene.event or job.event
    if start is None:
        return []
    own = [e for e in (start, job.event) if e is not None]
    around = [*own, *job.scene.trace.feeding(start, FAR)]
    if job.event is not None and job.event is not start:
        around += job.scene.trace.feeding(job.event, FAR)
    meant = [e for e in around if e.on_purpose or any(s in (math.inf, -math.inf) for _, s in e.scalars)]
    return list({e.site: e for e in reversed(meant)}.values())[::-1][:MOST]


def _replaced(job: Job, low: str, high: str) -> Iterator[tuple[Place, list[Edit]]]:
    """For each statement that writes the infinities: its constants made finite."""
    known: set[tuple[str, int]] = set()
    for place in [p for e in makers(job) if (p := job.place_of(e.site)) is not None] + (
        [job.place] if job.place else []
    ):
        edits = []
        for node, value in literals(place.source, place.source.statement(place.node)):
            key = (place.source.file, place.source.span(node)[0])
            if key not in known and math.isinf(value):
                known.add(key)
                edits.append(put(place.source, node, low if value < 0 else high))
        if edits:
            yield place, edits


@remedy(
    "fully_masked_softmax",
    "masked_label",
    "zero_times_inf",
    "logsumexp_grad_all_inf",
    "inf_minus_inf",
    "where_grad_trap",
)
def finite_mask(job: Job) -> Iterator[Remedy]:
    low = small(job.dtype, "-1e9", "-1e4")
    if job.cause.slug == "masked_label":
        low = "-1e4"
    found = list(_replaced(job, low, low.removeprefix("-")))
    edits = [edit for _, group in found for edit in group]
    if edits:
        yield job.remedy(
            f"Mask with {low} instead of -inf",
            f"exp({low}) is 0 as well, so rows with something to attend to do not change; a row without has a value.",
            *edits,
        )


@remedy("fully_masked_softmax", "logsumexp_grad_all_inf")
def floor_under_the_scores(job: Job) -> Iterator[Remedy]:
    place = job.place
    if place is None:
        return
    found, low = spot(job, *SOFTMAXES, "softmin", "logsumexp", "logcumsumexp"), small(job.dtype, "-1e9", "-1e4")
    layer = place.expr.called.startswith("self.") and job.event is not None and "oftmax" in job.event.module_type
    nodes = found.expr.args[:1] if found is not None else place.expr.args[:1] if layer else ()
    both = spot(job, "logaddexp", "logaddexp2")
    if both is not None:
        nodes = both.expr.args[:2]
    if nodes:
        yield job.remedy(
            f"Keep the scores at {low} or above",
            f"exp({low}) is 0 as well, so rows with something to attend to do not change; a row without has a value.",
            *(Pen(place.source).floor(node, low) for node in nodes),
        )


@remedy("fully_masked_softmax", "inf_minus_inf")
def floor_before_the_statement(job: Job) -> Iterator[Remedy]:
    """exp(x - x.max()) reads x twice: it is made finite before."""
    place = job.place
    if place is None or place.expr.op not in ("sub", "div") or not isinstance(place.expr.args[0], ast.Name):
        return
    name, low = place.expr.args[0].id, small(job.dtype, "-1e9", "-1e4")
    yield job.remedy(
        f"Keep `{name}` at {low} or above",
        f"exp({low}) is 0 as well, so rows with an entry that counts do not change; a row without has a value.",
        before(place.source, place.node, f"{name} = {name}.clamp_min({low})"),
    )


@remedy("fully_masked_softmax")
def unmask_empty_rows(job: Job) -> Iterator[Remedy]:
    place = job.place
    if place is None or not isinstance(place.node, ast.Call):
        return
    source, expr = place.source, place.expr
    for name in PADDING:
        mask = expr.keywords.get(name)
        if mask is not None:
            plain = atom(source, mask)
            yield job.remedy(
                "Unmask the rows that are masked as a whole",
                "A row without anything to attend to attends to everything; all other rows stay as they are.",
                put(source, mask, f"{plain} & ~{plain}.all(-1, keepdim=True)"),
            )
    if expr.op == "scaled_dot_product_attention":
        mask = expr.arg(3, "attn_mask")
        if mask is None:
            return
        plain, low = atom(source, mask), small(job.dtype, "-1e9", "-1e4")
        title, why = "Unmask the rows that are masked as a whole", "Only rows without anything to attend to change."
        yield job.remedy(title, why, put(source, mask, f"{plain} | ~{plain}.any(-1, keepdim=True)"))
        yield job.remedy(title, why, put(source, mask, f"{plain}.clamp_min({low})"))


@remedy("masked_label")
def floor_under_the_logits(job: Job) -> Iterator[Remedy]:
    found = spot(job, "cross_entropy", "nll_loss", "gather", "log_softmax")
    if found is not None:
        yield job.remedy(
            "Keep the logits at -1e4 or above",
            "A label on a masked class costs much instead of infinitely much; other labels cost what they did.",
            found.pen.floor(found.expr.args[0], "-1e4"),
        )


@remedy("zero_times_inf", "inf_minus_inf", "where_grad_trap")
def floor_under_the_infinite_factor(job: Job) -> Iterator[Remedy]:
    found = spot(job, "mul", "matmul", "sub", "add", "div")
    if found is None or found.event is None:
        return
    tensors = [i for i in found.event.inputs if i.name in ("self", "other", "mat2", "batch1", "batch2")]
    edits = []
    for operand, node in zip(tensors, found.expr.args, strict=False):
        if operand.stat is not None and operand.stat.neginf:
            edits.append(found.pen.floor(node, "-1e4"))
        elif operand.stat is not None and operand.stat.posinf:
            edits.append(found.pen.ceiling(node, "1e4"))
    if edits:
        yield job.remedy(
            "Make the infinite factor finite", "0 times a finite number is 0; finite factors stay as they are.", *edits
        )


@remedy("nan_constant")
def finite_constant(job: Job) -> Iterator[Remedy]:
    for value in ("0.0", "1.0"):
        for event in makers(job):
            place = job.place_of(event.site)
            if place is None:
                continue
            found = [n for n, v in literals(place.source, place.source.statement(place.node)) if math.isnan(v)]
            if found:
                yield job.remedy(
                    f"Use {value} where there is no value, instead of NaN",
                    "What is undefined takes part as an ordinary number.",
                    *(put(place.source, node, value) for node in found),
                )
                break
