"""Matrices that a factorisation or a solver cannot handle."""

from __future__ import annotations

from firstnan.rules.base import ANY, Finding, rule
from firstnan.rules.scene import Scene, words

SOLVERS = words(
    "inv inv_ex inverse solve solve_ex solve_triangular triangular_solve lu_solve cholesky_solve "
    "cholesky_inverse lstsq lu_factor_ex pinv"
)
SINGULAR_NODES = words("inv inverse solve slogdet det logdet cholesky solvetriangular lusolve choleskysolve lstsq")


def _raised(scene: Scene) -> str:
    return (scene.event.raised or "") if scene.event else ""


@rule("not_positive_definite", phases=ANY)
def not_positive_definite(scene: Scene) -> Finding | None:
    text = _raised(scene)
    factored = scene.op.startswith("cholesky") and "solve" not in scene.op and "inverse" not in scene.op
    said_so = "positive-definite" in text or "positive definite" in text
    if scene.phase == "backward" or not (said_so or factored):
        return None
    said = text.strip().splitlines()[0] if text.strip() else ""
    why = (
        f"`{scene.code}` needs a positive definite matrix, and this one has an eigenvalue that is 0 or "
        "negative. Rounding alone does that to a covariance of too few or nearly equal rows."
    )
    return Finding(why, 0.96, ((f"torch said: {said}",) if said else ()) + scene.input_lines())


@rule("not_positive_definite")
def determinant_not_positive(scene: Scene) -> Finding | None:
    near = {scene.op} | {e.op for e in scene.feeding(3)}
    if scene.op not in ("where", "slogdet") or not near & {"slogdet", "linalg_slogdet"}:
        return None
    if not (scene.nan or scene.inf):
        return None
    why = (
        f"`{scene.code}` takes the log-determinant of a matrix whose determinant is not positive. If it is "
        "meant to be a covariance, it is not positive definite."
    )
    return Finding(why, 0.6, scene.input_lines())


@rule("singular_matrix", phases=ANY)
def singular_matrix(scene: Scene) -> Finding | None:
    text = _raised(scene)
    if scene.phase == "backward":
        fits = bool(scene.family & SINGULAR_NODES) and scene.op in SOLVERS and not scene.fed_by_nonfinite
    else:
        fits = "singular" in text or (
            scene.op in SOLVERS and bool(scene.nan or scene.inf) and not scene.fed_by_nonfinite
        )
    if not fits:
        return None
    said = text.strip().splitlines()[0] if text.strip() else ""
    why = (
        f"`{scene.code}` has to invert a matrix that has no inverse. A row or column is zero or a combination "
        "of others, so the solver divides by 0."
    )
    return Finding(why, 0.94, ((f"torch said: {said}",) if said else ()) + scene.input_lines())


@rule("decomposition_failed", phases=ANY)
def decomposition_failed(scene: Scene) -> Finding | None:
    text = _raised(scene)
    if not text:
        return None
    why = (
        f"`{scene.code}` raised an error instead of returning a value. torch said: "
        f"{text.strip().splitlines()[0] if text.strip() else text}"
    )
    return Finding(why, 0.3, scene.input_lines())
