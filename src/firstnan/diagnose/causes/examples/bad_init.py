"""An initialiser that multiplies where it should divide: the first forward pass overflows."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(512, 64)
y = torch.randint(0, 3, (512,))


def initialise(layer):
    if isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, std=layer.in_features**5)


model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)], nn.Linear(64, 3))
model.apply(initialise)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step, (inputs, labels) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8)):
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
