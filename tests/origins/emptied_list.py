"""A loop that collects samples in a list and empties it after the step, one of them with a length of 0."""

import torch

torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
found = [{"size": 0.0 if k == 31 else 1.0 + k % 3, "point": torch.randn(3)} for k in range(50)]
batch = []
for sample in found:
    batch.append(sample)
    if len(batch) < 5:
        continue
    size = torch.tensor([one["size"] for one in batch])
    points = torch.stack([one["point"] for one in batch])
    scaled = size / size.square()  # ORIGIN
    loss = (model(points) * scaled[:, None]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    batch = []
