"""Which modules of a model are watched as layers, their names, and which of them keep values finite or non-finite."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.jit import ScriptModule
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
_NO_MATHS = (nn.Sequential.forward, Module.forward)


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
    is_container: bool = False
    """It calls other layers: it is named only for what it computes itself from their results."""


@dataclass(slots=True)
class Choice:
    """The modules of some models: those to watch, and the paths of all."""

    layers: list[tuple[Module, Layer]]
    """Each module once, in the order of their names."""
    paths: dict[int, tuple[weakref.ref[Module], str | None]]
    """Id of a module -> the module and its path; the path of a skipped one is None."""


def layers_of(roots: Mapping[str, Module], trackable: Trackable | None, skip: Iterable[type | str]) -> Choice:
    """The modules to watch; modules inside a skipped one are skipped too."""
    unwanted = tuple(skip)
    chosen: dict[int, tuple[Module, list[str]]] = {}
    choice = Choice([], {})
    for prefix, root in roots.items():
        skipped: set[str] = set()
        inside: set[str] = set()
        for raw, module in root.named_modules(remove_duplicate=False):
            path = ".".join(filter(None, (prefix, readable_path(raw))))
            parent = raw.rpartition(".")[0]
            if (raw and parent in skipped) or any(_matches(u, path, module) for u in unwanted):
                skipped.add(raw)
            elif raw and parent in inside:
                inside.add(raw)
            else:
                if isinstance(module, ScriptModule):  # it calls its parts without Python, so nobody can see them
                    inside.add(raw)
                if trackable(path, module) if trackable is not None else computes(module):
                    chosen.setdefault(id(module), (module, []))[1].append(path or _kind(module))
            choice.paths.setdefault(id(module), (weakref.ref(module), None if raw in skipped else path))
    choice.layers = [
        (module, _layer(module, paths, trackable is None and not is_layer(module))) for module, paths in chosen.values()
    ]
    return choice


def computes(module: Module) -> bool:
    """The default choice: everything but containers that only call their children, one after the other."""
    return is_layer(module) or type(module).forward not in _NO_MATHS


def is_layer(module: Module) -> bool:
    """Whether this is a layer as a whole, not a container of layers."""
    inside = module._modules
    return (
        not inside
        or isinstance(module, ScriptModule)
        # It has weights of its own, so it does more than call its children.
        or any(True for _ in module.parameters(recurse=False))
        # It never calls its own children.
        or isinstance(module, nn.MultiheadAttention)
        # A compiled model runs as a whole; weights computed by a parametrization belong to their layer.
        or "_orig_mod" in inside
        or "parametrizations" in inside
    )


def _layer(module: Module, paths: list[str], is_container: bool) -> Layer:
    usual = "forward" not in module.__dict__  # otherwise the forward of this one object was replaced
    keeps_nonfinite = type(module) in _KEEP_NONFINITE or _reads_everything(module)
    return Layer(
        paths[0],
        tuple(paths),
        _kind(module),
        usual and type(module) in _KEEP_FINITE,
        usual and keeps_nonfinite,
        is_container,
    )


def _reads_everything(module: Module) -> bool:
    """Whether this is a convolution that skips no element and has no output computed from padding alone."""
    if type(module) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return False
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    padding = (0,) if isinstance(module.padding, str) else module.padding
    return max(module.stride) == 1 and max(padding) < min(module.kernel_size)


def _kind(module: Module) -> str:
    """The name of the module's class; for a compiled or scripted module, that of the original class."""
    if isinstance(module, ScriptModule):
        return str(getattr(module, "original_name", type(module).__name__))
    inner = module._modules.get("_orig_mod")
    return _kind(inner) if inner is not None else type(module).__name__


def _matches(unwanted: type | str, path: str, module: Module) -> bool:
    if isinstance(unwanted, str):
        return path == unwanted or fnmatchcase(path, unwanted)
    return isinstance(module, unwanted)
