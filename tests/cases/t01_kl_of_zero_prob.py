"""Knowledge distillation of a wide teacher into a narrow student, divergence written out in probabilities."""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    seed: int = 101
    batch: int = 20
    lr: float = 2e-3
    temperature: float = 2.0
    classes: int = 7
    epochs: int = 2


def mlp(d_in, width, d_out):
    return nn.Sequential(nn.Linear(d_in, width), nn.ReLU(), nn.Linear(width, d_out))


class Distiller:
    def __init__(self, cfg):
        self.cfg = cfg
        self.teacher = mlp(16, 96, cfg.classes).requires_grad_(False)
        self.student = mlp(16, 24, cfg.classes)
        self.optimizer = torch.optim.Adam(self.student.parameters(), lr=cfg.lr)
        self.seen = 0

    def divergence(self, student_logits, teacher_logits):
        t = self.cfg.temperature
        log_p = F.log_softmax(teacher_logits / t, dim=-1)
        q = F.softmax(student_logits / t, dim=-1)
        log_q = q.log()
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean() * t * t

    def train_step(self, x, y):
        logits = self.student(x)
        with torch.no_grad():
            soft = self.teacher(x)
        loss = 0.3 * F.cross_entropy(logits, y) + 0.7 * self.divergence(logits, soft)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seen += len(x)
        return loss.item()


def spectra(cfg, n=300):
    g = torch.Generator().manual_seed(8)
    x = torch.randn(n, 16, generator=g)
    y = torch.randint(0, cfg.classes, (n,), generator=g)
    x[177] *= 420.0  # recorded in counts, not in volts
    return TensorDataset(x, y)


def run():
    cfg = Config()
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(1)
    distiller = Distiller(cfg)
    loader = DataLoader(spectra(cfg), batch_size=cfg.batch)
    for epoch in range(cfg.epochs):
        for i, (x, y) in enumerate(loader):
            value = distiller.train_step(x, y)
            print(f"epoch {epoch} batch {i} seen {distiller.seen} loss {value:.4f}")


if __name__ == "__main__":
    run()
