"""In a notebook: lines are named by their cells, and a traceback shows the program, not firstnan."""

from __future__ import annotations

import json
import linecache
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from firstnan import NonFiniteError
from firstnan.observe.sites import _PACKAGE

pytestmark = pytest.mark.slow

MODEL = """\
import torch
from torch import nn
from firstnan import NaNDetector
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
    def forward(self, x):
        return torch.log(self.fc(x))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = [torch.randn(8, 4) for _ in range(3)]
"""
LOSS = """\
with NaNDetector(model, optimizer) as detector:
    for x in detector.batches(data):
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
GRADIENT = """\
with NaNDetector(model, optimizer) as detector:
    for x in data:
        loss = (model.fc(x) * 0).sqrt().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
CALLED = """\
with NaNDetector(model, layers=True) as detector, torch.no_grad():
    for x in data:
        model(x)
"""
WRONG_SHAPE = """\
with NaNDetector(model, optimizer) as detector:
    for x in detector.batches(data):
        model(x[:, :2])
"""


class Notebook:
    """Runs cells as a kernel does: each has a file name that only the shell and linecache know."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.cells: dict[str, int] = {}

    def run(self, source: str) -> None:
        name = f"/tmp/ipykernel_1/{abs(hash(source))}.py"
        self.cells[name] = len(self.cells) + 1
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), self.names)

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        return ("Cell", f"In[{self.cells[name]}]") if name in self.cells else None


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    made = Notebook()
    shell = SimpleNamespace(compile=made)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    yield made
    for name in made.cells:
        linecache.cache.pop(name, None)


def frames(error: BaseException) -> list[tuple[str, int, bool]]:
    """File, line, and whether a notebook hides the frame."""
    hidden = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        hidden.append((frame.f_code.co_filename, line, bool(frame.f_locals.get("__tracebackhide__"))))
    return hidden


@pytest.mark.parametrize(
    ("cell", "line"), [(LOSS, "Cell In[1], line 10"), (GRADIENT, "Cell In[2], line 3"), (CALLED, "Cell In[1], line 10")]
)
def test_lines_are_named_by_cells_and_the_traceback_ends_there(notebook: Notebook, cell: str, line: str) -> None:
    notebook.run(MODEL)
    with pytest.raises(NonFiniteError) as caught:
        notebook.run(cell)
    assert f", at {line}" in str(caught.value).splitlines()[0]
    assert "ipykernel" not in str(caught.value)
    shown = [(file, number) for file, number, hidden in frames(caught.value) if not hidden]
    assert not [file for file, _ in shown if file.startswith(_PACKAGE)]
    file, number = shown[-1]
    assert f"Cell In[{notebook.cells[file]}], line {number}" == line
    assert len(repr(notebook.names["detector"].report)) < 200
    assert all(len(repr(event)) < 200 for event in notebook.names["detector"].events)


@pytest.mark.parametrize(
    "cell",
    [
        "firstnan.check(torch.tensor([1.0, float('nan')]), 'q')\n",
        "with firstnan.trace():\n    y = torch.log(torch.tensor([-1.0]))\n",
    ],
)
def test_without_a_detector_the_traceback_ends_in_the_cell_too(notebook: Notebook, cell: str) -> None:
    notebook.run("import firstnan, torch\n")
    with pytest.raises(NonFiniteError) as caught:
        notebook.run(cell)
    shown = [file for file, _, hidden in frames(caught.value) if not hidden]
    assert not [file for file in shown if file.startswith(_PACKAGE)]
    assert shown[-1] in notebook.cells
    assert "Cell In[2], line " in str(caught.value)


def test_an_error_of_the_program_shows_no_frame_of_ours_and_gets_no_wrong_note(notebook: Notebook) -> None:
    notebook.run(MODEL)
    notebook.run("loss = torch.tensor(float('nan'))\n")  # left by an earlier cell
    with pytest.raises(RuntimeError) as caught:
        notebook.run(WRONG_SHAPE)
    assert not [file for file, _, hidden in frames(caught.value) if file.startswith(_PACKAGE) and not hidden]
    assert not getattr(caught.value, "__notes__", [])


def test_the_traceback_underlines_the_expression(notebook: Notebook) -> None:
    notebook.run(MODEL)
    with pytest.raises(NonFiniteError) as caught:
        notebook.run(LOSS)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.name, last.line) == ("forward", "return torch.log(self.fc(x))")
    assert last.colno is not None
    assert "        return torch.log(self.fc(x))"[last.colno : last.end_colno] == "torch.log(self.fc(x))"


def test_a_real_kernel() -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = [nbformat.v4.new_code_cell(source) for source in (MODEL, LOSS, "detector.report", "detector")]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(book, timeout=120, allow_errors=True, kernel_name="python3").execute()
    error = book.cells[1].outputs[-1]
    assert error.ename == "NonFiniteError"
    assert "Cell In[1], line 10" in error.evalue
    assert _PACKAGE not in "".join(error.traceback)


MAGIC = """
import json, sys
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

class Publisher(CapturingDisplayPublisher):
    pass

config = Config()
config.HistoryManager.enabled = False
config.InteractiveShell.display_pub_class = Publisher
shell = InteractiveShell.instance(config=config)
shell.display_pub = publisher = CapturingDisplayPublisher()
told = []
for cell in json.loads(sys.argv[1]):
    publisher.outputs.clear()
    result = shell.run_cell(cell, store_history=True)
    error = result.error_in_exec
    told.append({
        "error": type(error).__name__ if error else None,
        "text": str(error or ""),
        "cards": [one["data"]["text/html"] for one in publisher.outputs if "text/html" in one["data"]],
        "names": {name: repr(shell.user_ns[name]) for name in ("found", "x", "steps") if name in shell.user_ns},
    })
print("\\n" + json.dumps(told))
"""
NET = """\
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
    def forward(self, x):
        return torch.log(self.fc(x).abs())
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = [torch.randn(8, 4) for _ in range(6)]
data[3] = torch.zeros(8, 4)
steps = 0
"""
CELL = """\
%%firstnan found
nn.init.zeros_(model.fc.bias)
for x in data:
    model.fc.bias.data.zero_()
    loss = model(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    steps += 1
"""


STOPS = """\
%%firstnan found
for x in data:
    loss = model(x * 0).mean()
    if not torch.isfinite(loss):
        raise ValueError(f"the loss is {loss.item()}")
    loss.backward()
"""


def test_a_cell_is_run_watched_and_its_fix_is_tried() -> None:
    cells = ["%load_ext firstnan", NET, CELL, "%%firstnan found\nx = 3\nx + 1", "%%firstnan\n1 / 0",
             "%%firstnan a b\n1", STOPS, "%unload_ext firstnan", "%%firstnan\n1"]  # fmt: skip
    command = [sys.executable, "-c", MAGIC, json.dumps(cells)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    loaded, net, failed, healthy, error, wrong, stopped, unloaded, gone = json.loads(done.stdout.splitlines()[-1])
    assert (loaded["error"], net["error"], unloaded["error"]) == (None, None, None)
    assert failed["error"] == "NonFiniteError"
    assert failed["text"] == "-Inf created in forward, step 3, at Cell In[2], line 9"
    assert failed["names"]["found"].startswith("<Report: -Inf created in forward, step 3, at Cell In[2], line 9")
    assert failed["names"]["steps"] == "3"  # whatever ran again has left no trace
    (card,) = failed["cards"]
    text = re.sub(r"<style>.*?</style>|<[^>]+>", "", card, flags=re.DOTALL)
    assert "Cell In[2], line 9" in text
    assert "clamp_min" in text
    assert "tried: step 3 is finite, and so are the 2 steps after it, to the end of the loop" in " ".join(text.split())
    assert (healthy["error"], healthy["cards"], healthy["names"]["found"]) == (None, [], "None")
    assert (error["error"], error["cards"]) == ("ZeroDivisionError", [])
    assert wrong["text"] == "%%firstnan takes the name of a variable for the report, got 'a b'"
    assert (stopped["error"], stopped["text"]) == ("ValueError", "the loss is -inf")  # the program's own error
    assert len(stopped["cards"]) == 1
    assert gone["cards"] == []
