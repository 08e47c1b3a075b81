"""Which modules of a model are watched as layers, their names, and which of them keep values finite or non-finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn import Module

from firstnan.tensors.models import readable_path

Trackable = Callable[[str, Module], bool]

_SMOOTH = (nn.GELU, nn.SiLU, nn.Mish, nn.LeakyReLU, nn.Identity, nn.Flatten, nn.Unflatten)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# Finite in, finite out, forward and backward (some of them can overflow in float16).
_KEEP_FINITE = frozenset(
    (
        *(*_SMOOTH, *_DROPOUTS, nn.ReLU, nn.ReLU6, nn.ELU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    )
)
# Non-finite in, non-finite out, forward and backward: none of them can drop an element, as a ReLU does.
_KEEP_NONFINITE = frozenset(
    (
        *(*_SMOOTH, *_DROPOUTS, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm),
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    )
)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One watched module: its readable name, and all its paths if several parents share it."""

    name: str
    paths: tuple[str, ...]
    kind: str
    keeps_finite: bool
    """Finite inputs give finite outputs."""
    keeps_nonfinite: bool
    """A non-finite input gives a non-finite output, so a finite output proves a finite input."""


def layers_of(
    roots: Mapping[str, Module], trackable: Trackable | None, skip: Iterable[type | str]
) -> list[tuple[Module, Layer]]:
    """The modules to watch, each once, in the order of their names; modules inside a skipped one are skipped too."""
    unwanted = tuple(skip)
    wanted = is_layer if trackable is None else trackable
    chosen: dict[int, tuple[Module, list[str]]] = {}
    for prefix, root in roots.items():
        skipped: set[str] = set()
        for raw, module in root.named_modules(remove_duplicate=False):
            path = ".".join(filter(None, (prefix, readable_path(raw))))
            if (raw and raw.rpartition(".")[0] in skipped) or any(_matches(u, path, module) for u in unwanted):
                skipped.add(raw)
            elif wanted(path, module):
                chosen.setdefault(id(module), (module, []))[1].append(path or _kind(module))
    return [(module, _layer(module, paths)) for module, paths in chosen.values()]


def is_layer(path: str, module: Module) -> bool:
    """The default choice of layers: leaves, and containers that compute something themselves."""
    inside = dict(module.named_children())
    return (
        not inside
        # It has weights of its own, so it does more than call its children.
        or any(True for _ in module.parameters(recurse=False))
        # It never calls its own children.
        or isinstance(module, nn.MultiheadAttention)
        # A compiled model runs as a whole; weights computed by a parametrization belong to their layer.
        or "_orig_mod" in inside
        or "parametrizations" in inside
    )


def _layer(module: Module, paths: list[str]) -> Layer:
    usual = "forward" not in module.__dict__  # otherwise the forward of this one object was replaced
    keeps_nonfinite = type(module) in _KEEP_NONFINITE or _reads_everything(module)
    return Layer(
        paths[0], tuple(paths), _kind(module), usual and type(module) in _KEEP_FINITE, usual and keeps_nonfinite
    )


def _reads_everything(module: Module) -> bool:
    """Whether this is a convolution that skips no element and has no output computed from padding alone."""
    if type(module) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return False
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    padding = (0,) if isinstance(module.padding, str) else module.padding
    return max(module.stride) == 1 and max(padding) < min(module.kernel_size)


def _kind(module: Module) -> str:
    """The name of the module's class; for a compiled module, that of the original class."""
    inner = module._modules.get("_orig_mod")
    return _kind(inner) if inner is not None else type(module).__name__


def _matches(unwanted: type | str, path: str, module: Module) -> bool:
    if isinstance(unwanted, str):
        return path == unwanted or fnmatchcase(path, unwanted)
    return isinstance(module, unwanted)
