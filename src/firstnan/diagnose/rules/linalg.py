"""Matrices that a factorisation or a solver cannot handle."""

from __future__ import annotations

import re

from firstnan.diagnose.rules.base import ANY, Finding, rule
from firstnan.diagnose.rules.failure import Failure, words

SOLVERS = words(
    "inv inv_ex inverse solve solve_ex solve_triangular triangular_solve lu_solve cholesky_solve "
    "cholesky_inverse lstsq lu_factor_ex pinv"
)
FACTORISATIONS = words(
    "svd eig eigh eigvals eigvalsh qr cholesky cholesky_ex ldl_factor ldl_factor_ex lu lu_factor lu_unpack matrix_exp "
    "matrix_power matrix_rank det slogdet logdet geqrf ormqr tensorinv tensorsolve cond check_errors"
)
SAYS_SO = re.compile(
    r"linalg|converge|decompos|factori[sz]|\b(svd|eigh?|eigen\w*|cholesky|lapack|magma)\b", re.IGNORECASE
)
"""What torch and LAPACK say of a matrix that they could not handle."""
SINGULAR_NODES = words("inv inverse solve slogdet det logdet cholesky solvetriangular lusolve choleskysolve lstsq")


@rule("not_positive_definite", phases=ANY)
def not_positive_definite(failure: Failure) -> Finding | None:
    said = failure.raised
    factored = failure.op.startswith("cholesky") and "solve" not in failure.op and "inverse" not in failure.op
    said_so = "positive-definite" in said or "positive definite" in said
    if failure.phase == "backward" or not (said_so or factored):
        return None
    why = (
        f"`{failure.code}` needs a positive definite matrix, and this one has an eigenvalue that is 0 or "
        "negative. Rounding alone does that to a covariance of too few or nearly equal rows."
    )
    return Finding(why, 0.96, ((f"torch said: {said}",) if said else ()) + failure.input_lines())


@rule("not_positive_definite")
def determinant_not_positive(failure: Failure) -> Finding | None:
    near = {failure.op} | {e.op for e in failure.feeding(3)}
    if failure.op not in ("where", "slogdet") or not near & {"slogdet", "linalg_slogdet"}:
        return None
    if not (failure.nan or failure.inf):
        return None
    why = (
        f"`{failure.code}` takes the log-determinant of a matrix whose determinant is not positive. If it is "
        "meant to be a covariance, it is not positive definite."
    )
    return Finding(why, 0.6, failure.input_lines())


@rule("singular_matrix", phases=ANY)
def singular_matrix(failure: Failure) -> Finding | None:
    said = failure.raised
    if failure.phase == "backward":
        fits = bool(failure.family & SINGULAR_NODES) and failure.op in SOLVERS and not failure.fed_by_nonfinite
    else:
        fits = "singular" in said or (
            failure.op in SOLVERS and bool(failure.nan or failure.inf) and not failure.fed_by_nonfinite
        )
    if not fits:
        return None
    why = (
        f"`{failure.code}` has to invert a matrix that has no inverse. A row or column is zero or a combination "
        "of others, so the solver divides by 0."
    )
    return Finding(why, 0.94, ((f"torch said: {said}",) if said else ()) + failure.input_lines())


@rule("decomposition_failed", phases=ANY)
def decomposition_failed(failure: Failure) -> Finding | None:
    algebra = "linalg" in failure.origin.aten or failure.op in SOLVERS | FACTORISATIONS
    if not failure.raised or not (algebra or SAYS_SO.search(failure.raised)):
        return None
    why = f"`{failure.code}` raised an error instead of returning a value. torch said: {failure.raised}"
    return Finding(why, 0.3, failure.input_lines())
