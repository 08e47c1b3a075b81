"""Posts a heartbeat before each step and goes on when nobody answers (urllib); random batches without a loader."""

import argparse
import json
import urllib.error
import urllib.request

import torch


def heartbeat(port, step):
    body = json.dumps({"step": step}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/alive", data=body, method="POST")
    try:
        urllib.request.urlopen(request, timeout=5).read()
    except (urllib.error.URLError, OSError):
        pass


def get_batch(x, n=6):
    return x[torch.randint(0, len(x), (n,))]


def energy_loss(net, x):
    return torch.exp(net(x) ** 2).mean()  # <-


p = argparse.ArgumentParser()
p.add_argument("port", type=int)
args = p.parse_args()
torch.manual_seed(5)
x = torch.rand(600, 3)
x[::75] = 60.0  # a few rows in other units
net = torch.nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(60):
    heartbeat(args.port, step)
    loss = energy_loss(net, get_batch(x))
    opt.zero_grad()
    loss.backward()
    opt.step()
