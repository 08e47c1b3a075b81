import sys
import time
from collections import defaultdict, deque

import torch


class SmoothedValue:
    """Track a series of values and provide access to smoothed values over a window."""

    def __init__(self, window_size=20):
        self.deque = deque(maxlen=window_size)

    def update(self, value):
        self.deque.append(value)

    @property
    def avg(self):
        return sum(self.deque) / max(len(self.deque), 1)


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(SmoothedValue)

    def update(self, **kwargs):
        for k, v in kwargs.items():
            self.meters[k].update(v.item() if isinstance(v, torch.Tensor) else v)

    def __str__(self):
        return "  ".join(f"{name}: {meter.avg:.4f}" for name, meter in self.meters.items())

    def log_every(self, iterable, print_freq, header):
        start = time.time()
        for i, obj in enumerate(iterable):
            yield obj
            if i % print_freq == 0 or i == len(iterable) - 1:
                print(f"{header} [{i}/{len(iterable)}]  {self}  ({time.time() - start:.2f} s)")


def train_one_epoch(model, optimizer, data_loader, epoch, print_freq=10, warmup_factor=1.0 / 100):
    model.train()
    metric_logger = MetricLogger()
    lr_scheduler = None
    if epoch == 0:
        warmup_iters = min(20, len(data_loader) - 1)
        lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda it: 1.0 if it >= warmup_iters else warmup_factor + (1 - warmup_factor) * it / warmup_iters
        )
    for images, targets in metric_logger.log_every(data_loader, print_freq, f"Epoch: [{epoch}]"):
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        if lr_scheduler is not None:
            lr_scheduler.step()
        metric_logger.update(loss=losses, **loss_dict)
        metric_logger.update(lr=optimizer.param_groups[0]["lr"])
    return metric_logger


@torch.no_grad()
def evaluate(model, data_loader):
    model.eval()
    correct = total = 0
    for images, targets in data_loader:
        logits, _ = model(images)
        found = (logits.argmax(-1) > 0).any(1)
        truth = torch.tensor([len(t["labels"]) > 0 for t in targets])
        correct += int((found == truth).sum())
        total += len(targets)
    print(f"Test: image accuracy {correct / total:.3f}")
    sys.stdout.flush()
