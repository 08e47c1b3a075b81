"""The file of a capsule: whole or not at all, opened by any safetensors reader, never trusted."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from capsules import put_together, signed, taken_apart, trained, written
from firstnan.capsule import file
from firstnan.capsule.content import load
from firstnan.capsule.file import CapsuleError, Part

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


@pytest.fixture
def capsule(tmp_path: Path) -> Path:
    return written(tmp_path, [torch.arange(6.0).reshape(2, 3), "text", {"k": 1}], *trained())


def refused(path: Path, content: bytes | None = None) -> str:
    """The one line that says why this is no capsule."""
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CapsuleError) as caught:
        load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    return text


# --- writing ------------------------------------------------------------------------------------------------------


def test_any_reader_of_safetensors_opens_it(capsule: Path) -> None:
    opened = file.Opened(capsule)
    with safe_open(capsule, framework="pt") as other:  # type: ignore[no-untyped-call]
        assert set(other.keys()) == set(opened.stored)
        for name in other.keys():  # noqa: SIM118 (it is no dict)
            assert other.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes() == bytes(
                opened.bytes_of(name)
            )


def test_one_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x.capsule"
    path.write_text("mine")
    names = [file.write(path, {}, []).name for _ in range(3)]
    assert names == ["x-2.capsule", "x-3.capsule", "x-4.capsule"]
    assert path.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x-2.capsule", "x-3.capsule", "x-4.capsule", "x.capsule"]


def test_without_links_it_still_finds_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", link)
    assert [file.write(tmp_path / "x.capsule", {}, []).name for _ in range(2)] == ["x.capsule", "x-2.capsule"]
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_is_left_of_one_that_could_not_be_written(tmp_path: Path) -> None:
    def chunks() -> list[bytes]:
        raise RuntimeError("the tensor is gone")

    with pytest.raises(RuntimeError):
        file.write(tmp_path / "x.capsule", {}, [Part("t0", "F32", (2,), chunks)])
    with pytest.raises(CapsuleError, match="changed"):
        file.write(tmp_path / "x.capsule", {}, [Part("t0", "F32", (2,), lambda: [b"short"])])
    with pytest.raises(OSError, match="space"):
        file.write(tmp_path / "x.capsule", {}, [Part("t0", "F32", (1 << 60,), list)])
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys
from pathlib import Path
from firstnan.capsule import file
path, i = Path(sys.argv[1]), int(sys.argv[2])
while True:
    i += 1
    content = bytes([i % 256]) * (1 << 18)
    parts = [file.Part("t0", "U8", (1 << 18,), lambda: [content[:1000], content[1000:]])]
    print(i, flush=True)
    file.write(path, {"format": file.FORMAT, "version": 1, "number": i}, parts, replace=True)
"""


def test_killed_at_any_moment_it_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    path, chance, last, caught = tmp_path / "x.capsule", random.Random(0), 0, 0
    for _ in range(32):
        child = subprocess.Popen([sys.executable, "-c", WRITER, path, str(last)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        for _ in range(3):
            child.stdout.readline()
        time.sleep(chance.uniform(0.0, 0.01))
        child.kill()
        began = child.communicate()[0].split()
        last = int(began[-1]) if began else last + 3
        opened = file.Opened(path)
        number = opened.manifest["number"]
        assert bytes(opened.bytes_of("t0")) == bytes([number % 256]) * (1 << 18)
        assert number in (last - 1, last)
        caught += number == last - 1
    assert caught, "never in the middle of writing"


# --- reading ------------------------------------------------------------------------------------------------------


def test_cut_off_anywhere(capsule: Path) -> None:
    content = capsule.read_bytes()
    for part in range(50):
        refused(capsule, content[: len(content) * part // 50])
    refused(capsule, content + b"\0")


def test_no_file_at_all(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "No such file" in refused(tmp_path / "nowhere")
    assert "not a file" in refused(tmp_path)
    assert "not a file" in refused(tmp_path / "pipe")
    assert "not a firstnan capsule" in refused(tmp_path / "x", b"PK\x03\x04" * 100)
    assert "too short" in refused(tmp_path / "x", b"")


def test_a_pickle_inside_is_never_read(tmp_path: Path, capsule: Path) -> None:
    evidence = tmp_path / "evidence"
    evil = f"cos\nsystem\n(S'touch {evidence}'\ntR.".encode()
    header, tensors = taken_apart(capsule.read_bytes())
    refused(capsule, evil)
    refused(capsule, put_together(b'{"__metadata__":{"sha256":"' + b"0" * 64 + evil, tensors))
    name = next(n for n in header if header[n].get("dtype") == "F32")
    begin = header[name]["data_offsets"][0]
    capsule.write_bytes(signed(header, tensors[:begin] + evil[: len(tensors) - begin] + tensors[begin + len(evil) :]))
    load(capsule)  # bytes of a tensor like any others
    assert not evidence.exists()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"dtype": "F33"}, "nothing can be made"),
        ({"dtype": ["F32"]}, "nothing can be made"),
        ({"shape": [1 << 62, 1 << 62]}, "nothing can be made"),
        ({"shape": [-1, -12]}, "nothing can be made"),
        ({"shape": "ab"}, "nothing can be made"),
        ({"data_offsets": [0, 1 << 60]}, "nothing can be made"),
        ({"data_offsets": [4, 52]}, "nothing can be made|side by side"),
        ({"data_offsets": [0]}, "nothing can be made"),
    ],
)
def test_a_header_that_lies(capsule: Path, change: dict[str, object], part: str) -> None:
    header, tensors = taken_apart(capsule.read_bytes())
    name = next(n for n in header if header[n].get("dtype") == "F32")
    header[name] |= change
    text = refused(capsule, signed(header, tensors))
    assert any(p in text for p in part.split("|")), text


def test_tensors_that_overlap_or_leave_a_hole(capsule: Path) -> None:
    header, tensors = taken_apart(capsule.read_bytes())
    header["extra"] = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    assert "side by side" in refused(capsule, signed(header, tensors))
    header["extra"]["data_offsets"] = [len(tensors) + 4, len(tensors) + 8]
    assert "side by side" in refused(capsule, signed(header, tensors + b"\0" * 8))
    del header["extra"]
    assert "fill" in refused(capsule, signed(header, tensors + b"\0" * 8))


def test_a_header_longer_than_the_file(capsule: Path) -> None:
    header, tensors = taken_apart(capsule.read_bytes())
    whole = signed(header, tensors)
    for length in (1 << 63, 1 << 40, len(whole), 100 << 20):
        assert "shorter than it says" in refused(capsule, put_together(whole[8:], b"", length=length))


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
