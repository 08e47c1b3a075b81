"""`%%firstnan` in a notebook: runs the cell, and shows the report of its first NaN or Inf."""

from __future__ import annotations

import ast
import os
import sys
from typing import Any

from firstnan.records import Report
from firstnan.records.errors import NonFiniteError
from firstnan.records.syntax import parse
from firstnan.records.words import headline


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext firstnan`."""

    def magic(line: str, cell: str) -> None:
        __tracebackhide__ = True
        _run(shell, line, cell)

    shell.register_magic_function(magic, "cell", "firstnan")


def unload_ipython_extension(shell: Any) -> None:
    shell.magics_manager.magics["cell"].pop("firstnan", None)


def _run(shell: Any, line: str, cell: str) -> None:
    """Runs a cell as the shell does, watched; the variable that `line` names gets the report, or None."""
    __tracebackhide__ = True
    name = line.strip()
    if name and not name.isidentifier():
        raise ValueError(f"%%firstnan takes the name of a variable for the report, got {name!r}")
    from firstnan.engine.block_trials import try_fixes
    from firstnan.engine.program_watch import raising
    from firstnan.observe.sites import ends_at_origin

    parts = _compiled(shell, cell)
    report: Report | None = None
    found: Any = None
    try:
        with raising((os.getcwd(),), try_fixes) as watch:
            found = watch.session
            for code in parts:
                exec(code, shell.user_global_ns, shell.user_ns)
    except NonFiniteError as error:
        report = error.report
        _display(report)
        # The report is shown above: the error ends the cell, and says where.
        raise ends_at_origin(NonFiniteError(report, headline(report))) from None
    except Exception:  # the program's own, perhaps because of a bad value
        if found is not None and found.report is not None and found.report.origin is not None:
            report = found.report
            _display(report)
        raise
    finally:
        if name:
            shell.user_ns[name] = report


def _display(report: Report) -> None:
    sys.modules["IPython"].display.display(report)


def _compiled(shell: Any, cell: str) -> list[Any]:
    """The code of a cell: all of it, then its last expression, whose value is displayed."""
    # The line of the magic counts, as a comment: lines are those that the reader sees.
    source = "# %%firstnan\n" + shell.transform_cell(cell)
    # The cells so far end with this one; the shell's own count may be ahead of it already.
    number = len(shell.user_ns.get("In", ())) - 1
    file = shell.compile.cache(source, number if number > 0 else shell.execution_count, raw_code=source)
    tree = parse(source, file=file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    parts = [compile(tree, file, "exec", shell.compile.flags, dont_inherit=True)]
    if last is not None:
        shown = ast.Interactive([last])
        parts.append(compile(shown, file, "single", shell.compile.flags, dont_inherit=True))
    return parts
