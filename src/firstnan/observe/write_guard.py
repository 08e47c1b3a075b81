"""Keeps away what a replay in the program's own process would change: files, folders, requests, other programs.

Only Python's own functions can be guarded. `unguarded` names what would pass by them; then the loop is not replayed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from firstnan.observe.forked import connect_to_nobody, in_memory
from firstnan.observe.manifest import GUARDED
from firstnan.observe.patches import Patches

_LARGEST_COPY = 64 << 20
"""Open files up to this size are replaced by a copy while the loop is replayed."""
_HARMLESS_THREADS = ("_pin_memory_loop", "TMonitor")
"""They write nothing but what the program prints."""


def unguarded() -> str:
    """What the program has open that a replay in its own process would change; empty if there is nothing."""
    if sys.platform == "win32":
        return "open files cannot be guarded on Windows"
    sqlite = sys.modules.get("sqlite3")
    if sqlite is not None and any(map(_is_open, _live_objects(sqlite.Connection))):
        return "it has a database open"
    if any(map(_is_connected, _live_objects(socket.socket))):
        return "it has a connection open"
    if any(rights[1] == "w" and rights[3] == "s" for rights in _mapped_files()):
        return "a file is mapped into its memory"
    owned = {one.fileno() for one in _live_objects(io.FileIO) if not one.closed}
    written = _written_files()
    if any(number not in owned or os.fstat(number).st_size > _LARGEST_COPY for number in written):
        return "it has a file open that only its owner may write"
    if written and not all(map(_is_harmless, threading.enumerate())):
        return "it has a file open that its other threads may write"
    return ""


def _live_objects(*kinds: type) -> list[Any]:
    # Not isinstance, which asks objects for their class: some warn when they are asked for anything.
    return [one for one in gc.get_objects() if issubclass(type(one), kinds)]


def _is_open(database: Any) -> bool:
    try:
        return bool(database.total_changes >= 0)
    except Exception:  # closed, or another thread's
        return "closed" not in str(sys.exc_info()[1])


def _is_connected(one: socket.socket) -> bool:
    try:
        return bool(one.getpeername())  # that of a pair of sockets has no name
    except OSError:
        return False


def _is_harmless(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    name = getattr(target, "__name__", type(thread).__name__)
    return thread is threading.current_thread() or name in _HARMLESS_THREADS


def _mapped_files() -> Iterator[str]:
    """The rights to each part of a file that is mapped into memory."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as file:
        for line in file:
            _, rights, _, _, _, *path = line.split(None, 5)
            if path and path[0].startswith("/") and not path[0].startswith("/dev/"):
                yield rights


def _written_files() -> list[int]:
    """The descriptors of files that are open for writing, without those of the output."""
    import fcntl

    found = []
    for folder in ("/proc/self/fd", "/dev/fd"):
        if os.path.isdir(folder):
            for number in sorted(int(name) for name in os.listdir(folder)):
                with contextlib.suppress(OSError):
                    writes = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
                    if number > 2 and writes and stat.S_ISREG(os.fstat(number).st_mode):
                        found.append(number)
            break
    return found


class WriteGuard:
    """Between `begin` and `end`, what the program writes goes to memory and is forgotten.

    `owns` tells the program's code from firstnan's, whose own files arrive.
    """

    def __init__(self, owns: Callable[[CodeType], bool]) -> None:
        self._owns = owns
        self._patches: Patches | None = None
        self._files: list[tuple[int, int]] = []
        """Descriptor, and a duplicate that leads to the real file."""

    def begin(self) -> None:
        if self._patches is not None:
            return
        _flush_all()
        for number in _written_files():
            self._files.append((number, os.dup(number)))
            copy = _copy_of(number)
            os.dup2(copy, number, inheritable=os.get_inheritable(number))
            os.close(copy)
        self._patches = Patches()
        for module, name in GUARDED:
            if module in sys.modules:
                *inner, last = name.split(".")
                owner = functools.reduce(getattr, inner, sys.modules[module])
                self._patches.put(owner, last, functools.partial(self._guarded, f"{module}.{name}"))

    def end(self) -> None:
        if self._patches is None:
            return
        self._patches.remove()
        self._patches = None
        _flush_all()
        for number, real in self._files:
            os.dup2(real, number, inheritable=os.get_inheritable(number))
            os.close(real)
        self._files = []

    def _guarded(self, name: str, original: Any) -> Callable[..., Any]:
        pretend: Callable[..., Any] = _PRETENDED.get(name, _do_nothing)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_ours(sys._getframe(1)):
                return original(*args, **kwargs)
            return pretend(original, *args, **kwargs)

        return call

    def _is_ours(self, frame: FrameType | None) -> bool:
        """Whether firstnan's own code is at work, not the program's."""
        while frame is not None and not self._owns(frame.f_code):
            module = frame.f_globals.get("__name__") or ""
            if module.startswith("firstnan.") and module != __name__:
                return True
            frame = frame.f_back
        return False


def _flush_all() -> None:
    """Writes what Python's file objects hold back: text first, which goes through files of bytes."""
    for file in [*_live_objects(io.TextIOWrapper), *_live_objects(io.BufferedWriter, io.BufferedRandom)]:
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile, or detached
            if not file.closed and file.writable():
                file.flush()


def _copy_of(number: int) -> int:
    """A file in memory with the same content, at the same position."""
    import fcntl

    flags, size = fcntl.fcntl(number, fcntl.F_GETFL), os.fstat(number).st_size
    copy = in_memory(None, copied=False)
    if flags & os.O_ACCMODE == os.O_RDWR:
        os.write(copy, os.pread(number, size, 0))
    else:
        os.ftruncate(copy, size)
    os.lseek(copy, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
    fcntl.fcntl(copy, fcntl.F_SETFL, flags & os.O_APPEND)
    return copy


# What a function of the program's does instead. The first argument is the function itself.


def _do_nothing(original: Any, *args: Any, **kwargs: Any) -> None:
    pass


def _open(original: Any, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    if isinstance(file, int) or not set(mode) & set("wax+"):
        return original(file, mode, *args, **kwargs)
    return original(in_memory(file, copied="w" not in mode), mode.replace("x", "w"), *args, **kwargs)


def _open_descriptor(original: Any, path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
    if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
        return original(path, flags, *args, **kwargs)
    return in_memory(path, copied=not flags & os.O_TRUNC)


def _save(original: Any, value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
    if not isinstance(file, (str, os.PathLike)):
        original(value, file, *args, **kwargs)


def _start(original: Any, process: Any, *args: Any, **kwargs: Any) -> None:
    """Starts a program that does nothing, so the output and the end of the real one can be waited for."""
    about_output = ("stdin", "stdout", "stderr", "text", "encoding", "universal_newlines", "bufsize")
    kwargs = {name: value for name, value in kwargs.items() if name in about_output}
    original(process, [sys.executable, "-S", "-c", ""], **kwargs)


def _connect(original: Any, connection: Any) -> None:
    connect_to_nobody(connection)


_PRETENDED: dict[str, Callable[..., Any]] = {
    "builtins.open": _open,
    "io.open": _open,
    "os.open": _open_descriptor,
    "torch.save": _save,
    "subprocess.Popen.__init__": _start,
    "http.client.HTTPConnection.connect": _connect,
    "http.client.HTTPSConnection.connect": _connect,
}
"""All others do nothing."""
