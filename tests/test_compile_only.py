"""A step that fails only if it is compiled: the operator that differs is named, and nothing else is called so."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.data import DataLoader, TensorDataset

from firstnan import NaNDetector, NonFiniteError, Report, load
from firstnan.engine import isolation
from firstnan.observe import manifest
from firstnan.observe.compiler import compile_again
from zygote import Zygote

pytestmark = pytest.mark.slow
pytest_plugins = ["zygote"]
HERE = Path(__file__)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def line_of(mark: str, text: str = HERE.read_text()) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if f"# {mark}" in line)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8, bias=False), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).abs()
        scale = torch.cosh(h.mean(dim=1, keepdim=True))  # born
        return self.last(h * scale)


def wrong_cosh(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A compiler that takes cosh for log: the same to look at, but -inf where cosh is 1."""
    for node in graph.graph.nodes:
        if node.target is torch.cosh:
            node.target = torch.log
    graph.recompile()
    return graph.forward


def wrong_backward(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A compiler of backward graphs that takes sinh, the derivative of cosh, for log."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.sinh.default:
            node.target = torch.ops.aten.log.default
    graph.recompile()
    return graph.forward


def as_it_is(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    return graph.forward


def data(zero: int = 41) -> DataLoader[Any]:
    torch.manual_seed(0)
    x, y = torch.randn(64, 4), torch.rand(64, 1)
    x[zero] = 0.0
    return DataLoader(TensorDataset(x, y), batch_size=8)


def trained(backend: Any, net: nn.Module | None = None, spoil: Callable[[Tensor], Tensor] | None = None) -> Report:
    torch.manual_seed(0)
    net = net or Net()
    model = torch.compile(net, backend=backend)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(net, optimizer):
        for x, y in data():
            loss = (model(x) - y).square().mean()
            loss = loss if spoil is None else spoil(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return caught.value.report


def slug(report: Report) -> str:
    return report.cause.slug if report.cause is not None else ""


def test_the_operator_that_is_finite_only_uncompiled() -> None:
    report = trained(wrong_cosh)
    assert (slug(report), report.reproduced, report.step) == ("compile_only", "deterministic", 5)
    assert report.origin is not None
    assert report.origin.site is not None
    assert (report.origin.op, report.origin.phase, report.origin.site.line) == ("cosh", "forward", line_of("born"))
    assert report.batch is not None
    assert (report.batch.bad_samples, report.batch.dataset_indices) == ((1,), (41,))
    assert report.cause is not None
    assert "wrong_cosh" in report.cause.why
    assert [remedy.title for remedy in report.remedies] == ["Run `forward` uncompiled", "Do not compile"]


def test_a_derivative_that_is_finite_only_uncompiled() -> None:
    report = trained(aot_autograd(fw_compiler=as_it_is, bw_compiler=wrong_backward))
    assert slug(report) == "compile_only"
    assert report.origin is not None
    assert (report.origin.op, report.origin.phase) == ("sinh", "backward")
    assert report.origin.site is not None
    assert report.origin.site.line == line_of("born")


class Negative(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.sum(dim=1, keepdim=True).log().nan_to_num(0, 0)  # undefined


def test_what_fails_uncompiled_too_has_its_own_cause() -> None:
    report = trained(as_it_is, Negative(), spoil=lambda loss: loss / (loss > 0.6))
    assert slug(report) != "compile_only"
    assert report.reproduced == "deterministic"


def test_what_fails_once_is_not_the_compilers_fault() -> None:
    calls = 0

    def in_the_sixth_call(loss: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return loss / 0.0 if calls == 6 else loss

    report = trained(as_it_is, spoil=in_the_sixth_call)
    assert slug(report) in ("", "transient")
    assert report.step == 5


def test_what_fails_now_and_then_is_not_the_compilers_fault() -> None:
    """Fails in the first run, and then in every second process that replays it."""
    from firstnan.engine import compiled

    outcomes = iter(["failed", "finite", "finite", "finite", "failed"])

    def outcome(*args: Any, **kwargs: Any) -> Any:
        return next(outcomes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_outcome", outcome)
        assert slug(trained(wrong_cosh)) != "compile_only"


def test_a_comparison_replaces_what_the_manifest_names() -> None:
    modules = [importlib.import_module(one) for one in sorted({module for module, _ in manifest.COMPARED})]

    def all_of_them() -> dict[tuple[str, str], Any]:
        found = {}
        for module in modules:
            for name, value in vars(module).items():
                found[module.__name__, name] = value
                if isinstance(value, type) and value.__module__ == module.__name__:
                    found |= {(module.__name__, f"{name}.{inner}"): one for inner, one in vars(value).items()}
        return found

    before, child = all_of_them(), isolation.fork()
    if isinstance(child, isolation.Channel):
        compile_again(lambda *args: None, lambda *args: None)
        child.send({name for name, value in all_of_them().items() if before.get(name) is not value})
        child.leave()
    assert child is not None
    changed = list(child.receive(60))
    child.end()
    assert changed == [set(manifest.COMPARED)]


PROGRAM = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x, square):
        h = torch.tanh(self.a(x.float()))
        spread = (x * x - square).sum(dim=1, keepdim=True)
        return self.b(h) * torch.sqrt(spread.float() + 1e-6)  # born


torch.manual_seed(0)
x, y = torch.randn(32, 4).bfloat16(), torch.rand(32, 1)
square = x * x  # rounded to bfloat16, as the product in forward is unless it is part of a larger kernel
square[torch.arange(32) != 17] -= 4
net = Net()
model = torch.compile(net, fullgraph=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for x, square, y in DataLoader(TensorDataset(x, square, y), batch_size=8):
    loss = ((model(x, square) - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.timeout(600)
def test_inductor_keeps_more_digits_than_the_operators(firstnan: Zygote, tmp_path: Path) -> None:
    """A difference that real kernels make: a product inside a kernel is not rounded to bfloat16."""
    (tmp_path / "train.py").write_text(PROGRAM)
    done = firstnan(["run", "--verify", "1", "--json", "report.json", "train.py"], cwd=tmp_path)
    assert done.code == 3, done.stderr
    report = load(tmp_path / "report.json")
    assert (slug(report), report.step) == ("compile_only", 2)
    assert report.origin is not None
    assert report.origin.site is not None
    assert (report.origin.op, report.origin.site.line) == ("sqrt", line_of("born", PROGRAM))
    assert report.batch is not None
    assert report.batch.bad_samples == (1,)
    # `disable` inside a graph that must be whole is an error, so the other fix is the one that helps.
    told = [(remedy.title, remedy.proven, remedy.note) for remedy in report.remedies]
    assert told[0][:2] == ("Do not compile", True), told
