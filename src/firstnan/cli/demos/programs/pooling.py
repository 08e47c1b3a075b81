"""softmax over a fully masked row: attention pooling for a product without reviews."""

import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(2)
torch.set_num_threads(1)
REVIEWS, WIDTH = 6, 12


class AttentionPool(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, items, mask):
        scores = self.score(items).squeeze(-1).masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=1)
        return (weights.unsqueeze(-1) * items).sum(dim=1)


class Rating(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.pool = AttentionPool()
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, items, mask):
        return self.out(self.pool(torch.relu(self.embed(items)), mask)).squeeze(-1)


counts = torch.randint(1, REVIEWS + 1, (240,))
counts[101] = 0
products = [(torch.randn(REVIEWS, WIDTH), torch.arange(REVIEWS) < n, torch.rand(())) for n in counts]
model = Rating()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for step, (items, mask, stars) in enumerate(DataLoader(products, batch_size=20)):
    loss = nn.functional.mse_loss(model(items, mask), stars)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
