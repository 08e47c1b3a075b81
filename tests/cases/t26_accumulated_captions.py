"""Caption model with gradient accumulation: four micro-batches make one update."""
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

VOCAB, PAD = 36, 0


class Captions(Dataset):
    def __init__(self, n=240, length=9):
        g = torch.Generator().manual_seed(48)
        self.image = torch.randn(n, 10, generator=g)
        self.words = torch.randint(1, VOCAB, (n, length), generator=g)
        size = torch.randint(3, length + 1, (n,), generator=g)
        size[135] = 1  # only a start symbol
        self.words[torch.arange(length)[None] >= size[:, None]] = PAD

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.image[i], self.words[i]


class Captioner(nn.Module):
    def __init__(self, d=20):
        super().__init__()
        self.words = nn.Embedding(VOCAB, d, padding_idx=PAD)
        self.start = nn.Linear(10, d)
        self.lstm = nn.LSTM(d, d, batch_first=True)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, image, words):
        h0 = torch.tanh(self.start(image)).unsqueeze(0)
        h, _ = self.lstm(self.words(words), (h0, torch.zeros_like(h0)))
        return self.out(h)


@dataclass
class Accumulator:
    model: nn.Module
    every: int = 4
    losses: list = field(default_factory=list)

    def sentence_loss(self, image, words):
        logits = self.model(image, words[:, :-1])
        target = words[:, 1:]
        keep = target.ne(PAD).float()
        nll = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
        per_sentence = (nll * keep).sum(1) / keep.sum(1)
        return per_sentence.mean()

    def run(self, loader, optimizer):
        for micro, (image, words) in enumerate(loader):
            loss = self.sentence_loss(image, words) / self.every
            loss.backward()
            self.losses.append(loss.item() * self.every)
            if (micro + 1) % self.every == 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
                print(f"update {micro // self.every} loss {sum(self.losses[-self.every:]) / self.every:.4f}")


if __name__ == "__main__":
    torch.manual_seed(7)
    torch.set_num_threads(1)
    net = Captioner()
    Accumulator(net).run(DataLoader(Captions(), batch_size=6), torch.optim.Adam(net.parameters(), lr=4e-3))
