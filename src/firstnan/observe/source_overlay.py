"""Replaces the content of source files for this process and those it starts; nothing on disk changes."""

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


def overlay_sources(contents: dict[str, bytes]) -> None:
    """From now on, running or importing one of these files (by its real path) uses this content instead.

    Scripts, modules and `-m` all open their source with `io.open_code`. Without a modification time the loader neither
    uses nor writes a compiled file. This cannot be undone: the process exists only for this.
    """
    original: Callable[[str], Any] = io.open_code
    path_stats = SourceFileLoader.path_stats

    def open_code(path: str) -> Any:
        content = contents.get(os.path.realpath(path))
        if content is None:
            return original(path)
        # Tracebacks and `inspect` show this text too: linecache never re-reads an entry without a modification time.
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        lines = io.TextIOWrapper(io.BytesIO(content), encoding).readlines()
        linecache.cache[os.fspath(path)] = (len(content), None, lines, os.fspath(path))
        return io.BytesIO(content)

    def stats(loader: SourceFileLoader, path: Any) -> Any:
        if os.path.realpath(path) in contents:
            raise OSError("the source is overlaid: it has no modification time")
        return path_stats(loader, path)

    io.open_code = _io.open_code = open_code
    SourceFileLoader.path_stats = stats  # type: ignore[method-assign, assignment]
    when_imported("multiprocessing.spawn", lambda: _follow_spawned(contents))


class _Overlay:
    """Sent to a spawned process with its first data; unpickling it there installs the same overlay."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents

    def __reduce__(self) -> Any:
        return overlay_sources, (self.contents,)


def _follow_spawned(contents: dict[str, bytes]) -> None:
    spawn = sys.modules["multiprocessing.spawn"]
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), "firstnan": _Overlay(contents)}

    spawn.get_preparation_data = get_preparation_data  # type: ignore[attr-defined]
