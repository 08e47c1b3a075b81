"""Matrices that are nearly singular or degenerate: a small number is added to the diagonal."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from firstnan.records import Remedy
from firstnan.records.operator_families import SPECTRAL, words
from firstnan.repair.context import FailureContext, remedies_for
from firstnan.repair.guards import failing_operation
from firstnan.repair.source import named_before, replace_node

FACTORED = words(
    "cholesky cholesky_ex logdet slogdet det inverse inv inv_ex pinv solve solve_ex cholesky_inverse lu_factor qr"
)


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
