"""Steps that fail only if they are compiled: the function at the origin, or all of the program, is left uncompiled."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from firstnan.records import Edit, Remedy
from firstnan.repair.context import FailureContext, remedies_for
from firstnan.repair.source import SourceFile, replace_node, set_argument

_WHY = "Its operators then run one by one, as in the replay that was finite."


@remedies_for("compile_only")
def function_uncompiled(context: FailureContext) -> Iterator[Remedy]:
    location = context.location
    function = location.source.function(location.node) if location is not None else None
    if location is None or not isinstance(function, ast.FunctionDef):
        return
    source = location.source
    disable = source.spell("torch.compiler.disable", function)
    compiled = [one for one in function.decorator_list if _is_compile(source, one)]
    if compiled:
        edit = replace_node(source, compiled[0], disable)
    else:
        first = min([function.lineno, *(one.lineno for one in function.decorator_list)])
        at = source.line_start(first)
        edit = source.edit(at, at, f"{source.indent(function)}@{disable}\n")
    yield context.remedy(f"Run `{function.name}` uncompiled", _WHY, edit)


@remedies_for("compile_only")
def nothing_compiled(context: FailureContext) -> Iterator[Remedy]:
    history = context.failure.history
    sites = (context.failure.origin.site, history.made_at, history.stepped_at, history.backward_at)
    sources = [context.files.get(file) for file in dict.fromkeys(site.file for site in sites if site is not None)]
    edits = [edit for source in sources if source is not None for edit in _disabled(source)]
    if edits:
        yield context.remedy("Do not compile", _WHY, *edits)


def _disabled(source: SourceFile) -> Iterator[Edit]:
    for call in source.calls:
        if source.called(call) == "torch.compile":
            yield set_argument(source, call, "disable", "True")


def _is_compile(source: SourceFile, decorator: ast.expr) -> bool:
    named = decorator.func if isinstance(decorator, ast.Call) else decorator
    return source.code(named) == source.spell("torch.compile", decorator)
