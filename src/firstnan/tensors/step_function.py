"""A step that is a function: what it was called with takes the place of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any


class StepFunction:
    """The function of one step, among the arguments that it was called with: `[StepFunction, args, kwargs]`."""

    __slots__ = ("call",)

    def __init__(self, function: Any) -> None:
        self.call = function

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        """The arguments with their names; a single positional one is the batch itself."""
        names = [path] if len(args) == 1 else self._parameters()
        for i, value in enumerate(args):
            yield (names[i] if i < len(names) else f"{path}[{i}]"), value
        yield from kwargs.items()

    def _parameters(self) -> list[str]:
        try:
            parameters = inspect.signature(self.call).parameters.values()
        except (TypeError, ValueError):
            return []
        return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def is_step_call(batch: Any) -> bool:
    """Whether this stands for the call of a step's function."""
    return type(batch) is list and len(batch) == 3 and isinstance(batch[0], StepFunction)
