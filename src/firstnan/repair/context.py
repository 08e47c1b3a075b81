"""One failure as the remedies see it, and where in the source the numbers of the origin are computed."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Literal, TypeVar

from firstnan.diagnose.rules.base import Failure
from firstnan.records import Cause, Edit, Operand, OpEvent, Remedy, Site
from firstnan.records.operator_families import COMPARISONS, COPIES, SPLITS, VIEWS, words
from firstnan.repair.source import Expr, SourceFile, insert_after

Kind = Literal["code", "setting", "data"]
Node_co = TypeVar("Node_co", bound=ast.AST, covariant=True)


class SourceFiles:
    """The files that were opened for one failure, each read and parsed once."""

    def __init__(self) -> None:
        self._texts: dict[str, str | None] = {}
        self._open: dict[str, SourceFile | None] = {}

    def get(self, file: str) -> SourceFile | None:
        if file not in self._open:
            text = self._text(file)
            self._open[file] = SourceFile.parsed(file, text) if text is not None else None
        return self._open[file]

    def with_text(self, files: Iterable[str], pattern: str) -> list[SourceFile]:
        """Those of these files in which the regular expression matches; the others are not parsed.

        A program may have hundreds of files, and to parse one takes a hundred times as long as to search its text.
        """
        matches = re.compile(pattern).search
        found = (self.get(file) for file in dict.fromkeys(files) if matches(self._text(file) or ""))
        return [source for source in found if source is not None]

    def _text(self, file: str) -> str | None:
        if file not in self._texts:
            self._texts[file] = SourceFile.text_of(file)
        return self._texts[file]

    def imported(self, source: SourceFile) -> list[SourceFile]:
        """The program's own files that a file imports, each once."""
        found: dict[SourceFile, None] = {}
        for node in source.nodes:
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                before = f"{node.module}." if node.module else ""
                names = [*([node.module] if node.module else []), *(before + alias.name for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            level = node.level if isinstance(node, ast.ImportFrom) else 0
            found.update((other, None) for name in names if (other := self.module(source, name, level)) is not None)
        found.pop(source, None)
        return list(found)

    def module(self, source: SourceFile, name: str, level: int = 0) -> SourceFile | None:
        """A module that a file imports from its own folder or a folder around it; `level`: of a relative import."""
        folder = os.path.dirname(source.file)
        above = [os.path.join(folder, *[".."] * depth) for depth in range(4)]
        paths = (os.path.join(at, *name.split(".")) for at in (above[level - 1 : level] if level else above))
        files = (os.path.normpath(path + end) for path in paths for end in (".py", f"{os.sep}__init__.py"))
        file = next((f for f in files if "site-packages" not in f and os.path.isfile(f)), None)
        return self.get(file) if file is not None else None


@dataclass(frozen=True)
class Location(Generic[Node_co]):
    """An expression or statement in one of the user's files."""

    source: SourceFile
    node: Node_co

    @cached_property
    def expr(self) -> Expr:
        return self.source.expr(self.node)

    def code(self, node: ast.AST) -> str:
        return self.source.code(node)


@dataclass(frozen=True)
class FailureContext:
    """One failure, one of its causes, and the files it happened in."""

    failure: Failure
    cause: Cause
    files: SourceFiles = field(default_factory=SourceFiles)

    @cached_property
    def location(self) -> Location[ast.AST] | None:
        """The user's expression where the value originated, if its file is on disk."""
        return self.location_of(self.failure.origin.site)

    def location_of(self, site: Site | None) -> Location[ast.AST] | None:
        source = self.files.get(site.file) if site is not None else None
        node = source.node_at(site) if source is not None and site is not None else None
        return Location(source, node) if source is not None and node is not None else None

    @cached_property
    def event(self) -> OpEvent | None:
        """The operator at `location`; for a backward origin the forward operator, if it was recorded."""
        return self.failure.origin.forward_event or self.failure.event

    @cached_property
    def dtype(self) -> str:
        return self.failure.dtype or "float32"

    def epsilon(self, wide: str, half: str = "1e-4") -> str:
        """A bound for this dtype: float16 rounds many small numbers to 0 and has a short range."""
        return half if self.dtype == "float16" else wide

    def remedy(self, title: str, why: str, *edits: Edit, kind: Kind = "code") -> Remedy:
        """A candidate, dropped if it has no valid edits; its diff is rendered later."""
        return Remedy(title, why=why, kind=kind, edits=edits)


Proposer = Callable[[FailureContext], Iterator[Remedy]]
PROPOSERS: dict[str, list[Proposer]] = {}
"""By slug, the most promising first."""


def remedies_for(*slugs: str) -> Callable[[Proposer], Proposer]:
    """Registers a generator of candidates for these causes."""

    def register(proposer: Proposer) -> Proposer:
        for slug in slugs:
            PROPOSERS.setdefault(slug, []).append(proposer)
        return proposer

    return register


MOST_OPERATORS = 12
CARRIERS = VIEWS | COPIES
"""Operators whose result holds the numbers they read."""
BOUNDED = CARRIERS | words("mul add sub neg rsub div")
"""Operators whose result is not large unless their inputs are."""
_MUCH_LARGER = 4.0
METADATA = words("shape size dim ndim device dtype numel requires_grad is_cuda element_size type names layout grad_fn")
"""Attributes that do not depend on the numbers of a tensor."""
TESTS = COMPARISONS | words("bool count_nonzero")
"""Methods whose result a guard before them may change."""


def producer_of(context: FailureContext, operand: str, carriers: frozenset[str]) -> Location[ast.AST] | None:
    """The expression in another statement, in any function, that computed an argument of the origin."""
    if context.location is None or context.event is None:
        return None
    here, event, wanted = _line(context.location), context.event, {operand}
    for _ in range(MOST_OPERATORS):
        given = [i for i in event.inputs if i.producer is not None and (not wanted or i.name in wanted)]
        if not given or any(_is_part(context, event, i) for i in given):
            return None
        if len(given) > 1 and event.op in BOUNDED and event.op not in CARRIERS:
            return None  # either may be the large one
        makers = (context.failure.trace.events[i.producer] for i in given if i.producer is not None)
        event, wanted = max(makers, key=lambda e: e.grad), set()
        location = context.location_of(event.site)
        if location is None or event.phase != "forward" or event.op in SPLITS:
            return None  # a guard before a split changes the other parts as well
        if _line(location) != here and isinstance(location.node, ast.Call | ast.BinOp):
            if _calls_both(location, event.module, context.event.module):
                return None
            if isinstance(location.source.parent(location.node), ast.Expr):
                return None  # a call whose result is not used, as that which runs the training
            if carriers is BOUNDED and not _is_nearly_as_large(event, context.event, operand):
                return None
            return location if _used_elsewhere(location, context.location) else None
        if event.op not in carriers:
            return None
    return None


def _is_nearly_as_large(event: OpEvent, user: OpEvent, operand: str) -> bool:
    """Whether a bound for the results of an event bounds what was computed from them: that is not much larger."""
    made = max((o.max for o in event.outputs if o.max is not None), default=None)
    used = max(
        (i.stat.max for i in user.inputs if i.name == operand and i.stat and i.stat.max is not None), default=None
    )
    return made is None or used is None or used <= _MUCH_LARGER * made


def _calls_both(location: Location[ast.AST], module: str, user: str) -> bool:
    """Whether this is the call of a container of layers: of that which made a value, and of that which uses it."""
    node = location.node
    if not isinstance(node, ast.Call) or not module or not user:
        return False
    if location.expr.library == "torch" or location.expr.called.startswith("."):
        return False  # a function, or a method of a tensor
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    parts = module.split(".")
    container = parts[: parts.index(called) + 1] if called in parts else []
    return container != parts and user.split(".")[: len(container)] == container


def _is_part(context: FailureContext, event: OpEvent, operand: Operand) -> bool:
    """Whether the event reads only a part of what was computed: one of two halves. A guard there changes the rest."""
    made = context.failure.trace.events[operand.producer].outputs if operand.producer is not None else ()
    most = operand.stat.numel if operand.stat is not None else 1 << 62
    if event is not context.event:  # a carrier reads no more than it writes; its statistics are those of the whole
        most = min(most, max((o.numel for o in event.outputs), default=most))
    return bool(made) and all(o.numel > most for o in made)


def _line(location: Location[ast.AST]) -> tuple[str, int]:
    return location.source.file, location.source.statement(location.node).lineno


def _used_elsewhere(producer: Location[ast.AST], user: Location[ast.AST]) -> bool:
    """Whether a guard where a value is computed covers more than one where it is used."""
    source, statement = producer.source, producer.source.statement(producer.node)
    if source is not user.source or source.scope(producer.node) is not source.scope(user.node):
        return True
    names = {t.id for t in ast.walk(statement) if isinstance(t, ast.Name) and isinstance(t.ctx, ast.Store)}
    return sum(source.reads(name, statement) for name in names) > 1


# --- names that are read more than once --------------------------------------------------------------------------


@dataclass(frozen=True)
class Binding:
    """The statement that assigns a name; a guard there covers everything that reads the name."""

    source: SourceFile
    name: str
    """The name of the guarded value; "" if it is assigned elsewhere."""
    statement: ast.stmt
    value: ast.expr | None
    """The expression to guard; None if the statement assigns several names."""

    @property
    def line(self) -> int:
        return self.statement.lineno

    def guarded(self, write: Callable[[ast.expr], Edit], of_name: Edit) -> Edit | None:
        """The guard around the value, or on a separate line if the value would be computed twice."""
        if self.value is not None:
            edit = write(self.value)
            calls = any(isinstance(n, ast.Call) for n in ast.walk(self.value))
            if not calls or edit.new.count(self.source.code(self.value)) < 2:
                return edit
        alone = self.source.line(self.line).strip() == self.source.code(self.statement).strip()
        return (
            insert_after(self.source, self.statement, f"{self.name} = {of_name.new}") if self.name and alone else None
        )


def binding(context: FailureContext, source: SourceFile, node: ast.expr, operand: str) -> Binding | None:
    """The assignment of the guarded name, if several expressions read its value and none compares it."""
    event = context.event
    read = [i for i in event.inputs if i.name == operand] if event is not None else []
    early = event is not None and event.region == "setup"  # healthy operators before the first step are forgotten
    made = any((early or i.producer is not None) and i.role not in ("parameter", "input") for i in read)
    if not isinstance(node, ast.Name) or not made:  # weights and data are not computed here
        return None
    stores = [n for n in _named(source, node) if not isinstance(n.ctx, ast.Load)]
    here = source.statement(node).lineno
    before = [n for n in stores if source.statement(n).lineno < here]
    if not before:
        return None if stores else _from_caller(context, source, node, operand)
    last = max(before, key=lambda n: source.statement(n).lineno)
    statement = source.statement(last)
    ends = min((source.statement(n).lineno for n in stores if source.statement(n).lineno >= here), default=None)
    reads = [r for r in _reads(source, node) if statement.lineno < source.statement(r).lineno <= (ends or 1 << 30)]
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not _read_twice(source, reads):
        return None
    if any(source.is_written_by_call(n) for n in _named(source, node)):  # it is another value at the operation
        return None
    if source.parent(statement) not in source.parents(node):  # another branch may assign it too
        return None
    if statement.targets[0] is last:
        return Binding(source, node.id, statement, statement.value)
    return Binding(source, node.id, statement, None)


def unpacked(source: SourceFile, node: ast.expr) -> Binding | None:
    """The unpacking that assigns the one name of an expression like `0.5 * x`: a guard after it changes only `x`."""
    inside = [n for n in ast.walk(node) if isinstance(n, ast.expr)]
    names = [n for n in inside if isinstance(n, ast.Name)]
    if len(names) != 1 or not all(isinstance(n, ast.Name | ast.Constant | ast.BinOp | ast.UnaryOp) for n in inside):
        return None
    name = names[0]
    stores = [n for n in _named(source, name) if not isinstance(n.ctx, ast.Load)]
    statement = source.statement(stores[0]) if len(stores) == 1 else None
    if not isinstance(statement, ast.Assign) or not isinstance(source.parent(stores[0]), ast.Tuple | ast.List):
        return None
    if source.parent(statement) not in source.parents(node) or not _read_twice(source, _reads(source, name)):
        return None
    return Binding(source, name.id, statement, None)


def _from_caller(context: FailureContext, source: SourceFile, node: ast.Name, operand: str) -> Binding | None:
    """As `binding`, for a parameter of the function: its value is computed by the caller."""
    function = source.function(node)
    if function is None or isinstance(function, ast.Lambda) or not _read_twice(source, _reads(source, node)):
        return None
    producer = producer_of(context, operand, CARRIERS)
    if producer is None or not isinstance(producer.node, ast.expr) or _line(producer) == (source.file, function.lineno):
        return None
    statement = producer.source.statement(producer.node)
    names = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    if any(_tested(producer.source, r) for name in names for r in _reads(producer.source, name)):
        return None
    return Binding(producer.source, "", statement, producer.node)


def _named(source: SourceFile, name: ast.Name) -> list[ast.Name]:
    """All uses of the name in the function around it."""
    return [n for n in source.within(name) if isinstance(n, ast.Name) and n.id == name.id]


def _reads(source: SourceFile, name: ast.Name) -> list[ast.Name]:
    """Where the numbers of the name are read or compared."""
    found = [n for n in _named(source, name) if isinstance(n.ctx, ast.Load)]
    return [n for n in found if not (isinstance(at := source.parent(n), ast.Attribute) and at.attr in METADATA)]


def _read_twice(source: SourceFile, reads: list[ast.Name]) -> bool:
    return len(reads) > 1 and not any(_tested(source, read) or _overwritten(source, read) for read in reads)


def _overwritten(source: SourceFile, read: ast.Name) -> bool:
    """Whether an in-place method changes it (`x.log_()`): reads before and after it see different numbers."""
    return is_in_place(source.parent(read))


def is_in_place(node: ast.AST | None) -> bool:
    """Whether the node names an in-place method: `x.log_`."""
    return isinstance(node, ast.Attribute) and node.attr.endswith("_") and not node.attr.endswith("__")


def _tested(source: SourceFile, read: ast.Name) -> bool:
    """Whether it is compared or checked for bad values: a guard would change the result."""
    around = []
    for node in source.parents(read):
        if isinstance(node, ast.stmt):
            break
        around.append(node)
    asked = any(isinstance(n, ast.Attribute) and n.attr in TESTS for n in around)
    called = any(isinstance(n, ast.Call) and source.expr(n).op in TESTS and read in n.args for n in around)
    return asked or called or any(isinstance(n, ast.Compare) for n in around)
