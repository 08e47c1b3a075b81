"""The user's file as text and tree, and edits of it: all that is not changed stays as it was, byte for byte."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from firstnan.records import Edit, Site
from firstnan.repair.data import _libraries
from firstnan.repair.patch import edited, render
from firstnan.repair.source import (
    SourceFile,
    as_patch,
    changed_text,
    delete_statement,
    insert_after,
    insert_before,
    parenthesized,
    replace_node,
    set_argument,
)


def node_of(source: SourceFile, code: str) -> ast.expr:
    """The expression that is written like this."""
    found = [n for n in ast.walk(source.tree) if isinstance(n, ast.expr) and source.code(n) == code]
    assert found, code
    return found[0]


def added(text: str) -> list[str]:
    return [line[1:] for line in text.split("\n") if line.startswith("+") and not line.startswith("+++")]


def diff(source: SourceFile, *edits: Edit) -> str:
    """The diff of these edits; what they make of the text is what the diff shows."""
    whole, text = as_patch(edits, lambda _: source)
    assert render(source.file, source.content, edited(source.content, whole)) == text
    return text


def put_into(text: str, code: str, new: str) -> list[str]:
    source = SourceFile("/x.py", text)
    return added(diff(source, replace_node(source, node_of(source, code), new)))


@pytest.mark.parametrize(
    ("line", "code", "new", "wanted"),
    [
        ("y = a / b\n", "b", "b + 1", "y = a / (b + 1)"),
        ("y = a / b\n", "b", "b.abs()", "y = a / b.abs()"),
        ("y = a / (b)\n", "b", "b + 1", "y = a / (b + 1)"),
        ("y = f(a, b)\n", "b", "b + 1", "y = f(a, b + 1)"),
        ("y = f(a, k=b)\n", "b", "b + 1", "y = f(a, k=b + 1)"),
        ("y = x[b]\n", "b", "b + 1", "y = x[b + 1]"),
        ("y = (a - b).sqrt()\n", "a - b", "(a - b).clamp_min(1)", "y = (a - b).clamp_min(1).sqrt()"),
        ("y = f(a - b)\n", "a - b", "g(a - b)", "y = f(g(a - b))"),
        ("y = -a ** 2\n", "a", "a + 1", "y = -(a + 1) ** 2"),
        ("return_ = a\n", "a", "a + 1", "return_ = a + 1"),
        ("y = 'ü€' + f(a)\n", "a", "a.b", "y = 'ü€' + f(a.b)"),
        ("y = f(\ta)  # why\n", "a", "a.b", "y = f(\ta.b)  # why"),
    ],
)
def test_parentheses_are_set_where_they_are_needed(line: str, code: str, new: str, wanted: str) -> None:
    assert put_into(line, code, new) == [wanted]


def test_what_would_be_no_python_is_no_diff() -> None:
    assert put_into("y = a\n", "a", "a +") == []
    source = SourceFile("/x.py", "y = f(a)\n")
    assert (
        diff(
            source, replace_node(source, node_of(source, "f(a)"), "b"), replace_node(source, node_of(source, "a"), "c")
        )
        == ""
    )
    assert diff(source, replace_node(source, node_of(source, "a"), "a")) == ""


@pytest.mark.parametrize("file", [__file__, ast.__file__])
def test_nodes_and_statements_come_in_the_order_of_ast(file: str) -> None:
    source = SourceFile.read(file)
    assert source is not None
    walked = list(dict.fromkeys(ast.walk(source.tree)))
    assert source.nodes == walked
    assert source.statements == [node for node in walked if isinstance(node, ast.stmt)]


@pytest.mark.parametrize("raw", [b"x = 1\r\nz = f(y)\r\n", b"\xef\xbb\xbfz = f(y)\n", b"z = f(y)"])
def test_line_ends_and_marks_are_kept(raw: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_bytes(raw)
    source = SourceFile.read(str(file))
    assert source is not None
    text = diff(source, replace_node(source, node_of(source, "y"), "y.abs()"))
    ending = "\r\n" if b"\r" in raw else "\n"
    assert f"-z = f(y){ending}" in text
    assert f"+z = f(y.abs()){ending}" in text
    assert ("\\ No newline at end of file" in text) == (not raw.endswith(b"\n"))


def test_another_encoding_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_bytes("# coding: latin-1\nname = 'é'; z = f(y)\n".encode("latin-1"))
    source = SourceFile.read(str(file))
    assert source is not None
    assert added(diff(source, replace_node(source, node_of(source, "y"), "1"))) == ["name = 'é'; z = f(1)"]


@pytest.mark.parametrize("raw", [b"def (", b"\xff\xfe\x00", b"# coding: no-such-code\n", b"x = '\x00'"])
def test_what_is_no_python_is_no_source(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_bytes(raw)
    assert SourceFile.read(str(tmp_path / "x.py")) is None
    assert SourceFile.read(str(tmp_path / "absent.py")) is None


CALLS = """\
import torch as t, numpy as np
import torch.nn.functional as F
from torch import nn, log as ln
from helpers import *

def f(x, np):
    return [t.log(x), ln(x), F.softmax(x), x.log_(), nn.functional.relu(x), np.log(x), x[0].log(), self.net(x)]

def g(x):
    import torch.special as sp
    return [np.log(x), sp.xlogy(x, x), torch.exp(x)]
"""


def test_functions_are_known_by_whatever_name_they_have() -> None:
    source = SourceFile("/x.py", CALLS)
    called = [source.expr(n).called for n in ast.walk(source.tree) if isinstance(n, ast.Call)]
    assert called == [
        "torch.log",
        "torch.log",
        "torch.nn.functional.softmax",
        ".log_",
        "torch.nn.functional.relu",
        ".log",  # the parameter np hides the module
        ".log",
        "self.net",
        "numpy.log",
        "torch.special.xlogy",
        "torch.exp",  # used and bound nowhere: it came with the star
    ]
    first, last = node_of(source, "t.log(x)"), node_of(source, "sp.xlogy(x, x)")
    assert source.spell("torch.log_softmax", first) == "t.log_softmax"
    assert source.spell("torch.nn.functional.softplus", first) == "F.softplus"
    assert source.spell("numpy.log", first) == "numpy.log"
    assert source.spell("numpy.log", last) == "np.log"
    assert source.reach("torch.special.entr", first) == "t.special.entr"
    assert source.reach("torch.special.entr", last) == "sp.entr"


def test_torch_is_imported_where_new_code_needs_it() -> None:
    text = '"""Doc."""\nfrom __future__ import annotations\n\nfrom net import f\n\ny = f(a)\n'
    source = SourceFile("/x.py", text)
    assert added(diff(source, replace_node(source, node_of(source, "f(a)"), "torch.log(a)"))) == [
        "import torch",
        "y = torch.log(a)",
    ]
    assert added(diff(source, replace_node(source, node_of(source, "f(a)"), "a.torch.log"))) == ["y = a.torch.log"]


NAMES = """\
def f(z, flag):
    p = z * 2
    if flag:
        q = p + 1
    p = p.exp()
    q = p
    r, s = p, q
    s += 1
    return q.log(), s, r
"""


def test_a_name_is_followed_to_its_nearest_assignment() -> None:
    source = SourceFile("/x.py", NAMES)
    call = node_of(source, "q.log()")
    assert source.code(source.value(source.expr(call).args[0])) == "p.exp()"
    assert source.unchanged(node_of(source, "z * 2"), call)
    assert not source.unchanged(node_of(source, "p.exp()"), call)  # the p in it is another one by then
    returned = next(n for n in ast.walk(source.tree) if isinstance(n, ast.Return)).value
    assert isinstance(returned, ast.Tuple)
    assert source.assigned(returned.elts[1]) is None  # changed in place
    assert source.assigned(returned.elts[2]) is None  # one of several


MULTILINE = """\
y = (
    x.pow(2)
    .sum(-1)  # of each row
    .sqrt()
)
"""


def test_a_method_over_several_lines_is_found_by_its_name() -> None:
    source = SourceFile("/x.py", MULTILINE)
    found = source.node_at(Site("/x.py", 4, 5, 4, 11))
    assert found is not None
    assert source.expr(found).op == "sqrt"
    assert source.code(source.expr(found).args[0]).startswith("x.pow(2)")


def test_places_outside_of_the_file_are_nowhere() -> None:
    source = SourceFile("/x.py", "y = 1\n")
    assert source.node_at(Site("/x.py", 99, 0, 99, 5)) is None
    assert source.node_at(Site("/x.py", 99)) is None


def test_arguments_and_statements_are_added_and_taken_away() -> None:
    source = SourceFile("/x.py", "def f():\n    y = g(a, (b), k=1,)\n    h()\n    return y\n")
    call, bare = node_of(source, "g(a, (b), k=1,)"), node_of(source, "h()")
    assert isinstance(call, ast.Call)
    assert isinstance(bare, ast.Call)
    assert added(diff(source, set_argument(source, call, "k", "2"))) == ["    y = g(a, (b), k=2,)"]
    assert added(diff(source, set_argument(source, call, "m", "2"))) == ["    y = g(a, (b), k=1, m=2,)"]
    assert added(diff(source, set_argument(source, bare, "m", "2"))) == ["    h(m=2)"]
    assert added(diff(source, insert_before(source, bare, "one()", "two()"))) == ["    one()", "    two()"]
    assert added(diff(source, insert_after(source, call, "one()"))) == ["    one()"]
    assert changed_text(source, call, set_argument(source, call, "m", "2")) == "g(a, (b), k=1, m=2,)"
    deleted = delete_statement(source, source.statement(bare))
    assert deleted is not None
    assert "-    h()\n" in diff(source, deleted)


def test_statements_that_share_a_line() -> None:
    source = SourceFile("/x.py", "a = 1; b = f(a)\nif a: b = g(a)\n")
    assert delete_statement(source, source.tree.body[0]) is None
    assert added(diff(source, insert_before(source, node_of(source, "f(a)"), "c = a"))) == ["a = 1; c = a; b = f(a)"]
    assert added(diff(source, insert_before(source, node_of(source, "g(a)"), "c = a"))) == ["if a: c = a; b = g(a)"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_positions_count_the_lines_of_python(end: str) -> None:
    source = SourceFile("/x.py", end.join(["x = 1\x0c", "if x:", "    y = f(", "        x)"]))
    (edit,), _ = as_patch([replace_node(source, node_of(source, "f(\n        x)"), "g(x)")], lambda _: source)
    assert edit == Edit("/x.py", 3, 8, 4, 10, "f(\n        x)", "g(x)")
    assert edited(source.content, [edit]) == source.content[: source.content.index("f(")] + "g(x)"
    after = insert_after(source, node_of(source, "f(\n        x)"), "z = y")
    assert (after.line, after.column, after.old, after.new) == (4, 10, "", "\n    z = y")
    assert edited(source.content, [after]) == source.content + end + "    z = y"


@pytest.mark.parametrize(
    ("code", "wanted"), [("a.b", "a.b"), ("a + b", "(a + b)"), ("-a", "(-a)"), ("f(a)[0]", "f(a)[0]")]
)
def test_what_a_dot_may_follow(code: str, wanted: str) -> None:
    source = SourceFile("/x.py", f"y = {code}\n")
    assert parenthesized(source, node_of(source, code)) == wanted


@pytest.mark.parametrize("value", ['float("inf")', "-float(cell)", "1e400", "float(torch.tensor(x))"])
def test_a_number_is_not_given_to_torch(value: str) -> None:
    source = SourceFile("train.py", f"import torch\nx[0] = {value}\nx[0] = torch.log(y)\n")
    number, tensor = (n.value for n in source.tree.body if isinstance(n, ast.Assign))
    assert _libraries(source, number, guess=True) == []
    assert _libraries(source, tensor, guess=True) == ["torch"]
