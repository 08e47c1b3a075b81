"""What people write, family by family: the first cause of each, as torch really dispatches it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import distributions as D  # noqa: N812 - short, as in the snippets of this list
from torch.nn import functional as F  # noqa: N812 - the name that everybody gives it

from test_rules_on_torch import INF, Make, causes_of, masked

HALF = torch.float16

CASES: list[tuple[str, str, Make]] = [
    # log family
    ("log_softmax_by_hand", "log_of_zero", lambda t: torch.softmax(t(0.0, 200.0), 0).log()),
    ("log_sigmoid", "log_of_zero", lambda t: torch.sigmoid(t(-200.0)).log()),
    ("log_1m_sigmoid", "log_of_zero", lambda t: (1 - torch.sigmoid(t(200.0))).log()),
    ("log_prod", "log_of_zero", lambda t: t(1e-30, 1e-30).prod().log()),
    ("log_norm0", "log_of_zero", lambda t: t(0.0, 0.0).norm().log()),
    ("log10", "log_of_zero", lambda t: t(0.0, 1.0).log10()),
    ("log1p", "log_of_zero", lambda t: t(-1.0, 1.0).log1p()),
    ("log1p_neg", "log_of_negative", lambda t: t(-2.0, 1.0).log1p()),
    ("gumbel0", "log_of_zero", lambda t: -torch.log(-torch.log(t(1.0, 0.5)))),
    ("gumbel1", "log_of_zero", lambda t: -torch.log(-torch.log(t(0.0, 0.5)))),
    ("log_relu", "log_of_zero", lambda t: torch.relu(t(-1.0, 1.0)).log()),
    ("nll_by_index", "log_of_zero", lambda t: -torch.softmax(t(0.0, 200.0)[None], 1)[0, 0].log()),
    (
        "nll_loss_log",
        "log_of_zero",
        lambda t: F.nll_loss(torch.softmax(t(0.0, 200.0)[None], 1).log(), torch.tensor([0])),
    ),
    (
        "label_smooth_inf",
        "zero_times_inf",
        lambda t: (masked(t(1.0, 2.0), 0, 1).log_softmax(0) * torch.tensor([1.0, 0.0])).sum(),
    ),
    (
        "label_smoothing",
        "masked_label",
        lambda t: F.cross_entropy(masked(t(1.0, 2.0), 0, 1)[None], torch.tensor([0]), label_smoothing=0.1),
    ),
    (
        "soft_target_ce",
        "masked_label",
        lambda t: F.cross_entropy(masked(t(1.0, 2.0, 3.0), 0, 1, 0)[None], torch.tensor([[0.5, 0.3, 0.2]])),
    ),
    (
        "soft_target_ce0",
        "zero_times_inf",
        lambda t: F.cross_entropy(masked(t(1.0, 2.0, 3.0), 0, 1, 0)[None], torch.tensor([[0.5, 0.0, 0.5]])),
    ),
    (
        "kl_hand",
        "log_of_zero",
        lambda t: (lambda p, q: (p * (p / q).log()).sum())(torch.tensor([0.0, 1.0]), torch.softmax(t(1.0, 2.0), 0)),
    ),
    (
        "kl_q0",
        "div_by_zero",
        lambda t: (lambda p, q: (p * (p / q).log()).sum())(torch.tensor([0.5, 0.5]), torch.softmax(t(0.0, 200.0), 0)),
    ),
    (
        "kl_logq0",
        "log_of_zero",
        lambda t: (lambda p, q: (p * (p.log() - q.log())).sum())(
            torch.tensor([0.5, 0.5]), torch.softmax(t(0.0, 200.0), 0)
        ),
    ),
    (
        "kl_div_logt",
        "masked_label",
        lambda t: F.kl_div(masked(t(1.0, 2.0), 0, 1).log_softmax(0), torch.tensor([0.5, 0.5]), reduction="sum"),
    ),
    ("js", "log_of_zero", lambda t: (lambda p: (p * p.log()).sum())(torch.softmax(t(0.0, 200.0), 0))),
    ("entropy_hand", "log_of_zero", lambda t: -(lambda p: (p * p.log()).sum())(torch.relu(t(-1.0, 1.0)))),
    ("focal", "log_of_zero", lambda t: (lambda p: -((1 - p) ** 2 * p.log()).mean())(torch.sigmoid(t(-200.0, 1.0)))),
    (
        "focal_pow",
        "pow_grad_at_zero",
        lambda t: (lambda p: -((1 - p) ** 0.5 * (p + 1e-06).log()).mean())(torch.sigmoid(t(200.0, 1.0))),
    ),
    ("logaddexp_neg", "log_of_negative", lambda t: torch.log(1 - t(2.0, 0.5))),
    (
        "rmsle",
        "log_of_negative",
        lambda t: ((t(-3.0, 0.5) + 1).log() - torch.tensor([1.0, 1.0]).log()).pow(2).mean().sqrt(),
    ),
    # distributions
    (
        "normal_scale0",
        "log_of_zero",
        lambda t: D.Normal(t(0.0), t(0.0), validate_args=False).log_prob(torch.tensor([1.0])),
    ),
    (
        "normal_scale_neg",
        "log_of_negative",
        lambda t: D.Normal(t(0.0), t(-1.0), validate_args=False).log_prob(torch.tensor([1.0])),
    ),
    ("beta_edge", "log_of_zero", lambda t: D.Beta(t(2.0), t(2.0)).log_prob(torch.tensor([0.0]))),
    ("gamma0", "log_of_zero", lambda t: D.Gamma(t(2.0), t(2.0), validate_args=False).log_prob(torch.tensor([0.0]))),
    (
        "lognormal0",
        "log_of_zero",
        lambda t: D.LogNormal(t(0.0), t(1.0), validate_args=False).log_prob(torch.tensor([0.0])),
    ),
    (
        "poisson_rate0",
        "log_of_zero",
        lambda t: D.Poisson(torch.relu(t(-1.0)), validate_args=False).log_prob(torch.tensor([2.0])),
    ),
    (
        "uniform_out",
        "log_of_zero",
        lambda t: D.Uniform(t(0.0), t(1.0), validate_args=False).log_prob(torch.tensor([2.0])),
    ),
    (
        "exponential0",
        "log_of_zero",
        lambda t: D.Exponential(torch.relu(t(-1.0)), validate_args=False).log_prob(torch.tensor([2.0])),
    ),
    ("dirichlet0", "log_of_zero", lambda t: D.Dirichlet(t(2.0, 2.0)).log_prob(torch.tensor([0.0, 1.0]))),
    ("laplace0", "log_of_zero", lambda t: D.Laplace(t(0.0), t(0.0), validate_args=False).log_prob(torch.tensor([1.0]))),
    (
        "kl_normal",
        "div_by_zero",
        lambda t: D.kl_divergence(D.Normal(t(0.0), t(1.0)), D.Normal(t(0.0), torch.relu(t(-1.0)), validate_args=False)),
    ),
    (
        "mixture",
        "log_of_zero",
        lambda t: (torch.softmax(t(0.0, 1.0), 0) * torch.exp(-((t(1.0, 2.0) - 100) ** 2))).sum().log(),
    ),
    ("gaussian_nll0", "log_of_zero", lambda t: 0.5 * (torch.log(t(0.0)) + (t(1.0) - 2) ** 2 / t(0.0))),
    (
        "poisson_nll",
        "log_of_zero",
        lambda t: F.poisson_nll_loss(torch.relu(t(-1.0)), torch.tensor([1.0]), log_input=False, eps=0.0),
    ),
    ("poisson_nll_log", "exp_overflow", lambda t: F.poisson_nll_loss(t(200.0), torch.tensor([1.0]))),
    # division
    (
        "dice",
        "zero_over_zero",
        lambda t: (lambda p, y: 2 * (p * y).sum() / (p.sum() + y.sum()))(
            torch.relu(t(-1.0, -1.0)), torch.tensor([0.0, 0.0])
        ),
    ),
    (
        "tversky",
        "zero_over_zero",
        lambda t: (
            lambda p, y: (p * y).sum() / ((p * y).sum() + 0.3 * (p * (1 - y)).sum() + 0.7 * ((1 - p) * y).sum())
        )(torch.relu(t(-1.0, -1.0)), torch.tensor([0.0, 0.0])),
    ),
    (
        "iou",
        "zero_over_zero",
        lambda t: (lambda a, b: torch.minimum(a, b).prod() / torch.maximum(a, b).prod())(
            torch.relu(t(-1.0, 1.0)), torch.tensor([0.0, 1.0])
        ),
    ),
    ("cos", "zero_over_zero", lambda t: (lambda a, b: a @ b / (a.norm() * b.norm()))(t(0.0, 0.0), t(1.0, 2.0))),
    ("infonce_temp", "div_by_zero", lambda t: (t(1.0, 2.0) / torch.relu(t(-1.0))).log_softmax(0)),
    ("infonce_hand", "exp_overflow", lambda t: (lambda s: s.exp() / s.exp().sum())(t(1.0, 2.0) / 0.01)),
    ("maxnorm", "zero_over_zero", lambda t: (lambda x: x / x.max())(t(0.0, 0.0))),
    ("minmax", "zero_over_zero", lambda t: (lambda x: (x - x.min()) / (x.max() - x.min()))(t(3.0, 3.0))),
    ("zscore", "zero_over_zero", lambda t: (lambda x: (x - x.mean()) / x.std())(t(3.0, 3.0))),
    ("weightnorm", "zero_over_zero", lambda t: torch._weight_norm(t(0.0, 0.0)[None], torch.ones(1, 1), 0)),
    ("ln_eps0", "zero_over_zero", lambda t: F.layer_norm(t(1.0, 1.0), (2,), eps=0.0)),
    ("rmsnorm", "div_by_zero", lambda t: F.rms_norm(t(0.0, 0.0), (2,), eps=0.0)),
    (
        "scatter_mean",
        "zero_over_zero",
        lambda t: (
            torch.zeros(3).index_add(0, torch.tensor([0, 1]), t(1.0, 2.0))
            / torch.zeros(3).index_add(0, torch.tensor([0, 1]), torch.ones(2))
        ),
    ),
    (
        "scatter_mean_b",
        "zero_over_zero",
        lambda t: (
            torch.zeros(3).index_add(0, torch.tensor([0, 1]), t(1.0, 2.0))
            / torch.bincount(torch.tensor([0, 1]), minlength=3)
        ),
    ),
    ("degree", "pow_of_zero", lambda t: (t(0.0, 2.0).sum().reshape(1) * 0).pow(-0.5) * t(1.0)),
    ("degree_rsqrt", "div_by_zero", lambda t: torch.rsqrt(torch.relu(t(-1.0, 2.0)))),
    ("mean_len", "zero_over_zero", lambda t: t(1.0, 2.0)[:0].sum() / 0),
    (
        "mean_len_i",
        "zero_over_zero",
        lambda t: t(1.0, 2.0)[torch.tensor([False, False])].sum() / torch.tensor([False, False]).sum(),
    ),
    ("fmod", "div_by_zero", lambda t: torch.remainder(t(3.0), torch.zeros(1))),
    (
        "mape",
        "div_by_zero",
        lambda t: ((t(1.0, 2.0) - torch.tensor([0.0, 1.0])) / torch.tensor([0.0, 1.0])).abs().mean(),
    ),
    ("logratio", "log_of_zero", lambda t: torch.log(t(0.0, 1.0) / t(2.0, 1.0))),
    (
        "whiten",
        "zero_over_zero",
        lambda t: (lambda x: (x - x.mean(0)) / x.std(0))(torch.stack([t(1.0, 2.0), t(1.0, 3.0)])),
    ),
    # exp
    ("softmax_hand", "exp_overflow", lambda t: (lambda z: z.exp() / z.exp().sum())(t(200.0, 1.0))),
    ("lse_hand", "exp_overflow", lambda t: t(200.0, 1.0).exp().sum().log()),
    ("softplus_hand", "exp_overflow", lambda t: (1 + t(200.0).exp()).log()),
    ("vae", "exp_overflow", lambda t: t(1.0) + (0.5 * t(400.0)).exp() * torch.tensor([0.3])),
    ("expm1", "exp_overflow", lambda t: t(200.0).expm1()),
    ("exp_half", "low_precision_overflow", lambda t: t(12.0, dtype=HALF).exp()),
    ("sinh", "exp_overflow", lambda t: t(200.0).sinh()),
    ("sigmoid_hand", "where_grad_trap", lambda t: 1 / (1 + (-t(-200.0)).exp())),
    ("tanh_hand", "exp_overflow", lambda t: (lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()))(t(200.0))),
    ("pow_exp", "overflow", lambda t: 10.0 ** t(50.0)),
    ("pow2", "overflow", lambda t: torch.pow(2.0, t(300.0))),
    ("exp2", "exp_overflow", lambda t: t(300.0).exp2()),
    ("cosh_log", "exp_overflow", lambda t: t(200.0).cosh().log()),
    ("sq_exp", "overflow", lambda t: t(60.0).exp() ** 2),
    ("sum_half", "low_precision_overflow", lambda t: t(*[1000.0] * 100, dtype=HALF).sum()),
    ("sq_half", "low_precision_overflow", lambda t: t(300.0, dtype=HALF) ** 2),
    ("mse_half", "low_precision_overflow", lambda t: F.mse_loss(t(300.0, dtype=HALF), torch.zeros(1, dtype=HALF))),
    ("norm_half", "low_precision_overflow", lambda t: t(*[60000.0] * 4, dtype=HALF).norm()),
    ("finfo_add", "low_precision_overflow", lambda t: (t(-100.0, dtype=HALF) + torch.finfo(HALF).min).softmax(0)),
    ("bf16_mul", "overflow", lambda t: t(1e30, dtype=torch.bfloat16) * t(1e30, dtype=torch.bfloat16)),
    ("cast_half", "low_precision_overflow", lambda t: t(70000.0).to(HALF).float()),
    ("prod", "overflow", lambda t: t(*[10000000000.0] * 5).prod()),
    ("cumprod", "overflow", lambda t: t(*[10000000000.0] * 5).cumprod(0)),
    ("square", "overflow", lambda t: t(1e25).square()),
    ("mse_big", "overflow", lambda t: F.mse_loss(t(1e25), torch.tensor([0.0]))),
    ("cdist_big", "overflow", lambda t: torch.cdist(t(1e25)[None], t(0.0)[None])),
    ("einsum", "overflow", lambda t: torch.einsum("i,j->ij", t(1e25), t(1e25))),
    ("div_small", "overflow", lambda t: t(10000000000.0) / t(1e-35)),
    ("fact", "exp_overflow", lambda t: torch.lgamma(t(50.0)).exp()),
    # masks
    ("add_mask", "fully_masked_softmax", lambda t: (t(1.0, 2.0) + torch.tensor([-INF, -INF])).softmax(0)),
    ("logsoftmax_mask", "fully_masked_softmax", lambda t: (t(1.0, 2.0) + torch.tensor([-INF, -INF])).log_softmax(0)),
    (
        "ce_allmasked",
        "fully_masked_softmax",
        lambda t: F.cross_entropy(masked(t(1.0, 2.0), 1, 1)[None], torch.tensor([0])),
    ),
    (
        "lse_allmasked_loss",
        "fully_masked_softmax",
        lambda t: (lambda x: x.logsumexp(0) - x[0])(masked(t(1.0, 2.0), 1, 1)),
    ),
    ("mask_mul_inf", "zero_times_inf", lambda t: t(1.0, 2.0) + (1 - torch.tensor([1.0, 0.0])) * -INF),
    ("logmask", "log_of_zero", lambda t: (t(1.0, 2.0) + torch.log(torch.tensor([0.0, 0.0]))).softmax(0)),
    (
        "logmask_ok_label",
        "masked_label",
        lambda t: F.cross_entropy((t(1.0, 2.0) + torch.log(torch.tensor([1.0, 0.0])))[None], torch.tensor([1])),
    ),
    ("max_masked_sub", "fully_masked_softmax", lambda t: (lambda x: x - x.max())(masked(t(1.0, 2.0), 1, 1))),
    # reductions
    ("mean_empty", "empty_reduction", lambda t: t(1.0, 2.0)[:0].mean()),
    ("std1", "single_sample_variance", lambda t: t(1.0)[None].std(0)),
    ("var_mean1", "single_sample_variance", lambda t: torch.var_mean(t(1.0)[None], 0)[0]),
    ("bce_empty", "empty_reduction", lambda t: F.binary_cross_entropy_with_logits(t(1.0)[:0], torch.tensor([]))),
    ("median_empty", "empty_reduction", lambda t: t(1.0, 2.0)[:0].median()),
    (
        "ce_weight0",
        "empty_reduction",
        lambda t: F.cross_entropy(t(1.0, 2.0)[None], torch.tensor([0]), weight=torch.tensor([0.0, 1.0])),
    ),
    ("cov1", "single_sample_variance", lambda t: torch.cov(t(1.0, 2.0)[:, None])),
    ("cov_hand", "zero_over_zero", lambda t: (lambda cov, norm: cov / norm)(t(0.0).sum(), t(0.0).sum())),
    ("corr", "zero_over_zero", lambda t: torch.corrcoef(torch.stack([t(1.0, 1.0), t(1.0, 2.0)]))),
    # derivatives
    ("norm_hand", "sqrt_grad_at_zero", lambda t: (t(0.0, 0.0) ** 2).sum() ** 0.5),
    ("sqrt_sum", "sqrt_grad_at_zero", lambda t: (t(0.0, 0.0) ** 2).sum().sqrt()),
    ("rmse", "sqrt_grad_at_zero", lambda t: F.mse_loss(t(1.0, 2.0), torch.tensor([1.0, 2.0])).sqrt()),
    ("pdist_hand", "sqrt_grad_at_zero", lambda t: (lambda x: (x[:, None] - x[None]).pow(2).sqrt())(t(1.0, 2.0))),
    ("std_hand", "sqrt_grad_at_zero", lambda t: ((t(1.0, 1.0) - 1) ** 2).mean().sqrt()),
    ("var_sqrt", "sqrt_grad_at_zero", lambda t: t(1.0, 1.0).var().sqrt()),
    ("cbrt", "pow_grad_at_zero", lambda t: t(0.0, 1.0) ** (1 / 3)),
    ("float_power", "pow_grad_at_zero", lambda t: torch.float_power(t(0.0, 1.0), 0.5)),
    ("pow_tensor", "pow_grad_at_zero", lambda t: torch.pow(t(0.0, 1.0), torch.tensor([0.5, 0.5]))),
    ("pow_exp_learn", "pow_grad_at_zero", lambda t: torch.pow(t(0.0, 1.0), t(0.5, 0.5))),
    ("gem", "pow_grad_at_zero", lambda t: (t(0.0, 0.0) ** 3).mean() ** (1 / 3)),
    ("atanh_edge", "pole", lambda t: t(1.0).atanh()),
    ("acosh1", "acos_grad_at_one", lambda t: t(1.0, 2.0).acosh()),
    ("acosh_lt1", "arc_out_of_domain", lambda t: t(0.5, 2.0).acosh()),
    ("poincare", "acos_grad_at_one", lambda t: (1 + 2 * (t(0.1) - 0.1) ** 2).acosh()),
    ("igamma", "infinite_derivative", lambda t: torch.igamma(torch.tensor([0.5]), t(0.0))),
    ("entr", "xlogy_grad_at_zero", lambda t: torch.special.entr(t(0.0, 0.5))),
    ("abs_pow", "sqrt_grad_at_zero", lambda t: (lambda x: x.sign() * x.abs().sqrt())(t(0.0, 1.0))),
    (
        "log_abs_where",
        "where_grad_trap",
        lambda t: (lambda x: torch.where(x.abs() > 0, x.abs().log(), torch.tensor(0.0)))(t(0.0, 1.0)),
    ),
    ("masked_fill_after", "where_grad_trap", lambda t: (lambda x: (1 / x).masked_fill(x == 0, 0.0))(t(0.0, 1.0))),
    ("sel_mult", "sqrt_grad_at_zero", lambda t: (lambda x: x.sqrt()[1:])(t(0.0, 1.0))),
    ("nansum", "where_grad_trap", lambda t: (lambda x: (x / x).nansum())(t(0.0, 1.0))),
    (
        "normalize_where",
        "where_grad_trap",
        lambda t: (lambda x: (lambda n: torch.where(n > 0, x / n, x))((x * x).sum()))(t(0.0, 0.0)),
    ),
    ("exp_clamp", "where_grad_trap", lambda t: t(200.0).exp().clamp(max=10000.0)),
    ("log_clamp", "where_grad_trap", lambda t: torch.log(t(0.0, 1.0)).clamp(min=-100)),
    ("min_exp", "where_grad_trap", lambda t: torch.minimum(t(200.0).exp(), torch.tensor([10000.0]))),
    (
        "logsumexp_all",
        "logsumexp_grad_all_inf",
        lambda t: torch.stack([t(1.0, 2.0) + torch.tensor([-INF, -INF]), t(0.0, 1.0)]).logsumexp(1)[1:],
    ),
    (
        "logaddexp",
        "logsumexp_grad_all_inf",
        lambda t: torch.logaddexp(t(1.0) + torch.tensor([-INF]), t(1.0) + torch.tensor([-INF])).clamp(min=-5),
    ),
    ("svd_zero", "degenerate_decomposition", lambda t: torch.linalg.svd(torch.zeros(2, 2) * t(1.0))[0]),
    ("qr", "degenerate_decomposition", lambda t: torch.linalg.qr(torch.diag_embed(t(1.0, 0.0)))[0]),
    # linalg
    ("inv", "singular_matrix", lambda t: torch.inverse(torch.diag_embed(t(0.0, 1.0)))),
    ("solve", "singular_matrix", lambda t: torch.linalg.solve(torch.diag_embed(t(0.0, 1.0)), torch.tensor([1.0, 1.0]))),
    (
        "mvn",
        "not_positive_definite",
        lambda t: D.MultivariateNormal(torch.zeros(2), torch.diag_embed(t(-1.0, 1.0)), validate_args=False).log_prob(
            torch.zeros(2)
        ),
    ),
    ("chol0", "not_positive_definite", lambda t: torch.linalg.cholesky(torch.diag_embed(t(0.0, 1.0)))),
    ("slogdet", "log_of_zero", lambda t: torch.linalg.slogdet(torch.diag_embed(t(0.0, 1.0)))[1]),
    ("logabsdet_flow", "log_of_zero", lambda t: t(0.0, 1.0).abs().log().sum()),
    (
        "tri",
        "singular_matrix",
        lambda t: torch.linalg.solve_triangular(torch.diag_embed(t(0.0, 1.0)), torch.ones(2, 1), upper=True),
    ),
    # poles
    ("erfinv", "pole", lambda t: t(1.0, 0.0).erfinv()),
    ("logit1", "pole", lambda t: t(1.0, 0.5).logit()),
    ("logit_hand", "div_by_zero", lambda t: (lambda p: (p / (1 - p)).log())(t(1.0, 0.5))),
    ("digamma", "pole", lambda t: t(0.0, 1.0).digamma()),
    ("lgamma_neg", "pole", lambda t: t(-2.0, 1.0).lgamma()),
    ("ndtri", "pole", lambda t: torch.special.ndtri(t(1.0, 0.5))),
    ("icdf", "pole", lambda t: D.Normal(t(0.0), t(1.0)).icdf(torch.tensor([1.0]))),
    ("erfinv_out", "arc_out_of_domain", lambda t: t(1.5, 0.0).erfinv()),
    ("i0", "overflow", lambda t: torch.special.i0(t(200.0))),
    ("softplus_inv", "log_of_zero", lambda t: torch.log(torch.expm1(t(0.0, 1.0)))),
    ("sinc_hand", "zero_over_zero", lambda t: (lambda x: x.sin() / x)(t(0.0, 1.0))),
    ("expm1x", "zero_over_zero", lambda t: (lambda x: x.expm1() / x)(t(0.0, 1.0))),
    (
        "int_overflow_log",
        "log_of_negative",
        lambda t: torch.log((torch.tensor([2**31 - 1], dtype=torch.int32) + 1).float() * t(1.0)),
    ),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("slug", "make"), [pytest.param(slug, make, id=name) for name, slug, make in CASES])
def test_family(slug: str, make: Make) -> None:
    torch.manual_seed(0)
    causes = causes_of(make)
    assert causes[0].slug == slug, [(c.slug, c.confidence) for c in causes]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_product_with_a_sparse_matrix_is_what_discards() -> None:
    def loss(t: Callable[..., torch.Tensor]) -> torch.Tensor:
        scale = torch.tensor([0.0, 4.0]) ** -0.5
        row = torch.eye(2)[1:].to_sparse()
        return torch.sparse.mm(row, (scale * t(1.0, 2.0))[:, None]) * scale[[1]]

    (cause, *_) = causes_of(loss)
    assert cause.slug == "where_grad_trap"
    assert "`index`" not in cause.why
    assert "mm` in line" in cause.why


def test_an_eps_that_is_lost_in_half_precision() -> None:
    def loss(t: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = t(0.0, 0.0, dtype=HALF)
        return x / torch.sqrt(x.square().mean() + 1e-12)

    (cause, *_) = causes_of(loss)
    assert cause.slug == "zero_over_zero"
    assert "The 0 is the square root of a 0 that includes an added number that float16 rounds to 0." in cause.why
