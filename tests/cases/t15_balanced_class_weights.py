"""Rock type classification with class weights computed from each batch."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Subset

ROCKS = ["basalt", "granite", "shale", "gneiss", "obsidian"]


class Samples(Dataset):
    def __init__(self, n=320):
        g = torch.Generator().manual_seed(29)
        p = torch.tensor([0.3, 0.25, 0.2, 0.14, 0.11])
        self.y = torch.multinomial(p, n, replacement=True, generator=g)
        centre = 1.5 * torch.randn(len(ROCKS), 11, generator=g)
        self.x = centre[self.y] + torch.randn(n, 11, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}


def class_weights(y, beta=0.5):
    counts = torch.bincount(y, minlength=len(ROCKS)).float()
    weights = counts.pow(-beta)
    return weights / weights.sum() * len(ROCKS)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(11, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.1))
        self.out = nn.Linear(24, len(ROCKS))

    def forward(self, x):
        return self.out(self.block(x))


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        right = sum((model(b["x"]).argmax(1) == b["y"]).sum().item() for b in loader)
    model.train()
    return right / len(loader.dataset)


def main():
    torch.manual_seed(6)
    torch.set_num_threads(1)
    data = Samples()
    train = DataLoader(Subset(data, range(256)), batch_size=32, shuffle=True)
    held_out = DataLoader(Subset(data, range(256, 320)), batch_size=64)
    model = Classifier()
    opt = torch.optim.NAdam(model.parameters(), lr=2e-3)
    for epoch in range(6):
        for batch in train:
            loss = F.cross_entropy(model(batch["x"]), batch["y"], weight=class_weights(batch["y"]))
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f} accuracy {evaluate(model, held_out):.3f}")


if __name__ == "__main__":
    main()
