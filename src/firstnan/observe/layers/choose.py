"""Which modules of a model are layers to be watched, what they are called, and what is known of them beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn import Module

from firstnan.tensors.names import readable_path

Trackable = Callable[[str, Module], bool]

_SMOOTH = (nn.GELU, nn.SiLU, nn.Mish, nn.LeakyReLU, nn.Identity, nn.Flatten, nn.Unflatten)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# Finite in, finite out, forward and backward (float16 is too narrow for some of them).
_TAME = frozenset(
    (
        *(*_SMOOTH, *_DROPOUTS, nn.ReLU, nn.ReLU6, nn.ELU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    )
)
# What goes in bad comes out bad, forward and backward: none of them loses an element, as a ReLU can.
_FAITHFUL = frozenset(
    (
        *(*_SMOOTH, *_DROPOUTS, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm),
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    )
)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One watched module: its readable name, and every path that leads to it where several parents share it."""

    name: str
    paths: tuple[str, ...]
    kind: str
    tame: bool
    """It cannot turn finite numbers into anything else."""
    faithful: bool
    """It cannot turn a bad number into finite ones: a finite output proves a finite input."""


def layers_of(
    roots: Mapping[str, Module], trackable: Trackable | None, skip: Iterable[type | str]
) -> list[tuple[Module, Layer]]:
    """The modules to watch, each once, in the order of their names; what is below a skipped one is skipped too."""
    unwanted = tuple(skip)
    wanted = is_layer if trackable is None else trackable
    chosen: dict[int, tuple[Module, list[str]]] = {}
    for prefix, root in roots.items():
        skipped: set[str] = set()
        for raw, module in root.named_modules(remove_duplicate=False):
            path = ".".join(filter(None, (prefix, readable_path(raw))))
            if (raw and raw.rpartition(".")[0] in skipped) or any(_fits(u, path, module) for u in unwanted):
                skipped.add(raw)
            elif wanted(path, module):
                chosen.setdefault(id(module), (module, []))[1].append(path or _kind(module))
    return [(module, _layer(module, paths)) for module, paths in chosen.values()]


def is_layer(path: str, module: Module) -> bool:
    """What counts as one layer when nobody says otherwise: leaves, and containers that compute by themselves."""
    inside = dict(module.named_children())
    return (
        not inside
        # It owns weights, so it does more than call its children.
        or any(True for _ in module.parameters(recurse=False))
        # It never calls its own children.
        or isinstance(module, nn.MultiheadAttention)
        # A compiled model runs as a whole; weights computed by a parametrization belong to their layer.
        or "_orig_mod" in inside
        or "parametrizations" in inside
    )


def _layer(module: Module, paths: list[str]) -> Layer:
    usual = "forward" not in module.__dict__  # else somebody replaced what this one module does
    faithful = type(module) in _FAITHFUL or _reads_everything(module)
    return Layer(paths[0], tuple(paths), _kind(module), usual and type(module) in _TAME, usual and faithful)


def _reads_everything(module: Module) -> bool:
    """A convolution that skips no element, and whose every output depends on at least one."""
    if type(module) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return False
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    padding = (0,) if isinstance(module.padding, str) else module.padding
    return max(module.stride) == 1 and max(padding) < min(module.kernel_size)


def _kind(module: Module) -> str:
    """The name of its class; of a compiled module, that of the class that was compiled."""
    inner = module._modules.get("_orig_mod")
    return _kind(inner) if inner is not None else type(module).__name__


def _fits(unwanted: type | str, path: str, module: Module) -> bool:
    if isinstance(unwanted, str):
        return path == unwanted or fnmatchcase(path, unwanted)
    return isinstance(module, unwanted)
