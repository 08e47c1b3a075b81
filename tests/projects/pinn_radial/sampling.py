import torch


class Collocation:
    """Points of the unit disc by radius and time; drawn again from time to time."""

    def __init__(self, n, seed, r_min=1e-3):
        self.n = n
        self.r_min = r_min
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, round_number):
        r = torch.rand(self.n, 1, generator=self.generator)
        t = torch.rand(self.n, 1, generator=self.generator)
        if round_number > 0:
            # later rounds put a few points on the axis, where the residual is largest
            r[-4:] = 0.0
        return r.clamp(min=self.r_min), t


def boundary(n):
    t = torch.linspace(0, 1, n).unsqueeze(1)
    return torch.ones_like(t), t


def initial(n):
    r = torch.linspace(0, 1, n).unsqueeze(1)
    return r, torch.zeros_like(r)
