"""Operators inside of torch's own functions, layers and distributions: the argument that leads there is guarded."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator

from firstnan.records import Remedy
from firstnan.records.operator_families import NORMALISERS
from firstnan.repair.base import Job, Place, remedy
from firstnan.repair.edits import argument, put
from firstnan.repair.guards import KEEPS, Pen, small
from firstnan.repair.reductions import constructed
from firstnan.repair.source import Source, number

WITH_EPS = NORMALISERS | {"normalize", "cosine_similarity"}
UNBOUNDED = ("loc", "logits", "df", "validate_args", "total_count")
SLUGS = (
    "log_of_zero",
    "log_of_negative",
    "div_by_zero",
    "zero_over_zero",
    "pole",
    "sqrt_of_negative",
    "pow_of_zero",
    "overflow",
    "infinite_derivative",
    "where_grad_trap",
    "xlogy_grad_at_zero",
    "arc_out_of_domain",
    "inf_minus_inf",
    "zero_times_inf",
)


def _file(job: Job) -> str:
    """The file inside of torch in which the operator stands, `distributions/beta.py`."""
    site = job.event.library_site if job.event is not None else None
    return "/".join(site.file.replace(os.sep, "/").split("/")[-2:]) if site is not None else ""


@remedy("zero_over_zero", "div_by_zero", "sqrt_grad_at_zero", "infinite_derivative", "low_precision_overflow")
def eps_of_a_normaliser(job: Job) -> Iterator[Remedy]:
    place = job.place
    if place is None or not isinstance(place.node, ast.Call):
        return
    call: ast.Call | None = place.node if place.expr.op in WITH_EPS else None
    if (
        call is None
        and job.event is not None
        and job.event.module_type.endswith(("Norm", "Norm1d", "Norm2d", "Norm3d"))
    ):
        call = constructed(job, place.node)
    given = next((k.value for k in call.keywords if k.arg == "eps"), None) if call is not None else None
    if call is None or (given is not None and (number(given) or 0.0) >= 1e-5):
        return
    eps = small(job.dtype, "1e-5", "1e-3")
    why = f"The spread that is divided by gets {eps} added, so that values that are all equal give 0 and not 0/0."
    yield job.remedy(f"Use eps={eps}", why, argument(place.source, call, "eps", eps))


@remedy("div_by_zero", "zero_over_zero", "overflow", "exp_overflow")
def temperature_of_zero(job: Job) -> Iterator[Remedy]:
    place = job.place
    if place is None or place.expr.op != "gumbel_softmax":
        return
    tau = place.expr.arg(1, "tau")
    if tau is not None:
        for low in ("1e-2", "0.1"):
            why = f"The temperature that the logits are divided by never falls below {low}."
            text = f"max({place.code(tau)}, {low})"
            yield job.remedy(f"Keep the temperature at {low} or above", why, put(place.source, tau, text))


@remedy("exp_overflow")
def exponent_inside_of_a_loss(job: Job) -> Iterator[Remedy]:
    """`F.poisson_nll_loss(x, y)` takes exp(x) by itself."""
    place = job.place
    if place is None or place.expr.library != "torch" or not place.expr.args or place.expr.op == "exp":
        return
    for high in ("10", "5") if job.dtype == "float16" else ("20", "80"):
        why = f"exp({high}) is far inside the range of {job.dtype}; {KEEPS}."
        edit = Pen(place.source).ceiling(place.expr.args[0], high)
        yield job.remedy(f"Keep the first argument at {high} or below", why, edit)


@remedy(*SLUGS)
def value_outside_the_support(job: Job) -> Iterator[Remedy]:
    """`dist.log_prob(x)` with x at the edge of what the distribution can draw."""
    place, file = job.place, _file(job)
    if place is None or not file.startswith("distributions/") or place.expr.op != "log_prob":
        return
    value, eps = place.expr.arg(1, "value"), small(job.dtype, "1e-6")
    if value is None:
        return
    pen, why = Pen(place.source), f"The density is finite there; {KEEPS}."
    if file.endswith(("beta.py", "dirichlet.py", "kumaraswamy.py", "transformed_distribution.py", "transforms.py")):
        edit = pen.between(value, eps, f"1 - {eps}")
        yield job.remedy(f"Keep the value strictly inside of 0 and 1, by {eps}", why, edit)
    yield job.remedy(f"Keep the value at {eps} or above", why, pen.floor(value, eps))


@remedy(*SLUGS)
def parameter_of_a_distribution(job: Job) -> Iterator[Remedy]:
    """A scale, rate or concentration that is 0."""
    file = _file(job)
    if not file.startswith("distributions/"):
        return
    kind = file.removeprefix("distributions/").removesuffix(".py").replace("_", "")
    for place in _calls(job, kind):
        edits, low = [], small(job.dtype, "1e-6")
        assert isinstance(place.node, ast.Call)
        scales = [k.value for k in place.node.keywords if k.arg and k.arg not in UNBOUNDED]
        positional = place.node.args[1:] if len(place.node.args) > 1 else place.node.args
        pen = Pen(place.source)
        edits += [pen.floor(node, low) for node in [*scales, *positional] if number(node) is None]
        if edits:
            why = f"The density divides by it and takes its logarithm; {KEEPS}."
            yield job.remedy(f"Keep the parameters of the distribution at {low} or above", why, *edits)


def _calls(job: Job, kind: str) -> Iterator[Place]:
    """Where the user's files make such a distribution."""
    files = {e.site.file for e in job.scene.trace.events if e.site is not None}
    if job.scene.origin.site is not None:
        files.add(job.scene.origin.site.file)
    for source in (job.desk.source(f) for f in sorted(files)):
        for node in source.nodes if source is not None else ():
            if source is not None and isinstance(node, ast.Call) and _made(source, node) == kind:
                yield Place(source, node)


def _made(source: Source, call: ast.Call) -> str:
    return source.called(call).rsplit(".", 1)[-1].lower()
