"""The once-a-step check: are the loss, the gradients and the updated parameters and buffers finite?"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from firstnan.finite import extremes, is_finite, norms, readable
from firstnan.names import Models
from firstnan.records import History, Noticed, StepRecord

_HISTORY = 64
_SMALL_MODEL = 1 << 14
_SMALL_BUFFER = 1 << 14
_CHUNK = 1 << 18
_ROUND = 8
_SETTINGS = (
    "lr",
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


class Listener(Protocol):
    """What the gate tells of the program; a trip may end the program by raising out of these."""

    def trip(self, noticed: Noticed, tensors: list[Tensor], *, before_update: bool) -> None: ...
    def step_begins(self, optimizer: Any, closure: bool) -> None: ...
    def step_ended(self, by_hand: bool = False) -> None: ...
    def suppresses(self, optimizer: Any) -> bool: ...


class Steps:
    """Counts training steps: those of the optimizer whose turn it is, or backward calls where there is none."""

    def __init__(self) -> None:
        self.done: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.follows: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self.last: weakref.ref[Any] | None = None
        self.total = 0
        self.manual = 0

    def add(self, optimizer: Any) -> None:
        self.done[optimizer] = self.done.get(optimizer, 0) + 1
        before = self.last() if self.last else None
        if before is not None:
            self.follows[before] = weakref.ref(optimizer)
        self.last = weakref.ref(optimizer)
        self.total += 1

    def of(self, optimizer: Any) -> int:
        return self.done.get(optimizer, 0)

    @property
    def current(self) -> int:
        """The step that is under way: that of the optimizer which followed the last one the time before."""
        if self.total == 0:
            return self.manual
        last = self.last() if self.last else None
        following = self.follows.get(last) if last is not None else None
        optimizer = following() if following is not None else None
        if optimizer is not None:
            return self.of(optimizer)
        if last is None:
            return self.total
        return self._turn_of_a_newcomer(self.of(last))

    def _turn_of_a_newcomer(self, count: int) -> int:
        # After the very first step another optimizer may be about to make its own first one.
        return 0 if count == 1 and any(n == 0 for n in self.done.values()) else count


class Gate:
    """Looks at each step once, keeps the last steps' numbers, and says when something is not finite."""

    def __init__(self, listener: Listener, *, thorough: bool = False) -> None:
        self.listener = listener
        self.thorough = thorough
        """Looks at every parameter after every update, however large the model is."""
        self.steps = Steps()
        self.history: deque[StepRecord] = deque(maxlen=_HISTORY)
        self.optimizers = 0
        self.trained = False
        self.in_step: Any = None
        self._parameters: list[weakref.ref[Tensor]] = []
        self._buffers: list[list[Any]] = []
        """Slot, version at the last look, whether it held a NaN then."""
        self.skipping_since: int | None = None
        """The first of the updates that a gradient scaler has dropped without a good one in between."""
        self._loss: float | None = None
        self._norm: float | None = None
        self._deferred: list[tuple[Noticed, list[Tensor], Tensor]] = []
        self._leaves: list[weakref.ref[Tensor]] = []
        self._rounds: weakref.WeakKeyDictionary[Any, Rounds] = weakref.WeakKeyDictionary()
        self._scaled: tuple[weakref.ref[Tensor], Any] | None = None

    # Backward.

    def optimizer_made(self, optimizer: Any) -> None:
        self.optimizers += 1
        # One made in the middle of training takes over; those made before it starts take turns.
        self.steps.done.setdefault(optimizer, self.steps.current if self.steps.total else 0)

    def backward_begins(self, roots: list[Tensor]) -> None:
        """The loss is known: a non-finite one trips before anything is computed from it."""
        self.trained = True
        if self.optimizers == 0 and self._accumulating():
            self.steps.manual -= 1  # The step that the last backward seemed to end goes on.
        elif self.optimizers == 0:
            self._check_leaves()
        for root in self._unscaled(roots):
            plain = readable(root)
            if plain is None or not plain.numel():
                continue
            if plain.device.type != "cpu":
                self._deferred.append((Noticed("loss"), [root], plain.abs().sum()))
                continue
            ends = extremes(plain)
            assert ends is not None
            if plain.numel() == 1:
                self._loss = ends[0]
            if not (math.isfinite(ends[0]) and math.isfinite(ends[1])):
                self.listener.trip(Noticed("loss"), [root], before_update=True)

    def backward_ended(self, roots: list[Tensor]) -> None:
        if self.in_step is not None:
            # The step called its closure (LBFGS): these gradients are used at once.
            self._check_gradients(_parameters(self.in_step), before_update=False)
        elif self.optimizers == 0:
            self._check_gradients(self._leaves_of(roots), before_update=False)
            self._end_manual_step()

    def gradients_returned(self, outputs: list[Tensor], gradients: list[Tensor]) -> None:
        """`torch.autograd.grad` in a program without an optimizer object is its step."""
        self.trained = True
        if self.optimizers:
            return
        bad = [t for t in outputs if not is_finite(t)]
        if bad:
            self.listener.trip(Noticed("loss"), bad, before_update=False)
        bad = [t for t in gradients if not is_finite(t)]
        if bad:
            self.listener.trip(Noticed("gradient"), bad, before_update=False)
        self._end_manual_step()

    def loss_scaled(self, given: Any, result: Any) -> None:
        """A gradient scaler may drive a finite loss to infinity on purpose: the unscaled one decides."""
        if isinstance(given, Tensor) and isinstance(result, Tensor):
            self._scaled = (weakref.ref(result), given.detach())

    def _unscaled(self, roots: list[Tensor]) -> list[Tensor]:
        if self._scaled is None:
            return roots
        scaled, given = self._scaled
        self._scaled = None
        return [given if scaled() is r else r for r in roots]

    # The optimizer's step.

    def before_update(self, optimizer: Any, closure: bool) -> None:
        if self.listener.suppresses(optimizer):
            drop_gradients(optimizer)
            return
        self.trained = True
        self._check_gradients(_parameters(optimizer), before_update=not closure)
        self.in_step = optimizer
        self.listener.step_begins(optimizer, closure)

    def after_update(self, optimizer: Any) -> None:
        if self.in_step is not optimizer:
            return
        self.in_step = self.skipping_since = None
        step = self.steps.of(optimizer)
        self.steps.add(optimizer)
        rounds = self._rounds.get(optimizer)
        if rounds is None:
            rounds = self._rounds[optimizer] = Rounds(self.thorough)
        parts, whole = rounds.due([p for p in _parameters(optimizer) if p.grad is not None])
        size = self._size(parts, Noticed("parameter"))
        self.history.append(StepRecord(step, self._loss, self._norm, _rate(optimizer), size if whole else None))
        self._loss = None
        try:
            if size is not None and not math.isfinite(size):
                self._check_parameters(optimizer, rounds)
            if self.thorough or self.steps.total % _ROUND == 1:
                self._check_buffers()
        finally:
            self.listener.step_ended()

    def last_look(self) -> None:
        """At the end of the program: every parameter and buffer once more, also those whose turn had not come."""
        for optimizer, rounds in list(self._rounds.items()):
            self._check_parameters(optimizer, rounds)
        self._check_buffers()

    def _check_parameters(self, optimizer: Any, rounds: Rounds) -> None:
        # One that never had a gradient does not train, whatever is in it.
        bad = [p for p in _parameters(optimizer) if id(p) in rounds.trained and not is_finite(p)]
        if bad:
            self.listener.trip(Noticed("parameter"), bad, before_update=False)

    def step_skipped(self, optimizer: Any, scale: float) -> None:
        """A gradient scaler dropped the update: normal while it looks for its scale, not below one."""
        if self.listener.suppresses(optimizer):
            return
        if self.skipping_since is None:
            self.skipping_since = self.steps.of(optimizer)
        if scale < 1.0:
            bad = [p.grad for p in _parameters(optimizer) if p.grad is not None and not is_finite(p.grad)]
            if bad:
                self.listener.trip(Noticed("gradient"), bad, before_update=True)
        self.steps.add(optimizer)
        self._loss = None
        self.listener.step_ended()

    def _check_gradients(self, parameters: Iterable[Tensor], *, before_update: bool) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._norm = self._size(gradients, Noticed("gradient"))
        if self._norm is not None and not math.isfinite(self._norm):
            # A norm overflows on large finite numbers: only the elements decide.
            bad = [g for g in gradients if not is_finite(g)]
            if bad:
                self.listener.trip(Noticed("gradient"), bad, before_update=before_update)

    def _size(self, tensors: list[Tensor], noticed: Noticed) -> float | None:
        """The 2-norm of all of them, read at once on the CPU; elsewhere together with the next read."""
        if not tensors:
            return None
        recording = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # The context manager for it costs more than the rest of this function.
        try:
            if all(map(_is_plain, tensors)):
                sizes = torch.stack(torch._foreach_norm(tensors))
            else:
                values = [r for t in tensors if (r := readable(t)) is not None and r.numel()]
                if not values:
                    return None
                sizes = norms(values)
            if sizes.device.type == "cpu":
                return math.hypot(*sizes.tolist())
            self._deferred.append((noticed, tensors, torch.linalg.vector_norm(sizes)))
            return self._read() if noticed.what == "gradient" else None
        finally:
            torch._C._set_grad_enabled(recording)

    def _read(self) -> float | None:
        """One read for everything that waits: losses, the last update, these gradients."""
        waiting, self._deferred = self._deferred, []
        home = waiting[-1][2].device
        sizes = torch.stack([size.to(home, torch.float32) for *_, size in waiting]).tolist()
        for (noticed, tensors, _), size in zip(waiting[:-1], sizes[:-1], strict=True):
            if noticed.what == "loss":
                self._loss = size
            bad = [] if math.isfinite(size) else [t for t in tensors if not is_finite(t)]
            if bad:
                self.listener.trip(noticed, bad, before_update=noticed.what == "loss")
        return float(sizes[-1])

    def watch_models(self, models: Models) -> None:
        """From now on; a buffer that holds a NaN already was given it on purpose."""
        self._buffers = [[slot, -1, _has_nan(slot.tensor())] for slot in models.slots]
        self._parameters = [weakref.ref(p) for p, _ in models.parameters.values()]

    def _check_buffers(self) -> None:
        """Those that were written since the last look, by their version; small ones always."""
        written: list[tuple[Any, Tensor]] = []
        for watched in self._buffers:
            buffer = watched[0].tensor()
            if buffer is None or not buffer.is_floating_point():
                continue
            # Batch norm writes its running statistics without counting a version.
            if buffer._version != watched[1] or buffer.numel() <= _SMALL_BUFFER:
                watched[1] = buffer._version
                written.append((watched, buffer))
        size = self._size([b for _, b in written], Noticed("buffer"))
        if size is None or math.isfinite(size):
            return
        for watched, buffer in written:
            # An infinity may be meant there: the start of a minimum, a mask.
            known, watched[2] = watched[2], _has_nan(buffer)
            if watched[2] and not known:
                self.listener.trip(Noticed("buffer", watched[0].label), [buffer], before_update=False)

    # Programs without an optimizer object.

    def _leaves_of(self, roots: list[Tensor]) -> list[Tensor]:
        """The tensors that backward wrote gradients to; the graph is walked again only when they are replaced."""
        alive = [leaf for ref in self._leaves if (leaf := ref()) is not None]
        replaced = not alive or len(alive) != len(self._leaves) or any(leaf.grad is None for leaf in alive)
        known = {id(leaf) for leaf in alive}
        # Parts of a model may join later.
        joined = [p for ref in self._parameters if (p := ref()) is not None and p.grad is not None]
        new = [leaf for leaf in (graph_leaves(roots) if replaced else joined) if id(leaf) not in known]
        self._leaves = [weakref.ref(leaf) for leaf in alive + new]
        return alive + new

    def _check_leaves(self) -> None:
        """What the program updated by hand since the last backward."""
        leaves = [leaf for ref in self._leaves if (leaf := ref()) is not None]
        size = self._size(leaves, Noticed("parameter"))
        bad = [] if size is None or math.isfinite(size) else [leaf for leaf in leaves if not is_finite(leaf)]
        if bad:
            self.listener.trip(Noticed("parameter"), bad, before_update=False)

    def _accumulating(self) -> bool:
        leaves = [leaf for ref in self._leaves if (leaf := ref()) is not None and leaf.grad is not None]
        if not leaves:
            return False
        smallest = min((leaf.grad for leaf in leaves if leaf.grad is not None), key=Tensor.numel)
        return bool(smallest.any())

    def _end_manual_step(self) -> None:
        self.history.append(StepRecord(self.steps.manual, self._loss, self._norm))
        self._loss = None
        self.steps.manual += 1
        self.listener.step_ended(by_hand=True)

    def past(self) -> History:
        """The last steps, the failing one included as far as it is known."""
        steps = list(self.history)
        if self._loss is not None:
            steps.append(StepRecord(self.steps.current, self._loss, self._norm))
        last = self.in_step or (self.steps.last() if self.steps.last else None)
        return History(tuple(steps), *(describe(last) if last is not None else ()))


class Rounds:
    """Which parameters to look at after an update: all of a small model, of a large one an eighth in turn.

    Reading every parameter after every step costs a large model more than all the rest; what a bad one does to the
    loss is seen at once anyway.
    """

    def __init__(self, thorough: bool) -> None:
        self._thorough = thorough
        self.trained: set[int] = set()
        self._chunks: list[tuple[int, int, int]] = []
        self._shape: tuple[int, int] = (-1, -1)
        self._next = 0

    def due(self, parameters: list[Tensor]) -> tuple[list[Tensor], bool]:
        """What to look at now, and whether that is everything."""
        self.trained.update(map(id, parameters))
        total = sum(p.numel() for p in parameters)
        if self._thorough or total <= _SMALL_MODEL:
            return parameters, True
        if self._shape != (len(parameters), total):
            self._shape, self._next = (len(parameters), total), 0
            self._chunks = [
                (i, start, min(start + _CHUNK, p.numel()))
                for i, p in enumerate(parameters)
                for start in range(0, p.numel(), _CHUNK)
            ]
        count = -(-len(self._chunks) // _ROUND)
        turn = [self._chunks[(self._next + k) % len(self._chunks)] for k in range(count)]
        self._next = (self._next + count) % len(self._chunks)
        return [_piece(parameters[i], start, stop) for i, start, stop in turn], False


def _piece(parameter: Tensor, start: int, stop: int) -> Tensor:
    if stop - start == parameter.numel() or not _is_plain(parameter) or not parameter.is_contiguous():
        return parameter
    return parameter.detach().view(-1)[start:stop]


def drop_gradients(optimizer: Any) -> None:
    """Makes the coming update of this optimizer a no-op."""
    for parameter in _parameters(optimizer):
        parameter.grad = None


def describe(optimizer: Any) -> tuple[str, tuple[tuple[str, Any], ...]]:
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    settings = []
    for name in _SETTINGS:
        value = group.get(name)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if value is not None:
            settings.append((name, list(value) if isinstance(value, tuple) else value))
    return type(optimizer).__name__, tuple(settings)


def graph_leaves(roots: list[Tensor]) -> list[Tensor]:
    """Every leaf tensor below these roots that wants a gradient and has one."""
    seen: set[Any] = set()
    stack: list[Any] = [r.grad_fn for r in roots if r.grad_fn is not None]
    leaves = []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf.grad is not None:
            leaves.append(leaf)
        stack += [n for n, _ in node.next_functions]
    return leaves


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _rate(optimizer: Any) -> float | None:
    value = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    return float(value) if value is not None else None


def _has_nan(t: Tensor | None) -> bool:
    return t is not None and not is_finite(t) and bool(torch.isnan(t).any())


def _is_plain(t: Tensor) -> bool:
    kind = type(t)
    return (kind is Tensor or kind is torch.nn.Parameter) and t.dtype is torch.float32 and t.is_cpu and not t.is_sparse
