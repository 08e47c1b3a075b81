"""What the kernel tells about a folder while a program works in it: names created, renamed and deleted (inotify).

A copy-on-write view of the folder in another mount namespace has inodes of its own, so nothing done there shows here.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import struct
import threading
from pathlib import Path
from typing import NamedTuple

_NAMES = {0x40: "moved from", 0x80: "moved to", 0x100: "created", 0x200: "deleted"}
_HEADER = struct.Struct("iIII")


class Event(NamedTuple):
    step: int
    what: str
    name: str


class DirectoryWatch:
    """Collects the events of one folder, without those of the folders in it."""

    def __init__(self, folder: Path) -> None:
        self.events: list[Event] = []
        self._folder = folder
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._ended = threading.Event()

    def __enter__(self) -> DirectoryWatch:
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK)
        assert self._descriptor >= 0, os.strerror(ctypes.get_errno())
        watch = self._libc.inotify_add_watch(self._descriptor, os.fsencode(self._folder), sum(_NAMES))
        assert watch >= 0, os.strerror(ctypes.get_errno())
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def _read(self) -> None:
        while True:
            ended = self._ended.is_set()  # asked first: what came before the end is still read
            if select.select([self._descriptor], [], [], 0.05)[0]:
                self._take(os.read(self._descriptor, 1 << 16))
            elif ended:
                return

    def _take(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            _, mask, _, length = _HEADER.unpack_from(data, at)
            at += _HEADER.size
            name = os.fsdecode(data[at : at + length].rstrip(b"\0"))
            at += length
            what = next((word for bit, word in _NAMES.items() if mask & bit), "overflow")
            number = re.search(r"\d+", name)
            self.events.append(Event(int(number[0]) if number else -1, what, name))

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        os.close(self._descriptor)
