"""Source positions: lines, columns, expressions; and which frames are the user's code."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import firstnan.observe.sites
from firstnan.observe.sites import Ownership, Spot, resolve, whole_statement
from firstnan.records import Site
from firstnan.records.syntax import parse

_numbers = count()


@pytest.fixture
def places() -> list[Spot]:
    """Where the caller of `here` stands, each time it is called."""
    return []


def run(source: str, found: list[Spot], name: str | None = None, known: bool = True) -> str:
    """Runs source text in which `here(...)` returns its first argument and notes from where it was called."""
    source = textwrap.dedent(source).lstrip("\n")
    name = name or f"/tmp/site_{next(_numbers)}.py"
    if known:
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)

    class Anything:
        def __getattr__(self, _: str) -> Any:
            return self

        def __call__(self, *_: Any, **__: Any) -> Any:
            frame = sys._getframe(1)
            found.append((frame.f_code, frame.f_lasti))
            return self

        def __iter__(self) -> Iterator[int]:
            frame = sys._getframe(1)
            found.append((frame.f_code, frame.f_lasti))
            return iter([1, 2])

        __add__ = __matmul__ = __getitem__ = __setitem__ = __neg__ = __call__

    exec(compile(source, name, "exec"), {"x": Anything(), "here": Anything()})
    return name


def codes(source: str, found: list[Spot]) -> list[str]:
    run(source, found)
    return [resolve(spot).code for spot in found]


def test_each_call_of_a_chain_is_its_own_piece(places: list[Spot]) -> None:
    assert codes("x.clamp(0).log().sum()", places) == ["x.clamp(0)", "x.clamp(0).log()", "x.clamp(0).log().sum()"]


def test_operators_and_their_operands(places: list[Spot]) -> None:
    assert codes("y = -(x.a() + x.b())", places) == ["x.a()", "x.b()", "x.a() + x.b()", "-(x.a() + x.b())"]


def test_arguments_that_are_calls(places: list[Spot]) -> None:
    assert codes("x.f(x.g(1), k=x.h())", places) == ["x.g(1)", "x.h()", "x.f(x.g(1), k=x.h())"]


def test_a_call_over_several_lines(places: list[Spot]) -> None:
    run("""
        y = x.f(
            1,
            x.g(),
        )
    """, places)  # fmt: skip
    inner, outer = (resolve(spot) for spot in places)
    assert (inner.line, inner.column, inner.code) == (3, 4, "x.g()")
    assert (outer.line, outer.end_line, outer.column, outer.end_column) == (1, 4, 4, 1)
    assert outer.code == "x.f( 1, x.g(), )"
    assert outer.source == ("y = x.f(", "    1,", "    x.g(),", ")")
    assert outer.source_line == inner.source_line == 1


def test_a_chain_over_several_lines_points_at_the_line_of_the_call(places: list[Spot]) -> None:
    run("""
        y = (
            x
            .first()
            .second(0)
        )
    """, places)  # fmt: skip
    first, second = (resolve(spot) for spot in places)
    assert (first.line, second.line) == (3, 4)
    assert "first()" in first.code
    assert "second(0)" in second.code


def test_columns_count_characters_not_bytes(places: list[Spot]) -> None:
    run("größe = 'αβγ'; y = x.f('é') + x.g()\n", places)
    first = resolve(places[0])
    text = "größe = 'αβγ'; y = x.f('é') + x.g()"
    assert (first.column, first.end_column) == (text.index("x.f"), text.index(" + "))
    assert first.code == "x.f('é')"


def test_tabs(places: list[Spot]) -> None:
    run("if True:\n\ty = x.f()\n", places)
    site = resolve(places[0])
    assert (site.line, site.column, site.code) == (2, 5, "x.f()")


def test_lambdas_comprehensions_and_decorators(places: list[Spot]) -> None:
    run("""
        act = lambda t: t.log()
        act(x)
        ys = [v.exp() for v in (x, x)]
        @x.register("name")
        def f():
            return x.g()
        """, places)  # fmt: skip
    sites = [resolve(spot) for spot in places]
    assert [s.code for s in sites[:3]] == ["t.log()", "v.exp()", "v.exp()"]
    assert sites[0].function == "<lambda>"
    assert sites[1].function in ("<listcomp>", "<module>")  # 3.12 has no frame of its own for them
    decorated = [s for s in sites[3:] if s.line == 4]
    assert decorated
    assert decorated[0].code == 'x.register("name")'


def test_the_head_of_a_for_loop_not_its_body(places: list[Spot]) -> None:
    run("""
        for item in x:
            a = 1
            b = 2
            c = 3
    """, places)  # fmt: skip
    site = resolve(places[0])
    assert site.line == 1
    assert (site.end_line or 1) == 1
    assert "a = 1" not in site.code
    assert "x" in site.code


def test_the_statement_around_a_place(places: list[Spot]) -> None:
    run("""
        def f():
            if x.a():
                y = x.b(
                    1)
            z = [x.c()
                 for _ in (1,)]
        f()
    """, places)  # fmt: skip
    a, b, c = (resolve(spot) for spot in places[:3])
    assert a.source == ("    if x.a():",)
    assert b.source == ("        y = x.b(", "            1)")
    assert c.source_line == 5
    assert whole_statement(b).code == "y = x.b( 1)"
    assert (whole_statement(b).line, whole_statement(b).column, whole_statement(b).end_line) == (3, 8, 4)


def test_code_without_source(places: list[Spot]) -> None:
    run("a = 0\nb = 0\ny = x.f()\n", places, name="<generated>", known=False)
    site = resolve(places[0])
    assert (site.file, site.line, site.code, site.source) == ("<generated>", 3, "", ())
    assert whole_statement(site) == site


def test_source_that_is_shorter_than_the_code(places: list[Spot]) -> None:
    """The file was edited while the program ran."""
    name = f"/tmp/site_{next(_numbers)}.py"
    linecache.cache[name] = (1, None, ["y = 1\n"], name)
    run("a = 0; y = x.f()\nb = x.g()\n", places, name=name, known=False)
    first, second = (resolve(spot) for spot in places)
    assert (first.line, second.line) == (1, 2)
    assert "\n" not in first.code


def test_equal_code_in_two_files_is_two_places() -> None:
    """To Python, code objects from different files are equal when their text is."""
    one: list[Spot] = []
    two: list[Spot] = []
    files = [run("y = x.f()\n", one), run("y = x.f()\n", two)]
    assert one[0] == two[0]
    assert [resolve(one[0]).file, resolve(two[0]).file] == files


def test_a_notebook_cell(places: list[Spot]) -> None:
    name = "/tmp/ipykernel_4242/1234567.py"
    run("y = x.f()\n", places, name=name)
    assert resolve(places[0]).code == "x.f()"
    assert Ownership().owns(places[0][0])


# --- whose code it is -----------------------------------------------------------------------------------------------


def code_of(path: str | Path) -> CodeType:
    return compile("1", str(path), "exec")


def owns(path: str | Path, *dirs: str | Path) -> bool:
    return Ownership(tuple(str(d) for d in dirs)).owns(code_of(path))


def test_the_users_own_files(tmp_path: Path) -> None:
    assert owns(tmp_path / "train.py")
    assert owns(tmp_path / "lib" / "model.py", tmp_path)
    assert owns("<ipython-input-3-abc>")
    assert owns("<stdin>")


def test_libraries(tmp_path: Path) -> None:
    import torch

    assert not owns(torch.__file__)
    assert not owns(os.__file__)
    assert not owns(firstnan.observe.sites.__file__)
    assert not owns("<string>")
    assert not owns("<frozen importlib._bootstrap>")
    assert not owns(tmp_path / "lib" / "python3.11" / "site-packages" / "einops" / "einops.py")
    assert not owns("/usr/lib/python3/dist-packages/yaml/__init__.py")


def test_an_environment_inside_the_project(tmp_path: Path) -> None:
    assert not owns(tmp_path / ".venv" / "lib" / "python3.11" / "site-packages" / "lightning" / "loop.py", tmp_path)
    assert owns(tmp_path / "src" / "train.py", tmp_path)


def test_a_program_inside_site_packages(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    assert owns(site / "trainer" / "sub" / "main.py", site / "trainer")
    assert not owns(site / "other" / "main.py", site / "trainer")
    assert not owns(site / "trainer" / "vendor" / "site-packages" / "x.py", site / "trainer")


def test_a_script_lying_directly_in_site_packages(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    assert owns(site / "train.py", site)
    assert not owns(site / "torch" / "nn" / "functional.py", site)


def test_an_interpreter_inside_the_folder_of_the_program() -> None:
    """A script in the home folder, with pyenv or conda below it."""
    stdlib = sysconfig.get_path("stdlib")
    above = Path(stdlib).parents[1]
    assert not owns(Path(stdlib) / "contextlib.py", above)
    assert not owns(Path(stdlib) / "site-packages" / "x.py", above)


def test_this_package_inside_the_folder_of_the_program() -> None:
    package = Path(firstnan.observe.sites.__file__).parent
    assert not owns(package / "tracer.py", package.parents[1])
    demos = package / "demos" / "programs"
    assert owns(demos / "log.py", demos)


def test_links(tmp_path: Path) -> None:
    installed = tmp_path / "env" / "lib" / "site-packages"
    project = tmp_path / "project"
    installed.mkdir(parents=True)
    project.mkdir()
    (project / "model.py").write_text("")
    (installed / "model.py").symlink_to(project / "model.py")
    assert owns(installed / "model.py")  # an editable install: the file is the user's
    (tmp_path / "shortcut").symlink_to(project)
    assert owns(tmp_path / "shortcut" / "model.py", project)
    assert owns(project / "model.py", tmp_path / "shortcut")


def test_links_are_resolved_once_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has thousands of modules loaded, and each folder above a file is asked for."""
    resolved, resolve_links = list[str](), os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda path: (resolved.append(str(path)), resolve_links(path))[1])
    ownership = Ownership()
    assert all(ownership.owns_file(str(tmp_path / f"{number}.py")) for number in range(30))
    assert resolved == [str(tmp_path)]


def test_equal_code_of_user_and_library_is_kept_apart(tmp_path: Path) -> None:
    ownership = Ownership()
    mine, theirs = code_of(tmp_path / "a.py"), code_of(tmp_path / "site-packages" / "a.py")
    assert mine == theirs
    assert ownership.owns(mine)
    assert not ownership.owns(theirs)


def frame_in(path: str, body: str = "return sys._getframe()", **names: Any) -> FrameType:
    names |= {"sys": sys}
    exec(compile(f"def f():\n    {body}\n", path, "exec"), names)
    frame = names["f"]()
    assert isinstance(frame, FrameType)
    return frame


def test_the_nearest_user_frame_behind_a_library(tmp_path: Path) -> None:
    library = str(tmp_path / "site-packages" / "net.py")
    names: dict[str, Any] = {"sys": sys}
    exec(compile("def inner():\n    return spots(sys._getframe())\n", library, "exec"), names)
    names["spots"] = Ownership().spots
    exec(compile("def outer():\n    return inner()\n", str(tmp_path / "train.py"), "exec"), names)
    user, inner, engine = names["outer"]()
    assert resolve(user).function == "outer"
    assert resolve(inner).function == "inner"
    assert not engine


def test_in_user_code_there_is_no_library_frame(tmp_path: Path) -> None:
    user, inner, engine = Ownership().spots(frame_in(str(tmp_path / "train.py")))
    assert user is not None
    assert (inner, engine) == (None, False)


def test_no_frame_at_all() -> None:
    assert Ownership().spots(None) == (None, None, False)


def test_a_site_without_source_keeps_its_line() -> None:
    site = Site("gone.py", 7)
    assert whole_statement(site) is site


def test_threads_that_parse_at_the_same_time() -> None:
    text = "x = [f(a, b=(c + d * e)) for a in b if c]\n" * 400
    interval = sys.getswitchinterval()

    def other_threads_are_let_in(phase: str, info: dict[str, int]) -> None:
        sum(range(200))

    gc.callbacks.append(other_threads_are_let_in)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            trees = list(pool.map(parse, [text] * 40))
    finally:
        sys.setswitchinterval(interval)
        gc.callbacks.remove(other_threads_are_let_in)
    assert [len(tree.body) for tree in trees] == [400] * 40
