"""Where a number came from, with the numbers of this run; and what history alone cannot show."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from firstnan.diagnose.rules import explain
from firstnan.diagnose.rules.base import growth
from firstnan.records import History, OptimizerHistory, StepRecord
from firstnan.tracing.tracer import Tracer
from test_rules import one, stat
from test_rules import reads as r
from test_rules import w as wrote
from test_rules_on_torch import Make, causes_of
from traced import trace_of
from zygote import Zygote

pytest_plugins = ["zygote"]
INF = float("inf")
HALF = torch.float16
COMPUTED = INF - INF

SENTENCES: list[tuple[str, Make]] = [
    (
        "The 0 is a softmax probability that underflowed (its logits range from 0 to 200).",
        lambda t: t(0.0, 200.0).softmax(0).log(),
    ),
    (
        "The 0 is a sigmoid that underflowed (its arguments are all -200).",
        lambda t: t(-200.0).sigmoid().view(1, 1)[0].log(),
    ),
    ("The 0 is 1 - p, where p is a sigmoid that reached exactly 1", lambda t: (1 - t(200.0).sigmoid()).log()),
    (
        "The 0 is 1 minus a number that was rounded to 1, computed from a sigmoid",
        lambda t: (1 - (1 - t(-20.0).sigmoid())).log(),
    ),
    (
        "The 0 is a product that underflowed or has a factor of 0 (its factors are all 1e-30).",
        lambda t: t(1e-30, 1e-30).prod().log(),
    ),
    ("The 0 comes from relu (its inputs range from -1 to 1).", lambda t: 1 / t(-1.0, 1.0).relu()),
    ("The 0 is the norm of a zero vector.", lambda t: (lambda x: x / x.norm())(t(0.0, 0.0))),
    ("The 0 is the distance between equal points.", lambda t: 1 / torch.cdist(t(1.0)[None], torch.ones(1, 1))),
    ("The 0 is the standard deviation of equal numbers.", lambda t: (lambda x: (x - x.mean()) / x.std())(t(3.0, 3.0))),
    (
        "The 0 is the range (maximum minus minimum) of equal numbers.",
        lambda t: (lambda x: x / (x.max() - x.min()))(t(3.0, 3.0)),
    ),
    (
        "The 0 is a count, and there was nothing to count.",
        lambda t: t(1.0, 2.0).sum() / torch.zeros(2, dtype=torch.bool).sum(),
    ),
    (
        "The 0 is a sum of powers of differences, and every difference is 0.",
        lambda t: ((t(1.0) - t(1.0)) ** 2).sum().sqrt(),
    ),
    ("The 0 is a mean of powers of numbers that are all 0.", lambda t: (t(0.0, 0.0) ** 3).mean() ** (1 / 3)),
    ("The 0 is a sum of exponentials that underflowed.", lambda t: t(-200.0, -300.0).exp().sum().log()),
    ("The 0 is a sum of terms that cancel or are all 0.", lambda t: 1 / t(1.0, -1.0).sum()),
    ("The 0 is the difference of two equal numbers.", lambda t: (lambda p: 1 / (p[0] - p[1]))(t(1.0, 1.0).sigmoid())),
    ("The 0 is the mean squared error of equal numbers.", lambda t: functional.mse_loss(t(1.0), torch.ones(1)).sqrt()),
    ("computes with a Python number that is NaN already (other is nan)", lambda t: t(1.0) * COMPUTED),
    ("The argument is the output of mm, which is unbounded.", lambda t: (t(200.0)[None] @ torch.ones(1, 1)).exp()),
    (
        "A division made the argument large: before it, the numbers reached only 2.",
        lambda t: (t(2.0) / 0.01).exp(),
    ),
]


@pytest.mark.parametrize(("sentence", "make"), SENTENCES)
def test_the_reason_goes_several_operators_back(sentence: str, make: Make) -> None:
    assert sentence in causes_of(make)[0].why


def test_a_multiple_of_something_is_not_taken_for_it() -> None:
    """x * mask is 0 because of the mask: nothing is said about x."""
    why = causes_of(lambda t: (t(5.0, 2.0).exp() * torch.tensor([0.0, 1.0])).log())[0].why
    assert "The 0" not in why


@pytest.mark.parametrize("makes", [torch.clone, lambda x: x.abs().amax(-1)], ids=["numbers", "a maximum"])
def test_a_guard_that_half_precision_rounds_to_zero_is_named(makes: Callable[[Tensor], Tensor]) -> None:
    def divided(dtype: torch.dtype) -> str:
        below = torch.zeros(1, 1, dtype=dtype)
        return causes_of(lambda t: t(0.0) / (makes(below) + 1e-8 * (dtype is HALF)))[0].why

    assert "an added number that float16 rounds to 0" in divided(HALF)
    assert "float16" not in divided(torch.float32).partition("`, ")[2]


def steps(*losses: float, lr: float = 0.1) -> History:
    records = tuple(StepRecord(i, loss=v, grad_norm=v, lr=lr) for i, v in enumerate(losses))
    return History(records, "SGD", (("lr", lr),))


def test_a_jump_in_the_failing_step_alone_is_no_growth() -> None:
    flat = (0.8, 1.1, 0.9, 1.0, 1.2)
    assert growth(steps(*flat, 1e22), failing=5) is None
    assert growth(steps(*flat, 1e22), failing=6) is not None
    assert growth(steps(0.8, 1.1, 30.0, 900.0, 1e5, 1e22), failing=5) is not None


def overflowing(weight: float, step: int, history: History) -> list[str]:
    read = (r("mat1", 1.0), r("mat2", weight, role="parameter", label="w"))
    origin, trace, _ = one("addmm", *read, out=wrote(INF), step=step)
    return [cause.slug for cause in explain(origin, trace, history)]


def test_large_weights_are_the_initialisers_or_the_first_updates() -> None:
    healthy = steps(1.0, lr=0.1)
    assert overflowing(1e12, 0, History()) == ["bad_init", "overflow"]
    assert overflowing(1e12, 1, healthy) == ["bad_init", "overflow"]
    assert overflowing(1e12, 1, steps(1.0, lr=1e12)) == ["divergence_lr", "overflow"]
    assert overflowing(1.0, 1, healthy) == ["overflow"]
    adaptive = replace(steps(1.0, lr=1.0), settings=(("lr", 1.0), ("eps", 1e-8), ("alpha", 0.99)))
    assert overflowing(10.0, 1, adaptive) == ["divergence_lr", "overflow"]
    assert overflowing(10.0, 1, steps(1.0, lr=1.0)) == ["overflow"]
    other = replace(healthy, others=(OptimizerHistory(steps(1.0, lr=1e12).steps, "Adam", (("lr", 1e12),)),))
    assert overflowing(1e12, 1, other) == ["divergence_lr", "overflow"]


def test_a_first_loss_beyond_all_bounds_is_not_the_learning_rates_fault() -> None:
    assert overflowing(1e30, 1, steps(1e33, lr=0.01)) == ["bad_init", "divergence_lr", "overflow"]
    assert overflowing(1e10, 1, steps(1e12, lr=0.01)) == ["divergence_lr", "overflow"]  # data without any scaling


def test_the_range_of_weights_is_known_although_another_operator_fails() -> None:
    weight, tracer = torch.full((2, 2), 1e30, requires_grad=True), Tracer()
    tracer.give_role(weight, "parameter", "w")
    _, trace, _ = trace_of(lambda: (torch.ones(2, 2) @ weight) ** 2, tracer)
    product = next(e for e in trace.events if e.op == "mm")
    (operand,) = (i for i in product.inputs if i.role == "parameter")
    assert operand.stat is not None
    assert (operand.stat.max, operand.stat.shape) == (pytest.approx(1e30), (2, 2))


def test_a_deep_net_of_ordinary_numbers_can_be_badly_initialised() -> None:
    weight = replace(stat("mat2", -12.0, 12.0), shape=(64, 64))
    reading = replace(r("mat2", 0.0, role="parameter", label="w"), stat=weight)
    origin, trace, _ = one("addmm", r("mat1", 1e30), reading, out=wrote(INF), step=0)
    assert explain(origin, trace, History())[0].slug == "bad_init"
    small = replace(reading, stat=replace(weight, min=-0.12, max=0.12))
    origin, trace, _ = one("addmm", r("mat1", 1e30), small, out=wrote(INF), step=0)
    assert explain(origin, trace, History())[0].slug == "overflow"


DATASET = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)


class Rows(Dataset):
    def __init__(self):
        self.rows = [",".join(f"{{v:.3f}}" for v in torch.randn(5).tolist()) for _ in range(64)]
        self.rows[21] = "{row}"

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        cells = [float(cell) for cell in self.rows[i].split(",")]
        return torch.tensor(cells[:4]), torch.tensor(cells[4])


model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for x, level in DataLoader(Rows(), batch_size=8):
    loss = ((model(x).squeeze(1) - level) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
TABLE = """\
import torch
from torch import nn

torch.manual_seed(0)
table = torch.randn(64, 5)
table[21, {column}] = float("nan")
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for part in table.split(8):
    loss = ((model(part[:, :4]).squeeze(1) - part[:, 4]) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("source", "slug"),
    [
        (DATASET.format(row="0.1,0.2,0.3,0.4,nan"), "nan_label"),
        (DATASET.format(row="0.1,nan,0.3,0.4,0.5"), "nan_input"),
        (TABLE.format(column=4), "nan_label"),
        (TABLE.format(column=1), "nan_input"),
    ],
    ids=["dataset-target", "dataset-input", "table-target", "table-input"],
)
def test_input_or_target_is_read_off_the_step(firstnan: Zygote, tmp_path: Path, source: str, slug: str) -> None:
    """Neither is called by a telling name."""
    program = tmp_path / "train.py"
    program.write_text(source, encoding="utf-8")
    result = firstnan(["run", program], cwd=tmp_path)
    assert result.cause == slug, result.stderr
    assert result.origin["phase"] == "input"


def test_a_step_without_a_loader_is_no_data_preparation(firstnan: Zygote, tmp_path: Path) -> None:
    """Outside any layer, before the first update: what has a gradient is the forward pass."""
    program = tmp_path / "train.py"
    program.write_text(
        "import torch\n"
        "w = torch.nn.Parameter(torch.full((4,), 1e25))\n"
        "optimizer = torch.optim.SGD([w], lr=1e-3)\n"
        "for _ in range(3):\n"
        "    loss = (w * w).sum()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n",
        encoding="utf-8",
    )
    result = firstnan(["run", program], cwd=tmp_path)
    assert (result.origin["phase"], result.origin["line"], result.cause) == ("forward", 5, "bad_init")


def test_weights_without_a_model_have_the_names_of_their_variables(firstnan: Zygote, tmp_path: Path) -> None:
    program = """
        import torch

        torch.manual_seed(0)
        first = (torch.randn(8, 16) * 0.1).requires_grad_()
        again = (torch.randn(16, 16) * 30.0).requires_grad_()
        last = torch.zeros(16, requires_grad=True)
        optimizer = torch.optim.SGD([first, again, last], lr=1e-3)
        for _ in range(5):
            h = torch.randn(4, 8) @ first
            for _ in range(40):
                h = h @ again
            loss = (h @ last).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(program))
    result = firstnan(["run", "--verify", "3", "train.py"], cwd=tmp_path)
    assert result.cause == "bad_init"
    assert "The parameter again holds magnitudes up to " in result.found["cause"]["why"]
    best = result.found["remedies"][0]
    assert (best["title"], best["failing_step_finite"]) == ("Use smaller initial weights", True)


def test_initial_weights_that_another_file_writes(firstnan: Zygote, tmp_path: Path) -> None:
    """The first update is finite, and the step after it overflows; the initialiser is in a file without a step."""
    files = {
        "train.py": """
            import torch
            from model.net import build

            torch.manual_seed(0)
            net = build()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            for _ in range(4):
                loss = net(torch.randn(8, 64)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        """,
        "model/net.py": """
            from torch import nn
            from .tools import init_weights


            def build():
                net = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.ReLU())))
                init_weights(net, 2.0)
                return net
        """,
        "model/tools.py": """
            from torch import nn


            def init_weights(net, gain):
                for m in net:
                    if isinstance(m, nn.Linear):
                        nn.init.normal_(m.weight, std=gain * m.in_features**0.5)
        """,
    }
    (tmp_path / "model").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    result = firstnan(["run", "--verify", "4", "train.py"], cwd=tmp_path)
    assert (result.cause, result.report["step"]) == ("bad_init", 1)
    best = result.report["remedies"][0]
    assert best["failing_step_finite"] is True
    assert best["edits"][0]["file"] == str(tmp_path / "model" / "tools.py")


def test_a_negative_number_that_the_optimizer_keeps_is_not_a_rounding_error() -> None:
    kept = r("self", -1e-5, 2.0, role="state", label="exp_avg_sq of head.weight")
    why = explain(*one("sqrt", kept, out=wrote(float("nan"), 1.4), phase="optimizer"))[0].why
    assert "(exp_avg_sq of head.weight)" in why
    assert "rounding" not in why
    assert "rounding" in explain(*one("sqrt", r("self", -1e-5, 2.0), out=wrote(float("nan"), 1.4)))[0].why
