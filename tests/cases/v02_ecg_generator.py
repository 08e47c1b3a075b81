"""Heart beat classification; a generator cuts windows out of long recordings and scales them."""

import torch
import torch.nn as nn

torch.manual_seed(402)
torch.set_num_threads(1)
rng = torch.Generator().manual_seed(5)


def recordings():
    for patient in range(14):
        t = torch.arange(600) / 40.0
        rate = 1.0 + 0.1 * patient
        wave = torch.sin(6.28 * rate * t) ** 9 + 0.05 * torch.randn(600, generator=rng)
        if patient == 9:
            wave[240:400] = 1.75  # the electrode came off
        yield patient % 2, wave


def windows(signal, size=60):
    start = 0
    while start + size <= len(signal):
        piece = signal[start : start + size]
        low, high = piece.aminmax()
        yield (piece - low) / (high - low)
        start += size


def stream(batch=10):
    xs, ys = [], []
    for label, signal in recordings():
        for window in windows(signal):
            xs.append(window)
            ys.append(label)
            if len(xs) == batch:
                yield torch.stack(xs).unsqueeze(1), torch.tensor(ys)
                xs, ys = [], []


net = nn.Sequential(
    nn.Conv1d(1, 8, 7, stride=2), nn.GELU(), nn.Conv1d(8, 8, 5, stride=2), nn.GELU(), nn.Flatten(), nn.LazyLinear(2)
)
batches = stream()
net(next(batches)[0])
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
for i, (x, y) in enumerate(batches):
    optimizer.zero_grad(set_to_none=False)
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    print(f"{i:3d} {loss:.4f}")
