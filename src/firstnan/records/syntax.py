"""The syntax tree of a text."""

from __future__ import annotations

import ast
from typing import Literal, overload


@overload
def parse(source: str, *, file: str = ...) -> ast.Module: ...
@overload
def parse(source: str, mode: Literal["eval"], *, file: str = ...) -> ast.Expression: ...
def parse(source: str, mode: str = "exec", *, file: str = "<unknown>") -> ast.AST:
    """`ast.parse` where other threads parse too.

    Python up to 3.12 counts the depth of all threads in one number. Where the garbage collector lets another thread in
    between, it raises SystemError although the text is right.
    """
    for _ in range(9):
        try:
            return ast.parse(source, file, mode)
        except SystemError:
            continue
    return ast.parse(source, file, mode)
