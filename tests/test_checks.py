"""Checks of single values; findings about gradients and weights; no findings on healthy models."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import report_samples
from firstnan.api.checks import Finding, check, check_gradients, check_weights
from firstnan.records import Noticed, Report
from firstnan.records.errors import NonFiniteError
from firstnan.records.words import short_path
from firstnan.report import nonfinite_error, render_text


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


def line_of(text: str) -> int:
    """The line of this file that ends with the marker."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


def problems(findings: list[Finding]) -> dict[str, str]:
    return {f.name: f.problem for f in findings}


def trained(model: nn.Module, x: Tensor, steps: int = 1, lr: float = 0.1) -> nn.Module:
    """The model after some steps, with the gradients of the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    return model


def backed(model: nn.Module, x: Tensor) -> nn.Module:
    """The model with the gradients of a first step, not updated yet."""
    model(x).sin().sum().backward()
    return model


# --- check --------------------------------------------------------------------------------------------------------


def test_check_says_what_where_and_how_much() -> None:
    q = torch.linspace(-3, 8, 4096).view(8, 512)
    q[0, 17] = q[3, 5] = q[7, 511] = nan
    q[1, 0] = inf
    with pytest.raises(NonFiniteError) as caught:
        check(q, "q")  # plain check
    place = f"{short_path(__file__)}:{line_of('plain check')}"
    text = "NaN 3, Inf 1 of 4096, first at [0, 17], the rest -3 … 7.997, [8, 512] float32"
    assert str(caught.value) == f"firstnan: q at {place}: {text}"
    report = caught.value.report
    assert report.noticed == Noticed("value", "q")
    (event,) = report.events
    assert event.tensor is not None
    assert (event.tensor.nan, event.tensor.posinf, event.tensor.first_index) == (3, 1, (0, 17))
    assert text in " ".join(render_text(report, width=100).split())


def test_check_without_a_name_shows_the_expression() -> None:
    weights = torch.tensor([1.0, -inf])
    kept = {"w": weights}
    with pytest.raises(NonFiniteError, match=r"firstnan: weights \* 2 at .*: -Inf 1 of 2, first at \[1\]"):
        check(weights * 2)
    with pytest.raises(NonFiniteError, match=r"firstnan: kept\['w'\] at "):
        check(x=kept)


@pytest.mark.parametrize(
    ("wrap", "place"),
    [
        (lambda t: (torch.ones(2), t), "out[1]"),
        (lambda t: {"a": [None, {"b": t}]}, "out['a'][1]['b']"),
        (lambda t: Output(torch.ones(1), t), "out.loss"),
    ],
)
def test_check_names_the_place_in_a_container(wrap: Callable[[Tensor], Any], place: str) -> None:
    good = wrap(torch.ones(3))
    assert check(good, "out") is good
    with pytest.raises(NonFiniteError) as caught:
        check(wrap(torch.tensor(nan)), "out")
    assert str(caught.value).startswith(f"firstnan: {place} at ")


@pytest.mark.parametrize(
    "value", [None, 3, torch.arange(4), torch.ones(2, dtype=torch.bool), torch.empty(0), torch.nn.Linear]
)
def test_check_lets_everything_else_pass(value: Any) -> None:
    assert check(value) is value


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: check("x"), "x must be a tensor, a number, an array or a container of them, got 'x'"),
        (lambda: check(nn.Linear(1, 1)), r"got the module Linear; check_weights\(x\) reads its weights"),
        (lambda: check(torch.ones(1), torch.ones(1)), "name must be a string, got Tensor"),
        (lambda: check_gradients(None), "model must be a torch.nn.Module, got None"),
        (lambda: check_weights(3), "model must be a torch.nn.Module, got 3"),
        (lambda: check_weights(nn.Linear(1, 1).parameters()), "model must be a torch.nn.Module, got generator"),
        (lambda: check_weights(nn.Linear(1, 1), "adam"), "must be torch.optim.Optimizer objects, got 'adam'"),
    ],
)
def test_what_cannot_be_checked_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_check_reads_every_floating_type(dtype: torch.dtype) -> None:
    t = torch.ones(5, dtype=dtype)
    assert check(t) is t
    t[3] = inf
    with pytest.raises(NonFiniteError, match=r"first at \[3\]"):
        check(t)


def test_check_keeps_the_graph_and_works_without_one() -> None:
    x = torch.ones(2, requires_grad=True)
    y = check(x * 2, "y")
    y.sum().backward()
    assert torch.equal(x.grad if x.grad is not None else torch.empty(0), torch.full((2,), 2.0))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, pytest.raises(NonFiniteError):
            check(torch.tensor([nan]))


def test_check_inside_transforms_lets_pass_what_has_no_values() -> None:
    bad = torch.tensor([1.0, nan])
    out = torch.vmap(lambda t: check(t, "t") + 1)(bad)
    assert out.isnan().tolist() == [False, True]
    grad = torch.func.grad(lambda t: check(t * 2, "t").sum())(torch.ones(3))
    assert torch.equal(grad, torch.full((3,), 2.0))


def test_check_inside_compile_is_left_out_of_the_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: check(t * 2, "t") + 1, backend="eager", fullgraph=True)
    assert compiled(torch.tensor([nan, 1.0])).isnan().tolist() == [True, False]
    torch._dynamo.reset()


def test_check_works_under_symbolic_tracing() -> None:
    graph = torch.fx.symbolic_trace(lambda t: check(t, "t") * 2)
    assert torch.equal(graph(torch.ones(2)), torch.full((2,), 2.0))


# --- the error ----------------------------------------------------------------------------------------------------


def test_error_shows_the_report_headline_first() -> None:
    report = report_samples.forward()
    error = nonfinite_error(report)
    assert isinstance(error, ArithmeticError)
    assert str(error) == render_text(report, width=100).rstrip()
    assert str(error).startswith("firstnan: NaN created in forward, step 11, at nowhere/train.py:10")
    assert "log_of_negative" in str(error)


def test_error_without_an_origin_still_tells_the_step() -> None:
    error = NonFiniteError(Report("nonfinite", step=4, noticed=Noticed("loss")))
    assert str(error).startswith("firstnan: a non-finite value in the loss, step 4")


def test_error_survives_pickle() -> None:
    with pytest.raises(NonFiniteError) as caught:
        check(torch.tensor([nan, 1.0]), "q")
    for error in (caught.value, nonfinite_error(report_samples.forward()), NonFiniteError(report_samples.forward())):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is NonFiniteError
        assert again.report.to_dict() == error.report.to_dict()
        assert str(again) == str(error)


# --- healthy models -----------------------------------------------------------------------------------------------


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class ReZero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(()))
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * self.inner(x)


class ZeroLastLayers(nn.Module):
    """As in diffusion models: the end of each block and of the whole begin at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2))
        self.out = nn.Linear(6, 6)
        for layer in (self.out, *(block[-1] for block in self.blocks)):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


class Scales(nn.Module):
    """Scales and norms that are constant by design, in several dimensions; a mask and an unused constant."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((3, 6))
        self.temperature = nn.Parameter(torch.ones(3, 1))
        self.layer_scale = nn.Parameter(1e-5 * torch.ones(3, 6))
        self.mask = nn.Parameter(torch.full((3, 6), -inf).triu(1), requires_grad=False)
        self.register_buffer("lowest", torch.full((2,), inf))
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1).expand(-1, 3, -1)
        return self.linear(self.norm(x)) * self.temperature * self.layer_scale


class Tokens(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6, padding_idx=0, sparse=sparse)
        self.rnn = nn.LSTM(6, 5, batch_first=True)
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(self.embed(x))
        return self.attention(y, y, y)[0]


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
HEALTHY: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 2)), X),
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.PReLU(), nn.Flatten(), nn.Linear(144, 2)),
        torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)),
    ),
    "lora": (Lora, X),
    "rezero": (ReZero, X),
    "zero last layers": (ZeroLastLayers, X),
    "scales": (Scales, X),
    "tokens": (lambda: Tokens(False), torch.tensor([[1, 2, 0], [3, 4, 5]])),
    "sparse tokens": (lambda: Tokens(True), torch.tensor([[1, 2, 0], [3, 4, 5]])),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), X),
    "half": (lambda: nn.Linear(6, 4).half(), X.half()),
    "bfloat16": (lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, dtype=torch.bfloat16), X.bfloat16()),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)), X),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_have_no_findings(name: str) -> None:
    torch.manual_seed(0)
    build, x = HEALTHY[name]
    model = build()
    assert check_weights(model) == []
    assert check_gradients(model) == []
    backed(model, x)
    assert check_weights(model) == []
    assert check_gradients(model) == []
    trained(model, x, steps=3, lr=0.01)
    assert check_weights(model) == []
    assert check_gradients(model) == []
    model.zero_grad(set_to_none=False)
    assert check_weights(model) == []
    assert check_gradients(model) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p),
        lambda p: torch.optim.SGD(p),
        lambda p: torch.optim.SGD(p, momentum=0.9),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.LBFGS(p, max_iter=2),
    ],
)
def test_healthy_training_has_no_findings_with_its_optimizer(make: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = make(model.parameters())
    assert check_weights(model, optimizer) == []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(X).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert check_weights(model, optimizer) == []


def test_a_part_is_not_judged_as_the_whole() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    model = nn.ModuleList([embedding, backed(nn.Linear(6, 2), X)])
    embedding.weight.grad = torch.sparse_coo_tensor([[1, 3]], torch.zeros(2, 4), (10, 4), check_invariants=True)
    assert check_gradients(model) == []


# --- findings -----------------------------------------------------------------------------------------------------


def test_dead_relu_leaves_zero_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    nn.init.constant_(model[0].bias, -100.0)
    findings = check_gradients(backed(model, X))
    # The last weight reads only zeros.
    assert problems(findings) == {"0.weight": "all_zero", "2.weight": "all_zero"}
    text = "0.weight: the gradient is exactly zero, but others are not: all 0, [16, 6] float32; the parameter: -0.4"
    assert findings[0].text.startswith(text)
    assert findings[0].parameter is not None
    assert findings[0].parameter.max == model[0].weight.max().item()


def test_zero_layers_in_a_row_can_never_train() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    for layer in model[1:]:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    assert problems(check_weights(backed(model, X))) == {"1.weight": "all_zero", "2.weight": "all_zero"}


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_nonfinite_gradient_is_found_in_every_layout(bad: float) -> None:
    model = Tokens(sparse=True)
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    assert model.embed.weight.grad is not None
    assert model.rnn.weight_hh_l0.grad is not None
    values = model.embed.weight.grad.coalesce()
    values._values()[1, 2] = bad
    model.embed.weight.grad = values
    model.rnn.weight_hh_l0.grad[1, 3] = bad
    findings = check_gradients(model)
    assert problems(findings) == {"embed.weight": "nonfinite", "rnn.weight_hh_l0": "nonfinite"}
    assert [f.tensor.first_index for f in findings] == [(2, 2), (1, 3)]


@pytest.mark.parametrize(
    ("dtype", "size", "extreme"),
    [
        (torch.float32, 1e14, False),
        (torch.float32, -1e16, True),
        (torch.bfloat16, 1e14, False),
        (torch.bfloat16, 1e16, True),
        (torch.float16, 9e3, False),
        (torch.float16, -2e4, True),
        (torch.float64, 1e100, False),
        (torch.float64, 1e200, True),
        (torch.float32, 1e-37, False),
        (torch.float32, 1e-40, True),
    ],
)
def test_extreme_means_that_squares_overflow_or_vanish(dtype: torch.dtype, size: float, extreme: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=dtype)
    with torch.no_grad():
        model.weight.mul_(0)[0, 1] = size
    # A weight that large is extreme for three inputs, whatever its type can hold.
    assert problems(check_weights(model)) == ({"weight": "extreme"} if extreme or size > 1e3 else {})
    assert problems(check_weights(model, max_gain=inf)) == ({"weight": "extreme"} if extreme else {})
    model = nn.Linear(3, 2, dtype=dtype)
    model.weight.grad = torch.zeros(2, 3, dtype=dtype)
    model.weight.grad[1, 1] = size
    model.bias.grad = torch.ones(2, dtype=dtype)
    assert problems(check_gradients(model)) == ({"weight": "extreme"} if extreme else {})


def test_missing_gradients_are_reported_but_not_those_of_frozen_parameters() -> None:
    model = nn.ModuleDict({"used": nn.Linear(6, 2), "forgotten": nn.Linear(6, 2), "frozen": nn.Linear(6, 2)})
    model["frozen"].requires_grad_(False)
    model["used"](X).sum().backward()
    findings = check_gradients(model)
    assert problems(findings) == {"forgotten.weight": "missing", "forgotten.bias": "missing"}
    assert findings[0].text == "forgotten.weight: has no gradient, but other parameters do: [2, 6] float32"


def test_constant_weight_of_a_linear_map() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    nn.init.constant_(model[1].weight, 0.1)
    (finding,) = check_weights(model)
    assert (finding.name, finding.problem) == ("1.weight", "constant")
    assert "all 0.1, [4, 4] float32" in finding.text


def test_nonfinite_weights_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with torch.no_grad():
        model[2].bias[1] = inf
        model[1].running_var[2] = nan
    findings = check_weights(model)
    assert problems(findings) == {"2.bias": "nonfinite", "1.running_var": "nonfinite"}
    assert "Inf 1 of 2, first at [1]" in findings[0].text
    model.requires_grad_(False)
    assert problems(check_weights(model)) == {"1.running_var": "nonfinite"}  # an infinity may be meant


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop])
def test_never_updated(make: Callable[..., Any]) -> None:
    model = nn.ModuleDict({"used": nn.Linear(6, 2), "idle": nn.Linear(6, 2), "left_out": nn.Linear(6, 2)})
    optimizer = make([*model["used"].parameters(), *model["idle"].parameters()])
    left_out = {"left_out.weight": "never_updated", "left_out.bias": "never_updated"}
    assert problems(check_weights(model, optimizer)) == left_out
    model["used"](X).sum().backward()
    optimizer.step()
    idle = {"idle.weight": "never_updated", "idle.bias": "never_updated"}
    assert problems(check_weights(model, optimizer)) == idle | left_out
    other = torch.optim.SGD(model["left_out"].parameters())
    assert problems(check_weights(model, optimizer, other)) == idle
    assert problems(check_weights(model["left_out"], optimizer)) == {}  # not this model's optimizer


def test_tied_weights_are_reported_once_and_wrappers_keep_names_readable() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[0].weight[0, 0] = nan
    wrapped = torch.compile(model, backend="eager")
    assert isinstance(wrapped, nn.Module)
    assert problems(check_weights(wrapped)) == {"0.weight": "nonfinite"}


# --- numbers, lists, arrays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (nan, "v at .*: NaN, .* float"),
        ([1.0, inf, 2.0], r"v at .*: Inf 1 of 3, first at \[1\], the rest 1 … 2"),
        ({"loss": 0.5, "parts": {"kl": nan}}, r"v\['parts'\]\['kl'\] at .*: NaN"),
        (np.array([[1.0, 2.0], [nan, 4.0]], dtype=np.float32), r"v at .*: NaN 1 of 4, first at \[1, 0\].* float32"),
        (np.float64(inf), "v at .*: Inf"),
        ((1, 2.0, [np.ones(2), np.array(-inf)]), r"v\[2\]\[1\] at .*: -Inf"),
        (Output(torch.ones(1), nan), "v.loss at .*: NaN"),  # type: ignore[arg-type]
        (complex(0, nan), "v at .*: NaN"),
        (np.array([1, nan], dtype=np.longdouble), r"v at .*: NaN 1 of 2"),
    ],
    ids=repr,
)
def test_check_reads_numbers_lists_and_arrays(value: Any, words: str) -> None:
    with pytest.raises(NonFiniteError, match=words):
        check(value, "v")


@pytest.mark.parametrize("value", [0.5, [1.0, 2.0], {"a": 3}, np.ones(3), np.arange(3), [], {"x": ["name"]}, range(3)])
def test_check_lets_finite_numbers_pass(value: Any) -> None:
    assert check(value) is value


# --- what is extreme for one tensor -------------------------------------------------------------------------------


def blocks(count: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(count)))


def test_a_weight_is_compared_with_its_fan_in() -> None:
    model = nn.Sequential(nn.Linear(256, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.normal_(std=20.0)
    (finding,) = check_weights(model)
    assert (finding.name, finding.problem) == ("0.weight", "extreme")
    assert re.search(
        r"makes its input about 3\d\d times larger \(fan-in 256; initialisers give about 1\)", finding.text
    )
    assert check_weights(model, max_gain=1000) == []


def test_a_weight_is_compared_with_its_neighbours() -> None:
    model = blocks()
    with torch.no_grad():
        model[3][0].bias.mul_(500)
    (finding,) = check_weights(model)
    assert finding.name == "3.0.bias"
    assert re.search(r"is \d+ times as large as the others of its kind", finding.text)
    assert check_weights(model, max_ratio=1e4) == []


def test_one_element_far_from_the_others() -> None:
    model = blocks(1)
    with torch.no_grad():
        model[0][0].weight[3, 7] = 400.0
    (finding,) = check_weights(model)
    assert re.search(r"0.0.weight: one element is .* times as large as the others", finding.text)


def test_a_weight_is_compared_with_its_own_past() -> None:
    model = blocks()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert check_weights(model, since=before) == []
    with torch.no_grad():
        for block in model:
            block[0].weight.mul_(20)
    findings = check_weights(model, since=before)
    assert [f.problem for f in findings] == ["extreme"] * 6
    assert "0.0.weight: is 20 times as large as it was: " in findings[0].text
    assert check_weights(model, since=before, max_growth=30) == []


def test_an_absolute_bound_for_weights_and_gradients() -> None:
    model = backed(nn.Linear(6, 2), X)
    assert problems(check_weights(model, max_abs=0.01)) == {"weight": "extreme", "bias": "extreme"}
    assert problems(check_gradients(model, max_abs=1e-3)) == {"weight": "extreme", "bias": "extreme"}
    assert check_gradients(model, max_abs=1e3) == []


@pytest.mark.parametrize(("key", "value"), [("running_var", inf), ("running_mean", -inf), ("running_var", -1.0)])
def test_statistics_of_a_norm_layer_are_checked(key: str, value: float) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    model.register_buffer("mask", torch.tensor([0.0, -inf]))
    getattr(model[1], key)[1] = value
    (finding,) = check_weights(model)
    assert finding.name == f"1.{key}"


def test_dead_units_are_counted_but_not_outputs_that_are_not_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 32))
    with torch.no_grad():
        model[0].bias[:62] = -100.0
    model(X)[:, :1].sum().backward()  # one of 32 outputs
    for findings in (check_gradients(model), check_weights(model)):
        assert problems(findings) == {"0.weight": "dead_units"}
        assert "62 of 64 units are dead" in findings[0].text


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: check_weights(m, max_gain="x"), "max_gain must be a positive number, got 'x'"),
        (lambda m: check_weights(m, max_ratio=0), "max_ratio must be a positive number, got 0"),
        (lambda m: check_weights(m, since=3), "since must be a state dict, got 3"),
        (lambda m: check_gradients(m, max_abs=-1), "max_abs must be a positive number, got -1"),
    ],
)
def test_bounds_must_make_sense(call: Callable[[nn.Module], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call(nn.Linear(1, 1))
