"""The memory of a trace: nothing of the program is kept alive, records are small, and their number is limited."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tracemalloc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import firstnan
from firstnan import NonFiniteError
from firstnan.diagnose.blame import blame
from firstnan.tracing import recording, tracer
from firstnan.tracing.recording import first_difference
from firstnan.tracing.tracer import Tracer
from traced import trace_of

MB = 1 << 20


def printed(program: str, *arguments: str) -> list[int]:
    """The numbers that a program prints in a process of its own, whose memory is its own too."""
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0, (ran.returncode, ran.stderr[-2000:])
    return [int(word) for word in ran.stdout.split()]


def chain(x: Tensor, length: int) -> Tensor:
    for _ in range(length):
        x = x * 1.0
    return x


# --- what the program frees -----------------------------------------------------------------------------------------

WIDE = """
    import contextlib, resource, sys, torch
    import firstnan
    from firstnan.tracing.tracer import Tracer

    torch.set_num_threads(1)
    weight = (torch.randn(1024, 1024) / 64).requires_grad_()
    scale = torch.ones(1, 1024, requires_grad=True)
    with {"bare": contextlib.nullcontext, "tracer": Tracer, "trace()": firstnan.trace}[sys.argv[1]]():
        h = torch.zeros(2, 1024)
        for _ in range(200):
            h = torch.tanh(h @ weight + scale)
        h.sum().backward()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_the_peak_of_a_wide_backward_pass_hardly_grows() -> None:
    """Each of its operators makes and frees a gradient of 4 MB. If anything small stays where one was, the next
    gradient needs new memory, although none is kept."""
    ((bare,), *traced) = (printed(WIDE, way) for way in ("bare", "tracer", "trace()"))
    assert all(peak < bare + 200 * MB for (peak,) in traced), (bare, traced)


def test_a_tensor_is_freed_when_the_program_frees_it() -> None:
    freed = []
    with Tracer() as traced:
        x = torch.ones(1000, requires_grad=True)
        y = x.exp()
        z = y.log() * float("nan")
        storages = [weakref.ref(t.untyped_storage()) for t in (y, z)]
        del y
        freed.append(storages[0]() is None)
        z.sum().backward()
        freed.append(storages[0]() is None)
        del z
        freed.append(storages[1]() is None)
        for _ in range(2000):
            torch.ones(1)
        assert len(traced.memory.writer) < 300, "the latest ones, which are forgotten together"
    assert freed == [False, True, True], "autograd keeps the result of exp until backward is done"


DEEP = """
    import threading, torch
    from firstnan.tracing.tracer import Tracer

    def train():
        with Tracer():
            h = weight = torch.ones(1, requires_grad=True)
            for _ in range(20_000):
                h = h * 1.0
            h.sum().backward()
        del h

    threading.stack_size(2 << 20)
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
"""


@pytest.mark.slow
def test_a_deep_graph_can_still_be_freed() -> None:
    """torch frees a graph recursively where Python has seen its nodes, and overflows the stack."""
    assert printed(DEEP) == []


# --- records -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marks", [False, True])
def test_a_record_is_small(marks: bool) -> None:
    weight = torch.ones(4, requires_grad=True)
    traced = Tracer()
    traced.marks = marks
    tracemalloc.start()
    try:
        with traced:
            for _ in range(3):
                chain(weight, 500).sum().backward()
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size / len(traced.raws) < (800 if marks else 600)


def test_a_long_trace_is_the_same_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    _, trace, traced = trace_of(lambda: chain(x.sqrt().log(), 30).sum().backward())
    whole = list(trace.events)
    monkeypatch.setattr(recording, "_MAX_BUILT", 3)
    events = traced.trace().events
    assert list(events) == whole
    assert list(events) == whole, "each time"
    assert list(events[5:20][2:-1:3]) == whole[5:20][2:-1:3]
    assert (events[-1], list(reversed(events)), len(events[7:])) == (whole[-1], whole[::-1], len(whole) - 7)


# --- limits --------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "_MAX_EVENTS", 50)
    monkeypatch.setattr(tracer, "_MAX_RECORDS", 200)


def failing(first: int, after: int, x: Tensor) -> Tensor:
    x = chain(x, first)
    x = x.log()  # here
    return chain(x, after)


@pytest.mark.usefixtures("few_records")
@pytest.mark.parametrize(("first", "after"), [(20, 0), (20, 400), (900, 3), (900, 400)])
def test_a_step_of_too_many_operators(first: int, after: int) -> None:
    """The origin is found wherever it is, what is not finite is kept, and the report says that something is missing."""
    x = torch.tensor([1.0, -1.0], requires_grad=True)
    with pytest.raises(NonFiniteError) as caught, firstnan.trace() as block:
        loss = failing(first, after, x).sum()
        assert block.session.microscope.tracer is not None
        assert len(block.session.microscope.tracer.raws) < 200 + 50 + 1 + after
        loss.backward()
    report = caught.value.report
    assert report.origin is not None
    assert report.origin.site is not None
    assert (report.origin.op, report.origin.site.code) == ("log", "x.log()")
    assert report.cause is not None
    assert report.cause.slug == "log_of_negative"
    limited = first + after > 200
    assert [note for note in report.notes if "more than 200 operators" in note] == list(report.notes)
    assert len(report.notes) == limited


@pytest.mark.usefixtures("few_records")
def test_a_healthy_step_of_too_many_operators() -> None:
    weight = torch.ones(2, requires_grad=True)
    _, trace, _ = trace_of_limited(lambda: chain(weight, 1000).sum().backward())
    assert len(trace.events) <= 250
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("few_records")
def test_incomplete_traces_are_not_compared() -> None:
    traces = []
    for length in (300, 310):
        _, _, traced = trace_of_limited(lambda length=length: chain(torch.ones(2, requires_grad=True), length))
        traces.append(traced.raws)
    assert first_difference(*traces) is None


def trace_of_limited(run: Any) -> Any:
    traced = Tracer()
    traced.region, traced.marks = "step", True
    with traced:
        result = run()
    assert traced.trouble is not None
    assert "more than 200 operators" in traced.trouble
    return result, traced.trace(), traced


def test_findings_beyond_a_number_hold_no_statistics_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "_MAX_DETAILED", 5)
    out, trace, traced = trace_of(lambda: chain(torch.tensor([1.0, -1.0]).log(), 30).sqrt())
    bad = [e for e in trace.events if e.bad]
    assert [bool(e.inputs[0].stat) for e in bad] == [True] * 5 + [False] * (len(bad) - 5)
    origin = blame(trace, [traced.last_bad(out) or 0]).origin
    assert origin is not None
    assert origin.op == "log"


def test_the_line_of_a_late_derivative_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every autograd node is asked for, but the one in which a value is created is."""
    monkeypatch.setattr(tracer, "_MAX_NODES", 10)
    x = torch.zeros(3, requires_grad=True)

    def step() -> None:
        y = x.sqrt()
        chain(y, 100).sum().backward()

    _, trace, traced = trace_of(step)
    assert x.grad is not None
    origin = blame(trace, [traced.last_bad(x.grad) or 0]).origin
    assert origin is not None
    assert origin.site is not None
    assert (origin.phase, origin.op, origin.site.code) == ("backward", "sqrt", "x.sqrt()")
    phases = [e.phase for e in trace.events if e.op == "mul"]
    assert phases[:100] + phases[-100:] == ["forward"] * 100 + ["backward"] * 100
    assert sum(e.node is not None for e in trace.events) < 20


def test_operators_after_the_limit_on_nodes_are_still_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed operators are forward operators, those of a user's backward are its own."""
    monkeypatch.setattr(tracer, "_MAX_NODES", 0)
    net = nn.Linear(2, 2)

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.div(2)

    def step() -> None:
        x = torch.ones(1, 2, requires_grad=True)
        y = checkpoint(lambda x: net(x).exp(), x, use_reentrant=False)
        Halved.apply(y).sum().backward()

    _, trace, _ = trace_of(step)
    assert [e.phase for e in trace.events if e.op == "exp"] == ["forward", "forward"]
    halved = [e for e in trace.events if e.site is not None and e.site.code == "grad.div(2)"]
    assert [(e.op, e.phase, e.in_python_backward) for e in halved] == [("div", "backward", True)]
