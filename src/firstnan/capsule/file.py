"""The capsule file: safetensors with a JSON manifest in its metadata, replaced as a whole and never trusted.

safetensors lays the file out, validates its header and maps its tensors. This module adds a SHA-256 over every byte,
size limits, one-line errors and an atomic rename. Nothing in the file is executed or used as a path.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "firstnan-capsule"
VERSION = 1
_LARGEST_HEADER = 64 << 20
_DIGEST = re.compile(rb'"sha256":"([0-9a-f]{64})"')
"""Inside the manifest the quotes would be escaped."""
_ZEROS = b"0" * 64
_CHUNK = 4 << 20


class CapsuleError(ValueError):
    """A capsule cannot be read or written; the message is one line."""


# --- writing ------------------------------------------------------------------------------------------------------


def write(path: Path, manifest: dict[str, Any], tensors: Mapping[str, Tensor], *, replace: bool = False) -> Path:
    """Writes a temporary file and renames it; returns its path.

    An existing file is replaced, or (the default) left alone: the new one is then called `name-2`.
    """
    text = json.dumps(manifest, allow_nan=False)
    if len(text) + sum(t.nbytes for t in tensors.values()) > shutil.disk_usage(path.parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        draft.touch(exist_ok=False)
        mode = stat.S_IMODE(draft.stat().st_mode)
        _serialize(draft, text, tensors)
        draft.chmod(mode)  # safetensors 0.8 ignores the umask: its files are readable by their owner alone
        _insert_digest(draft)
        if replace:
            os.replace(draft, path)
        else:
            path = _rename_to_free_name(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return path


def _serialize(path: Path, manifest: str, tensors: Mapping[str, Tensor]) -> None:
    import torch  # late, because reading must not load it

    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        # Not `safetensors.torch.save_file`: it needs numpy, and refuses tensors that share memory (slices of a batch).
        ready = {n: t.detach().resolve_conj().resolve_neg().cpu().contiguous() for n, t in tensors.items()}
        specs = {n: _spec(t) for n, t in ready.items()}
    try:
        serialize_file(specs, path, {"sha256": _ZEROS.decode(), "firstnan": manifest})
    except SafetensorError as error:
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise CapsuleError(one_line(str(error))) from None
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from None


def _spec(t: Tensor) -> TensorSpec:
    dtype = str(t.dtype).removeprefix("torch.")
    return TensorSpec(dtype=dtype, shape=t.shape, data_ptr=t.data_ptr(), data_len=t.nbytes)


def _insert_digest(path: Path) -> None:
    with open(path, "r+b") as file:
        position, _, digest = _digests(file)
        file.seek(position)
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _rename_to_free_name(draft: Path, path: Path) -> Path:
    """Links the draft to the first free name: a link, unlike a rename, never replaces an existing file."""
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
    raise CapsuleError(f"{path.parent} already holds 9,999 capsules of this name")


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every system supports it
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# --- reading ------------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A tensor as safetensors' header describes it."""

    dtype: str
    shape: tuple[int, ...]


class CapsuleFile:
    """A file whose digest, header and version were checked; needs torch only once a tensor is read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)  # the program may change its directory before tensors are read
        self._mapped: Any = None
        try:
            metadata, self.stored = _checked(self.path)
            self.manifest = _manifest(metadata.get("firstnan", ""))
        except CapsuleError as error:
            raise CapsuleError(f"{os.fspath(path)}: {error}") from None

    def map(self) -> Any:
        """Opens the file for torch; from then on it may be deleted."""
        if self._mapped is None:
            try:
                self._mapped = safe_open(self.path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CapsuleError(one_line(f"{self.path}: {error}")) from None
        return self._mapped

    def tensor(self, name: str) -> Tensor:
        """The tensor in memory mapped from the file: clone it before changing it."""
        tensor: Tensor = self.map().get_tensor(name)
        return tensor

    def tensors(self) -> dict[str, Tensor]:
        return {name: self.tensor(name) for name in self.stored}


def _checked(path: str) -> tuple[dict[str, str], dict[str, Stored]]:
    """The metadata and the tensors of a file, once digest and header were found to be right."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its writer
            raise CapsuleError("not a file")
        with open(path, "rb") as file:
            _, expected, actual = _digests(file)
        if expected != actual:
            raise CapsuleError("corrupt capsule: the content does not match its SHA-256 digest")
        with _header(path) as header:
            entries = {name: header.get_slice(name) for name in header.keys()}  # noqa: SIM118 (not a dict)
            stored = {name: Stored(entry.get_dtype(), tuple(entry.get_shape())) for name, entry in entries.items()}
            return header.metadata() or {}, stored
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise CapsuleError(f"corrupt capsule: {one_line(reason)}") from None
    except CapsuleError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise CapsuleError(getattr(error, "strerror", None) or str(error)) from None


def _header(path: str) -> Any:
    """The file opened by safetensors, without torch wherever numpy is installed: safetensors loads one of them."""
    try:
        return safe_open(path, framework="np")
    except ImportError:
        return safe_open(path, framework="pt")


def _digests(file: BinaryIO) -> tuple[int, bytes, bytes]:
    """Where the header holds the digest, the digest found there, and the file's own: with zeros in that place."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    head = start + file.read(min(length, size, _LARGEST_HEADER))
    if not head.startswith(b'{"__metadata__":{', 8):
        raise CapsuleError("not a firstnan capsule")
    if length > size - 8:
        raise CapsuleError("corrupt capsule: the file is truncated")
    if length > _LARGEST_HEADER:
        raise CapsuleError(f"the header must not exceed {readable_size(_LARGEST_HEADER)}, got {readable_size(length)}")
    found = _DIGEST.search(head)
    if found is None:
        raise CapsuleError("not a firstnan capsule")
    position = found.start(1)
    digest = hashlib.sha256(head[:position] + _ZEROS + head[position + len(_ZEROS) :])
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return position, found[1], digest.hexdigest().encode()


def _manifest(text: str) -> dict[str, Any]:
    try:
        manifest = json.loads(text, parse_constant=_refuse_constant) if text else None
    except RecursionError:
        raise CapsuleError("corrupt capsule: the manifest is nested too deeply") from None
    except ValueError as error:  # bad JSON, or a number of thousands of digits
        raise CapsuleError(f"corrupt capsule: {one_line(str(error))}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CapsuleError("not a firstnan capsule")
    version = manifest.get("version")
    if type(version) is not int or version < 1:
        raise CapsuleError("corrupt capsule: the manifest has no version")
    if version > VERSION:
        raise CapsuleError(f"written by a newer firstnan: format version {version}, this firstnan reads {VERSION}")
    return manifest


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


# --- words --------------------------------------------------------------------------------------------------------


def one_line(text: str, most: int = 200) -> str:
    """The beginning of a text that a hostile file may have had a part in, without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:most])


def readable_size(size: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
