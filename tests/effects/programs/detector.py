"""The same training with a detector inside: three ways to hand it the steps, three places to log them."""

import argparse
import csv
import http.client
import json
import sqlite3
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("policy", choices=["none", "skip", "warn", "raise"])
parser.add_argument("sink", choices=["csv", "sqlite", "http"])
parser.add_argument("--port", type=int)
args = parser.parse_args()

if args.sink == "csv":
    rows = csv.writer(open("rows.csv", "w", newline=""))
elif args.sink == "sqlite":
    db = sqlite3.connect("rows.db")
    db.execute("create table rows (step integer, loss text)")
else:
    connection = http.client.HTTPConnection("127.0.0.1", args.port, timeout=10)


def note(step, loss):
    if args.sink == "csv":
        rows.writerow([step, repr(loss)])
    elif args.sink == "sqlite":
        db.execute("insert into rows values (?, ?)", (step, repr(loss)))
        db.commit()
    else:
        connection.request("POST", "/row", json.dumps({"step": step, "loss": repr(loss)}))
        connection.getresponse().read()


torch.manual_seed(0)
x = torch.rand(200, 4) + 0.1
x[67] = 0.0
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x), batch_size=8)
step = 0


def train_step(batch):
    global step
    loss = (model(batch) - batch.sum(1, keepdim=True).log()).pow(2).mean()  # <-
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    note(step, loss.item())
    step += 1


if args.policy == "none":
    detector = nullcontext()
else:
    from firstnan import NaNDetector

    detector = NaNDetector(model, optimizer, on_nonfinite=args.policy)

with detector:
    if args.policy == "none" or args.sink == "sqlite":
        for (batch,) in loader:
            train_step(batch)
    elif args.sink == "csv":
        for (batch,) in detector.batches(loader):
            train_step(batch)
    else:
        for (batch,) in loader:
            detector.step(train_step, batch)
