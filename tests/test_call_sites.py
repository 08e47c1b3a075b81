"""Where optimizers are created and stepped and where backward is called, as shown in a report."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from firstnan.records import History, Report, Site
from report_samples import forward
from zygote import Zygote

pytest_plugins = ["zygote"]

TWO = """
    import torch

    class Own(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)

    def make(w):
        return Own([w])

    a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    first = make(a)
    second = torch.optim.Adam([b], lr=0.01)

    def update(optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for step in range(9):
        update(first, (a * 2).sum())
        second.zero_grad()
        (b * (float("nan") if step == WHEN else 1.0)).sum().backward()
        second.step()
"""


def places(firstnan: Zygote, folder: Path, text: str) -> dict[str, Any]:
    (folder / "train.py").write_text(textwrap.dedent(text))
    history: dict[str, Any] = firstnan(["run", "--replay", "never", "train.py"], cwd=folder).found["history"]
    return {name: history[name] and history[name]["code"] for name in ("made_at", "stepped_at", "backward_at")} | {
        "optimizer": history["optimizer"]
    }


def test_of_two_optimizers_the_current_one(firstnan: Zygote, tmp_path: Path) -> None:
    assert places(firstnan, tmp_path, TWO.replace("WHEN", "4")) == {
        "optimizer": "Adam",
        "made_at": "torch.optim.Adam([b], lr=0.01)",
        "stepped_at": "second.step()",
        "backward_at": "loss.backward()",
    }


def test_the_constructor_of_a_subclass_is_not_the_call_site(firstnan: Zygote, tmp_path: Path) -> None:
    text = TWO.replace("WHEN", "-1").replace("(a * 2).sum()", "(a / (step - 3 + 0 * a)).sum()")
    found = places(firstnan, tmp_path, text)
    assert found["made_at"] == "Own([w])"
    assert found["stepped_at"] == "optimizer.step()"


def test_a_failure_in_the_first_step_knows_what_was_reached(firstnan: Zygote, tmp_path: Path) -> None:
    text = TWO.replace("WHEN", "-1").replace("(a * 2).sum()", "(a / (step + 0 * a)).sum()")
    found = places(firstnan, tmp_path, text)
    assert found["made_at"] == "Own([w])"
    assert found["backward_at"] == "loss.backward()"


def test_places_survive_a_file() -> None:
    history = History(made_at=Site("train.py", 3, code="SGD(p)"), backward_at=Site("train.py", 9))
    report = forward().with_(history=history)
    assert Report.from_dict(report.to_dict()).history == history
