"""Whether a tensor has been written to since it was last read."""

from __future__ import annotations

import ctypes
import weakref

from torch import Tensor


class TensorVersion:
    """The version of a plain tensor at one moment. Holds no reference to the tensor."""

    __slots__ = ("_address", "_number", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._version, self._address = tensor._version, tensor.data_ptr()
        self._number = _first_number(self._address) if self._address else None

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether this is the same tensor, not written to since."""
        if self._tensor() is not tensor or self._version != tensor._version:
            return False
        # A write through `.data` does not change the version, but it replaces the memory or changes all values.
        address = tensor.data_ptr()
        return self._address == address and (not address or self._number == _first_number(address))


def _first_number(address: int) -> float:
    return ctypes.c_float.from_address(address).value
