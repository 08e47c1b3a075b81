"""Bigram language model in functional style; home-made Adam, softmax sharpened step by step."""
import torch

torch.manual_seed(72)
torch.set_num_threads(1)
TEXT = "the rain in spain stays mainly in the plain and the train to the maine terrain is in vain " * 12
CHARS = sorted(set(TEXT))
CODE = {c: i for i, c in enumerate(CHARS)}
DATA = torch.tensor([CODE[c] for c in TEXT])


def init(v, d=16):
    params = {"embed": torch.randn(v, d), "w": torch.randn(d, d) / d**0.5, "out": torch.randn(d, v) / d**0.5}
    return {k: p.requires_grad_() for k, p in params.items()}


def probabilities(params, prev, temperature):
    h = torch.tanh(params["embed"][prev] @ params["w"])
    scores = h @ params["out"] / temperature
    e = scores.exp()
    return e / e.sum(-1, keepdim=True)


class Adam:
    def __init__(self, params, lr, b1=0.9, b2=0.99, eps=1e-8):
        self.params, self.lr, self.b1, self.b2, self.eps = params, lr, b1, b2, eps
        self.m = {k: torch.zeros_like(p) for k, p in params.items()}
        self.v = {k: torch.zeros_like(p) for k, p in params.items()}
        self.t = 0

    @torch.no_grad()
    def update(self, grads):
        self.t += 1
        for (k, p), g in zip(self.params.items(), grads):
            self.m[k].lerp_(g, 1 - self.b1)
            self.v[k].lerp_(g * g, 1 - self.b2)
            m_hat, v_hat = self.m[k] / (1 - self.b1**self.t), self.v[k] / (1 - self.b2**self.t)
            p -= self.lr * m_hat / (v_hat.sqrt() + self.eps)


params = init(len(CHARS))
adam = Adam(params, lr=5e-3)
g = torch.Generator().manual_seed(4)
temperature = 1.0
for it in range(60):
    at = torch.randint(0, len(DATA) - 1, (40,), generator=g)
    p = probabilities(params, DATA[at], temperature)
    loss = -(p[torch.arange(40), DATA[at + 1]] + 1e-9).log().mean()
    adam.update(torch.autograd.grad(loss, list(params.values())))
    temperature *= 0.92
    if it % 6 == 0:
        print(f"it {it} temperature {temperature:.3f} loss {loss.item():.4f}")
