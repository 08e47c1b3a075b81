"""The models and optimizers of a program: found without its help, their tensors' names, and which updates are safe."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakIdKeyDictionary

from firstnan.tensors.finite import is_finite, is_plain, norms, plain_norm, readable
from firstnan.tensors.live_objects import find_live_objects

# Prefixes that wrappers (compile, data parallel, checkpointing) add to every name.
_WRAPPERS = ("_orig_mod", "module", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

IN_COPY, FROZEN = "(in a copy of the model that is not trained)", "(frozen)"

Parts = Mapping[int, tuple[Module, str]]
"""Id of a module -> the module and its path in the model that it is part of."""


class Slot:
    """A named buffer of a module; the tensor in it may be replaced."""

    __slots__ = ("label", "module", "name")

    def __init__(self, module: Module, name: str, label: str) -> None:
        self.module, self.name, self.label = weakref.ref(module), name, label

    def tensor(self) -> Tensor | None:
        module = self.module()
        if module is None:
            return None
        if isinstance(module._buffers, dict):
            return module._buffers.get(self.name)
        # A scripted module has a wrapper that can do less.
        return module._buffers[self.name] if self.name in module._buffers else None  # noqa: SIM401

    def holder(self) -> dict[str, Any] | None:
        """The dict in which the module holds it, if it is an ordinary one."""
        module = self.module()
        return module._buffers if module is not None and isinstance(module._buffers, dict) else None

    @property
    def is_running_statistic(self) -> bool:
        """Whether it is the mean or the variance of a batch norm, which are never infinite on purpose."""
        return self.name in ("running_mean", "running_var") and isinstance(self.module(), _NormBase)

    def restore(self, old: Tensor, value: Tensor) -> None:
        """Puts the former tensor back into the module, with its former values."""
        module = self.module()
        if module is not None:
            old.data.copy_(value)
            if isinstance(module._buffers, dict):
                module._buffers[self.name] = old

    def put(self, tensor: Tensor | None) -> None:
        """Puts this tensor into the module, in the place of the one that is there."""
        module = self.module()
        if module is not None and self.name in module._buffers and isinstance(module._buffers, dict):
            module._buffers[self.name] = tensor


class Models:
    """The names of all parameters and buffers of the given models, or of every model in this process."""

    def __init__(self, roots: Mapping[str, Module] | None = None) -> None:
        self.parameters: dict[int, tuple[Tensor, str]] = {}
        self.buffers: dict[int, tuple[Tensor, str]] = {}
        self.slots: list[Slot] = []
        self._roots: list[weakref.ref[Any]] = []
        self.copied: list[Tensor] = []
        """The parameters of copies of a trained model, such as an average of its weights; see `tell_apart`."""
        for prefix, root in outermost_modules() if roots is None else roots.items():
            self._collect(root, prefix)

    def _collect(self, root: Any, prefix: str) -> None:
        self._roots.append(weakref.ref(root))
        for name, parameter in root.named_parameters(prefix, remove_duplicate=False):
            self.parameters.setdefault(id(parameter), (parameter, readable_path(name)))
        for name, buffer in root.named_buffers(prefix, remove_duplicate=False):
            self.buffers.setdefault(id(buffer), (buffer, readable_path(name)))
        for path, module in root.named_modules(prefix=prefix):
            for name in module._buffers.keys():  # noqa: SIM118  # a scripted module's wrapper has no iterator
                self.slots.append(Slot(module, name, readable_path(f"{path}.{name}" if path else name)))

    def tell_apart(self, trained: set[int]) -> None:
        """Says of the parameters that are not among the trained ones (by id) what they are: a copy's, or frozen."""
        self.copied = []
        named = {name: None for key, (_, name) in self.parameters.items() if key in trained}
        for root in [one for ref in self._roots if (one := ref()) is not None]:
            own = [id(p) for p in root.parameters() if id(p) in self.parameters]
            is_copy = not any(key in trained for key in own)
            for key in own if named else ():
                parameter, name = self.parameters[key]
                if is_copy and name in named:
                    self.parameters[key] = (parameter, f"{name} {IN_COPY}")
                    self.copied.append(parameter)
                elif not is_copy and key not in trained and not parameter.requires_grad and FROZEN not in name:
                    self.parameters[key] = (parameter, f"{name} {FROZEN}")

    def parts(self) -> Parts:
        """Every submodule of these models."""
        found: dict[int, tuple[Module, str]] = {}
        for root in [one for ref in self._roots if (one := ref()) is not None]:  # some raise when tested for truth
            for path, module in root.named_modules():
                if path:
                    found.setdefault(id(module), (module, readable_path(path)))
        return found

    def name(self, tensor: Tensor) -> str:
        """The name of a parameter or buffer, or of the parameter whose gradient this is; empty if unknown."""
        for table in (self.parameters, self.buffers):
            if id(tensor) in table:
                return table[id(tensor)][1]
        for parameter, name in self.parameters.values():
            if parameter.grad is tensor:
                return name
        return ""


def outermost_modules() -> list[tuple[str, Any]]:
    """Every module of this process that is not inside another one, each with an empty name prefix."""
    modules = [module for module in find_live_objects(Module) if "_modules" in module.__dict__]
    inner = {id(child) for m in modules for child in m._modules.values() if child is not None}
    return [("", m) for m in modules if id(m) not in inner and (m._modules or m._parameters or m._buffers)]


def readable_path(name: str) -> str:
    """`_orig_mod.module.encoder.0` -> `encoder.0`: the path without the parts that wrappers add."""
    parts = name.split(".")
    while parts and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(p for p in parts if p not in _WRAPPERS[2:] and p != "_orig_mod")


# --- optimizers: what they train, their settings, and which of their updates are safe ----------------------------

_SETTINGS = (
    "lr",
    "initial_lr",
    "eps",
    "betas",
    "momentum",
    "weight_decay",
    "alpha",
    "rho",
    "max_iter",
    "amsgrad",
    "nesterov",
    "maximize",
)


def largest_gradient(optimizer: Any) -> tuple[Tensor, float]:
    """The parameter with the largest gradient norm, and its share of the squared norm of all gradients."""
    found = [(p, g) for p in parameters_of(optimizer) if (g := readable(p.grad)) is not None and g.numel()]
    sizes = norms([g.double() for _, g in found]).tolist()
    at = max(range(len(sizes)), key=sizes.__getitem__)
    # Relative to the largest one, so nothing overflows.
    return found[at][0], 1 / math.hypot(*(size / sizes[at] for size in sizes)) ** 2 if sizes[at] else math.nan


def switch_on(optimizers: Iterable[Any]) -> list[Tensor]:
    """Lets backward reach parameters that were switched off since the step began; returns them.

    What has a gradient could be trained before: GANs switch one half off to train the other. Before its first step an
    optimizer may have none, but it can train nothing if all of its parameters are off.
    """
    stepped = list(optimizers)
    off = [p for o in stepped for p in parameters_of(o) if p.grad is not None and not p.requires_grad]
    for other in find_live_objects(Optimizer):
        own = parameters_of(other) if not any(other is o for o in stepped) else []
        off += own if not any(p.requires_grad for p in own) else []
    found = [p for p in off if p.is_leaf]
    for parameter in found:
        parameter.requires_grad_(True)
    return found


def zero_gradients(leaves: Iterable[Tensor]) -> None:
    """For updates by hand: the next backward adds to nothing, and code that zeroes a gradient still finds one."""
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf.grad) if leaf.grad is not None else None


def drop_gradients(optimizer: Any) -> None:
    """Makes the next update of this optimizer a no-op."""
    for parameter in parameters_of(optimizer):
        parameter.grad = None


def describe(optimizer: Any) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """The optimizer's class name, and the settings of its first parameter group."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    settings = []
    for name in _SETTINGS:
        value = group.get(name)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if value is not None:
            settings.append((name, list(value) if isinstance(value, tuple) else value))
    given = getattr(optimizer, "defaults", {}).get("lr")
    if isinstance(given, int | float) and given != group.get("lr"):
        settings.append(("lr_at_start", given))
    return type(optimizer).__name__, tuple(settings)


def reaches(roots: list[Tensor], parameters: set[int]) -> bool:
    """Whether one of these parameters (by id) is in the graph below the roots."""
    return any(id(leaf) in parameters for leaf in leaves_below(roots))


def graph_leaves(roots: list[Tensor]) -> list[Tensor]:
    """Every leaf tensor below these roots that requires a gradient and has one."""
    return [leaf for leaf in leaves_below(roots) if leaf.grad is not None]


def leaves_below(roots: list[Tensor]) -> Iterator[Tensor]:
    """Every leaf tensor below these roots that requires a gradient."""
    seen: set[Any] = set()
    stack: list[Any] = [r.grad_fn for r in roots if r.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        stack += [n for n, _ in node.next_functions]


_NEAREST = 16
"""Operators next to a value that are asked whether backward has passed them; the loss is among those of a metric."""


def is_after_backward(tensor: Tensor) -> bool:
    """Whether it was computed from a loss whose backward is over: that has freed what the loss had saved."""
    nodes: list[Any] = [tensor.grad_fn] if tensor.grad_fn is not None else []
    for node in nodes:  # it grows
        try:
            for name in dir(node):
                if name.startswith("_saved_"):
                    getattr(node, name)
        except RuntimeError:
            return True
        nodes += [n for n, _ in node.next_functions if n is not None] if len(nodes) < _NEAREST else []
    return False


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that makes the updates, inside what accelerate, Lightning or Fabric put around it."""
    fields = getattr(optimizer, "__dict__", {})
    inner = fields.get("_optimizer", fields.get("optimizer"))
    if "_optimizer_step_pre_hooks" in fields or not isinstance(inner, Optimizer):
        return optimizer
    return unwrapped(inner)


def parameters_of(optimizer: Any) -> list[Tensor]:
    groups = optimizer.param_groups
    return list(groups[0]["params"]) if len(groups) == 1 else [p for group in groups for p in group["params"]]


def learning_rate_of(optimizer: Any) -> float | None:
    value = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    return float(value) if value is not None else None


def state_tensors(optimizer: Any) -> Iterator[tuple[Tensor, str, Tensor]]:
    """What an optimizer keeps for each element of a parameter: the parameter, the name and the tensor.

    Numbers that it counts with are left out; one of its own may well be infinite.
    """
    for parameter in parameters_of(optimizer):
        kept = optimizer.state.get(parameter)
        for name, value in kept.items() if isinstance(kept, dict) else ():
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape:
                yield parameter, str(name), value


def bad_state(optimizer: Any) -> list[tuple[Tensor, str, Tensor]]:
    """The tensors of an optimizer's state that are not finite."""
    return [one for one in state_tensors(optimizer) if not is_finite(one[2])]


# Above the first, squares overflow; below the second, eps rounds to zero. bfloat16 has the range of float32.
_HALF_LIMITS = (128.0, 3e-8)
_LIMITS = (1e15, 1e-45)
_RISKY_SETTINGS = ("lr", "weight_decay", "momentum", "dampening", "alpha", "rho")

# With settings, gradients, weights and states within these bounds, no operator of these three can overflow float32.
_PROVEN = (SGD, Adam, AdamW)
_LARGEST_GRADIENT = 1e6
_LARGEST_STATE = 1e15
_LARGEST_SETTING = 10.0
_LEAST_EPS = 1e-10
_LARGEST_BETA = 0.99999


def is_torch_optimizer(optimizer: Any) -> bool:
    """Whether this is an optimizer of torch itself, whose updates stay finite with usual settings and gradients."""
    return type(optimizer).__module__.startswith("torch.optim")


def calls_closure_first(optimizer: Any) -> bool:
    """Whether `step(closure)` is a call of the closure, once, followed by an ordinary update."""
    return is_torch_optimizer(optimizer) and not isinstance(optimizer, LBFGS)


def is_risky(optimizer: Any, grad_norm: float | None) -> bool:
    """Whether finite gradients may still give a non-finite update, judged quickly by their norm and the settings."""
    for group in optimizer.param_groups:
        parameters = group["params"]
        half = bool(parameters) and parameters[0].dtype is torch.float16
        largest, least_eps = _HALF_LIMITS if half else _LIMITS
        if grad_norm is not None and not grad_norm < largest:
            return True
        for name in _RISKY_SETTINGS:
            value = group.get(name)
            if value is not None and not -largest < _number(value) < largest:
                return True
        # Adafactor's eps is a pair.
        if isinstance(eps := group.get("eps"), float | int) and not least_eps < eps < largest:
            return True
        for beta in group.get("betas", ()):
            if not -1.0 < _number(beta) < 1.0:
                return True
    return False


def _number(value: Any) -> float:
    """The value of a setting; 0 if it is not a number, or if reading it would wait for a device."""
    if isinstance(value, float | int):
        return value
    return value.item() if isinstance(value, Tensor) and value.is_cpu and value.numel() == 1 else 0.0


def is_safe(optimizer: Any, grad_norm: float | None) -> bool:
    """Whether every operator of this update is certain to stay finite, given its inputs and settings."""
    if type(optimizer) not in _PROVEN or grad_norm is None or not grad_norm < _LARGEST_GRADIENT:
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False  # The program's own hooks may do anything.
    if getattr(optimizer, "found_inf", None) is not None or not all(map(_has_usual_settings, optimizer.param_groups)):
        return False  # With `found_inf` the gradients were not checked: the scaler leaves that to the update.
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not all(is_plain(p.grad) for p in trained):
        return False
    states = [item for p in trained for item in optimizer.state.get(p, {}).items() if isinstance(item[1], Tensor)]
    with torch.no_grad():
        size = plain_norm(trained + [value for name, value in states if name != "step"])
    if size is None or not size < _LARGEST_STATE:
        return False
    return all(_is_nonnegative(value) for name, value in states if name.endswith("_sq"))


_nonnegative: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Mean squares known to have no negative element. Updates keep them that way, so each is read once."""


def _is_nonnegative(square: Tensor) -> bool:
    known = square in _nonnegative
    if not known and (square.numel() == 0 or square.min() >= 0):
        known = _nonnegative[square] = True
    return known


def _has_usual_settings(group: dict[str, Any]) -> bool:
    settings = [group.get(name, 0.0) for name in _RISKY_SETTINGS]
    if not all(isinstance(value, float | int) and abs(value) <= _LARGEST_SETTING for value in settings):
        return False
    betas = group.get("betas", ())
    if not all(isinstance(beta, float | int) and 0.0 <= beta <= _LARGEST_BETA for beta in betas):
        return False
    return bool(group.get("eps", 1.0) >= _LEAST_EPS) and not group.get("differentiable")


# --- all models and optimizers, in an order that is the same in another process ----------------------------------


@dataclass(frozen=True)
class Model:
    kind: str
    parameters: dict[str, Tensor]
    slots: dict[str, Slot]
    """Where its buffers are."""

    @classmethod
    def of(cls, root: Module) -> Model:
        named = [(readable_path(n), p) for n, p in root.named_parameters() if not is_lazy(p)]
        slots: dict[str, Slot] = {}
        for path, module in root.named_modules():
            for name in module._buffers.keys():  # noqa: SIM118  # a scripted module's wrapper has no iterator
                label = readable_path(f"{path}.{name}" if path else name)
                slots[label] = Slot(module, name, label)
        return cls(type(getattr(root, "_orig_mod", root)).__name__, dict(named), slots)


@dataclass(frozen=True)
class TrainingObjects:
    models: list[Model]
    optimizers: list[Any]
    scalers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)

    @classmethod
    def find(
        cls, optimizers: Iterable[Any], roots: Mapping[str, Module] | None = None, leaves: Sequence[Tensor] = ()
    ) -> TrainingObjects:
        """The models given, or all models of this process in the order in which the optimizers train them.

        `leaves` are trained tensors that need not belong to a model.
        """
        optimizers = list(optimizers)
        places = {id(p): i for i, p in enumerate(p for o in optimizers for p in parameters_of(o))}
        found = list(roots.values()) if roots is not None else [root for _, root in outermost_modules()]
        models = [Model.of(root) for root in found]
        if roots is None:
            models.sort(key=lambda m: min((places.get(id(p), len(places)) for p in m.parameters.values()), default=0))
        known = {id(p) for m in models for p in m.parameters.values()} | set(places)
        loose = [leaf for leaf in leaves if id(leaf) not in known]
        if loose:
            models.append(Model("", {f"leaf {i}": leaf for i, leaf in enumerate(loose)}, {}))
        scalers, schedulers = find_live_objects(torch.amp.GradScaler), find_live_objects(LRScheduler)
        schedulers = [s for s in schedulers if any(vars(s).get("optimizer") is o for o in optimizers)]
        # A scheduler made of others also loads their state, so it comes last.
        schedulers.sort(key=lambda s: hasattr(s, "_schedulers"))
        return cls(models, optimizers, scalers, schedulers)

    def names(self) -> dict[int, tuple[int, str]]:
        """Parameter id -> the index of its model and its name there."""
        found: dict[int, tuple[int, str]] = {}
        for i, model in enumerate(self.models):
            for name, parameter in model.parameters.items():
                found.setdefault(id(parameter), (i, name))
        return found


@dataclass(frozen=True)
class Scope:
    roots: Mapping[str, Module] | None = None
    """Prefix of the names -> model; None: every model of the process."""
    optimizers: list[Any] | None = None
    """None: every optimizer that makes a step. Those that are made for these models later are added."""
    superseded: list[weakref.ref[Any]] = field(default_factory=list)
    """Optimizers whose parameters have got another one since: nobody else may need them any more."""

    def models(self) -> Models:
        """The models as they are now."""
        return Models(self.roots)

    def adopt(self, optimizer: Any) -> bool:
        """Adds an optimizer that was made for these models; False if it trains others."""
        if self.roots is None or self.optimizers is None:
            return False
        own = {id(p) for root in self.roots.values() for p in root.parameters()}
        new = {id(p) for p in parameters_of(optimizer)}
        if new.isdisjoint(own):
            return False
        old = [o for o in self.optimizers if new.issuperset(id(p) for p in parameters_of(o))]
        self.superseded[:] = [ref for ref in self.superseded if ref() is not None] + [weakref.ref(o) for o in old]
        self.optimizers[:] = [o for o in self.optimizers if all(o is not one for one in old)] + [optimizer]
        return True

    def revive(self, optimizer: Any) -> None:
        """A superseded optimizer makes a step after all."""
        if self.optimizers is not None and any(ref() is optimizer for ref in self.superseded):
            self.superseded[:] = [ref for ref in self.superseded if ref() is not optimizer]
            self.optimizers.append(optimizer)

    def is_trained_by(self, loss: list[Tensor], models: Models | None) -> bool:
        """Whether this loss trains the models: that of another model does not count."""
        graphs = [r for r in loss if r.grad_fn is not None]
        if self.roots is None or models is None or not graphs or reaches(graphs, set(models.parameters)):
            return True
        # Layers may have been added since.
        own = {id(p) for root in self.roots.values() for p in root.parameters()}
        return own != set(models.parameters) and reaches(graphs, own)
