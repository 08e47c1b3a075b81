"""The layer watch names the first bad layer, forward and backward, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import architectures as arch
from architectures import ARCHITECTURES, break_backward, break_forward, faithful
from firstnan import NaNDetector
from firstnan.observe.layers import LayerFinding, LayerWatch
from firstnan.tensors import finite


class Collector:
    def __init__(self) -> None:
        self.found: list[LayerFinding] = []
        self.magnitudes: list[tuple[str, str, float, float, float]] = []

    def layer_event(self, found: LayerFinding) -> None:
        self.found.append(found)

    def magnitude(
        self, layer: str, phase: str, dtype: torch.dtype, norm: float, low: float, high: float, *shares: float
    ) -> None:
        self.magnitudes.append((layer, phase, norm, low, high))

    def first(self) -> tuple[str, str, str]:
        assert self.found, "nothing was told"
        return self.found[0].layer, self.found[0].phase, self.found[0].what

    def names(self) -> list[str]:
        return [f.layer for f in self.found]


@contextmanager
def watching(roots: dict[str, nn.Module] | nn.Module, **options: Any) -> Iterator[tuple[LayerWatch, Collector]]:
    sink = Collector()
    watch = LayerWatch({"": roots} if isinstance(roots, nn.Module) else roots, sink, **options)
    watch.attach()
    try:
        yield watch, sink
    finally:
        watch.detach()
    assert watch.error is None


def make(name: str) -> arch.Training:
    torch.manual_seed(0)
    return ARCHITECTURES[name]()


def layers_that_run(name: str) -> list[tuple[str, bool]]:
    """Every layer of an architecture that is called, and whether a gradient goes to what it read."""
    training, ran = make(name), {}
    handles = []
    for prefix, root in training.roots.items():
        for path, module in root.named_modules():
            full = ".".join(filter(None, (prefix, path)))

            def hook(m: nn.Module, args: Any, kwargs: Any, output: Any, full: str = full) -> None:
                first = next((t for _, t in finite.tensors_in((args, kwargs)) if t.is_floating_point()), None)
                ran[full] = ran.get(full, False) or (first is not None and first.requires_grad)

            own = any(True for _ in module.parameters(recurse=False))
            if not list(module.children()) or own or isinstance(module, nn.MultiheadAttention):
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
    training.loss().backward()
    for handle in handles:
        handle.remove()
    return list(ran.items())


PLACES = [(name, *place) for name in ARCHITECTURES for place in layers_that_run(name)]
FORWARD = [(name, layer) for name, layer, _ in PLACES]
BACKWARD = [(name, layer) for name, layer, grad in PLACES if grad]


def usual(places: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those where a layer can fail that the watch believes to know: it may be in the middle of a chain."""
    trainings = {name: make(name) for name in ARCHITECTURES}
    return [(name, layer) for name, layer in places if faithful(trainings[name].layer(layer))]


@pytest.mark.parametrize(
    ("name", "layer", "late"), [(*p, False) for p in FORWARD] + [(*p, True) for p in usual(FORWARD)]
)
def test_first_event_names_the_layer_whose_forward_fails(name: str, layer: str, late: bool) -> None:
    training = make(name)
    broken = training.layer(layer)
    if not late:
        break_forward(broken)
    with watching(training.roots) as (_, sink):
        if late:
            break_forward(broken)
        loss = training.loss()
        assert sink.first() == (layer, "forward", "output")
        assert all(f.in_step for f in sink.found)
        assert sink.found[0].tensor is not None
        assert torch.isnan(sink.found[0].tensor).sum() == 1
        told = len([f for f in sink.found if f.phase == "forward"])
        loss.backward()
    assert [f.phase for f in sink.found[told:]] == ["backward"] * (len(sink.found) - told), "recomputing told again"


def let_it_rest(watch: LayerWatch) -> None:
    """Makes as many steps as it takes until a step only takes notes."""
    for _ in range(17):
        watch.new_step()


@pytest.mark.parametrize(("name", "layer"), FORWARD)
def test_a_step_that_only_took_notes_names_the_layer_when_they_are_read(name: str, layer: str) -> None:
    training = make(name)
    break_forward(training.layer(layer))
    with watching(training.roots, defer_reads=True) as (watch, sink):
        let_it_rest(watch)
        training.loss()
        assert not sink.found or name == "encoder"  # its parts are called one by one, and looked at at once
        watch.read_notes()
        assert sink.first() == (layer, "forward", "output")
        told = len(sink.found)
        watch.read_notes()
        assert len(sink.found) == told, "the same notes were read twice"
        watch.new_step()
        training.loss()
        assert len(sink.found) > told, "not looked at closely after a failure"


def test_notes_keep_few_results_alive_and_none_once_the_loss_is_good() -> None:
    training = make("cnn")
    (model,) = training.roots.values()
    results: list[weakref.ref[Tensor]] = []
    with watching(training.roots, defer_reads=True) as (watch, _):
        let_it_rest(watch)
        handle = model.register_forward_hook(lambda m, a, output: results.append(weakref.ref(output)))
        for _ in range(6):
            training.loss()
        assert sum(ref() is not None for ref in results) == 3
        watch.drop_notes()
        assert all(ref() is None for ref in results)
        handle.remove()


def test_deferred_calls_are_read_when_they_become_too_many() -> None:
    training = make("cnn")
    break_forward(training.layer("0"))
    with watching(training.roots, defer_reads=True) as (watch, sink):
        let_it_rest(watch)
        for _ in range(3):
            training.loss()
        assert sink.found == []
        training.loss()
        assert sink.first() == ("0", "forward", "output")


def test_a_model_that_does_not_train_is_read_at_once() -> None:
    training = make("cnn")
    break_forward(training.layer("0"))
    (model,) = training.roots.values()
    with watching(training.roots, defer_reads=True) as (watch, sink):
        let_it_rest(watch)
        model.eval()
        training.loss()
        assert sink.first() == ("0", "forward", "output")


def test_every_eighth_step_is_read_in_full() -> None:
    training = make("cnn")
    break_forward(training.layer("0"))
    with watching(training.roots, defer_reads=True) as (watch, sink):
        seen = []
        for _ in range(40):
            before = len(sink.found)
            training.loss()
            watch.drop_notes()
            seen.append(len(sink.found) > before)
            watch.new_step()
    assert seen[:16] == [True] * 16
    assert [i for i in range(16, 40) if seen[i]] == [16, 24, 32]


@pytest.mark.parametrize(
    ("name", "layer", "late"), [(*p, False) for p in BACKWARD] + [(*p, True) for p in usual(BACKWARD)]
)
def test_first_event_names_the_layer_whose_backward_fails(name: str, layer: str, late: bool) -> None:
    training = make(name)
    broken = training.layer(layer)
    if not late:
        break_backward(broken)
    with watching(training.roots) as (_, sink):
        if late:
            break_backward(broken)
        loss = training.loss()
        assert sink.found == []
        loss.backward()
        assert sink.first() == (layer, "backward", "input")


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("statistics", [False, True])
def test_a_healthy_step_reports_nothing_and_stays_bit_identical(name: str, statistics: bool) -> None:
    results = []
    for watched in (False, True):
        training = make(name)
        torch.manual_seed(1)
        parameters = [p for root in training.roots.values() for p in root.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        with watching(training.roots if watched else {}, statistics=statistics) as (watch, sink):
            for _ in range(4):
                optimizer.zero_grad()
                training.loss().backward()
                optimizer.step()
                watch.new_step()
        assert sink.found == []
        assert bool(sink.magnitudes) == (watched and statistics)
        results.append([t.clone() for root in training.roots.values() for t in root.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Devices where a read waits.


class CountReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "reads_are_free", lambda t: False)


@pytest.mark.usefixtures("reads_wait")
@pytest.mark.parametrize(
    ("name", "layer", "phase"), [(*p, "forward") for p in FORWARD] + [(*p, "backward") for p in BACKWARD]
)
def test_where_reads_wait_the_same_layer_is_named_after_one_read(name: str, layer: str, phase: str) -> None:
    training = make(name)
    (break_forward if phase == "forward" else break_backward)(training.layer(layer))
    with watching(training.roots) as (watch, sink):
        training.loss().backward()
        assert sink.found == []
        values = watch.collect()
        assert all(v.dim() == 0 for v in values)
        watch.judge(finite.read_all(values))
        assert sink.first() == (layer, phase, "output" if phase == "forward" else "input")
        assert sink.found[0].tensor is None
        assert sink.found[0].shape
        assert watch.collect() == []


@pytest.mark.usefixtures("reads_wait")
@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_where_reads_wait_no_hook_reads(name: str, statistics: bool) -> None:
    counts = []
    for watched in (False, True):
        training = make(name)
        with watching(training.roots if watched else {}, statistics=statistics) as (watch, sink), CountReads() as mode:
            training.loss().backward()
            values = watch.collect()
        counts.append(mode.reads)
    assert counts[0] == counts[1]
    assert values
    assert sink.found == []


@pytest.mark.slow
@pytest.mark.usefixtures("reads_wait")
def test_values_that_wait_keep_no_tensor_alive_and_are_bounded() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with watching(model, statistics=True) as (watch, sink):
        output = model(torch.randn(2, 4))
        gone = weakref.ref(output)
        del output
        gc.collect()
        assert gone() is None
        for _ in range(4000):
            model(torch.randn(1, 4))
        values = watch.collect()
        assert len(values) < 30_000
        watch.judge(finite.read_all(values))
        assert {phase for _, phase, *_ in sink.magnitudes} == {"forward"}
        assert sink.found == []


# Which layers, and what they are called.


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.b = nn.ModuleDict({"inner": self.a})
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.a(x)
        return x * self.scale


def all_findings(model: nn.Module, x: Tensor, **options: Any) -> list[LayerFinding]:
    with watching(model, **options) as (_, sink):
        model(x)
    return sink.found


def test_shared_layers_have_all_their_paths_and_the_number_of_the_call() -> None:
    model, x = Shared(), torch.randn(2, 4)
    with watching(model) as (watch, sink):
        model(x)
        watch.new_step()
        model(x)
        break_forward(model.a[0])
        watch.new_step()
        model(x)
    first, *_ = sink.found
    assert (first.layer, first.paths, first.layer_type, first.call) == ("a.0", ("a.0", "b.inner.0"), "Linear", 0)
    assert [f.call for f in sink.found if f.layer == "a.0"] == [0, 1, 2]
    # It owns a parameter, so it is a layer itself.
    assert sink.found[-1].layer == "Shared"


def test_backward_names_the_call_that_failed() -> None:
    model, x = Shared(), torch.randn(2, 4, requires_grad=True)
    with watching(model) as (_, sink):
        model.a(x).sum()
        model(model.a(x)).sum().backward()
        assert sink.found == []
    break_backward(model.a[0])
    with watching(model) as (_, sink):
        model(x).sum().backward()
    assert (sink.found[0].layer, sink.found[0].call) == ("a.0", 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_a_layer_in_backward_is_not_counted_as_a_call(reentrant: bool) -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for _ in range(3):
                x = checkpoint(self.block, x, use_reentrant=reentrant)
            return x

    model, x = Repeated(), torch.randn(2, 4)
    break_backward(model.block[0])
    with watching(model) as (watch, sink):
        for _ in range(2):
            model(x).sum().backward()
            calls = [f.call for f in sink.found if f.layer == "block.0" and f.what == "input"]
            assert calls == [2, 1, 0]
            sink.found.clear()
            watch.new_step()
        model(x).sum().backward()
        model(torch.full((2, 4), torch.nan))
        assert sink.found[-1].call == 5


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ([], ["0", "1.norm", "1.q", "1.k", "1.v", "1.out", "2.norm", "2.q", "2.k", "2.v", "2.out", "3"]),
        ([nn.LayerNorm, "1.*"], ["0", "2.q", "2.k", "2.v", "2.out", "3"]),
        (["1"], ["0", "2.norm", "2.q", "2.k", "2.v", "2.out", "3"]),
        ([arch.Attention], ["0", "3"]),
        (["?.[qk]", "0"], ["1.norm", "1.v", "1.out", "2.norm", "2.v", "2.out", "3"]),
    ],
)
def test_skip_excludes_types_names_and_globs_with_all_their_children(skip: list[type | str], left: list[str]) -> None:
    model = make("attention").roots[""]
    with watching(model, skip=skip):
        hooked = {
            name
            for name, module in model.named_modules()
            if module._forward_hooks_with_kwargs and not isinstance(module, nn.Sequential | arch.Attention)
        }
    assert hooked == set(left)


def test_trackable_replaces_the_choice() -> None:
    model = make("attention").roots[""]
    break_forward(model[2].k)
    found = all_findings(model, torch.randn(3, 6, 5), trackable=lambda name, module: isinstance(module, arch.Attention))
    assert (found[0].layer, found[0].layer_type, found[0].what) == ("2", "Attention", "output")
    assert {f.layer for f in found} == {"2"}


def test_composites_and_their_parts_together_name_the_part() -> None:
    def everything(name: str, module: nn.Module) -> bool:
        return True

    for where, broken in (("forward", break_forward), ("backward", break_backward)):
        for layer in ("1.norm", "1.k", "1.out", "2.norm", "3"):
            training = make("attention")
            broken(training.layer(layer))
            with watching(training.roots, trackable=everything) as (_, sink):
                training.loss().backward()
            assert sink.found[0].layer == layer, where


def test_a_root_with_a_prefix_and_a_wrapped_model_have_readable_names() -> None:
    inner = nn.Sequential(nn.Linear(4, 4))
    wrapped = nn.Module()
    wrapped.add_module("module", inner)
    break_forward(inner[0])
    with watching({"net": wrapped}) as (_, sink):
        inner(torch.randn(2, 4))
    assert sink.found[0].layer == "net.0"
    alone = nn.Linear(4, 4)
    break_forward(alone)
    assert all_findings(alone, torch.randn(2, 4))[0].layer == "Linear"


# What layers read and make.


def test_containers_and_keywords_are_searched_and_the_place_is_reported() -> None:
    training = make("structured")
    break_forward(training.layer("backbone"))
    with watching(training.roots) as (_, sink):
        training.loss()
    assert [(f.layer, f.what, f.place) for f in sink.found] == [
        ("backbone", "output", ".hidden"),
        ("head", "output", "['logits']"),
    ]
    model = training.roots[""]
    with watching(model) as (_, sink):
        model.head(model.backbone(batch={"x": torch.randn(3, 5)}), scale=torch.tensor([1.0, torch.nan]))
    assert ("head", "input", "scale") in [(f.layer, f.what, f.place) for f in sink.found]


def test_bad_input_comes_before_the_output_that_it_spoils() -> None:
    found = all_findings(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.full((2, 4), -torch.inf))
    assert [(f.layer, f.what) for f in found] == [("0", "input"), ("0", "output"), ("1", "output")]


def test_an_operator_between_layers_is_reported_as_the_next_layers_input() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.sqrt(self.a(x) - 100))

    found = all_findings(Between(), torch.randn(2, 4))
    assert (found[0].layer, found[0].what) == ("b", "input")


def test_masks_of_negative_infinity_are_not_events() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    mask, x = nn.Transformer.generate_square_subsequent_mask(5), torch.randn(2, 5, 8)
    with watching(nn.ModuleList([attention])) as (_, sink):
        attention(x, x, x, attn_mask=mask)[0].sum().backward()
        assert sink.found == []
        attention(x, x, x, attn_mask=torch.full((5, 5), -torch.inf))
    assert [(f.layer, f.what) for f in sink.found][:1] == [("0", "output")]


def test_large_finite_numbers_and_empty_and_integer_tensors_are_fine() -> None:
    class Strange(nn.Module):
        def forward(self, x: Tensor) -> list[Any]:
            half = torch.full((3,), 6e4, dtype=torch.float16)
            return [x * 1e30, x[:0], torch.arange(3), None, half, x.to(torch.complex64), x.bfloat16()]

    with watching(Strange()) as (watch, sink):
        watch._roots[""](torch.ones(4, requires_grad=True))[0].sum().backward()
        assert sink.found == []
    with watching(Strange(), statistics=True) as (watch, sink):
        watch._roots[""](torch.ones(4))
    assert ("Strange", "forward", pytest.approx(2e30), pytest.approx(1e30), pytest.approx(1e30)) in sink.magnitudes


def test_dropout_can_overflow_in_float16_only() -> None:
    x = torch.full((64,), 6e4, dtype=torch.float16)
    assert all_findings(nn.Dropout(0.9), x)[0].what == "output"


# Writes in place.


class Writes(nn.Module):
    def __init__(self, in_place: nn.Module | None = None, then: str = "") -> None:
        super().__init__()
        self.first, self.in_place, self.last = nn.Linear(4, 4), in_place or nn.ReLU(inplace=True), nn.Linear(4, 2)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        y = self.in_place(self.first(x))
        if self.then:
            getattr(y, self.then)()
        return self.last(y)


class SqrtInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(100).sqrt_()


def test_a_layer_before_an_in_place_activation_is_named() -> None:
    model = Writes()
    with torch.no_grad():
        model.first.bias.fill_(torch.nan)
    with watching(model) as (_, sink):
        model(torch.randn(2, 4))
    assert sink.first() == ("first", "forward", "output")


def test_an_in_place_layer_that_fails_is_named() -> None:
    with watching(Writes(SqrtInPlace())) as (watch, sink):
        watch._roots[""](torch.randn(2, 4))
    assert sink.first() == ("in_place", "forward", "output")


def test_an_in_place_layer_whose_backward_fails_is_named() -> None:
    class SqrtOfZero(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(0).sqrt_()

    with watching(Writes(SqrtOfZero())) as (watch, sink):
        watch._roots[""](torch.randn(2, 4)).sum().backward()
    assert sink.first() == ("in_place", "backward", "input")


def test_outputs_and_views_may_be_written_in_place_later() -> None:
    with watching(Writes(nn.Identity(), then="relu_")) as (watch, sink):
        model = watch._roots[""]
        part = model(torch.randn(2, 4))[:1]
        part.mul_(2)
        part.sum().backward()
        assert sink.found == []
        assert model.first.weight.grad is not None


# Backward.


def test_a_bad_gradient_from_the_loss_is_reported_at_the_last_output() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with watching(model) as (_, sink):
        (model(torch.randn(3, 4)) * 0).sqrt().sum().backward()
    assert sink.first() == ("2", "backward", "output")


def test_an_operator_between_layers_whose_backward_fails_is_reported_at_the_output_before_it() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.gate, self.b = nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b((y * 0).sqrt() * self.gate(y))

    with watching(Between()) as (watch, sink):
        watch._roots[""](torch.randn(2, 4)).sum().backward()
    # The gate reads the same tensor, but a sigmoid cannot do that.
    assert sink.first() == ("a", "backward", "output")


def test_a_gradient_that_overflows_in_the_middle_of_a_chain_of_layers_is_found() -> None:
    scales = [1.0, 1e-30, 1e30, 1.0, 1.0]
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in scales))
    with torch.no_grad():
        for layer, scale in zip(model, scales, strict=True):
            layer.weight.copy_(torch.eye(4) * scale)
    with watching(model) as (_, sink):
        (model(torch.randn(3, 4)).sum() * 1e10).backward()
    assert sink.first() == ("2", "backward", "input")


def test_a_leaf_that_requires_a_gradient_is_checked_and_left_clean() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(3, 4, requires_grad=True)
    break_backward(model[0])
    with watching(model) as (watch, sink):
        for _ in range(3):
            sink.found.clear()
            model(x).sum().backward()
            assert sink.first() == ("0", "backward", "input")
            assert not x._backward_hooks
        model(x)
        assert len(x._backward_hooks or ()) == 1
        watch.new_step()
        assert not x._backward_hooks
        model(x)
    assert not x._backward_hooks


def test_double_backward_and_retained_graphs_work() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(3, 4, requires_grad=True)
    with watching(model) as (_, sink):
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.norm() - 1).square().backward(retain_graph=True)
        (slope.norm() - 1).square().backward()
    assert sink.found == []


def test_generator_output_kept_over_two_optimizer_steps_names_the_discriminator() -> None:
    roots = make("gan").roots
    generator, discriminator = roots["generator"], roots["discriminator"]
    with watching(roots) as (watch, sink):
        fake = generator(torch.randn(5, 4))
        discriminator(fake.detach()).sum().backward()
        watch.new_step()
        break_backward(discriminator[0])
        discriminator(fake).sum().backward()
    assert sink.first() == ("discriminator.0", "backward", "input")


# Statistics.


def test_statistics_are_those_of_outputs_and_of_their_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(5, 4)
    with watching(model, statistics=True) as (_, sink):
        kept = model[0](x)
        kept.retain_grad()
        sink.magnitudes.clear()
        output = model[2](model[1](kept))
        output.sum().backward()
    assert [(layer, phase) for layer, phase, *_ in sink.magnitudes] == [
        *[("1", "forward"), ("2", "forward"), ("2", "backward"), ("1", "backward"), ("0", "backward")],
    ]
    by_name = {(layer, phase): numbers for layer, phase, *numbers in sink.magnitudes}
    for key, t in ((("2", "forward"), output), (("0", "backward"), kept.grad)):
        expected = [t.norm().item(), t.min().item(), t.max().item()]
        assert by_name[key] == pytest.approx(expected)


# Steps, threads, inference.


def test_inference_is_not_part_of_the_step() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.full((2, 4), torch.nan)
    with watching(model) as (_, sink):
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(torch.full((2, 4), torch.nan))
        assert sink.found
        assert not any(f.in_step for f in sink.found)
        told = len(sink.found)
        model(torch.full((2, 4), torch.nan))
        assert all(f.in_step for f in sink.found[told:])
        assert len(sink.found) > told


def test_a_part_without_gradients_belongs_to_the_step_of_the_whole() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.teacher(x)
            return self.head(x)

    model = Frozen()
    break_forward(model.teacher)
    assert all_findings(model, torch.randn(2, 4))[0].in_step


def test_other_threads_count_for_themselves_and_only_the_training_thread_is_in_the_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with watching(model) as (watch, sink):
        watch.train_in(threading.get_ident())
        barrier, trained = threading.Barrier(4), threading.Event()

        def work(bad: bool) -> None:
            barrier.wait()
            for i in range(30):
                if bad and i == 29:
                    trained.wait()  # during a call of the training thread it would belong to the step
                model(torch.full((2, 4), torch.nan if bad and i == 29 else 1.0)).sum().backward()

        threads = [threading.Thread(target=work, args=(i == 0,), name=f"server-{i}") for i in range(3)]
        for thread in threads:
            thread.start()
        work(False)
        trained.set()
        for thread in threads:
            thread.join()
        assert {f.thread for f in sink.found} == {"server-0"}
        assert not any(f.in_step for f in sink.found)
        assert {f.call for f in sink.found} == {29}
        model(torch.full((2, 4), torch.nan))
        assert sink.found[-1].in_step
        assert sink.found[-1].thread == threading.current_thread().name


# In nobody's way.


def state(model: nn.Module) -> list[dict[str, Any]]:
    """All attributes of all modules, hook tables by what is in them."""
    return [{k: dict(v) if isinstance(v, dict) else v for k, v in vars(m).items()} for m in model.modules()]


def test_detach_leaves_every_module_as_it_was() -> None:
    model = make("cnn").roots[""]
    mine = model[0].register_forward_hook(lambda *_: None)
    before = state(model)
    watch = LayerWatch({"": model}, Collector())
    for _ in range(2):
        watch.attach()
        watch.attach()
        assert len(model[0]._forward_hooks) == 2
        model(torch.randn(2, 3, 8, 8))
        watch.detach()
        watch.detach()
        assert state(model) == before
    mine.remove()


def test_detach_takes_effect_in_a_graph_that_is_under_way() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    break_backward(model[1])
    with watching(model) as (watch, sink):
        loss = model(torch.randn(2, 4)).sum()
        watch.detach()
        loss.backward()
        assert sink.found == []


def test_attach_and_detach_while_other_threads_run_the_model() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    before = state(model)
    sink, stop, errors = Collector(), threading.Event(), []
    watch = LayerWatch({"": model}, sink)

    def work() -> None:
        try:
            while not stop.is_set():
                model(torch.randn(2, 4)).sum().backward()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        watch.attach()
        watch.new_step()
        watch.detach()
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert watch.error is None
    assert sink.found == []
    assert state(model) == before


def test_copies_of_a_watched_model_are_not_watched() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    bad = torch.full((2, 4), torch.nan)
    with watching(model) as (_, sink):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert b"firstnan" not in pickle.dumps(model)
        for other in copies:
            assert torch.isnan(other(bad)).all()
        assert sink.found == []
        output = model(bad)
        assert sink.found
        pickle.dumps(output.detach())
        assert output._backward_hooks is None
    for other in copies:
        other(bad)


def test_replicas_are_watched_like_the_original() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with watching(model) as (_, sink):
        replica = model[0]._replicate_for_data_parallel()
        replica.weight, replica.bias = model[0].weight, model[0].bias
        replica(torch.full((2, 4), torch.nan))
    assert sink.names()[:1] == ["0"]


def test_an_internal_error_is_kept_and_never_reaches_the_program() -> None:
    class Broken(Collector):
        def layer_event(self, found: LayerFinding) -> None:
            raise RuntimeError("the sink is broken")

    model = nn.Sequential(nn.Linear(4, 2))
    watch = LayerWatch({"": model}, Broken())
    watch.attach()
    (model(torch.full((2, 4), torch.nan)).sum() * torch.nan).backward()
    watch.detach()
    assert str(watch.error) == "the sink is broken"


def test_an_interrupted_call_does_not_disturb_the_next_step() -> None:
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.stop = nn.Linear(4, 4), True

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            if self.stop:
                raise KeyboardInterrupt
            return x

    model = Interrupted()
    with watching(model) as (watch, sink):
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(2, 4))
        watch.new_step()
        model.stop = False
        model(torch.full((2, 4), torch.nan))
        assert sink.first() == ("a", "forward", "input")


def test_nothing_is_read_while_paused() -> None:
    model, bad = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.full((2, 4), torch.nan)
    with watching(model) as (watch, sink):
        paused = True
        watch.pause_while(lambda: paused)
        with CountReads() as mode:
            model(bad).sum().backward()
            model[0](bad).sum().backward()
        assert (mode.reads, sink.found) == (0, [])
        paused = False
        model(bad)
        assert sink.first() == ("0", "forward", "input")


def test_an_exception_of_the_model_passes_and_earlier_findings_are_reported() -> None:
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if not torch.isfinite(self.a(x)).all():
                raise ArithmeticError("my own check")
            return x

    model = Raises()
    break_forward(model.a)
    with watching(model) as (_, sink), pytest.raises(ArithmeticError, match="my own check"):
        model(torch.randn(2, 4))
    assert sink.first() == ("a", "forward", "output")


def test_a_compiled_model_runs_and_is_watched_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with watching(compiled) as (_, sink):
        compiled(torch.randn(2, 4)).sum().backward()
        assert sink.found == []
        compiled(torch.full((2, 4), torch.nan)).sum().backward()
    assert (sink.found[0].layer, sink.found[0].layer_type) == ("Sequential", "Sequential")
    torch._dynamo.reset()


def test_functional_transforms_and_tracing_are_left_alone() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 4)
    parameters = dict(model.named_parameters())
    with watching(model):
        torch.func.vmap(lambda row: model(row))(x)
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(parameters)
        torch.jit.trace(model, x)


def test_memory_is_given_back_with_the_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    with watching(model) as (watch, _):
        output = model(torch.randn(3, 4))
        gone = [weakref.ref(output)]
        output.sum().backward()
        del output
        assert gone[0]() is None
        with torch.no_grad():
            output = model(torch.randn(3, 4))
        gone.append(weakref.ref(output))
        del output
        assert gone[1]() is None
        for _ in range(3000):
            model(torch.randn(1, 4)).sum().backward()
        assert len(watch._thread._seen) <= 4096


class Table(nn.Module):
    """Reads a tensor of the graph and returns one without, as rotary embeddings do."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones(4) * x.shape[0]


def test_an_output_without_a_graph_is_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    first, table, last = nn.Linear(4, 4), Table(), nn.Linear(4, 1)
    model = nn.ModuleList([first, table, last])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, optimizer, layers=True):
        for _ in range(2):
            x = first(torch.randn(2, 4))
            optimizer.zero_grad()
            (last(x) * table(x).sum()).mean().backward()
            optimizer.step()
    assert "internal error" not in caplog.text
