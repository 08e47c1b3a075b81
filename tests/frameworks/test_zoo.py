"""A few models of benchmarks/model_zoo.py: no false alarm, the same bits, and the module of a fault is named."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import model_zoo

SOME = ("GPT2LM", "GPTNeoX", "Mixtral", "MambaFor", "BertFor", "T5For", "ConvNext", "Wav2Vec2")
ENTRIES = [one for one in model_zoo.ZOO if one.model.startswith(SOME)]


@pytest.mark.parametrize("one", ENTRIES, ids=lambda one: one.model)
def test_a_healthy_model_is_left_alone(one: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert model_zoo.healthy(one) == ""
    assert "internal error" not in caplog.text


@pytest.mark.parametrize(("one", "kind"), zip(ENTRIES, [*model_zoo.FAULTS] * 2, strict=False), ids=str)
def test_the_module_of_a_fault_is_named(one: Any, kind: str) -> None:
    assert model_zoo.fault(one, kind, random.Random(1)) == ""
