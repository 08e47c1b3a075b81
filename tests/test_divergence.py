"""Trainings that diverge and stay finite are a finding; healthy ones, however their losses jump, are not."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name of the trade
from torch import Tensor, nn

from firstnan import NaNDetector, NonFiniteError
from firstnan.engine.program_watch import watch
from firstnan.observe.sites import Ownership
from firstnan.records import Report
from test_growth_guard import HEALTHY, LOST, Step, Training, adam, classes, mlp, regression, sgd, train
from zygote import Zygote

pytest_plugins = ["zygote"]
pytestmark = pytest.mark.slow


def verdict(training: Callable[[], Iterator[Step]], seed: int) -> tuple[Report, list[Step]]:
    """What `firstnan run` would say of it, without its trials; and the numbers of its steps."""
    torch.manual_seed(seed)
    found = watch(
        Ownership((str(Path(__file__).parent),)),
        lambda report: None,
        lambda report, session: None,
        tracing=False,
        trace_from=None,
        outputs_decide=False,
        may_replay=False,
        wanted=None,
    )
    steps: list[Step] = []
    try:
        steps.extend(training())
    except SystemExit:  # something was not finite
        steps.append(LOST)
    finally:
        report = found.end()
    return report, steps


# --- diverging: finite to the end, and lost -----------------------------------------------------------------------

DIVERGING: list[Training] = []


def diverging(training: Training) -> Training:
    DIVERGING.append(training)
    return training


def too_fast(
    lr: float, *sizes: int, act: type[nn.Module] = nn.ReLU, momentum: float = 0.0, steps: int = 150
) -> Training:
    def training() -> Iterator[Step]:
        model = mlp(10, *sizes, 1, act=act)
        return train(model.parameters(), sgd(model, lr, momentum), regression(model), steps=steps)

    training.__name__ = f"{act.__name__}_{'x'.join(map(str, sizes))}_lr{lr:g}_momentum{momentum:g}_{steps}_steps"
    return training


def with_optimizer(make: Callable[..., torch.optim.Optimizer], lr: float, steps: int = 150) -> Training:
    def training() -> Iterator[Step]:
        model = mlp(10, 32, 32, 1)
        return train(model.parameters(), make(model.parameters(), lr=lr), regression(model), steps=steps)

    training.__name__ = f"{make.__name__}_lr{lr:g}"
    return training


DIVERGING += [too_fast(1.0, 16, 16), too_fast(1.0, 8, 8), too_fast(1.0, 12, 12)]
DIVERGING += [with_optimizer(torch.optim.Adam, 30.0), with_optimizer(torch.optim.RMSprop, 10.0)]
DIVERGING += [with_optimizer(torch.optim.Adagrad, 100.0)]


@diverging
def classifier_with_a_rate_of_a_thousand() -> Iterator[Step]:
    model = mlp(10, 32, 3)
    return train(model.parameters(), adam(model, 1e3), classes(model), steps=60)


@diverging
def rate_that_a_schedule_raises_too_far() -> Iterator[Step]:
    model = mlp(10, 16, 1)
    optimizer = adam(model, 1e-3)

    def raise_rate(t: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 if t < 60 else 30.0

    return train(model.parameters(), optimizer, regression(model), steps=120, before=raise_rate)


@diverging
def linear_regression_just_above_the_largest_rate() -> Iterator[Step]:
    """The error grows by a few per cent a step, and the program ends before anything overflows."""
    w, x = nn.Parameter(torch.zeros(10)), torch.randn(200, 10)
    y = x @ torch.randn(10) + 0.1 * torch.randn(200)
    lr = 1.03 / float(torch.linalg.eigvalsh(x.T @ x / 200)[-1])
    return train([w], torch.optim.SGD([w], lr=lr), lambda t: F.mse_loss(x @ w, y), steps=300)


@diverging
def convolutions() -> Iterator[Step]:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 1))
    x = torch.randn(64, 1, 8, 8)
    y = x.flatten(1).mean(1, keepdim=True)
    return train(model.parameters(), adam(model, 10.0), lambda t: F.mse_loss(model(x), y), steps=100)


@diverging
def matrix_factors() -> Iterator[Step]:
    u, v, m = nn.Parameter(torch.randn(30, 5) * 0.1), nn.Parameter(torch.randn(20, 5) * 0.1), torch.randn(30, 20)
    return train([u, v], torch.optim.Adam([u, v], lr=50.0), lambda t: ((u @ v.T - m) ** 2).mean(), steps=100)


@diverging
def recurrent_net() -> Iterator[Step]:
    cell, head = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, 1)
    model = nn.ModuleList([cell, head])
    x = torch.randn(64, 12, 4)
    y = x.sum((1, 2))
    return train(
        model.parameters(),
        torch.optim.RMSprop(model.parameters(), lr=30.0),
        lambda t: F.mse_loss(head(cell(x)[0][:, -1]).squeeze(1), y),
        steps=60,
    )


# --- healthy: losses that jump, restart, fight or are rescaled ----------------------------------------------------


def spiking(t: int) -> float:
    return 300.0 if t % 50 == 49 else 1.0


JUMPING: list[Training] = []


def jumping(training: Training) -> Training:
    JUMPING.append(training)
    return training


@jumping
def spikes_of_a_hundred_thousand_times_the_loss() -> Iterator[Step]:
    model = mlp(10, 32, 1)
    return train(model.parameters(), sgd(model, 1e-3), regression(model, spiking), clip=1.0, steps=200)


@jumping
def ends_with_a_spike() -> Iterator[Step]:
    model = mlp(10, 32, 1)
    return train(model.parameters(), adam(model), regression(model, lambda t: 1e4 if t >= 149 else 1.0), steps=150)


@jumping
def warm_restarts() -> Iterator[Step]:
    model = mlp(10, 32, 3)
    optimizer = sgd(model, 0.5, 0.9)
    restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 30)
    return train(model.parameters(), optimizer, classes(model), before=lambda t: t and restarts.step(), steps=200)


@jumping
def one_cycle_with_a_high_peak() -> Iterator[Step]:
    model = mlp(10, 32, 1)
    optimizer = sgd(model, 0.01)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.08, total_steps=201)
    return train(model.parameters(), optimizer, regression(model), before=lambda t: t and cycle.step(), steps=200)


@jumping
def penalty_whose_weight_grows_a_millionfold() -> Iterator[Step]:
    """A penalty method: the loss is scaled by its coefficient, the weights are not."""
    model = mlp(10, 32, 1)
    loss_of = regression(model)

    def penalised(t: int) -> Tensor:
        return loss_of(t) * 10 ** (t / 25)

    return train(model.parameters(), adam(model, 1e-3), penalised, steps=150)


@jumping
def second_phase_with_a_summed_loss() -> Iterator[Step]:
    model = mlp(10, 32, 1)
    mean, total = regression(model), regression(model, reduction="sum")
    return train(model.parameters(), adam(model), lambda t: mean(t) if t < 100 else total(t) * 20, steps=200)


@jumping
def kl_term_that_starts_at_nothing() -> Iterator[Step]:
    model = mlp(10, 32, 2)
    x = torch.randn(256, 10)

    def loss_of(t: int) -> Tensor:
        mean, log_scale = model(x).unbind(1)
        kl = (mean**2 + log_scale.exp() ** 2 - 1 - 2 * log_scale).sum() / 2
        return kl * min(1.0, t / 100) + F.mse_loss(mean, x[:, 0])

    return train(model.parameters(), adam(model), loss_of, steps=200)


def wasserstein(of_generator: bool, clamp: float | None) -> Training:
    """Without bounds on the critic its loss falls, and the generator's rises, without end."""

    def training() -> Iterator[Step]:
        generator, critic = mlp(4, 32, 2), mlp(2, 64, 1)
        optimizers = {True: adam(generator, 1e-3), False: adam(critic, 5e-3)}

        def loss_of(generates: bool) -> Tensor:
            fake = generator(torch.randn(64, 4))
            if generates:
                return -critic(fake).mean()
            return critic(fake.detach()).mean() - critic(torch.randn(64, 2) * 0.1 + 3).mean()

        def other(t: int) -> None:
            for _ in range(2 if of_generator else 1):
                optimizers[not of_generator].zero_grad()
                loss_of(not of_generator).backward()
                optimizers[not of_generator].step()
            if clamp is not None:
                for p in critic.parameters():
                    p.data.clamp_(-clamp, clamp)

        mine = generator if of_generator else critic
        return train(
            mine.parameters(), optimizers[of_generator], lambda t: loss_of(of_generator), before=other, steps=250
        )

    training.__name__ = f"wasserstein_{'generator' if of_generator else 'critic'}_{clamp}"
    return training


JUMPING += [wasserstein(who, clamp) for who in (True, False) for clamp in (None, 0.1)]


@jumping
def gan_whose_generator_loses() -> Iterator[Step]:
    """The discriminator wins: the generator's loss rises to ten and more, and stays there."""
    generator, critic = mlp(4, 8, 2), mlp(2, 64, 64, 1)
    fast, slow = adam(critic, 1e-2), adam(generator, 1e-4)

    def other(t: int) -> None:
        fast.zero_grad()
        fake, real = generator(torch.randn(64, 4)).detach(), torch.randn(64, 2) * 0.1 + 5
        (F.softplus(critic(fake)) + F.softplus(-critic(real))).mean().backward()
        fast.step()

    def loss_of(t: int) -> Tensor:
        return F.softplus(-critic(generator(torch.randn(64, 4)))).mean()

    return train(generator.parameters(), slow, loss_of, before=other, steps=250)


@jumping
def temporal_differences_with_growing_values() -> Iterator[Step]:
    """A critic that learns from its own copy: values, and errors, grow with the horizon."""
    critic, target = mlp(4, 32, 1), mlp(4, 32, 1)
    x = torch.randn(512, 4)

    def copied(t: int) -> None:
        if t % 20 == 0:
            target.load_state_dict(critic.state_dict())

    def loss_of(t: int) -> Tensor:
        rows = torch.randint(0, 511, (64,))
        with torch.no_grad():
            wanted = 10.0 + 0.95 * target(x[rows + 1])
        return F.mse_loss(critic(x[rows]), wanted)

    return train(critic.parameters(), adam(critic, 3e-3), loss_of, before=copied, steps=600)


@jumping
def curriculum_with_targets_a_hundred_times_larger() -> Iterator[Step]:
    model = mlp(10, 32, 1)
    return train(model.parameters(), adam(model), regression(model, lambda t: 1.0 if t < 100 else 100.0), steps=1500)


@jumping
def logistic_regression_from_zero_on_separable_data() -> Iterator[Step]:
    """The weights grow for ever, the loss falls."""
    w, x = nn.Parameter(torch.zeros(4)), torch.randn(200, 4)
    y = (x[:, 0] > 0).float()
    return train([w], torch.optim.SGD([w], lr=10.0), lambda t: F.binary_cross_entropy_with_logits(x @ w, y), steps=400)


@jumping
def policy_gradient_without_a_baseline() -> Iterator[Step]:
    policy = mlp(4, 16, 3, act=nn.Tanh)

    def loss_of(t: int) -> Tensor:
        choice = torch.distributions.Categorical(logits=policy(torch.randn(8, 4)))
        action = choice.sample()
        return -(choice.log_prob(action) * (action == 1) * (1 + t)).mean()

    return train(policy.parameters(), adam(policy, 1e-3), loss_of, steps=400)


@jumping
def large_rate_that_jumps_and_settles() -> Iterator[Step]:
    """The edge of stability: the loss rises tenfold in the first steps, then training finds a flat place."""
    model = mlp(10, 32, 1, act=nn.Tanh)
    return train(model.parameters(), sgd(model, 0.15), regression(model), steps=300)


# --- the findings -------------------------------------------------------------------------------------------------

HEALTHY_RUNS = [(training, 3) for training in HEALTHY] + [(training, seed) for training in JUMPING for seed in (0, 1)]


DIVERGING_RUNS = [(training, seed) for training in DIVERGING for seed in (0, 2, 5)]


@pytest.mark.parametrize(("training", "seed"), DIVERGING_RUNS, ids=lambda one: getattr(one, "__name__", one))
def test_training_that_diverges_is_a_finding(training: Training, seed: int) -> None:
    report, steps = verdict(training, seed)
    if LOST in steps:  # rounding on another machine may take it over the edge
        return
    first = [loss for _, loss in steps[:4]]
    assert report.verdict == "diverged"
    assert report.cause is not None
    assert report.cause.slug == "divergence_lr"
    assert report.step is not None
    assert steps[report.step][1] > max(min(first), 0.1)
    assert report.history.steps[0].step < report.step  # the healthy steps are there to compare with
    assert report.origin is not None


@pytest.mark.parametrize("seed", [20, 44, 56, 80])
def test_training_that_leaves_few_units_alive_is_a_finding(seed: int) -> None:
    """The loss climbs to 100 times its first value and stays there: nearly all of the gradient is that of one bias."""

    def training() -> Iterator[Step]:
        model, x = mlp(4, 64, 1), torch.randn(64, 4) * 0.3
        y = torch.sin(x[:, :1] * 2) + x[:, 1:2]
        return train(model.parameters(), sgd(model, 1.0), lambda t: F.mse_loss(model(x), y), steps=150)

    report, steps = verdict(training, seed)
    assert steps[-1][1] > 100 * steps[0][1]
    assert report.verdict == "diverged"
    assert report.cause is not None
    assert "most units are dead" in " ".join(report.cause.evidence)


@pytest.mark.parametrize(("training", "seed"), HEALTHY_RUNS, ids=lambda one: getattr(one, "__name__", one))
def test_healthy_training_is_no_finding(training: Training, seed: int) -> None:
    report, steps = verdict(training, seed)
    assert LOST not in steps
    assert report.verdict == "clean"
    assert report.notes == ()


def regressed(lr: float, policy: Any, steps: int = 150) -> NaNDetector:
    """A detector around a regression; with a rate of 1 it climbs to 1e19 and stays there."""
    torch.manual_seed(2)
    model, x = mlp(10, 16, 16, 1), torch.randn(64, 10)
    optimizer = sgd(model, lr)
    with NaNDetector(model, optimizer, on_nonfinite=policy) as detector:
        for _ in range(steps):
            optimizer.zero_grad()
            F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
    return detector


def test_a_detector_raises_at_the_end_of_a_training_that_diverged() -> None:
    with pytest.raises(NonFiniteError, match="training diverged from step 3 on; no NaN or Inf") as caught:
        regressed(1.0, "raise")
    report = caught.value.report
    assert (report.verdict, report.step, report.cause and report.cause.slug) == ("diverged", 3, "divergence_lr")
    assert report.cause is not None
    assert "in step 149, the last one" in report.cause.why
    assert any("learning rate" in remedy.title for remedy in report.remedies)
    assert [event.kind for event in report.events] == ["explosion"]


@pytest.mark.parametrize("policy", ["warn", "skip", "rollback"])
def test_a_detector_tells_of_a_training_that_diverged(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    detector = regressed(1.0, policy)
    assert [(one.verdict, one.step) for one in detector.reports] == [("diverged", 3)]
    assert sum("training diverged from step 3 on" in record.getMessage() for record in caplog.records) == 1


def test_a_detector_is_silent_after_a_large_rate_that_settles(caplog: pytest.LogCaptureFixture) -> None:
    assert regressed(0.02, "raise").reports == []
    assert caplog.records == []


def test_a_loss_that_recovers_between_two_full_checks_has_not_diverged() -> None:
    """The steps of a tiny model that pass the quick check are not seen by the guard one by one."""
    torch.manual_seed(0)
    weight, optimum = nn.Parameter(torch.zeros(4)), torch.ones(4)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    model = nn.ParameterList([weight])
    with NaNDetector(model, optimizer) as detector:
        for t in range(120):
            if t == 40:
                weight.data.fill_(1e4)
            optimizer.param_groups[0]["lr"] = 0.1 if t < 40 else 1e-9 if t < 64 else 0.4
            optimizer.zero_grad()
            (weight - optimum).square().mean().backward()
            optimizer.step()
    assert [event.kind for event in detector.events if event.kind == "explosion"]
    assert detector.reports == []


# --- programs that look at their losses themselves ----------------------------------------------------------------

SKIPS = """
    import math
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    data = torch.rand(40, 4) + 0.1
    data[21] = data[33] = -1.0

    def train():
        for x in data.split(4):
            loss = (net(torch.log(x)) - 1).square().mean()
            spread = loss * float("nan")
            print(spread.item())
            {test}
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    train()
"""


@pytest.mark.parametrize("test", ["if torch.isnan(loss):", "if not math.isfinite(loss.item()):"])
def test_a_loop_that_skips_bad_losses_itself_is_an_event(firstnan: Zygote, tmp_path: Path, test: str) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SKIPS).format(test=test))
    result = firstnan(["run", "train.py"], cwd=tmp_path)
    report = result.report or {}
    assert (result.code, report["verdict"]) == (0, "clean")
    assert [(event["kind"], event["step"]) for event in report["events"]] == [("skipped", 5), ("skipped", 7)]
    assert "firstnan:" not in result.stderr


def test_a_detector_notes_batches_that_the_loop_skips() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.ones(40, 4)
    data[21] = -1.0
    with NaNDetector(model, optimizer) as detector:
        for x in detector.batches(data.split(4)):
            loss = (model(torch.log(x)) - 1).square().mean()
            if not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (event,) = detector.events
    assert (event.kind, event.step, event.batch, event.what) == ("skipped", 5, 5, "loss")


@pytest.mark.parametrize(
    "write",
    ["net.weight.data.fill_(float('nan'))", "net.weight.data[0, 1] = math.nan", "net.weight.data.mul_(math.nan)"],
)
def test_a_nan_that_the_program_writes_into_a_weight_is_no_learning_rate(
    firstnan: Zygote, tmp_path: Path, write: str
) -> None:
    program = SKIPS.replace("            {test}\n                continue\n", f"            if x is None: {write}\n")
    program = program.replace("data[21] = data[33] = -1.0", "").replace("if x is None", "if optimizer.state_dict()")
    (tmp_path / "train.py").write_text(textwrap.dedent(program))
    result = firstnan(["run", "--verify", "0", "train.py"], cwd=tmp_path)
    assert (result.code, result.cause) == (3, "nan_parameter")


PENALTY = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    net, scale, weight = nn.Linear(3, 1), nn.Parameter(torch.tensor(1.0)), 1.0
    optimizer = torch.optim.Adam([*net.parameters(), scale], 0.05)
    x = torch.randn(64, 3)
    y = 1000 * x[:, 0] + 300
    for step in range(250):
        if step and step % 25 == 0:
            weight *= 10
        predicted = net(x).squeeze(1) * scale
        loss = (predicted - y).abs().mean() + weight * (predicted.mean() - 290).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_a_loss_that_rises_more_with_smaller_rates_has_not_diverged(firstnan: Zygote, tmp_path: Path) -> None:
    """A penalty grows tenfold again and again, and the weights grow to meet it."""
    (tmp_path / "train.py").write_text(textwrap.dedent(PENALTY))
    result = firstnan(["run", "--verify", "250", "train.py"], cwd=tmp_path)
    assert (result.code, (result.report or {})["verdict"]) == (0, "clean")
    assert "with smaller learning rates it becomes even larger" in result.stderr


def test_missing_values_that_the_model_keeps_in_a_buffer_are_no_failure() -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rest = nn.Linear(4, 1)
            self.register_buffer("last", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.last = x[-1].detach()
            return self.rest(x.nan_to_num())

    torch.manual_seed(0)
    model = Masks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(160, 4)
    data[torch.rand(160, 4) < 0.2] = torch.nan
    with NaNDetector(model, optimizer) as detector:
        for x in detector.batches(data.split(4)):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert (detector.summary()["steps"], detector.summary()["nonfinite"]) == (40, 0)
