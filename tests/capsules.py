"""Capsules for tests: a small captured training state, and files with any header and a valid digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from firstnan.capsule import file
from firstnan.capsule.state import Capture
from firstnan.gate.gate import Gate
from firstnan.records import Report
from firstnan.tensors.models import TrainingObjects
from firstnan.tensors.state import Handout, RandomState


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
    """Writes the capsule of a step of this model on this batch."""
    gate = Gate()
    gate.optimizer_made(optimizer)
    capture = Capture(TrainingObjects.find([optimizer], {"": model}), gate, [])
    capture.add_batch(0, Handout(batch, 7, 0, RandomState.now(), [], [], [1, 2]), batch)
    manifest, tensors, _ = capture.within(1 << 30)
    entries = {"report": Report("nonfinite", 7).to_dict(), "environment": {"torch": torch.__version__}, "sources": {}}
    return file.write(folder / "a.capsule", {**manifest, **entries}, tensors)


def taken_apart(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the tensors' bytes of a capsule file."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put_together(header: bytes, tensors: bytes, length: int | None = None) -> bytes:
    """A file whose digest is right, if the header has one."""
    whole = (len(header) if length is None else length).to_bytes(8, "little") + header + tensors
    found = file._DIGEST.search(whole)
    if found is None:
        return whole
    before, after = whole[: found.start(1)], whole[found.end(1) :]
    return before + hashlib.sha256(before + b"0" * 64 + after).hexdigest().encode() + after


def signed(header: Any, tensors: bytes) -> bytes:
    return put_together(json.dumps(header, separators=(",", ":")).encode(), tensors)
