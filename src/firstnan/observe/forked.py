"""Python and torch in a forked child: threads and worker processes are gone there, and nobody answers."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import gc
import io
import os
import queue
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

_CHANGES = (
    "chmod", "chown", "link", "mkdir", "remove", "rename", "replace", "rmdir", "symlink", "truncate", "unlink", "utime"
)  # fmt: skip


def end_thread_pools() -> bool:
    """Ends OpenMP's threads, which start again when they are needed: a forked child would wait for them forever.

    False if that is not possible; the child then has to do with one thread.
    """
    with open("/proc/self/maps") as file:
        libraries = {line.split()[-1] for line in file if re.search(r"/lib(gomp|iomp5|omp)[^/]*\.so", line)}
    ended = True
    for library in libraries:
        pause = getattr(ctypes.CDLL(library), "omp_pause_resource_all", None)
        ended = ended and pause is not None and pause(2) == 0
    return ended


def alone_after_fork(*, threads: bool) -> None:
    """Lets the program run on alone: nothing waits for a thread or process of the parent, or for the clock."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # looking through the parent's objects would copy all of its memory
    torch = sys.modules.get("torch")
    if torch is not None and not threads:
        torch.set_num_threads(1)
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(min(float(seconds), 0.001))
    _forget_workers()
    _forget_threads()
    _forget_ranks()
    _answer_requests()


def _forget_workers() -> None:
    """Worker processes belong to the parent: they are neither joined, nor told to stop, nor asked for batches."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process._children.clear()
    loading = sys.modules.get("torch.utils.data.dataloader")
    if loading is None:
        return
    kind = loading._MultiProcessingDataLoaderIter
    begin, fetch, reset, shut_down = kind.__init__, kind._next_data, kind._reset, kind._shutdown_workers

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        self._firstnan_is_new = True
        begin(self, *args, **kwargs)

    def _next_data(self: Any) -> Any:
        return fetch(self) if "_firstnan_is_new" in vars(self) else _next_in_process(self)

    def _reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        if "_firstnan_is_new" in vars(self):
            reset(self, loader, first_iter)
        else:  # workers that are kept over all epochs: the next one has others
            vars(self).clear()
            loading._utils.signal_handling._remove_worker_pids(id(self))
            made(self, loader)

    def _shutdown_workers(self: Any) -> None:
        if "_firstnan_is_new" in vars(self):
            shut_down(self)

    kind.__init__, kind._next_data, kind._shutdown_workers, kind._reset = made, _next_data, _shutdown_workers, _reset


class NotContinued(BaseException):  # the program must not catch it
    """What the program would do next is not known here; says why."""


_INDICES = "_firstnan_indices"


def keep_indices(iterator: Any, indices: Any) -> None:
    """Keeps what a loader's sampler has chosen as long as its workers may be at it: a child computes it again."""
    state = vars(iterator)
    if workers := state.get("_num_workers"):
        most = workers * (state.get("_prefetch_factor") or 0)
        if most:
            state.setdefault(_INDICES, deque(maxlen=most + 1)).append(indices)


def kept_indices(iterator: Any, handed_out: int, chosen: int) -> list[Any]:
    """The indices of the batches that a loader's workers were given and that are not `handed_out`; None if not known.

    Those of the last `chosen` ones are left out.
    """
    state = vars(iterator) if hasattr(iterator, "__dict__") else {}
    count = max(state.get("_send_idx", 0) - handed_out, 0)
    kept = list(state.get(_INDICES, ()))
    known = kept[: len(kept) - chosen][-count:] if count else []
    return [None] * (count - len(known)) + known


def _next_in_process(iterator: Any) -> Any:
    """The next batch without the worker processes: computed here, also if they were at it or had it ready."""
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    if iterator._dataset_kind:  # only the workers know how far their parts of the data set are
        raise NotContinued("the next batches of an IterableDataset are in its worker processes")
    state = vars(iterator)
    if "_firstnan_fetcher" not in state:
        parts = iterator._dataset, iterator._auto_collation, iterator._collate_fn, iterator._drop_last
        iterator._firstnan_fetcher = _MapDatasetFetcher(*parts)
        iterator._firstnan_sent = deque(_sent(iterator))
        iterator._firstnan_random = _random_state()
    sent = iterator._firstnan_sent
    indices, ready = sent.popleft() if sent else (next(iterator._sampler_iter), ())
    if ready:
        (batch,) = ready
        if hasattr(batch, "reraise"):  # a worker's error
            batch.reraise()
        return batch
    mine = _random_state()  # workers have random numbers of their own
    _set_random_state(iterator._firstnan_random)
    try:
        return iterator._firstnan_fetcher.fetch(indices)
    except Exception as error:
        what = f"{type(error).__name__} outside of a worker process"
        raise NotContinued(f"the next batch cannot be loaded ({what})") from error
    finally:
        iterator._firstnan_random = _random_state()
        _set_random_state(mine)


def _sent(iterator: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The batches that were given to the workers and have not been handed out: their indices, and the data if here."""
    numbers = range(iterator._rcvd_idx, iterator._send_idx)
    known = list(vars(iterator).get(_INDICES, ()))
    if len(known) < len(numbers) or not getattr(iterator, "_in_order", True):
        raise NotContinued("which batches its worker processes have prepared is not known")
    for number, indices in zip(numbers, known[len(known) - len(numbers) :], strict=True):
        yield indices, iterator._task_info.get(number, ())[1:]


def _random_state() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return sys.modules["torch"].get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None


def _set_random_state(state: tuple[Any, ...]) -> None:
    of_torch, of_python, of_numpy = state
    sys.modules["torch"].set_rng_state(of_torch)
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def _forget_threads() -> None:
    """Queues that a thread of the parent empties are emptied by nobody; pools of threads start new ones."""
    original, begin = queue.Queue.put, queue.Queue.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        self._firstnan_is_new = True
        begin(self, *args, **kwargs)

    def put(self: Any, item: Any, block: bool = True, timeout: float | None = None) -> None:
        # Only a queue that was made here may be emptied by a thread that was started here.
        if threading.active_count() == 1 or "_firstnan_is_new" not in vars(self):
            with self.mutex:
                if 0 < self.maxsize <= self._qsize():
                    self._get()
        original(self, item, block, timeout)

    queue.Queue.put, queue.Queue.__init__ = put, made  # type: ignore[method-assign]
    queue.Queue.join = lambda self: None  # type: ignore[method-assign]
    _wait_for_nobody()
    pools = sys.modules.get("concurrent.futures.thread")
    if pools is not None:
        submit = pools.ThreadPoolExecutor.submit

        def submit_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self._threads and not any(thread.is_alive() for thread in self._threads):
                self._threads.clear()
                self._idle_semaphore = threading.Semaphore(0)
            return submit(self, *args, **kwargs)

        pools.ThreadPoolExecutor.submit = submit_anew


_PATIENCE = 3.0
"""Seconds for which a thread of the child may let others wait that were made before the fork."""


def _wait_for_nobody() -> None:
    """Who waits for a thread of the parent (an item, an event, a result) gets an error instead of waiting forever."""
    begin, wait = threading.Condition.__init__, threading.Condition.wait

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        self._firstnan_is_new = True
        begin(self, *args, **kwargs)

    def wait_for_others(self: Any, timeout: float | None = None) -> bool:
        alone, is_new = threading.active_count() == 1, "_firstnan_is_new" in vars(self)
        if timeout is not None or (is_new and not alone):
            return wait(self, timeout)
        if not alone and wait(self, _PATIENCE):
            return True
        raise TimeoutError("the thread that would answer is gone here")

    threading.Condition.__init__, threading.Condition.wait = made, wait_for_others  # type: ignore[method-assign]


def _forget_ranks() -> None:
    """Collectives lead to nobody: each is over at once, with this process's own values."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    if not distributed.is_initialized() and not _joined_again(distributed):
        return
    from torch._C._distributed_c10d import FakeProcessGroup, ProcessGroup
    from torch.nn import Module

    from firstnan.observe.collectives import collectives
    from firstnan.tensors.live_objects import find_live_objects

    collectives.is_replaying = True
    make = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    for group in list(distributed.distributed_c10d._world.pg_map):
        for device in group._device_types:
            group._register_backend(device, ProcessGroup.BackendType.CUSTOM, make(group.rank(), group.size()))
    for name in ("recv", "recv_anysource", "broadcast", "scatter"):
        setattr(ProcessGroup, name, _receiving(getattr(ProcessGroup, name), always=name != "broadcast"))
    ProcessGroup.allreduce = _reducing(ProcessGroup.allreduce, distributed)  # type: ignore[method-assign]
    replicated = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", ())
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for module in [one for one in find_live_objects(Module) if isinstance(one, (replicated, sharded))]:
        with contextlib.suppress(RuntimeError, AttributeError):  # the program has a hook of its own; an older torch
            if isinstance(module, replicated):
                module.register_comm_hook(None, lambda state, bucket: _at_once(bucket.buffer()))
            else:  # its weights were gathered before the fork
                module.set_requires_gradient_sync(False)
                module.set_reshard_after_backward(False)
                module.set_reshard_after_forward(False)


def _joined_again(distributed: Any) -> bool:
    """A program that has left its group before it ends with an error: the step needs one. False if it had none."""
    from firstnan.observe.collectives import collectives

    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    replicated = sys.modules.get("torch.nn.parallel.distributed")
    if not rank.isdigit() or not size.isdigit() or int(size) < 2 or not (replicated or collectives.has_results):
        return False
    with contextlib.suppress(Exception):  # an older torch
        distributed.init_process_group("fake", rank=int(rank), world_size=int(size))
    return bool(distributed.is_initialized())


def _receiving(original: Callable[..., Any], *, always: bool) -> Callable[..., Any]:
    """A call that writes what another rank has sent: here harmless numbers, since nothing comes.

    Unless `always`, finite numbers that are already there are kept: a broadcast often repeats what all ranks have.
    """
    torch = sys.modules["torch"]
    chance = torch.Generator().manual_seed(0)

    def receive(group: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = given if isinstance(given, list) else [given]
        root = next((one.rootRank for one in (*args, *kwargs.values()) if hasattr(one, "rootRank")), None)
        for tensor in tensors if root is None or root != group.rank() else ():
            if tensor.is_floating_point() and (always or not tensor.isfinite().all()):
                tensor.detach().copy_(torch.rand(tensor.shape, generator=chance) * 0.9 + 0.1)
            elif always and not tensor.is_floating_point():
                tensor.zero_()
            tensor._firstnan_is_received = True
        return original(group, given, *args, **kwargs)

    return receive


def _reducing(original: Callable[..., Any], distributed: Any) -> Callable[..., Any]:
    """A sum over ranks: here over ranks that are all like this one."""
    torch = sys.modules["torch"]

    class Over(distributed.Work):  # type: ignore[misc]
        """A call that is over; what waits for it gets its tensors."""

        def __init__(self, tensors: list[Any]) -> None:
            super().__init__()
            self._tensors = tensors

        def wait(self, *args: Any) -> bool:
            return True

        def is_completed(self) -> bool:
            return True

        def result(self) -> list[Any]:
            return self._tensors

        def get_future(self) -> Any:
            return _at_once(self._tensors)

    def allreduce(group: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        original(group, given, *args, **kwargs)
        tensors = given if isinstance(given, list) else [given]
        operation = next((one.reduceOp for one in (*args, *kwargs.values()) if hasattr(one, "reduceOp")), None)
        if operation is None or operation == distributed.ReduceOp.SUM:
            with torch.no_grad(), contextlib.suppress(RuntimeError):  # a view that must not be written
                for tensor in tensors:
                    tensor.detach().copy_(torch.stack([tensor.detach()] * group.size()).sum(0))
        return Over(tensors)

    return allreduce


def is_received(value: Any) -> bool:
    """Whether another rank has sent this in the failing step; it is something else in the child."""
    return "_firstnan_is_received" in getattr(value, "__dict__", ())


def _at_once(result: Any) -> Any:
    future = sys.modules["torch"].futures.Future()
    future.set_result(result)
    return future


_ANSWER = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class NoServer:
    """Takes every request and answers that all is well, with an empty object."""

    def sendall(self, data: Any, flags: int = 0) -> None: ...

    answered = False
    """Whether anybody has read an answer, in which something may be missing."""

    def makefile(self, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        NoServer.answered = True
        return io.BytesIO(_ANSWER)

    def close(self) -> None: ...

    def settimeout(self, seconds: Any) -> None: ...

    def setsockopt(self, *args: Any) -> None: ...

    def fileno(self) -> int:
        return -1


def connect_to_nobody(connection: Any) -> None:
    """In place of the `connect` of an HTTP connection: every request is answered, and none is sent."""
    connection.sock = NoServer()


def _answer_requests() -> None:
    """There is no network; a program that reports its progress over HTTP goes on as if it had arrived."""
    for name in ("http.client", "urllib3.connection"):  # `requests` uses the second, which connects in its own way
        client = sys.modules.get(name)
        if client is not None:
            client.HTTPConnection.connect = connect_to_nobody
            client.HTTPSConnection.connect = connect_to_nobody


def pretend_to_write() -> None:
    """Lets a program go on that is not allowed to change files: what it writes goes nowhere."""
    builtins.open = io.open = _opener(io.open)
    os.open = _descriptor_opener(os.open)
    for name in _CHANGES:
        setattr(os, name, _unless_refused(getattr(os, name)))
    torch = sys.modules.get("torch")
    if torch is not None:
        save = torch.save

        def save_nowhere(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
            if not isinstance(file, (str, os.PathLike)):
                save(value, file, *args, **kwargs)

        torch.save = save_nowhere  # type: ignore[attr-defined]
    loading = sys.modules.get("torch.utils.data.dataloader")
    if loading is not None:  # worker processes cannot be started either
        loading.DataLoader._get_iterator = lambda self: loading._SingleProcessDataLoaderIter(_without_workers(self))


def _without_workers(loader: Any) -> Any:
    vars(loader).update(num_workers=0, timeout=0, prefetch_factor=None, persistent_workers=False)
    return loader


def _unless_refused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; where it is refused because nothing may be changed, it does nothing."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise

    return call


def _opener(original: Callable[..., Any]) -> Callable[..., Any]:
    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        try:
            return original(file, mode, *args, **kwargs)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            return original(in_memory(file, copied="w" not in mode), mode.replace("x", "w"), *args, **kwargs)

    return open_


def _descriptor_opener(original: Callable[..., int]) -> Callable[..., int]:
    def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        try:
            return original(path, flags, *args, **kwargs)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            return in_memory(path, copied=not flags & os.O_TRUNC)

    return open_


def in_memory(path: Any, *, copied: bool) -> int:
    """A file in memory in place of one that cannot be opened for writing; `copied`: with its content, if it exists."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("pretended")
    else:
        with tempfile.TemporaryFile() as unnamed:
            number = os.dup(unnamed.fileno())
    if copied and os.path.isfile(path):
        with io.FileIO(path) as file:
            os.write(number, file.read())
        os.lseek(number, 0, os.SEEK_SET)
    return number


@contextlib.contextmanager
def as_worker(iterator: Any, number: int) -> Iterator[None]:
    """In the `with` block this process is the worker with that number of a loader's iterator; its seeds stay."""
    import torch
    from torch.utils.data._utils import worker

    seed = int(getattr(iterator, "_base_seed", 0)) + number
    worker._worker_info = worker.WorkerInfo(
        id=number, num_workers=int(iterator._num_workers), seed=seed, dataset=iterator._dataset
    )
    try:
        random.seed(seed)
        torch.manual_seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(worker._generate_state(seed - number, number))
        prepare = getattr(iterator, "_worker_init_fn", None)
        if prepare is not None:
            prepare(number)
        yield
    finally:
        worker._worker_info = None


@contextlib.contextmanager
def when_called(codes: list[CodeType], then: Callable[[], None]) -> Iterator[None]:
    """Calls `then` when one of these functions is called in the `with` block, also if that ends in an error."""

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and any(frame.f_code is code for code in codes):
            sys.setprofile(None)
            then()

    sys.setprofile(watch if codes else None)
    try:
        yield
    finally:
        sys.setprofile(None)
