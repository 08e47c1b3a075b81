"""A child process that can change nothing of the user's: it has its own view of files, network, processes and pipes.

Linux only. The child gets its own user, mount, network and process namespaces. Every file system is covered by a layer
in memory that takes its writes, so C code and other programs it starts are covered too. Where the system allows no
namespaces, a forked child gives up the right to change anything (`system_calls`), and a program cannot be started.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import math
import os
import pickle
import random
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from firstnan.engine.system_calls import change_nothing
from firstnan.observe.forked import NoServer, alone_after_fork, end_thread_pools, pretend_to_write

_NEW_FILES, _NEW_IPC, _NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000
_DIE_WITH_PARENT = 1
_OF_THE_KERNEL = {
    "proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "mqueue", "securityfs", "debugfs", "tracefs", "bpf",
    "pstore", "configfs", "hugetlbfs", "binfmt_misc", "autofs", "efivarfs", "fusectl", "selinuxfs", "nsfs",
}  # fmt: skip
_SCRATCH = "/sys"
_MOST_ENTRIES = 4096
_COPIED = 256 << 20
"""Open files up to this size are copied for the child, and so are other files, up to this size together."""
_COPIED_ENTRY = 16 << 20
"""The largest file that is copied where its folder cannot be covered; the child cannot write larger ones."""
_IDLE = 15.0
"""Seconds without any processor time after which a child counts as stuck."""

_MUTED = (0, 1) if os.environ.get("FIRSTNAN_DEBUG") else (0, 1, 2)
_IN_CHILD = "this is such a child already"
_because: list[str] = []
"""Why isolation cannot be had here, once that is known."""
_runs_again = False
_is_cut_off = False
_is_filtered = False
"""Whether the kernel refuses this child whatever would change something."""


def unavailable() -> str:
    """Why there is no isolation here; empty if there is, as far as is known."""
    if not sys.platform.startswith("linux"):
        return f"there is no isolation on {sys.platform}"
    if is_off():
        return "FIRSTNAN_ISOLATION=off"
    torch = sys.modules.get("torch")
    for name in ("cuda", "xpu"):
        device = getattr(torch, name, None)
        if device is not None and device.is_initialized():
            return f"a process that uses {name.upper()} cannot be forked"
    return _because[0] if _because else ""


def is_off() -> bool:
    """Whether the user wants none."""
    return os.environ.get("FIRSTNAN_ISOLATION") == "off"


def is_child() -> bool:
    """Whether this process only investigates, so that nothing it does to the program's objects matters."""
    return _IN_CHILD in _because or _runs_again


def started_as_child() -> None:
    """This process runs the program again, and ends after that."""
    global _runs_again
    _runs_again = True


_NOBODY_THERE = {
    errno.EPIPE, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ENOTCONN, errno.ENETDOWN,
    errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ETIMEDOUT, errno.EROFS,
}  # fmt: skip
_REFUSED = {errno.EPERM, errno.EAGAIN, errno.ENOSYS, errno.ENOENT, errno.ECHILD}
"""What a filtered child may get: a file that it wrote or a folder that it made is not there either."""


def is_of_isolation(error: BaseException | None) -> bool:
    """Whether an error in a child, or one that led to it, is about somebody who does not answer or a refused call."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        if isinstance(error, EOFError | TimeoutError | socket.gaierror):
            return True
        if isinstance(error, OSError) and error.errno in (_NOBODY_THERE | _REFUSED if _is_filtered else _NOBODY_THERE):
            return True
        if isinstance(error, RuntimeError) and "attached to a different loop" in str(error):  # of asyncio
            return True
        if isinstance(error, LookupError | AssertionError) and NoServer.answered:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def is_cut_off() -> bool:
    """Whether this child has pipes or connections of the program, of which nothing comes any more."""
    return _is_cut_off


class IsolationError(OSError):
    """This system does not allow it."""


# --- the child's view ----------------------------------------------------------------------------------------------


def _libc(name: str, *args: Any) -> None:
    """Calls a function of libc; raises IsolationError if it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args):
        number = ctypes.get_errno()
        raise IsolationError(number, f"{name}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    words = [word.encode() if word else None for word in (source, target, kind)]
    _libc("mount", *words, ctypes.c_ulong(flags), options.encode() if options else None)


def _enter_view(shared: Sequence[str] = ()) -> None:
    """Gives this process, which has one thread, its own view of the system; `shared` folders stay the real ones."""
    if os.environ.get("FIRSTNAN_ISOLATION") == "filter":
        raise IsolationError(errno.EPERM, "FIRSTNAN_ISOLATION=filter")
    here = os.getcwd()
    flags = _NEW_FILES | _NEW_IPC | _NEW_NETWORK | _NEW_PROCESSES
    as_user = os.geteuid() != 0 or os.environ.get("FIRSTNAN_ISOLATION") == "user"
    if not as_user:
        try:
            _libc("unshare", flags)
        except IsolationError:  # root in a container may be allowed no more than a user
            as_user = True
    if as_user:
        user, group = os.geteuid(), os.getegid()
        _libc("unshare", flags | _NEW_USER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _mount("", "/", "", _RECURSIVE | _PRIVATE)
    _View("userxattr,xino=off" if as_user else "redirect_dir=on,xino=off").build()
    for folder in shared:
        _mount(folder, f"{_SCRATCH}/root{folder}", "", _BIND)
    os.chroot(f"{_SCRATCH}/root")
    os.chdir(here)
    with contextlib.suppress(OSError):
        _loopback_up()


def _loopback_up() -> None:
    """Lets the child bind its own local ports."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


_HIDING = 5.0
"""Seconds for looking through folders."""


def _hide_new(devices: dict[str, int], since: float, shared: Sequence[str]) -> None:
    """Removes from this process's view what was created in these folders `since` a time; not in `shared` ones.

    `devices`: the folders, each with its device outside: where that is still the same, nothing is removed, since
    the files would be the user's own. Where the file system does not tell when a file was created, it stays.
    """
    own = {os.stat(folder).st_dev for folder in devices} - set(devices.values())
    until, waiting = time.monotonic() + _HIDING, list(devices)
    kept = {os.path.realpath(one) for one in shared}
    seen = set(kept)
    while waiting and time.monotonic() < until:
        folder = os.path.realpath(waiting.pop())
        if folder in seen or not os.path.isdir(folder) or os.stat(folder).st_dev not in own:
            continue
        seen.add(folder)
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(folder)):
                is_folder = entry.is_dir(follow_symlinks=False)
                if any(one == entry.path or one.startswith(f"{entry.path}/") for one in kept):
                    continue
                if entry.stat(follow_symlinks=False).st_ctime >= since and _created(entry.path) >= since:
                    shutil.rmtree(entry.path, ignore_errors=True) if is_folder else os.unlink(entry.path)
                elif is_folder:
                    waiting.append(entry.path)


def _created(path: str) -> float:
    """When a file was created; 0 if that is not known."""
    data = ctypes.create_string_buffer(256)
    here, not_followed, asked = -100, 0x100, 0x800  # AT_FDCWD, AT_SYMLINK_NOFOLLOW, STATX_BTIME
    with contextlib.suppress(IsolationError, AttributeError):  # an old libc
        _libc("statx", here, os.fsencode(path), not_followed, asked, data)
        (known,), (seconds, fraction) = struct.unpack_from("I", data), struct.unpack_from("qI", data, 80)
        return seconds + fraction / 1e9 if known & asked else 0.0
    return 0.0


class _View:
    """A copy-on-write view of all mounted file systems, built in memory that is mounted on /sys, out of the way."""

    def __init__(self, options: str) -> None:
        self._options, self._layers, self._copies_left = options, 0, _COPIED
        self._kinds = _mounted()
        self._sys = os.open(_SCRATCH, os.O_PATH | os.O_DIRECTORY)

    def build(self) -> None:
        _mount("tmpfs", _SCRATCH, "tmpfs", options="size=25%,mode=755")
        os.mkdir(f"{_SCRATCH}/root")
        self._cover("/", f"{_SCRATCH}/root")
        os.close(self._sys)

    def _below(self, path: str) -> list[str]:
        """The mount points below `path` that are below no other one."""
        inside = path.rstrip("/") + "/"
        found: list[str] = []
        for one in sorted(self._kinds):
            if one != path and one.startswith(inside) and not any(one.startswith(f"{f}/") for f in found):
                found.append(one)
        return found

    def _cover(self, path: str, target: str) -> None:
        if path in ("/dev", _SCRATCH) or self._kinds.get(path) in _OF_THE_KERNEL:
            _mount(f"/proc/self/fd/{self._sys}" if path == _SCRATCH else path, target, "", _BIND | _RECURSIVE)
            if path not in ("/proc", _SCRATCH):  # below are shared memory, or folders that are mounted when used
                self._cover_below(path, target)
            if path == "/dev" and "/dev/shm" not in self._kinds and os.path.isdir("/dev/shm"):
                _mount("tmpfs", f"{target}/shm", "tmpfs", options="mode=1777")
        elif not os.path.isdir(path):
            self._read_only(path, target)
        elif self._overlay(path, target):
            self._cover_below(path, target)
        elif self._below(path):
            self._entries(path, target)
        else:
            self._read_only(path, target)

    def _cover_below(self, path: str, target: str) -> None:
        for one in self._below(path):
            inside = f"{target.rstrip('/')}/{os.path.relpath(one, path)}"
            if os.path.lexists(inside):
                try:
                    self._cover(one, inside)
                except FileNotFoundError:
                    continue

    def _overlay(self, path: str, target: str) -> bool:
        self._layers += 1
        upper, work = f"{_SCRATCH}/upper{self._layers}", f"{_SCRATCH}/work{self._layers}"
        os.mkdir(upper)
        os.mkdir(work)
        with contextlib.suppress(OSError):
            info = os.stat(path)
            os.chmod(upper, stat.S_IMODE(info.st_mode))
            os.chown(upper, info.st_uid, info.st_gid)
        if any(c in path for c in ",:\\"):
            return False
        for more in (",volatile", ""):
            options = f"lowerdir={path},upperdir={upper},workdir={work},{self._options}{more}"
            with contextlib.suppress(IsolationError):
                _mount("overlay", target, "overlay", options=options)
                return True
        return False

    def _read_only(self, path: str, target: str) -> None:
        """Better that a write fails than that it arrives."""
        _mount(path, target, "", _BIND)
        with contextlib.suppress(IsolationError):
            _mount("", target, "", _BIND | _REMOUNT | _READ_ONLY)
            return
        _libc("umount2", target.encode(), 2)

    def _entries(self, path: str, target: str) -> None:
        """Covers a folder entry by entry: a user may not cover one that has others mounted inside."""
        entries = list(os.scandir(path))
        if len(entries) > _MOST_ENTRIES:
            raise IsolationError(errno.E2BIG, f"{path} has {len(entries)} entries, and others mounted inside")
        for entry in entries:
            inside = f"{target.rstrip('/')}/{entry.name}"
            with contextlib.suppress(PermissionError):
                if entry.is_symlink():
                    os.symlink(os.readlink(entry.path), inside)
                elif entry.is_dir():
                    os.mkdir(inside)
                    self._cover(entry.path, inside)
                elif entry.is_file():
                    size = entry.stat().st_size
                    if size <= min(_COPIED_ENTRY, self._copies_left) and os.access(entry.path, os.R_OK | os.W_OK):
                        self._copies_left -= size
                        shutil.copy2(entry.path, inside)
                    else:
                        os.close(os.open(inside, os.O_CREAT))
                        self._read_only(entry.path, inside)


def _mounted() -> dict[str, str]:
    """Mount point -> kind of file system."""
    found = {}
    with open("/proc/self/mountinfo") as file:
        for line in file:
            words = line.split()
            point = words[4].encode().decode("unicode_escape").encode("latin-1").decode(errors="surrogateescape")
            found[point] = words[words.index("-") + 1]
    return found


# --- what a forked child inherits -----------------------------------------------------------------------------------


def _separate_descriptors(keep: int) -> None:
    """Replaces open files by copies at the same position, and pipes and sockets by ones that lead nowhere."""
    null, sinks = os.open(os.devnull, os.O_RDWR), list[int]()
    for number in _MUTED:
        os.dup2(null, number)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number <= 2 or number in (keep, null, *sinks):
            continue
        try:
            sinks += _separate(number)
        except OSError as error:
            if error.errno != errno.EBADF:  # better that nothing can be written than that it arrives
                os.dup2(null, number)
    os.close(null)
    if sinks:
        global _is_cut_off
        _is_cut_off = True
        _thread.start_new_thread(_discard, (sinks,))


def _discard(numbers: list[int]) -> None:
    """Reads whatever is written to the pipes and sockets that lead nowhere, so that nobody waits for space."""
    waiting = select.poll()
    for number in numbers:
        waiting.register(number, select.POLLIN)
    while numbers:
        for number, _ in waiting.poll():
            with contextlib.suppress(OSError):
                if os.read(number, 1 << 16):
                    continue
            waiting.unregister(number)
            numbers.remove(number)
            os.close(number)


def _separate(number: int) -> list[int]:
    """Gives an open file's number to one of the child's own; returns what has to be read and discarded for that."""
    import fcntl

    info, flags = os.fstat(number), fcntl.fcntl(number, fcntl.F_GETFL)
    closes, sinks = not os.get_inheritable(number), list[int]()
    if stat.S_ISREG(info.st_mode):
        new = _private_copy(number, info.st_size, flags)
        with contextlib.suppress(OSError):
            os.lseek(new, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
    elif stat.S_ISFIFO(info.st_mode) or stat.S_ISSOCK(info.st_mode):
        # A connection that takes everything, and from which nothing comes any more.
        ours, other = socket.socketpair()
        other.shutdown(socket.SHUT_WR)
        new, sinks = ours.detach(), [other.detach()]
        fcntl.fcntl(new, fcntl.F_SETFL, flags & os.O_NONBLOCK)
    elif os.isatty(number):
        new = os.open(os.devnull, os.O_RDWR)
    else:
        return sinks
    os.dup2(new, number, inheritable=not closes)
    os.close(new)
    return sinks


def _private_copy(number: int, size: int, flags: int) -> int:
    import fcntl

    path, access = f"/proc/self/fd/{number}", flags & os.O_ACCMODE
    if access == os.O_RDONLY or (access == os.O_RDWR and size > _COPIED):
        return os.open(path, os.O_RDONLY)  # its own position in the file
    new = os.memfd_create("copy")
    os.ftruncate(new, size)
    if size <= _COPIED:
        with open(path, "rb", buffering=0) as source:
            at = 0
            while at < size and (sent := os.sendfile(new, source.fileno(), at, size - at)):
                at += sent
    fcntl.fcntl(new, fcntl.F_SETFL, flags & (os.O_APPEND | os.O_NONBLOCK))
    return new


def _separate_memory() -> None:
    """Makes memory that is shared with files or other processes the child's own."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    with open("/proc/self/maps") as file:
        lines = [line.split(None, 5) for line in file]
    for area, rights, offset, _, _, *path in lines:
        name = path[0].strip() if path else ""
        if (
            rights[1] != "w"
            or rights[3] != "s"
            or (name.startswith("/dev/") and not name.startswith(("/dev/shm", "/dev/zero")))
        ):
            continue
        first, last = (int(one, 16) for one in area.split("-"))
        size, how, number = last - first, 0x10 | 0x2, -1  # MAP_FIXED, MAP_PRIVATE
        with contextlib.suppress(OSError):
            if name.startswith("/") and not name.endswith("(deleted)"):
                number = os.open(name, os.O_RDONLY)
        if number >= 0:
            libc.mmap(first, size, 3, how, number, int(offset, 16))
            os.close(number)
        else:
            content = ctypes.string_at(first, size)
            libc.mmap(first, size, 3, how | 0x20, -1, 0)  # MAP_ANONYMOUS
            ctypes.memmove(first, content, size)


# --- a forked child -------------------------------------------------------------------------------------------------


@dataclass
class Channel:
    """The child's way to talk to its parent; in the child only."""

    number: int

    def send(self, message: Any) -> None:
        data = pickle.dumps(message)
        data = len(data).to_bytes(8, "big") + data
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self.number, data) :]

    def leave(self) -> NoReturn:
        """Ends the child without any of the program's own handlers."""
        os._exit(0)


class Fork:
    """A forked child as its parent sees it."""

    def __init__(self, process: int, number: int) -> None:
        self._process, self._number, self._data = process, number, b""
        self.stuck = False
        """Whether it took too long, or waited for something that never came."""

    def receive(self, seconds: float, until: float = math.inf) -> Iterator[Any]:
        """What the child sends, until it ends; each message gives it the whole time again, but not beyond `until`."""
        left, busy, used = TimeLeft(self._process, seconds), time.monotonic(), -1.0
        while True:
            while len(self._data) >= 8 and len(self._data) >= 8 + (size := int.from_bytes(self._data[:8], "big")):
                message, self._data = pickle.loads(self._data[8 : 8 + size]), self._data[8 + size :]
                yield message
            ready, _, _ = select.select([self._number], [], [], min(0.5, max(until - time.monotonic(), 0.0)))
            now = time.monotonic()
            if now >= until:
                self.stuck = True
                return
            if ready:
                more = os.read(self._number, 1 << 20)
                if not more:
                    return
                self._data += more
                busy, left = now, TimeLeft(self._process, seconds)
                continue
            if (time_used := _processor_time(self._process)) != used:
                used, busy = time_used, now
            if left.is_over() or now - busy > _IDLE:
                self.stuck = True
                return

    def end(self) -> None:
        """Kills the child and everything it started, if they still run, and cleans up."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)
        os.close(self._number)


def _with_children(process: int) -> list[int]:
    with open(f"/proc/{process}/task/{process}/children") as file:
        return [process, *map(int, file.read().split())]


def _processor_time(process: int) -> float:
    """What a process and its child have used, in clock ticks; the child's own children count when they end."""
    total = 0.0
    with contextlib.suppress(OSError, ValueError):
        for one in _with_children(process):
            with open(f"/proc/{one}/stat") as file:
                total += sum(map(float, file.read().rpartition(")")[2].split()[11:15]))
    return total


def kept_waiting(process: int) -> float:
    """For how many seconds a process could have run, while others had all processors."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


class TimeLeft:
    """A time limit for a process and its child; what they wait for a processor does not count, up to three times it."""

    def __init__(self, process: int, seconds: float) -> None:
        self._process, self._seconds = process, seconds
        self._began, self._waited = time.monotonic(), self._kept_waiting()

    def _kept_waiting(self) -> float:
        with contextlib.suppress(OSError, ValueError):
            return sum(map(kept_waiting, _with_children(self._process)))
        return 0.0

    def is_over(self) -> bool:
        passed = time.monotonic() - self._began
        if passed <= self._seconds:
            return False
        waited = min(self._kept_waiting() - self._waited, 3 * self._seconds)
        return passed - waited > self._seconds


def fork() -> Fork | Channel | None:
    """Forks: returns a Channel in the child, where nothing of the user's can be changed, and a Fork in the parent.

    None if this system does not allow it.
    """
    if unavailable():
        return None
    reading, writing = os.pipe()
    numbers = random.getstate()  # Python seeds its generator anew in a forked process
    pools_ended = end_thread_pools()
    if "torch" in sys.modules:
        from firstnan.tensors.live_objects import visit_before_fork

        visit_before_fork()
    with _ctrl_c_deferred() as pressed:
        process = _fork()
    if process:
        os.close(writing)
        child = Fork(process, reading)
        try:
            pressed()
            first = next(child.receive(30.0), "the child could not be started")
        except KeyboardInterrupt:
            child.end()
            raise
        if first is None:
            return child
        _because.append(first)
        child.end()
        return None
    channel = Channel(writing)
    try:
        os.close(reading)
        _die_with_parent()
        has_view = _has_view()
        _move_on(has_view)
        _separate_descriptors(writing)
        _separate_memory()
        random.setstate(numbers)
        alone_after_fork(threads=pools_ended)
        if not has_view:
            global _is_filtered
            _is_filtered = True
            pretend_to_write()
            change_nothing()
        _because.append(_IN_CHILD)
    except BaseException as error:
        channel.send(f"no isolated process can be started here: {error}")
        os._exit(1)
    channel.send(None)
    return channel


@contextlib.contextmanager
def _ctrl_c_deferred() -> Iterator[Callable[[], None]]:
    """Keeps Ctrl-C back, since python ignores what functions raise around a fork. Calling the result lets it in."""
    handler, came = signal.getsignal(signal.SIGINT), list[Any]()
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        yield lambda: handler(*came[0]) if came else None
    finally:
        signal.signal(signal.SIGINT, handler)


def _has_view() -> bool:
    """Gives this process its own view; False if this system does not allow it."""
    try:
        _enter_view()
    except OSError:
        return False
    return True


def _fork() -> int:
    with warnings.catch_warnings():  # newer Pythons warn of threads, which the child does without
        warnings.simplefilter("ignore")
        return os.fork()


def _die_with_parent() -> None:
    """Ends with the parent, however that ends; the terminal's Ctrl-C is for the parent."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        os.setsid()
    if not sys.platform.startswith("linux"):
        return
    _libc("prctl", _DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, the child goes first


def _move_on(has_view: bool) -> None:
    """Goes on in the first process of the new process namespace: when that ends, so do all that it started.

    A process that has made such a namespace could itself start no thread any more. Without its own view, a mount would
    be one of the whole system.
    """
    process = _fork()
    if not process:
        _libc("prctl", _DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        with contextlib.suppress(IsolationError):  # otherwise /proc has the numbers of the parent's processes
            if has_view:
                _mount("proc", "/proc", "proc")
        return
    os.closerange(3, 1 << 16)
    _, status = os.waitpid(process, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0x7F)


# --- a started child ------------------------------------------------------------------------------------------------


class Started:
    """A program started in a process of its own; `isolated`: in its own view, except for `shared` folders.

    Only the open file `keep` leads outside. It dies with this process, and with it whatever it has started.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: dict[str, str],
        folder: str | None,
        *,
        keep: int,
        isolated: bool = True,
        shared: Sequence[str] = (),
        reads_from: int | None = None,
        without_new: tuple[Sequence[str], float] | None = None,
    ) -> None:
        """`reads_from`: where the file begins for it that is the standard input here; None if there is none.

        `without_new`: folders, and the time since when files that were created in them are hidden if it is isolated.
        """
        for one in shared:
            os.makedirs(one, exist_ok=True)
        reading, writing = os.pipe()
        with _ctrl_c_deferred() as pressed:
            self._process = _fork()
        if not self._process:
            try:
                os.close(reading)
                self._exec(words, environment, folder, keep, writing, isolated, shared, reads_from, without_new)
            except BaseException as error:
                os.write(writing, str(error).encode())
            os._exit(1)
        os.close(writing)
        try:
            pressed()
            with open(reading, "rb") as file:
                why_not = file.read().decode(errors="replace")  # empty once the program has replaced this process
        except KeyboardInterrupt:
            self.end()
            raise
        if why_not:
            self.end()
            raise IsolationError(why_not)

    def _exec(
        self,
        words: Sequence[str],
        environment: dict[str, str],
        folder: str | None,
        keep: int,
        writing: int,
        isolated: bool,
        shared: Sequence[str],
        reads_from: int | None,
        without_new: tuple[Sequence[str], float] | None,
    ) -> NoReturn:
        _die_with_parent()
        null = os.open(os.devnull, os.O_RDWR)
        given = null
        if reads_from is not None:  # opened anew: the position of the program's own is not touched
            given = os.open("/proc/self/fd/0", os.O_RDONLY)
            os.lseek(given, reads_from, os.SEEK_SET)
        if folder is not None:
            os.chdir(folder)
        if isolated:
            folders, since = without_new or ((), 0.0)
            devices = {one: os.stat(one).st_dev for one in folders if os.path.isdir(one)}
            _enter_view(shared)
            _move_on(has_view=True)
            _hide_new(devices, since, shared)
        for number in _MUTED:
            os.dup2(given if number == 0 else null, number)
        os.set_inheritable(keep, True)
        os.set_inheritable(writing, False)
        for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
            if int(name) > 2 and int(name) not in (keep, writing):
                with contextlib.suppress(OSError):
                    os.close(int(name))
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(one, signal.SIG_DFL)
        os.execve(words[0], list(words), environment)

    def wait(self, seconds: float) -> bool:
        """Waits until it ends; False if it did not end in time."""
        left = TimeLeft(self._process, seconds)
        while not left.is_over():
            process, _ = os.waitpid(self._process, os.WNOHANG)
            if process:
                self._process = 0
                return True
            time.sleep(0.02)
        return False

    def end(self) -> None:
        """Kills it and everything it started."""
        if self._process:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._process, 0)
