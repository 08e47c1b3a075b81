"""Handwriting line recogniser: GRU over columns, CTC on the transcript."""
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

ALPHABET = 12  # 0 is the blank


class Lines(Dataset):
    def __init__(self, n=120):
        g = torch.Generator().manual_seed(55)
        self.items = []
        for i in range(n):
            width = int(torch.randint(18, 30, (), generator=g))
            length = int(torch.randint(3, 8, (), generator=g))
            if i == 76:
                width, length = 9, 11  # cut off by the scanner
            text = torch.randint(1, ALPHABET, (length,), generator=g)
            self.items.append((torch.randn(width, 10, generator=g), text))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    columns, texts = zip(*items)
    widths = torch.tensor([len(c) for c in columns])
    lengths = torch.tensor([len(t) for t in texts])
    return pad_sequence(list(columns), batch_first=True), widths, torch.cat(texts), lengths


class Recogniser(nn.Module):
    def __init__(self, d=10, hidden=20):
        super().__init__()
        self.rnn = nn.GRU(d, hidden, batch_first=True, bidirectional=True)
        self.symbols = nn.Linear(2 * hidden, ALPHABET)

    def forward(self, columns):
        h, _ = self.rnn(columns)
        return self.symbols(h).log_softmax(-1).transpose(0, 1)


def main():
    torch.manual_seed(61)
    torch.set_num_threads(1)
    net, ctc = Recogniser(), nn.CTCLoss(blank=0)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    loader = DataLoader(Lines(), batch_size=8, collate_fn=collate)
    for step, (columns, widths, texts, lengths) in enumerate(loader):
        loss = ctc(net(columns), texts, widths, lengths)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step}: ctc {loss.item():.4f}")


if __name__ == "__main__":
    main()
