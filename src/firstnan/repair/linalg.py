"""Matrices at the edge of what a factorisation can handle: a little on the diagonal."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from firstnan.records import Remedy
from firstnan.records.operator_families import SPECTRAL
from firstnan.repair.base import Job, remedy
from firstnan.repair.edits import Edit, atom, before, put
from firstnan.repair.guards import spot
from firstnan.repair.source import Source

FACTORED = (
    "cholesky",
    "cholesky_ex",
    "logdet",
    "slogdet",
    "det",
    "inverse",
    "inv",
    "inv_ex",
    "pinv",
    "solve",
    "solve_ex",
    "cholesky_inverse",
    "lu_factor",
    "qr",
)
LONG = 16
SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)


@remedy("log_of_negative", "log_of_zero")
def log_of_the_absolute_determinant(job: Job) -> Iterator[Remedy]:
    found = spot(job, "logdet")
    if found is not None and isinstance(found.expr.node, ast.expr):
        source, matrix = found.place.source, found.expr.args[0]
        yield job.remedy(
            "Take the logarithm of the absolute determinant",
            "A negative determinant has one; a positive determinant gives the same number as before.",
            put(source, found.expr.node, f"{source.spell('torch', matrix)}.linalg.slogdet({source.code(matrix)})[1]"),
        )


@remedy("not_positive_definite", "singular_matrix", "log_of_negative", "log_of_zero", "decomposition_failed")
def add_to_the_diagonal(job: Job) -> Iterator[Remedy]:
    found = spot(job, *FACTORED)
    if found is None:
        return
    source, matrix = found.place.source, found.expr.args[0]
    torch, (code, plain, named) = source.spell("torch", matrix), _named(source, matrix)
    eye = f"{torch}.eye({plain}.shape[-1], dtype={plain}.dtype, device={plain}.device)"
    for size in ("1e-6", "1e-4", "1e-2", "0.1"):
        if size == "1e-4" and "cholesky" in found.expr.op:
            smallest = f"{torch}.linalg.eigvalsh({plain}.detach())[..., :1, None]"
            yield job.remedy(
                "Add to the diagonal what the smallest eigenvalue lacks",
                "A matrix that is positive definite stays as it is; another one becomes so.",
                *named,
                put(source, matrix, f"{code} + (1e-6 - {smallest}).clamp_min(0) * {eye}"),
            )
        yield job.remedy(
            f"Add {size} to the diagonal",
            f"Every eigenvalue rises by {size}, so that none is 0 or below it by rounding.",
            *named,
            put(source, matrix, f"{code} + {size} * {eye}"),
        )


def _named(source: Source, matrix: ast.expr) -> tuple[str, str, list[Edit]]:
    """The matrix as it is written in a sum and before a dot; where that is long it gets a name in a line before."""
    code = source.code(matrix)
    inside = source.parents(matrix)
    around = inside[: inside.index(source.statement(matrix))]
    movable = not any(isinstance(n, ast.Lambda | ast.comprehension | ast.ListComp | ast.IfExp) for n in around)
    if len(code) <= LONG or "\n" in code or not movable or not isinstance(source.statement(matrix), SIMPLE):
        return code, atom(source, matrix), []
    return "matrix", "matrix", [before(source, matrix, f"matrix = {code}")]


@remedy("degenerate_decomposition", "decomposition_failed")
def tell_equal_values_apart(job: Job) -> Iterator[Remedy]:
    found = spot(job, *SPECTRAL, "matrix_rank", "qr")
    if found is None:
        return
    source, matrix = found.place.source, found.expr.args[0]
    torch, (code, plain, named) = source.spell("torch", matrix), _named(source, matrix)
    for size in ("1e-5", "1e-3"):
        ladder = f"{torch}.arange(1, {plain}.shape[-1] + 1, device={plain}.device)"
        eye = f"{torch}.eye(*{plain}.shape[-2:], dtype={plain}.dtype, device={plain}.device)"
        yield job.remedy(
            f"Add {size}, twice {size}, ... to the diagonal",
            "Values that were equal differ a little, so that backward does not divide by their difference 0.",
            *named,
            put(source, matrix, f"{code} + {size} * {eye} * {ladder}"),
        )
