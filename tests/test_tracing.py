"""`trace()`: what it says of a block of code, when it keeps quiet, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import firstnan
from firstnan import NonFiniteError, Report
from firstnan.api import trace as tracing
from firstnan.engine import conclude
from firstnan.gate.gate import Gate
from firstnan.tracing import tracer
from firstnan.tracing.tracer import Tracer
from loops import Rooted, batches, birthplace, differences, randomness, seeded, state_of, with_bad_target

pytestmark = pytest.mark.slow


def found(caught: Any) -> Report:
    report: Report = caught.value.report
    return report


def test_a_block_without_training_raises_at_its_end() -> None:
    x = torch.tensor([1.0, -1.0])
    with pytest.raises(NonFiniteError) as caught, firstnan.trace() as block:
        y = x.log()  # born: forward only
        z = y * 2
        reached = z.shape
    assert reached == (2,)
    assert birthplace(found(caught)) == "forward only"
    assert found(caught).cause.slug == "log_of_negative"
    assert block.report is found(caught)


def test_without_gradients_too() -> None:
    with pytest.raises(NonFiniteError) as caught, torch.no_grad(), firstnan.trace():
        y = torch.zeros(3) / torch.zeros(3)  # born: no gradients
        kept = y + 1
    assert kept.isnan().all()
    assert birthplace(found(caught)) == "no gradients"


def test_a_bad_loss_raises_at_its_backward() -> None:
    model = seeded()
    x, y = with_bad_target(batches(1), 0)[0]
    reached = []
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        loss = (model(x) * y.log()).mean()  # born: loss of a block
        reached.append("loss")
        loss.backward()
        reached.append("after")
    assert birthplace(found(caught)) == "loss of a block"
    assert found(caught).noticed.what == "loss"
    assert reached == ["loss"]
    assert found(caught).reproduced == "not_replayed"
    assert "traced as it ran\n" in str(caught.value)


def test_a_gradient_that_breaks_in_backward() -> None:
    torch.manual_seed(0)
    model = Rooted()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model.scale.weight.detach().clone()
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        model(torch.zeros(2, 4)).sum().backward()
        optimizer.step()
    assert birthplace(found(caught)) == "derivative in the model"
    assert (found(caught).origin.phase, found(caught).noticed.what) == ("backward", "gradient")
    assert torch.equal(model.scale.weight, before)


def test_a_gradient_without_an_optimizer() -> None:
    x = torch.zeros(3, requires_grad=True)
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        x.sqrt().sum().backward()  # born: no optimizer
    assert birthplace(found(caught)) == "no optimizer"


@pytest.mark.parametrize("inside", [True, False])
def test_an_update_that_breaks(inside: bool) -> None:
    """The optimizer may have been made before the block."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), eps=0.0)
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        if inside:
            optimizer = torch.optim.Adam(model.parameters(), eps=0.0)
        model(torch.zeros(2, 4)).sum().backward()
        optimizer.step()
    assert found(caught).origin.phase == "optimizer"
    assert found(caught).step == 0


def test_several_steps_in_a_block() -> None:
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        for x, y in with_bad_target(batches(5), 3):
            optimizer.zero_grad()
            (model(x) * y.log()).mean().backward()  # born: fourth step
            optimizer.step()
    assert birthplace(found(caught)) == "fourth step"
    assert found(caught).step == 3


def test_an_exception_of_the_block_is_given_a_note() -> None:
    with pytest.raises(ValueError, match="mine") as caught, firstnan.trace() as block:
        probabilities = torch.zeros(3).log().softmax(0)  # born: before the exception
        if probabilities.isnan().any():
            raise ValueError("mine")
    assert birthplace(block.report) == "before the exception"
    assert block.report.noticed.what == "exception"
    assert len(caught.value.__notes__) == 1
    assert "before the exception" in caught.value.__notes__[0]


def test_an_operator_that_refuses_a_nan_is_given_a_note() -> None:
    with pytest.raises(RuntimeError, match="probability tensor") as caught, firstnan.trace() as block:
        broken = torch.zeros(2) / 0  # born: refused
        torch.multinomial(broken, 1)
    assert birthplace(block.report) == "refused"
    assert "refused" in caught.value.__notes__[0]


def test_an_exception_without_a_nan_is_left_alone() -> None:
    with pytest.raises(KeyError) as caught, firstnan.trace() as block:
        {}[torch.ones(2).sum().item()]
    assert not hasattr(caught.value, "__notes__")
    assert block.report is None


def test_a_batch_that_cannot_be_looked_at_costs_no_more_than_its_samples(monkeypatch: Any) -> None:
    monkeypatch.setattr(conclude, "_bad_samples", lambda *_: 1 // 0)
    model = seeded()
    x, y = with_bad_target(batches(1), 0)[0]
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        (model(x) * y.log()).mean().backward()  # born: odd batch
    assert birthplace(found(caught)) == "odd batch"
    assert found(caught).cause.slug == "log_of_negative"
    assert "could not be examined (ZeroDivisionError" in found(caught).notes[0]


# Silence.


def test_a_mask_is_silent() -> None:
    with firstnan.trace() as block:
        scores = torch.randn(4, 4, requires_grad=True)
        mask = torch.triu(torch.full((4, 4), float("-inf")), 1)
        weights = (scores + mask).softmax(1)
        filled = scores.masked_fill(mask.isinf(), float("-inf")).softmax(1)
        (weights * filled).sum().backward()
        lowest = torch.full((3,), float("inf"))
        least = torch.minimum(lowest, torch.ones(3))
    assert block.report is None
    assert least.isfinite().all()


def test_a_nan_that_is_replaced_is_silent() -> None:
    with firstnan.trace() as block:
        x = torch.tensor([1.0, -1.0])
        y = x.log().nan_to_num()
        z = torch.where(x > 0, x.sqrt(), 0.0)
    assert block.report is None
    assert (y + z).isfinite().all()


def test_a_nan_that_nobody_holds_any_more_is_silent() -> None:
    with firstnan.trace() as block:
        x = torch.tensor([1.0, -1.0]).log()
        x = torch.ones(2)
    assert block.report is None
    assert x.sum() == 2


def test_a_nan_from_before_the_block_is_not_its_own() -> None:
    old = torch.full((2,), float("nan"))
    with firstnan.trace() as block:
        torch.ones(2).add(1)
    assert block.report is None
    assert old.isnan().all()


def test_a_healthy_block_changes_nothing() -> None:
    def run(traced: bool) -> tuple[Any, Any]:
        model = seeded(dropout=0.3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def loop() -> None:
            for x, y in batches(5):
                optimizer.zero_grad()
                (model(x) * y.log()).mean().backward()
                optimizer.step()

        if traced:
            with firstnan.trace() as block:
                loop()
            assert block.report is None
        else:
            loop()
        return state_of(model, optimizer), randomness()

    expected, got = run(False), run(True)
    assert not differences(expected[0], got[0])
    assert not differences(expected[1], got[1])


# What is left, and what is around.


def test_nothing_is_left_on_the_model_or_the_optimizer() -> None:
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters())
    before = [
        {k: (dict(v) if isinstance(v, dict) else v) for k, v in vars(o).items() if k not in ("_buffers", "state")}
        for o in (*model.modules(), optimizer)
    ]
    with pytest.raises(NonFiniteError), firstnan.trace():
        for x, y in with_bad_target(batches(2), 1):
            optimizer.zero_grad()
            (model(x) * y.log()).mean().backward()
            optimizer.step()
    after = [
        {k: (dict(v) if isinstance(v, dict) else v) for k, v in vars(o).items() if k not in ("_buffers", "state")}
        for o in (*model.modules(), optimizer)
    ]
    for one, other in zip(before, after, strict=True):
        assert one.keys() == other.keys()
        assert [k for k in one if "hook" in k and one[k] != other[k]] == []


def test_blocks_one_after_the_other_and_inside_each_other() -> None:
    for _ in range(2):
        with pytest.raises(NonFiniteError) as caught, firstnan.trace():
            y = torch.tensor(-1.0).sqrt()  # born: again
            del_later = y
        assert birthplace(found(caught)) == "again"
    with pytest.raises(NonFiniteError) as caught, firstnan.trace() as outer:
        with firstnan.trace() as inner:
            torch.ones(2).sum()
        y = torch.tensor(-1.0).sqrt()  # born: outer
    assert inner.report is None
    assert birthplace(outer.report) == "outer"
    assert del_later.isnan()


def test_a_block_inside_a_watched_loop() -> None:
    """The detector's step goes on being watched; the block's error is the program's own."""
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with firstnan.NaNDetector(model, optimizer) as detector:
        for x, y in detector.batches(batches(3)):
            with firstnan.trace() as block:
                optimizer.zero_grad()
                (model(x) * y.log()).mean().backward()
                optimizer.step()
            assert block.report is None
    assert detector.summary()["steps"] == 3


def test_another_thread_is_no_part_of_the_block() -> None:
    def work() -> None:
        kept.append(torch.tensor(-1.0).log())

    kept: list[Tensor] = []
    with firstnan.trace() as block:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        torch.ones(2).sum()
    assert kept[0].isnan()
    assert block.report is None


# Updates that are known to stay finite are not recorded.


class Recorded(TorchDispatchMode):
    """What the program's own mode is given, around or inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def phases(block: tracing.Block) -> set[str]:
    tracer = block.session.microscope.tracer
    assert tracer is not None
    return {raw.phase for raw in tracer.raws}


@pytest.mark.parametrize(("settings", "recorded"), [({}, False), ({"eps": 1e-30}, True), ({"lr": 1e3}, True)])
def test_which_updates_are_recorded(settings: dict[str, float], recorded: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(Tracer, "forget_healthy", lambda self: None)
    model = seeded()
    optimizer = torch.optim.Adam(model.parameters(), **settings)
    with firstnan.trace() as block:
        for x, y in batches(2):
            optimizer.zero_grad()
            (model(x) * y.log()).mean().backward()
            optimizer.step()
    assert phases(block) == {"forward", "backward"} | ({"optimizer"} if recorded else set())


def test_a_state_that_was_bad_before_the_block_is_seen_in_the_update() -> None:
    model = seeded()
    optimizer = torch.optim.Adam(model.parameters())
    x, y = batches(1)[0]
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        for bad in (False, True):
            optimizer.zero_grad()
            (model(x) * y.log()).mean().backward()
            if bad:
                optimizer.state[model.last.weight]["exp_avg_sq"][0, 0] = -1.0
            optimizer.step()
    assert found(caught).origin.op == "sqrt"
    assert found(caught).origin.phase == "optimizer"
    assert found(caught).step == 1


def test_what_comes_after_an_update_that_is_not_recorded() -> None:
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = batches(1)[0]
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        (model(x) * y.log()).mean().backward()
        optimizer.step()
        model.last.weight.data.sub_(1e3).log_()  # born: after the update
    assert birthplace(found(caught)) == "after the update"


@pytest.mark.parametrize("later", [1, 2])
def test_an_update_that_raises_does_not_end_the_record(later: int) -> None:
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    x, y = batches(1)[0]
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        for step in range(2 + later):
            optimizer.zero_grad()
            loss = (model(x) * (y - 9.0 * (step == 1 + later)).log()).mean()  # born: after an error
            loss.backward()
            if step == 1:
                optimizer.state[model.last.weight]["momentum_buffer"] = torch.zeros(3)  # of another shape
                with pytest.raises(RuntimeError):
                    optimizer.step()
                optimizer.state.clear()
            else:
                optimizer.step()
    assert birthplace(found(caught)) == "after an error"


def test_a_backward_after_an_update_that_raised_is_recorded() -> None:
    weights = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weights], 0.01, momentum=0.9)
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        weights.sum().backward()
        optimizer.step()
        optimizer.state[weights]["momentum_buffer"] = torch.zeros(2)
        with pytest.raises(RuntimeError):
            optimizer.step()
        optimizer.zero_grad()
        ((weights - 1).clamp_max(0.0) + 1.0).sum().backward()
        optimizer.zero_grad()
        ((weights - weights.detach()).abs().sqrt()).sum().backward()  # born: second backward
    assert birthplace(found(caught)) == "second backward"


def test_an_update_that_breaks_after_one_that_was_known_to_be_safe() -> None:
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        for x, y in batches(3):
            optimizer.zero_grad()
            (model(x) * y.log()).mean().mul(1e3).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 1e38
    assert (found(caught).noticed.what, found(caught).step) == ("parameter", 1)
    assert found(caught).origin.phase == "optimizer"


# One block for every step.


def test_gradients_are_read_once_a_step_from_the_second_block_on(monkeypatch: Any) -> None:
    looks = []
    original = Gate._check_gradients
    monkeypatch.setattr(Gate, "_check_gradients", lambda *a, **k: (looks.append(a[1]), original(*a, **k))[1])
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for x, y in batches(3):
        with firstnan.trace():
            optimizer.zero_grad()
            (model(x) * y.log()).mean().backward()
            optimizer.step()
    assert looks == [None, optimizer, optimizer, optimizer]


def test_a_gradient_that_breaks_in_a_later_block_without_an_update() -> None:
    torch.manual_seed(0)
    model = Rooted()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with firstnan.trace():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    for _ in range(2):
        optimizer.zero_grad()
        with pytest.raises(NonFiniteError) as caught, firstnan.trace():
            model(torch.zeros(2, 4)).sum().backward()
        assert birthplace(found(caught)) == "derivative in the model"
        assert found(caught).origin.phase == "backward"


# What counts at the end of a block in which something was trained.


def test_a_bad_metric_beside_a_healthy_step_is_silent() -> None:
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for x, y in batches(2):
        with firstnan.trace() as block:
            optimizer.zero_grad()
            (model(x) * y.log()).mean().backward()
            optimizer.step()
            precision = torch.zeros(()) / torch.zeros(())
            with torch.no_grad():
                evaluated = model(x).sub(1e3).log().mean()
        assert block.report is None
        assert precision.isnan()
        assert evaluated.isnan()


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.average = (self.average + out.detach().mean() * 0 - 1).sqrt()  # born: buffer
        return out


def test_a_bad_buffer_beside_a_healthy_step() -> None:
    model = Averaged()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert birthplace(found(caught)) == "buffer"


@pytest.mark.parametrize("kept", ["averaged", "by hand", "gradient", "state"])
def test_what_training_keeps_counts_wherever_it_is(kept: str) -> None:
    model, other = seeded(), nn.Linear(2, 2).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    x, y = batches(1)[0]
    weights = torch.ones(2, requires_grad=True)
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        (model(x) * y.log()).mean().backward()
        optimizer.step()
        bad = torch.tensor(-1.0).log()  # born: kept
        if kept == "averaged":
            other.weight.lerp_(bad.expand(2, 2), 0.5)
        elif kept == "by hand":
            weights = (weights.detach() + bad).requires_grad_()
        elif kept == "gradient":
            weights.grad = bad.expand(2).clone()
        else:
            optimizer.state[model.last.weight]["momentum_buffer"] += bad
        del bad
    assert birthplace(found(caught)) == "kept"


def test_models_are_looked_for_only_where_something_is_bad(monkeypatch: Any) -> None:
    looks = []
    monkeypatch.setattr(tracing, "find_live_objects", lambda *kinds: looks.append(kinds) or [])
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for bad in (False, True):
        with firstnan.trace():
            for x, y in batches(2):
                optimizer.zero_grad()
                (model(x) * y.log()).mean().backward()
                optimizer.step()
            metric = torch.zeros(()) / (not bad)
        assert bool(metric.isnan()) is bad
        assert len(looks) == bad


def half(model: nn.Module, x: Tensor) -> Tensor:
    """Its gradient overflows where it is scaled by more than 2**14 or so."""
    return (model(x).half().float() * 3).sum()  # born: scaled


@pytest.mark.parametrize("blocks", ["one", "two", "all"])
@pytest.mark.parametrize("scale", [2.0**16, 2.0**127])
def test_an_overflow_that_a_scaler_skips_is_silent(blocks: str, scale: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    skipped, losses = 0, []
    with firstnan.trace() if blocks == "all" else contextlib.nullcontext():
        for _ in range(4):
            with firstnan.trace() if blocks != "all" else contextlib.nullcontext():
                optimizer.zero_grad()
                losses.append(scaler.scale(half(model, torch.ones(4, 3))))
                losses[-1].backward()
                skipped += not model.weight.grad.isfinite().all()
                if blocks != "two":
                    scaler.step(optimizer)
                    scaler.update()
            if blocks == "two":
                with firstnan.trace():
                    scaler.step(optimizer)
                    scaler.update()
    assert skipped > 1
    assert losses[0].isinf() == (scale > 1e6)


def test_a_loss_that_is_only_scaled_in_the_block() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with firstnan.trace() as block:
        loss = scaler.scale(half(nn.Linear(3, 1), torch.full((4, 3), 100.0)))
    assert loss.isinf()
    assert block.report is None


@pytest.mark.parametrize("fused", [False, True])
def test_one_of_two_updates_is_skipped(fused: bool) -> None:
    """Also where the optimizer's own kernel skips it."""
    torch.manual_seed(0)
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    optimizers = [torch.optim.AdamW(m.parameters(), fused=fused) for m in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    for _ in range(2):
        with firstnan.trace():
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(half(models[0], torch.ones(4, 3)) + models[1](torch.ones(4, 3)).sum()).backward()
        assert not models[0].weight.grad.isfinite().all()
        with firstnan.trace():
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert not optimizers[0].state.get(models[0].weight, {}).get("step")
    assert optimizers[1].state[models[1].weight]["step"] == 2


def test_a_scale_that_sank_below_one_is_told() -> None:
    torch.manual_seed(0)
    model = Rooted()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    with pytest.raises(NonFiniteError) as caught:
        for _ in range(2):
            with firstnan.trace():
                optimizer.zero_grad()
                scaler.scale(model(torch.zeros(2, 4)).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
    assert scaler.get_scale() == 0.5
    assert birthplace(found(caught)) == "derivative in the model"


def test_a_scaler_that_is_switched_off_excuses_nothing() -> None:
    torch.manual_seed(0)
    model = Rooted()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with firstnan.trace():
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
    optimizer.zero_grad()
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        scaler.scale(model(torch.zeros(2, 4)).sum()).backward()
    assert birthplace(found(caught)) == "derivative in the model"


def test_the_derivative_of_a_view() -> None:
    x = torch.zeros(1, requires_grad=True)
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        y = x.expand(4)  # born: expand
        (y * 2e38).sum().backward()
    assert birthplace(found(caught)) == "expand"
    assert found(caught).origin.phase == "backward"


# Blocks in which nothing is trained.


@pytest.mark.parametrize("bad", [False, True])
def test_a_long_block_without_steps_does_not_grow(bad: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(tracer, "_MAX_EVENTS", 50)
    model = seeded().eval()
    kept = []
    expected = pytest.raises(NonFiniteError) if bad else contextlib.nullcontext()
    with expected as caught, torch.no_grad(), firstnan.trace() as block:
        for i in range(100):
            out = model(torch.ones(2, 4))
            if i == 10 and bad:
                kept.append((out - out).log() * 0)  # born: long before the end
        assert block.session.microscope.tracer is not None
        events = len(block.session.microscope.tracer.raws)
    assert events < 100
    if bad:
        assert birthplace(found(caught)) == "long before the end"


def test_what_backward_may_come_back_to_is_kept(monkeypatch: Any) -> None:
    monkeypatch.setattr(tracer, "_MAX_EVENTS", 10)
    x = torch.zeros(3, requires_grad=True)
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        y = x.sqrt()  # born: fifty operators ago
        for _ in range(50):
            y = y + 1
        y.sum().backward()
    assert birthplace(found(caught)) == "fifty operators ago"


@pytest.mark.parametrize("bad", [False, True])
def test_modes_of_the_program_stay_where_they_are(bad: bool) -> None:
    """One around the block and one inside it: they see all that the program does, and the block sees it too."""

    def run(traced: bool) -> tuple[list[str], list[str]]:
        model = seeded()
        optimizer = torch.optim.Adam(model.parameters())
        around, inside = Recorded(), Recorded()
        with around, firstnan.trace() if traced else contextlib.nullcontext():
            for step, (x, y) in enumerate(batches(3)):
                optimizer.zero_grad()
                loss = (model(x) * (y - 9.0 * (bad and step == 2)).log()).mean()  # born: between modes
                with inside if step == 1 else contextlib.nullcontext():
                    if not (bad and step == 2) or traced:
                        loss.backward()
                        optimizer.step()
                torch.ones(3).sum()
        return around.names, inside.names

    depth = torch._C._len_torch_dispatch_stack()
    expected = run(False)
    if bad:
        with pytest.raises(NonFiniteError) as caught:
            run(True)
        assert birthplace(found(caught)) == "between modes"
    else:
        for own, seen in zip(expected, run(True), strict=True):
            rest = iter(seen)
            assert own
            assert all(name in rest for name in own)
    assert torch._C._len_torch_dispatch_stack() == depth


def test_a_block_that_drops_its_result() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        model(torch.full((2, 4), 1e38))
    assert found(caught).origin is not None
    assert found(caught).origin.module == "0"
    with pytest.raises(NonFiniteError, match="log_of_negative"), torch.no_grad(), firstnan.trace():
        torch.tensor([1.0, -1.0]).log().sum()


def test_a_block_that_drops_a_finite_result() -> None:
    mask = torch.triu(torch.ones(3, 3, dtype=torch.bool), 1)
    with firstnan.trace() as block:
        torch.randn(3, 3).masked_fill(mask, -torch.inf).softmax(-1).sum()
        torch.randn(3, 3).masked_fill(mask, -torch.inf)  # on purpose
    assert block.report is None
