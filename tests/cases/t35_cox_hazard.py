"""Survival analysis: neural Cox model on mini-batches; an assertion guards the loss."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def cox_loss(risk, time, event):
    """Negative partial log-likelihood; the risk set of a patient are all who live at least as long."""
    order = torch.argsort(time, descending=True)
    risk, event = risk[order], event[order]
    hazard = torch.exp(risk)
    log_set = torch.log(torch.cumsum(hazard, 0))
    return -((risk - log_set) * event).sum() / event.sum().clamp(min=1)


class Hazard(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d, 32), nn.Linear(32, 1, bias=False)

    def forward(self, x):
        return self.fc2(torch.nn.functional.elu(self.fc1(x))).squeeze(-1)


def patients(n=288):
    g = torch.Generator().manual_seed(11)
    x = torch.randn(n, 9, generator=g)
    time = -torch.rand(n, generator=g).log() * torch.exp(-x[:, 0])
    event = (torch.rand(n, generator=g) < 0.7).float()
    x[247, 5] = -12000.0  # lab value in another unit
    return TensorDataset(x, time, event)


def main():
    torch.manual_seed(39)
    torch.set_num_threads(1)
    model = Hazard(9)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    for epoch in range(2):
        for batch, (x, time, event) in enumerate(DataLoader(patients(), batch_size=24)):
            loss = cox_loss(model(x), time, event)
            assert torch.isfinite(loss).all(), f"non-finite loss in epoch {epoch}, batch {batch}"
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if batch % 3 == 0:
                print(f"epoch {epoch} batch {batch} partial likelihood {loss.item():.4f}")


if __name__ == "__main__":
    main()
