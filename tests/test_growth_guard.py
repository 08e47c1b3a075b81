"""The guard on real trainings: silent while they are healthy, and a warning before the first NaN when they are not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name of the trade
from torch import Tensor, nn

from firstnan.gate.growth_guard import Alarm, GrowthGuard

Step = tuple[float | None, float]
"""The gradient norm and the loss of one step."""
LOST: Step = (math.nan, math.nan)
Training = Callable[[], Iterator[Step]]


def train(
    parameters: Iterable[Tensor],
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[int], Tensor],
    *,
    steps: int = 300,
    clip: float | None = None,
    before: Callable[[int], object] = lambda t: None,
) -> Iterator[Step]:
    """Each step's numbers up to the first that has a non-finite loss or gradient, which is given as `LOST`."""
    parameters = list(parameters)
    for t in range(steps):
        before(t)
        optimizer.zero_grad()
        loss = loss_of(t)
        if loss.requires_grad:
            loss.backward()
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not all(bool(torch.isfinite(x).all()) for x in [loss, *gradients]):
            yield LOST
            return
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        # As the gate does it, in float32: it overflows before the gradients do.
        norm = math.hypot(*torch.stack(torch._foreach_norm(gradients)).tolist()) if gradients else None
        yield norm, loss.item()
        optimizer.step()


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(*[part for i, o in pairwise(sizes) for part in (nn.Linear(i, o), act())][:-1])


def sgd(model: nn.Module, lr: float, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def adam(model: nn.Module, lr: float = 3e-3) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


def regression(
    model: nn.Module, scale: Callable[[int], float] = lambda t: 1.0, reduction: str = "mean"
) -> Callable[[int], Tensor]:
    """The loss of a small random batch; the target is the sum of the ten features."""
    x = torch.randn(256, 10)

    def loss_of(t: int) -> Tensor:
        rows = torch.randint(0, 256, (32,))
        return F.mse_loss(model(x[rows]), x[rows].sum(1, keepdim=True) * scale(t), reduction=reduction)

    return loss_of


def classes(model: Callable[[Tensor], Tensor], batch: Callable[[int], int] = lambda t: 32) -> Callable[[int], Tensor]:
    x = torch.randn(512, 10)
    y = x[:, :3].argmax(1)

    def loss_of(t: int) -> Tensor:
        rows = torch.randint(0, 512, (batch(t),))
        return F.cross_entropy(model(x[rows]), y[rows])

    return loss_of


# --- healthy ------------------------------------------------------------------------------------------------------

HEALTHY: list[Training] = []
DIVERGING: list[Training] = []


def healthy(training: Training) -> Training:
    HEALTHY.append(training)
    return training


def diverging(training: Training) -> Training:
    DIVERGING.append(training)
    return training


@healthy
def plain_classifier() -> Iterator[Step]:
    model = mlp(10, 32, 3)
    return train(model.parameters(), sgd(model, 0.1, 0.9), classes(model))


@healthy
def head_that_starts_at_zero() -> Iterator[Step]:
    model = mlp(10, 32, 32, 1, act=nn.GELU)
    nn.init.zeros_(model[-1].weight)
    return train(model.parameters(), adam(model), regression(model))


@healthy
def adapter_that_wakes_up_from_a_millionth() -> Iterator[Step]:
    """The product of two tiny matrices: the norm rises by a factor of a million, the loss falls."""
    a, b = nn.Parameter(torch.randn(10, 4) * 1e-6), nn.Parameter(torch.randn(4, 10) * 1e-6)
    x = torch.randn(256, 10)
    y = x @ torch.randn(10, 10)
    return train([a, b], torch.optim.SGD([a, b], lr=0.05), lambda t: F.mse_loss(x @ a @ b, y), steps=600)


@healthy
def deep_linear_net_on_a_plateau() -> Iterator[Step]:
    weights = [nn.Parameter(torch.eye(6) * 0.03) for _ in range(3)]
    x = torch.randn(128, 6)

    def loss_of(t: int) -> Tensor:
        out = x
        for w in weights:
            out = out @ w
        return F.mse_loss(out, 10 * x)

    return train(weights, torch.optim.SGD(weights, lr=0.01), loss_of, steps=800)


@healthy
def transformer_with_warm_up() -> Iterator[Step]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    embed, head = nn.Embedding(20, 16), nn.Linear(16, 20)
    model = nn.ModuleList([layer, embed, head])
    optimizer = adam(model, 1e-2)
    tokens = torch.randint(0, 20, (64, 8))

    def warm_up(t: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (t + 1) / 50)

    def loss_of(t: int) -> Tensor:
        rows = tokens[torch.randint(0, 64, (16,))]
        return F.cross_entropy(head(layer(embed(rows))).flatten(0, 1), rows.flatten())

    return train(model.parameters(), optimizer, loss_of, steps=200, before=warm_up)


@healthy
def outlier_batches_of_five_times_the_loss() -> Iterator[Step]:
    model = mlp(10, 32, 1)
    return train(model.parameters(), adam(model), regression(model, lambda t: 2.2 if t % 37 == 36 else 1.0))


@healthy
def policy_gradient_with_heavy_tailed_returns() -> Iterator[Step]:
    policy = mlp(4, 16, 3, act=nn.Tanh)
    returns = torch.distributions.StudentT(2.0)

    def loss_of(t: int) -> Tensor:
        choice = torch.distributions.Categorical(logits=policy(torch.randn(4, 4)))
        action = choice.sample()
        return -(choice.log_prob(action) * (returns.sample((4,)) * 10 + action)).mean()

    return train(policy.parameters(), adam(policy, 1e-3), loss_of, steps=600)


@healthy
def values_of_rewards_that_become_larger() -> Iterator[Step]:
    critic = mlp(4, 32, 1)
    x = torch.randn(512, 4)

    def loss_of(t: int) -> Tensor:
        rows = torch.randint(0, 512, (32,))
        return F.mse_loss(critic(x[rows]).squeeze(1), x[rows].norm(dim=1) * t / 10)

    return train(critic.parameters(), adam(critic), loss_of, steps=600)


def gan(wasserstein: bool, of_generator: bool) -> Iterator[Step]:
    """One guard an optimizer: the numbers of the other one are left out."""
    generator, critic = mlp(4, 32, 2), mlp(2, 32, 1)
    optimizers = {True: adam(generator, 1e-3), False: adam(critic, 1e-3)}

    def loss_of(t: int, generates: bool) -> Tensor:
        fake = generator(torch.randn(32, 4))
        if generates:
            return -critic(fake).mean() if wasserstein else F.softplus(-critic(fake)).mean()
        real = torch.randn(32, 2) * 0.1 + 2
        if wasserstein:
            return critic(fake.detach()).mean() - critic(real).mean()
        return (F.softplus(critic(fake.detach())) + F.softplus(-critic(real))).mean()

    def other(t: int) -> None:
        optimizer = optimizers[not of_generator]
        optimizer.zero_grad()
        loss_of(t, not of_generator).backward()
        optimizer.step()
        if wasserstein:
            for p in critic.parameters():
                p.data.clamp_(-0.2, 0.2)

    mine = generator if of_generator else critic
    return train(mine.parameters(), optimizers[of_generator], lambda t: loss_of(t, of_generator), before=other)


@healthy
def gan_generator() -> Iterator[Step]:
    return gan(wasserstein=False, of_generator=True)


@healthy
def gan_critic_with_losses_around_zero() -> Iterator[Step]:
    return gan(wasserstein=True, of_generator=False)


@healthy
def converged_to_nothing_then_a_new_task() -> Iterator[Step]:
    """The loss is a millionth of what it was when the data changes."""
    model = mlp(10, 64, 1, act=nn.Tanh)
    x = torch.randn(16, 10)
    y = torch.randn(16, 1)
    return train(model.parameters(), adam(model), lambda t: F.mse_loss(model(x), y if t < 800 else -y), steps=1000)


@healthy
def negative_log_density() -> Iterator[Step]:
    """A loss that goes through zero to far below it."""
    model = mlp(10, 32, 2, act=nn.Tanh)
    x = torch.randn(256, 10)

    def loss_of(t: int) -> Tensor:
        mean, log_scale = model(x).unbind(1)
        return -torch.distributions.Normal(mean, log_scale.clamp(min=-5).exp()).log_prob(x[:, 0].tanh()).mean()

    return train(model.parameters(), adam(model), loss_of, steps=400)


@healthy
def curriculum_with_targets_ten_times_larger() -> Iterator[Step]:
    model = mlp(10, 32, 1)
    return train(model.parameters(), adam(model), regression(model, lambda t: 1.0 if t < 200 else 10.0), steps=400)


@healthy
def accumulation_over_one_to_eight_batches() -> Iterator[Step]:
    model = mlp(10, 32, 3)
    loss_of = classes(model)
    draw = random.Random(0)
    return train(
        model.parameters(),
        sgd(model, 0.02),
        lambda t: torch.stack([loss_of(t) for _ in range(draw.randint(1, 8))]).sum(),
    )


@healthy
def batches_that_are_often_empty() -> Iterator[Step]:
    """Most have no valid label at all: zero loss, zero gradient."""
    model = mlp(10, 32, 3)
    loss_of = classes(model)
    draw = random.Random(0)
    return train(model.parameters(), adam(model), lambda t: loss_of(t) * (draw.random() < 0.3))


@healthy
def gradients_clipped_to_one() -> Iterator[Step]:
    """The norm has no spread at all."""
    model = mlp(10, 32, 1)
    return train(model.parameters(), sgd(model, 1e-3), regression(model, lambda t: 30.0), clip=1.0)


@healthy
def fine_tuning_with_a_growing_batch() -> Iterator[Step]:
    model = mlp(10, 32, 3)
    loss_of = classes(model, lambda t: 4 + t)
    return train(model.parameters(), adam(model, 1e-3), lambda t: loss_of(t) * (4 + t))


@healthy
def numbers_nobody_normalised() -> Iterator[Step]:
    """Prices of houses: the first loss is 1e11, and Adam does not mind."""
    model = mlp(3, 16, 1)
    x = torch.rand(256, 3) * torch.tensor([3000.0, 5.0, 100.0])
    y = x @ torch.tensor([[150.0], [1e4], [-500.0]])
    return train(model.parameters(), adam(model, 1e-1), lambda t: F.mse_loss(model(x), y), steps=500)


@healthy
def cnn_with_batch_norm_and_a_restarting_rate() -> Iterator[Step]:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    optimizer = sgd(model, 0.1, 0.9)
    restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 40)
    x = torch.randn(64, 1, 8, 8)
    y = x.flatten(1)[:, :4].argmax(1)

    def loss_of(t: int) -> Tensor:
        rows = torch.randint(0, 64, (16,))
        return F.cross_entropy(model(x[rows]), y[rows])

    return train(model.parameters(), optimizer, loss_of, before=lambda t: t and restarts.step(), steps=200)


@healthy
def lstm_on_long_sequences() -> Iterator[Step]:
    cell, head = nn.LSTM(2, 16, batch_first=True), nn.Linear(16, 1)
    model = nn.ModuleList([cell, head])
    x = torch.randn(64, 40, 2)
    y = x[..., :1].cumsum(1).tanh()
    return train(model.parameters(), adam(model, 1e-2), lambda t: F.mse_loss(head(cell(x)[0]), y), steps=60)


@healthy
def variational_autoencoder_with_summed_loss() -> Iterator[Step]:
    encoder, decoder = mlp(10, 32, 4), mlp(2, 32, 10)
    model = nn.ModuleList([encoder, decoder])
    x = torch.randn(128, 10)

    def loss_of(t: int) -> Tensor:
        mean, log_var = encoder(x).chunk(2, 1)
        back = decoder(mean + torch.randn_like(mean) * (log_var / 2).exp())
        return F.mse_loss(back, x, reduction="sum") + 0.5 * (log_var.exp() + mean**2 - 1 - log_var).sum()

    return train(model.parameters(), adam(model), loss_of)


# --- diverging ----------------------------------------------------------------------------------------------------


def too_fast(
    lr: float, *sizes: int, act: type[nn.Module] = nn.ReLU, momentum: float = 0.0, reduction: str = "mean"
) -> Training:
    def training() -> Iterator[Step]:
        model = mlp(10, *sizes, 1, act=act)
        return train(model.parameters(), sgd(model, lr, momentum), regression(model, reduction=reduction))

    words = [act.__name__, "x".join(map(str, sizes)), f"lr{lr:g}", f"momentum{momentum:g}", reduction]
    training.__name__ = "_".join(words)
    return training


DIVERGING += [too_fast(lr, 32, 32) for lr in (1.0, 2.0, 5.0, 100.0)]
DIVERGING += [too_fast(lr, 32, 32, reduction="sum") for lr in (0.02, 0.1, 1.0)]
DIVERGING += [too_fast(lr, 32, 32, act=nn.Tanh) for lr in (0.3, 1.0)]
DIVERGING += [too_fast(1.0, 32, 32, act=nn.GELU), too_fast(1.0, 64, 64, momentum=0.9)]
DIVERGING += [too_fast(0.1, 32, 32, 32, 32, act=nn.Identity)]


@diverging
def recurrent_net() -> Iterator[Step]:
    cell, head = nn.RNN(4, 16, batch_first=True), nn.Linear(16, 1)
    nn.init.orthogonal_(cell.weight_hh_l0, gain=1.8)
    model = nn.ModuleList([cell, head])
    x = torch.randn(64, 30, 4)
    y = x.sum((1, 2))
    return train(model.parameters(), sgd(model, 1.0), lambda t: F.mse_loss(head(cell(x)[0][:, -1]).squeeze(1), y))


@diverging
def recurrent_net_of_relus() -> Iterator[Step]:
    cell, head = nn.RNN(4, 16, batch_first=True, nonlinearity="relu"), nn.Linear(16, 1)
    nn.init.orthogonal_(cell.weight_hh_l0, gain=1.1)
    model = nn.ModuleList([cell, head])
    x = torch.randn(64, 20, 4)
    y = x.sum((1, 2))
    return train(model.parameters(), sgd(model, 0.02), lambda t: F.mse_loss(head(cell(x)[0][:, -1]).squeeze(1), y))


@diverging
def matrix_factors() -> Iterator[Step]:
    u, v, m = nn.Parameter(torch.randn(30, 5) * 0.1), nn.Parameter(torch.randn(20, 5) * 0.1), torch.randn(30, 20)
    return train([u, v], torch.optim.SGD([u, v], lr=0.2), lambda t: ((u @ v.T - m) ** 2).sum())


@diverging
def classifier_with_an_absurd_rate() -> Iterator[Step]:
    model = mlp(10, 32, 32, 5)
    return train(model.parameters(), sgd(model, 1e4), classes(model))


def linear_regression(over: float) -> Training:
    """The rate is `over` times the largest one that converges: the error grows a little in each step."""

    def training() -> Iterator[Step]:
        w, x = nn.Parameter(torch.zeros(10)), torch.randn(200, 10)
        y = x @ torch.randn(10) + 0.1 * torch.randn(200)
        lr = over / float(torch.linalg.eigvalsh(x.T @ x / 200)[-1])
        return train([w], torch.optim.SGD([w], lr=lr), lambda t: F.mse_loss(x @ w, y), steps=2000)

    training.__name__ = f"linear_regression_{over}"
    return training


DIVERGING += [linear_regression(over) for over in (1.02, 1.1, 1.5, 3.0)]


# --- the trainings ------------------------------------------------------------------------------------------------


def alarms(guard: GrowthGuard, steps: Iterable[Step]) -> list[Alarm]:
    return [alarm for t, (norm, loss) in enumerate(steps) if (alarm := guard.observe(t, norm, loss)) is not None]


def name_of(training: Training) -> str:
    return training.__name__


@pytest.mark.slow
@pytest.mark.parametrize("training", HEALTHY, ids=name_of)
@pytest.mark.parametrize("seed", [0, 1])
def test_healthy_training_causes_no_warning(training: Training, seed: int) -> None:
    torch.manual_seed(seed)
    steps = list(training())
    assert len(steps) >= 60
    assert LOST not in steps
    guard = GrowthGuard()
    assert alarms(guard, steps) == []
    assert guard.unrecovered is None


@pytest.mark.parametrize("training", DIVERGING, ids=name_of)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_warning_at_least_one_step_before_the_first_nonfinite_value(training: Training, seed: int) -> None:
    torch.manual_seed(seed)
    *steps, last = training()
    assert last is LOST
    assert alarms(GrowthGuard(), steps), steps[-6:]  # all of them are before the step that was lost


def test_adam_with_a_learning_rate_of_ten_causes_a_warning_before_it_does_harm() -> None:
    """It stays finite: the norm explodes in the second step and comes down again."""
    torch.manual_seed(0)
    model = mlp(10, 32, 32, 1)
    found = alarms(GrowthGuard(), train(model.parameters(), adam(model, 10.0), regression(model)))
    assert (found[0].kind, found[0].step) == ("growth", 1)


def explosion(seed: int, lr: float, width: int) -> list[Step]:
    torch.manual_seed(seed)
    model = mlp(10, width, width, 1)
    return list(train(model.parameters(), sgd(model, lr), regression(model), steps=200))


def test_the_textbook_explosion_stays_finite_and_is_reported_once() -> None:
    steps = explosion(2, 1.0, 16)
    assert len(steps) == 200
    assert steps[-1][1] > 1e20
    guard = GrowthGuard()
    told = [alarm for alarm in alarms(guard, steps) if alarm.kind == "explosion"]
    assert len(told) == 1
    assert told[0].step < 20
    assert steps[told[0].step][1] > 1e4 * steps[0][1]
    assert guard.unrecovered == told[0]


def test_an_explosion_ends_when_the_loss_recovers() -> None:
    steps = explosion(2, 0.5, 32)
    assert max(loss for _, loss in steps) > 1e20
    assert steps[-1][1] < 100
    guard = GrowthGuard()
    assert "explosion" in [alarm.kind for alarm in alarms(guard, steps)]
    assert guard.unrecovered is None


# --- the rules, on numbers ----------------------------------------------------------------------------------------


def calm(steps: int = 100, level: float = 1.0, spread: float = 0.3, seed: int = 0) -> list[Step]:
    draw = random.Random(seed)
    return [(level * draw.lognormvariate(0, spread), draw.uniform(0.5, 1.5)) for _ in range(steps)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("tails", ["lognormal", "student", "shared"])
def test_heavy_tails_are_usual(tails: str, seed: int) -> None:
    torch.manual_seed(seed)
    normal = torch.randn(2000, dtype=torch.float64)
    if tails == "lognormal":
        norms, losses = (1.5 * normal).exp(), torch.randn(2000)
    elif tails == "student":
        norms, losses = (torch.distributions.StudentT(2.0).sample((2000,)) for _ in range(2))
        norms = norms.abs()
    else:
        norms, losses = normal.exp(), (0.7 * normal).exp()
    assert alarms(GrowthGuard(), zip(norms.tolist(), losses.tolist(), strict=True)) == []


def test_a_spike_is_reported_with_its_numbers() -> None:
    (alarm,) = alarms(GrowthGuard(), [*calm(), (1e4, 1.0), *calm()])
    assert (alarm.kind, alarm.step, alarm.norm) == ("spike", 100, 1e4)
    assert alarm.usual == pytest.approx(1.0, rel=0.2)
    assert alarm.text == f"step 100: the gradient norm jumped to 1e+04; it is usually {alarm.usual:.3g}."


def test_growth_from_the_first_step_on_is_compared_with_the_first_norm() -> None:
    norms = [54.0, 4e4, 2e13]
    first, second = alarms(GrowthGuard(), [(norm, norm * norm) for norm in norms])
    assert (first.kind, second.kind) == ("growth", "growth")
    assert first.text.endswith("; it was 54 at first.")
    assert second.text.endswith("; it was 54 at first.")


def test_a_level_that_stays_high_is_reported_once_and_becomes_usual() -> None:
    guard = GrowthGuard()
    assert [alarm.step for alarm in alarms(guard, [*calm(), *calm(200, 500.0)])] == [100]
    # From here a spike is one above the new level.
    assert alarms(guard, [(3e3, 1.0)]) == []
    assert [alarm.kind for alarm in alarms(guard, [(5e5, 1.0)])] == ["spike"]


def test_a_tenfold_rise_causes_another_warning() -> None:
    steps: list[Step] = [*calm(), (1e3, 1.0), (5e3, 1.0), (2e4, 1.0), (3e4, 1.0)]
    assert [alarm.norm for alarm in alarms(GrowthGuard(), steps)] == [1e3, 2e4]


def test_a_second_spike_is_reported_although_the_first_is_in_the_window() -> None:
    steps: list[Step] = [*calm(), (1e6, 1.0), *calm(10), (1e3, 1.0), *calm(10)]
    assert [alarm.norm for alarm in alarms(GrowthGuard(), steps)] == [1e6, 1e3]


def test_values_that_say_nothing_change_nothing() -> None:
    odd: list[Step] = [(math.inf, 1.0), (math.nan, math.nan), (None, math.inf), (0.0, 0.0), (1.0, -math.inf)]
    guard = GrowthGuard()
    assert alarms(guard, odd * 50) == []
    assert alarms(guard, calm() + odd * 50) == []
    (alarm,) = alarms(guard, [(1e3, 1.0)])
    assert (alarm.kind, alarm.usual) == ("spike", 1.0)


def test_a_constant_norm_has_no_spread_and_still_needs_a_hundredfold() -> None:
    steady: list[Step] = [(1.0, 1.0)] * 100
    assert alarms(GrowthGuard(), [*steady, (90.0, 1.0), *steady]) == []
    assert [alarm.kind for alarm in alarms(GrowthGuard(), [*steady, (110.0, 1.0), *steady])] == ["spike"]


def test_growth_needs_the_loss_until_the_norm_is_beyond_doubt() -> None:
    slow = [(1.3**t, 1.0) for t in range(100)]
    (first, *_) = alarms(GrowthGuard(), slow)
    assert first.kind == "growth"
    assert first.norm is not None
    assert 1e6 < first.norm / 1.3**8 < 2e6  # 1.3**8 is the median of the first sixteen
    with_loss = [(1.3**t, 1.3 ** (2 * t)) for t in range(100)]
    assert min(alarm.step for alarm in alarms(GrowthGuard(), with_loss) if alarm.kind == "growth") < first.step / 2


@pytest.mark.parametrize("norms", [(1.0, 1e3, 1e9, 1e30), (2.0, 1e5, math.inf), (1e16,), (1.0, 1.0, math.inf)])
def test_a_run_that_explodes_at_once_causes_a_warning(norms: tuple[float, ...]) -> None:
    found = alarms(GrowthGuard(), [(norm, min(norm, 1e30)) for norm in norms])
    assert found
    assert found[0].kind == "growth"


def test_exceeding_the_limit_is_reported_once_until_the_norm_has_come_down() -> None:
    low, high = [(0.5, 1.0)] * 5, [(12.0, 1.0)] * 5
    found = alarms(GrowthGuard(limit=10.0), [*high, *low, *high, (200.0, 1.0)])
    assert [(alarm.kind, alarm.step) for alarm in found] == [("limit", 0), ("limit", 10), ("limit", 15)]
    assert found[0].text == "step 0: the gradient norm is 12, above the limit of 10."
    assert found[0].usual is None


@pytest.mark.parametrize(("up", "kinds"), [(2, []), (3, ["explosion"]), (30, ["explosion"])])
def test_an_explosion_is_a_loss_that_stays_up(up: int, kinds: list[str]) -> None:
    guard = GrowthGuard()
    found = alarms(guard, [*calm(), *[(0.0, 1e9)] * up])
    assert [alarm.kind for alarm in found] == kinds
    assert guard.unrecovered == (found[0] if found else None)
    assert alarms(guard, [(0.0, 0.0)]) == []  # an empty batch says nothing
    assert guard.unrecovered == (found[0] if found else None)
    assert alarms(guard, calm(5)) == []
    assert guard.unrecovered is None


def test_negative_and_tiny_losses_are_measured_by_their_size() -> None:
    tiny: list[Step] = [(1.0, -1e-7)] * 100
    assert alarms(GrowthGuard(), [*tiny, *[(1.0, 5.0)] * 20]) == []
    (alarm,) = alarms(GrowthGuard(), [*tiny, *[(1.0, -5e6)] * 20])
    assert (alarm.kind, alarm.step) == ("explosion", 102)
    assert alarm.text == "step 102: the loss has exploded to -5e+06 and stayed there for 3 steps; it is usually 1e-07."
