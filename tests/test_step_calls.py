"""How many of our Python functions a healthy step of a small model calls: each costs about a tenth of a microsecond
to a microsecond, and together they are most of what watching costs such a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from firstnan import NaNDetector
from zygote import Zygote

pytest_plugins = ["zygote"]

STEPS = 64


def test_a_detector_calls_few_functions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32, 8)
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call" and "/firstnan/" in frame.f_code.co_filename

    def step() -> None:
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with NaNDetector(model, optimizer):
        for _ in range(100):
            step()
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            for _ in range(STEPS):
                step()
        finally:
            sys.setprofile(before)
    assert 20 < calls / STEPS < 86


PROGRAM = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, calls = torch.randn(32, 8), 0
def count(frame, event, arg):
    global calls
    calls += event == "call" and "/firstnan/" in frame.f_code.co_filename
for step in range(164):
    if step == 100:
        sys.setprofile(count)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
sys.setprofile(None)
print(calls / 64)
"""


def test_a_watched_program_calls_few_functions(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    result = firstnan(["run", "train.py"], cwd=tmp_path)
    assert result.code == 0
    assert 20 < float(result.stdout) < 94
