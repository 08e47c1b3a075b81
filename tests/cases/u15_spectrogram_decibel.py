"""Bird call detection on decibel spectrograms that are prepared with numpy."""

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(315)
torch.set_num_threads(1)


def clips(n=150, length=256):
    rng = np.random.default_rng(47)
    t = np.arange(length) / length
    call = rng.random(n) < 0.5
    wave = 0.3 * rng.standard_normal((n, length))
    wave += call[:, None] * np.sin(2 * np.pi * rng.uniform(20, 60, (n, 1)) * t)
    wave[88] = 0.0  # the logger wrote an empty file
    return wave, call


def decibel(wave, frame=32):
    frames = wave.reshape(len(wave), -1, frame)
    power = np.abs(np.fft.rfft(frames, axis=-1)) ** 2
    with np.errstate(divide="ignore"):
        return (10.0 * np.log10(power)).astype(np.float32)


wave, call = clips()
spec = torch.from_numpy(decibel(wave))
label = torch.from_numpy(call).float()
loader = DataLoader(TensorDataset(spec, label), batch_size=15)


class Detector(nn.Sequential):
    def __init__(self, frames=8, bins=17):
        super().__init__(
            nn.Flatten(),
            nn.Linear(frames * bins, 24),
            nn.Tanh(),
            nn.Linear(24, 1),
            nn.Flatten(0),
        )


detector = Detector()
opt = torch.optim.SGD(detector.parameters(), lr=0.01, momentum=0.9, nesterov=True)
for epoch in range(3):
    for x, y in loader:
        loss = nn.functional.binary_cross_entropy_with_logits(detector(0.05 * x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("epoch", epoch, "loss", loss.item())
