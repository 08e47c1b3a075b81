"""Capsules for tests: a small training state as a run captures it, and files that are not what they say."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from firstnan.capsule import file
from firstnan.capsule.capture import Capture
from firstnan.capsule.training_objects import Living
from firstnan.gate.gate import Gate
from firstnan.records import Report
from firstnan.tensors.batches import Handout
from firstnan.tensors.randomness import RandomState

PREFIX = 8 + len(file._PREFIX)


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that has a state."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def written(folder: Path, batch: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """The capsule of a step of this model on this batch."""
    gate = Gate()
    gate.optimizer_made(optimizer)
    living = Living.find([optimizer], {"": model})
    capture = Capture(living, gate, [])
    capture.add_batch(0, Handout(batch, 7, 0, RandomState.now(), [], [], [1, 2]), batch)
    manifest, parts, _ = capture.within(1 << 30)
    told = {"report": Report("nonfinite", 7).to_dict(), "environment": {"torch": torch.__version__}, "sources": {}}
    return file.write(folder / "a.capsule", {**manifest, **told}, parts)


def taken_apart(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and tensors of a capsule's file."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put_together(header: bytes, tensors: bytes, length: int | None = None) -> bytes:
    """A file with the digest of what is in it, whatever that is; `header` begins as a capsule's does."""
    whole = (len(header) if length is None else length).to_bytes(8, "little") + header + tensors
    blank = whole[:PREFIX] + b"0" * 64 + whole[PREFIX + 64 :]
    return blank[:PREFIX] + hashlib.sha256(blank).hexdigest().encode() + blank[PREFIX + 64 :]


def signed(header: Any, tensors: bytes) -> bytes:
    return put_together(json.dumps(header, separators=(",", ":")).encode(), tensors)
