"""Keeps the room table of docs/design.md true: which way imports point, and what stays free of torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from firstnan.observe import manifest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "firstnan"
# What `firstnan run` and `firstnan show` load before they know whether torch is wanted.
TORCH_FREE = [
    "records",
    "diagnose",
    "repair",
    "report",
    "observe.runner",
    "observe.sites",
    "gate.growth_guard",
    "engine.second_run",
    "engine.trials",
    "engine.investigation",
    "cli",
]
# Programs that are run as a user's would be: they import what a user imports.
PROGRAMS = (PACKAGE / "cli" / "demos" / "programs", PACKAGE / "diagnose" / "causes" / "examples")


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    late: bool


def read_table(text: str) -> dict[str, frozenset[str]]:
    """Room -> the packages it may import, in the order of the table of the section "The house"."""
    section = text.split("The house\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `([a-z_]+)/` \|[^|]*\|([^|]*)\|$", section, flags=re.MULTILINE)
    return {room: frozenset(name.strip() for name in cell.split(",")) - {"none"} for room, cell in rows}


def room_of(path: Path) -> str:
    """The folder directly below the package; empty for the package's own files."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def imports_of(source: str, package: str) -> list[Import]:
    """Every import of a file; late ones run inside a function, or never (`TYPE_CHECKING`)."""
    found: list[Import] = []

    def visit(node: ast.AST, late: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            # `from firstnan import gate` names a module, `from firstnan.gate.gate import Gate` a thing inside one.
            found.extend(Import(f"{base}.{alias.name}", node.lineno, late) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, True)
            for child in node.orelse:
                visit(child, late)
        else:
            inner = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                visit(child, inner)

    visit(ast.parse(source), False)
    return found


def target_file(module: str) -> Path | None:
    """The file of this package that a dotted name leads to; None for other packages."""
    parts = module.split(".")
    if parts[0] != "firstnan":
        return None
    for end in range(len(parts), 0, -1):
        stem = PACKAGE.joinpath(*parts[1:end])
        for file in (stem.with_suffix(".py"), stem / "__init__.py"):
            if file.is_file() and file != PACKAGE.with_suffix(".py"):
                return file
    return None


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def package_of(path: Path) -> str:
    return ".".join(["firstnan", *path.relative_to(PACKAGE).parts[:-1]])


def breaches(path: Path, rooms: dict[str, frozenset[str]]) -> Iterator[str]:
    order, room = list(rooms), room_of(path)
    for item in imports_of(path.read_text(encoding="utf-8"), package_of(path)):
        where = f"{path.relative_to(ROOT)}:{item.line} imports {item.module}"
        file = target_file(item.module)
        if file is None:
            name = item.module.split(".")[0]
            if name not in sys.stdlib_module_names and name not in rooms[room]:
                yield f"{where}: the row of {room} does not name {name}"
        elif room_of(file) and order.index(room_of(file)) > order.index(room):
            yield f"{where}: {room_of(file)} is below {room}"


ROOMS = read_table((ROOT / "docs" / "design.md").read_text(encoding="utf-8"))
OWN = [path for path in files() if room_of(path) and not any(p in path.parents for p in PROGRAMS)]


def test_every_folder_has_a_row_and_every_row_a_folder() -> None:
    assert sorted(ROOMS) == sorted({room_of(path) for path in files()} - {""})
    assert len(ROOMS) <= 14


def test_only_the_public_names_and_the_command_are_outside_the_rooms() -> None:
    assert [path.name for path in files() if not room_of(path)] == ["__init__.py", "__main__.py"]


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_up_the_table(path: Path) -> None:
    assert list(breaches(path, ROOMS)) == []


OWNED = {  # what other rooms hold of a room, by the names they hold it under
    "gate": {"gate", "_gate", "reads", "steps", "call_sites"},
    "tracing": {"tracer"},
    "observe": {"hooks", "layers"},
    "engine": {"session", "microscope", "handouts", "live", "journal", "recovery", "calls"},
}


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_nobody_outside_a_room_writes_its_fields(path: Path) -> None:
    foreign = set().union(*(names for room, names in OWNED.items() if room != room_of(path)))
    written = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
        for target in [t for one in targets for t in ast.walk(one) if isinstance(t, ast.Attribute)]:
            owner = target.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if name in foreign and isinstance(target.ctx, ast.Store):
                written.append(f"line {node.lineno}: {ast.unparse(target)}")  # type: ignore[attr-defined]
    assert written == []


# The dispatch mode is the tracer itself; the rest of torch and Python is touched in one room.
TOUCHES = re.compile(
    r"\.register_\w*hook\(|settrace\(|setprofile\(|set_stance\(|meta_path\.|\.py_impl\(|\bsetattr\((?!self)"
)


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_torch_and_python_are_touched_in_one_room(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    touches = [
        f"line {i}: {line.strip()}" for i, line in enumerate(lines, 1) if TOUCHES.search(line) and '"' not in line
    ]
    assert room_of(path) == "observe" or touches == []


def names_set_in(source: str) -> set[str]:
    """The names of other packages that a file assigns to, with their modules: `os._exit`, `queue.Queue.put`."""
    tree, imported, found = ast.parse(source), dict[str, str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            first, _, rest = ast.unparse(node).partition(".")
            if "(" not in rest and not imported.get(first, "firstnan").startswith("firstnan"):
                found.add(f"{imported[first]}.{rest}")
    return found


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_names_that_are_set_in_other_packages_stand_in_the_manifest(path: Path) -> None:
    named = {
        f"{module}.{name}"
        for table in vars(manifest).values()
        if isinstance(table, tuple)
        for module, name in table
        if isinstance(module, str)
    }
    found = names_set_in(path.read_text(encoding="utf-8"))
    assert found <= (named if room_of(path) == "observe" else set())


def test_every_way_to_set_a_name_of_another_package_is_seen() -> None:
    source = """
import os, io as files
from queue import Queue
def replace():
    os._exit, files.open = None, None
    Queue.put = None
    del os.path.join
    import torch
    torch._inductor.config.compile_threads += 1
    own.attribute = None
"""
    assert names_set_in(source) == {
        "io.open", "os._exit", "os.path.join", "queue.Queue.put", "torch._inductor.config.compile_threads"
    }  # fmt: skip


@pytest.mark.parametrize(
    "page", ["CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
)
def test_files_that_the_documentation_names_exist(page: str) -> None:
    named = re.findall(r"`([a-z0-9_/]+\.(?:py|toml))`", (ROOT / page).read_text(encoding="utf-8"))
    known = {path.name for path in files()}
    assert [n for n in named if not ((ROOT / n).is_file() or (PACKAGE / n).is_file() or n in known)] == []


def test_table_names_only_known_packages() -> None:
    assert set().union(*ROOMS.values()) <= {"torch", "rich", "safetensors", "jinja2", "markupsafe", "pytest"}


@pytest.mark.parametrize("place", TORCH_FREE)
def test_place_does_not_reach_torch(place: str) -> None:
    stem = PACKAGE.joinpath(*place.split("."))
    start = [stem.with_suffix(".py")] if stem.with_suffix(".py").is_file() else [p for p in OWN if stem in p.parents]
    assert start, f"nothing at {place}"
    assert path_to_torch(start) is None


def path_to_torch(start: list[Path]) -> str | None:
    """How loading these files leads to torch, following what runs at import; None where it does not."""
    waiting = [(file, file.name) for file in start]
    seen: set[Path] = set()
    while waiting:
        file, way = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for item in imports_of(file.read_text(encoding="utf-8"), package_of(file)):
            if item.late:
                continue
            if item.module.split(".")[0] == "torch":
                return f"{way} -> {item.module}"
            target = target_file(item.module)
            if target is not None:
                # Importing a.b.c also runs a/__init__ and a/b/__init__.
                parents = [p / "__init__.py" for p in target.parents if PACKAGE in (p, *p.parents)]
                waiting += [(f, f"{way} -> {f.relative_to(PACKAGE)}") for f in (target, *parents) if f.is_file()]
    return None


def test_importing_the_torch_free_places_does_not_load_torch() -> None:
    names = ", ".join(f"firstnan.{place}" for place in TORCH_FREE)
    code = f"import sys, {names}, firstnan.cli.main; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr or "torch was loaded"


def test_walker_sees_late_relative_and_guarded_imports() -> None:
    source = (
        "import torch.nn as nn\n"
        "from . import words\n"
        "from ..records import Site\n"
        "if TYPE_CHECKING:\n    from torch import Tensor\n"
        "try:\n    import rich\nexcept ImportError:\n    pass\n"
        "def f():\n    from firstnan.gate.gate import Gate\n"
    )
    assert [(i.module, i.late) for i in imports_of(source, "firstnan.report")] == [
        ("torch.nn", False),
        ("firstnan.report.words", False),
        ("firstnan.records.Site", False),
        ("torch.Tensor", True),
        ("rich", False),
        ("firstnan.gate.gate.Gate", True),
    ]


def test_breach_is_reported() -> None:
    finite = PACKAGE / "tensors" / "finite.py"
    told = list(breaches(finite, {**ROOMS, "tensors": frozenset()}))
    assert told
    assert all("does not name torch" in line for line in told)
    told = list(breaches(finite, dict(reversed(ROOMS.items()))))
    assert told
    assert all("records is below tensors" in line for line in told)


def test_way_to_torch_is_found_through_another_room() -> None:
    way = path_to_torch([PACKAGE / "tracing" / "tracer.py"])
    assert way is not None
    assert way.startswith("tracer.py -> ")
