"""Keeps the room table of docs/design.md true: who imports what, what stays free of torch, how long a file may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "firstnan"
LONGEST_FILE = 450
# What `firstnan run` and `firstnan show` load before they know whether torch is wanted.
TORCH_FREE = [
    "records",
    "errors",
    "guard",
    "site",
    "blame",
    "causes",
    "rules",
    "report",
    "runner",
    "importing",
    "trial.overlay",
    "child",
    "trial.trials",
    "trial.fix",
    "investigate",
    "demos",
    "cli",
]


@dataclass(frozen=True)
class Row:
    early: frozenset[str]
    late: frozenset[str]


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    late: bool


def read_table(text: str) -> dict[str, Row]:
    """Room -> what it may import, from the table of the section "The house"."""
    section = text.split("The house\n", 1)[1].split("\n## ", 1)[0]
    rows = {}
    for room, cell in re.findall(r"^\| `([^`]+)` \|[^|]*\|([^|]*)\|$", section, flags=re.MULTILINE):
        names = [name.strip() for name in cell.split(",") if name.strip() != "stdlib only"]
        late = frozenset(name.removesuffix(" (late)") for name in names if name.endswith(" (late)"))
        rows[room] = Row(frozenset(names) - {f"{name} (late)" for name in late}, late)
    return rows


def room_of(path: Path, rooms: dict[str, Row]) -> str | None:
    """The row a file belongs to: itself, or the nearest folder that has one."""
    name = path.relative_to(PACKAGE).as_posix()
    fitting = [room for room in rooms if name == room or (room.endswith("/") and name.startswith(room))]
    return max(fitting, key=len, default=None)


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
            # `from firstnan import gate` names a module, `from firstnan.gate import Gate` a thing inside one.
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


def breaches(path: Path, rooms: dict[str, Row]) -> Iterator[str]:
    room = room_of(path, rooms)
    assert room is not None, f"{path.name} is in no row of the table"
    for item in imports_of(path.read_text(encoding="utf-8"), package_of(path)):
        file = target_file(item.module)
        if file is None:
            name = item.module.split(".")[0]
            if name in sys.stdlib_module_names:
                continue
        else:
            home = room_of(file, rooms)
            if home in (room, "__init__.py"):  # the package itself is loaded by every import
                continue
            name = str(home).removesuffix(".py").removesuffix("/")
        if name in rooms[room].early or (item.late and name in rooms[room].late):
            continue
        yield f"{path.relative_to(ROOT)}:{item.line} imports {item.module}: the row of {room} does not allow {name}"


ROOMS = read_table((ROOT / "docs" / "design.md").read_text(encoding="utf-8"))


def test_every_file_has_a_row_and_every_row_a_file() -> None:
    homes = {path: room_of(path, ROOMS) for path in files()}
    assert [path.name for path, room in homes.items() if room is None] == []
    assert sorted(set(ROOMS) - {room for room in homes.values() if room}) == []


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_are_those_of_the_table(path: Path) -> None:
    assert list(breaches(path, ROOMS)) == []


def test_table_names_only_rooms_and_known_packages() -> None:
    known = {room.removesuffix(".py").removesuffix("/") for room in ROOMS} | {"torch", "rich", "safetensors", "jinja2"}
    named = {name for row in ROOMS.values() for name in row.early | row.late}
    assert named - known == set()


@pytest.mark.parametrize("room", TORCH_FREE)
def test_room_does_not_reach_torch(room: str) -> None:
    start = [
        p for p in files() if (room_of(p, ROOMS) or "").removesuffix(".py").removesuffix("/") == room.replace(".", "/")
    ]
    assert start, f"no file in room {room}"
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


def test_importing_the_torch_free_rooms_does_not_load_torch() -> None:
    names = ", ".join(f"firstnan.{room}" for room in TORCH_FREE)
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr or "torch was loaded"


@pytest.mark.parametrize("folder", ["src", "benchmarks"])
def test_files_fit_in_the_head(folder: str) -> None:
    lengths = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in (ROOT / folder).rglob("*.py")}
    assert {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > LONGEST_FILE} == {}


def test_walker_sees_late_relative_and_guarded_imports() -> None:
    source = (
        "import torch.nn as nn\n"
        "from . import site\n"
        "from ..records import Site\n"
        "if TYPE_CHECKING:\n    from torch import Tensor\n"
        "try:\n    import rich\nexcept ImportError:\n    pass\n"
        "def f():\n    from firstnan.gate import Gate\n"
    )
    assert [(i.module, i.late) for i in imports_of(source, "firstnan.report")] == [
        ("torch.nn", False),
        ("firstnan.report.site", False),
        ("firstnan.records.Site", False),
        ("torch.Tensor", True),
        ("rich", False),
        ("firstnan.gate.Gate", True),
    ]


def test_breach_is_told() -> None:
    rooms = dict(ROOMS)
    rooms["finite.py"] = Row(frozenset({"records"}), frozenset({"torch"}))
    told = list(breaches(PACKAGE / "finite.py", rooms))
    assert told
    assert all("does not allow torch" in line for line in told)


def test_way_to_torch_is_found_through_another_room() -> None:
    way = path_to_torch([PACKAGE / "tracer.py"])
    assert way is not None
    assert way.startswith("tracer.py -> ")
