"""square root at zero: the loss is finite but its gradient is not, when a pair holds the same picture twice."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
torch.set_num_threads(1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2)
        self.head = nn.Linear(8 * 7 * 7, 16)

    def forward(self, image):
        return self.head(torch.relu(self.conv(image)).flatten(1))


def contrastive_loss(a, b, same, margin=1.0):
    distance = torch.sqrt(((a - b) ** 2).sum(dim=1))
    return torch.where(same, distance, torch.relu(margin - distance)).mean()


left = torch.rand(256, 1, 16, 16)
right = torch.rand(256, 1, 16, 16)
same = torch.rand(256) < 0.5
right[same] = (left[same] + 0.1 * torch.randn(int(same.sum()), 1, 16, 16)).clamp(0, 1)
right[150], same[150] = left[150], True  # a duplicate in the collection

encoder = Encoder()
optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
for step, (a, b, label) in enumerate(DataLoader(TensorDataset(left, right, same), batch_size=16)):
    loss = contrastive_loss(encoder(a), encoder(b), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
