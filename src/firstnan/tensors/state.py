"""What a step may change, copied and restored: random generators, batches and buffers, weights and schedules."""

from __future__ import annotations

import ctypes
import inspect
import math
import operator
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from firstnan.tensors.finite import is_finite, norms, readable, tensors_in
from firstnan.tensors.live_objects import find_live_objects
from firstnan.tensors.models import Slot

_WORDS = 624  # the state of the Mersenne Twister, which both Python and numpy use
_BYTES = 4 * (_WORDS + 1)
_MOST_VALUES, _MOST_MEMBERS = 5000, 64
_READ_LOCALS = {"locals", "vars", "dir", "eval", "exec"}
_LIBRARIES = ("firstnan.", "torch.", "importlib.", "runpy")


@dataclass(slots=True, eq=False)
class RandomState:
    """The states of the generators of Python, numpy, the CPU and every GPU at one moment."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: list[Tensor]
    own: list[tuple[Any, Any]] = field(default_factory=list)
    """Generators that the program has made itself, and their states."""

    @classmethod
    def now(cls, own: Iterable[Any] = ()) -> RandomState:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        states = [(generator, state_of(generator)) for generator in own]
        return cls(_python.state(), _numpy.state(), torch.get_rng_state(), cuda, states)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RandomState)
            and torch.equal(self.cpu, other.cpu)
            and self.python == other.python
            and _same_numpy(self.numpy, other.numpy)
            and len(self.cuda) == len(other.cuda)
            and all(map(torch.equal, self.cuda, other.cuda))
            and len(self.own) == len(other.own)
            and all(bytes_of(one) == bytes_of(two) for (_, one), (_, two) in zip(self.own, other.own, strict=True))
        )

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        for generator, state in self.own:
            set_state_of(generator, state)


def seed_all(seed: int, own: Iterable[Any] = ()) -> None:
    """Makes all generators draw other numbers from here on."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
    for generator in own:
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif (bits := getattr(generator, "bit_generator", None)) is not None:
            bits.state = type(bits)(seed).state
        else:
            generator.seed(seed)


def generator_kinds() -> tuple[type, ...]:
    """The types of random generators that a program can make."""
    numpy = sys.modules.get("numpy")
    own = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    return (torch.Generator, random.Random, *own)


def own_generators(frame: FrameType | None) -> list[Any]:
    """The random generators in the variables of these functions, and in the objects that they hold."""
    found: dict[int, Any] = {}
    kinds, budget, seen = generator_kinds(), _MOST_VALUES, set[int]()

    def look(values: Iterable[Any], depth: int) -> None:
        nonlocal budget
        for value in values:
            if budget <= 0:
                return
            budget -= 1
            if isinstance(value, kinds):
                found[id(value)] = value
            elif depth and id(value) not in seen and not isinstance(value, (type, ModuleType, FunctionType)):
                seen.add(id(value))
                members = value if type(value) is dict else getattr(value, "__dict__", None)
                if type(members) is dict:
                    look(list(members.values()), depth - 1)
                elif type(value) in (list, tuple):
                    look(list(value[:_MOST_MEMBERS]), depth - 1)

    while frame is not None:
        if not str(frame.f_globals.get("__name__")).startswith(_LIBRARIES):
            look(local_variables(frame).values(), 2)
            if id(frame.f_globals) not in seen:
                seen.add(id(frame.f_globals))
                look(list(frame.f_globals.values()), 1)
        frame = frame.f_back
    return list(found.values())


def local_variables(frame: FrameType) -> dict[str, Any]:
    """A running function's variables, without keeping any of them alive.

    Until Python 3.13 a frame keeps the dictionary that it makes here, which is also the one that `locals()` returns.
    """
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED or sys.version_info >= (3, 13):
        return dict(frame.f_locals)
    if not _READ_LOCALS.isdisjoint(frame.f_code.co_names):
        return {}
    variables = frame.f_locals
    values = dict(variables)
    variables.clear()
    return values


def state_of(generator: Any) -> Any:
    """The state of a random generator of the program's own."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None)
    return bits.state if bits is not None else generator.get_state(legacy=False)


def set_state_of(generator: Any, state: Any) -> None:
    """Gives a random generator this state."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif (bits := getattr(generator, "bit_generator", None)) is not None:
        bits.state = state
    else:
        generator.set_state(state)


def _same_numpy(one: Any, other: Any) -> bool:
    # Compared as bytes: some generators keep arrays, and `==` of arrays is not a single bool.
    return one is other or (one is not None and other is not None and bytes_of(one) == bytes_of(other))


def bytes_of(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: bytes_of(value) for name, value in state.items()}
    if isinstance(state, Tensor):
        state = state.numpy()
    return state.tobytes() if hasattr(state, "tobytes") else state


class _PythonGenerator:
    """The state of Python's global generator, copied only when it has changed, since most steps draw nothing.

    `random.getstate()` takes 12 us; comparing the generator's memory takes half a microsecond.
    """

    def __init__(self) -> None:
        self._generator = getattr(random, "_inst", None)
        # In CPython an object's fields come after its reference count and type.
        self._address = id(self._generator) + object.__basicsize__
        self._seen: tuple[bytes, Any] | None = None
        self._state: Any = None
        self._known_layout = self._has_known_layout()

    def _has_known_layout(self) -> bool:
        if sys.implementation.name != "cpython" or type(self._generator) is not random.Random:
            return False
        words = random.getstate()[1]
        memory = ctypes.string_at(self._address, _BYTES + 4)
        # CPython stores the position before the words.
        expected = words[-1:] + words[:-1]
        return memory[:_BYTES] == b"".join(w.to_bytes(4, sys.byteorder) for w in expected)

    def state(self) -> Any:
        if not self._known_layout:
            return random.getstate()
        seen = (ctypes.string_at(self._address, _BYTES), self._generator.gauss_next)  # type: ignore[union-attr]
        if seen != self._seen:
            self._seen, self._state = seen, random.getstate()
        return self._state


class _NumpyGenerator:
    """The same for numpy's global generator, whose `get_state()` takes 60 us."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._address: int | None = None
        self._seen: bytes | None = None
        self._state: Any = None

    def state(self) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return None
        module = numpy.random
        generator = module.mtrand._rand._bit_generator
        if generator is not self._generator:
            self._generator, self._seen = generator, None
            self._address = self._state_address(generator)
        if self._address is None:
            return module.get_state(legacy=False)
        seen = ctypes.string_at(self._address, _BYTES)
        # The second number of a Gaussian pair is cached elsewhere, and drawing it does not change this memory.
        if seen != self._seen or self._state["has_gauss"]:
            self._seen, self._state = seen, module.get_state(legacy=False)
        return self._state

    def _state_address(self, generator: Any) -> int | None:
        if type(generator).__name__ != "MT19937":
            return None
        address: int = generator.ctypes.state_address
        words, position = generator.state["state"]["key"], generator.state["state"]["pos"]
        expected = words.tobytes() + int(position).to_bytes(4, sys.byteorder)
        return address if ctypes.string_at(address, _BYTES) == expected else None


_python, _numpy = _PythonGenerator(), _NumpyGenerator()


@dataclass(slots=True, eq=False)
class Handout:
    """One batch as it was handed to the program, with the state needed to repeat it."""

    batch: Any
    index: int
    updates: int
    """The number of optimizer steps made before it was handed out."""
    random: RandomState
    buffers: list[tuple[Slot, Tensor, Tensor]]
    versions: list[int]
    """Versions of the batch's tensors; empty if a copy is kept instead of the program's own tensors."""
    indices: Any = None
    pristine: Any = None
    """A copy that no loop body has touched, made before the first replay."""


class NamelessSource:
    """A stand-in for a source of batches that is a function or does not support weak references."""


def restore_buffers(buffers: list[tuple[Slot, Tensor, Tensor]]) -> None:
    """Restores buffers from copies, in the modules they were copied from."""
    with torch.no_grad():
        for slot, old, value in buffers:
            slot.restore(old, value)


def tensor_versions(batch: Any) -> list[int]:
    """The version of each tensor in a batch: how often it was written in place."""
    if (type(batch) is tuple or type(batch) is list) and set(map(type, batch)) == _TENSOR_ALONE:
        try:  # the usual case, and far faster
            return list(map(_get_version, batch))
        except RuntimeError:  # one that was made in inference mode has no version
            return [_version(t) for t in batch]
    return [_version(t) for _, t in tensors_in(batch)]


_TENSOR_ALONE = {Tensor}
_get_version = operator.attrgetter("_version")


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def was_written(handout: Handout) -> bool:
    return bool(handout.versions) and tensor_versions(handout.batch) != handout.versions


def copy_batch(batch: Any) -> Any:
    """The batch in containers of the same types, with every tensor cloned."""
    if isinstance(batch, torch.nn.Parameter):  # not data: its gradient must arrive at the original
        return batch
    if isinstance(batch, Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    if type(batch) in (list, tuple):
        return type(batch)(copy_batch(b) for b in batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(copy_batch(b) for b in batch))
    if isinstance(batch, dict):
        try:
            clone: Callable[..., Any] = type(batch)
            return clone({k: copy_batch(v) for k, v in batch.items()})
        except TypeError:
            return batch
    return batch


def batch_size(batch: Any) -> int | None:
    """The most frequent first dimension of the tensors in a batch."""
    sizes = [t.size(0) for _, t in tensors_in(batch) if t.dim()]  # a nested tensor may have no shape
    return max(set(sizes), key=sizes.count) if sizes else None


def sample_count(batch: Any, indices: Any) -> int | None:
    """The number of samples in a batch: as many as the sampler chose, unless each row is a sample of its own."""
    if not isinstance(indices, list | tuple) or not indices or None in indices:  # an iterable dataset gives None
        return batch_size(batch)
    if isinstance(batch, list | tuple) and len(batch) == len(indices):
        return len(indices)  # not collated
    rows = {t.size(0) for _, t in tensors_in(batch) if t.dim()}
    return rows.pop() if len(rows) == 1 and rows_are_samples(min(rows), len(indices)) else len(indices)


def rows_are_samples(rows: int, chosen: int) -> bool:
    """Whether the rows of a batch can be its samples: several views of each chosen one, or fewer rows than chosen.

    Otherwise rows are something else, such as graph nodes or tokens, and their number varies from sample to sample.
    """
    return rows % chosen == 0 or rows < chosen


class StateCopy:
    """Copies of tensors and containers; `restore` brings the same objects back, bit for bit.

    The members of a container and the values of a tensor are saved. On `restore`, a member that was replaced is the
    former object again, and a member that was added is removed.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._values: list[tuple[Tensor, Tensor]] = []

    def add(self, value: Any) -> None:
        """Adds this tensor, or this container and everything in it; other objects are ignored."""
        if isinstance(value, Tensor):
            if not is_lazy(value):  # No values before the first call of its layer.
                self.tensors[id(value)] = value
        elif isinstance(value, dict | list | deque | tuple) and id(value) not in self._containers:
            members = dict(value) if isinstance(value, dict) else list(value)
            self._containers[id(value)] = (value, members)
            for member in members.values() if isinstance(members, dict) else members:
                self.add(member)

    def copy(self) -> None:
        """Copies the values of all tensors added so far."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._values = [(t, t.detach().clone()) for t in self.tensors.values() if _can_be_written(t)]

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for _, copy in self._values)

    def restore(self, *, in_use: bool = False) -> None:
        """`in_use`: a loss was computed with these tensors, and its backward call must not object to the change."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for tensor, copy in self._values:
                if tensor.shape == copy.shape:
                    (tensor.data if in_use else tensor).copy_(copy)
                else:  # The program has replaced its memory since.
                    tensor.data = copy.clone()
        for container, members in self._containers.values():
            _fill(container, members)


def _fill(container: Any, members: Any) -> None:
    if isinstance(container, dict):
        for key in [k for k in container if k not in members]:
            del container[key]
        for key, member in members.items():  # Not `update`: `Counter.update` adds.
            container[key] = member
    elif isinstance(container, list):
        container[:] = members
    elif isinstance(container, deque):
        container.clear()
        container.extend(members)


def _can_be_written(t: Tensor) -> bool:
    """False for inference tensors and expanded ones, whose elements share memory. No program can write those."""
    if t.is_inference():
        return False
    return t.layout is not torch.strided or not any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True))


class Snapshot:
    """Parameters, buffers and optimizer state of one moment, known to be finite.

    Gradients and optimizer settings (such as learning rates) are not included.
    """

    def __init__(self, copy: StateCopy, slots: list[tuple[Slot, Tensor | None]], states: list[tuple[Any, Any]]) -> None:
        self._copy, self._slots, self._states = copy, slots, states
        self.nbytes = copy.nbytes
        """The memory that the copies take."""

    @classmethod
    def take(cls, parameters: Iterable[Tensor], slots: Iterable[Slot], optimizers: Iterable[Any]) -> Snapshot | None:
        """Copies everything; None if something in it is non-finite, since that is not worth restoring.

        In buffers and frozen parameters only a NaN counts: an infinity may be intended there.
        """
        copy, constants = StateCopy(), StateCopy()
        for parameter in parameters:
            (copy if parameter.requires_grad else constants).add(parameter)
        buffers = [(slot, slot.tensor()) for slot in slots]
        for _, buffer in buffers:
            constants.add(buffer)
        states = [(optimizer, optimizer.state) for optimizer in optimizers]
        for _, state in states:
            copy.add(state)
        if not _all_finite(copy.tensors.values()) or _any_nan(constants.tensors.values()):
            return None
        copy.tensors |= constants.tensors
        copy.copy()
        return cls(copy, buffers, states)

    def restore(self, *, in_use: bool = False) -> None:
        """Restores everything in the same tensors; optimizer state that was created since is dropped.

        `in_use`: a loss was computed with these tensors, and its backward call must not object to the change.
        """
        self._copy.restore(in_use=in_use)
        for slot, buffer in self._slots:
            slot.put(buffer)
        for optimizer, state in self._states:
            if "state" in vars(optimizer):  # `load_state_dict` creates a new one.
                optimizer.state = state


def _sum_of_norms(tensors: Collection[Tensor]) -> float:
    """The sum of all 2-norms: NaN if there is a NaN, infinite if there is an infinity or a norm overflows."""
    with torch.no_grad():
        values = [r for t in tensors if (r := readable(t)) is not None and r.numel()]
        return norms(values).sum().item() if values else 0.0


def _all_finite(tensors: Collection[Tensor]) -> bool:
    total = _sum_of_norms(tensors)
    return math.isfinite(total) or (total == math.inf and all(map(is_finite, tensors)))


def _any_nan(tensors: Collection[Tensor]) -> bool:
    return math.isnan(_sum_of_norms(tensors))


def restart_scalers() -> None:
    """Gradient scalers forget what they have done in the current step: a second `step` would be an error."""
    for scaler in find_live_objects(GradScaler):
        vars(scaler).get("_per_optimizer_states", {}).clear()


class SettingsCopy:
    """The schedulers and parameter groups of optimizers at the beginning of a step: before the loop has stepped one.

    It is made in every step, so only what a scheduler or the program replaces is copied, with short lists.
    """

    __slots__ = ("_members", "updates")

    def __init__(
        self, optimizers: Iterable[Any], schedulers: Iterable[LRScheduler], updates: Callable[[Any], int]
    ) -> None:
        """`updates`: the number of updates of an optimizer so far."""
        self.updates: dict[int, int] = {}
        """By the id of an optimizer."""
        self._members: dict[int, list[tuple[Any, Any]]] = {}
        """The id of an optimizer -> what belongs to it, with its members."""
        for optimizer in optimizers:
            self.updates[id(optimizer)] = updates(optimizer)
            kept = self._members[id(optimizer)] = []
            for group in optimizer.param_groups:
                kept.append((group, group.copy()))
                if type(lr := group.get("lr")) is not float and isinstance(lr, Tensor):
                    kept.append((lr, lr.detach().clone()))
        for scheduler in schedulers:
            kept = self._members.get(id(scheduler.optimizer), [])
            for holder in _holders(scheduler):
                kept.append((holder, holder.copy()))
                for value in holder.values():
                    if type(value) in _CONTAINERS and len(value) <= _MOST_MEMBERS:
                        kept.append((value, value.copy()))

    def restore(self, updates: dict[int, int]) -> None:
        """Restores what belongs to optimizers that have made no update since; `updates` is their number now."""
        for optimizer, kept in self._members.items():
            if updates.get(optimizer) != self.updates.get(optimizer):
                continue
            for one, members in kept:
                if isinstance(one, Tensor):
                    with torch.no_grad():
                        one.copy_(members)
                elif isinstance(one, dict):
                    one.update({name: value for name, value in members.items() if name != "params"})
                else:
                    _fill(one, members)


_CONTAINERS = frozenset({list, dict, deque})


def _holders(scheduler: LRScheduler) -> list[dict[str, Any]]:
    """The members of a scheduler and of its functions, which may be objects with state."""
    own = scheduler.__dict__
    if "lr_lambdas" not in own:
        return [own]
    members = [getattr(function, "__dict__", None) for function in own["lr_lambdas"]]
    return [own, *(one for one in members if type(one) is dict)]


class Schedules:
    """A copy of the state of learning-rate schedulers, optimizer settings and gradient scalers."""

    def __init__(
        self,
        schedulers: list[LRScheduler],
        optimizers: list[Any],
        scalers: Iterable[GradScaler] = (),
        *,
        earlier: SettingsCopy | None = None,
        updates: dict[int, int] | None = None,
    ) -> None:
        """`earlier`: what was copied when the step began; `updates`: the number of updates of each optimizer now."""
        self.schedulers = schedulers
        self._earlier, self._updates = earlier, updates or {}
        self._copy = StateCopy()
        for scaler in scalers:
            for name in ("_scale", "_growth_tracker"):  # a disabled scaler has neither
                self._copy.add(vars(scaler).get(name))
        for scheduler in schedulers:
            for holder in _holders(scheduler):
                self._copy.add(holder)
        self._groups = [
            (group, {name: value for name, value in group.items() if name != "params"})
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        for _, settings in self._groups:
            self._copy.add(settings)
        self._copy.copy()

    def restore(self) -> None:
        """Restores everything as if no scheduler had been stepped since."""
        self._copy.restore()
        for group, settings in self._groups:
            group.update(settings)
        if self._earlier is not None:
            self._earlier.restore(self._updates)


class ScheduleSearch:
    """Finds the schedulers of optimizers, nested ones too, and all gradient scalers of the process.

    That visits all objects, which takes far longer than a step, so it is repeated only if there may be new ones. A
    scheduler holds its optimizer: as long as equally many references to the optimizers exist at the same place of a
    step, there is no other.
    """

    def __init__(self) -> None:
        self._found: list[weakref.ref[Any]] = []
        self._references: dict[str, list[int]] = {}
        """Place in the step -> the number of references to each optimizer there, since the last search."""

    def begin(self, optimizers: list[Any]) -> None:
        """Finds those that exist, to copy them from now on; who makes another one later has to tell."""
        if optimizers:
            self._search(optimizers)

    def made(self, scheduler: Any) -> None:
        """A scheduler was made."""
        if all(ref() is not scheduler for ref in self._found):
            self._found.append(weakref.ref(scheduler))

    def settings(self, optimizers: Iterable[Any], updates: Callable[[Any], int]) -> SettingsCopy:
        """A copy of what is known, at the beginning of a step."""
        found = self._found
        schedulers = [s for ref in found if isinstance(s := ref(), LRScheduler)] if found else ()
        return SettingsCopy(optimizers, schedulers, updates)

    def copy(
        self,
        optimizers: Iterable[Any],
        place: str,
        scalers: Iterable[GradScaler] = (),
        *,
        earlier: SettingsCopy | None = None,
        updates: dict[int, int] | None = None,
    ) -> Schedules:
        """Copies their state; `scalers` are those known to be used. For the others see Schedules."""
        optimizers = list(optimizers)
        references = [sys.getrefcount(optimizer) for optimizer in optimizers]
        found = [thing for ref in self._found if (thing := ref()) is not None]
        if len(found) < len(self._found) or not self._references:
            found, self._references = self._search(optimizers), {}
        elif self._references.get(place) != references:
            found = self._search(optimizers)
            if place in self._references:  # what was counted elsewhere is out of date too
                self._references = {}
        self._references[place] = references
        kept = {id(s): s for s in (*found, *scalers)}.values()
        return Schedules(
            [s for s in kept if isinstance(s, LRScheduler)],
            optimizers,
            [s for s in kept if isinstance(s, GradScaler)],
            earlier=earlier,
            updates=updates,
        )

    def _search(self, optimizers: list[Any]) -> list[Any]:
        found = [
            thing
            for thing in find_live_objects(LRScheduler, GradScaler)
            if isinstance(thing, GradScaler) or any(vars(thing).get("optimizer") is o for o in optimizers)
        ]
        self._found = list(map(weakref.ref, found))
        return found
