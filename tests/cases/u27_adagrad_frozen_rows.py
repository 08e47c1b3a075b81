"""Topic model on top of pretrained word vectors: known rows stay fixed through a gradient hook."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(327)
torch.set_num_threads(1)
KNOWN, NEW = 30, 10


class Topics(nn.Module):
    def __init__(self, d=12, topics=4):
        super().__init__()
        self.words = nn.EmbeddingBag(KNOWN + NEW, d, mode="mean")
        self.out = nn.Linear(d, topics)

    def forward(self, docs):
        return self.out(self.words(docs))


def keep_known_rows(table):
    trainable = torch.cat([torch.zeros(KNOWN, 1), torch.ones(NEW, 1)])
    return table.weight.register_hook(lambda grad: grad * trainable)


def train(model, updates, warmup):
    gen = torch.Generator().manual_seed(109)
    model.words.requires_grad_(False)
    opt = torch.optim.Adagrad(model.parameters(), lr=0.05, eps=0.0)
    for i in range(updates):
        if i == warmup:
            model.words.requires_grad_(True)
            keep_known_rows(model.words)
        docs = torch.randint(0, KNOWN + NEW, (32, 10), generator=gen)
        docs[:, 0] = KNOWN + torch.arange(32) % NEW
        topic = docs[:, 1] % 4
        loss = F.cross_entropy(model(docs), topic)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i % 2 == 0:
            print(f"update {i} loss {loss.item():.4f}")


train(Topics(), updates=16, warmup=5)
