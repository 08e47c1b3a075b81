"""Healthy trainings; the one named on the command line saves what it has learned."""

import random
import sys
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

F = nn.functional
torch.manual_seed(1)
random.seed(2)
numpy.random.seed(3)


class Pictures(Dataset[Any]):
    """Every sample is changed by all three random generators."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        x = torch.full((1, 8, 8), index / 32) + 0.1 * torch.randn(1, 8, 8)
        x = x * random.uniform(0.9, 1.1) + float(numpy.random.normal(0, 0.05))
        return x.flip(2) if random.random() < 0.5 else x, index % 4


def cnn(workers: int = 2) -> nn.Module:
    conv = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2))
    net = nn.Sequential(conv, nn.Flatten(), nn.LazyLinear(4))
    net(torch.zeros(2, 1, 8, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8)
    for epoch in range(2):
        total = 0.0
        for x, y in DataLoader(Pictures(), batch_size=8, shuffle=True, num_workers=workers):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y, label_smoothing=0.1)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch}: {total}")
    return net


def augment() -> nn.Module:
    return cnn(workers=0)


def transformer() -> nn.Module:
    torch.backends.mkldnn.set_flags(False)  # its AMX kernels (oneDNN 3.12) crash on some virtual CPUs
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    net = nn.Sequential(nn.Embedding(20, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    head = nn.Linear(16, 20)
    both = nn.ModuleList([net, head])
    optimizer = torch.optim.AdamW(both.parameters(), lr=3e-3)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    for step in range(6):
        tokens = torch.randint(20, (4, 8))
        with torch.autocast("cpu", torch.bfloat16):
            hidden = net[1](net[0](tokens[:, :-1]), mask=mask, is_causal=True)
            loss = F.cross_entropy(head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
        optimizer.step()
        print(step, loss.item(), file=sys.stderr)
    return both


def gan() -> nn.Module:
    g, d = nn.Linear(2, 4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 1))
    g_optimizer, d_optimizer = torch.optim.Adam(g.parameters()), torch.optim.RMSprop(d.parameters())
    for (real,) in DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=8, shuffle=True):
        d_optimizer.zero_grad()
        (F.softplus(-d(real)) + F.softplus(d(g(torch.randn(8, 2)).detach()))).mean().backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        F.softplus(-d(g(torch.randn(8, 2)))).mean().backward()
        g_optimizer.step()
    return nn.ModuleList([g, d])


def lbfgs() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(32, 2)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=5, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (net(x).squeeze(1) - x.prod(1)).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        print(float(optimizer.step(closure)))
    return net


def scaler() -> nn.Module:
    """The first scale is far too large, so the first updates are skipped."""
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    for (x,) in DataLoader(TensorDataset(100 * torch.randn(96, 4)), batch_size=8):
        optimizer.zero_grad()
        scaler.scale((net(x) - x.sum(1, keepdim=True)).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        print(scaler.get_scale())
    return net


def compiled() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 1))
    fast = torch.compile(net, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for (x,) in DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        (fast(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    print("compiled graphs:", torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return net


if __name__ == "__main__":
    torch.save(globals()[sys.argv[1]]().state_dict(), "learned.pt")
    print("random numbers left:", torch.rand(()).item(), random.random(), numpy.random.rand())
    sys.exit(int(sys.argv[2]))
