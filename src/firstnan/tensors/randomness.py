"""The random generators a step may draw from: kept before it, put back for its replay."""

from __future__ import annotations

import ctypes
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_WORDS = 624  # of the Mersenne Twister, which both Python and numpy use
_BYTES = 4 * (_WORDS + 1)


@dataclass(slots=True, eq=False)
class RandomState:
    """All of them at one moment."""

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

    def put_back(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


def _same_numpy(one: Any, other: Any) -> bool:
    # As bytes: some generators keep arrays, which do not compare to a single answer.
    return one is other or (one is not None and other is not None and _bytes(one) == _bytes(other))


def _bytes(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _bytes(value) for name, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


class _Python:
    """`random.getstate()` takes 12 us, a look at the generator's memory half of one: most steps draw nothing."""

    def __init__(self) -> None:
        self._generator = getattr(random, "_inst", None)
        # A CPython object's own fields follow its reference count and its type.
        self._address = id(self._generator) + object.__basicsize__
        self._seen: tuple[bytes, Any] | None = None
        self._state: Any = None
        self._trusted = self._is_as_expected()

    def _is_as_expected(self) -> bool:
        if sys.implementation.name != "cpython" or type(self._generator) is not random.Random:
            return False
        words = random.getstate()[1]
        memory = ctypes.string_at(self._address, _BYTES + 4)
        # CPython puts the position before the words.
        expected = words[-1:] + words[:-1]
        return memory[:_BYTES] == b"".join(w.to_bytes(4, sys.byteorder) for w in expected)

    def state(self) -> Any:
        if not self._trusted:
            return random.getstate()
        seen = (ctypes.string_at(self._address, _BYTES), self._generator.gauss_next)  # type: ignore[union-attr]
        if seen != self._seen:
            self._seen, self._state = seen, random.getstate()
        return self._state


class _Numpy:
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
            self._address = self._find(module, generator)
        if self._address is None:
            return module.get_state(legacy=False)
        seen = ctypes.string_at(self._address, _BYTES)
        # Half of a pair of normal numbers is kept elsewhere, and taken from there without a trace.
        if seen != self._seen or self._state["has_gauss"]:
            self._seen, self._state = seen, module.get_state(legacy=False)
        return self._state

    def _find(self, module: Any, generator: Any) -> int | None:
        if type(generator).__name__ != "MT19937":
            return None
        address: int = generator.ctypes.state_address
        words, position = generator.state["state"]["key"], generator.state["state"]["pos"]
        expected = words.tobytes() + int(position).to_bytes(4, sys.byteorder)
        return address if ctypes.string_at(address, _BYTES) == expected else None


_python, _numpy = _Python(), _Numpy()
