"""Speaker identification with mean and deviation pooling over frames."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(301)
torch.set_num_threads(1)


class Utterances(Dataset):
    def __init__(self, count=240, speakers=5):
        gen = torch.Generator().manual_seed(11)
        voices = torch.randn(speakers, 12, generator=gen)
        self.items = []
        for n in range(count):
            who = int(torch.randint(0, speakers, (1,), generator=gen))
            frames = int(torch.randint(8, 20, (1,), generator=gen))
            feats = voices[who] + 0.6 * torch.randn(frames, 12, generator=gen)
            if n == 151:
                feats = torch.zeros(frames, 12)  # muted microphone
            self.items.append({"feats": feats, "speaker": who})

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def crop_collate(items, frames=8):
    return {
        "feats": torch.stack([it["feats"][:frames] for it in items]),
        "speaker": torch.tensor([it["speaker"] for it in items]),
    }


class StatsPool(nn.Module):
    def forward(self, h):
        mean = h.mean(dim=1)
        spread = h.var(dim=1, unbiased=False).sqrt()
        return torch.cat([mean, spread], dim=-1)


class SpeakerNet(nn.Module):
    def __init__(self, speakers=5):
        super().__init__()
        self.frame = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 16))
        self.pool = StatsPool()
        self.classify = nn.Linear(32, speakers)

    def forward(self, batch):
        return self.classify(self.pool(self.frame(batch["feats"])))


class Trainer:
    def __init__(self, net, data):
        self.net = net
        self.loader = DataLoader(data, batch_size=20, collate_fn=crop_collate)
        self.opt = torch.optim.Adam(net.parameters(), lr=2e-3)
        self.seen = 0

    def fit(self, epochs):
        for epoch in range(epochs):
            for batch in self.loader:
                loss = nn.functional.cross_entropy(self.net(batch), batch["speaker"])
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                self.opt.step()
                self.seen += 1
            print(f"epoch {epoch}: {self.seen} updates, loss {loss.item():.4f}")


Trainer(SpeakerNet(), Utterances()).fit(epochs=2)
