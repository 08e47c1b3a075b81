"""500 steps that create, replace and delete files, post, and keep a ledger of what the files looked like then."""

import argparse
import json
import os
import urllib.request

import torch

parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
parser.add_argument("--bad", type=int, default=-1, help="the step whose batch has a zero")
args = parser.parse_args()

torch.manual_seed(0)
x = torch.rand(500, 4, 3) + 0.1
if args.bad >= 0:
    x[args.bad, 1] = 0.0
net = torch.nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
ledger = open("ledger.jsonl", "w")
for step in range(500):
    batch = x[step]
    loss = (net(batch) - batch.sum(1, keepdim=True).log()).pow(2).mean()  # <-
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 9:
        name = f"saved-{step:05d}.json"
        with open(name + ".part", "w") as f:
            json.dump({"step": step, "loss": loss.item()}, f)
        os.rename(name + ".part", name)
        seen = os.stat(name)
        print(json.dumps([step, name, seen.st_ino, seen.st_mtime_ns, seen.st_size]), file=ledger, flush=True)
    if step % 50 == 49:
        os.unlink(f"saved-{step - 40:05d}.json")
    if step % 100 == 99:
        body = json.dumps({"step": step}).encode()
        urllib.request.urlopen(f"http://127.0.0.1:{args.port}/", data=body).read()
