"""The tracer on real programs: what ran, in which order, from where, and that the program notices nothing."""

from __future__ import annotations

import copy
import gc
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from firstnan.records import OpEvent, Trace
from firstnan.tracing.tracer import Tracer
from traced import bad_of, events_of, trace_of

INF, NAN = math.inf, math.nan


def backward_of(trace: Trace, node: str) -> list[OpEvent]:
    """The backward operators of one kind of node that are mapped to a forward operator."""
    return [e for e in trace.events if e.phase == "backward" and e.node == node and e.forward is not None]


def forward_lines(trace: Trace, node: str) -> set[str]:
    """The code of the forward operators that these backward operators are said to belong to."""
    sites = [trace.events[e.forward].site for e in backward_of(trace, node) if e.forward is not None]
    return {s.code for s in sites if s is not None}


# --- forward and backward belong together -----------------------------------------------------------------------------


def test_each_backward_operator_has_its_forward_operator() -> None:
    w = torch.tensor([1.0, 2.0], requires_grad=True)

    def step() -> None:
        a = torch.log(w)
        b = torch.exp(a * 0.5)
        c = torch.sqrt(b + w)
        c.sum().backward()

    _, trace, _ = trace_of(step)
    assert forward_lines(trace, "LogBackward0") == {"torch.log(w)"}
    assert forward_lines(trace, "ExpBackward0") == {"torch.exp(a * 0.5)"}
    assert forward_lines(trace, "SqrtBackward0") == {"torch.sqrt(b + w)"}
    assert forward_lines(trace, "MulBackward0") == {"a * 0.5"}
    for e in trace.events:
        if e.forward is not None:
            assert trace.events[e.forward].phase == "forward"
            assert e.forward < e.index


def test_operators_without_gradient_do_not_disturb_the_map() -> None:
    w = torch.ones(2, requires_grad=True)

    def step() -> None:
        h = torch.log(w)
        torch.ones(2) * 3
        (h > 0).sum()
        with torch.no_grad():
            h * 2
        torch.sqrt(h + 1).sum().backward()

    _, trace, _ = trace_of(step)
    assert forward_lines(trace, "LogBackward0") == {"torch.log(w)"}
    assert forward_lines(trace, "SqrtBackward0") == {"torch.sqrt(h + 1)"}


def test_a_shared_layer_is_mapped_to_each_of_its_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Softplus()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.act(x) * 2)

    net, x = Twice(), torch.ones(3, requires_grad=True)
    _, trace, _ = trace_of(lambda: net(x).sum().backward())
    forwards = events_of(trace, "softplus", "forward")
    mapped = [e.forward for e in backward_of(trace, "SoftplusBackward0") if e.op == "softplus_backward"]
    assert len(forwards) == 2
    assert mapped == [forwards[1].index, forwards[0].index]
    assert {e.module for e in forwards} == {"act"}
    assert {e.module for e in backward_of(trace, "SoftplusBackward0")} == {"act"}


def test_a_derivative_of_a_derivative() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)

    def step() -> None:
        y = x.pow(3).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        g.exp().sum().backward()

    _, trace, _ = trace_of(step)
    assert forward_lines(trace, "ExpBackward0") == {"g.exp()"}
    second = [e for e in trace.events if e.forward is not None and trace.events[e.forward].phase == "backward"]
    assert second, "the second backward pass is mapped to operators of the first"
    for e in second:
        first = trace.events[e.forward or 0]
        assert first.forward is None or trace.events[first.forward].phase == "forward"


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint(reentrant: bool) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)

    def block(t: Tensor) -> Tensor:
        return torch.sqrt(t + 1)

    def step() -> None:
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()

    _, trace, _ = trace_of(step)
    assert len(events_of(trace, "sqrt", "forward")) == 2, "once, and once more in backward"
    assert events_of(trace, "sqrt", "backward") == []
    assert forward_lines(trace, "SqrtBackward0") == {"torch.sqrt(t + 1)"}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.exp() * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].cos() * 2


def test_a_custom_function() -> None:
    w = torch.ones(2, requires_grad=True)

    def step() -> None:
        h = Doubled.apply(w)  # type: ignore[no-untyped-call]
        torch.ones(3)
        torch.log(h).sum().backward()

    _, trace, _ = trace_of(step)
    (cos,) = events_of(trace, "cos")
    assert (cos.phase, cos.node, cos.in_python_backward) == ("backward", "DoubledBackward", True)
    assert cos.site is not None
    assert cos.site.code == "grads[0].cos()"
    assert cos.forward is not None
    assert trace.events[cos.forward].op == "exp", "the first operator of its forward"
    assert forward_lines(trace, "LogBackward0") == {"torch.log(h)"}
    assert not any(e.in_python_backward for e in trace.events if e.node == "LogBackward0")


def test_a_tensor_hook() -> None:
    w = torch.ones(2, requires_grad=True)

    def step() -> None:
        h = w * 2
        h.register_hook(lambda g: g.sin())
        h.sum().backward()

    _, trace, _ = trace_of(step)
    (sin,) = events_of(trace, "sin")
    assert sin.phase == "backward"
    assert sin.in_python_backward
    assert sin.site is not None
    assert sin.site.code == "g.sin()"


def test_in_place_operators_and_views() -> None:
    w = torch.ones(2, 2, requires_grad=True)

    def step() -> None:
        h, k = w.clone(), w.clone()
        h[0].exp_()
        torch.ones(3) * 2
        k.view(-1)[2:].mul_(3)
        g = h * 2
        g.tanh_()
        (g + k).sum().backward()

    _, trace, _ = trace_of(step)
    slices = [e for e in trace.events if e.node and e.node.endswith("CopySlices") and e.forward is not None]
    assert {trace.events[e.forward or 0].op for e in slices} == {"exp", "mul"}
    assert forward_lines(trace, "TanhBackward0") == {"g.tanh_()"}


def test_graphs_from_before_the_trace_are_not_mapped() -> None:
    w = torch.ones(2, requires_grad=True)
    loss = torch.log(w).sum()

    def step() -> None:
        torch.ones(3) * 2
        with torch.no_grad():
            w * 2
        loss.backward()

    _, trace, _ = trace_of(step)
    assert [e for e in trace.events if e.forward is not None] == []


# --- memory -----------------------------------------------------------------------------------------------------------


def test_views_and_in_place_writes_lead_to_their_writer() -> None:
    def step() -> Tensor:
        a = torch.zeros(4)
        a[1:3].add_(1)
        return a.view(2, 2).T.reshape(-1) * 2

    _, trace, _ = trace_of(step)
    (mul,) = events_of(trace, "mul")
    (add,) = events_of(trace, "add")
    (clone,) = events_of(trace, "clone")
    assert mul.inputs[0].producer == clone.index
    assert clone.inputs[0].producer == add.index


def test_out_arguments_and_lists() -> None:
    def step() -> tuple[Tensor, list[Tensor]]:
        out = torch.empty(2)
        torch.log(torch.tensor([1.0, 0.0]), out=out)
        parts = [torch.ones(2), torch.zeros(2)]
        torch._foreach_div_(parts, [torch.ones(2), torch.zeros(2)])
        return out, parts

    (out, parts), trace, tracer = trace_of(step)
    (log,) = events_of(trace, "log")
    assert tracer.last_bad(out) == log.index
    (div,) = events_of(trace, "div")
    assert tracer.last_bad(parts[0]) is None
    assert tracer.last_bad(parts[1]) == div.index
    assert div.born == 2


def test_only_the_bad_part_of_a_memory_is_bad() -> None:
    def step() -> Tensor:
        t = torch.zeros(3, 3)
        t[:, 0] = torch.log(torch.tensor(0.0))
        t[:, 2] = 5.0
        return t

    t, _, tracer = trace_of(step)
    assert tracer.last_bad(t) is not None
    assert tracer.last_bad(t[:, 0]) is not None
    assert tracer.last_bad(t[:, 1]) is None
    assert tracer.last_bad(t[1]) is not None


@pytest.mark.parametrize("of_copy", [False, True])
def test_a_deep_copy_leaves_the_history_of_a_buffer_alone_and_has_it_too(of_copy: bool) -> None:
    """torch copies the bytes of a buffer, which say nothing about its numbers."""

    def step() -> Tensor:
        module = nn.Module()
        module.register_buffer("table", 1 / torch.tensor([0.0, 1.0, 2.0]))
        copied = copy.deepcopy(module)
        return (copied if of_copy else module).table.gather(0, torch.tensor([0, 2])) * 2

    _, trace, _ = trace_of(step)
    product, gathered = trace.events[-1], next(e for e in trace.events if e.op == "gather")
    assert (product.inputs[0].producer, product.inputs[0].guilty) == (gathered.index, True)
    assert gathered.inputs[0].guilty
    assert trace.events[gathered.inputs[0].producer or 0].outputs[0].posinf == 1


def test_memory_that_is_used_again_has_a_new_history() -> None:
    """Tensors that come and go get the same addresses: no bad writer may live on in a new one."""

    def step() -> Tensor:
        for _ in range(300):
            bad = torch.log(torch.zeros(256)) - INF
            del bad
            fresh = torch.arange(256.0)
            result = fresh * 2
            del fresh
        return result

    result, trace, tracer = trace_of(step)
    assert tracer.last_bad(result) is None
    arange = {e.index for e in events_of(trace, "arange")}
    products = events_of(trace, "mul")
    assert len(products) == 300
    assert {e.inputs[0].producer for e in products} == arange


def test_roles_do_not_pass_to_memory_that_is_used_again() -> None:
    tracer = Tracer()
    with tracer:
        for i in range(50):
            batch = torch.full((64,), -INF)
            tracer.give_role(batch, "input", f"batch {i}")
            del batch
            tracer.forget_healthy()
        other = torch.full((64,), -INF)
    event = tracer.trace().events[tracer.last_bad(other) or 0]
    assert (event.role, event.label) == (None, "")


@pytest.mark.slow
def test_memory_stays_bounded_over_many_steps() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    tracer = Tracer()
    sizes: list[int] = []
    tracked: list[int] = []
    with tracer:
        for step in range(2000):
            x = torch.empty(2, 4).normal_()
            mask = torch.full((2, 4), -INF).triu(1)
            loss = (net(x) + mask).softmax(-1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tracer.forget_healthy()
            sizes.append(len(tracer.raws))
            if step in (200, 1999):
                tracked.append(sum(len(getattr(tracer.memory, n)) for n in ("_storages", "writer", "_bad", "_outside")))
    assert max(sizes) <= 50
    assert tracked[1] <= tracked[0] + 50
    assert tracer.trouble is None


def test_what_explains_a_later_failure_is_kept() -> None:
    tracer = Tracer()
    tracer.region = "step"
    with tracer:
        weight = torch.ones(3)
        weight.mul_(torch.log(torch.tensor([1.0, -1.0, 1.0])))
        for _ in range(5):
            torch.ones(10) * 2
            tracer.forget_healthy()
        out = weight + 1
    trace = tracer.trace()
    assert len(trace.events) < 20
    add = trace.events[tracer.last_bad(out) or -1]
    mul = trace.events[add.inputs[0].producer or -1]
    (guilty,) = [i for i in mul.inputs if i.guilty]
    assert guilty.producer is not None
    assert (add.op, mul.op, trace.events[guilty.producer].op) == ("add", "mul", "log")


# --- the program notices nothing --------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A bit of everything: convolution, normalisation, dropout, recurrence, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
        self.lstm = nn.LSTM(8, 8, batch_first=True, dropout=0.2, num_layers=2)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).transpose(1, 2)
        h, _ = self.lstm(h)
        h, _ = self.gru(h)
        a, _ = self.attention(h, h, h)
        out: Tensor = self.head(self.drop(self.norm(h + a)).mean(1))
        return out


def train(net: nn.Module, steps: int = 5) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(4, 3, 6), torch.randint(0, 2, (4,))
        loss = functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_results_are_the_same_to_the_last_bit() -> None:
    torch.manual_seed(1)
    plain = Mixed()
    traced = copy.deepcopy(plain)
    torch.manual_seed(2)
    expected = train(plain)
    torch.manual_seed(2)
    losses, trace, _ = trace_of(lambda: train(traced))
    assert losses == expected
    for (name, a), b in zip(plain.state_dict().items(), traced.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    modules = {e.module for e in trace.events}
    assert {"conv.0", "conv.1", "lstm", "gru", "norm", "head"} <= modules
    kinds = {e.module: e.module_type for e in trace.events}
    assert kinds["conv.0"] == "Conv1d"
    assert kinds["lstm"] == "LSTM"
    batch_norm = next(e for e in trace.events if e.op == "batch_norm")
    assert (batch_norm.module, batch_norm.module_type) == ("conv.1", "BatchNorm1d")


def test_phases() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tracer = Tracer()

    def step() -> None:
        net(torch.ones(1, 2)).sum().backward()
        tracer.in_optimizer = True
        optimizer.step()
        tracer.in_optimizer = False

    _, trace, _ = trace_of(step, tracer)
    phases = [e.phase for e in trace.events]
    assert phases == sorted(phases, key=["forward", "backward", "optimizer"].index)
    assert set(phases) == {"forward", "backward", "optimizer"}


def test_nothing_is_left_behind_and_stopping_twice_is_fine() -> None:
    tracer = Tracer()
    tracer.start()
    tracer.start()
    assert tracer.running
    torch.ones(2) * 2
    tracer.stop()
    tracer.stop()
    assert not tracer.running
    seen = len(tracer.raws)
    torch.ones(2) * 2
    assert len(tracer.raws) == seen
    with tracer:
        torch.ones(2) * 2
    assert len(tracer.raws) == 2 * seen


def test_no_tensor_is_kept_alive() -> None:
    import weakref

    tracer = Tracer()
    with tracer:
        t = torch.full((1000,), NAN)
        gone = weakref.ref(t)
        u = t * 2
        del t, u
        gc.collect()
        assert gone() is None


# --- exceptions, threads, processes -----------------------------------------------------------------------------------


def test_an_operator_that_raises() -> None:
    def step() -> None:
        with pytest.raises(RuntimeError, match="size of tensor"):
            torch.ones(2) + torch.ones(3)
        torch.ones(2).exp()

    _, trace, _ = trace_of(step)
    (raised,) = [e for e in trace.events if e.raised]
    assert raised.op == "add"
    assert raised.raised is not None
    assert "size of tensor" in raised.raised
    assert events_of(trace, "exp")


def test_an_exception_inside_a_module_keeps_the_paths_right() -> None:
    class Fragile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fragile, self.good = nn.Sequential(Fragile()), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.fragile(x)
            except ValueError:
                x = x * 2
            out: Tensor = self.good(x)
            return out

    net = Net()
    _, trace, tracer = trace_of(lambda: net(torch.ones(1, 2)))
    assert [e.module for e in events_of(trace, "mul")] == [""]
    assert [e.module for e in events_of(trace, "addmm")] == ["good"]
    assert tracer.modules.current() == ("", "", None)


def test_an_exception_through_the_outermost_module() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    tracer = Tracer()
    with tracer:
        with pytest.raises(ValueError, match="no"):
            nn.Sequential(nn.Identity(), Bad())(torch.ones(1))
        torch.ones(1).exp()
    assert [e.module_type for e in events_of(tracer.trace(), "exp")] == [""]


class Noisy(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.log(torch.tensor([float(index)]))  # -inf for the first


def test_workers_that_are_forked_while_tracing_are_left_alone() -> None:
    def step() -> list[Tensor]:
        return list(DataLoader(Noisy(), batch_size=4, num_workers=2, multiprocessing_context="fork"))

    batches, trace, _ = trace_of(step)
    assert torch.isinf(batches[0][0, 0])
    assert torch.isfinite(batches[1]).all()
    assert events_of(trace, "log") == [], "ran in the workers"


def test_other_threads_are_left_alone() -> None:
    def step() -> None:
        def work() -> None:
            for _ in range(20):
                torch.ones(3).sin()
                nn.Linear(2, 2)(torch.ones(1, 2))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        nn.Sequential(nn.Linear(2, 2))(torch.ones(1, 2))
        for thread in threads:
            thread.join()

    _, trace, tracer = trace_of(step)
    assert events_of(trace, "sin") == []
    assert [e.module for e in events_of(trace, "addmm")] == ["0"]
    assert tracer.modules.current() == ("", "", None)


def test_an_error_of_our_own_is_remembered_and_hurts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = Tracer()
    monkeypatch.setattr(tracer.memory, "wrote", lambda *_: 1 / 0)
    with tracer:
        result = torch.ones(2) * 3
    assert result.tolist() == [3.0, 3.0]
    assert tracer.trouble is not None
    assert "ZeroDivisionError" in tracer.trouble


# --- kinds of programs ------------------------------------------------------------------------------------------------


def found(run: Callable[[], Tensor], op: str, **expect: Any) -> OpEvent:
    """The first operator that wrote something non-finite must be this one."""
    result, trace, tracer = trace_of(run)
    assert bad_of(tracer, result), "the result is known to be bad"
    first = next(e for e in trace.events if e.bad)
    assert first.op == op
    assert first.born
    for name, value in expect.items():
        assert getattr(first, name) == value
    return first


def test_autocast() -> None:
    net = nn.Linear(2, 2)
    nn.init.constant_(net.weight, 1.0)

    def step() -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            out: Tensor = net(torch.full((1, 2), 4e4))
            return out

    event = found(step, "addmm")
    assert event.outputs[0].dtype == "float16"


@pytest.mark.filterwarnings("ignore")
def test_compiled_functions_run_as_written_when_asked() -> None:
    calls: list[int] = []

    @torch.compile(backend=lambda graph, _: calls.append(1) or graph)
    def f(x: Tensor) -> Tensor:
        return torch.log(x) * 2

    with torch.compiler.set_stance("force_eager"):
        event = found(lambda: f(torch.zeros(2)), "log")
    assert event.site is not None
    assert event.site.code == "torch.log(x)"
    assert calls == []


def test_vmap_and_functional_gradients() -> None:
    def loss(w: Tensor) -> Tensor:
        return torch.sqrt(w).sum()

    event = found(lambda: torch.func.grad(loss)(torch.tensor([0.0, 1.0])), "div")
    assert event.site is not None
    event = found(lambda: torch.vmap(torch.log)(torch.tensor([0.0, 1.0])), "log")
    assert event.outputs[0].neginf == 1
    found(lambda: torch.vmap(torch.func.grad(loss))(torch.zeros(2, 3)), "div")


def test_a_subclass_of_tensor() -> None:
    class Named(Tensor):
        pass

    result, trace, tracer = trace_of(lambda: torch.zeros(2).as_subclass(Named).log() * 2)
    assert isinstance(result, Named)
    (log,) = events_of(trace, "log")
    assert log.born == 2
    assert bad_of(tracer, result)


def test_a_wrapper_that_dispatches_itself() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def step() -> Tensor:
        t = TwoTensor(torch.zeros(2), torch.ones(2))
        out: Tensor = torch.log(t)
        return out

    result, trace, _ = trace_of(step)
    assert result.a.tolist() == [-INF, -INF]
    assert events_of(trace, "log")


def test_sparse_gradients() -> None:
    table = nn.Embedding(5, 2, sparse=True)

    def step() -> Tensor:
        rows = table(torch.tensor([1, 3, 1]))
        (rows - rows.detach()).sqrt().sum().backward()
        assert table.weight.grad is not None
        return table.weight.grad

    grad, trace, tracer = trace_of(step)
    assert grad.layout is torch.sparse_coo
    assert bad_of(tracer, grad)
    assert {"embedding"} <= {e.op for e in trace.events if e.phase == "forward"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(3, 4, 2),
        lambda: nn.GRU(3, 4, bidirectional=True),
        lambda: nn.RNN(3, 4),
        lambda: nn.TransformerEncoderLayer(3, 1, 8, batch_first=True),
        lambda: nn.Sequential(nn.Conv1d(5, 3, 1), nn.BatchNorm1d(3), nn.MaxPool1d(2)),
        lambda: nn.Sequential(nn.Linear(3, 3), nn.GroupNorm(1, 5), nn.GELU(), nn.Dropout(0.5)),
    ],
    ids=["lstm", "gru", "rnn", "transformer", "conv", "mlp"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_bad_input_is_followed_through_layers(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    net = make()
    x = torch.randn(2, 5, 3)

    def step() -> Tensor:
        out = net(torch.log(x))
        out = out[0] if isinstance(out, tuple) else out
        loss: Tensor = out.sum()
        loss.backward()
        return loss

    loss, trace, tracer = trace_of(step)
    assert not torch.isfinite(loss)
    (start,) = bad_of(tracer, loss)
    reached, stack = set(), [start]
    while stack:
        index = stack.pop()
        if index not in reached:
            reached.add(index)
            guilty = [i for i in trace.events[index].inputs if i.guilty]
            stack += [p for i in guilty for p in (i.producer, *i.also) if p is not None]
    assert "log" in {trace.events[i].op for i in reached}


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,)], ids=["tensor", "tuple"])
def test_the_branch_that_cond_chose_is_traced(wrap: Callable[[Tensor], Any]) -> None:
    weights = torch.zeros(2, requires_grad=True)

    def step() -> Tensor:
        out = torch.cond(weights.sum() < 1, lambda x: wrap(x.sqrt()), lambda x: wrap(x.sin()), (weights,))
        loss: Tensor = (out[0] if isinstance(out, tuple) else out).sum()
        loss.backward()
        return loss

    with torch.compiler.set_stance("force_eager"):
        _, trace, tracer = trace_of(step)
    assert weights.grad is not None
    assert torch.isinf(weights.grad).all()
    born = [e for e in trace.events if e.born]
    assert [e.phase for e in born] == ["backward"]
    assert born[0].forward is not None
    assert trace.events[born[0].forward].op == "sqrt"
    assert bad_of(tracer, weights.grad)


def test_cond_is_left_alone_where_it_is_transformed() -> None:
    def pick(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.higher_order.cond(x > 0, lambda x: (x.log(),), lambda x: (x.exp(),), (x,))[0]
        return out

    result, _, _ = trace_of(lambda: torch.vmap(pick)(torch.tensor([1.0, -1.0])))
    assert torch.equal(result, torch.tensor([0.0, math.exp(-1.0)]))


def test_other_operators_that_call_functions_are_one_event() -> None:
    start = (torch.tensor(0), torch.zeros(2))

    def step() -> Tensor:
        _, out = torch.ops.higher_order.while_loop(lambda i, x: i < 1, lambda i, x: (i + 1, x.log()), start, ())
        assert isinstance(out, Tensor)
        return out

    result, trace, tracer = trace_of(step)
    assert torch.isinf(result).all()
    assert [e.op for e in trace.events if e.born] == ["while_loop"]
    assert bad_of(tracer, result)
