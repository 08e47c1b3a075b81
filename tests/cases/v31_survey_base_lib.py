"""In-house pieces: a model that looks at how a person differs from their own average answer."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ScoredModel(nn.Module):
    def __init__(self, questions, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(questions, width), nn.Mish(), nn.Linear(width, 1))

    def answered(self, answers):
        centred = answers - answers.mean(dim=1, keepdim=True)
        return centred / centred.norm(dim=1, keepdim=True)

    def forward(self, x):
        return self.layers(x)


def fit(model, loader, epochs, lr=5e-3):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")
