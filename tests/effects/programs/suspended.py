"""The training loop is a generator, or awaits its batches from another task, or goes through an asynchronous stream."""

import asyncio
import sys

import torch

torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)


def batch(step):
    x = torch.rand(8, 4, generator=torch.Generator().manual_seed(step)) + 0.1
    return x * 0 if step == 9 else x


def loss_of(x):
    return (net(x) - x.sum(1, keepdim=True).log()).pow(2).mean()  # <-


def update(loss):
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


def steps():
    for step in range(20):
        x = batch(step)
        loss = loss_of(x)
        yield step, update(loss)


async def produce(queue):
    for step in range(20):
        await queue.put(batch(step))


async def awaits(log):
    queue = asyncio.Queue(2)
    producer = asyncio.create_task(produce(queue))
    for step in range(20):
        x = await queue.get()
        loss = loss_of(x)
        log.write(f"{step} {update(loss)}\n")
        await asyncio.sleep(0)
    await producer


async def stream():
    for step in range(20):
        await asyncio.sleep(0)
        yield step, batch(step)


async def goes_through(log):
    async for step, x in stream():
        loss = loss_of(x)
        log.write(f"{step} {update(loss)}\n")


with open("steps.log", "w") as log:
    if sys.argv[1] == "yields":
        for step, loss in steps():
            log.write(f"{step} {loss}\n")
    else:
        asyncio.run(awaits(log) if sys.argv[1] == "awaits" else goes_through(log))
