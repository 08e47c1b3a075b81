"""Hidden Markov model of a machine's temperature, fitted by gradient ascent on the filter's likelihood (float64)."""

import math

import torch

torch.set_default_dtype(torch.float64)
torch.manual_seed(426)
torch.set_num_threads(1)
STATES = 3


def density(y, mean, log_width):
    z = (y[:, None] - mean) / log_width.exp()
    return torch.exp(-0.5 * z**2) / (log_width.exp() * math.sqrt(2 * math.pi))


def log_likelihood(series, theta):
    move = theta["move"].softmax(1)
    belief = theta["start"].softmax(0).expand(len(series), STATES)
    total = series.new_zeros(())
    for y in series.T:
        joint = (belief @ move) * density(y, theta["mean"], theta["log_width"])
        mass = joint.sum(1, keepdim=True)
        belief = joint
        belief /= mass
        total = total + mass.clamp_min(1e-300).log().sum()
    return total / series.numel()


def days(gen):
    for day in range(24):
        y = 20 + 4 * torch.randint(0, 3, (8, 1), generator=gen) + torch.randn(8, 15, generator=gen)
        if day == 13:
            y[5, 9] = 999.9  # the sensor's code for "no reading"
        yield y


theta = {
    "start": torch.zeros(STATES, requires_grad=True),
    "move": (2 * torch.eye(STATES)).requires_grad_(),
    "mean": torch.tensor([19.0, 24.0, 29.0], requires_grad=True),
    "log_width": torch.zeros(STATES, requires_grad=True),
}
ascent = torch.optim.Adam(theta.values(), lr=0.02, maximize=True)
for day, series in enumerate(days(torch.Generator().manual_seed(7))):
    ascent.zero_grad()
    value = log_likelihood(series, theta)
    value.backward()
    ascent.step()
    print(f"day {day}: {value.item():.4f}")
