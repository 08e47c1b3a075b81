"""The rules on what torch really dispatches: run a snippet under the tracer, blame it, and read the first cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from firstnan.diagnose.blame import blame
from firstnan.diagnose.rules import explain
from firstnan.records import Cause, History
from firstnan.tracing.tracer import Tracer

INF, NAN = float("inf"), float("nan")
Make = Callable[[Callable[..., Tensor]], Tensor]


def causes_of(make: Make) -> list[Cause]:
    """Runs forward and backward; `make` gets a function that makes leaf tensors and returns the loss."""
    leaves: list[Tensor] = []

    def leaf(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
        leaves.append(torch.tensor(values, dtype=dtype, requires_grad=True))
        return leaves[-1]

    tracer, loss = Tracer(), None
    tracer.region = "step"
    with tracer:
        try:
            loss = make(leaf).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        except torch.linalg.LinAlgError:
            pass
    trace = tracer.trace()
    seen = [loss] if loss is not None else []
    bad = [tracer.last_bad(t) for t in (*seen, *(x.grad for x in leaves if x.grad is not None))]
    noticed = [e.index for e in trace.events if e.raised] or [i for i in bad if i is not None]
    origin = blame(trace, noticed, loss_is_finite=not bad or bad[0] is None).origin
    assert origin is not None
    return explain(origin, trace, History())


def masked(x: Tensor, *where: int) -> Tensor:
    return x.masked_fill(torch.tensor([bool(w) for w in where]), -INF)


CASES: list[tuple[str, str, Make]] = [
    ("log", "log_of_zero", lambda t: t(0.0, 0.7).log()),
    ("log_negative", "log_of_negative", lambda t: t(-0.2, 0.7).log()),
    ("logdet", "log_of_negative", lambda t: torch.logdet(torch.diag_embed(t(-1.0, 1.0)))),
    ("logdet_singular", "log_of_zero", lambda t: torch.logdet(torch.diag_embed(t(0.0, 1.0)))),
    ("sqrt_negative", "sqrt_of_negative", lambda t: t(-1.0, 2.0).sqrt()),
    ("rsqrt", "div_by_zero", lambda t: t(0.0, 2.0).rsqrt()),
    ("one_over", "div_by_zero", lambda t: 1 / t(0.0, 2.0)),
    ("python_zero", "div_by_zero", lambda t: t(1.0) / 0.0),
    ("unit_vector", "zero_over_zero", lambda t: (lambda x: x / x.norm())(t(0.0, 0.0))),
    ("masked_mean", "zero_over_zero", lambda t: (t(1.0, 2.0) * torch.zeros(2)).sum() / torch.zeros(2).sum()),
    ("layer_norm", "zero_over_zero", lambda t: functional.layer_norm(t(1.0, 1.0), (2,), eps=0.0)),
    ("mask_times_inf", "zero_times_inf", lambda t: t(1.0, 2.0) + torch.tensor([0.0, 1.0]) * -INF),
    ("soft_label", "zero_times_inf", lambda t: masked(t(1.0, 2.0), 0, 1).log_softmax(0) * torch.tensor([1.0, 0.0])),
    ("exp", "exp_overflow", lambda t: t(100.0).exp()),
    ("exp_half", "low_precision_overflow", lambda t: t(20.0, dtype=torch.float16).exp()),
    ("cast", "low_precision_overflow", lambda t: t(1e6).half().float()),
    (
        "matmul_half",
        "low_precision_overflow",
        lambda t: t(300.0, dtype=torch.float16)[None] @ t(300.0, dtype=torch.float16),
    ),
    ("matmul", "overflow", lambda t: t(1e30, 1e30) @ t(1e30, 1e30)),
    ("softmax", "fully_masked_softmax", lambda t: masked(t(1.0, 2.0), 1, 1).softmax(0)),
    ("own_softmax", "fully_masked_softmax", lambda t: (lambda x: (x - x.amax(0)).exp())(masked(t(1.0, 2.0), 1, 1))),
    ("own_softmax_2", "fully_masked_softmax", lambda t: (lambda x: x.exp() / x.exp().sum())(masked(t(1.0, 2.0), 1, 1))),
    ("label", "masked_label", lambda t: functional.cross_entropy(masked(t(1.0, 2.0), 0, 1)[None], torch.tensor([1]))),
    ("gather", "masked_label", lambda t: -masked(t(1.0, 2.0), 0, 1).log_softmax(0).gather(0, torch.tensor([1]))),
    ("tag", "masked_label", lambda t: t(0.5)[0] + masked(t(1.0, 2.0), 0, 1)[torch.tensor(1)]),
    ("ignored", "empty_reduction", lambda t: functional.cross_entropy(t(1.0, 2.0)[None], torch.tensor([-100]))),
    ("nothing", "empty_reduction", lambda t: (lambda x: x[x > 5].mean())(t(1.0, 2.0))),
    ("std", "single_sample_variance", lambda t: t(1.0).std()),
    ("var_dim", "single_sample_variance", lambda t: t(1.0, 2.0)[:, None].var(1)),
    ("pow_zero", "pow_of_zero", lambda t: t(0.0, 2.0) ** -1.5),
    ("pow_negative", "pow_of_negative", lambda t: t(-1.0, 2.0) ** 0.3),
    ("lgamma", "pole", lambda t: t(0.0, 2.0).lgamma()),
    ("atanh", "pole", lambda t: t(1.0, 0.2).atanh()),
    ("acos", "arc_out_of_domain", lambda t: t(1.5, 0.2).acos()),
    ("cholesky", "not_positive_definite", lambda t: torch.linalg.cholesky(torch.diag_embed(t(-1.0, 1.0)))),
    ("inverse", "singular_matrix", lambda t: torch.linalg.inv(torch.diag_embed(t(0.0, 1.0)))),
    ("constant", "nan_constant", lambda t: torch.where(torch.tensor([True, False]), torch.tensor(NAN), t(1.0, 2.0))),
    ("sqrt", "sqrt_grad_at_zero", lambda t: t(0.0, 1.0).sqrt()),
    ("sqrt_times_mask", "sqrt_grad_at_zero", lambda t: t(0.0, 1.0).sqrt() * torch.tensor([0.0, 1.0])),
    ("hypot", "sqrt_grad_at_zero", lambda t: torch.hypot(t(0.0, 0.0), t(0.0, 1.0))),
    (
        "hypot_in_a_branch",
        "sqrt_grad_at_zero",
        lambda t: (lambda r: torch.where(r < 3, r, 2 * r))(torch.hypot(t(0.0, 0.0), t(0.0, 1.0))),
    ),
    ("pow", "pow_grad_at_zero", lambda t: t(0.0, 1.0) ** 0.7),
    ("acos_edge", "acos_grad_at_one", lambda t: t(1.0, 0.0).acos()),
    ("asin_edge", "acos_grad_at_one", lambda t: t(-1.0, 0.0).asin()),
    ("xlogy", "xlogy_grad_at_zero", lambda t: torch.xlogy(t(0.0, 1.0), t(0.0, 1.0))),
    ("kl_div", "xlogy_grad_at_zero", lambda t: functional.kl_div(t(-1.0, -1.0), t(0.0, 1.0), reduction="sum")),
    (
        "logsumexp",
        "logsumexp_grad_all_inf",
        lambda t: torch.stack([masked(t(1.0, 2.0), 1, 1), t(0.0, 1.0)]).logsumexp(1).clamp(min=-9.0),
    ),
    ("where_log", "where_grad_trap", lambda t: (lambda x: torch.where(x > 0, x.log(), 0.0))(t(0.0, 0.7))),
    ("where_sqrt", "where_grad_trap", lambda t: (lambda x: torch.where(x > 0, x.sqrt(), 0.0))(t(0.0, 0.7))),
    ("where_pow", "where_grad_trap", lambda t: (lambda x: torch.where(x > 0, x**0.4, 0.0))(t(0.0, 0.7))),
    ("where_over", "where_grad_trap", lambda t: (lambda x: torch.where(x > 0, 1 / x, 0.0))(t(0.0, 0.7))),
    ("where_exp", "where_grad_trap", lambda t: (lambda x: torch.where(x > 50, x, x.exp()))(t(100.0, 1.0))),
    ("nan_to_num", "where_grad_trap", lambda t: t(0.0, 0.7).log().nan_to_num(neginf=0.0)),
    ("index", "where_grad_trap", lambda t: (lambda x: x.log()[x > 0])(t(0.0, 0.7))),
    ("clamp", "where_grad_trap", lambda t: t(0.0, 0.7).log().clamp(min=-10.0)),
    ("svd", "degenerate_decomposition", lambda t: torch.linalg.svd(torch.diag_embed(t(1.0, 1.0)))[0]),
    ("eigh", "degenerate_decomposition", lambda t: torch.linalg.eigh(torch.diag_embed(t(1.0, 1.0)))[1]),
    ("gradient", "exploding_gradient", lambda t: t(1e-20) * torch.tensor(1e30) * 1e-5 * torch.tensor(1e25)),
    (
        "ctc",
        "ctc_infeasible",
        lambda t: functional.ctc_loss(
            t(*range(8)).view(2, 1, 4).log_softmax(2), torch.tensor([[1, 1, 2]]), torch.tensor([2]), torch.tensor([3])
        ),
    ),
]


@pytest.mark.parametrize(("slug", "make"), [pytest.param(slug, make, id=name) for name, slug, make in CASES])
def test_first_cause_of_a_snippet(slug: str, make: Make) -> None:
    causes = causes_of(make)
    assert causes[0].slug == slug, [(c.slug, c.confidence) for c in causes]


WEIGHT_OF_ZEROS = "Weight or spectral norm of a weight of zeros"


@pytest.mark.parametrize(
    ("make", "title"),
    [
        (lambda t: torch._weight_norm(t(0.0, 0.0)[None], torch.ones(1, 1), 0), WEIGHT_OF_ZEROS),
        (lambda t: nn.utils.spectral_norm(zeros())(t(1.0, 2.0)), WEIGHT_OF_ZEROS),
        (lambda t: nn.utils.parametrizations.spectral_norm(zeros())(t(1.0, 2.0)), WEIGHT_OF_ZEROS),
        (lambda t: functional.layer_norm(t(1.0, 1.0), (2,), eps=0.0), "Normalising equal values"),
        (lambda t: (lambda x: x / x.norm())(t(0.0, 0.0)), "Zero divided by zero"),
    ],
)
def test_a_weight_of_zeros_is_named(make: Make, title: str) -> None:
    assert causes_of(make)[0].title == title


def zeros() -> nn.Module:
    layer = nn.Linear(2, 3)
    nn.init.zeros_(layer.weight)
    return layer


class Inverse(torch.autograd.Function):
    """A derivative written by hand that divides by what it got."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / ctx.saved_tensors[0]


def test_hand_written_backward() -> None:
    causes = causes_of(lambda t: Inverse.apply(t(0.0, 1.0)))  # type: ignore[no-untyped-call]
    assert causes[0].slug == "custom_backward"


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    ("slug", "make", "gradient"),
    [
        ("optimizer_eps", lambda p, f: torch.optim.Adam(p, eps=0.0, foreach=f), 0.0),
        ("optimizer_eps", lambda p, f: torch.optim.RMSprop(p, eps=0.0, foreach=f), 0.0),
        ("optimizer_eps", lambda p, f: torch.optim.Adagrad(p, eps=0.0, foreach=f), 0.0),
        ("optimizer_overflow", lambda p, f: torch.optim.Adam(p, foreach=f), 1e30),
        ("nan_lr", lambda p, f: torch.optim.SGD(p, lr=NAN, foreach=f), 0.5),
    ],
)
def test_first_cause_of_an_update(slug: str, make: Any, gradient: float, foreach: bool) -> None:
    weights = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(1))]
    optimizer = make(weights, foreach)
    for w in weights:
        w.grad = torch.full_like(w, 0.5)
    weights[0].grad = torch.tensor([gradient, 0.5, 0.25])
    tracer = Tracer()
    tracer.region, tracer.in_optimizer = "step", True
    for w in weights:
        tracer.give_role(w, "parameter", "w")
    with tracer:
        optimizer.step()
    trace = tracer.trace()
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    noticed = [i for t in (*weights, *state) if (i := tracer.last_bad(t)) is not None]
    origin = blame(trace, noticed).origin
    assert origin is not None
    assert origin.phase == "optimizer"
    causes = explain(origin, trace, History())
    assert causes[0].slug == slug, [(c.slug, c.confidence) for c in causes]
