"""Models of many shapes, each with one place that fails when told to, and the layer that has to be named for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

SWITCH = torch.zeros(())
"""1 in the step that fails. A tensor, so a scripted module can hold it too."""


def spoil(x: Tensor) -> Tensor:
    """The logarithm of negative numbers in the failing step, otherwise the same numbers."""
    return torch.log(-x.abs() - 1) if SWITCH else x * 1.0


class Spoil(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return spoil(x)


class InfiniteSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.inf if SWITCH else gradient


class SpoilGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return InfiniteSlope.apply(x)


@dataclass
class Case:
    """A model, the layer to name first (`what` of it, in `phase`), and what is done after the detector is attached."""

    model: nn.Module
    layer: str
    what: str = "output"
    phase: str = "forward"
    data: Callable[[], Any] = field(default=lambda: torch.randn(5, 4))
    later: Callable[[], Any] = lambda: None
    run: Callable[[nn.Module, Any], Tensor] = lambda model, x: model(x)


CASES: dict[str, Callable[[], Case]] = {}


def case(function: Callable[[], Case]) -> Callable[[], Case]:
    CASES[function.__name__] = function
    return function


class Calls(nn.Module):
    """A module whose forward is the given function of it."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def images(channels: int = 3, size: int = 8) -> Callable[[], Tensor]:
    return lambda: torch.randn(4, channels, size, size)


def tokens() -> Tensor:
    return torch.randint(0, 20, (3, 6))


def sequences() -> Tensor:
    return torch.randn(3, 6, 8)


# Usual networks.


@case
def mlp() -> Case:
    return Case(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Spoil(), nn.Linear(8, 1)), "2")


@case
def mlp_backward() -> Case:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), SpoilGradient(), nn.Linear(8, 1))
    return Case(model, "2", "input", "backward")


@case
def batch_norm_mlp() -> Case:
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.1), Spoil(), nn.Linear(8, 1)
    return Case(nn.Sequential(*layers), "4")


@case
def single_layer() -> Case:
    return Case(Calls(lambda m, x: spoil(x @ m.weight.weight.T), weight=nn.Linear(4, 2)), "Calls")


@case
def cnn() -> Case:
    conv = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), Spoil(), nn.Flatten(), nn.Linear(54, 2))
    return Case(conv, "3", data=images())


def _residual(m: Any, x: Tensor) -> Tensor:
    out = m.norm2(m.conv2(m.relu(m.norm1(m.conv1(x)))))
    out += x
    return m.relu(out)


def residual(spoiled: bool) -> nn.Module:
    second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), Spoil()) if spoiled else nn.Conv2d(4, 4, 3, padding=1)
    return Calls(
        _residual,
        conv1=nn.Conv2d(4, 4, 3, padding=1),
        norm1=nn.BatchNorm2d(4),
        relu=nn.ReLU(inplace=True),
        conv2=second,
        norm2=nn.BatchNorm2d(4),
    )


@case
def resnet() -> Case:
    body = nn.Sequential(nn.Conv2d(3, 4, 1), residual(False), residual(True), nn.Flatten(), nn.Linear(256, 2))
    return Case(body, "2.conv2.1", data=images())


@case
def dense_net() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = torch.cat([x, layer(x)], 1)
        return m.head(x)

    layers = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(8, 4), Spoil()), nn.Linear(12, 4)])
    return Case(Calls(forward, layers=layers, head=nn.Linear(16, 1)), "layers.1.1")


@case
def inception() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(torch.cat([branch(x) for branch in m.branches], 1).mean((2, 3)))

    branches = nn.ModuleList([nn.Conv2d(3, 2, 1), nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), Spoil())])
    return Case(Calls(forward, branches=branches, head=nn.Linear(4, 1)), "branches.1.1", data=images())


@case
def unet() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        fine = m.down(x)
        return m.mix(torch.cat([fine, m.up(m.middle(m.pool(fine)))], 1))

    model = Calls(
        forward,
        down=nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU()),
        pool=nn.MaxPool2d(2),
        middle=nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), Spoil()),
        up=nn.ConvTranspose2d(4, 4, 2, stride=2),
        mix=nn.Conv2d(8, 1, 1),
    )
    return Case(model, "middle.1", data=images())


@case
def squeeze_excite() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head((x * m.gate(x.mean((2, 3)))[:, :, None, None]).mean((2, 3)))

    gate = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 3), Spoil(), nn.Sigmoid())
    return Case(Calls(forward, gate=gate, head=nn.Linear(3, 1)), "gate.3", data=images())


@case
def dilated_convolutions() -> Case:
    layers = nn.Conv1d(8, 4, 3, dilation=2, padding=2), nn.Tanh(), Spoil(), nn.Conv1d(4, 1, 1)
    return Case(nn.Sequential(*layers), "2", data=lambda: torch.randn(3, 8, 9))


@case
def autoencoder() -> Case:
    model = Calls(
        lambda m, x: m.decoder(m.encoder(x)) - x,
        encoder=nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
        decoder=nn.Sequential(nn.Linear(3, 4), Spoil()),
    )
    return Case(model, "decoder.1")


@case
def variational_autoencoder() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        mean, scale = m.encoder(x).chunk(2, 1)
        return m.decoder(mean + torch.randn_like(mean) * m.scale(scale).exp())

    parts = {"encoder": nn.Linear(4, 6), "scale": Spoil(), "decoder": nn.Linear(3, 4)}
    return Case(Calls(forward, **parts), "scale")


# Sequences.


@case
def lstm() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        out, _ = m.lstm(m.embed(x))
        return m.head(m.spoil(out))

    parts = {"embed": nn.Embedding(20, 8), "lstm": nn.LSTM(8, 6), "spoil": Spoil(), "head": nn.Linear(6, 2)}
    return Case(Calls(forward, **parts), "spoil", data=tokens)


@case
def recurrent_cell() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 5)
        for t in range(x.shape[1]):
            state = m.spoil(m.cell(x[:, t], state))
        return m.head(state)

    return Case(Calls(forward, cell=nn.GRUCell(8, 5), spoil=Spoil(), head=nn.Linear(5, 1)), "spoil", data=sequences)


@case
def embedding_bag() -> Case:
    return Case(nn.Sequential(nn.EmbeddingBag(20, 4), Spoil(), nn.Linear(4, 1)), "1", data=tokens)


@case
def encoder() -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), Spoil(), nn.Linear(8, 1)
    return Case(nn.Sequential(*layers), "1", data=sequences)


@case
def inside_an_encoder_layer() -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 1))
    model[1].layers[1].dropout1 = Spoil()
    return Case(model, "1.layers.1.dropout1", data=sequences)


@case
def encoder_layer_alone() -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.dropout1 = Spoil()
    return Case(layer, "dropout1", data=sequences)


@case
def decoder() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.body(m.target(x), m.spoil(x)))

    body = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1)
    parts = {"target": nn.Linear(8, 8), "spoil": Spoil(), "body": body, "head": nn.Linear(8, 1)}
    return Case(Calls(forward, **parts), "spoil", data=sequences)


@case
def multihead_attention() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.attention(x, x, m.value(x))[0])

    value = nn.Sequential(nn.Linear(8, 8), Spoil())
    parts = {"attention": nn.MultiheadAttention(8, 2, batch_first=True), "value": value, "head": nn.Linear(8, 1)}
    return Case(Calls(forward, **parts), "value.1", data=sequences)


def _block(m: Any, x: Tensor) -> Tensor:
    y = m.norm(x)
    x = x + m.out(torch.softmax(m.q(y) @ m.k(y).transpose(1, 2), -1) @ m.v(y))
    return x + m.mlp(x)


def block(inner: nn.Module) -> nn.Module:
    q, k, v, out = (nn.Linear(8, 8) for _ in range(4))
    mlp = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8), nn.GELU(), inner, nn.Linear(8, 8))
    return Calls(_block, norm=nn.LayerNorm(8), q=q, k=k, v=v, out=out, mlp=mlp)


@case
def gpt() -> Case:
    model = nn.Sequential(nn.Embedding(20, 8), block(nn.Identity()), block(Spoil()), nn.LayerNorm(8), nn.Linear(8, 20))
    return Case(model, "2.mlp.3", data=tokens)


@case
def gpt_backward() -> Case:
    layers = nn.Embedding(20, 8), block(nn.Identity()), block(SpoilGradient()), nn.LayerNorm(8), nn.Linear(8, 20)
    return Case(nn.Sequential(*layers), "2.mlp.3", "input", "backward", data=tokens)


@case
def vision_transformer() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        patches = m.patch(x).flatten(2).transpose(1, 2)
        return m.head(m.body(patches).mean(1))

    body = nn.Sequential(block(nn.Identity()), block(Spoil()))
    return Case(
        Calls(forward, patch=nn.Conv2d(3, 8, 4, stride=4), body=body, head=nn.Linear(8, 2)),
        "body.1.mlp.3",
        data=images(),
    )


@case
def mixer() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = x + m.across(x.transpose(1, 2)).transpose(1, 2)
        return m.head(x + m.along(x))

    along = nn.Sequential(nn.Linear(8, 8), nn.GELU(), Spoil())
    return Case(Calls(forward, across=nn.Linear(6, 6), along=along, head=nn.Linear(8, 1)), "along.2", data=sequences)


# Modules that are used in unusual ways.


@case
def shared_layer() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = m.step(x)
        return m.head(m.spoil(x))

    return Case(Calls(forward, step=nn.Linear(4, 4), spoil=Spoil(), head=nn.Linear(4, 1)), "spoil")


@case
def siamese() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return (m.left(x) - m.right(x.flip(0))).square().sum(1)

    twin = nn.Sequential(nn.Linear(4, 8), nn.GELU(), Spoil(), nn.Linear(8, 3))
    return Case(Calls(forward, left=twin, right=twin), "left.2")


@case
def experts() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        out = m.shared(x)
        for i, expert in enumerate(m.experts):
            chosen = torch.arange(i, len(x), len(m.experts))
            out = out.index_add(0, chosen, expert(x[chosen]))
        return out

    many = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Spoil()), nn.Linear(4, 4)])
    return Case(Calls(forward, shared=nn.Linear(4, 4), experts=many), "experts.1.1")


@case
def many_heads() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.body(x)
        return torch.cat([head(y) for head in m.heads.values()], 1)

    heads = nn.ModuleDict({"a": nn.Linear(8, 1), "b": nn.Sequential(nn.Linear(8, 1), Spoil())})
    return Case(Calls(forward, body=nn.Linear(4, 8), heads=heads), "heads.b.1")


@case
def keywords_and_dicts() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(**m.body(features={"x": m.embed(x)}))["out"]

    body = Calls(lambda m, *, features: {"hidden": spoil(features["x"]), "scale": torch.ones(())})
    head = Calls(lambda m, hidden, scale: {"out": m.fc(hidden) * scale}, fc=nn.Linear(8, 1))
    return Case(Calls(forward, embed=nn.Linear(4, 8), body=body, head=head), "body")


@case
def parts_called_directly() -> Case:
    model = nn.ModuleDict({"a": nn.Linear(4, 8), "spoil": Spoil(), "b": nn.Linear(8, 1)})
    return Case(model, "spoil", run=lambda m, x: m["b"](m["spoil"](m["a"](x))))  # type: ignore[index]


@case
def low_rank_adapter() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.base(x) + m.up(m.down(x)))

    base = nn.Linear(4, 8).requires_grad_(False)
    up = nn.Sequential(nn.Linear(2, 8), Spoil())
    return Case(Calls(forward, base=base, down=nn.Linear(4, 2), up=up, head=nn.Linear(8, 1)), "up.1")


@case
def graph_network() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        source, target = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([1, 2, 3, 4, 0])
        message = m.message(torch.cat([x[source], x[target]], 1))
        return m.head(torch.zeros(5, 8).index_add(0, target, message))

    return Case(Calls(forward, message=nn.Sequential(nn.Linear(8, 8), Spoil()), head=nn.Linear(8, 1)), "message.1")


@case
def lazy_layers() -> Case:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), Spoil(), nn.LazyLinear(1))
    model(torch.randn(5, 4))
    return Case(model, "2")


@case
def complex_numbers() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(torch.fft.irfft(m.filter(torch.fft.rfft(x)), n=4))

    return Case(Calls(forward, filter=Calls(lambda m, x: x * spoil(x.abs())), head=nn.Linear(4, 1)), "filter")


# Containers that compute something themselves.


@case
def container_with_maths() -> Case:
    inner = Calls(lambda m, x: spoil(m.b(m.a(x))), a=nn.Linear(4, 8), b=nn.Linear(8, 8))
    return Case(nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(8, 1)), "1")


@case
def model_with_maths() -> Case:
    return Case(Calls(lambda m, x: spoil(m.b(m.a(x))), a=nn.Linear(4, 8), b=nn.Linear(8, 1)), "Calls")


@case
def container_that_is_given_a_bad_keyword() -> Case:
    inner = Calls(lambda m, *, x, scale: m.a(x) * scale, a=nn.Linear(4, 8))
    model = Calls(lambda m, x: m.b(m.inner(x=x, scale=spoil(torch.ones(())))), inner=inner, b=nn.Linear(8, 1))
    return Case(model, "inner", "input")


@case
def maths_between_layers() -> Case:
    model = Calls(lambda m, x: m.b(spoil(m.a(x))), a=nn.Linear(4, 8), b=nn.Linear(8, 1))
    return Case(model, "b", "input")


# Tensors that are written in place.


@case
def written_between_layers() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.b(m.a(x))
        x.copy_(torch.log(-x.detach().abs() - 1)) if SWITCH else x.mul_(1.0)
        return m.c(x)

    return Case(Calls(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 1)), "c", "input")


@case
def written_through_data() -> Case:
    """Such a write is not counted as a new version of the tensor."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        if SWITCH:
            x.data.fill_(torch.nan)
        return m.b(x)

    return Case(Calls(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 1)), "b", "input")


@case
def buffer_written_in_forward() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        m.last.copy_(x.detach())
        if SWITCH:
            m.last[0] = torch.nan
        return m.b(m.last + x)

    model = Calls(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 1))
    model.register_buffer("last", torch.zeros(5, 8))
    return Case(model, "b", "input")


@case
def weight_written_in_the_step() -> Case:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        if SWITCH:
            model[1].weight.data[0, 0] = torch.nan
        return model(x)

    return Case(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), "1", run=run)


@case
def written_after_the_bad_layer() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.spoil(m.a(x))
        x.add_(1.0)
        return m.c(x)

    return Case(Calls(forward, a=nn.Linear(4, 8), spoil=Spoil(), c=nn.Linear(8, 1)), "spoil")


@case
def residual_written_in_place() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        out = m.norm(m.spoil(m.fc(x)))
        out += x
        return out

    inner = Calls(forward, fc=nn.Linear(8, 8), spoil=Spoil(), norm=nn.LayerNorm(8))
    return Case(nn.Sequential(nn.Linear(4, 8), inner, nn.Linear(8, 1)), "1.spoil")


# Recomputed in backward.


def checkpointed(inner: nn.Module, reentrant: bool) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(checkpoint(m.block, m.embed(x), use_reentrant=reentrant))

    block = nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 8))
    return Calls(forward, embed=nn.Linear(4, 8), block=block, head=nn.Linear(8, 1))


@case
def checkpoint_forward() -> Case:
    return Case(checkpointed(Spoil(), False), "block.1")


@case
def checkpoint_backward() -> Case:
    return Case(checkpointed(SpoilGradient(), False), "block.1", "input", "backward")


@case
def reentrant_checkpoint_backward() -> Case:
    return Case(checkpointed(SpoilGradient(), True), "block.1", "input", "backward")


# Changed after the detector was attached.


@case
def module_set_later() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(m.extra(m.a(x)) if hasattr(m, "extra") else m.a(x))

    model = Calls(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 1))
    return Case(model, "extra.1", later=lambda: setattr(model, "extra", nn.Sequential(nn.Linear(8, 8), Spoil())))


@case
def module_appended_later() -> Case:
    body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    return Case(nn.Sequential(body, nn.Linear(8, 1)), "0.2", later=lambda: body.append(Spoil()))


@case
def module_inserted_later() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = layer(x)
        return x

    layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 1)])
    return Case(Calls(forward, layers=layers), "layers.1", later=lambda: layers.insert(1, Spoil()))


@case
def hook_of_others_later() -> Case:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return Case(model, "2", later=lambda: model[2].register_forward_hook(lambda m, args, out: spoil(out)))


@case
def hook_of_others_in_an_encoder_layer() -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(8, 1))
    return Case(
        model,
        "0.linear1",
        data=sequences,
        later=lambda: layer.linear1.register_forward_hook(lambda m, args, out: spoil(out)),
    )


@case
def hook_of_others_on_an_input_later() -> Case:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return Case(
        model, "2", "input", later=lambda: model[2].register_forward_pre_hook(lambda m, args: (spoil(args[0]),))
    )


# Scripted modules and weights that are computed.


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("switch", SWITCH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        if bool(self.switch > 0):
            return torch.log(-x.abs() - 1)
        return x * 1.0


class ScriptedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), Scripted(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


@case
def scripted_layer() -> Case:
    return Case(nn.Sequential(nn.Linear(4, 8), torch.jit.script(Scripted()), nn.Linear(8, 1)), "1")


@case
def scripted_model() -> Case:
    return Case(torch.jit.script(ScriptedModel()), "ScriptedModel")


@case
def parametrized_weight() -> Case:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    parametrize.register_parametrization(model[1], "weight", Spoil())
    return Case(model, "1.parametrizations.weight.0")


@case
def layer_after_weight_norm() -> Case:
    return Case(nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), Spoil(), nn.Linear(8, 1)), "1")
