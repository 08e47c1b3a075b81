"""Edits and unified diffs: applied to exactly the text they were made for, or not at all."""

from __future__ import annotations

import contextlib
import difflib
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firstnan.records import Edit, Remedy
from firstnan.repair.patch import FileOnDisk, PatchError, edited, located, moved_line, new_contents, parse, render

OLD = "import torch\n\n\ndef f(x):\n    y = x + 1\n    return torch.log(y)\n\n\nprint(f(torch.ones(2)))\n"
NEW = OLD.replace("torch.log(y)", "torch.log(y.clamp_min(1e-8))")


def diff_of(old: str, new: str, name: str = "train.py", n: int = 3) -> str:
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{name}", f"b/{name}", n=n
    )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def patched(diff: str, text: str) -> str:
    return edited(text, parse(diff))


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
    with pytest.raises(PatchError, match=r"train\.py: line 3 is expected, the file has 2"):
        patched(diff_of("a\nb\n", "a\nc\n"), "a\nb")


def test_several_files() -> None:
    edits = parse(diff_of(OLD, NEW, "/x/a.py") + diff_of("1\n", "2\n", "b.py"))
    by_file = {name: [e for e in edits if e.file == name] for name in ("/x/a.py", "b.py")}
    assert sum(map(len, by_file.values())) == len(edits)
    assert (edited(OLD, by_file["/x/a.py"]), edited("1\n", by_file["b.py"])) == (NEW, "2\n")


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
        (OLD.replace("x + 1", "x + 2"), "train.py:5: expected '    y = x + 1', found '    y = x + 2'"),
        ("\n" + OLD, "train.py:4: expected 'def f(x):', found ''"),
        ("import torch\n", "train.py: line 3 is expected, the file has 2"),
        ("".join(OLD.splitlines(keepends=True)[:6]), "train.py: line 8 is expected, the file has 7"),
        ("", "line 3 is expected, the file has 1"),
    ],
)
def test_a_file_that_changed_is_refused_with_its_line(text: str, says: str) -> None:
    with pytest.raises(PatchError, match=re.escape(says)):
        patched(diff_of(OLD, NEW), text)


HEAD = "--- a/train.py\n+++ b/train.py\n"


@pytest.mark.parametrize(
    ("diff", "says"),
    [
        ("", "the diff is empty"),
        ("hello\n", "line 1 of the diff is not part of a diff: 'hello'"),
        (HEAD, "changes nothing in train.py"),
        (HEAD + "@@ -1 +1 @@\n import torch\n", "changes nothing in train.py"),
        ("--- a/train.py\n@@ -1 +1 @@\n-a\n+b\n", "no '+++ ' line"),
        ("--- a/train.py\n", "no '+++ ' line"),
        ("@@ -1 +1 @@\n-a\n+b\n", "line 1 of the diff is not part of a diff"),
        (HEAD + "@@ -1,2 +1 @@\n-import torch\n", "the diff ends inside a hunk"),
        (HEAD + "@@ -1 +1 @@\n-import torch\n+a\n+b\n", "line 6 of the diff is not part of a diff"),
        (HEAD + "@@ -1 +1 @@\n-import torch\n-\n+b\n", "line 5 of the diff does not fit its range"),
        (HEAD + "@@ -1 +1 @@\n-import torch\n*b\n", "line 5 of the diff does not fit its range"),
        (HEAD + "@@ -x +1 @@\n", "line 3 of the diff is not a hunk range"),
        (HEAD + "@@ -9999999999 +1 @@\n", "is not a hunk range"),
        (HEAD + "@@ -0 +1 @@\n-a\n+b\n", "starts at line 0"),
        (HEAD + "@@ -3 +3 @@\n-\n+a\n@@ -1 +1 @@\n-import torch\n+b\n", "overlap or are out of order"),
        (HEAD + "@@ -1 +1 @@\n-import torch\n+a\n" * 2, "overlap"),
        (2 * (HEAD + "@@ -1 +1 @@\n-import torch\n+a\n"), "names train.py twice"),
        ("--- /dev/null\n+++ b/train.py\n@@ -0,0 +1 @@\n+a\n", "creates or deletes a file"),
        ("--- a/train.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-import torch\n", "creates or deletes a file"),
        ("--- a/train.py\n+++ b/other.py\n@@ -1 +1 @@\n-import torch\n+a\n", "renames 'train.py' to 'other.py'"),
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
        text = patched("".join(diff), OLD)
        assert text.startswith("import torch")
        assert text != OLD


# --- edits --------------------------------------------------------------------------------------------------------


def test_insertions_replacements_and_deletions() -> None:
    edits = [
        Edit("train.py", 7, 0, 8, 0, "\n", ""),
        Edit("train.py", 5, 8, 5, 13, "x + 1", "(\n        x + 2\n    )"),
        Edit("train.py", 1, 0, 1, 0, "", "import math\n"),
        Edit("train.py", 1, 0, 1, 0, "", "import os\n"),
    ]
    new = OLD.replace("x + 1", "(\n        x + 2\n    )").replace("\n\n\nprint", "\n\nprint")
    for end in ("\n", "\r\n", "\r"):
        assert edited(OLD.replace("\n", end), edits) == f"import math\nimport os\n{new}".replace("\n", end)


@pytest.mark.parametrize("seed", range(100))
def test_edits_and_their_diff_make_the_same_change(seed: int) -> None:
    """The oracle replaces the spans from the last to the first."""
    dice = random.Random(seed)
    pieces = ["", "a", "bb", "\x0c", "é", "\n", "\n", "\n"]
    text = "".join(dice.choices(pieces, k=dice.randrange(40)))
    cuts = sorted(dice.choices(range(len(text) + 1), k=2 * dice.randrange(1, 4)))
    edits, expected = [], text
    for start, end in list(zip(cuts[::2], cuts[1::2], strict=True))[::-1]:
        new = "".join(dice.choices(pieces, k=dice.randrange(4)))
        where = [(text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at) - 1) for at in (start, end)]
        edits.insert(0, Edit("train.py", *where[0], *where[1], text[start:end], new))
        expected = expected[:start] + new + expected[end:]
    assert edited(text, edits) == expected
    assert edited(text.replace("\n", "\r\n"), edits) == expected.replace("\n", "\r\n") or "\n" not in text
    diff = render("train.py", text, expected)
    assert (patched(diff, text) if diff else text) == expected


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (("train.py", 5, 8, 5, 13, "x + 2", ""), "train.py:5: expected 'x + 2', found 'x + 1'"),
        (("train.py", 4, 0, 5, 5, "def f(x):\n    z", ""), "train.py:5: expected '    z', found '    y'"),
        (("train.py", 5, 99, 5, 99, "", "x"), "train.py:5: the line is shorter than expected"),
        (("train.py", 5, 13, 6, 0, "", ""), "train.py:6: expected '(nothing)', found ''"),
        (("train.py", 99, 0, 99, 0, "", "x"), "train.py: line 99 is expected, the file has 10"),
        (("train.py", 0, 0, 0, 0, "", "x"), "train.py: line 0 is expected"),
        (("train.py", 1, -1, 1, 0, "", "x"), "train.py:1: the line is shorter"),
        (("train.py", 5, 8, 4, 0, "", "x"), "train.py:5: the edits overlap"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(edit: tuple[Any, ...], says: str) -> None:
    with pytest.raises(PatchError, match=re.escape(says)):
        edited(OLD, [Edit(*edit)])


def test_overlapping_edits_are_refused() -> None:
    first, second = Edit("a.py", 5, 8, 5, 11, "x +", "y +"), Edit("a.py", 5, 10, 5, 13, "+ 1", "+ 2")
    with pytest.raises(PatchError, match=r"a\.py:5: the edits overlap"):
        edited(OLD, [second, first])


# --- files --------------------------------------------------------------------------------------------------------


def diff_only(path: Path, old: str, new: str) -> Remedy:
    """As a report of an older version has it."""
    return Remedy("", diff_of(old, new, str(path)))


def changed(path: Path, line: int, old: str, new: str) -> Remedy:
    """`new` in place of the first `old` in a line of the file, as edit and diff."""
    text = FileOnDisk.read(str(path)).text
    column = text.split("\n")[line - 1].index(old)
    edit = Edit(str(path), line, column, line, column + len(old), old, new)
    return Remedy("", render(str(path), text, edited(text, [edit])), edits=(edit,))


def test_the_lines_around_an_edit_must_be_the_same(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(OLD)
    remedy = changed(path, 6, "y", "y.clamp_min(1e-8)")
    ((_, content),) = new_contents(remedy)
    assert content.decode() == NEW
    path.write_text(OLD.replace("import torch", "import torch  # far away"))
    assert new_contents(remedy)
    path.write_bytes(OLD.replace("\n", "\r\n").encode())
    assert new_contents(remedy)[0][1].decode() == NEW.replace("\n", "\r\n")
    path.write_text(OLD.replace("x + 1", "x + 2"))
    with pytest.raises(PatchError, match=r"train\.py: expected '     y = x \+ 1' near the change, found"):
        new_contents(remedy)


def test_what_is_applied_is_what_was_shown(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(OLD)
    shown, other = changed(path, 6, "y", "y.abs()"), changed(path, 6, "y", "y.neg()")
    with pytest.raises(PatchError, match=r"expected .*abs.* near the change, found .*neg"):
        new_contents(replace(shown, edits=other.edits))


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
    remedy = (
        changed(path, old.count("\n"), "2", name) if head else diff_only(path, old, old.replace("x = 2", f"x = {name}"))
    )
    ((file, content),) = new_contents(remedy)
    assert content == old.replace("x = 2", f"x = {name}").encode(encoding)
    assert file.content == path.read_bytes() == old.encode(encoding)


def test_a_character_that_the_encoding_lacks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("# coding: ascii\nx = 1\n")
    with pytest.raises(PatchError, match="characters that ascii cannot encode"):
        new_contents(diff_only(path, "# coding: ascii\nx = 1\n", "# coding: ascii\nx = 'é'\n"))


def test_only_regular_source_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "odd.py").write_bytes(b"# coding: nonsense\n")
    for name, says in [
        ("pipe.py", "not a regular file"),
        ("folder.py", "not a regular file"),
        ("binary.py", "cannot be decoded as source"),
        ("odd.py", "cannot be decoded as source"),
        ("missing.py", "No such file"),
        ("x" * 300, "File name too long"),
    ]:
        with pytest.raises(PatchError, match=says):
            FileOnDisk.read(str(tmp_path / name))


def test_one_file_under_two_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(OLD)
    (tmp_path / "b.py").symlink_to("a.py")
    both = Remedy("", diff_of(OLD, NEW, str(tmp_path / "a.py")) + diff_of(OLD, NEW, str(tmp_path / "b.py")))
    with pytest.raises(PatchError, match="names one file twice"):
        new_contents(both)


@pytest.mark.parametrize("name", ["", "\x1b[2J", "a\0b"])
def test_what_cannot_be_shown_is_not_a_file_name(name: str) -> None:
    for remedy in (Remedy("", diff_of(OLD, NEW, name)), Remedy("", "x", edits=(Edit(name, 1, 0, 1, 0, "", "x"),))):
        with pytest.raises(PatchError, match="not a file name"):
            new_contents(remedy)


def test_the_slash_that_a_head_swallows_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.py"
    path.write_text(OLD)
    assert located(str(path)) == located(str(path).lstrip("/")) == path
    monkeypatch.chdir(tmp_path)
    assert located("train.py") == Path("train.py")


def test_lines_move_with_what_comes_before_them(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("".join(f"{i}\n" for i in range(1, 31)))
    old = path.read_text()
    edits = (
        Edit(str(path), 5, 0, 5, 0, "", "x\ny\n"),
        Edit(str(path), 12, 1, 12, 2, "2", "3\n"),
        Edit(str(path), 20, 0, 22, 0, "20\n21\n", ""),
    )
    lines, moved = (1, 4, 5, 12, 13, 19, 22, 30), [1, 4, 7, 14, 16, 22, 23, 31]
    for remedy in (Remedy("", "", edits=edits), diff_only(path, old, edited(old, edits))):
        assert [moved_line(remedy, str(path), line) for line in lines] == moved
        assert moved_line(remedy, str(tmp_path / "b.py"), 12) == 12
