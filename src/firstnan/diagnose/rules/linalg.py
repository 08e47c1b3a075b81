"""Matrices that a factorisation or a solver cannot handle."""

from __future__ import annotations

import re

from firstnan.diagnose.rules.base import ANY, Finding, rule
from firstnan.diagnose.rules.failure import Failure
from firstnan.records.operator_families import CHOLESKY, DETERMINANTS, MATRIX_ALGORITHMS, SOLVERS

MATRIX_ERROR = re.compile(
    r"linalg|converge|decompos|factori[sz]|\b(svd|eigh?|eigen\w*|cholesky|lapack|magma)\b", re.IGNORECASE
)
"""What torch and LAPACK say about a matrix that they could not handle."""


@rule("not_positive_definite", phases=ANY)
def not_positive_definite(failure: Failure) -> Finding | None:
    said_so = re.search("positive[- ]definite", failure.raised)
    if failure.phase == "backward" or not (said_so or failure.op in CHOLESKY):
        return None
    why = (
        f"`{failure.code}` needs a positive definite matrix, but this one has an eigenvalue of 0 or below. Rounding "
        "alone can do that to a covariance of too few or nearly equal rows."
    )
    return Finding(why, 0.96, failure.raised_lines() + failure.input_lines())


@rule("not_positive_definite")
def determinant_not_positive(failure: Failure) -> Finding | None:
    near = {failure.op} | {e.op for e in failure.feeding(3)}
    if failure.op not in ("where", "slogdet") or "slogdet" not in near or not failure.bad:
        return None
    why = (
        f"`{failure.code}` takes the log-determinant of a matrix whose determinant is not positive. If the matrix "
        "should be a covariance, it is not positive definite."
    )
    return Finding(why, 0.6, failure.input_lines())


@rule("singular_matrix", phases=ANY)
def singular_matrix(failure: Failure) -> Finding | None:
    solved = failure.op in SOLVERS and not failure.fed_by_nonfinite
    if failure.phase == "backward":
        fits = solved and failure.derivative_of(SOLVERS | DETERMINANTS | CHOLESKY)
    else:
        fits = "singular" in failure.raised or (solved and failure.bad > 0)
    if not fits:
        return None
    why = (
        f"`{failure.code}` has to invert a matrix that has no inverse. A row or column is zero or a combination of "
        "others, so the solver divides by 0."
    )
    return Finding(why, 0.94, failure.raised_lines() + failure.input_lines())


@rule("decomposition_failed", phases=ANY)
def decomposition_failed(failure: Failure) -> Finding | None:
    algebra = "linalg" in failure.origin.aten or failure.op in MATRIX_ALGORITHMS
    if not failure.raised or not (algebra or MATRIX_ERROR.search(failure.raised)):
        return None
    why = f"`{failure.code}` raised an error instead of returning a value. torch said: {failure.raised}"
    return Finding(why, 0.3, failure.input_lines())
