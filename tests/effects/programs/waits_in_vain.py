"""A thread and a process write what a training thread computes, the main thread waits for its result: all of them for
a last word that comes after the loop."""

import multiprocessing as mp
import queue
import threading

import torch

import firstnan.observe.ending

firstnan.observe.ending.IDLE = 0.5  # to save the test's time


def write(name, rows):
    with open(name, "w") as file:
        while (row := rows.get()) is not None:
            file.write(f"{row[0]} {row[1]}\n")


def train(outputs, result):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(12):
        x = torch.rand(8, 4) + 0.1
        if step == 9:
            x[3] = 0.0
        unit = x / x.norm(dim=1, keepdim=True)  # <-
        loss = (model(unit) - unit).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for rows in outputs:
            rows.put((step, loss.item()))
    result.put(loss.item())


def main():
    in_thread, in_process, result = queue.Queue(), mp.get_context("fork").Queue(), queue.Queue()
    writer = threading.Thread(target=write, args=("thread.txt", in_thread))
    process = mp.get_context("fork").Process(target=write, args=("process.txt", in_process))
    process.start()
    writer.start()
    threading.Thread(target=train, args=([in_thread, in_process], result), daemon=True).start()
    result.get()
    in_thread.put(None)
    in_process.put(None)
    writer.join()
    process.join()


if __name__ == "__main__":
    main()
