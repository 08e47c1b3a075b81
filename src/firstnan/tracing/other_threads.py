"""Where other threads than the one that trains have made non-finite values: a thread that reads ahead, for example."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from firstnan.observe.higher_order import accept
from firstnan.observe.new_threads import NewThreads
from firstnan.observe.sites import Ownership, Spot
from firstnan.tensors.finite import is_finite, tensors_in
from firstnan.tracing.tracer import Tracer

_MOST = 256


class OtherThreads:
    """Notes, in each thread that is started from now on, which line has made a tensor that is not finite."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._made: deque[tuple[weakref.ref[UntypedStorage], Spot]] = deque(maxlen=_MOST)
        self._threads = NewThreads(self._started)

    def begin(self) -> None:
        accept(_Noting)
        self._threads.begin()

    def end(self) -> None:
        self._threads.end()

    def _started(self) -> None:
        _Noting(self).__enter__()  # type: ignore[no-untyped-call]  # torch's own; it ends with the thread

    def note(self, read: Any, results: Any, frame: FrameType) -> None:
        """An operator has run in another thread."""
        bad = [t for _, t in tensors_in(results, depth=2) if not is_finite(t)]
        if not bad:
            return
        known = {id(storage): spot for ref, spot in self._made if (storage := ref()) is not None}
        came = [spot for _, t in tensors_in(read, depth=2) if (spot := known.get(id(t.untyped_storage()))) is not None]
        spot = came[0] if came else self._ownership.spots(frame)[0]
        for t in bad:
            storage = t.untyped_storage()
            if id(storage) not in known and spot is not None:
                self._made.append((weakref.ref(storage), spot))

    def maker_of_read(self, tracer: Tracer, event: int) -> Spot | None:
        """The line in another thread that has made what this event has read."""
        keys = set(tracer.raws[event].storages)
        for ref, spot in reversed(self._made):
            storage = ref()
            if storage is not None and tracer.memory.key(torch.empty(0, dtype=torch.uint8).set_(storage)) in keys:
                return spot
        return None


class _Noting(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, log: OtherThreads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._log = log

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        try:
            self._log.note(args, results, sys._getframe(1))
        except Exception:  # a tensor that cannot be read; its line stays unknown
            return results
        return results
