"""Drop-in for the few methods of `accelerate.Accelerator` that this repo needs."""
import torch


class LocalAccelerator:
    def __init__(self, gradient_accumulation_steps=1):
        self.device = torch.device("cpu")
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.is_main_process = True

    def prepare(self, *objects):
        out = tuple(self._prepare_one(o) for o in objects)
        return out if len(out) > 1 else out[0]

    def _prepare_one(self, obj):
        if isinstance(obj, torch.nn.Module):
            return obj.to(self.device)
        if isinstance(obj, torch.utils.data.DataLoader):
            return _DeviceLoader(obj, self.device)
        return obj

    def backward(self, loss, **kwargs):
        (loss / self.gradient_accumulation_steps).backward(**kwargs)

    def clip_grad_norm_(self, parameters, max_norm):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def print(self, *args):
        if self.is_main_process:
            print(*args)


class _DeviceLoader:
    def __init__(self, loader, device):
        self.loader, self.device = loader, device

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            yield [t.to(self.device) for t in batch]


def get_accelerator(use_accelerate):
    if use_accelerate:
        from accelerate import Accelerator
        return Accelerator(cpu=True)
    return LocalAccelerator()
