"""The state of the random generators that a step may draw from: saved before it, restored for its replay."""

from __future__ import annotations

import ctypes
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_WORDS = 624  # the state of the Mersenne Twister, which both Python and numpy use
_BYTES = 4 * (_WORDS + 1)


@dataclass(slots=True, eq=False)
class RandomState:
    """The states of the generators of Python, numpy, the CPU and every GPU at one moment."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: list[Tensor]

    @classmethod
    def now(cls) -> RandomState:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(_python.state(), _numpy.state(), torch.get_rng_state(), cuda)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RandomState)
            and torch.equal(self.cpu, other.cpu)
            and self.python == other.python
            and _same_numpy(self.numpy, other.numpy)
            and len(self.cuda) == len(other.cuda)
            and all(map(torch.equal, self.cuda, other.cuda))
        )

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


def _same_numpy(one: Any, other: Any) -> bool:
    # Compared as bytes: some generators keep arrays, and `==` of arrays is not a single bool.
    return one is other or (one is not None and other is not None and _bytes(one) == _bytes(other))


def _bytes(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _bytes(value) for name, value in state.items()}
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
