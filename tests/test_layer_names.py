"""The layer watch names the first bad layer: in many architectures, early and late, with and without `batches()`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from firstnan import NaNDetector, NonFiniteError
from layer_cases import CASES, SWITCH, spoil

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]
LATE = 21
"""By then most steps only take notes."""
IN_CHILDREN = (
    *("resnet", "gpt_backward", "written_between_layers", "checkpoint_backward", "scripted_layer"),
    *("buffer_written_in_forward", "weight_written_in_the_step"),
)


@pytest.fixture(autouse=True)
def _switched_off() -> Iterator[None]:
    SWITCH.zero_()
    yield
    SWITCH.zero_()


def first_named(name: str, at: int, through: bool) -> tuple[str, str, str]:
    """The layer of the first event, and the one that the case wants."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = CASES[name]()
    optimizer = torch.optim.SGD(case.model.parameters(), 1e-4)
    given = [case.data() for _ in range(at + 1)]
    detector = NaNDetector(case.model, optimizer, layers=True)
    with pytest.raises(NonFiniteError) as caught, detector:
        case.later()
        for i, x in enumerate(detector.batches(given) if through else given):
            SWITCH.fill_(float(i >= at))
            optimizer.zero_grad()
            loss = case.run(case.model, x).square().mean()
            loss.backward()
            optimizer.step()
    assert caught.value.report.step == at
    event = next(e for e in detector.events if e.layer_type)
    assert event in caught.value.report.events
    return event.layer, event.what or "", event.phase or ""


def wanted(name: str) -> tuple[str, str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = CASES[name]()
    return case.layer, case.what, case.phase


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("at", "through"), [(2, True), (LATE, True), (LATE, False)])
def test_the_first_bad_layer_is_named(name: str, at: int, through: bool, in_process: None) -> None:
    assert first_named(name, at, through) == wanted(name)


@pytest.mark.parametrize("name", IN_CHILDREN)
@pytest.mark.parametrize("through", [True, False])
def test_a_child_names_the_same_layer(name: str, through: bool) -> None:
    assert first_named(name, LATE, through) == wanted(name)


class SpoilsSecondCall(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return spoil(x) if self.calls % 2 == 0 else x * 1.0


@pytest.mark.parametrize("at", [2, LATE])
def test_the_calls_of_a_layer_are_counted_within_the_step(at: int) -> None:
    twice = SpoilsSecondCall()
    model = nn.Sequential(nn.Linear(4, 4), twice, nn.Linear(4, 4), twice, nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer, layers=True) as detector:
        for i in range(at + 1):
            SWITCH.fill_(float(i >= at))
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
    event = next(e for e in detector.events if e.layer_type)
    assert (event.layer, event.call, event.paths) == ("1", 1, ("1", "3"))
    assert "first bad: 1 (SpoilsSecondCall), call 1, output" in str(caught.value)


def test_there_are_many_architectures() -> None:
    assert len(CASES) >= 40
