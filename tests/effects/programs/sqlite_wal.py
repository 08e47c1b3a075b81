"""Poisson regression over slices of one tensor; rows go to sqlite in WAL mode and are committed every fifth step."""

import sqlite3
from contextlib import closing

import torch


def load():
    g = torch.Generator().manual_seed(5)
    x = torch.randn(256, 5, generator=g)
    x[171] *= -400  # kilometres where the others are metres
    y = torch.poisson(torch.ones(256), generator=g)
    return x, y


def train_epoch(model, opt, x, y, db, batch=8):
    for step, i in enumerate(range(0, len(x), batch)):
        rate = torch.exp(model(x[i : i + batch]).squeeze(1))  # <-
        loss = (rate - y[i : i + batch] * rate.clamp_min(1e-8).log()).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        db.execute("insert into steps(step, loss) values (?, ?)", (step, repr(loss.item())))
        if step % 5 == 4:
            db.commit()


def run():
    torch.manual_seed(2)
    model = torch.nn.Linear(5, 1)
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    with closing(sqlite3.connect("steps.sqlite")) as db:
        db.execute("pragma journal_mode=wal")
        db.execute("create table if not exists steps (step integer, loss text)")
        db.commit()
        try:
            train_epoch(model, opt, *load(), db)
        finally:
            db.commit()


if __name__ == "__main__":
    run()
