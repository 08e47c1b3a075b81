"""Forecasts: when a rise reaches its limit, and when there is none; the history behind them, and what they cost."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firstnan import NaNDetector
from firstnan.engine.sampling import StepSamples
from firstnan.gate.forecast import LARGEST, Course, GrowingWeights, Outlook, Rise, RisingRate, SinkingScale, reach
from firstnan.gate.gate import Gate
from firstnan.gate.growth_guard import GrowthGuard, Limits
from firstnan.gate.histories import Track
from firstnan.gate.layer_histories import LayerHistories
from firstnan.observe.sites import Ownership
from firstnan.records import Forecast, NaNEvent
from firstnan.records.forecast_words import sentence
from firstnan.tensors.finite import surely_finite
from firstnan.tracing.headroom import _NEAR_ONE_HOT, _ONE_HOT
from zygote import Zygote

pytest_plugins = ["zygote"]

HALF = LARGEST["float16"]


# --- when a rise reaches its limit --------------------------------------------------------------------------------


def test_a_straight_line_of_logarithms_is_continued() -> None:
    points = [(t, 2 ** (t / 10)) for t in range(0, 100, 4)]
    found = reach(points, HALF)
    assert found is not None
    assert found.steps == pytest.approx(10 * math.log2(HALF) - 96, rel=0.02)
    assert found.low <= found.steps <= found.high


def test_noise_widens_the_forecast() -> None:
    rng = random.Random(0)
    points = [(t, 2 ** (t / 10 + rng.gauss(0, 0.5))) for t in range(100)]
    found = reach(points, HALF)
    assert found is not None
    assert found.low < 61 < found.high
    assert found.high > 1.1 * found.low


def test_what_grows_by_the_same_amount_is_a_straight_line_too() -> None:
    found = reach([(t, 100.0 + 50 * t) for t in range(0, 1000, 8)], HALF)
    assert found is not None
    assert found.steps == pytest.approx((HALF - 100) / 50 - 992, rel=0.05)


def test_what_gets_steeper_gets_there_sooner() -> None:
    points = [(t, 2 ** (1.1**t)) for t in range(1, 30)]
    found = reach(points, 2.0**128)
    straight = (128 - math.log2(points[-1][1])) / (math.log2(points[-1][1]) / 29)
    assert found is not None
    assert found.steps < straight / 2


@pytest.mark.parametrize(
    "value",
    [
        lambda t: 100.0,
        lambda t: 1000 * (1 - math.exp(-t / 10)) + 1,
        lambda t: 2.0 ** -(t / 10) * 1e4,
        lambda t: 100 + 90 * math.sin(t / 5),
        lambda t: math.exp(random.Random(t).gauss(0, 1)),
    ],
    ids=["flat", "saturates", "falls", "waves", "noise"],
)
def test_no_forecast_of_what_does_not_rise_steadily(value: Any) -> None:
    assert reach([(t, value(t)) for t in range(100)], HALF) is None


def test_a_forecast_is_made_once_and_withdrawn_when_it_turns() -> None:
    outlook, made, void = Outlook(), [], []
    for t in range(200):
        value = 2 ** (t / 8) if t < 100 else 2 ** (100 / 8 - (t - 100))
        if (turned := outlook.turned(t, value)) is not None:
            void.append(turned)
        if t >= 20 and (
            news := outlook.make("layer", lambda: "fc", "float16", HALF, [(s, 2 ** (s / 8)) for s in range(t)])
        ):
            made.append(news)
        if t == 110:
            break
    assert len(made) == 1
    assert [f.withdrawn for f in void] == [105]
    assert void[0].since_step == made[0].since_step


def test_a_loss_that_doubles_again_and_again() -> None:
    rise, news = Rise("loss"), []
    for t in range(60):
        news += rise.add(t, 4.0**t, 2.0, "float32", LARGEST["float32"])
    assert [f.what for f in news] == ["loss"]
    assert news[0].since_step + news[0].low <= 64 <= news[0].since_step + news[0].high + 1


def test_a_loss_in_float16_ends_where_float16_does() -> None:
    weight, events = nn.Parameter(torch.ones(4)), list[NaNEvent]()
    optimizer = torch.optim.SGD([weight], lr=1e-9)
    model = nn.Module()
    model.weight = weight
    with NaNDetector(model, optimizer, on_event=events.append):
        for t in range(110):
            optimizer.zero_grad()
            (weight.half() * 1.1**t).mean().backward()
            optimizer.step()
    assert [e.message for e in events if "the loss reaches the limit of float16" in e.message]
    assert not [e.message for e in events if "the loss reaches the limit of float32" in e.message]


def test_a_loss_that_begins_near_zero_has_no_scale_to_grow_from() -> None:
    guard, made = GrowthGuard(), list[Forecast]()
    for t in range(400):  # a critic that gets better and better
        loss = -0.05 * 2 ** min(1.025**t - 1, 9.0)
        guard.observe(t, 1.0, loss)
        made += guard.foresee(t, 1.0, loss, Limits("float32", LARGEST["float32"], 1e19), None, ())
    assert made == []


@pytest.mark.parametrize("gradients_grow", [True, False])
def test_a_loss_that_grows_alone_is_scaled_and_does_not_overflow(gradients_grow: bool) -> None:
    guard, made = GrowthGuard(), list[Forecast]()
    for t in range(40):  # its weight is raised again and again, and the gradients are clipped
        loss = 2.0**t
        norm = loss if gradients_grow else 1.0
        guard.observe(t, norm, loss)
        made += guard.foresee(t, norm, loss, Limits("float32", LARGEST["float32"], 1e38), None, ())
    assert ("loss" in [f.what for f in made]) is gradients_grow


def test_losses_with_heavy_tails_do_not_get_steeper() -> None:
    losses = {280: 4.5, 281: 1980.0, 283: 5.8, 285: 7.9, 287: 18.6, 288: 28.1, 291: 5.6, 292: 36600.0}
    assert reach(list(losses.items()), LARGEST["float32"], 3.0, steepens=True) is None
    ramp = [(10, 3.9), *((t, 100.0 * (1 + t % 3) * (t / 200) ** 2) for t in range(100, 400, 12))]
    assert reach(ramp, LARGEST["float32"], 3.0, steepens=True) is None


def test_a_hard_batch_is_no_rise() -> None:
    rise = Rise("loss")
    values = [1e6 if t % 50 == 49 else 1.0 for t in range(400)]
    assert [f for t, v in enumerate(values) for f in rise.add(t, v, 2.0, "float32", LARGEST["float32"])] == []


def test_a_scale_that_sinks() -> None:
    scale = SinkingScale()
    told = [f for t in range(14) if (f := scale.skipped(t, 65536 / 2**t)) is not None]
    assert [(f.now, f.in_steps, f.since_step) for f in told] == [(32.0, 6, 11)]
    assert scale.turned(20) is None
    void = scale.turned(200)
    assert void is not None
    assert void.withdrawn == 200


def test_a_scale_that_is_searched_and_found_is_fine() -> None:
    scale = SinkingScale()
    assert all(scale.skipped(t, 65536 / 2**t) is None for t in range(10))
    assert all(scale.skipped(1000 + 500 * t, 128 if t % 2 else 64) is None for t in range(20))


def grown(sizes: list[float], *, large: bool = False, learns: bool = False) -> list[Forecast]:
    weights, told = GrowingWeights(), list[Forecast]()
    for step, size in enumerate(sizes):
        news = weights.add(step, size, large, learns, lambda size=size: size / sizes[0])  # type: ignore[misc]
        told += [news] if news is not None else []
        weights.before = size
    return told


def test_weights_that_grow_while_the_loss_does_not_fall() -> None:
    sizes = [1 + t / 5 for t in range(100)]
    (told,) = grown(sizes)
    assert (told.kind, told.since_step, told.in_steps) == ("growth", 46, None)
    assert sentence(told) == (
        "the norm of the weights is 10.2 times its initial value, and the loss has not improved: "
        "training is likely to diverge"
    )
    assert grown(sizes, learns=True) == []
    assert grown([1 + t / 20 for t in range(100)]) == []


def test_one_update_that_makes_the_weights_much_larger() -> None:
    sizes = [1.0] * 30 + [13.0] * 1000
    made, void = grown(sizes, large=True, learns=True)
    assert (made.kind, made.since_step, void.withdrawn) == ("jump", 30, 543)
    assert grown(sizes, learns=True) == []  # new weights were loaded: no gradient was large


def updates(rate: float, *, momentum: float = 0.0, steps: int = 40) -> list[NaNEvent]:
    """The forecasts of a linear regression."""
    torch.manual_seed(0)
    model, seen = nn.Linear(4, 1), list[NaNEvent]()
    x = torch.randn(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    with NaNDetector(model, optimizer, on_nonfinite="warn", on_event=seen.append):
        for _ in range(steps):
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    return [e for e in seen if e.kind == "forecast"]


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_updates_as_large_as_the_weights(momentum: float) -> None:
    first = updates(1.5, momentum=momentum)[0]
    assert first.step is not None
    assert first.step <= 10
    assert "the last updates together are" in first.message
    assert updates(0.5, momentum=momentum) == []  # large in the first steps, and the loss profits from them


def rates(loss: Any, rate: Any, steps: int = 400) -> list[Forecast]:
    """The forecasts of a loss that depends on the step, at a rate that does."""
    rising, told, numbers = RisingRate(), list[Forecast](), list[Any]()
    for t in range(steps):
        if numbers and t % 4 == 0:
            told += rising.add(t, rate(t), numbers[-100:])
        numbers.append((t, loss(t), 1 + loss(t), rate(t), None))
    return told


def test_a_loss_that_rises_with_the_rate() -> None:
    def loss(t: int) -> float:
        return max(3.0 * 0.97**t, 0.2) if t < 200 else 0.2 * 1.02 ** (t - 200)

    (told,) = rates(loss, lambda t: 0.01 * 1.02**t, 320)
    assert (told.what, told.kind, told.in_steps) == ("loss", "rate", None)
    assert 250 < told.since_step < 290
    assert sentence(told).startswith("the loss has risen from 0.2 to 0.")
    assert rates(loss, lambda t: 0.01) == []
    assert rates(loss, lambda t: 0.02 * 0.99**t) == []
    assert rates(lambda t: max(3.0 * 0.97**t, 0.2) * (4 if t % 50 > 45 else 1), lambda t: 0.01 * 1.02**t) == []


def test_a_loss_that_falls_again_at_a_higher_rate() -> None:
    def loss(t: int) -> float:
        return 0.1 if t < 100 else 1.0 if t < 200 else 0.1

    made, void = rates(lambda t: 3.0 if t < 20 else loss(t), lambda t: 0.01 * 1.02 ** min(t, 250))
    assert void == replace(made, withdrawn=void.withdrawn)
    assert void.withdrawn is not None
    assert 200 < void.withdrawn < 230


def losses(rate: float, sign: float) -> list[NaNEvent]:
    """The forecasts of a model whose weights grow steadily, with a loss that rises or falls."""
    torch.manual_seed(0)
    model, seen = nn.Linear(4, 1, bias=False), list[NaNEvent]()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    with NaNDetector(model, optimizer, on_nonfinite="warn", on_event=seen.append):
        for _ in range(200):
            optimizer.zero_grad()
            loss = -model(torch.ones(2, 4)).mean()
            (loss if sign < 0 else loss - 2 * loss.detach()).backward()
            optimizer.step()
    return [e for e in seen if e.kind == "forecast"]


def test_a_loss_that_falls_below_zero_profits_from_larger_weights() -> None:
    assert losses(0.1, -1) == []
    assert [e.what for e in losses(0.1, 1)] == ["parameter"]


def test_the_sentence() -> None:
    forecast = Forecast("layer", "decoder.ffn.2", "float16", HALF, 1234.0, 40, 25, 70, 100)
    assert sentence(forecast) == (
        "decoder.ffn.2 reaches the limit of float16 in about 40 steps (25 to 70): it is 1.23e+03 and keeps growing"
    )


# --- history ------------------------------------------------------------------------------------------------------


def test_a_long_history_has_all_steps_within_bounds() -> None:
    track, steps = Track(), 100_000
    for t in range(steps):
        track.add((t, float(t), None if t % 64 else 2.0, 0.1, None if t % 64 else 5.0))
    last, earlier = track.last(), track.earlier()
    assert [r.step for r in last] == list(range(steps - 64, steps))
    assert len(earlier) < 700
    at = 0
    for span in earlier:
        assert span.step == at
        assert span.loss == pytest.approx(at + (span.steps - 1) / 2)
        assert span.loss_max == at + span.steps - 1
        at += span.steps
    assert at == steps - 64


def test_layers_take_a_few_megabytes_in_a_long_run() -> None:
    told: list[Forecast] = []
    layers = LayerHistories(told.append)
    for t in range(20_000):
        layers.add(t, "fc", "float32", 1.0, 1.0 + t % 3, (0.1, 0.0) if t % 64 == 0 else ())
    series = layers.series["fc"]
    assert sum(a.itemsize * len(a) for a in (series.recent, series.shares, *series._levels)) < 9_000
    spans = series.earlier()
    assert spans[0].step == 0
    assert sum(s.steps for s in spans) + len(series.points()) == 20_000
    assert all(s.max_abs == 3.0 for s in spans)
    assert told == []


def test_only_the_first_layer_of_many_that_grow_is_told() -> None:
    told: list[Forecast] = []
    layers = LayerHistories(told.append)
    for t in range(0, 200, 2):
        for i in range(4):
            layers.add(t, f"fc{i}", "float16", 1.0, 2 ** (t / 14), ())
    assert [f.name for f in told] == ["fc0"]
    assert told[0].since_step + told[0].low <= 224 <= told[0].since_step + told[0].high + 2


def test_a_layer_and_the_operator_in_it_are_told_once() -> None:
    gate: Any = SimpleNamespace(news=[], forecasts=[])
    layer = Forecast("layer", "fc", "float16", 65504.0, 9e3, 40, 30, 50, 12)
    operator, loss = replace(layer, what="operator", name="addmm at a.py:3"), replace(layer, what="loss", name="")
    for one in (layer, operator, loss, replace(operator, withdrawn=20), replace(layer, withdrawn=21), operator):
        Gate.foresees(gate, one)
    assert gate.news == [layer, loss, replace(layer, withdrawn=21), operator]
    assert gate.forecasts == [replace(layer, withdrawn=21), loss, operator]


def test_a_layer_that_runs_in_two_types_is_followed_in_the_narrower_one() -> None:
    told: list[Forecast] = []
    layers = LayerHistories(told.append)
    for t in range(0, 200, 2):
        layers.add(t, "fc", "float32", 1.0, 1.0, ())
        layers.add(t, "fc", "float16", 1.0, 2 ** (t / 14), ())
        layers.add(t, "fc", "float32", 1.0, 1.0, ())
    assert [(f.name, f.kind) for f in told] == [("fc", "float16")]


def test_a_layer_that_runs_twice_in_a_step_is_judged_by_the_larger_output() -> None:
    told: list[Forecast] = []
    layers = LayerHistories(told.append)
    for t in range(0, 220, 2):
        layers.add(t, "fc", "float16", 1.0, 1.0, ())
        layers.add(t, "fc", "float16", 1.0, 2 ** (t / 14), ())
    assert [(f.name, f.withdrawn) for f in told] == [("fc", None)]
    for t in range(220, 240, 2):
        layers.add(t, "fc", "float16", 1.0, 1.0, ())
    assert told[-1].withdrawn is not None


def test_a_denominator_that_falls_ever_faster() -> None:
    x = torch.ones(4, requires_grad=True)
    (told,) = told_by_samples(lambda t: 1 / (x * math.exp(-((1.01**t) - 1) / 20)), 900, every=16)
    assert told.since_step + 5 <= 751 <= told.since_step + (told.high or 0) + 60


def test_a_layer_that_has_changed_its_type_is_followed_in_the_new_one() -> None:
    layers = LayerHistories(lambda forecast: None)
    for t in range(600):
        layers.add(t, "fc", "float16" if t < 100 else "float32", 1.0, 1.0, ())
    assert layers.series["fc"].dtype == "float32"


def forecast_steps(what: Any, limit: float, near: float, values: dict[int, float]) -> list[int]:
    """The steps of the forecasts that these samples make, numbers that sink to 1 / limit."""
    course = Course()
    news = [(t, course.add(what, "min", str, t, 1 / v, limit, near=near)) for t, v in values.items()]
    return [t for t, forecast in news if forecast is not None]


def test_a_fall_that_began_slowly_is_judged_by_its_last_samples() -> None:
    slow = {1: 0.49, 3: 0.48, 5: 0.45, 8: 0.41, 10: 0.39, 19: 0.24, 23: 0.2, 28: 0.13, 34: 0.045, 41: 0.014}
    assert forecast_steps("operator", 2.0**126, 2.0**25, slow | {86: 4.3e-13, 109: 1.2e-22}) == [109]
    assert forecast_steps("operator", 2.0**126, 2.0**25, slow | {86: 1e-8, 109: 1e-8, 131: 5e-9}) == []


def test_attention_that_collapses_between_two_samples() -> None:
    falls = {3: 0.96, 5: 0.95, 7: 0.93, 9: 0.89, 11: 0.84, 14: 0.71, 17: 0.6, 21: 0.37, 26: 0.28, 32: 0.0026}
    assert forecast_steps("attention", _ONE_HOT, _NEAR_ONE_HOT, falls | {39: 1.7e-9}) == [39]
    sharp = {60: 0.5, 72: 0.3, 87: 0.1, 92: 0.06, 97: 0.04, 103: 0.02, 111: 0.014, 120: 0.01, 200: 0.006, 300: 0.005}
    assert forecast_steps("attention", _ONE_HOT, _NEAR_ONE_HOT, falls | {32: 0.2, 40: 0.15} | sharp) == []


def test_a_place_is_named_only_in_a_forecast() -> None:
    course, asked = Course(), list[str]()

    def add(step: int, value: float) -> Forecast | None:
        return course.add("operator", "max", lambda: asked.append("exp") or "exp", step, value, 1e6, near=10.0)

    for t in range(20):
        assert add(t, 100 + t % 5) is None
    assert asked == []
    while add(t := t + 1, 2.0 ** (t - 13)) is None:
        assert asked == []
    assert asked == ["exp"]


def test_a_great_step_towards_a_limit_is_followed_closely() -> None:
    course = Course()
    for step, (value, followed) in enumerate([(1.0, False), (2.0, False), (1e3, True), (1e3, False)]):
        course.add("operator", "min", str, step, value, 1e38, near=1e10)
        assert course.nearer == followed


# --- real trainings -----------------------------------------------------------------------------------------------


def test_a_forecast_comes_long_before_the_failure_and_is_in_the_report() -> None:
    torch.manual_seed(0)
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.2)
    seen: list[NaNEvent] = []
    x = torch.randn(256, 10)
    with NaNDetector(model, optimizer, on_nonfinite="warn", layers=True, on_event=seen.append) as detector:
        for _ in range(80):
            rows = torch.randint(0, 256, (32,))
            loss = (model(x[rows]) - x[rows].sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if detector.report is not None:
                break
    report = detector.report
    assert report is not None
    assert report.step is not None
    weights, first = report.forecast[:2]
    assert (weights.what, weights.in_steps, first.what) == ("weights", None, "loss")
    assert first.low is not None
    assert first.high is not None
    assert first.since_step + 5 < report.step
    low, high = first.since_step + 0.9 * first.low, first.since_step + 1.1 * first.high
    assert low <= report.step <= high
    assert [e.kind for e in seen if e.kind == "forecast"][:1] == ["forecast"]
    assert report.history.layers[0].layer == "Linear"
    assert report.history.layers[0].dtype == "float32"


def test_a_report_has_all_layers_the_grown_ones_first() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, optimizer, on_nonfinite="warn", layers=True) as detector:
        for step in range(12):
            with torch.no_grad():
                model[9].weight.mul_(3.0)
            loss = model(torch.ones(2, 4)).mean() * (math.nan if step == 11 else 1e-6)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    report = detector.report
    assert report is not None
    layers = [track.layer for track in report.history.layers]
    assert layers[0] == "9"
    assert {str(i) for i in range(10)} <= set(layers)


def test_nothing_changes_and_nothing_is_told_while_training_is_healthy() -> None:
    def learned(watched: bool) -> tuple[list[Any], list[NaNEvent]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        detector = NaNDetector(model, optimizer, layers=True) if watched else None
        if detector is not None:
            detector._samples.due = 3  # the first sample early
            detector.attach()
        for _ in range(40):
            x = torch.randn(16, 6)
            loss = (model(x).exp() - x[:, :1]).square().mean().sqrt()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        events: list[NaNEvent] = []
        if detector is not None:
            detector.detach()
            events = list(detector.events)
        return [p.detach() for p in model.parameters()] + [torch.get_rng_state()], events

    (bare, _), (watched, events) = learned(False), learned(True)
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))
    assert events == []


# --- head-room ----------------------------------------------------------------------------------------------------


def sampled(forward: Any) -> list[tuple[str, str, float]]:
    """Operator, argument and value of what one forward pass was sampled to read."""
    samples = StepSamples(Ownership((str(Path(__file__).parent),)))
    samples._operators.start()
    try:
        forward()
    finally:
        samples.stop(7)
    found = samples.nearest()
    assert all(h.file == __file__ and h.step == 7 for h in found)
    return [(h.op, h.argument, h.value) for h in found]


def test_the_arguments_of_risky_operators() -> None:
    x = torch.tensor([0.5, 2.0, 30.0], requires_grad=True)
    found = sampled(lambda: (x.log() + x.exp() + 1 / (x - 0.49) + x.sqrt() + x / torch.tensor([3.0, -1e-6, 1.0])).sum())
    assert {(op, ends): pytest.approx(value, rel=1e-3) for op, ends, value in found} == {
        ("log", "min"): 0.5,
        ("exp", "max"): 30.0,
        ("reciprocal", "min"): 0.01,
        ("sqrt", "min"): 0.5,
        ("div", "min"): 1e-6,
    }
    assert [op for op, *_ in found][:2] == ["exp", "div"]  # 85 doublings to the end of float32, then 106


def test_products_in_float16_are_measured_against_its_end() -> None:
    a = torch.full((4, 4), 100.0, dtype=torch.float16)
    assert sampled(lambda: a @ a) == [("mm", "max", 40000.0)]


def test_a_cast_to_float16_is_measured_but_not_that_of_a_weight() -> None:
    x = torch.full((4,), 5000.0, requires_grad=True)
    assert sampled(lambda: (x.half(), (x + 0).half().half())) == [("cast", "max", 5000.0)]


def test_powers_that_are_roots_or_divide() -> None:
    x = torch.tensor([-0.01, 2.0], requires_grad=True)
    found = sampled(lambda: (x**2, x**1.5, (x + 1) ** 0.3, x**-2))
    assert {(op, ends): pytest.approx(value, rel=1e-3) for op, ends, value in found} == {
        ("pow", "min"): 0.99,
        ("reciprocal", "min"): 0.01,
    }


def test_without_gradients_nothing_is_sampled() -> None:
    with torch.no_grad():
        assert sampled(lambda: torch.ones(3).log()) == []


def test_samples_are_rare_and_within_their_share_of_the_time() -> None:
    samples = StepSamples(Ownership())
    samples.step_ended(1)
    assert samples.due == 2
    samples._cost = 1e9  # one sample that took far too long
    samples.step_ended(257)
    assert not samples.active
    assert samples.due > 1_000_000
    samples._cost = 0.4
    samples.step_ended(1999)
    assert not samples.active
    samples._operators.approaching = True
    samples.step_ended(1999)
    assert samples.active  # what comes near its limit may cost more
    samples.stop(0)
    samples._operators.approaching, samples._calls_modules = False, True
    samples._cost = 0.09  # little, however short the steps were so far
    samples.step_ended(2000)
    assert samples.active
    assert samples.due == 2001  # this pass is timed, the next one is sampled
    model = nn.Linear(2, 2)
    model(torch.ones(2))
    samples.stop(0)
    assert not samples.active
    samples.step_ended(2001)
    assert samples.due == 2001 + 2000 // 5
    samples._samples = 100  # each of them was cheap
    samples.stop(1)
    samples.step_ended(2001)
    assert samples.due == 2001 + 2000 // 10
    model(torch.ones(2).exp())
    assert samples.active
    samples.stop(1)
    assert not samples.active


def test_a_program_without_modules_is_sampled_too() -> None:
    samples = StepSamples(Ownership((str(Path(__file__).parent),)))
    weight = torch.ones(2, requires_grad=True)
    for step in range(1, 600):
        if step >= samples.due:
            samples.step_ended(step)
        weight.exp()
        if samples.active:
            samples.stop(step)
    assert [h.op for h in samples.nearest()] == ["exp"]


def told_by_samples(forward: Any, steps: int, *, model: nn.Module | None = None, every: int = 64) -> list[Forecast]:
    """What is foreseen of the sampled steps."""
    samples, told = StepSamples(Ownership((str(Path(__file__).parent),))), list[Forecast]()
    parts = {id(m): (m, name) for name, m in model.named_modules()} if model is not None else {}
    samples.tell_forecasts(told.append, lambda: parts, outputs=True)
    for step in range(0, steps, every):
        samples._plain = 1.0
        samples._begin()
        forward(step)
        samples.stop(step)
    return told


def test_an_exponent_that_keeps_growing() -> None:
    x = torch.ones(4, requires_grad=True)
    (told,) = told_by_samples(lambda t: (x * t / 40).exp(), 2500)
    assert (told.what, told.kind) == ("operator", "max")
    assert told.in_steps is not None
    assert told.since_step + told.in_steps == pytest.approx(88.72 * 40, rel=0.1)
    assert sentence(told).startswith("the argument of exp at test_forecast.py:")


def test_an_exponent_that_is_steepest_in_its_first_steps() -> None:
    x = torch.ones(4, requires_grad=True)
    (told,) = told_by_samples(lambda t: (x * (30 * (1 - math.exp(-t / 100)) + t / 50)).exp(), 2500)
    assert told.since_step + 5 <= 2936 <= told.since_step + (told.high or 0) + 100


def test_an_exponent_that_settles() -> None:
    x = torch.ones(4, requires_grad=True)
    assert told_by_samples(lambda t: (x * 60 * (1 - math.exp(-t / 300))).exp(), 4000) == []


def test_a_denominator_that_halves_again_and_again() -> None:
    x = torch.ones(4, requires_grad=True)
    told = told_by_samples(lambda t: x / (x * 2.0 ** -(t / 20)), 2500)
    assert [(f.what, f.kind) for f in told] == [("operator", "min")]
    assert "away and getting closer" in sentence(told[0])


def test_two_calls_on_one_line_are_told_once() -> None:
    x = torch.ones(4, requires_grad=True)
    told = told_by_samples(lambda t: x / (x * 2.0 ** -(t / 20)) - x / (x * 2.0 ** -(t / 21)), 2500)
    assert [(f.what, f.kind) for f in told] == [("operator", "min")]


def test_a_product_outside_of_layers() -> None:
    x, weights = torch.ones(4, requires_grad=True), torch.zeros(4)
    (told,) = told_by_samples(lambda t: (x * 1.06**t + weights * x).cumprod(0), 900, every=16)
    assert (told.what, told.kind) == ("operator", "float32")
    assert sentence(told).startswith("the result of ")
    # One that ends far from the limit, and one that grows by the same amount in each step.
    assert told_by_samples(lambda t: x * 2.0 ** min(t / 8, 39), 900, every=16) == []
    assert told_by_samples(lambda t: x * 1e10 * t, 900, every=16) == []


def test_a_recurrence_that_starts_at_0_is_judged_by_its_largest_state() -> None:
    x = torch.full((4,), 1e-3, requires_grad=True)
    operators = StepSamples(Ownership((str(Path(__file__).parent),)))._operators
    operators.start()
    state = torch.zeros(4)
    for _ in range(3):
        state = state * 0.5 + x
    operators.stop(7)
    ((_, seen),) = [c[0].points[-1] for (op, *_), c in operators._courses.items() if op == "mul"]
    assert seen == pytest.approx(0.75e-3)


def test_what_firstnan_computes_of_a_tensor_is_not_sampled() -> None:
    x = torch.randn(16, 5, requires_grad=True)
    assert told_by_samples(lambda t: surely_finite((x * (1 + t / 50)).softmax(-1).detach()), 6000) == []


def test_a_divisor_that_is_a_plain_number() -> None:
    x = torch.ones(4, requires_grad=True)
    (told,) = told_by_samples(lambda t: x / 0.9**t / 1e-6, 700, every=16)
    assert told.since_step + 5 <= 829 <= told.since_step + (told.high or 0) + 30


@pytest.mark.parametrize("floor", [0.0, 0.15])
def test_an_argument_that_is_about_to_pass_zero(floor: float) -> None:
    x = torch.ones(4, requires_grad=True)

    def forward(t: int) -> None:
        (x - min(t, 96 * (1 - floor)) / 96).sqrt()
        nn.functional.softplus(x * 4 - t / 20).clone().log()  # falls as fast, but never passes
        (1 - torch.sigmoid(x * math.log((t + 8) / (104 - t))).view(2, 2)).log()

    told = told_by_samples(forward, 96, every=4)
    assert [(f.what, f.kind) for f in told][: 1 if floor else 2] == [("operator", "min")]
    assert told[0].since_step + (told[0].low or 0) <= 96 <= told[0].since_step + (told[0].high or 0) + 4


def test_a_difference_from_one_has_no_small_values() -> None:
    x = torch.ones(4, requires_grad=True)
    (told,) = told_by_samples(lambda t: (1 - torch.sigmoid(x * t / 10)).log(), 160, every=4)
    assert told.since_step + 5 <= 172 <= told.since_step + (told.high or 0) + 16


def test_a_rise_that_gets_steeper_and_steeper() -> None:
    points = [(t, 2.0 ** (1.25**t)) for t in range(14)]
    found = reach(points, LARGEST["float32"], 3.0, steepens=True)
    assert found is not None
    assert found.low <= math.log(128, 1.25) - 13 <= found.high + 1


def attention(fused: bool, sharpness: Any) -> Any:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 8, 16, requires_grad=True), torch.randn(2, 2, 8, 16)

    def forward(t: int) -> Tensor:
        scaled = q * sharpness(t)
        if fused:
            return nn.functional.scaled_dot_product_attention(scaled, k, k)
        return (scaled @ k.transpose(-1, -2) / 4).softmax(-1) @ k

    return forward


@pytest.mark.parametrize("fused", [False, True])
def test_attention_whose_entropy_falls_towards_0(fused: bool) -> None:
    told = told_by_samples(attention(fused, lambda t: t / 100 + 1), 6000)
    assert [(f.what, f.kind) for f in told][:1] == [("attention", "entropy")]
    assert "gives all weight to one position" in sentence(told[0])


@pytest.mark.parametrize("fused", [False, True])
def test_attention_that_becomes_sharp_and_stays_so(fused: bool) -> None:
    assert told_by_samples(attention(fused, lambda t: 1 + 20 * (1 - math.exp(-t / 500))), 6000) == []


def test_a_classifier_that_gets_certain_is_no_attention() -> None:
    x = torch.randn(16, 5, requires_grad=True)
    assert told_by_samples(lambda t: (x * (1 + t / 50)).softmax(-1).max(), 6000) == []


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(8), nn.BatchNorm1d(8), nn.GroupNorm(2, 8)], ids=lambda m: type(m).__name__
)
def test_a_variance_that_collapses(norm: nn.Module) -> None:
    model = nn.Sequential(norm)
    x = torch.randn(32, 8)
    (told,) = told_by_samples(lambda t: model(x * 2.0 ** -(t / 200)), 1500, model=model)
    assert (told.what, told.name, told.kind) == ("variance", "0", "eps")
    assert sentence(told).startswith("the variance of the input of 0 falls below 1e-05 in about ")
    assert told_by_samples(lambda t: model(x * (0.02 + 2.0 ** -(t / 200))), 3000, model=model) == []


def test_a_layer_that_grows_is_seen_in_samples_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8).half())
    x = torch.ones(4, 8, dtype=torch.float16)
    told = told_by_samples(lambda t: model(x * 2.0 ** (t / 120)), 1600, model=model)
    assert ("layer", "0", "float16") in [(f.what, f.name, f.kind) for f in told]
    assert told_by_samples(lambda t: model(x * 2.0 ** min(t / 120, 6)), 4000, model=model) == []


# --- firstnan run -------------------------------------------------------------------------------------------------

PROGRAM = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr={rate})
x = torch.randn(256, 10)
for step in range(600):
    loss = (model(x[:32]) - x[:32].sum(1, keepdim=True)).square().mean().add(1.0).log()
    if {rate} > 1:
        loss = (model(x[:32]) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_one_line_warns_before_the_report(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.format(rate=2.0))
    result = firstnan(["run", "--verify", "0", "--csv", "steps.csv", "train.py"], cwd=tmp_path)
    assert result.code == 3
    warned = [line for line in result.stderr.splitlines() if line.startswith("firstnan: warning: step ")]
    assert ["norm of the weights" in line for line in warned] == [True, False]
    assert "in about" in warned[1]
    assert result.report is not None
    assert result.report["forecast"][0]["since_step"] + 5 < result.report["step"]
    rows = (tmp_path / "steps.csv").read_text().splitlines()
    assert rows[0] == "step,optimizer,loss,grad_norm,lr,param_norm,update_ratio,scale,event"
    assert [row.split(",")[0] for row in rows[1:4]] == ["0", "1", "2"]
    assert any("in about" in row for row in rows)
    assert rows[-1].startswith(f"{result.report['step']},,")
    assert "Inf created in forward" in rows[-1]


def test_a_healthy_run_is_silent_and_has_its_history(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.format(rate=0.05))
    result = firstnan(["run", "train.py"], cwd=tmp_path)
    assert (result.code, result.stdout, result.stderr) == (0, "", "")
    report = result.report
    assert report is not None
    assert (report["verdict"], report["forecast"]) == ("clean", [])
    assert report["history"]["steps"][-1]["step"] == 599
    assert report["history"]["earlier"][0]["step"] == 0
    assert any(s["update_ratio"] for s in report["history"]["steps"])
    (near,) = report["headroom"]
    assert (near["op"], near["code"], near["argument"]) == (
        "log",
        "(model(x[:32]) - x[:32].sum(1, keepdim=True)).square().mean().add(1.0).log()",
        "min",
    )


def test_live_is_plain_lines_where_there_is_no_terminal(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.format(rate=0.05))
    result = firstnan(["run", "--live", "train.py"], cwd=tmp_path)
    assert result.code == 0
    assert result.stderr.startswith("firstnan:  1 step  loss ")
    assert "\x1b" not in result.stderr
