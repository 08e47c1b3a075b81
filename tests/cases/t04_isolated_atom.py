"""Molecule property regression with a small message passing net (index_add_, no graph library)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class MeanConv(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.own = nn.Linear(d_in, d_out)
        self.nbr = nn.Linear(d_in, d_out, bias=False)

    def forward(self, h, src, dst):
        total = torch.zeros_like(h).index_add_(0, dst, h[src])
        degree = torch.zeros(len(h)).index_add_(0, dst, torch.ones(len(dst)))
        return self.own(h) + self.nbr(total / degree[:, None])


class MPNN(nn.Module):
    def __init__(self, d=9, width=24, depth=3):
        super().__init__()
        sizes = [d] + [width] * depth
        self.convs = nn.ModuleList(MeanConv(a, b) for a, b in zip(sizes, sizes[1:]))
        self.readout = nn.Linear(width, 1)

    def forward(self, h, src, dst, mol, count):
        for conv in self.convs:
            h = F.silu(conv(h, src, dst))
        pooled = torch.zeros(count, h.shape[1]).index_add_(0, mol, h)
        return self.readout(pooled).squeeze(-1)


def molecules(batches, per_batch=5):
    """Chains and rings of 3 to 8 atoms, batched into one big graph."""
    g = torch.Generator().manual_seed(64)
    for b in range(batches):
        feats, edges, owner, offset = [], [], [], 0
        for m in range(per_batch):
            n = int(torch.randint(3, 9, (), generator=g))
            ring = torch.rand((), generator=g) < 0.5
            pairs = [(i, i + 1) for i in range(n - 1)] + ([(n - 1, 0)] if ring else [])
            if b == 13 and m == 3:
                pairs = pairs[1:] if not ring else pairs[1:-1]  # a salt: one ion without a bond
            feats.append(torch.randn(n, 9, generator=g))
            edges += [(a + offset, c + offset) for a, c in pairs] + [(c + offset, a + offset) for a, c in pairs]
            owner += [m] * n
            offset += n
        src, dst = torch.tensor(edges).t()
        h = torch.cat(feats)
        mol = torch.tensor(owner)
        target = torch.zeros(per_batch).index_add_(0, mol, h[:, 0])
        yield (h, src, dst, mol, per_batch), target


def main():
    torch.manual_seed(5)
    torch.set_num_threads(1)
    net = MPNN()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for n, (graph, target) in enumerate(molecules(24)):
        loss = F.l1_loss(net(*graph), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"graph batch {n:2d}  mae {loss.item():.4f}")


if __name__ == "__main__":
    main()
