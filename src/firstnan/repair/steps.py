"""A value that a function computes step by step under one or more names, and the removal of those steps together."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from firstnan.records import Edit
from firstnan.repair.context import is_in_place
from firstnan.repair.source import Expr, SourceFile, delete_statement, stored_targets

_BRANCHES = (ast.For, ast.While, ast.If, ast.Try, ast.With)
_LOOPS = (ast.For, ast.While)


@dataclass
class Steps:
    """The statements that compute one expression, nearest first."""

    source: SourceFile
    whole: ast.AST
    """The expression that the new code replaces."""
    statements: list[ast.stmt] = field(default_factory=list)
    nodes: set[ast.AST] = field(default_factory=set)
    """Everything that computes the value."""

    def __post_init__(self) -> None:
        self.nodes.update(ast.walk(self.whole))

    def resolve(self, node: ast.expr, at: ast.AST | None = None) -> tuple[Expr, ast.AST]:
        """The operation that computed a value, through plain names, and where it is written."""
        here = at if at is not None else node
        while isinstance(node, ast.Name):
            written = self.written(node.id, here)
            if written is None or written[1] is not None:
                break
            statement = written[0]
            self.take(statement)
            here = statement
            if isinstance(statement, ast.Assign):
                node = statement.value
            else:
                return self.operation(statement), statement
        return self.source.expr(node), here

    def take(self, statement: ast.stmt) -> None:
        """Makes a statement one of the steps."""
        around = self.source.parent(statement)
        alone = isinstance(around, ast.If) and around.body == [statement] and not around.orelse
        if alone and isinstance(around, ast.If) and around not in self.source.parents(self.whole):
            statement = around
        self.statements.append(statement)
        self.nodes.update(ast.walk(statement))

    def include(self, other: Steps) -> None:
        """Makes the steps of another value part of this one."""
        self.statements += other.statements
        self.nodes |= other.nodes

    def operation(self, statement: ast.stmt) -> Expr:
        """The operation of a statement that writes a name: `s = f(s)`, `s /= d`, `s.mul_(d)`."""
        if isinstance(statement, ast.Assign | ast.Expr):
            return self.source.expr(statement.value)
        return self.source.expr(statement)

    def written(self, name: str, before: ast.AST) -> tuple[ast.stmt, ast.expr | None] | None:
        """The statement that wrote a name last, with the condition it depends on; None if that is ambiguous."""
        source, here = self.source, self.source.statement(before)
        writes = [n for n in source.within(before) if isinstance(n, ast.stmt) and self._writes(n, name)]
        earlier = [n for n in writes if n.lineno < here.lineno and n not in source.parents(here)]
        last = max(earlier, key=lambda n: n.lineno, default=None)
        if last is None or isinstance(last, _BRANCHES) or not self._is_plain(last, name):
            return None
        around = source.parents(here)
        if any(isinstance(n, _LOOPS) and n not in source.parents(last) for n in around):
            return None  # the turn before may have written it
        block = source.parent(last)
        if block in around:
            return last, None
        alone = isinstance(block, ast.If) and block.body == [last] and not block.orelse
        if alone and isinstance(block, ast.If) and source.parent(block) in around:
            return last, block.test
        return None

    def _writes(self, statement: ast.stmt, name: str) -> bool:
        if any(isinstance(t, ast.Name) and t.id == name for t in stored_targets(statement)):
            return True
        return self._in_place(statement, name)

    def _in_place(self, statement: ast.stmt, name: str) -> bool:
        call = statement.value if isinstance(statement, ast.Expr) else None
        method = call.func if isinstance(call, ast.Call) else None
        return (
            isinstance(method, ast.Attribute)
            and is_in_place(method)
            and isinstance(method.value, ast.Name)
            and method.value.id == name
        )

    def _is_plain(self, statement: ast.stmt, name: str) -> bool:
        if isinstance(statement, ast.Assign):
            return len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)
        return isinstance(statement, ast.AugAssign) or self._in_place(statement, name)

    # --- what can be removed -----------------------------------------------------------------------------------

    def removed(self) -> list[Edit] | None:
        """The statements taken out; None if anything else reads what they compute."""
        source = self.source
        names = {n for s in self.statements for n in self._names(s)}
        if not all(self._only_here(name) for name in names):
            return None
        edits = [delete_statement(source, s) for s in dict.fromkeys(self.statements)]
        found = [edit for edit in edits if edit is not None]
        return found if len(found) == len(edits) else None

    def _names(self, statement: ast.stmt) -> set[str]:
        inner = statement.body[0] if isinstance(statement, ast.If) else statement
        if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Call):
            return {n.id for n in ast.walk(inner.value.func) if isinstance(n, ast.Name)}
        return {t.id for t in stored_targets(inner) if isinstance(t, ast.Name)}

    def _only_here(self, name: str) -> bool:
        """Whether nothing but these steps reads the name, until something else is assigned to it."""
        source, first = self.source, min(s.lineno for s in self.statements if name in self._names(s))
        if source.function(self.whole) is None and any(
            isinstance(n, ast.Name) and n.id == name and source.function(n) is not None for n in source.nodes
        ):
            return False
        uses = [n for n in source.within(self.whole) if isinstance(n, ast.Name) and n.id == name]
        uses.sort(key=lambda n: (source.statement(n).lineno, isinstance(n.ctx, ast.Store)))
        if self._is_carried([n for n in uses if source.statement(n).lineno < first]):
            return False
        for use in uses:
            statement = source.statement(use)
            if statement.lineno < first or use in self.nodes:
                continue
            return isinstance(use.ctx, ast.Store) and source.parent(statement) in source.parents(self.whole)
        return True

    def _is_carried(self, early: list[ast.Name]) -> bool:
        """Whether a loop around the steps reads a name before them: that is the value of the turn before."""
        loops = [n for n in self.source.parents(self.whole) if isinstance(n, _LOOPS)]
        return any(isinstance(n.ctx, ast.Load) and loop in self.source.parents(n) for n in early for loop in loops)
