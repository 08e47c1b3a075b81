"""Matrices that are nearly singular or degenerate: a small number is added to the diagonal."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from firstnan.records import Remedy, Trace
from firstnan.records.operator_families import COPIES, SPECTRAL, VIEWS, words
from firstnan.repair.context import FailureContext, remedies_for
from firstnan.repair.guards import failing_operation
from firstnan.repair.source import named_before, replace_node

FACTORED = words(
    "cholesky cholesky_ex logdet slogdet det inverse inv inv_ex pinv solve solve_ex cholesky_inverse lu_factor qr"
)
MOST_BEFORE = 8
"""How many operators back the product that makes the matrix may be."""


@remedies_for("log_of_negative", "log_of_zero")
def log_of_the_absolute_determinant(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, "logdet")
    if found is not None and isinstance(found.expr.node, ast.expr) and not _is_gram_matrix(context):
        source, matrix = found.location.source, found.expr.args[0]
        torch = source.spell("torch", matrix)
        yield context.remedy(
            "Take the logarithm of the absolute determinant",
            "It is defined for a negative determinant too; for a positive one the result is unchanged.",
            replace_node(source, found.expr.node, f"{torch}.linalg.slogdet({source.code(matrix)})[1]"),
        )


def _is_gram_matrix(context: FailureContext) -> bool:
    """Whether the matrix is the product of one and its transpose: then a determinant below 0 is a rounding error."""
    trace, event = context.failure.trace, context.event
    near = trace.feeding(event, MOST_BEFORE) if event is not None else []
    product = next((e for e in near if e.op in ("mm", "bmm", "matmul")), None)
    if product is None or len(product.inputs) < 2:
        return False
    sides = [_without_views(trace, operand.producer) for operand in product.inputs[:2]]
    return sides[0] is not None and sides[0] == sides[1]


def _without_views(trace: Trace, at: int | None) -> int | None:
    """The operator that computed a tensor, before it was transposed or reshaped."""
    while at is not None and trace.events[at].op in VIEWS | COPIES:
        at = next((i.producer for i in trace.events[at].inputs), None)
    return at


@remedies_for("not_positive_definite", "singular_matrix", "log_of_negative", "log_of_zero", "decomposition_failed")
def add_to_the_diagonal(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, *FACTORED)
    if found is None:
        return
    source, matrix = found.location.source, found.expr.args[0]
    torch, (code, plain, named) = source.spell("torch", matrix), named_before(source, matrix, "matrix")
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


@remedies_for("degenerate_decomposition", "decomposition_failed")
def tell_equal_values_apart(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, *SPECTRAL, "matrix_rank", "qr")
    if found is None:
        return
    source, matrix = found.location.source, found.expr.args[0]
    torch, (code, plain, named) = source.spell("torch", matrix), named_before(source, matrix, "matrix")
    for size in ("1e-5", "1e-3"):
        steps = f"{torch}.arange(1, {plain}.shape[-1] + 1, device={plain}.device)"
        eye = f"{torch}.eye(*{plain}.shape[-2:], dtype={plain}.dtype, device={plain}.device)"
        yield context.remedy(
            f"Add {size}, twice {size}, ... to the diagonal",
            "Equal values now differ a little, so backward does not divide by a difference of 0.",
            *named,
            replace_node(source, matrix, f"{code} + {size} * {eye} * {steps}"),
        )
