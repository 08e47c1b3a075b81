"""A table that a generator makes before the first step, of which a later step reads the bad rows, in windows."""

import numpy as np
import torch

rng = np.random.default_rng(0)
torch.manual_seed(0)


def humidity(day):
    return 0.0 if day == 44 else rng.uniform(1, 100)


def dryness(day):
    level = np.log(humidity(day) / 100)  # ORIGIN
    return level * day


def windows():
    table = np.array([[rng.normal(), dryness(day)] for day in range(80)], dtype=np.float32)
    for start in range(77):
        yield table[start : start + 3]


def batches():
    kept = []
    for window in windows():
        kept.append(window)
        if len(kept) == 5:
            yield torch.from_numpy(np.stack(kept))
            kept.clear()


model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
with np.errstate(all="ignore"):
    for x in batches():
        loss = model(x.flatten(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
