"""Sentence length-aware sentiment with packed sequences; ends through sys.exit(0)."""

import sys

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader


def reviews(n=160):
    gen = torch.Generator().manual_seed(181)
    out = []
    for _ in range(n):
        words = torch.randint(1, 30, (int(torch.randint(1, 11, (1,), generator=gen)),), generator=gen)
        out.append((words, float((words > 15).float().mean() > 0.5)))
    return out


def collate(items):
    words, mood = zip(*items, strict=True)
    return pad_sequence(words, batch_first=True), torch.tensor([len(w) for w in words]), torch.tensor(mood)


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 10, padding_idx=0)
        self.lstm = nn.LSTM(10, 12, num_layers=2, batch_first=True, dropout=0.2)
        self.out = nn.Linear(12, 1)

    def forward(self, words, length):
        packed = pack_padded_sequence(self.emb(words), length, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, padding_value=float("-inf"))
        return self.out(h.amax(1)).squeeze(1)


def main():
    torch.manual_seed(354)
    torch.set_num_threads(1)
    net = Sentiment()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    for epoch in range(3):
        for words, length, mood in DataLoader(reviews(), batch_size=16, shuffle=True, collate_fn=collate):
            loss = nn.functional.binary_cross_entropy_with_logits(net(words, length), mood)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")
    return 0


sys.exit(main())
