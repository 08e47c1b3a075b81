"""Fits growth rates of a chaotic population model; the rollout gets longer as training goes on."""

import torch

torch.manual_seed(312)
torch.set_num_threads(1)


def rollout(rate, start, years):
    x = start
    track = []
    for _ in range(years):
        x = rate * x * (1.0 - x)
        track.append(x)
    return torch.stack(track)


def curriculum(*stages):
    for years, repeats in stages:
        yield from [years] * repeats


observed_rate = torch.tensor([3.91, 3.87, 3.95])
start = torch.tensor([0.31, 0.42, 0.23])
raw = torch.nn.Parameter(torch.tensor([3.0, 3.2, 3.1]))
opt = torch.optim.Adam([raw], lr=1e-3)
for stage, years in enumerate(curriculum((20, 4), (60, 5), (300, 4))):
    with torch.no_grad():
        observed = rollout(observed_rate, start, years)
    rate = 4.0 * torch.sigmoid(raw)
    simulated = rollout(rate, start, years)
    loss = (simulated[-5:] - observed[-5:]).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"stage {stage:2d} years {years:3d} error {loss.item():.4f} rates {rate.detach().tolist()}")
