"""A failure that does not come again: what replays show of it, and what differed first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from firstnan import NaNDetector, NonFiniteError
from firstnan.records import Report
from firstnan.tracing.recording import Difference, digest, first_difference
from firstnan.tracing.tracer import Tracer
from zygote import Zygote

pytestmark = pytest.mark.slow

pytest_plugins = ["zygote"]


# --- two traces ---------------------------------------------------------------------------------------------------


def compared(step: Callable[[], object]) -> Difference | None:
    """The difference between two traces of the same step."""
    traces = []
    for _ in range(2):
        tracer = Tracer()
        tracer.marks, tracer.region = True, "step"
        with tracer:
            step()
        traces.append(tracer.raws)
    return first_difference(*traces)


X = torch.rand(4, 3) + 1


def test_the_same_step_does_not_differ() -> None:
    weight = torch.rand(3, requires_grad=True)

    def step() -> None:
        torch.manual_seed(0)
        scratch = torch.empty(1000)
        scratch.copy_(torch.rand(1000))
        ((X * weight).sum().log() + scratch.sum() * float("nan")).backward()

    assert compared(step) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.bool, torch.uint8])
def test_a_change_of_any_element_is_seen(dtype: torch.dtype) -> None:
    for size in range(1, 18):
        for start in range(3):
            values = torch.ones(40).to(dtype)[start : start + size]
            for at in range(size):
                changed = values.clone()
                changed[at] = 0
                assert digest(changed) != digest(values)
            assert digest(values) == digest(values.clone()) == digest(torch.stack([values] * 2, 1)[:, 0])


def test_another_operator() -> None:
    calls: list[int] = []

    def step() -> Tensor:
        calls.append(1)
        return X.log().sum() if len(calls) == 1 else X.exp().sum()

    difference = compared(step)
    assert difference is not None
    assert difference.whose == "program"
    assert "log in line" in difference.text
    assert "exp in line" in difference.text


def test_another_number() -> None:
    rates = iter([0.5, 0.25])
    difference = compared(lambda: (X.sum() * next(rates)).log())
    assert difference == (
        "program",
        f"mul in line {_line('next(rates)')} was called with other = 0.5, then with other = 0.25",
    )


def test_other_values_from_outside() -> None:
    states = iter([torch.zeros(3), torch.ones(3)])
    difference = compared(lambda: (X * 2 + next(states)).sum())
    assert difference is not None
    assert difference.whose == "program"
    assert "add in line" in difference.text
    assert "made before the step" in difference.text


def test_a_generator_of_its_own() -> None:
    own = torch.Generator().manual_seed(0)
    difference = compared(lambda: torch.rand(3, generator=own).log())
    assert difference is not None
    assert difference.whose == "program"
    assert "generator" in difference.text


@pytest.fixture
def moody() -> Iterator[Callable[[Tensor], Tensor]]:
    """An operator that gives something else the second time, from the same numbers, as a broken device would."""
    calls: list[int] = []
    library = torch.library.Library("firstnan_test", "FRAGMENT")
    library.define("moody(Tensor x) -> Tensor")

    def run(x: Tensor) -> Tensor:
        calls.append(1)
        return x * float("nan") if len(calls) == 1 else x + 0

    library.impl("moody", run, "CompositeExplicitAutograd")
    yield torch.ops.firstnan_test.moody
    library._destroy()  # type: ignore[no-untyped-call]


def test_an_operator_that_is_not_deterministic(moody: Callable[[Tensor], Tensor]) -> None:
    difference = compared(lambda: (moody(X * 2) + 1).sum())
    assert difference is not None
    assert difference.whose == "machine"
    assert difference.text.startswith("moody in line")
    assert "nan, then" in difference.text
    assert "from the same numbers" in difference.text


def _line(code: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if f"{code})" in line and "_line" not in line)


# --- a detector ---------------------------------------------------------------------------------------------------


def trained(fails_at: set[int]) -> tuple[Report, int]:
    """Training that divides by zero whenever a counter of its own says so, and how often the step was made."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    calls = 0
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for x in detector.batches([torch.rand(8, 3) for _ in range(5)]):
            calls += 1
            out = model(x)
            if calls in fails_at:
                out = out / torch.zeros(1)
            optimizer.zero_grad()
            out.mean().backward()
            optimizer.step()
    return caught.value.report, calls


def test_finite_at_once_when_it_is_played_again(in_process: None) -> None:
    report, _ = trained({3})
    assert report.reproduced == "transient"
    assert report.cause is not None
    assert report.cause.slug == "transient"


def test_finite_when_it_is_played_again_the_second_time(in_process: None) -> None:
    report, calls = trained({3, 4})
    assert calls == 6  # as it happened, traced, untraced, and traced again to compare
    assert report.reproduced == "transient"
    assert report.origin is not None
    assert report.origin.op == "div"
    assert report.cause is not None
    # The loop did something else the second time: what it did the first time is still the cause.
    assert report.cause.slug == "div_by_zero"
    assert "transient" in [c.slug for c in report.other_causes]
    assert any("the first difference: zeros in line" in note for note in report.notes)


# --- whole programs -----------------------------------------------------------------------------------------------

PROGRAM = """
import itertools, os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

def counted(counter=itertools.count()):
    if {in_a_file}:
        n = os.path.getsize("count") if os.path.exists("count") else 0
        open("count", "a").write(".")
        return n
    return next(counter)

model = nn.Linear(3, 1)
opt = torch.optim.SGD(model.parameters(), 0.01)
data = TensorDataset(torch.rand(64, 3))
for (x,) in {batches}:
    out = model(x)
    if counted() in {fails_at}:
        out = out / torch.zeros(1)  # here
    loss = out.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def run(
    firstnan: Zygote, folder: Path, fails_at: list[int], *, in_a_file: bool, batches: str = "DataLoader(data, 8)"
) -> Report:
    path = folder / "train.py"
    path.write_text(PROGRAM.format(fails_at=fails_at, in_a_file=in_a_file, batches=batches))
    report = Report.from_dict(firstnan(["run", path], cwd=folder).found)
    assert report.step == 4
    return report


def test_a_counter_that_starts_again_with_the_program(firstnan: Zygote, tmp_path: Path) -> None:
    report = run(firstnan, tmp_path, [4], in_a_file=False)
    assert report.origin is not None
    assert report.origin.op == "div"
    assert report.reproduced == "deterministic"
    assert report.cause is not None
    assert "transient" not in [c.slug for c in (report.cause, *report.other_causes)]
    assert any("finite when replayed in the first run" in note for note in report.notes)


OF_A_COUNTER = """
import torch
from torch.utils.data import DataLoader

w = torch.zeros(3, requires_grad=True)
opt = torch.optim.SGD([w], 0.01)
for i, x in enumerate(DataLoader(torch.rand(40, 3) + 1, 8)):
    loss = (w + x - {what}).log().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(
    "what", ["9.0 * (i == 3)", "torch.full((3,), 9.0) * (i == 3)", "(torch.full_like(w, 9.0) if i == 3 else 0)"]
)
def test_a_step_that_depends_on_the_loops_own_counter(firstnan: Zygote, tmp_path: Path, what: str) -> None:
    """Handed out again, the batch is the next one that is counted; the body of the loop keeps its number."""
    path = tmp_path / "train.py"
    path.write_text(OF_A_COUNTER.format(what=what))
    report = Report.from_dict(firstnan(["run", path], cwd=tmp_path).found)
    assert report.origin is not None
    assert report.origin.op == "log"
    assert (report.reproduced, report.replay) == ("deterministic", "the loop's body was run again")


@pytest.mark.parametrize("batches", ["DataLoader(data, 8)", "zip(data.tensors[0].split(8))"])
def test_a_value_that_never_comes_again(firstnan: Zygote, tmp_path: Path, batches: str) -> None:
    report = run(firstnan, tmp_path, [4], in_a_file=True, batches=batches)
    assert report.origin is None
    assert report.reproduced == "transient"
    assert report.cause is not None
    assert report.cause.slug == "transient"
    assert any("second run did not fail" in note for note in report.notes)


def test_a_value_that_comes_again_once(firstnan: Zygote, tmp_path: Path) -> None:
    """In one process the replays would differ; each child begins with the same count, so it fails in all of them."""
    report = run(firstnan, tmp_path, [4, 5], in_a_file=True)
    assert report.reproduced == "deterministic"
    assert report.origin is not None
    assert report.origin.op == "div"
