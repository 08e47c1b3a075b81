"""A tracker that posts every step over one connection that stays open (http.client)."""

import http.client
import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tracker:
    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)

    def log(self, **values):
        self.connection.request("POST", "/log", json.dumps(values), {"Content-Type": "application/json"})
        self.connection.getresponse().read()


class Calibration(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, power):
        return (10 * torch.log10(power) * self.gain).sum(1)  # <-


def main():
    tracker = Tracker(int(sys.argv[1]))
    torch.manual_seed(0)
    power = torch.rand(180, 4) + 0.01
    power[115, 2] = 0.0  # silence
    decibel = torch.randn(180)
    model = Calibration()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    tracker.log(event="start")
    for step, (x, y) in enumerate(DataLoader(TensorDataset(power, decibel), batch_size=5)):
        loss = nn.functional.l1_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tracker.log(step=step, loss=repr(loss.item()))


main()
