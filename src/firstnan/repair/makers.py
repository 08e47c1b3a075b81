"""Where the argument of an operation is made, and whether that is the better place for a guard."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from firstnan.records.operator_families import COMPARISONS, COPIES, SPLITS, VIEWS, words
from firstnan.repair.base import Job, Place
from firstnan.repair.edits import Edit, after
from firstnan.repair.source import Source

FAR = 12
CARRIERS = VIEWS | COPIES
"""Operators whose result has the numbers that they read."""
BOUNDED = CARRIERS | words("mul add sub neg rsub div")
"""Operators whose result is not large when what they read is not."""
ABOUT = words("shape size dim ndim device dtype numel requires_grad is_cuda element_size type names layout grad_fn")
"""What is asked of a tensor without a look at its numbers."""
TESTS = COMPARISONS | words("bool count_nonzero")
"""Methods whose answer a guard before them may change."""


def made_at(job: Job, operand: str, carriers: frozenset[str]) -> Place | None:
    """The other statement, in whatever function, that made what an argument of the origin is the value of."""
    if job.place is None or job.event is None:
        return None
    here, event, wanted = _line(job.place), job.event, {operand}
    for _ in range(FAR):
        given = [i.producer for i in event.inputs if i.producer is not None and (not wanted or i.name in wanted)]
        if not given:
            return None
        event, wanted = max((job.scene.trace.events[p] for p in given), key=lambda e: e.grad), set()
        place = job.place_of(event.site)
        if place is None or event.phase != "forward":
            return None
        if _line(place) != here and isinstance(place.node, ast.Call | ast.BinOp) and event.op not in SPLITS:
            return place if _used_elsewhere(place, job.place) else None
        if event.op not in carriers:
            return None
    return None


def _line(place: Place) -> tuple[str, int]:
    return place.source.file, place.source.statement(place.node).lineno


def _used_elsewhere(maker: Place, user: Place) -> bool:
    """Whether a guard where a value is made does more than one where it is used."""
    source, statement = maker.source, maker.source.statement(maker.node)
    if source is not user.source or source.scope(maker.node) is not source.scope(user.node):
        return True
    names = {t.id for t in ast.walk(statement) if isinstance(t, ast.Name) and isinstance(t.ctx, ast.Store)}
    return sum(source.reads(name, statement) for name in names) > 1


# --- names that are read more than once -------------------------------------------------------------------------


@dataclass(frozen=True)
class Binding:
    """What gives a name its value, where a guard covers all that reads the name."""

    source: Source
    name: str
    """What the guarded value is called; "" where it gets its name elsewhere."""
    statement: ast.stmt
    value: ast.expr | None
    """The expression to be guarded; None where the name is one of several that the statement gives a value."""

    @property
    def line(self) -> int:
        return self.statement.lineno

    def guarded(self, write: Callable[[ast.expr], Edit], of_name: Edit) -> Edit | None:
        """The guard around the value, or that of the name on a line of its own where the value would be made twice."""
        if self.value is not None:
            edit = write(self.value)
            calls = any(isinstance(n, ast.Call) for n in ast.walk(self.value))
            if not calls or edit.text.count(self.source.code(self.value)) < 2:
                return edit
        alone = self.source.line(self.line).strip() == self.source.code(self.statement).strip()
        return after(self.source, self.statement, f"{self.name} = {of_name.text}") if self.name and alone else None


def binding(job: Job, source: Source, node: ast.expr, operand: str) -> Binding | None:
    """Where the guarded name gets its value, if more than one place reads that value and none compares it."""
    read = [i for i in job.event.inputs if i.name == operand] if job.event is not None else []
    made = any(i.producer is not None and i.role not in ("parameter", "input") for i in read)
    if not isinstance(node, ast.Name) or not made:  # weights and data are what they are
        return None
    stores = [n for n in _named(source, node) if not isinstance(n.ctx, ast.Load)]
    here = source.statement(node).lineno
    before = [n for n in stores if source.statement(n).lineno < here]
    if not before:
        return None if stores else _handed_over(job, source, node, operand)
    last = max(before, key=lambda n: source.statement(n).lineno)
    statement = source.statement(last)
    ends = min((source.statement(n).lineno for n in stores if source.statement(n).lineno >= here), default=None)
    reads = [r for r in _reads(source, node) if statement.lineno < source.statement(r).lineno <= (ends or 1 << 30)]
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not _several(source, reads):
        return None
    if source.parent(statement) not in source.parents(node):  # in a branch: another may give it its value
        return None
    if statement.targets[0] is last:
        return Binding(source, node.id, statement, statement.value)
    return Binding(source, node.id, statement, None)


def _handed_over(job: Job, source: Source, node: ast.Name, operand: str) -> Binding | None:
    """As `binding`, for a parameter of the function: the value is made by whoever calls it."""
    function = source.function(node)
    if function is None or isinstance(function, ast.Lambda) or not _several(source, _reads(source, node)):
        return None
    maker = made_at(job, operand, CARRIERS)
    if maker is None or not isinstance(maker.node, ast.expr) or _line(maker) == (source.file, function.lineno):
        return None
    statement = maker.source.statement(maker.node)
    names = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    if any(_tested(maker.source, r) for name in names for r in _reads(maker.source, name)):
        return None
    return Binding(maker.source, "", statement, maker.node)


def _named(source: Source, name: ast.Name) -> list[ast.Name]:
    """Wherever the name stands in the function around it."""
    return [n for n in source.within(name) if isinstance(n, ast.Name) and n.id == name.id]


def _reads(source: Source, name: ast.Name) -> list[ast.Name]:
    """Where the numbers behind the name are read, or compared."""
    found = [n for n in _named(source, name) if isinstance(n.ctx, ast.Load)]
    return [n for n in found if not (isinstance(at := source.parent(n), ast.Attribute) and at.attr in ABOUT)]


def _several(source: Source, reads: list[ast.Name]) -> bool:
    return len(reads) > 1 and not any(_tested(source, read) or _overwritten(source, read) for read in reads)


def _overwritten(source: Source, read: ast.Name) -> bool:
    """Whether a method writes into it (`x.log_()`): those before and those after read different numbers."""
    at = source.parent(read)
    return isinstance(at, ast.Attribute) and at.attr.endswith("_") and not at.attr.endswith("__")


def _tested(source: Source, read: ast.Name) -> bool:
    """Whether it is compared, or asked where it is bad: then a guard would change the answer."""
    around = []
    for node in source.parents(read):
        if isinstance(node, ast.stmt):
            break
        around.append(node)
    asked = any(isinstance(n, ast.Attribute) and n.attr in TESTS for n in around)
    called = any(isinstance(n, ast.Call) and source.expr(n).op in TESTS and read in n.args for n in around)
    return asked or called or any(isinstance(n, ast.Compare) for n in around)
