"""Unified diffs: applied to exactly the text they were made for, or not at all."""

from __future__ import annotations

import contextlib
import difflib
import os
import random
import re
from pathlib import Path

import pytest

from firstnan.repair.patch import PatchError, Source, apply, located, moved, new_contents, parse, with_paths

OLD = "import torch\n\n\ndef f(x):\n    y = x + 1\n    return torch.log(y)\n\n\nprint(f(torch.ones(2)))\n"
NEW = OLD.replace("torch.log(y)", "torch.log(y.clamp_min(1e-8))")


def diff_of(old: str, new: str, name: str = "train.py", n: int = 3) -> str:
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{name}", f"b/{name}", n=n
    )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def patched(diff: str, text: str) -> str:
    return apply(diff, lambda _: text)["train.py"]


# --- what fits ----------------------------------------------------------------------------------------------------


def test_one_line_is_changed() -> None:
    assert patched(diff_of(OLD, NEW), OLD) == NEW


@pytest.mark.parametrize("context", [0, 1, 3])
@pytest.mark.parametrize("seed", range(60))
def test_any_change_comes_out_as_it_went_in(seed: int, context: int) -> None:
    dice = random.Random(seed)
    # Few different lines, so that hunks would fit in wrong places too; some look like parts of a diff.
    lines = ["", "x = 1", "--- a", "+++ b", "@@ -1 +1 @@", "\\ no", "- y", " \tz", "# é…", "a\x0cb\x85c"]
    old = [dice.choice(lines) for _ in range(dice.randrange(1, 40))]
    new = list(old)
    for _ in range(dice.randrange(1, 6)):
        at = dice.randrange(len(new) + 1)
        new[at : at + dice.randrange(3)] = [dice.choice(lines) for _ in range(dice.randrange(3))]
    if new == old:
        new.append("last = True")
    texts = ["\n".join(side) + dice.choice(["\n", ""]) for side in (old, new)]
    if texts[0] == texts[1]:
        return
    split = [[line + "\n" for line in t.split("\n")[:-1]] + [t.split("\n")[-1]] * (not t.endswith("\n")) for t in texts]
    split = [[line for line in side if line] for side in split]
    diff = difflib.unified_diff(*split, "a/train.py", "b/train.py", n=context)
    text = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in diff)
    assert patched(text, texts[0]) == texts[1]


def test_windows_line_ends_stay() -> None:
    old, new = OLD.replace("\n", "\r\n"), NEW.replace("\n", "\r\n")
    assert patched(diff_of(OLD, NEW), old) == new
    assert patched(diff_of(old, new), old) == new


def test_no_newline_at_the_end() -> None:
    assert patched(diff_of("a\nb", "a\nc"), "a\nb") == "a\nc"
    assert patched(diff_of("a\nb", "a\nb\nc\n"), "a\nb") == "a\nb\nc\n"
    assert patched(diff_of("a\nb\n", "a\nb"), "a\nb\n") == "a\nb"
    with pytest.raises(PatchError, match=r"train\.py:2: the diff expects the file to end here"):
        patched(diff_of("a\nb", "a\nc"), "a\nb\n")


def test_several_files() -> None:
    diff = diff_of(OLD, NEW, "/x/a.py") + diff_of("1\n", "2\n", "b.py")
    assert apply(diff, {"/x/a.py": OLD, "b.py": "1\n"}.__getitem__) == {"/x/a.py": NEW, "b.py": "2\n"}


def test_heads_of_other_tools() -> None:
    body = diff_of(OLD, NEW).split("\n", 2)[2]
    for head in (
        "--- train.py\n+++ train.py\n",
        "--- a/train.py\t2026-01-01 00:00:00\n+++ b/train.py\t2026-01-01 00:00:01\n",
        "diff --git a/train.py b/train.py\nindex 12..34 100644\n--- a/train.py\n+++ b/train.py\n",
    ):
        assert patched(head + body, OLD) == NEW


# --- what does not ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (OLD.replace("x + 1", "x + 2"), "train.py:5: the diff expects '    y = x + 1', there is '    y = x + 2'"),
        ("\n" + OLD, "train.py:4: the diff expects 'def f(x):', there is ''"),
        ("import torch\n", "has 1 lines, the diff starts at line 3"),
        ("".join(OLD.splitlines(keepends=True)[:6]), "train.py:7: the diff expects '', the file ends before it"),
        ("", "has 0 lines"),
    ],
)
def test_a_file_that_changed_is_refused_with_its_line(text: str, says: str) -> None:
    with pytest.raises(PatchError, match=re.escape(says)):
        patched(diff_of(OLD, NEW), text)


HEAD = "--- a/train.py\n+++ b/train.py\n"


@pytest.mark.parametrize(
    ("diff", "says"),
    [
        ("", "no change in the diff"),
        ("hello\n", "line 1 of the diff is none: 'hello'"),
        (HEAD, "changes nothing in train.py"),
        (HEAD + "@@ -1 +1 @@\n import torch\n", "changes nothing in train.py"),
        ("--- a/train.py\n@@ -1 +1 @@\n-a\n+b\n", "no line '+++ '"),
        ("--- a/train.py\n", "no line '+++ '"),
        ("@@ -1 +1 @@\n-a\n+b\n", "line 1 of the diff is none"),
        (HEAD + "@@ -1,2 +1 @@\n-import torch\n", "ends in the middle"),
        (HEAD + "@@ -1 +1 @@\n-import torch\n+a\n+b\n", "line 6 of the diff is none"),
        (HEAD + "@@ -1 +1 @@\n-import torch\n-\n+b\n", "line 5 of the diff does not fit its range"),
        (HEAD + "@@ -1 +1 @@\n-import torch\n*b\n", "line 5 of the diff does not fit its range"),
        (HEAD + "@@ -x +1 @@\n", "line 3 of the diff is no range"),
        (HEAD + "@@ -9999999999 +1 @@\n", "is no range"),
        (HEAD + "@@ -0 +1 @@\n-a\n+b\n", "begins at a line 0"),
        (HEAD + "@@ -3 +3 @@\n-\n+a\n@@ -1 +1 @@\n-import torch\n+b\n", "overlap or are out of order"),
        (HEAD + "@@ -1 +1 @@\n-import torch\n+a\n" * 2, "overlap"),
        (2 * (HEAD + "@@ -1 +1 @@\n-import torch\n+a\n"), "names train.py twice"),
        ("--- /dev/null\n+++ b/train.py\n@@ -0,0 +1 @@\n+a\n", "makes or removes a file"),
        ("--- a/train.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-import torch\n", "makes or removes a file"),
        ("--- a/train.py\n+++ b/other.py\n@@ -1 +1 @@\n-import torch\n+a\n", "renames 'train.py' to 'other.py'"),
        ("--- a/\n+++ b/\n@@ -1 +1 @@\n-import torch\n+a\n", "names no file: ''"),
        ("--- a/\x1b[2J\n+++ b/\x1b[2J\n@@ -1 +1 @@\n-import torch\n+a\n", r"names no file: '\x1b[2J'"),
    ],
)
def test_what_is_no_diff_is_refused_in_one_line(diff: str, says: str) -> None:
    with pytest.raises(PatchError, match=re.escape(says)) as caught:
        patched(diff, OLD)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", range(300))
def test_a_damaged_diff_never_gives_half_a_result(seed: int) -> None:
    dice = random.Random(seed)
    diff = list(diff_of(OLD, NEW))
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(diff))
        diff[at : at + dice.randrange(4)] = dice.choice(["", "\n", "-", "+", " ", "@", "9", "\0", "\\", "\r"])
    with contextlib.suppress(PatchError):
        for text in apply("".join(diff), lambda _: OLD).values():
            assert text.startswith("import torch")
            assert text != OLD


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "encoding"),
    [
        ("# coding: latin-1\n", "iso-8859-1"),
        ("\ufeff", "utf-8-sig"),
        ("", "utf-8"),
        ("# -*- coding: cp1251 -*-\n", "cp1251"),
    ],
)
def test_a_file_keeps_its_encoding(tmp_path: Path, head: str, encoding: str) -> None:
    name = "д" if encoding == "cp1251" else "é"
    old = f"{head.removeprefix(chr(0xFEFF))}{name} = 1\nx = 2\n"
    path = tmp_path / "train.py"
    path.write_bytes(old.encode(encoding))
    ((source, content),) = new_contents(diff_of(old, old.replace("x = 2", f"x = {name}"), str(path)))
    assert content == old.replace("x = 2", f"x = {name}").encode(encoding)
    assert source.content == path.read_bytes() == old.encode(encoding)


def test_a_character_that_the_encoding_lacks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("# coding: ascii\nx = 1\n")
    with pytest.raises(PatchError, match="characters that ascii lacks"):
        new_contents(diff_of("# coding: ascii\nx = 1\n", "# coding: ascii\nx = 'é'\n", str(path)))


def test_only_regular_source_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "odd.py").write_bytes(b"# coding: nonsense\n")
    for name, says in [
        ("pipe.py", "not a regular file"),
        ("folder.py", "not a regular file"),
        ("binary.py", "not readable as source"),
        ("odd.py", "not readable as source"),
        ("missing.py", "No such file"),
        ("x" * 300, "File name too long"),
    ]:
        with pytest.raises(PatchError, match=says):
            Source.read(str(tmp_path / name))


def test_one_file_under_two_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(OLD)
    (tmp_path / "b.py").symlink_to("a.py")
    with pytest.raises(PatchError, match="one file by two names"):
        new_contents(diff_of(OLD, NEW, str(tmp_path / "a.py")) + diff_of(OLD, NEW, str(tmp_path / "b.py")))


def test_the_slash_that_a_head_swallows_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.py"
    path.write_text(OLD)
    assert located(str(path)) == located(str(path).lstrip("/")) == path
    monkeypatch.chdir(tmp_path)
    assert located("train.py") == Path("train.py")


def test_other_names_for_the_files_leave_the_rest() -> None:
    diff = diff_of(OLD, NEW, "/x/a.py") + diff_of("-- a\n", "++ b\n", "/x/b.py")
    renamed = with_paths(diff, os.path.basename)
    assert [change.path for change in parse(renamed)] == ["a.py", "b.py"]
    assert renamed.replace("/a.py", "//x/a.py").replace("/b.py", "//x/b.py") == diff
    assert with_paths("no diff", os.path.basename) == "no diff"


def test_lines_move_with_what_comes_before_them(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("".join(f"{i}\n" for i in range(1, 31)))
    old = path.read_text().splitlines(keepends=True)
    new = [*old[:4], "x\n", "y\n", *old[4:19], *old[21:]]
    diff = "".join(difflib.unified_diff(old, new, f"a/{path}", f"b/{path}"))
    assert [moved(diff, str(path), line) for line in (1, 4, 5, 12, 19, 22, 30)] == [1, 4, 7, 14, 21, 22, 30]
    assert moved(diff, str(tmp_path / "b.py"), 12) == 12
