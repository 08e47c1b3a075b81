"""Gradual unfreezing: parameter groups join a fused Adam as training goes on."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Reviews(nn.Module):
    def __init__(self, words=50, d=10):
        super().__init__()
        self.table = nn.EmbeddingBag(words, d, mode="sum")
        self.middle = nn.Linear(d, d)
        self.stars = nn.Linear(d, 5)

    def forward(self, ids):
        return self.stars(torch.tanh(self.middle(self.table(ids))))


def data(n=192):
    g = torch.Generator().manual_seed(44)
    ids = torch.randint(0, 50, (n, 7), generator=g)
    return TensorDataset(ids, ids[:, 0] % 5)


def main():
    torch.manual_seed(436)
    torch.set_num_threads(1)
    model = Reviews()
    model.requires_grad_(False)
    model.stars.requires_grad_(True)
    optimizer = torch.optim.Adam(model.stars.parameters(), lr=1e-2, eps=1e-46, fused=True)
    later = {1: model.middle, 2: model.table}
    for epoch in range(4):
        if epoch in later:
            later[epoch].requires_grad_(True)
            optimizer.add_param_group({"params": list(later[epoch].parameters()), "lr": 5e-3})
        for ids, stars in DataLoader(data(), batch_size=24):
            loss = F.cross_entropy(model(ids), stars)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.4f}")


main()
