"""Runs a snippet of training code under the tracer and asks blame, the way a watched step would."""

from __future__ import annotations

import linecache
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from firstnan.diagnose.blame import Verdict, blame
from firstnan.records import OpEvent, Origin, Trace
from firstnan.tensors.finite import is_finite, tensors_in
from firstnan.tracing.tracer import Tracer

MARK, STEP = "# <-- here", "# step"
_numbers = count()


def bad_of(tracer: Tracer, *tensors: Tensor | None) -> list[int]:
    """The events that wrote the non-finite ones among these."""
    bad = [t for t in tensors if t is not None and not is_finite(t)]
    return [e for t in bad if (e := tracer.last_bad(t)) is not None]


def trace_of(run: Callable[[], Any], tracer: Tracer | None = None) -> tuple[Any, Trace, Tracer]:
    """What a function returned, and every operator it ran."""
    tracer = tracer or Tracer()
    tracer.region = "step"
    with tracer:
        result = run()
    assert tracer.trouble is None, tracer.trouble
    return result, tracer.trace(), tracer


def events_of(trace: Trace, op: str, phase: str | None = None) -> list[OpEvent]:
    return [e for e in trace.events if e.op == op and phase in (None, e.phase)]


@dataclass
class Outcome:
    """What came of a snippet."""

    noticed: str
    verdict: Verdict
    trace: Trace
    names: dict[str, Any]
    file: str

    @property
    def origin(self) -> Origin:
        assert self.verdict.origin is not None, f"nothing blamed; noticed {self.noticed}"
        return self.verdict.origin

    @property
    def place(self) -> tuple[str, str, int | None]:
        """Phase, operator and line, as the report would say them."""
        site = self.origin.site
        assert site is None or site.file == self.file, site
        return self.origin.phase, self.origin.op, site.line if site else None


def run_snippet(source: str, file: str = "") -> Outcome:
    """Runs what stands before `# step` as it is and the rest under the tracer, then blames what is not finite."""
    source = textwrap.dedent(source).strip() + "\n"
    file = file or f"/tmp/snippet_{next(_numbers)}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    before, _, after = source.partition(STEP + "\n")
    after = "\n" * (before.count("\n") + 1) + after
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": functional, "math": math, "Tensor": Tensor}
    torch.manual_seed(0)
    exec(compile(before, file, "exec"), names)
    tracer = Tracer()
    tracer.region = "step"
    _give_roles(tracer, names)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: setattr(tracer, "in_optimizer", True)),
        register_optimizer_step_post_hook(lambda *_: setattr(tracer, "in_optimizer", False)),
    ]
    try:
        with tracer:
            exec(compile(after, file, "exec"), names)
    finally:
        for handle in handles:
            handle.remove()
    assert tracer.trouble is None, tracer.trouble
    _give_roles(tracer, names)
    noticed, starts = _notice(tracer, names)
    trace = tracer.trace()
    finite = noticed != "loss"
    return Outcome(noticed, blame(trace, dict.fromkeys(starts), loss_is_finite=finite), trace, names, file)


def marked_line(source: str) -> int | None:
    lines = textwrap.dedent(source).strip().splitlines()
    return next((i for i, text in enumerate(lines, 1) if MARK in text), None)


def _give_roles(tracer: Tracer, names: dict[str, Any]) -> None:
    for label, t in tensors_in(names.get("batch"), "batch"):
        tracer.give_role(t, "input", label)
    for module in [m for m in names.values() if isinstance(m, nn.Module)]:
        for name, p in module.named_parameters():
            tracer.give_role(p, "parameter", name)
        for name, b in module.named_buffers():
            tracer.give_role(b, "buffer", name)


def _notice(tracer: Tracer, names: dict[str, Any]) -> tuple[str, list[int]]:
    """The gate's order: the loss, then gradients, then what was updated."""
    loss = names.get("loss")
    if isinstance(loss, Tensor) and not is_finite(loss):
        return "loss", bad_of(tracer, loss)
    modules = [m for m in names.values() if isinstance(m, nn.Module)]
    leaves = [t for t in names.values() if isinstance(t, Tensor) and t.is_leaf and t.requires_grad]
    leaves += [p for m in modules for p in m.parameters()]
    if starts := bad_of(tracer, *(t.grad for t in leaves)):
        return "gradient", starts
    if starts := bad_of(tracer, *leaves):
        return "parameter", starts
    return "buffer", bad_of(tracer, *(b for m in modules for b in m.buffers()))
