import argparse
import math
import tomllib
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from accel import get_accelerator
from digits import Digits
from vit import ViT


def load_config(path):
    raw = tomllib.loads(Path(path).read_text())
    return SimpleNamespace(**{k: SimpleNamespace(**v) for k, v in raw.items()})


def param_groups(model, lr, decay):
    """Layer-wise learning rates: the deeper a block, the larger its rate."""
    depth = len(model.transformer.layers)
    groups = [{"params": [model.pos_embedding, model.cls_token, *model.to_patch_embedding.parameters()],
               "lr": lr * decay ** depth}]
    for i, layer in enumerate(model.transformer.layers):
        groups.append({"params": list(layer.parameters()), "lr": lr * decay ** (depth - 1 - i)})
    groups.append({"params": [*model.transformer.norm.parameters(), *model.mlp_head.parameters()], "lr": lr})
    return groups


def warmup_cosine(warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, total - warmup)
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return factor


class SoftTargets:
    """One-hot targets with label smoothing and mixup; the smoothing fades out over the epochs."""

    def __init__(self, num_classes, smoothing, mixup, epochs, seed):
        self.num_classes, self.start, self.mixup, self.epochs = num_classes, smoothing, mixup, epochs
        self.smoothing = smoothing
        self.generator = torch.Generator().manual_seed(seed)

    def set_epoch(self, epoch):
        self.smoothing = self.start * (1 - epoch / (self.epochs - 1))

    def __call__(self, images, labels):
        target = F.one_hot(labels, self.num_classes).float()
        target = target * (1 - self.smoothing) + self.smoothing / self.num_classes
        perm = torch.randperm(len(labels), generator=self.generator)
        lam = 1 - self.mixup * torch.rand(1, generator=self.generator).item()
        return lam * images + (1 - lam) * images[perm], lam * target + (1 - lam) * target[perm]


def soft_loss(logits, target):
    """KL divergence to the soft targets, per batch."""
    logp = F.log_softmax(logits, dim=-1)
    return (torch.xlogy(target, target) - target * logp).sum(-1).mean()


@torch.no_grad()
def normalize_gradients(parameters):
    """Every tensor gets a gradient of length 1, so all layers learn at the same pace."""
    for p in parameters:
        if p.grad is not None:
            p.grad.div_(p.grad.norm() + 1e-6)


class Trainer:
    def __init__(self, config):
        torch.manual_seed(config.run.seed)
        self.config = config
        self.accelerator = get_accelerator(config.run.use_accelerate)
        data = Digits(config.data.n_train, config.data.noise, seed=config.run.seed)
        loader = DataLoader(data, config.data.batch_size, shuffle=True,
                            generator=torch.Generator().manual_seed(config.run.seed))
        m = config.model
        model = ViT(image_size=12, patch_size=m.patch_size, num_classes=5, dim=m.dim, depth=m.depth, heads=m.heads,
                    mlp_dim=m.mlp_dim)
        o = config.optim
        optimizer = torch.optim.SGD(param_groups(model, o.lr, o.layer_decay), lr=o.lr, momentum=o.momentum,
                                    weight_decay=o.weight_decay)
        scheduler = LambdaLR(optimizer, warmup_cosine(o.warmup, o.epochs * len(loader)))
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler)
        self.mix = SoftTargets(5, config.loss.smoothing, config.loss.mixup, o.epochs, config.run.seed)

    def train_epoch(self):
        self.model.train()
        total = 0.0
        for images, labels in self.loader:
            images, target = self.mix(images, labels)
            logits = self.model(images)
            loss = soft_loss(logits, target)
            self.optimizer.zero_grad()
            self.accelerator.backward(loss)
            normalize_gradients(self.model.parameters())
            self.optimizer.step()
            self.scheduler.step()
            total += loss.item()
        return total / len(self.loader)

    def fit(self):
        for epoch in range(self.config.optim.epochs):
            self.mix.set_epoch(epoch)
            loss = self.train_epoch()
            self.accelerator.print(f"epoch {epoch}: loss {loss:.4f}, lr {self.scheduler.get_last_lr()[-1]:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default=str(Path(__file__).parent / "config.toml"))
    Trainer(load_config(parser.parse_args().config)).fit()
