"""optimizer with eps=0: pixels that are always black never get a gradient, and 0/0 ends up in the weights."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
torch.set_num_threads(1)

digits = torch.rand(256, 10, 10)
digits[:, 0, :] = digits[:, -1, :] = 0.0  # the black border of a scan
labels = (digits[:, 1:5].sum(dim=(1, 2)) > digits[:, 5:9].sum(dim=(1, 2))).long()

model = nn.Sequential(nn.Flatten(), nn.Linear(100, 24), nn.ReLU(), nn.Linear(24, 2))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=0.0)
criterion = nn.CrossEntropyLoss()

for epoch in range(2):
    total = 0.0
    for image, label in DataLoader(TensorDataset(digits, labels), batch_size=32, shuffle=True):
        optimizer.zero_grad()
        loss = criterion(model(image), label)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: loss {total / 8:.4f}")
