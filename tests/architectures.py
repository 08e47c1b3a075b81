"""Small models of the shapes that people train, each with a loss of one batch, and faults to put into one layer."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Training:
    """Models by the prefix of their names (empty for a single one), and the loss of one batch."""

    roots: dict[str, nn.Module]
    loss: Callable[[], Tensor]

    def layer(self, name: str) -> nn.Module:
        for prefix, root in self.roots.items():
            for path, module in root.named_modules():
                if ".".join(filter(None, (prefix, path))) == name:
                    return module
        raise KeyError(name)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x
        return self.relu(out)


def cnn() -> Training:
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), Residual(6), Residual(6), nn.Dropout(0.1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
    )
    x = torch.randn(4, 3, 8, 8)
    return Training({"": model}, lambda: model(x).square().mean())


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(20, 8), nn.LSTM(8, 6, num_layers=2, batch_first=True, dropout=0.1)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        out, (state, _) = self.lstm(self.embed(tokens))
        return self.head(self.norm(out)) + state.mean()


def lstm() -> Training:
    model, tokens = Tagger(), torch.randint(0, 20, (3, 7))
    return Training({"": model}, lambda: model(tokens).square().mean())


def encoder() -> Training:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True, activation="gelu")
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    # The program calls the parts; the whole is never called.
    model = nn.ModuleDict({"embed": nn.Linear(5, 8), "body": body, "head": nn.Linear(8, 3)})
    x, mask = torch.randn(3, 6, 5), nn.Transformer.generate_square_subsequent_mask(6)
    return Training({"": model}, lambda: model["head"](model["body"](model["embed"](x), mask)).square().mean())


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(5, 8), nn.Linear(4, 8)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.1, batch_first=True), 2)
        self.head = nn.Linear(8, 3)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.decoder(self.target(target), self.source(source), tgt_mask=mask))


def decoder() -> Training:
    model, source, target = Translator(), torch.randn(3, 6, 5), torch.randn(3, 5, 4)
    return Training({"": model}, lambda: model(source, target).square().mean())


class Attention(nn.Module):
    """Three layers read the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights = torch.softmax(self.q(y) @ self.k(y).transpose(1, 2), -1)
        return x + self.out(weights @ self.v(y))


def attention() -> Training:
    model = nn.Sequential(nn.Linear(5, 8), Attention(), Attention(), nn.Linear(8, 2))
    x = torch.randn(3, 6, 5)
    return Training({"": model}, lambda: model(x).square().mean())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.pool = nn.MaxPool2d(2)
        self.down2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.mix = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.LeakyReLU(), nn.Conv2d(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        return self.mix(torch.cat([fine, self.up(self.down2(self.pool(fine)))], 1))


def unet() -> Training:
    model, x = UNet(), torch.randn(2, 2, 8, 8)
    return Training({"": model}, lambda: model(x).square().mean())


def gan() -> Training:
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid())
    noise = torch.randn(5, 4)
    return Training(
        {"generator": generator, "discriminator": discriminator},
        lambda: -torch.log(discriminator(generator(noise)) + 0.1).mean(),
    )


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
        self.right = self.left

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.left(a) - self.right(b)).square().sum(-1)


def siamese() -> Training:
    model, a, b = Siamese(), torch.randn(5, 4), torch.randn(5, 4)
    return Training({"": model}, lambda: model(a, b).mean())


class Experts(nn.Module):
    """Every token goes to one expert, and all tokens through one that is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Linear(5, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3))
        self.shared = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        weights = torch.softmax(self.router(x), -1)
        choice = torch.arange(len(x)) % 3
        out = self.shared(x)
        for i, expert in enumerate(self.experts):
            chosen = (choice == i).nonzero()[:, 0]
            out = out.index_add(0, chosen, expert(x[chosen]) * weights[chosen, i : i + 1])
        return out


def experts() -> Training:
    model, x = Experts(), torch.randn(7, 5)
    return Training({"": model}, lambda: model(x).square().mean())


class Stack(nn.Module):
    """Parallel heads in a list, all fed with one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(7))
        self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.stack([head(x) for head in self.heads])


def module_list() -> Training:
    model, x = Stack(), torch.randn(4, 6)
    return Training({"": model}, lambda: model(x).square().mean())


@dataclass
class Features:
    hidden: Tensor
    extra: dict[str, list[Tensor]]


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6) / 4)

    def forward(self, *, batch: dict[str, Tensor]) -> Features:
        hidden = batch["x"] @ self.weight
        return Features(hidden, {"pair": [hidden * 2, hidden.relu()]})


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 2) / 4)

    def forward(self, features: Features, *, scale: Tensor) -> dict[str, Tensor]:
        first, second = features.extra["pair"]
        return {"logits": (features.hidden + first + second) @ self.weight * scale, "count": torch.tensor(3)}


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.backbone, self.head = nn.Linear(4, 5), Backbone(), Head()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.head(self.backbone(batch={"x": self.embed(x)}), scale=torch.ones(2))


def structured() -> Training:
    model, x = Structured(), torch.randn(3, 4)
    return Training({"": model}, lambda: model(x)["logits"].square().mean())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.SiLU()) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def checkpointed(reentrant: bool) -> Training:
    model, x = Checkpointed(reentrant), torch.randn(5, 4)
    return Training({"": model}, lambda: model(x).square().mean())


ARCHITECTURES: dict[str, Callable[[], Training]] = {
    "cnn": cnn,
    "lstm": lstm,
    "encoder": encoder,
    "decoder": decoder,
    "attention": attention,
    "unet": unet,
    "gan": gan,
    "siamese": siamese,
    "experts": experts,
    "module_list": module_list,
    "structured": structured,
    "checkpoint": lambda: checkpointed(False),
    "checkpoint_reentrant": lambda: checkpointed(True),
}


class InfiniteGradient(torch.autograd.Function):
    """Hands its input on; one element of the gradient becomes infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        gradient.view(-1)[0] = torch.inf
        return gradient


def replace_first(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure, with the first floating tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)([replace_first(value[0], change), *value[1:]])
    if isinstance(value, dict):
        key = next(iter(value))
        return value | {key: replace_first(value[key], change)}
    assert isinstance(value, Features)
    return Features(change(value.hidden), value.extra)


def break_forward(module: nn.Module) -> None:
    """One element of what it makes becomes the logarithm of a negative number."""

    def spoil(x: Tensor) -> Tensor:
        first = torch.zeros(x.numel(), dtype=torch.bool)
        first[0] = True
        return torch.where(first.view(x.shape), torch.log(-x.abs() - 1), x)

    forward = module.forward
    module.forward = types.MethodType(lambda self, *a, **k: replace_first(forward(*a, **k), spoil), module)


def break_backward(module: nn.Module) -> None:
    """One element of the gradient of its first input becomes infinite; what it computes stays the same."""
    forward = module.forward

    def broken(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if args:
            return forward(replace_first(args[0], InfiniteGradient.apply), *args[1:], **kwargs)
        return forward(**replace_first(kwargs, InfiniteGradient.apply))

    module.forward = types.MethodType(broken, module)


def faithful(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.LayerNorm | nn.GroupNorm | nn.BatchNorm2d | nn.Conv2d)
