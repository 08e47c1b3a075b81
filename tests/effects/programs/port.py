"""A training that listens on a port from its start, for whoever wants to know how far it is; slices of a tensor."""

import socket
import sys
import threading

import torch


class Status:
    def __init__(self, port):
        self.step = -1
        self.server = socket.socket()
        self.server.bind(("127.0.0.1", port))
        self.server.listen()
        threading.Thread(target=self.answer, daemon=True).start()

    def answer(self):
        while True:
            client, _ = self.server.accept()
            with client:
                client.sendall(f"{self.step}\n".encode())


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(3, 1)

    def forward(self, returns):
        return self.lin(torch.log1p(returns))  # <-


def main(port):
    status = Status(port)
    torch.manual_seed(0)
    returns = torch.rand(150, 3) - 0.5
    returns[83, 1] = -1.0  # a company that went bankrupt
    wanted = returns.sum(1, keepdim=True)
    model = Model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with open("status.log", "w") as log:
        for start in range(0, 150, 6):
            opt.zero_grad()
            loss = (model(returns[start : start + 6]) - wanted[start : start + 6]).abs().mean()
            loss.backward()
            opt.step()
            status.step += 1
            print(status.step, loss.item(), file=log, flush=True)


main(int(sys.argv[1]))
