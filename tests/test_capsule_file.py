"""The capsule file: written whole or not at all, readable by safetensors, never trusted."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from capsules import put_together, signed, taken_apart, trained, written
from firstnan.capsule import file
from firstnan.capsule.content import load
from firstnan.capsule.file import CapsuleError
from firstnan.capsule.state import Restorer
from firstnan.tensors.models import TrainingObjects

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
MANIFEST = {"format": file.FORMAT, "version": file.VERSION}


@pytest.fixture
def capsule(tmp_path: Path) -> Path:
    return written(tmp_path, [torch.arange(6.0).reshape(2, 3), "text", {"k": 1}], *trained())


def refused(path: Path, content: bytes | None = None) -> str:
    """The error for a file that is not a capsule, without the path."""
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CapsuleError) as caught:
        load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert text.isprintable()
    return text.removeprefix(f"{path}: ")


# --- writing ------------------------------------------------------------------------------------------------------


def test_safetensors_reads_it(capsule: Path) -> None:
    opened = file.CapsuleFile(capsule)
    with safe_open(capsule, framework="pt") as other:  # type: ignore[no-untyped-call]
        assert json.loads(other.metadata()["firstnan"]) == opened.manifest
        assert set(other.keys()) == set(opened.stored) == set(opened.tensors())
        for name, stored in opened.stored.items():
            assert other.get_slice(name).get_dtype() == stored.dtype
            assert tuple(other.get_tensor(name).shape) == stored.shape


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x.capsule"
    path.write_text("mine")
    names = [file.write(path, {}, {}).name for _ in range(3)]
    assert names == ["x-2.capsule", "x-3.capsule", "x-4.capsule"]
    assert path.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x-2.capsule", "x-3.capsule", "x-4.capsule", "x.capsule"]


def test_without_links_it_still_finds_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", link)
    assert [file.write(tmp_path / "x.capsule", {}, {}).name for _ in range(2)] == ["x.capsule", "x-2.capsule"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_umask_decides_who_may_read_it(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = file.write(tmp_path / "x.capsule", {}, {"t0": torch.ones(2)})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.capsule"
    with pytest.raises(NotImplementedError):
        file.write(path, {}, {"t0": torch.ones(2, device="meta")})
    with pytest.raises(ValueError, match="JSON"):
        file.write(path, {"loss": float("nan")}, {})
    with pytest.raises(OSError, match="space"):
        file.write(path, {}, {"t0": torch.ones(1).expand(1 << 60)})
    monkeypatch.setattr(file, "_LARGEST_HEADER", 1 << 10)
    with pytest.raises(CapsuleError, match=r"must not exceed 1\.0 KiB"):
        file.write(path, {"text": "x" * 2000}, {"t0": torch.ones(2)})
    assert list(tmp_path.iterdir()) == []


def write_forever(path: Path, last: int, began: Any) -> None:
    torch.set_num_threads(1)
    while True:
        last += 1
        began.value = last
        tensor = torch.full((1 << 18,), last % 256, dtype=torch.uint8)
        file.write(path, {**MANIFEST, "number": last}, {"t0": tensor}, replace=True)


def test_a_process_killed_while_writing_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path, chance, last, in_the_middle = tmp_path / "x.capsule", random.Random(0), 0, 0
    fork = multiprocessing.get_context("fork")
    for _ in range(32):
        began = fork.Value("q", last, lock=False)  # the child may be killed while it holds a lock
        child = fork.Process(target=write_forever, args=(path, last, began))
        child.start()
        while began.value < last + 3:
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.01))
        child.kill()
        child.join()
        last = began.value
        opened = file.CapsuleFile(path)
        number = opened.manifest["number"]
        assert opened.tensor("t0").eq(number % 256).all()
        assert number in (last - 1, last)
        in_the_middle += number == last - 1
    assert in_the_middle


# --- reading ------------------------------------------------------------------------------------------------------


def test_truncated_anywhere(capsule: Path) -> None:
    content = capsule.read_bytes()
    for part in range(50):
        refused(capsule, content[: len(content) * part // 50])
    refused(capsule, content + b"\0")
    assert "truncated" in refused(capsule, content[:1000])
    assert "SHA-256" in refused(capsule, content[:-1])


def test_what_is_not_a_capsule(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "No such file" in refused(tmp_path / "nowhere")
    assert refused(tmp_path) == "not a file"
    assert refused(tmp_path / "pipe") == "not a file"
    for content in (b"", b"12345678", b"PK\x03\x04" * 100):
        assert refused(tmp_path / "x", content) == "not a firstnan capsule"
    for metadata in (None, {"format": "pt"}, {"sha256": "0" * 64}):
        save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors", metadata)
        refused(tmp_path / "model.safetensors")
    signed_by_another = signed({"__metadata__": {"sha256": "0" * 64}}, b"")
    assert refused(tmp_path / "x", signed_by_another) == "not a firstnan capsule"


def test_a_newer_version_is_named(tmp_path: Path) -> None:
    path = file.write(tmp_path / "x.capsule", {**MANIFEST, "version": 7}, {})
    assert refused(path) == "written by a newer firstnan: format version 7, this firstnan reads 1"
    path = file.write(tmp_path / "x.capsule", {**MANIFEST, "version": "1"}, {})
    assert refused(path) == "corrupt capsule: the manifest has no version"


def test_a_file_written_without_safetensors_is_still_read() -> None:
    """By firstnan before it used safetensors: another order of tensors and metadata, the same version."""
    capsule = load(HERE / "goldens" / "version1.capsule")
    model, optimizer = trained()
    restorer = Restorer(capsule, TrainingObjects.find([optimizer], {"": model}))
    restorer.weights()
    restorer.training()
    restorer.random(capsule.batches[0].random)
    floats, text, mapping, narrow, wave, flags = restorer.unpacker.value(capsule.batches[0].value)
    assert torch.equal(floats, torch.arange(6.0).reshape(2, 3))
    assert (text, mapping) == ("text", {"k": 1})
    assert torch.equal(narrow, torch.arange(4).to(torch.bfloat16))
    assert torch.equal(wave, torch.tensor([1 + 2j]))
    assert torch.equal(flags, torch.tensor([True, False, True]))
    assert restorer.notes == []
    assert capsule.report.step == 7


def test_reading_does_not_load_torch(capsule: Path) -> None:
    code = (
        f"import sys; from firstnan.capsule.content import load; load({str(capsule)!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_tensors_are_read_after_the_program_changed_its_folder_and_deleted_the_file(
    capsule: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    opened = file.CapsuleFile(capsule.name)
    monkeypatch.chdir("/")
    opened.map()
    capsule.unlink()
    assert opened.tensors().keys() == opened.stored.keys()


def test_a_file_deleted_before_its_tensors_are_read(capsule: Path) -> None:
    opened = file.CapsuleFile(capsule)
    capsule.unlink()
    with pytest.raises(CapsuleError, match=r"a\.capsule: No such file"):
        opened.tensors()


def test_a_pickle_inside_is_never_read(tmp_path: Path, capsule: Path) -> None:
    evidence = tmp_path / "evidence"
    evil = f"cos\nsystem\n(S'touch {evidence}'\ntR.".encode()
    header, tensors = taken_apart(capsule.read_bytes())
    refused(capsule, evil)
    refused(capsule, put_together(b'{"__metadata__":{"sha256":"' + b"0" * 64 + b'","' + evil, tensors))
    name = next(n for n in header if header[n].get("dtype") == "F32")
    begin = header[name]["data_offsets"][0]
    capsule.write_bytes(signed(header, tensors[:begin] + evil[: len(tensors) - begin] + tensors[begin + len(evil) :]))
    load(capsule)  # bytes of a tensor like any others
    assert not evidence.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F33"},
        {"dtype": ["F32"]},
        {"shape": [1 << 62, 1 << 62]},
        {"shape": [1 << 64]},
        {"shape": [-1, -12]},
        {"shape": "ab"},
        {"shape": [1 << 58], "data_offsets": [0, 1 << 60]},
        {"data_offsets": [0, 1 << 60]},
        {"data_offsets": [4, 52]},
        {"data_offsets": [8, 0]},
        {"data_offsets": [0]},
    ],
    ids=str,
)
def test_a_header_that_lies(capsule: Path, change: dict[str, object]) -> None:
    header, tensors = taken_apart(capsule.read_bytes())
    name = next(n for n in header if header[n].get("dtype") == "F32")
    header[name] |= change
    assert refused(capsule, signed(header, tensors)).startswith("corrupt capsule: ")


def test_a_tensor_of_another_type_or_size_than_the_manifest_says(capsule: Path) -> None:
    header, tensors = taken_apart(capsule.read_bytes())
    name = next(n for n in header if header[n].get("dtype") == "F32")
    header[name]["dtype"] = "I32"
    assert refused(capsule, signed(header, tensors)) == f"corrupt capsule: cannot decode tensor {name!r}"
    header[name] |= {"dtype": "U8", "shape": [4, *header[name]["shape"]]}
    assert refused(capsule, signed(header, tensors)) == f"corrupt capsule: cannot decode tensor {name!r}"


def test_tensors_that_overlap_or_leave_a_hole(capsule: Path) -> None:
    header, tensors = taken_apart(capsule.read_bytes())
    header["extra"] = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    assert "invalid offset" in refused(capsule, signed(header, tensors))
    header["extra"]["data_offsets"] = [len(tensors) + 4, len(tensors) + 8]
    assert "invalid offset" in refused(capsule, signed(header, tensors + b"\0" * 8))
    del header["extra"]
    assert "not fully covered" in refused(capsule, signed(header, tensors + b"\0" * 8))


def test_a_header_longer_than_the_file(capsule: Path) -> None:
    header, tensors = taken_apart(capsule.read_bytes())
    whole = signed(header, tensors)
    for length in (1 << 63, 1 << 40, len(whole), 100 << 20):
        assert "truncated" in refused(capsule, put_together(whole[8:], b"", length=length))


def test_a_flipped_bit_is_noticed_in_every_byte(tmp_path: Path) -> None:
    path = file.write(tmp_path / "x.capsule", {**MANIFEST, "text": 'a"b\n\u00e9'}, {"t0": torch.ones(2)})
    content = path.read_bytes()
    for i in range(len(content)):
        path.write_bytes(content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :])
        with pytest.raises(CapsuleError):
            file.CapsuleFile(path)


def test_names_with_dots_and_slashes_are_only_names(capsule: Path, tmp_path: Path) -> None:
    header, tensors = taken_apart(capsule.read_bytes())
    before = {p for p in tmp_path.parent.rglob("*") if p != capsule}
    for name in ("../../outside", "/etc/evil", "..\\x", "a\0b", ""):
        changed = dict(header)
        changed[name] = changed.pop(next(n for n in header if n != "__metadata__"))
        refused(capsule, signed(changed, tensors))  # the content asks for it under its own name
    assert {p for p in tmp_path.parent.rglob("*") if p != capsule} == before


def test_thousands_of_hostile_files(tmp_path: Path, capsule: Path) -> None:
    """In a process of its own, with little memory and a guard against everything that a reader has no business with."""
    words = [sys.executable, str(HERE / "hostile_capsules.py"), str(capsule), "2400"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert int(counts["refused"]) > 1500
    assert int(counts["refused"]) + int(counts["harmless"]) >= 2400
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.capsule", "hostile.capsule"]
