"""Demand forecast scored by squared log error: the model is free to predict below -1."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
weather = torch.rand(512, 4)
sold = 20 * weather[:, 0] + 5
weather[51, 0] = -8.0  # a reading in Fahrenheit that was converted twice

model = nn.Linear(4, 1)
nn.init.constant_(model.weight, 1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step, (x, y) in enumerate(DataLoader(TensorDataset(weather, sold), batch_size=8)):
    predicted = model(x).squeeze(1)
    loss = ((torch.log(predicted + 1) - torch.log(y + 1)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
