"""Other text in place of source files, for this process and those it starts: on disk nothing changes."""

from __future__ import annotations

import _io
import io
import linecache
import os
import sys
import tokenize
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from typing import Any

from firstnan.observe.imports import when_imported


def put_in_place(contents: dict[str, bytes]) -> None:
    """From now on whoever runs or imports one of these files (by its real path) runs this content of it.

    Scripts, modules and `-m` all open their source by `io.open_code`; a compiled one is neither used nor written
    where the loader cannot tell the age of the file. There is no way back: the process is there for this only.
    """
    original: Callable[[str], Any] = io.open_code
    path_stats = SourceFileLoader.path_stats

    def open_code(path: str) -> Any:
        content = contents.get(os.path.realpath(path))
        if content is None:
            return original(path)
        # Tracebacks and `inspect` show this text too: without a time of change the entry is never looked up again.
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        lines = io.TextIOWrapper(io.BytesIO(content), encoding).readlines()
        linecache.cache[os.fspath(path)] = (len(content), None, lines, os.fspath(path))
        return io.BytesIO(content)

    def stats(loader: SourceFileLoader, path: Any) -> Any:
        if os.path.realpath(path) in contents:
            raise OSError("its age means nothing now")
        return path_stats(loader, path)

    io.open_code = _io.open_code = open_code
    SourceFileLoader.path_stats = stats  # type: ignore[method-assign, assignment]
    when_imported("multiprocessing.spawn", lambda: _follow_spawned(contents))


class _InPlace:
    """Travels with what a spawned process is told first, and does there what was done here."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents

    def __reduce__(self) -> Any:
        return put_in_place, (self.contents,)


def _follow_spawned(contents: dict[str, bytes]) -> None:
    spawn = sys.modules["multiprocessing.spawn"]
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), "firstnan": _InPlace(contents)}

    spawn.get_preparation_data = get_preparation_data  # type: ignore[attr-defined]
