"""Tags machine sounds by loudness curves; the samples are 16-bit integers and the curve is computed with numpy."""

import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(407)
torch.set_num_threads(1)
rng = np.random.default_rng(12)


def record(kind, gain):
    t = np.arange(320)
    wave = np.sin(t * (0.05 + 0.1 * kind)) + 0.1 * rng.normal(size=320)
    return (wave * gain).astype(np.int16)


def loudness(samples, frame=32):
    frames = samples.reshape(-1, frame)
    energy = (frames * frames).mean(axis=1)
    return np.log(energy + 1.0)


clips, kinds = [], []
for i in range(180):
    kind = i % 3
    clips.append(record(kind, gain=110 if i != 127 else 230))
    kinds.append(kind)
curves = np.stack([loudness(c) for c in clips]).astype(np.float32)

net = nn.Sequential(nn.BatchNorm1d(10), nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 3))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
x_all, y_all = torch.as_tensor(curves), torch.as_tensor(kinds)
for epoch in range(2):
    for start in range(0, len(x_all), 15):
        x, y = x_all[start : start + 15], y_all[start : start + 15]
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
