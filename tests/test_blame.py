"""Blame on hand-made traces, where each rule of the walk can be seen alone, and on real ones over many steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from firstnan.diagnose.blame import blame
from firstnan.diagnose.rules import explain
from firstnan.records import History, Operand, OpEvent, Role, Site, TensorStat, Trace
from firstnan.tracing.tracer import Tracer
from traced import bad_of, run_snippet, trace_of

INF = math.inf
BAD = TensorStat("result", (2,), "float32", nan=1, first_index=(0,))
INFINITE = TensorStat("result", (2,), "float32", posinf=1, first_index=(0,), min=1.0, max=1.0)
GOOD = TensorStat("result", (2,), "float32", min=0.0, max=1.0)


def event(index: int, op: str, *inputs: Operand, out: TensorStat = BAD, **more: Any) -> OpEvent:
    more.setdefault("phase", "forward")
    return OpEvent(
        index, op, f"aten.{op}.default", step=0, inputs=inputs, outputs=(out,), site=Site("a.py", index + 1), **more
    )


def bad(producer: int | None, *also: int, role: Role | None = None, stat: TensorStat = BAD) -> Operand:
    return Operand("self", stat, producer, role, guilty=True, also=also)


def good(producer: int | None = None) -> Operand:
    return Operand("other", GOOD, producer)


def test_the_walk_follows_guilty_operands_only() -> None:
    trace = Trace((
        event(0, "log", good(), born=1),
        event(1, "exp", good(), born=1),
        event(2, "add", bad(0), good(1)),
        event(3, "sum", bad(2)),
    ))  # fmt: skip
    verdict = blame(trace, [3])
    assert verdict.origin is not None
    assert (verdict.origin.op, verdict.origin.site) == ("log", Site("a.py", 1))
    assert [step.op for step in verdict.path] == ["add", "sum"]


def test_the_earlier_of_two_origins() -> None:
    trace = Trace((
        event(0, "sqrt", good(), born=1),
        event(1, "log", good(), born=1),
        event(2, "add", bad(1), bad(0)),
    ))  # fmt: skip
    assert blame(trace, [2]).origin.op == "sqrt"  # type: ignore[union-attr]


def test_all_that_was_left_in_one_memory_is_visited() -> None:
    trace = Trace((
        event(0, "log", good(), born=1),
        event(1, "copy", bad(0)),
        event(2, "sqrt", good(), born=1),
        event(3, "copy", bad(2)),
        event(4, "sum", bad(3, 1)),
    ))  # fmt: skip
    verdict = blame(trace, [4])
    assert verdict.origin is not None
    assert verdict.origin.op == "log"
    assert [step.op for step in verdict.path] == ["copy", "sum"]


def test_a_norm_that_overflowed_comes_before_what_is_divided_by_it() -> None:
    """`clip_grad_norm_` without a limit: inf / inf is 0 * inf in torch."""
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e30)
    _, trace, tracer = trace_of(lambda: nn.utils.clip_grad_norm_(weights, INF))
    verdict = blame(trace, bad_of(tracer, weights[0].grad))
    assert verdict.origin is not None
    assert verdict.origin.op == "norm"
    assert [step.op for step in verdict.path] == ["stack", "norm", "add", "reciprocal", "mul", "clamp", "mul"]


def test_what_came_from_outside_was_there_first() -> None:
    trace = Trace((
        event(0, "log", good(), born=1),
        event(1, "mul", bad(0), bad(None, role="parameter")),
    ))  # fmt: skip
    origin = blame(trace, [1]).origin
    assert origin is not None
    assert (origin.phase, origin.role, origin.op) == ("parameter", "parameter", "")


def test_what_the_program_writes_over_a_weight_in_the_step_is_found_in_it_before_a_replay_writes_again() -> None:
    weight = Operand("self", BAD, None, "parameter", "scale.weight", guilty=True)
    trace = Trace((
        event(0, "reciprocal", good(), born=1),
        event(1, "mul", weight, bad(0), role="parameter", label="scale.weight"),
        event(2, "addmm", bad(1), grad=True),
    ))  # fmt: skip
    origin = blame(trace, [2]).origin
    assert origin is not None
    assert (origin.phase, origin.op) == ("parameter", "reciprocal")
    alone = Trace((event(0, "sub", weight, role="parameter", label="scale.weight"), event(1, "addmm", bad(0))))
    origin = blame(alone, [1]).origin
    assert origin is not None
    assert (origin.phase, origin.op, origin.label) == ("parameter", "", "scale.weight")
    assert "either this line made it, or it was there before" in explain(origin, alone, History())[0].why


@pytest.mark.parametrize("role", ["parameter", "buffer"])
def test_what_is_copied_from_a_file_into_a_model_is_no_data(role: Role) -> None:
    trace = Trace((
        event(0, "copy", bad(None), role=role, label="norm.running_mean", region="setup"),
        event(1, "batch_norm", good(), bad(0, role=role)),
    ))  # fmt: skip
    origin = blame(trace, [1]).origin
    assert origin is not None
    assert (origin.phase, origin.role, origin.label) == ("parameter", role, "norm.running_mean")
    assert f"The {role} norm.running_mean contains" in explain(origin, trace, History())[0].why


@pytest.mark.parametrize(
    ("role", "stat", "meant"),
    [
        ("buffer", INFINITE, True),
        (None, INFINITE, True),
        ("parameter", INFINITE, False),
        ("buffer", BAD, False),
        ("buffer", TensorStat("x", (3,), "float32", min=-1.0, max=3.0, posinf=1), False),
        ("buffer", TensorStat("x", (3,), "float32", min=-1.0, max=3.0, neginf=1), True),
        ("input", TensorStat("x", (3,), "float32", min=-1.0, max=3.0, posinf=1), False),
        ("input", TensorStat("x", (3,), "float32", min=0.0, max=1.0, neginf=1, binary=True), True),
        ("input", TensorStat("x", (3,), "float32", min=-1.5, max=-1.5, neginf=1), True),
        ("input", TensorStat("x", (3,), "float32", min=0.5, max=0.5, posinf=1), False),
        (None, TensorStat("x", (3,), "float32", posinf=1, neginf=1), False),
    ],
)
def test_infinities_from_outside(role: Role | None, stat: TensorStat, meant: bool) -> None:
    """A mask is innocent until a NaN is made of it; then the operator that made it is the origin."""
    trace = Trace((event(0, "softmax", bad(None, role=role, stat=stat), nan_from_inf=1),))
    origin = blame(trace, [0]).origin
    assert origin is not None
    assert (origin.op == "softmax" and origin.phase == "forward") is meant


@pytest.mark.parametrize(("op", "phase"), [("mul", "input"), ("add", "forward")])
def test_an_infinite_buffer_that_is_multiplied_with_is_no_mask(op: str, phase: str) -> None:
    trace = Trace((
        event(0, op, good(), bad(None, role="buffer", stat=INFINITE), out=INFINITE),
        event(1, "addmm", bad(0), nan_from_inf=1),
    ))  # fmt: skip
    origin = blame(trace, [1]).origin
    assert origin is not None
    assert origin.phase == phase


def test_an_accident_comes_before_the_nan_that_was_made_of_it() -> None:
    trace = Trace((
        event(0, "full", out=INFINITE, on_purpose=True, born=2),
        event(1, "exp", good(), out=INFINITE, born=1),
        event(2, "sub", bad(1), bad(0), nan_from_inf=1),
    ))  # fmt: skip
    assert blame(trace, [2]).origin.op == "exp"  # type: ignore[union-attr]


def test_only_masks_are_innocent() -> None:
    trace = Trace((
        event(0, "full", out=INFINITE, on_purpose=True, born=2),
        event(1, "add", good(), bad(0), out=INFINITE),
        event(2, "gather", bad(1), out=INFINITE),
    ))  # fmt: skip
    verdict = blame(trace, [2])
    assert verdict.innocent
    assert verdict.origin is not None
    assert verdict.origin.op == "gather", "what takes a masked value is what to show"


@pytest.mark.parametrize(("region", "data"), [("data", True), ("setup", True), ("step", False)])
def test_an_infinity_of_one_sample_is_data_if_the_batch_is_not_a_mask(region: str, data: bool) -> None:
    batch = TensorStat("x", (8, 2), "float32", posinf=1, min=0.0, max=3.0)
    mask = TensorStat("x", (8, 2), "float32", posinf=1, min=0.0, max=0.0)
    for stat, is_data in ((batch, data), (mask, False)):
        trace = Trace((
            event(0, "tensor", out=INFINITE, on_purpose=True, born=1, region=region),
            event(1, "var", bad(0, role="input", stat=stat), nan_from_inf=1, region="step"),
        ))  # fmt: skip
        assert blame(trace, [1]).origin.op == ("tensor" if is_data else "var")  # type: ignore[union-attr]


@pytest.mark.parametrize(("layer", "phase"), [("ActNorm", "forward"), ("", "parameter")])
def test_what_a_layer_writes_into_its_weights_is_forward(layer: str, phase: str) -> None:
    trace = Trace((
        event(0, "log", good(), out=INFINITE, born=1, region="setup", module_type=layer),
        event(1, "exp", bad(0, role="parameter", stat=INFINITE), region="setup", module_type=layer),
    ))  # fmt: skip
    assert blame(trace, [1]).origin.phase == phase  # type: ignore[union-attr]


def test_uninitialised_memory() -> None:
    trace = Trace((event(0, "empty", out=GOOD, uninitialized=True), event(1, "mul", good(), bad(0))))
    assert blame(trace, [1]).origin.op == "empty"  # type: ignore[union-attr]


def test_nothing_noticed() -> None:
    assert blame(Trace(), []).origin is None
    assert not blame(Trace(), []).innocent


def test_a_backward_origin_is_shown_at_its_forward_line() -> None:
    trace = Trace((
        event(0, "sqrt", good(), out=GOOD, module="head"),
        event(1, "div", good(), phase="backward", node="SqrtBackward0", forward=0, born=1),
        event(2, "mul", bad(1), phase="backward"),
    ))  # fmt: skip
    origin = blame(trace, [2], loss_is_finite=True).origin
    assert origin is not None
    assert (origin.phase, origin.op, origin.module) == ("backward", "sqrt", "head")
    assert origin.site == Site("a.py", 1)
    assert origin.event is trace.events[1]
    assert origin.forward_event is trace.events[0]


def test_a_second_derivative_leads_back_to_the_first_forward_line() -> None:
    trace = Trace((
        event(0, "pow", good(), out=GOOD),
        event(1, "mul", good(0), out=GOOD, phase="backward", node="PowBackward0", forward=0),
        event(2, "div", good(1), phase="backward", node="MulBackward0", forward=1, born=1),
    ))  # fmt: skip
    origin = blame(trace, [2], loss_is_finite=True).origin
    assert origin is not None
    assert (origin.op, origin.site) == ("pow", Site("a.py", 1))


def test_backward_code_of_the_user_is_shown_where_it_is() -> None:
    trace = Trace((
        event(0, "mul", good(), out=GOOD),
        event(1, "div", good(), phase="backward", forward=0, born=1, in_python_backward=True),
    ))  # fmt: skip
    origin = blame(trace, [1], loss_is_finite=True).origin
    assert origin is not None
    assert (origin.phase, origin.op, origin.site) == ("backward", "div", Site("a.py", 2))


def test_a_value_that_never_reached_the_loss_comes_back_in_backward() -> None:
    trace = Trace((
        event(0, "log", good(), out=INFINITE, born=1),
        event(1, "where", good(), good(0), out=GOOD),
        event(2, "div", bad(0), phase="backward", node="LogBackward0", forward=0, nan_from_inf=1),
    ))  # fmt: skip
    finite = blame(trace, [2], loss_is_finite=True).origin
    assert finite is not None
    assert (finite.phase, finite.op, finite.site) == ("backward", "log", Site("a.py", 1))
    bad_loss = blame(trace, [2], loss_is_finite=False).origin
    assert bad_loss is not None
    assert (bad_loss.phase, bad_loss.op) == ("forward", "log")


@pytest.mark.parametrize(
    ("more", "phase"),
    [
        ({"phase": "optimizer"}, "optimizer"),
        ({"region": "data"}, "input"),
        ({"region": "setup"}, "input"),
        ({"region": "setup", "module_type": "Net"}, "forward"),
        ({"region": "setup", "role": "parameter"}, "parameter"),
        ({"region": "between", "role": "parameter"}, "parameter"),
        ({"region": "step"}, "forward"),
        ({"region": "step", "role": "input"}, "forward"),
        ({"region": "setup", "role": "input"}, "input"),
    ],
    ids=str,
)
def test_phases(more: dict[str, Any], phase: str) -> None:
    trace = Trace((event(0, "div", good(), born=1, **more), event(1, "sum", bad(0))))
    assert blame(trace, [1]).origin.phase == phase  # type: ignore[union-attr]


def test_a_value_that_is_written_into_a_buffer_after_it_was_computed() -> None:
    mean = event(0, "mean", good(), born=1, region="between")
    copy = event(1, "copy", bad(0), region="between", role="buffer", label="temperature")
    origin = blame(Trace((mean, copy, event(2, "div", bad(1)))), [2]).origin
    assert origin is not None
    assert (origin.op, origin.phase, origin.role, origin.label) == ("mean", "parameter", "buffer", "temperature")


def test_data_that_a_validation_reads() -> None:
    made = event(0, "copy", good(), born=1, region="setup")
    for region, grad in (("between", True), ("step", False), ("step", True)):
        read = event(2, "addmm", bad(1), region=region, module_type="Linear", grad=grad)
        trace = Trace((made, event(1, "stack", bad(0), region="data"), read))
        assert trace.is_read_outside_training(made) == (region == "between" or not grad)


def test_an_operator_that_raised() -> None:
    def step() -> None:
        with pytest.raises(torch.linalg.LinAlgError):
            torch.linalg.cholesky(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))

    _, trace, _ = trace_of(step)
    raised = [e.index for e in trace.events if e.raised]
    assert raised
    origin = blame(trace, raised).origin
    assert origin is not None
    assert origin.op == "cholesky"


def test_what_refuses_a_nan_has_not_made_it() -> None:
    written = event(0, "fill", on_purpose="a constant")
    trace = Trace((written, event(1, "stack", bad(0)), event(2, "binary_cross_entropy", bad(1), raised="refused")))
    verdict = blame(trace, [2])
    assert (verdict.origin.site, verdict.innocent) == (Site("a.py", 1), False)  # type: ignore[union-attr]
    mask = event(0, "fill", on_purpose="a constant", out=INFINITE)
    trace = Trace((mask, event(1, "cholesky", bad(0, stat=INFINITE), out=GOOD, raised="refused")))
    assert blame(trace, [1]).origin.op == "cholesky"  # type: ignore[union-attr]


def test_a_trail_that_ends_in_the_middle() -> None:
    trace = Trace((event(0, "mystery", good()), event(1, "add", bad(0))))
    assert blame(trace, [1]).origin.op == "mystery"  # type: ignore[union-attr]


def test_a_circle_cannot_hold_the_walk() -> None:
    trace = Trace((event(0, "add", bad(1)), event(1, "mul", bad(0))))
    assert blame(trace, [1]).origin is not None


# --- real steps -------------------------------------------------------------------------------------------------------


def test_divergence_leads_to_the_first_operator_that_overflowed() -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e9)
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    tracer = Tracer()
    tracer.region = "step"
    with tracer:
        for _ in range(200):
            loss = (net(x) - y).pow(2).mean()
            if not torch.isfinite(loss):
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tracer.forget_healthy()
    trace = tracer.trace()
    origin = blame(trace, bad_of(tracer, loss)).origin
    assert origin is not None
    assert (origin.phase, origin.op) == ("forward", "pow")
    assert origin.produced is not None
    assert origin.produced.posinf


def test_a_weight_that_was_ruined_in_an_earlier_step() -> None:
    w = torch.ones(3)
    tracer = Tracer()
    tracer.region = "step"
    with tracer:
        for step in range(6):
            tracer.step = step
            if step == 2:
                w.mul_(torch.log(torch.tensor([1.0, -1.0, 1.0])))
            loss = (w * 2).sum()
            tracer.forget_healthy()
    trace = tracer.trace()
    origin = blame(trace, bad_of(tracer, loss)).origin
    assert origin is not None
    assert (origin.op, origin.step) == ("log", 2)


def test_what_torch_makes_and_discards_is_not_noticed() -> None:
    """Healthy steps in which torch itself creates non-finite values."""
    torch.manual_seed(0)
    logits = torch.randn(10, 2, 5, requires_grad=True)
    square = torch.eye(3, requires_grad=True)

    def step() -> Tensor:
        ctc = functional.ctc_loss(
            logits.log_softmax(-1), torch.tensor([[1, 2], [3, 4]]), torch.tensor([10, 10]), torch.tensor([2, 2])
        )
        loss = ctc + torch.logdet(square * 2) + torch.cdist(logits[0], logits[1]).mean()
        loss.backward()
        return loss

    loss, trace, tracer = trace_of(step)
    assert any(e.bad for e in trace.events), "otherwise this test says nothing"
    assert bad_of(tracer, loss, logits.grad, square.grad) == []


def test_the_path_names_lines_and_layers() -> None:
    outcome = run_snippet("""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 1)
            def forward(self, x):
                h = torch.log(self.first(x) - 100)
                return self.last(h)
        model = Net()
        batch = torch.ones(1, 2)
        # step
        loss = model(batch).sum()
        loss.backward()
    """)
    assert outcome.noticed == "loss"
    assert [(step.op, step.line, step.module) for step in outcome.verdict.path] == [
        ("addmm", 7, "last"),
        ("sum", 11, ""),
    ]
    assert outcome.verdict.path[0].library.partition(":")[0].endswith("linear.py")
    assert outcome.origin.module == ""
    assert outcome.origin.site is not None
    assert outcome.origin.site.code == "torch.log(self.first(x) - 100)"


def test_the_numbers_of_the_origin() -> None:
    outcome = run_snippet("""
        w = torch.ones(3, requires_grad=True)
        # step
        loss = (w / torch.tensor([1.0, 0.0, 2.0])).sum()
        loss.backward()
    """)
    origin = outcome.origin
    assert [(s.name, s.zeros) for s in origin.inputs] == [("self", 0), ("other", 1)]
    assert origin.produced is not None
    assert (origin.produced.posinf, origin.produced.first_index) == (1, (1,))


def test_gradients_kept_from_an_earlier_micro_batch() -> None:
    """A gradient that is accumulated: the guilty backward pass is not the last one."""
    outcome = run_snippet("""
        w = torch.ones(2, requires_grad=True)
        # step
        first = torch.sqrt(w * 0).sum()
        first.backward()
        loss = (w * 2).sum()
        loss.backward()
    """)
    assert outcome.noticed == "gradient"
    assert outcome.place == ("backward", "sqrt", 3)


def test_healthy_steps_with_masks_notice_nothing() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)

    def step() -> Tensor:
        out: Tensor = layer(torch.randn(2, 5, 8), src_mask=mask, is_causal=True).square().mean()
        out.backward()
        return out

    loss, _, tracer = trace_of(step)
    assert bad_of(tracer, loss, *(p.grad for p in layer.parameters())) == []


@pytest.mark.parametrize("forward_began", [True, False])
def test_what_runs_between_the_layers_and_the_loss_is_forward_before_any_step_is_known(forward_began: bool) -> None:
    """A scale that is computed after the model's output, and without gradients, is no preparation of data."""
    output = event(0 if forward_began else 1, "addmm", good(), out=GOOD, grad=True, region="setup")
    scale = event(1 if forward_began else 0, "div", good(), born=1, region="setup")
    loss = event(2, "mul", bad(scale.index), good(output.index), grad=True)
    origin = blame(Trace(tuple(sorted((output, scale, loss), key=lambda e: e.index))), [2]).origin
    assert origin is not None
    assert origin.phase == ("forward" if forward_began else "input")


def test_what_is_computed_from_a_layer_is_forward_before_any_step_is_known() -> None:
    trace = Trace((
        event(0, "addmm", good(), out=GOOD, module_type="Linear", region="setup"),
        event(1, "log", good(0), born=1, region="setup"),
        event(2, "mse_loss", bad(1), grad=True),
    ))  # fmt: skip
    assert blame(trace, [2]).origin.phase == "forward"  # type: ignore[union-attr]


def test_a_factorization_that_fails_has_raised() -> None:
    trace = Trace((
        event(0, "cholesky", good(), out=GOOD),
        event(1, "linalg_check_errors", good(0), out=GOOD, raised="not positive-definite"),
    ))  # fmt: skip
    origin = blame(trace, [1]).origin
    assert origin is not None
    assert origin.event is not None
    assert (origin.op, origin.event.raised, origin.produced) == ("cholesky", "not positive-definite", None)
