"""Looking inside a Dataset for the line that made a bad value."""

from __future__ import annotations

import math
import random
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from firstnan.engine.data_origin import bad_rows, find_maker
from firstnan.engine.handouts import RandomState
from firstnan.observe.line_watch import LineWatch
from firstnan.observe.sites import Ownership
from firstnan.records import Origin
from firstnan.tensors.state import Handout
from firstnan.tracing.tracer import Tracer


class Logs(Dataset[Any]):
    """Takes the logarithm of its rows; row 5 is negative."""

    def __init__(self) -> None:
        self.rows = torch.ones(8, 2)
        self.rows[5, 1] = -1.0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        scaled = row * 2
        return torch.log(scaled), index  # guilty


class Arrays(Logs):
    """The same in numpy, where no operator is seen."""

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index].numpy()
        best = float("inf")
        best = min(best, float(row.max()))
        with np.errstate(invalid="ignore"):
            logs = np.log(row)  # guilty
        return {"x": torch.from_numpy(logs * 2), "best": best}


class Helper(Logs):
    """The bad number is a Python number, made in a helper."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.feature(float(v)) for v in self.rows[index]])

    def feature(self, value: float) -> float:
        ratio = value / 2
        result = math.nan if ratio < 0 else math.log(ratio)  # guilty
        return result  # noqa: RET504  # variables are what is watched


class Stored(Logs):
    """The bad value lies in the file: no line made it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows[5, 1] = math.nan

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Fragile(Logs):
    """Cannot be asked a second time."""

    def __getitem__(self, index: int) -> Any:
        raise OSError("the stream is closed")


class Random(Logs):
    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(2) + random.random() + np.random.rand()
        return torch.log(self.rows[index]) + noise  # guilty


def guilty_line(dataset: Dataset[Any]) -> int:
    import inspect

    lines, first = inspect.getsourcelines(type(dataset))
    return next(first + i for i, text in enumerate(lines) if "# guilty" in text)


def make(dataset: Dataset[Any], batch: Any, indices: Any) -> tuple[Any, Handout]:
    iterator = iter(DataLoader(dataset, batch_size=4))
    return iterator, Handout(batch, 1, 0, RandomState.now(), [], [], indices)


def maker(dataset: Dataset[Any], batch: Any, indices: Any = (4, 5, 6, 7)) -> Origin | None:
    found = find_maker(*make(dataset, batch, indices), Ownership())
    return found[0] if found else None


BATCH = torch.tensor([[0.0, 0.0], [0.0, math.nan], [0.0, 0.0], [0.0, 0.0]])


@pytest.mark.parametrize("kind", [Logs, Arrays, Helper, Random])
def test_the_line_that_makes_it(kind: type[Logs]) -> None:
    dataset = kind()
    origin = maker(dataset, BATCH)
    assert origin is not None
    assert origin.phase == "input"
    assert origin.site is not None
    assert (origin.site.file, origin.site.line) == (__file__, guilty_line(dataset))
    assert origin.produced is not None
    assert origin.produced.nan == 1


def test_an_operator_is_named() -> None:
    origin = maker(Logs(), BATCH)
    assert origin is not None
    assert origin.op == "log"
    assert origin.site is not None
    assert origin.site.code == "torch.log(scaled)"


def test_an_operation_of_numpy_and_its_variable_are_named() -> None:
    origin = maker(Arrays(), BATCH)
    assert origin is not None
    assert (origin.op, origin.label, origin.role) == ("log", "logs", "input")
    assert [(s.name, s.negative) for s in origin.inputs] == [("self", 1)]


def test_a_variable_is_named_where_there_is_no_operator() -> None:
    origin = maker(Helper(), BATCH)
    assert origin is not None
    assert (origin.op, origin.label, origin.role) == ("", "result", "input")


def test_only_the_suspects_are_fetched() -> None:
    asked: list[int] = []

    class Counting(Logs):
        def __getitem__(self, index: int) -> Any:
            asked.append(index)
            return super().__getitem__(index)

    assert maker(Counting(), BATCH) is not None
    assert asked == [5]


def test_every_sample_is_asked_where_the_batch_does_not_tell() -> None:
    """A batch without a common first dimension, or one that was put together differently."""
    origin = maker(Logs(), {"mean": torch.tensor(math.nan)})
    assert origin is not None
    assert origin.op == "log"


@pytest.mark.parametrize("kind", [Fragile])
def test_what_cannot_be_asked_again(kind: type[Logs]) -> None:
    assert maker(kind(), BATCH) is None
    assert sys.gettrace() is None or not type(sys.gettrace()).__module__.startswith("firstnan")


def test_without_indices_or_dataset() -> None:
    assert maker(Logs(), BATCH, None) is None
    assert find_maker(object(), make(Logs(), BATCH, [5])[1], Ownership()) is None


def test_healthy_samples() -> None:
    assert maker(Logs(), torch.zeros(4, 2), [0, 1, 2, 3]) is None


def test_random_numbers_are_put_back() -> None:
    iterator, handout = make(Random(), BATCH, [4, 5, 6, 7])
    expected = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert find_maker(iterator, handout, Ownership()) is not None
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert random.getstate() == expected[1]
    assert np.random.get_state()[1].tolist() == expected[2]


def test_a_trace_function_of_the_program_is_put_back() -> None:
    def mine(*_: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(mine)
    try:
        maker(Logs(), BATCH)
        assert sys.gettrace() is mine
    finally:
        sys.settrace(before)


def test_bad_rows() -> None:
    batch = (BATCH, {"y": torch.tensor([1.0, 2.0, 3.0, math.inf])}, torch.tensor(math.nan), torch.arange(4), "name")
    assert bad_rows(batch) == (1, 3)
    assert bad_rows({"x": torch.zeros(3)}) == ()


def test_bad_rows_of_other_layouts() -> None:
    complex_batch = torch.tensor([[1 + 1j], [complex(math.nan, 0)]])
    assert bad_rows(complex_batch) == (1,)
    sparse = torch.sparse_coo_tensor([[2], [0]], [math.nan], (4, 2))
    assert bad_rows(sparse) == (2,)


# --- the watch over lines ---------------------------------------------------------------------------------------------


def watch(function: Any, *args: Any, seconds: float = math.inf) -> tuple[int, str] | None:
    """Offset of the line inside the function, and the variable."""
    lines = LineWatch(Ownership(), seconds)
    with lines.watching():
        function(*args)
    if lines.first is None:
        return None
    from firstnan.observe.sites import resolve

    spot, name, *_ = lines.first
    return resolve(spot).line - function.__code__.co_firstlineno, name


def test_the_first_bad_variable() -> None:
    def sample() -> Tensor:
        a = torch.ones(2)
        b = a.log() - 1
        c = torch.sqrt(b)
        d = c + 1
        return d  # noqa: RET504

    assert watch(sample) == (3, "c")


def test_what_the_program_takes_itself_does_not_end_the_watch() -> None:
    def sample() -> Tensor:
        time.sleep(0.3)  # as importing a framework takes a while
        a = torch.ones(2)
        b = torch.sqrt(a - 2)
        return b  # noqa: RET504

    def laborious() -> Tensor:
        for _ in range(100_000):
            a = torch.ones(2)
        b = torch.sqrt(a - 2)
        return b  # noqa: RET504

    assert watch(sample, seconds=0.2) == (3, "b")
    assert watch(laborious, seconds=0.001) is None


def test_a_variable_that_was_bad_before_and_is_assigned_again() -> None:
    """The body of a loop that is run again finds its variables as the failing step has left them."""

    def scaled(row: Any) -> Any:
        with np.errstate(invalid="ignore"):
            return row / row.std()

    def again(row: Any) -> Any:
        row = scaled(np.zeros(3))
        return row.sum()

    lines = LineWatch(Ownership())
    with lines.watching():
        again(np.full(3, np.nan))
    found = lines.source_of(__file__, again.__code__.co_firstlineno + 1)
    assert found is not None
    assert found.spot[0] is scaled.__code__


def test_a_starting_value_of_infinity_is_no_bad_value() -> None:
    def sample() -> Any:
        best = float("inf")
        low = -math.inf
        row = np.array([1.0, -1.0])
        with np.errstate(invalid="ignore"):
            roots = np.sqrt(row)
        return roots, best, low

    assert watch(sample) == (5, "roots")


def test_a_number_that_is_infinite_where_nothing_else_is_found() -> None:
    def sample() -> float:
        x = 1e308
        y = x * 10
        return y  # noqa: RET504

    assert watch(sample) == (2, "y")


def test_arguments_that_are_bad_already_are_not_made_here() -> None:
    def sample(t: Tensor) -> Tensor:
        u = t[:1]
        return u  # noqa: RET504

    assert watch(sample, torch.tensor([1.0, math.nan])) is None


def test_a_generator_and_a_comprehension() -> None:
    def sample() -> list[Tensor]:
        def parts() -> Any:
            yield torch.ones(1)
            bad = torch.ones(1) * math.nan
            yield bad

        return [p for p in parts()]  # noqa: C416  # the loop is the point

    assert watch(sample) == (3, "bad")


def test_what_the_line_watch_reads_is_not_traced() -> None:
    tracer = Tracer(Ownership())
    lines = LineWatch(Ownership(), unseen=tracer.pause)

    def work() -> Tensor:
        first = torch.arange(6.0).log()
        second = first + 1
        return second * 2

    with tracer, lines.watching():
        work()
    assert [line.name for line in lines.lines] == ["first"]
    assert [event.op for event in tracer.trace().events] == ["arange", "log", "add", "mul"]
