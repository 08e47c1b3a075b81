"""One failure as those see it who look for a remedy, and the list of what they know."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from firstnan.diagnose.rules.failure import Failure
from firstnan.records import Cause, OpEvent, Remedy, Site
from firstnan.repair.edits import Edit, diff
from firstnan.repair.source import Expr, Source

Kind = Literal["code", "setting", "data"]


class Desk:
    """The files that were opened for one failure, each read once."""

    def __init__(self) -> None:
        self._open: dict[str, Source | None] = {}

    def source(self, file: str) -> Source | None:
        if file not in self._open:
            self._open[file] = Source.read(file)
        return self._open[file]


@dataclass(frozen=True)
class Place:
    """An expression (or statement) in a file."""

    source: Source
    node: ast.AST

    @cached_property
    def expr(self) -> Expr:
        return self.source.expr(self.node)

    def code(self, node: ast.AST) -> str:
        return self.source.code(node)


@dataclass(frozen=True)
class Job:
    """One failure and one of its causes; `place` is the user's expression where the value was born, if on disk."""

    scene: Failure
    cause: Cause
    desk: Desk = field(default_factory=Desk)

    @cached_property
    def place(self) -> Place | None:
        return self.place_of(self.scene.origin.site)

    def place_of(self, site: Site | None) -> Place | None:
        source = self.desk.source(site.file) if site is not None else None
        node = source.at(site) if source is not None and site is not None else None
        return Place(source, node) if source is not None and node is not None else None

    @cached_property
    def event(self) -> OpEvent | None:
        """The operator that stands at `place`: for a backward origin the forward one, if it was seen."""
        return self.scene.origin.forward_event or self.scene.event

    @cached_property
    def dtype(self) -> str:
        return self.scene.dtype or "float32"

    def remedy(self, title: str, why: str, *edits: Edit, kind: Kind = "code") -> Remedy:
        """A candidate; its diff is empty where there is nothing on disk to change."""
        return Remedy(title, diff(edits), why=why, kind=kind)


Look = Callable[[Job], Iterator[Remedy]]
REMEDIES: dict[str, list[Look]] = {}
"""By slug, what is worth trying first comes first."""


def remedy(*slugs: str) -> Callable[[Look], Look]:
    """Registers the generator below it for these causes; candidates whose diff is empty are dropped."""

    def register(look: Look) -> Look:
        for slug in slugs:
            REMEDIES.setdefault(slug, []).append(look)
        return look

    return register
