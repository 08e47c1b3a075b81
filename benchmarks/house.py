"""Counts what a reader of firstnan has to hold in mind: modules, lines, and one walk through `firstnan run`.

    PYTHONPATH=src python benchmarks/house.py

The walk is `firstnan run` on a small program with a DataLoader whose step fails in backward, without trials: how many
files of the package run, and how often the running function is in another module than the one before.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

PROGRAM = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.rand(64, 4)
x[37] = 0.0
model = torch.nn.Linear(4, 4, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for (batch,) in DataLoader(TensorDataset(x), batch_size=8):
    optimizer.zero_grad()
    loss = model(batch).square().sum(1).sqrt().mean()
    loss.backward()
    optimizer.step()
"""


class Walk:
    """Follows every call of a function of the package."""

    def __init__(self, package: Path) -> None:
        self._package = str(package)
        self._own = (str(package / "cli" / "demos" / "programs"), str(package / "demos" / "programs"))
        self._last = ""
        self.files: set[str] = set()
        self.switches = self.calls = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(self._package) or name.startswith(self._own) or _imports(frame):
            return
        self.calls += 1
        self.files.add(name)
        self.switches += name != self._last
        self._last = name


def _imports(frame: FrameType | None) -> bool:
    """A module or the body of a class that is being loaded, or what that calls."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("firstnan"):
        if frame.f_code.co_name == "<module>" and frame.f_globals["__name__"] != "firstnan.__main__":
            return True
        frame = frame.f_back
    return False


def main() -> None:
    import firstnan

    package = Path(firstnan.__file__).parent
    own = [p for p in package.rglob("*.py") if not {"programs", "examples"} & set(p.parts)]
    lines = sum(len(p.read_text(encoding="utf-8").splitlines()) for p in own)
    rooms = [p.name for p in package.iterdir() if p.is_dir() and (p / "__init__.py").is_file()]
    print(f"modules {len(own)}, lines {lines}, rooms {len(rooms)}, files in the root {len(list(package.glob('*.py')))}")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "train.py")
        program.write_text(PROGRAM)
        try:
            from firstnan.cli.main import main as run
        except ImportError:  # as it was before the rooms
            from firstnan.cli import main as run  # type: ignore[no-redef]
        walk = Walk(package)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            sys.setprofile(walk)
            try:
                code = run(["run", "--verify", "0", str(program)])
            finally:
                sys.setprofile(None)
    if code != 3 or "sqrt" not in said.getvalue():
        raise SystemExit(f"the walk did not find the failure (exit code {code})")
    print(f"one walk: {len(walk.files)} files, {walk.switches} changes of module, {walk.calls} calls")


if __name__ == "__main__":
    main()
