"""Values that were created before the step: in a constructor, a table, a Dataset, a collate function, by chance."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)

from firstnan.diagnose.rules.data import wrapped_integers
from firstnan.engine import data_origin, isolation
from firstnan.engine.conclude import unit_of
from firstnan.engine.handouts import FirstBatch, Handouts, ReplayError
from firstnan.engine.samples.cut import Cut, Maker, cut_by_numbers
from firstnan.engine.samples.search import SampleSearch, search
from firstnan.engine.samples.underlying import underlying
from firstnan.observe.line_watch import RETURNED, LineWatch
from firstnan.observe.sites import Ownership, resolve
from firstnan.records import Batch, Cause, Element, History, Origin, Report, StepRecord, Trace
from firstnan.repair import propose
from firstnan.report.text import history_head
from firstnan.tensors.state import Handout, RandomState
from zygote import Zygote

pytest_plugins = ["zygote"]

PROGRAMS = Path(__file__).parent / "origins"


def marked(name: str, mark: str) -> int | None:
    """The line of a program with this mark."""
    lines = (PROGRAMS / f"{name}.py").read_text().splitlines()
    return next((i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}")), None)


ANSWERS: dict[str, dict[str, Any]] = {
    "sinus_table": {},
    "class_weights": {"bad_samples": None, "note": ""},
    "class_weights_of_batch": {"bad_samples": None, "note": "", "size": 4},
    "constant_module_level": {},
    "numpy_in_step": {},
    "replay_buffer": {"size": 6},
    "windows_of_a_stream": {},
    "emptied_list": {"bad_samples": [1], "confirmed": True},
    "adjacency": {"bad_samples": [59], "unit": "node"},
    "augmented_in_loop": {"bad_samples": [5], "dataset_indices": [21], "confirmed": True},
    "transform_split": {"elements": [{"dataset": "Tiles", "index": 77, "part": ""}], "confirmed": True},
    "iterable_workers": {"elements": [{"dataset": "Windows", "index": 20, "part": "worker 1"}], "bad_samples": [4]},
    "collate_length": {"dataset_indices": [101], "confirmed": True},
    "concat_subset": {"elements": [{"dataset": "Recording", "index": 9, "part": ".datasets[1]"}]},
    "batchnorm_row": {"dataset_indices": [333], "confirmed": True},
    "gnn_node": {"bad_samples": [17], "unit": "node", "confirmed": True},
    "no_loader_batch": {"bad_samples": [0], "confirmed": True, "unit": "sample"},
    "function_mode": {"dataset_indices": [37], "confirmed": True},
    "nested": {"bad_samples": [3]},
    "infinite_number": {"bad_samples": None, "note": ""},
    "infinite_loader": {"elements": [{"dataset": "Spectra", "index": 64, "part": ""}], "confirmed": True},
    "infinite_rows": {"bad_samples": [5], "confirmed": True, "note": ""},
    "table_in_first_batch": {"bad_samples": [5], "dataset_indices": [5], "confirmed": True},
    "pairwise": {"bad_samples": [6], "dataset_indices": [90], "confirmed": True},
    "tokens": {"bad_samples": [13], "unit": "token", "confirmed": True},
    "noise_no_loader": {
        "bad_samples": [1],
        "confirmed": True,
        "note": "the random numbers drawn in this step are the reason, not the data: k (line 19) = 59 in row 1",
    },
    "diffusion_timestep": {
        "bad_samples": [13],
        "confirmed": True,
        "dataset_indices": None,
        "note": "the random numbers drawn in this step are the reason, not the data: t (line 35) = 199 in row 13",
    },
    "diffusion_table": {
        "bad_samples": [2],
        "dataset_indices": None,
        "note": "the random numbers drawn in this step, or the data that they choose, are the reason: the step fails "
        "with other samples too, and is finite with other random numbers",
    },
    "json_rows": {"bad_samples": [3], "dataset_indices": [43]},
    "list_slices": {"bad_samples": [3], "confirmed": True, "size": 4, "unit": "sample"},
    "inline_slices": {"bad_samples": [3], "confirmed": True, "size": 8},
    "inline_index": {"bad_samples": [2], "confirmed": True, "size": 8},
    "diffusion_inside": {
        "bad_samples": [15],
        "confirmed": False,
        "dataset_indices": None,
        "features": [],
        "note": "the random numbers drawn in this step, or the data that they choose, are the reason: the step fails "
        "with other samples too, and is finite with other random numbers",
    },
}


LONG = """
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, Dataset, Subset

    torch.manual_seed(0)
    np.seterr(all="ignore")

    class Table(Dataset):
        def __init__(self):
            raw = np.random.default_rng(0).normal(size=(2000, 4)).astype("float32")
            raw[:, 3] = 1.0
            raw[1234, 3] = 0.0
            self.rows = raw[:, :3] / raw[:, 3:]  # here

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, i):
            return torch.from_numpy(self.rows[i])

    train = Subset(Table(), range(100, 2000))
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for x in DataLoader(train, batch_size=4):
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_bad_data_needs_the_first_step_of_a_second_run_only(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(LONG))
    result = firstnan(["run", "--verify", "0", "train.py"], cwd=tmp_path)
    lines = (tmp_path / "train.py").read_text().splitlines()
    assert "# here" in lines[result.origin["line"] - 1], result.stderr
    batch = result.found["batch"]
    assert (result.found["step"], batch["index"], batch["elements"][0]["index"]) == (283, 283, 1234)
    assert "starting the program again with the failing batch first" in result.stderr
    assert result.found["replay"] == "the program was run again, with the failing batch first"


@pytest.mark.slow
def test_ctrl_c_ends_the_search_for_the_line_that_created_bad_data(tmp_path: Path) -> None:
    program = "import os, time\nif os.path.exists('again'): time.sleep(60)\nopen('again', 'w')\n" + textwrap.dedent(
        LONG
    )
    (tmp_path / "train.py").write_text(program)
    words = [sys.executable, "-m", "firstnan", "run", "--verify", "0", "train.py"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = []
        for line in process.stderr:
            told.append(line)
            if "starting the program again" in line:
                process.send_signal(signal.SIGINT)
    assert process.returncode == 3
    assert not any("running the program again" in line for line in told)
    assert any("the second run did not finish" in line for line in told)


def test_the_first_batch_of_a_pass_is_the_failing_one() -> None:
    data = list(range(12))
    given, sampled = FirstBatch((7, 3), 12), SequentialSampler(data)
    one, other = iter(DataLoader(data, 4)), iter(DataLoader(list(range(9)), 4))
    assert given.in_place_of(other, [0, 1]) == [0, 1]  # another dataset
    assert given.in_place_of(one, [0, 1]) == [7, 3]
    assert given.in_place_of(one, [2, 3]) == [2, 3]
    assert given.in_place_of(iter(DataLoader(data, 4)), 5) == 5  # no batches
    assert given.in_place_of(iter(DataLoader(data, 4, sampler=sampled)), [0, 1]) == [7, 3]


def test_a_dataset_that_the_loop_has_made_is_not_that_of_the_first_step() -> None:
    def at(updates: int, data: TensorDataset) -> bool:
        batches = iter(DataLoader(data, 2))
        handouts.sampled(batches, [0, 1])
        handouts.fetched(batches, next(batches), updates)
        found = handouts.first_batch()
        assert found is not None
        return found.is_of_loop

    handouts, first, other = Handouts(), TensorDataset(torch.zeros(4)), TensorDataset(torch.zeros(4))
    assert [at(0, first), at(1, other), at(2, first)] == [False, True, False]


@pytest.mark.parametrize("name", ANSWERS)
def test_where_it_was_created_and_what_is_said_of_the_samples(firstnan: Zygote, tmp_path: Path, name: str) -> None:
    result = firstnan(["run", PROGRAMS / f"{name}.py"], cwd=tmp_path)
    assert result.origin["line"] == marked(name, "ORIGIN"), result.stderr
    if (read := marked(name, "READ")) is not None:
        assert result.origin["read_at"]["line"] == read
        assert f"{name}.py:{read}" in result.stderr
    batch = result.found["batch"] or {}
    assert {key: batch.get(key) for key in ANSWERS[name]} == ANSWERS[name]
    assert result.found["cause"]["slug"] != "nan_constant"  # none of them has one
    assert "internal error" not in result.stderr
    if name == "table_in_first_batch":
        assert result.found["cause"]["slug"] == "exp_overflow"
        assert "computes exp of 2880" in result.found["cause"]["why"]
    if (unit := batch.get("unit", "sample")) != "sample":
        assert f"{unit} " in result.stderr
        assert "sample" not in result.stderr


@pytest.mark.parametrize("program", ["json_rows", "infinite_rows"])
def test_bad_rows_are_cleaned_in_the_loop_if_their_line_cannot_be_changed(
    program: str, firstnan: Zygote, tmp_path: Path
) -> None:
    result = firstnan(["run", "--verify", "5", PROGRAMS / f"{program}.py"], cwd=tmp_path)
    first = result.found["remedies"][0]
    assert (first["title"], first["failing_step_finite"]) == ("Fill in the missing values of each batch", True)


def test_a_function_mode_of_the_program_sees_nothing_of_ours(firstnan: Zygote, tmp_path: Path) -> None:
    program = PROGRAMS / "mode_everywhere.py"
    result, plain = firstnan(["run", program], cwd=tmp_path), firstnan.python([program], cwd=tmp_path)
    assert (result.origin["line"], result.found["step"]) == (marked("mode_everywhere", "ORIGIN"), 4)
    assert result.stdout.splitlines()
    assert result.stdout.splitlines() == plain.stdout.splitlines()[: len(result.stdout.splitlines())]
    assert "internal error" not in result.stderr


# --- lines ------------------------------------------------------------------------------------------------------------


def watched(function: Any) -> LineWatch:
    lines = LineWatch(Ownership())
    with lines.watching():
        function()
    return lines


def offset(function: Any, lines: LineWatch) -> list[tuple[int, str]]:
    return [(resolve(line.spot).line - function.__code__.co_firstlineno, line.name) for line in lines.lines]


def test_what_a_function_returns_is_read_too() -> None:
    def scaled(row: Any) -> Any:
        with np.errstate(all="ignore"):
            return row / row.std()

    def sample() -> Any:
        return {"x": scaled(np.ones(3))}

    assert offset(scaled, watched(sample)) == [(2, RETURNED)]


def test_only_lines_that_read_nothing_bad_have_made_it() -> None:
    def table() -> Any:
        start = -math.inf
        counts = np.array([1.0, 0.0])
        with np.errstate(all="ignore"):
            weights = 1 / counts
        total = weights.sum()
        shares = torch.tensor(weights / total)
        return shares, start

    lines = watched(table)
    assert offset(table, lines) == [(1, "start"), (4, "weights")]
    first = table.__code__.co_firstlineno
    made = lines.source_of(__file__, first + 6)
    assert made is not None
    assert made.name == "weights"
    assert lines.source_of(__file__, first + 1) is None  # the source asks for it
    assert lines.source_of(__file__, first + 2) is None


def test_a_variable_that_is_assigned_again_passes_on_what_it_held() -> None:
    def table() -> Any:
        with np.errstate(all="ignore"):
            x = np.ones(2) / np.zeros(2)
        x = torch.from_numpy(x)
        x = torch.ones(2) / 0.0
        return x, 1

    lines, first = watched(table), table.__code__.co_firstlineno
    assert offset(table, lines) == [(2, "x"), (4, "x")]
    passed_on = lines.source_of(__file__, first + 3)
    assert passed_on is not None
    assert resolve(passed_on.spot).line == first + 2


class Table(dict[str, Any]):
    """What a data frame has in common with one of pandas."""

    columns = property(dict.keys)


Table.__module__ = "pandas.core.frame"


def test_a_column_of_a_table_is_followed_by_itself() -> None:
    def table() -> Any:
        data = Table(a=np.ones(3), b=np.array([1.0, 0.0, 2.0]), when=np.array(["NaT", "2024-01-01"], "M8[D]"))
        with np.errstate(all="ignore"):
            data["empty"] = np.log(-data["a"])
            data["ratio"] = data["a"] / data["b"]
        data["share"] = data["ratio"] / 2
        other = Table(data)
        x = torch.tensor(other["share"])
        y = torch.tensor(data["empty"])
        return x, y

    lines, first = watched(table), table.__code__.co_firstlineno
    names = ["data['when']", "data['empty']", "data['ratio']"]
    assert offset(table, lines) == list(zip((1, 3, 4), names, strict=True))
    assert [getattr(lines.source_of(__file__, first + n), "name", "") for n in (7, 8)] == [names[2], names[1]]


def test_a_comprehension_passes_on_what_its_function_or_its_statement_has_read() -> None:
    def scaled(row: Any) -> Any:
        with np.errstate(all="ignore"):
            z = row / row.std()
        return z.mean()

    def features(rows: Any) -> Any:
        return np.stack([scaled(row) for row in rows])

    def kept(rows: Any) -> Any:
        return [torch.from_numpy(part * 2) for part in (rows, rows)]

    assert offset(scaled, watched(lambda: features([np.arange(3.0), np.ones(3), np.arange(3.0)]))) == [(2, "z")]
    assert watched(lambda: kept(np.full(3, np.nan))).lines == []


def test_a_method_that_keeps_it_in_its_object() -> None:
    class Scaler:
        def __init__(self) -> None:
            self.mean = 0.0
            self.scale = torch.ones(2) / self.mean
            self.other = self.scale * 2

    lines = watched(Scaler)
    assert offset(Scaler.__init__, lines) == [(2, "self.scale")]


def test_a_large_array_that_is_written_into() -> None:
    """It is read again after such a line only: numpy does not count its writes."""

    def table() -> Any:
        raw = np.ones((3000, 4))
        raw[7, 3] = 0.0
        with np.errstate(all="ignore"):
            scale = 1.0 / raw[:, 3]
        raw[:, 3] = scale
        return raw

    assert offset(table, watched(table)) == [(4, "scale")]


def test_what_an_object_keeps_is_known_when_a_library_asks_it_for_a_row() -> None:
    class Kept:
        def __init__(self) -> None:
            self.rows = np.ones((3000, 4))
            with np.errstate(all="ignore"):
                self.rows[7] /= 0.0

        def __getitem__(self, i: int) -> Any:
            return torch.from_numpy(self.rows[i])

    def batch() -> Any:
        kept = Kept()
        return torch.stack([next(map(kept.__getitem__, [i])) for i in (6, 7)])

    assert offset(Kept.__init__, watched(batch)) == [(3, "self.rows")]


def test_rows_that_went_through_a_library_are_recognised() -> None:
    def logs(row: Any) -> Any:
        with np.errstate(all="ignore"):
            values = np.log(row)
        return {"x": values * 2}

    lines = watched(lambda: [logs(np.array([1.0, 2.0])), logs(np.array([2.0, 0.0])), logs(np.array([0.0, 0.0]))])
    batch = torch.tensor([[0.0, 1.0], [2 * math.log(2), -math.inf]])
    made = lines.source_in([torch.zeros(3), batch])
    assert made is not None
    assert made.name == "values"
    assert lines.source_in([torch.tensor([[0.0, -math.inf]])]) is None
    assert lines.source_in([]) is None


def test_the_table_that_a_bad_row_is_taken_from() -> None:
    def prepared(counts: Any) -> Any:
        with np.errstate(all="ignore"):
            table = counts / counts.sum(1, keepdims=True)
            column = np.log(counts[:, 0])
        return object(), table, column  # a library's object: what it holds is not read

    lines = watched(lambda: prepared(np.array([[1.0, 3.0], [0.0, 0.0], [2.0, 2.0]])))
    made = lines.source_in([torch.tensor([[0.5, 0.5], [math.nan, math.nan]], dtype=torch.float32)])
    assert made is not None
    assert made.name == "table"
    assert lines.source_in([torch.tensor([0.0, -math.inf])]) is None  # one number alone tells nothing
    assert lines.source_in([torch.tensor([[0.25, math.nan]])]) is None


def test_windows_of_a_table_are_recognised() -> None:
    def prepared(heights: Any) -> Any:
        with np.errstate(all="ignore"):
            table = np.log(heights)
        return object(), table

    lines = watched(lambda: prepared(np.array([[1.0, 2.0], [2.0, 0.0], [2.0, 2.0]])))
    window = torch.tensor([[[0.0, math.log(2)], [math.log(2), -math.inf]]])
    made = lines.source_in([window])
    assert made is not None
    assert made.name == "table"
    assert lines.source_in([window + 1]) is None


def test_integers_that_have_wrapped_are_named(tmp_path: Path) -> None:
    text = "import numpy as np\ndef area(a, b):\n    size = a * b\n    return np.log(size)\n"
    (tmp_path / "sizes.py").write_text(text)
    names: dict[str, Any] = {}
    exec(compile(text, str(tmp_path / "sizes.py"), "exec"), names)
    large, small = np.array([60000, 3], np.int32), np.array([50000, -3], np.int32)
    with np.errstate(all="ignore"):
        lines = watched(lambda: [names["area"](large, large), names["area"](small[1:], large[1:])])
    wrapped, negative = (data_origin.made_by(line) for line in lines.lines)
    assert wrapped_integers(wrapped).startswith(" size is int32 and goes down to -694967296: a product was probably")
    assert wrapped_integers(negative) == ""
    one = watched(lambda: names["area"](np.int32(60000), np.int32(60000))).lines[0]
    assert [(name, int(value)) for name, value in one.wrapped] == [("size", -694967296)]
    first = propose(wrapped, Trace(), History(), [Cause("nan_input", "", "")])[0]
    assert "+    size = a.astype(np.int64) * b\n" in first.diff


def test_a_number_that_went_through_a_library_is_recognised() -> None:
    def share(part: float, whole: float) -> Any:
        with np.errstate(all="ignore"):
            ratio = np.float32(part) / np.float32(whole)
        return {"y": ratio}

    lines = watched(lambda: [share(1.0, 2.0), share(0.0, 0.0)])
    made = lines.source_in([torch.tensor([0.5, math.nan])])
    assert made is not None
    assert made.name == "ratio"
    assert lines.source_in([torch.tensor([0.5, math.inf])]) is None
    assert lines.source_in([torch.tensor(math.nan)]) is None


# --- datasets ---------------------------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    def __init__(self, n: int = 12) -> None:
        self.rows = torch.arange(float(n * 2)).reshape(n, 2) + 1

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Wrapper(Dataset[Any]):
    """Takes each element from another dataset, backwards; of two it is not known which."""

    def __init__(self, inner: Dataset[Any], twice: bool = False) -> None:
        self.inner, self.twice = inner, twice

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        other = self.inner[0] if self.twice else 0.0
        return self.inner[len(self) - 1 - index] + other


def test_the_element_behind_subsets_splits_and_wrappers() -> None:
    rows = Rows()
    assert underlying(rows, 3) is None
    assert underlying(Subset(rows, [5, 7]), 1) == Element("Rows", 7)
    assert underlying(Subset(rows, torch.tensor([5, 7])), 1) == Element("Rows", 7)  # type: ignore[arg-type]
    part, _ = random_split(rows, [6, 6], torch.Generator().manual_seed(0))
    assert underlying(part, 2) == Element("Rows", part.indices[2])
    assert underlying(Subset(ConcatDataset([rows, Rows(4)]), [13]), 0) == Element("Rows", 1, ".datasets[1]")
    assert underlying(Wrapper(Subset(rows, range(4, 10))), 0) == Element("Rows", 9)
    assert underlying(Wrapper(rows, twice=True), 2) is None
    assert underlying(Subset(rows, []), 4) is None


def test_rows_that_datasets_has_selected() -> None:
    class Number(int):
        def as_py(self) -> int:
            return int(self)

    class Table:
        def column(self, _: int) -> Any:
            return [Number(40), Number(7)]

    class Selected:
        _indices = Table()

    assert underlying(Selected(), 1) == Element("Selected", 7)


def made(loader: DataLoader[Any], batch: Any, indices: Any, number: int = 0) -> Origin | None:
    iterator = iter(loader)
    handout = Handout(batch, number, 0, RandomState.now(), [], [], indices)
    found = data_origin.find_maker(iterator, handout, Ownership())
    return found[0] if found else None


def by_length(samples: list[Any]) -> Any:
    lengths = torch.tensor([float(len(s)) for s in samples])
    total = torch.stack([s.sum() for s in samples])
    return total / lengths  # guilty


def test_a_collate_function_that_divides() -> None:
    samples = [torch.ones(3), torch.ones(0), torch.ones(2)]
    loader: DataLoader[Any] = DataLoader(samples, 3, collate_fn=by_length)  # type: ignore[arg-type]
    origin = made(loader, torch.tensor([1.0, math.nan, 1.0]), [0, 1, 2])
    assert origin is not None
    assert origin.site is not None
    assert (origin.op, origin.site.code) == ("div", "total / lengths")
    pieces = Cut(torch.tensor([1.0, math.nan, 1.0]), 3)
    assert Maker(samples, by_length).in_dataset([1], pieces, [0, 1, 2]) == (1,)
    chosen = list(np.array([7, 5]))  # as a sampler over an array yields them
    assert Maker(samples, default_collate).located(Batch(0, 2, (1,)), chosen).dataset_indices == (5,)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        for i in range(first, 40, every):
            yield torch.tensor([1.0, float(i - 21)]).log().reciprocal() if i == 21 else torch.ones(2)


def test_a_stream_is_read_again_as_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.ones(4, 2)
    batch[2, 0] = math.inf
    loader: DataLoader[Any] = DataLoader(Stream(), 4)
    assert made(loader, batch, [None] * 4, 5) is None  # it would change the program's own stream
    monkeypatch.setattr(isolation, "is_child", lambda: True)
    origin = made(loader, batch, [None] * 4, 5)
    assert origin is not None
    assert origin.op == "reciprocal"
    assert torch.utils.data.get_worker_info() is None
    assert made(loader, batch, [None] * 4, 4) is None


def test_the_place_in_a_stream() -> None:
    batch = Batch(5, 8, (4,))
    assert Maker(Stream(), None, 2).located(batch, [None] * 8).elements == (Element("Stream", 20, "worker 1"),)
    assert Maker(Stream(), None).located(batch, [None] * 8).elements == (Element("Stream", 44),)


# --- replacements from another batch ------------------------------------------------------------------------------


def test_samples_of_another_batch_replace_those_that_cannot_stand_twice() -> None:
    """A loss that is undefined for two equal samples: every replacement by a sample of the batch fails as well."""

    def found(bad: int, suspects: list[int]) -> Any:
        asking = search(16, suspects, others=16)
        question = next(asking)
        while True:
            batch = [question.get(i, i) for i in range(16)]
            try:
                question = asking.send(not (bad in batch or len(set(batch)) < 16))
            except StopIteration as stop:
                return stop.value

    for bad, suspects in ((5, [5]), (5, []), (0, [3]), (15, [])):
        answer = found(bad, suspects)
        assert (answer.bad, answer.confirmed) == ((bad,), True)


def test_a_batch_of_the_same_form_is_joined() -> None:
    pieces = Cut({"x": torch.arange(6.0).reshape(3, 2), "y": torch.tensor([1, 2, 3])}, 3)
    assert pieces.join({"x": torch.full((2, 2), 9.0), "y": torch.tensor([8, 7])}) == 2
    made = pieces.replaced({0: 4, 2: 1})
    assert made["x"].tolist() == [[9.0, 9.0], [2.0, 3.0], [2.0, 3.0]]
    assert made["y"].tolist() == [7, 2, 2]
    assert pieces.batch["y"].tolist() == [1, 2, 3]
    for other in ({"x": torch.ones(2, 3), "y": torch.ones(2)}, {"x": torch.ones(2, 2)}, [torch.ones(2, 2)]):
        assert Cut(pieces.batch, 3).join(other) == 0
    assert Cut([torch.ones(5, 2), list("abcde")], 5).join([torch.ones(5, 2), list("fghij")]) == 0


# --- words --------------------------------------------------------------------------------------------------------


def test_no_exception_of_ours_in_a_report() -> None:
    batch = torch.ones(4, 2)
    handout = Handout(batch, 0, 0, RandomState.now(), [], [], None)
    for error, said in (
        (ReplayError(), "asked for a batch that the step had not used"),
        (ValueError("x"), "ValueError"),
    ):
        looking = SampleSearch([handout], [Maker(None, None)], ())
        looking.left_by(error)
        note = looking.told_in(Report("nonfinite", 0, Batch(0, 4))).batch.note  # type: ignore[union-attr]
        assert said in note
        assert "ReplayError" not in note


def test_more_updates_than_steps_are_called_so() -> None:
    steps = tuple(StepRecord(i // 3, 1.0, 1.0) for i in range(17))
    report = Report("nonfinite", 5, history=History(steps, "Adam"))
    assert history_head(report) == "17 updates in steps 0 to 5, Adam"
    steps = tuple(StepRecord(i, 1.0, 1.0) for i in range(50))
    assert history_head(report.with_(history=History(steps, "SGD"))) == "steps 10 to 49, SGD"


# --- what is unusual, and what a row is -------------------------------------------------------------------------------


def test_what_chance_does_is_not_unusual() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (4, 8, 32):
        for _ in range(8):
            images = torch.randn(size, 3, 24, 24, generator=generator)
            labels = torch.randint(0, 10, (size,), generator=generator)
            flags = (torch.rand(size, 300, generator=generator) < 0.05).float()
            features = Cut({"x": images, "y": labels, "flags": flags}, size).features([1])
            assert not features, features[0]


@pytest.mark.parametrize("value", [math.nan, 1e4, -1.0, 0.0])
def test_what_is_unusual(value: float) -> None:
    rows = torch.rand(16, 6, generator=torch.Generator().manual_seed(0)) + 0.1
    rows[3, 2] = value
    (feature,) = Cut(rows, 16).features([3])
    assert (feature.sample, feature.index) == (3, (2,))


def test_nodes_and_tokens_are_called_so() -> None:
    edges, labels = torch.tensor([[0, 4], [2, 3]]), torch.zeros(5)
    assert unit_of([("y", labels), ("edge_index", edges)], 5) == "node"
    assert unit_of([("edge_index", edges)], 4) == "sample"
    assert unit_of([("adj", torch.eye(5))], 5) == "node"
    assert unit_of([("edges", torch.eye(5))], 6) == "sample"
    assert unit_of([("batch['input_ids']", torch.zeros(4, 6, dtype=torch.long))], 24) == "token"
    assert unit_of([("user_ids", torch.zeros(24, dtype=torch.long))], 24) == "sample"


# --- what runs again --------------------------------------------------------------------------------------------------

ENVIRONMENT = """
import os, sys, torch
with open(os.path.join(os.path.dirname(__file__), "seen"), "a") as file:
    print([sys.path, sys.executable, os.getcwd(), os.environ.get("PYTHONPATH"), sys.flags.safe_path], file=file)
weight = torch.ones(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
table = torch.tensor([float("1e300") * 1e300 * 0, 1.0])
for step in range(2):
    loss = (weight * table).sum()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_second_run_has_the_same_interpreter_paths_and_folder(tmp_path: Path) -> None:
    """firstnan is found through a link, in a folder that only the first run has on its path."""
    (tmp_path / "train.py").write_text(ENVIRONMENT)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "firstnan").symlink_to(Path(isolation.__file__).parents[1])
    code = (
        f"import sys; sys.path[0] = {str(tmp_path / 'lib')!r}; from firstnan.cli.main import main; "
        "sys.exit(main(['run', '--isolation', 'off', '--verify', '0', 'train.py']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    first, second = (tmp_path / "seen").read_text().splitlines()
    assert first == second


def test_data_that_the_failing_step_itself_has_stored_leads_to_its_line(firstnan: Zygote, tmp_path: Path) -> None:
    """The step draws what it has just stored, by chances that no replay gets again."""
    text = (PROGRAMS / "replay_buffer.py").read_text()
    text = text.replace("rng.integers(0, self.count, 6)", "(next(chances) * self.count).astype(int)")
    chances = "chances = iter(np.random.default_rng(1).random((99, 6)))"
    (tmp_path / "train.py").write_text(text.replace("for turn in", f"{chances}\nfor turn in"))
    result = firstnan(["run", "--verify", "0", "train.py"], cwd=tmp_path)
    assert result.origin["line"] == marked("replay_buffer", "ORIGIN"), result.stderr


PASSING = """
    import torch

    def rewards():
        for turn in range(40):
            yield 1 / (torch.arange(1, 7) if turn != 20 else torch.arange(6))

    stream, net = rewards(), torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(net.parameters())
    for turn in range(40):
        states = torch.rand(6, 3)
        reward = next(stream)
        loss = (net(states)[:, 0] - reward).square().mean()  # here
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_where_a_step_cannot_be_repeated_the_variable_with_the_bad_value_is_named(
    firstnan: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream has gone on, and no second run is allowed here."""
    monkeypatch.setitem(firstnan.environment, "FIRSTNAN_ISOLATION", "filter")
    (tmp_path / "train.py").write_text(textwrap.dedent(PASSING))
    result = firstnan(["run", "--isolation", "auto", "train.py"], cwd=tmp_path)
    assert (result.origin["phase"], result.origin["label"]) == ("input", "reward"), result.stderr
    assert "# here" in (tmp_path / "train.py").read_text().splitlines()[result.origin["line"] - 1]
    assert result.found["batch"]["bad_samples"] == [0]
    assert "running the program again" not in result.stderr
    assert "the program was not run again" in result.stderr


class Chains(Dataset[Any]):
    """Graphs of 2 to 4 nodes, joined in a batch as libraries for graphs do; one has a node of infinite size."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> Any:
        nodes = torch.full((2 + i % 3, 2), math.inf if i == 11 else float(i)) + self.noise * torch.rand(())
        return {"nodes": nodes, "graph": torch.zeros(len(nodes), dtype=torch.int64)}

    @staticmethod
    def joined(graphs: list[Any]) -> Any:
        for number, graph in enumerate(graphs):
            graph["graph"] += number  # writes into the element, as functions of programs do
        return torch.cat([g["nodes"] for g in graphs]), torch.cat([g["graph"] for g in graphs])


@pytest.mark.parametrize(("noise", "found"), [(0.0, True), (1.0, False)])
def test_a_batch_of_joined_samples_is_put_together_again(noise: float, found: bool) -> None:
    data, chosen = Chains(noise), [3, 11, 7, 0, 6]
    batch = Chains.joined([data[i] for i in chosen])
    handout = Handout(batch, 0, 0, RandomState.now(), [], [], chosen)
    looking = SampleSearch([handout], [Maker(data, Chains.joined)], ())
    while looking.goes_on():
        nodes, graph = looking.batch(handout)
        assert graph.unique().tolist() == [0, 1, 2, 3, 4]
        looking.finite = bool(torch.isfinite(nodes).all())
    report = looking.told_in(Report("nonfinite", step=0, batch=Batch(0, 5), origin=Origin("forward", "", "")))
    assert report.batch is not None
    assert (report.batch.confirmed, report.batch.bad_samples) == (True, (1,))
    assert report.batch.dataset_indices == ((11,) if found else None)


@pytest.mark.parametrize("apart", [False, True])
def test_rows_that_have_the_number_of_their_sample(apart: bool) -> None:
    images, owner = torch.arange(4.0)[:, None], torch.tensor([0, 0, 2, 3, 3, 3, 3])
    boxes = torch.arange(14.0).view(7, 2)
    targets = {"of": owner, "boxes": boxes} if apart else torch.cat([owner[:, None].float(), boxes], 1)
    made, told = cut_by_numbers((images, targets), [0, 1, 2, 3]).replaced({0: 2, 3: 0})
    whose, rows = (told["of"], told["boxes"]) if apart else (told[:, 0], told[:, 1:])
    assert made.flatten().tolist() == [2, 1, 2, 0]
    assert whose.tolist() == [0, 2, 3, 3]
    assert rows.tolist() == [[4, 5], [4, 5], [0, 1], [2, 3]]
