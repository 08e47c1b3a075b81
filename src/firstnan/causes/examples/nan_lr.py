"""Polynomial decay of the learning rate: one step too many, and a negative number to the power 0.9."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(512, 4)
y = torch.randint(0, 3, (512,))

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = 8  # the steps of the first experiment
for step, (inputs, labels) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8)):
    optimizer.param_groups[0]["lr"] = float(0.1 * np.float64(1 - step / total) ** 0.9)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
