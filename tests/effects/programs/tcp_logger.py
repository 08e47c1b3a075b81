"""Lines over a TCP connection that is opened once; the data are slices of a tensor, top-level code."""

import socket
import sys

import torch

torch.manual_seed(3)
server = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
variance = torch.rand(200, 1) + 0.05
variance[130] = -0.02  # an estimate below zero
value = torch.randn(200, 1)
net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
opt = torch.optim.RMSprop(net.parameters(), lr=0.01)
server.sendall(b"hello\n")
step = 0
while step * 8 < len(value):
    part = slice(step * 8, (step + 1) * 8)
    sigma = variance[part].sqrt()  # <-
    loss = (((value[part] - net(sigma)) / sigma) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    server.sendall(f"{step} {loss.item()}\n".encode())
    step += 1
server.sendall(b"bye\n")
server.close()
