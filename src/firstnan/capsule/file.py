"""One file of tensors and JSON in the layout of safetensors: written whole or not at all, read without trust.

Any tool that reads safetensors can open it. All that is no tensor is one JSON text in its metadata, and a SHA-256 over
the whole file tells a damaged one. Nothing in it is ever executed or used as a path.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import mmap
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = "firstnan-capsule"
VERSION = 1
LARGEST_HEADER = 64 << 20
_PREFIX = b'{"__metadata__":{"sha256":"'
_ZEROS = b"0" * 64
_CHUNK = 4 << 20

SIZES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element, by safetensors' names."""


class CapsuleError(ValueError):
    """A capsule that cannot be read or written; the message is one line."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor to be written: its bytes are asked for when it is their turn."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Any]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


# --- writing ------------------------------------------------------------------------------------------------------


def write(path: Path, manifest: dict[str, Any], parts: Iterable[Part], *, replace: bool = False) -> Path:
    """Puts the file in place in one move, beside one that is there (`name-2`) or instead of it; returns where it is."""
    # The wider first, so that every tensor begins at a multiple of its element's size.
    parts = sorted(parts, key=lambda p: -SIZES[p.dtype])
    head = _header(manifest, parts)
    size = len(head) + sum(p.nbytes for p in parts)
    if size > shutil.disk_usage(path.parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(draft, "xb") as file:
            digest = hashlib.sha256(head)
            file.write(head)
            for part in parts:
                _append(file, part, digest)
            file.seek(8 + len(_PREFIX))
            file.write(digest.hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(draft, path)
        else:
            path = _claim(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return path


def _header(manifest: dict[str, Any], parts: list[Part]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"sha256": _ZEROS.decode(), "firstnan": json.dumps(manifest)}}
    at = 0
    for part in parts:
        table[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [at, at + part.nbytes]}
        at += part.nbytes
    text = json.dumps(table, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER:
        raise CapsuleError(f"too many tensors: their names alone take {readable_size(len(text))}")
    return len(text).to_bytes(8, "little") + text


def _append(file: Any, part: Part, digest: Any) -> None:
    before = file.tell()
    for chunk in part.chunks():
        file.write(chunk)
        digest.update(chunk)
    if file.tell() - before != part.nbytes:
        raise CapsuleError("a tensor changed while it was written")


def _claim(draft: Path, path: Path) -> Path:
    """Gives the draft the first free name; a link, unlike a rename, never replaces what is there."""
    for number in range(1, 10_000):
        target = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        try:
            os.link(draft, target)
        except FileExistsError:
            continue
        except OSError:  # a file system without links
            if target.exists():
                continue
            os.rename(draft, target)
            return target
        draft.unlink()
        return target
    raise CapsuleError(f"{path.parent}: there are thousands of capsules already")


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every system can
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# --- reading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """Where the bytes of one tensor lie."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Opened:
    """A capsule's file, checked from its first byte to its last; nothing of its tensors is in memory yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._map = _mapped(os.fspath(path))
            try:
                self._start, table = _table(self._map)
                self.manifest = _manifest(table.pop("__metadata__"))
                self.stored = _stored(table, len(self._map) - self._start)
            except BaseException:
                self._map.close()
                raise
        except CapsuleError as error:
            raise CapsuleError(f"{os.fspath(path)}: {error}") from None

    def bytes_of(self, name: str) -> memoryview:
        """The bytes of a tensor; what is written to them stays in this process."""
        at = self.stored[name]
        return memoryview(self._map)[self._start + at.begin : self._start + at.end]

    def parts(self) -> list[Part]:
        """Its tensors as they are, to be written again."""
        return [Part(name, s.dtype, s.shape, lambda n=name: self._chunks(n)) for name, s in self.stored.items()]  # type: ignore[misc]

    def _chunks(self, name: str) -> Iterable[memoryview]:
        view = self.bytes_of(name)
        return (view[i : i + _CHUNK] for i in range(0, len(view), _CHUNK))


def _mapped(path: str) -> mmap.mmap:
    try:
        # Opening a pipe would wait for its writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CapsuleError("not a file")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < 8 + len(_PREFIX):
                raise CapsuleError("not a firstnan capsule: too short")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except CapsuleError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise CapsuleError(getattr(error, "strerror", None) or str(error)) from None


def _table(content: mmap.mmap) -> tuple[int, dict[str, Any]]:
    """Where the tensors begin, and the header; the whole file has been compared with its digest then."""
    length = int.from_bytes(content[:8], "little")
    at = 8 + len(_PREFIX)
    if content[8:at] != _PREFIX:
        raise CapsuleError("not a firstnan capsule")
    if length > min(len(content) - 8, LARGEST_HEADER):
        raise CapsuleError("damaged: it is shorter than it says")
    if _digest(content, at) != content[at : at + 64]:
        raise CapsuleError("damaged: it is not as it was written")
    table = parsed(content[8 : 8 + length])
    if not isinstance(table, dict) or not isinstance(table.get("__metadata__"), dict):
        raise CapsuleError("damaged: its header is no table")
    return 8 + length, table


def _digest(content: mmap.mmap, at: int) -> bytes:
    digest = hashlib.sha256(content[:at] + _ZEROS)
    for i in range(at + 64, len(content), _CHUNK):
        digest.update(content[i : i + _CHUNK])
    return digest.hexdigest().encode()


def parsed(text: str | bytes) -> Any:
    """The JSON value in a text; CapsuleError where it is none."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise CapsuleError("damaged: nested too deeply") from None
    except ValueError as error:  # bad JSON, bad UTF-8, or a number with thousands of digits
        raise CapsuleError(f"damaged: {str(error).splitlines()[0]}") from None


def _no_constant(name: str) -> Any:
    raise CapsuleError(f"damaged: {name} is no JSON")


def _manifest(metadata: dict[str, Any]) -> dict[str, Any]:
    text = metadata.get("firstnan")
    manifest = parsed(text) if isinstance(text, str) else None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CapsuleError("not a firstnan capsule")
    version = manifest.get("version")
    if type(version) is not int or version < 1:
        raise CapsuleError("damaged: it has no version")
    if version > VERSION:
        raise CapsuleError(f"written by a newer firstnan (version {version}, this one reads {VERSION})")
    return manifest


def _stored(table: dict[str, Any], size: int) -> dict[str, Stored]:
    """What the header says of each tensor: together they fill the rest of the file, none over another."""
    found = {name: _entry(name, entry) for name, entry in table.items()}
    at = 0
    for one in sorted(found.values(), key=lambda s: (s.begin, s.end)):
        if one.begin != at:
            raise CapsuleError("damaged: its tensors do not lie side by side")
        at = one.end
    if at != size:
        raise CapsuleError("damaged: its tensors do not fill it")
    return found


def _entry(name: str, entry: Any) -> Stored:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        good = all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, begin, end)) and len(shape) <= 64
        if good and end - begin == math.prod(shape) * SIZES[dtype]:
            return Stored(dtype, tuple(shape), begin, end)
    except (KeyError, TypeError, ValueError, IndexError):
        pass
    raise CapsuleError(f"damaged: nothing can be made of its tensor {name[:40]!r}")


def readable_size(size: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
