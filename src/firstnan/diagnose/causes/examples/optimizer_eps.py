"""RMSprop with eps=0: a weight that has never had a gradient is updated by 0/0."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(512, 4)
x[:, 3] = 0.0  # a column that is not filled in
y = x[:, 0] - x[:, 1]

model = nn.Linear(4, 1)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=0.0)
for step, (inputs, target) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8)):
    loss = ((model(inputs).squeeze(1) - target) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
