"""Scalars and a histogram a step in an event file of TensorBoard."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter


def main():
    torch.manual_seed(0)
    writer = SummaryWriter("tb")
    x = torch.rand(160, 4) + 0.5
    x[99] = 0.0
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (batch,) in enumerate(DataLoader(TensorDataset(x), batch_size=8)):
        loss = (model(batch) - batch.sum(1, keepdim=True).log()).pow(2).mean()  # <-
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        writer.add_scalar("loss", loss.item(), step)
    writer.close()


if __name__ == "__main__":
    main()
