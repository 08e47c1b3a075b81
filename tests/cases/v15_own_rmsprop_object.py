"""Policy distillation with a plain-Python optimizer object (no torch.optim anywhere)."""

import torch
from torch import nn


class RMS:
    """Keeps a running mean square for each tensor; tensors without a gradient are left alone."""

    def __init__(self, tensors, rate=2e-3, keep=0.9):
        self.tensors = list(tensors)
        self.rate, self.keep = rate, keep
        self.square = [torch.zeros_like(t) for t in self.tensors]

    def zero(self):
        for t in self.tensors:
            t.grad = None

    def update(self):
        with torch.no_grad():
            for t, s in zip(self.tensors, self.square, strict=True):
                if t.grad is None:
                    continue
                s.mul_(self.keep).addcmul_(t.grad, t.grad, value=1 - self.keep)
                t.addcdiv_(t.grad, s.sqrt(), value=-self.rate)


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 20)
        self.play = nn.Linear(20, 4)
        self.bonus = nn.Linear(20, 4)

    def forward(self, state, bonus):
        h = torch.tanh(self.body(state))
        logits = self.play(h)
        if bonus.any():
            logits = logits + torch.relu(self.bonus(h) - 0.7) * bonus[:, None]
        return logits


torch.manual_seed(415)
torch.set_num_threads(1)
teacher = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).requires_grad_(False)
student = Student()
rule = RMS(student.parameters())
g = torch.Generator().manual_seed(9)
for round_ in range(30):
    state = torch.randn(24, 8, generator=g)
    bonus = (torch.rand(24, generator=g) < 0.008).float()
    target = teacher(state).softmax(1)
    loss = nn.functional.kl_div(student(state, bonus).log_softmax(1), target, reduction="batchmean")
    rule.zero()
    loss.backward()
    rule.update()
    if round_ % 5 == 0:
        print(f"round {round_} divergence {loss.item():.4f}")
