"""Which operators belong together, by their names in `OpEvent.op`: one table for every room.

It lives in records/ because tracing/, diagnose/ and repair/ all need these facts, and tracing/ may not import
diagnose/. The names are aten's own without decoration (`_softmax` is `softmax`, `linalg_eigh` is `eigh`), as
`tracing.operators.plain_name` writes them. What only the tracer has to know about an operator, such as what it
overwrites, is in tracing/operators.py.
"""

from __future__ import annotations

import math


def words(text: str) -> frozenset[str]:
    """The names in a space-separated list."""
    return frozenset(text.split())


# --- elements are moved, chosen or compared, not computed ---------------------------------------------------------

SPLITS = words("chunk split split_with_sizes unbind")
"""They return several tensors."""
VIEWS = SPLITS | words(
    "alias as_strided detach diagonal expand flatten mT movedim narrow permute reshape select slice squeeze t "
    "transpose unsafe_view unsqueeze view"
)
COPIES = words("clone contiguous copy repeat to")
PICKS = words("gather index index_select masked_select take take_along_dim")
"""They choose elements by an index or a mask."""
CARRIERS = VIEWS | COPIES | PICKS
"""Every element of the result is one that was read, unchanged."""
JOINS = words("cat stack")
FILLS = words(
    "constant_pad_nd fill index_copy index_fill index_put masked_fill scatter select_scatter slice_scatter tril triu "
    "where"
)
"""They write other values into some of the elements."""
FULL = words("full full_like new_full")
"""They make a tensor in which one number is repeated."""
CONSTRUCTORS = FULL | words("scalar_tensor tensor")
"""They make a tensor from numbers in the program."""
WRITES = words("copy fill index_copy index_fill index_put masked_fill scatter")
"""They write given values into a part of a tensor."""
UNWRITTEN = words("empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize")
"""They allocate memory and leave its content as it is."""
COMPARISONS = words(
    "all any argmax argmin bitwise_and bitwise_not bitwise_or eq ge greater gt isfinite isinf isnan isneginf isposinf "
    "le less logical_and logical_not logical_or lt ne nonzero"
)
"""Their result describes a value and does not contain it."""
RANDOM = words(
    "bernoulli binomial cauchy dropout exponential fused_dropout geometric log_normal multinomial normal poisson rand "
    "rand_like randint randint_like randn randn_like random randperm rrelu_with_noise sample_dirichlet standard_gamma "
    "uniform"
)

# --- limits -------------------------------------------------------------------------------------------------------

EXTREMES = words("amax amin aminmax max min")
"""The largest or smallest element of a tensor."""
FLOORS = words("clamp clamp_min hardsigmoid hardtanh maximum relu relu6 threshold")
CEILINGS = words("clamp clamp_max hardsigmoid hardtanh minimum relu6")
SELECTORS = words(
    "index index_put masked_fill masked_scatter masked_select nan_to_num nanmean nansum select_scatter where"
)
"""They discard elements by a condition; the gradient of a discarded element is 0."""
LIMITERS = SELECTORS | EXTREMES | FLOORS | CEILINGS | words("gather index_select sort topk")
"""They can hide a non-finite value, by a condition or by order."""

# --- arithmetic ---------------------------------------------------------------------------------------------------

DIVISIONS = {
    **dict.fromkeys(("div", "true_divide", "floor_divide", "remainder", "fmod"), ("self", "other")),
    "addcdiv": ("tensor1", "tensor2"),
    **dict.fromkeys(("reciprocal", "rsqrt"), ("", "self")),
}
"""The arguments that are numerator and denominator; `1 / x` is reciprocal(x), then mul."""
ADDITIONS = words("add rsub sub")
ARITHMETIC = ADDITIONS | words("div mul pow")
LINEAR = CARRIERS | JOINS | ADDITIONS | words("div mean mul neg sum")
"""Numbers that are multiplied by numbers and added."""
ADDED_PRODUCTS = words("addbmm addmm addmv addr baddbmm sparse_addmm")
"""A product added to the first argument."""
MATRIX_PRODUCTS = ADDED_PRODUCTS | words("bmm convolution dot einsum linear matmul mm mv vdot")
PRODUCTS = MATRIX_PRODUCTS | words("addcmul cumprod mul prod")
SUMS = words("mean nanmean nansum sum")
SPREADS = words("std std_mean var var_mean")
WEIGHT_NORMS = words("weight_norm_interface")
"""A weight divided by its norm and multiplied by another number: g * v / |v|."""
NORMS = words("cdist euclidean_dist norm pdist vector_norm")
NORMALISERS = words("batch_norm group_norm instance_norm layer_norm rms_norm")
SOFTMAXES = words("log_softmax masked_softmax safe_softmax softmax")
ATTENTION = words("scaled_dot_product_attention")
LOG_SUMS = words("logaddexp logaddexp2 logcumsumexp logsumexp")
NEGATIVE_LIKELIHOODS = words("cross_entropy_loss nll_loss nll_loss2d nll_loss_nd")
LABEL_PICKS = NEGATIVE_LIKELIHOODS | PICKS
"""They pick elements by a label."""
REGRESSION_LOSSES = words("huber_loss l1_loss mse_loss smooth_l1_loss")
LOSSES = (
    NEGATIVE_LIKELIHOODS
    | REGRESSION_LOSSES
    | words("binary_cross_entropy binary_cross_entropy_with_logits kl_div poisson_nll_loss soft_margin_loss")
)
MEANS = LOSSES | words("logsumexp mean median nanmean nanmedian")
"""They have no value for an empty tensor."""
MIXING = (MATRIX_PRODUCTS | SUMS | SPREADS | NORMS | NORMALISERS | SOFTMAXES | ATTENTION | EXTREMES | LOSSES) | words(
    "cumsum logsumexp median prod"
)
"""One element of the result depends on many that were read."""
OVERFLOWING = (PRODUCTS | ADDITIONS | SUMS | SPREADS | NORMS | NORMALISERS | ATTENTION | REGRESSION_LOSSES) | words(
    "addcdiv copy cross cumsum div hypot index_add index_put kl_div ldexp lerp outer pow reciprocal scatter_add "
    "scatter_reduce square to trace"
)
"""Arithmetic and conversions whose result may be too large for its type."""
SHIFTED = SOFTMAXES | words("binary_cross_entropy_with_logits cross_entropy_loss logsumexp")
"""They subtract the maximum first, so they overflow only near the end of the range."""
MASK_KEEPING = (VIEWS | COPIES | JOINS | FILLS | CONSTRUCTORS | ADDITIONS | EXTREMES | FLOORS | CEILINGS) | words(
    "div log log_softmax logsumexp mul neg roll"
)
"""A mask of -inf is still a mask in their result."""

# --- functions of one number --------------------------------------------------------------------------------------

LOGS = {
    **dict.fromkeys(("log", "log2", "log10", "entr"), ("self", 0.0)),
    "log1p": ("self", -1.0),
    "xlogy": ("other", 0.0),
    "xlog1py": ("other", -1.0),
    "kl_div": ("target", 0.0),
}
"""The argument of the logarithm, and where it is -inf; below that it is NaN."""
INVERSE_FUNCTIONS = {
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (-1.0, 1.0)),
    **dict.fromkeys(("logit", "ndtri"), (0.0, 1.0)),
    "acosh": (1.0, math.inf),
}
"""The interval on which each is defined."""
ARCS = words("acos acosh asin atanh")
XLOGS = words("entr kl_div xlog1py xlogy")
"""They define 0 * log(0) as 0."""
ROOTS = words("rsqrt sqrt")
ROOTS_INSIDE = ROOTS | NORMS | words("hypot renorm std std_mean weight_norm weight_norm_interface")
"""Their derivative divides by a square root."""
POWERS = words("float_power pow")
POLES = words("digamma lgamma mvlgamma polygamma tan zeta")
EXPONENTIALS = words("cosh exp exp2 expm1 logaddexp sinh softplus")
EXCEED_FLOAT64 = EXPONENTIALS | words("cumprod ldexp prod")
"""Defined everywhere, and too large even for float64 at numbers that float32 holds."""

# --- matrices -----------------------------------------------------------------------------------------------------

SPECTRAL = words("eig eigh eigvals eigvalsh svd svdvals")
DETERMINANTS = words("det logdet slogdet")
CHOLESKY = words("cholesky cholesky_ex")
SOLVERS = words(
    "cholesky_inverse cholesky_solve inv inv_ex inverse lstsq lu_factor_ex lu_solve pinv solve solve_ex "
    "solve_triangular triangular_solve"
)
MATRIX_ALGORITHMS = (SPECTRAL | DETERMINANTS | CHOLESKY | SOLVERS) | words(
    "check_errors cond geqrf ldl_factor ldl_factor_ex lu lu_factor lu_unpack matrix_exp matrix_power matrix_rank "
    "ormqr qr tensorinv tensorsolve"
)

# --- optimizers ---------------------------------------------------------------------------------------------------

FUSED_UPDATES = words("fused_adagrad fused_adam fused_adamw fused_sgd")
"""A whole optimizer update in one operator."""
STATE_UPDATES = words("addcmul lerp mul pow sqrt square")
"""What an optimizer computes its own state with."""
