"""Whether anyone has written to a tensor since it was looked at."""

from __future__ import annotations

import ctypes
import weakref

from torch import Tensor


class Unwritten:
    """A plain tensor as it was. It is not kept alive."""

    __slots__ = ("_address", "_number", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._version, self._address = tensor._version, tensor.data_ptr()
        self._number = _first_number(self._address) if self._address else None

    def is_still(self, tensor: Tensor) -> bool:
        """Whether this is the same tensor, as it was then."""
        if self._tensor() is not tensor or self._version != tensor._version:
            return False
        # Who writes through `.data` changes no version, but puts other numbers there, or changes them all.
        address = tensor.data_ptr()
        return self._address == address and (not address or self._number == _first_number(address))


def _first_number(address: int) -> float:
    return ctypes.c_float.from_address(address).value
