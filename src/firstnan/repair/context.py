"""What is known of one failure when a remedy is written, and the list of who can write one."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Literal, TypeVar

from firstnan.diagnose.rules.failure import Failure
from firstnan.records import Cause, Edit, OpEvent, Remedy, Site
from firstnan.repair.source import Expr, SourceFile

Kind = Literal["code", "setting", "data"]
Node_co = TypeVar("Node_co", bound=ast.AST, covariant=True)


class SourceFiles:
    """The files that were opened for one failure, each read once."""

    def __init__(self) -> None:
        self._open: dict[str, SourceFile | None] = {}

    def get(self, file: str) -> SourceFile | None:
        if file not in self._open:
            self._open[file] = SourceFile.read(file)
        return self._open[file]


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
