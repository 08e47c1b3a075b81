"""Operators inside torch's functions, layers and distributions: their argument is guarded."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator

from firstnan.records import Remedy
from firstnan.records.operator_families import NORMALISERS, words
from firstnan.repair.context import FailureContext, Location, remedies_for
from firstnan.repair.guards import GuardWriter, why_below
from firstnan.repair.reductions import constructed
from firstnan.repair.source import SourceFile, insert_after, literal_value, replace_node, set_argument

WITH_EPS = NORMALISERS | {"normalize", "cosine_similarity"}
UNBOUNDED = ("loc", "logits", "df", "validate_args", "total_count")
DISTRIBUTION_SLUGS = words(
    "log_of_zero log_of_negative div_by_zero zero_over_zero pole sqrt_of_negative pow_of_zero overflow "
    "infinite_derivative where_grad_trap xlogy_grad_at_zero arc_out_of_domain inf_minus_inf zero_times_inf"
)


def _library_file(context: FailureContext) -> str:
    """The file inside torch that called the operator, `distributions/beta.py`."""
    site = context.event.library_site if context.event is not None else None
    return "/".join(site.file.replace(os.sep, "/").split("/")[-2:]) if site is not None else ""


def _takes_eps(source: SourceFile, layer: str) -> bool:
    """Whether a normaliser can be given an eps: torch's can, one of the program's own if its arguments say so."""
    own = [n for n in source.nodes if isinstance(n, ast.ClassDef) and n.name == layer]
    made = [f.args for n in own for f in n.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
    return not own or any(a.arg == "eps" for args in made for a in (*args.args, *args.kwonlyargs))


@remedies_for("zero_over_zero", "div_by_zero", "sqrt_grad_at_zero", "infinite_derivative", "low_precision_overflow")
def eps_of_a_normaliser(context: FailureContext) -> Iterator[Remedy]:
    location = context.location
    if location is None or not isinstance(location.node, ast.Call):
        return
    call: ast.Call | None = location.node if location.expr.op in WITH_EPS else None
    layer = context.event.module_type if context.event is not None else ""
    if call is None and layer.endswith(("Norm", "Norm1d", "Norm2d", "Norm3d")):
        call = constructed(context, location.node) if _takes_eps(location.source, layer) else None
    given = next((k.value for k in call.keywords if k.arg == "eps"), None) if call is not None else None
    eps = context.epsilon("1e-5", "1e-3")
    why = f"{eps} is added to the denominator, so equal values give 0 instead of 0/0."
    if call is None:
        yield from _eps_afterwards(context, location.source, location.node, eps, why)
    elif given is None or (literal_value(given) or 0.0) < 1e-5:
        yield context.remedy(f"Use eps={eps}", why, set_argument(location.source, call, "eps", eps))


def _eps_afterwards(
    context: FailureContext, source: SourceFile, call: ast.Call, eps: str, why: str
) -> Iterator[Remedy]:
    """For a layer of torch that something else has made, such as a registry from a configuration file."""
    event, layer = context.event, ast.unparse(call.func)
    if event is None or event.op not in NORMALISERS or event.library_site is None or not layer.startswith("self."):
        return
    made = [n for n in source.nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call)]
    made = [n for n in made if [ast.unparse(t) for t in n.targets] == [layer] and _same_class(source, n, call)]
    if len(made) == 1:
        why += " If its eps comes from a configuration file, change it there."
        edit = insert_after(source, made[0], f"{layer}.eps = {eps}")
        yield context.remedy(f"Use eps={eps} in `{layer}`", why, edit)


def _same_class(source: SourceFile, one: ast.AST, other: ast.AST) -> bool:
    around = [next((p for p in source.parents(n) if isinstance(p, ast.ClassDef)), None) for n in (one, other)]
    return around[0] is not None and around[0] is around[1]


@remedies_for("div_by_zero", "zero_over_zero", "overflow", "exp_overflow")
def temperature_of_zero(context: FailureContext) -> Iterator[Remedy]:
    location = context.location
    if location is None or location.expr.op != "gumbel_softmax":
        return
    tau = location.expr.arg(1, "tau")
    if tau is not None:
        for low in ("1e-2", "0.1"):
            why = f"The logits are divided by {low} or more."
            text = f"max({location.code(tau)}, {low})"
            yield context.remedy(
                f"Keep the temperature at {low} or above", why, replace_node(location.source, tau, text)
            )


@remedies_for("exp_overflow")
def exponent_inside_a_loss(context: FailureContext) -> Iterator[Remedy]:
    """`F.poisson_nll_loss(x, y)` computes exp(x) itself."""
    location = context.location
    if location is None or location.expr.library != "torch" or not location.expr.args:
        return
    if location.expr.op in ("exp", "exp2", "expm1", "cosh", "sinh"):  # the user's own, which is guarded as such
        return
    for high in ("10", "5") if context.dtype == "float16" else ("20", "80"):
        edit = GuardWriter(location.source).ceiling(location.expr.args[0], high)
        why = why_below("exp", high, context.dtype)
        yield context.remedy(f"Keep the first argument at {high} or below", why, edit)


@remedies_for(*DISTRIBUTION_SLUGS)
def value_outside_the_support(context: FailureContext) -> Iterator[Remedy]:
    """`dist.log_prob(x)` with x at the boundary of the distribution's support."""
    location, file = context.location, _library_file(context)
    if location is None or not file.startswith("distributions/") or location.expr.op != "log_prob":
        return
    value, eps = location.expr.arg(1, "value"), context.epsilon("1e-6")
    if value is None:
        return
    writer, why = GuardWriter(location.source), "The density is finite there; values inside that range are unchanged."
    if file.endswith(("beta.py", "dirichlet.py", "kumaraswamy.py", "transformed_distribution.py", "transforms.py")):
        edit = writer.between(value, eps, f"1 - {eps}")
        yield context.remedy(f"Keep the value between {eps} and 1 - {eps}", why, edit)
    yield context.remedy(f"Keep the value at {eps} or above", why, writer.floor(value, eps))


@remedies_for(*DISTRIBUTION_SLUGS)
def parameter_of_a_distribution(context: FailureContext) -> Iterator[Remedy]:
    """A scale, rate or concentration that is 0."""
    file = _library_file(context)
    if not file.startswith("distributions/"):
        return
    kind = file.removeprefix("distributions/").removesuffix(".py").replace("_", "")
    for location in _calls(context, kind):
        low, writer = context.epsilon("1e-6"), GuardWriter(location.source)
        scales = [k.value for k in location.node.keywords if k.arg and k.arg not in UNBOUNDED]
        positional = location.node.args[1:] if len(location.node.args) > 1 else location.node.args
        edits = [writer.floor(node, low) for node in [*scales, *positional] if literal_value(node) is None]
        why = f"The density divides by them and takes their logarithm; parameters above {low} are unchanged."
        yield context.remedy(f"Keep the parameters of the distribution at {low} or above", why, *edits)


def _calls(context: FailureContext, kind: str) -> Iterator[Location[ast.Call]]:
    """The calls that create such a distribution."""
    files = {e.site.file for e in context.failure.trace.events if e.site is not None}
    if context.failure.origin.site is not None:
        files.add(context.failure.origin.site.file)
    for source in filter(None, map(context.files.get, sorted(files))):
        for call in source.calls:
            name = source.called_name(call)
            if name.lower() == kind and name != kind:  # `rng.gamma` draws with numpy
                yield Location(source, call)
