"""A recurrence with a gain of 3: over 90 steps the loss stays finite, its gradient does not."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
length = torch.full((512,), 20)
length[40:48] = 90  # the first long recordings
quiet = torch.full((512, 4), 1e-30)

gain = nn.Parameter(torch.full((4,), 3.0))
optimizer = torch.optim.SGD([gain], lr=1e-2)
for step, (x, n) in enumerate(DataLoader(TensorDataset(quiet, length), batch_size=8)):
    state = x
    for _ in range(int(n.max())):
        state = state * gain
    loss = state.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
