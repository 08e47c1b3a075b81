"""Two-stage training: warm-up in float32, then the whole model in float16 with a fresh Adam."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(416)
torch.set_num_threads(1)


class Tagger(nn.Module):
    def __init__(self, words=60, tags=5, d=12):
        super().__init__()
        self.words = nn.Embedding(words, d)
        self.mix = nn.Linear(d, d)
        self.tags = nn.Linear(d, tags)

    def forward(self, ids):
        return self.tags(torch.relu(self.mix(self.words(ids))))


def stage(name, model, optimizer, steps, gen):
    for k in range(steps):
        ids = torch.randint(0, 60, (10, 6), generator=gen)
        loss = F.cross_entropy(model(ids).flatten(0, 1).float(), (ids % 5).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{name} {k} {loss.item():.4f}")


model = Tagger()
gen = torch.Generator().manual_seed(20)
stage("warm", model, torch.optim.SGD(model.parameters(), lr=0.3), 9, gen)
model = model.half()
stage("half", model, torch.optim.Adam(model.parameters(), lr=1e-3), 8, gen)
