"""Bad values in the data: replaced, or their samples left out, where they are read or at the start of the step."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeGuard

from firstnan.diagnose.rules.base import Failure, largest
from firstnan.diagnose.unusual_data import doubtful
from firstnan.records import Edit, OpEvent, Remedy, Report, TensorStat, Trace
from firstnan.repair.context import FailureContext, SourceFiles, remedies_for
from firstnan.repair.literals import format_number
from firstnan.repair.source import SourceFile, as_patch, insert_after, insert_before, replace_node

FILLED = "Missing values become 0; all other values are unchanged."
MEDIAN = "Missing values become the median of their column; all other values are unchanged."
LEFT_OUT = "Samples with a bad value are left out of the loss; all others are unchanged."
LOADS = ("torch.load", "numpy.load", "pickle.load", "joblib.load")
_FEW = 0.1
"""The share of a column up to which rows without a value are left out rather than filled in."""
_OTHER_UNIT = 100.0
"""A number so many times larger than that of any other sample is hardly a measurement."""
TABLES = ("numpy.genfromtxt", "numpy.loadtxt", "numpy.load", "numpy.fromfile", "numpy.memmap")


def _bad(context: FailureContext) -> TensorStat | None:
    return context.failure.origin.produced or context.failure.made


@remedies_for("nan_label")
def rows_left_out_of_the_step(context: FailureContext) -> Iterator[Remedy]:
    """Samples without a usable target, left out where their table is made, or at the start of the step."""
    yield from _gaps_in_column(context, dropped=True)
    yield from _dropped_in_loop(context)
    yield from _dropped_from_table(context)


@remedies_for("nan_input")
def filled_in(context: FailureContext) -> Iterator[Remedy]:
    """Missing features, replaced where the data is computed or read; or their rows left out."""
    stat = _bad(context)
    few = stat is not None and stat.nan <= stat.numel * _FEW
    for dropped in (few, not few):
        yield from _gaps_in_column(context, dropped=dropped)
    yield from _filled_at_origin(context)
    yield from _dropped_from_table(context)
    yield from _filled_in_loop(context)
    yield from _dropped_in_loop(context)


@remedies_for("nan_label")
def targets_filled_in(context: FailureContext) -> Iterator[Remedy]:
    """The last resort for a target: an ordinary number."""
    yield from _filled_at_origin(context)


# --- where the data is computed ----------------------------------------------------------------------------------


def _gaps_in_column(context: FailureContext, *, dropped: bool) -> Iterator[Remedy]:
    """The rows of a table without a value in a column left out, or the column filled in, right after it is made."""
    location, column = context.location, _column_of(context)
    if location is None or column is None:
        return
    source, (table, name) = location.source, column
    quote = max("'\"", key=source.text.count)
    name = name.replace("'", quote)
    if dropped:
        line, title, what = f"{table} = {table}.dropna(subset=[{name}])", "Leave out rows with missing values", LEFT_OUT
    else:
        line = f"{table}[{name}] = {table}[{name}].fillna({table}[{name}].median())"
        title, what = "Fill in missing values with the median", MEDIAN
    edit = insert_after(source, source.statement(location.node), line)
    yield context.remedy(title, what, edit, kind="data")


def _column_of(context: FailureContext) -> tuple[str, str] | None:
    """The table and the column, as they are written, that the bad value is in, if it is one with gaps."""
    found, stat = re.fullmatch(r"([\w.]+)\[('\w+')\]", context.failure.origin.label), _bad(context)
    return (found[1], found[2]) if found is not None and stat is not None and stat.nan else None


def _filled_at_origin(context: FailureContext) -> Iterator[Remedy]:
    location, stat = context.location, _bad(context)
    if location is None or _loop_of(location.source, location.node) is not None or _column_of(context) is not None:
        return
    if context.failure.origin.module_type:
        return  # a layer reads it there: its result would be filled in
    source = location.source
    value = _value(location.node, context.failure.origin.label)
    if value is None or isinstance(source.parent(value), ast.Expr):
        return  # its result is not used
    if isinstance(value, ast.Call) and source.called(value) == ".step":
        return  # the data goes into a step, and a loss comes back
    title = "Fill in the missing values where they are read"
    if stat is not None and stat.shape == () and source.expr(value).library != "torch":
        yield from _filled_number(context, source, value)
    if isinstance(value, ast.Call) and source.called(value) in LOADS and stat is not None and stat.shape != ():
        fill = _nan_to_num("torch", source, value, "v")
        text = f"{{k: {fill} for k, v in {source.code(value)}.items()}}"
        yield context.remedy(title, FILLED, replace_node(source, value, text), kind="data")
    for library in _libraries(source, value, guess=stat is None or stat.shape != ()):
        text = _nan_to_num(library, source, value, source.code(value))
        yield context.remedy(title, FILLED, replace_node(source, value, text), kind="data")


def _filled_number(context: FailureContext, source: SourceFile, value: ast.expr) -> Iterator[Remedy]:
    statement = source.statement(value)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if len(targets) == 1 and isinstance(targets[0], ast.Name):
        name = targets[0].id
        line = f'{name} = {name} if abs({name}) < float("inf") else 0.0'
        yield context.remedy("Fill in the missing number", FILLED, insert_after(source, statement, line), kind="data")
    elif isinstance(statement, ast.Return) and statement.value is value:
        start, end = source.span(statement)[0], source.span(value)[0]
        if source.text[source.line_start(statement.lineno) : start].strip():
            return  # `if not text: return ...`
        used = {n.id for n in source.within(statement) if isinstance(n, ast.Name)}
        name = "value" if "value" not in used else "filled_in"
        line = f'return {name} if abs({name}) < float("inf") else 0.0'
        edits = source.edit(start, end, f"{name} = "), insert_after(source, statement, line)
        yield context.remedy("Fill in the missing number", FILLED, *edits, kind="data")


def _value(node: ast.AST, label: str) -> ast.expr | None:
    """The expression with the bad value: the node itself, or what its statement assigns or returns.

    Of several in a tuple it is the one that mentions the bad variable."""
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.Return) and node.value is not None:
        node = node.value
    if isinstance(node, ast.DictComp):
        return node.value
    if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp):
        return node.elt
    if isinstance(node, ast.Tuple | ast.List | ast.Dict):
        parts = node.values if isinstance(node, ast.Dict) else node.elts
        return next((p for p in parts if any(getattr(n, "id", None) == label for n in ast.walk(p))), None)
    return node if isinstance(node, ast.expr) else None


def _libraries(source: SourceFile, value: ast.expr, guess: bool) -> list[str]:
    """The libraries that the array may belong to, the likelier first; without a guess none for a plain number."""
    numpy = ["numpy"] if source.reach("numpy", value) else []
    number = value.operand if isinstance(value, ast.UnaryOp) else value
    if isinstance(number, ast.Constant) or (isinstance(number, ast.Call) and source.called(number) in ("float", "int")):
        return numpy  # torch takes tensors alone
    used = [source.expr(n).library for n in ast.walk(value) if isinstance(n, ast.Call)]
    outer = source.expr(value).library
    if outer in ("torch", "numpy"):
        return [outer]
    known = [lib for lib in dict.fromkeys(used) if lib in ("numpy", "torch")]
    return known or [*numpy, *(["torch"] if guess else [])]


def _nan_to_num(library: str, source: SourceFile, at: ast.AST, text: str) -> str:
    """A call of `nan_to_num` with 0 for infinities too: the largest number of the dtype would overflow later."""
    return f"{source.spell(f'{library}.nan_to_num', at)}({text}, posinf=0.0, neginf=0.0)"


def _dropped_from_table(context: FailureContext) -> Iterator[Remedy]:
    """Rows of a table with missing values, left out right after it is read from a file."""
    location = context.location
    if location is None:
        return
    source = location.source
    for name in (n for n in ast.walk(location.node) if isinstance(n, ast.Name)):
        found = source.assigned(name)
        value = found.value if found is not None else None
        if found is None or not isinstance(value, ast.Call):
            continue
        called = source.called(value)
        if called.startswith("pandas.read_"):
            edit = replace_node(source, value, f"{source.code(value)}.dropna()")
        elif called in TABLES:
            finite = source.spell("numpy.isfinite", value)
            edit = insert_after(source, found, f"{name.id} = {name.id}[{finite}({name.id}).all(axis=1)]")
        else:
            continue
        yield context.remedy("Leave out rows with missing values", LEFT_OUT, edit, kind="data")


# --- at the start of the step ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchBinding:
    """The statement that assigns the data of a step, and which part of it is bad."""

    source: SourceFile
    statement: ast.stmt
    target: ast.expr
    bad: str
    """The code for the bad part after the statement."""
    rows: bool
    """The bad part has more dimensions than the samples."""
    limit: str = ""
    """The largest number of a good sample; "" for any that is finite."""
    column: str = ""
    """Which numbers of each sample count; "" for all."""

    def followed_by(self, *lines: str) -> Edit | None:
        """New lines right after it; for a loop at the start of its body."""
        if not isinstance(self.statement, ast.For):
            return insert_after(self.source, self.statement, *lines)
        first = self.statement.body[0]
        return insert_before(self.source, first, *lines) if first.lineno > self.statement.iter.lineno else None

    def filtering(self) -> list[str]:
        """Lines that remove the samples with a bad value."""
        finite = f"{self.source.spell('torch.isfinite', self.statement)}({self.bad})"
        if self.limit:
            finite = f"{self.bad}{self.column}.abs() < {self.limit}"
            finite = f"({finite})" if self.rows else finite
        lines = [f"keep = {finite}.flatten(1).all(1)" if self.rows else f"keep = {finite}"]
        if isinstance(self.target, ast.Tuple | ast.List):
            parts = [self.source.code(t) for t in self.target.elts]
            return [*lines, f"{', '.join(parts)} = {', '.join(f'{p}[keep]' for p in parts)}"]
        target = self.source.code(self.target)
        if self.bad == target:
            return [*lines, f"{target} = {target}[keep]"]
        if re.search(r"\[['\"]", self.bad):
            return [*lines, f"{target} = {{name: column[keep] for name, column in {target}.items()}}"]
        return [*lines, f"{target} = [column[keep] for column in {target}]"]


def _dropped_in_loop(context: FailureContext) -> Iterator[Remedy]:
    for bound in _batch_bindings(context):
        edit = bound.followed_by(*bound.filtering())
        if edit is not None:
            yield context.remedy("Leave out samples with a bad value", LEFT_OUT, edit, kind="data")


def extreme_data(context: FailureContext, limit: float) -> tuple[str, TensorStat | None] | None:
    """The part of the batch that the first operator with a result above a limit has read, if it has read one."""
    for event in _step(context):
        if any((largest(made) or 0.0) > limit for made in event.outputs):
            return next(((i.label, i.stat or event.outputs[0]) for i in event.inputs if i.role == "input"), None)
    return None


def extreme_samples_left_out(context: FailureContext, limit: float) -> Iterator[Remedy]:
    """Samples with numbers that no measurement has, left out at the start of the step."""
    found, text = extreme_data(context, limit), format_number(limit)
    for bound in _batch_bindings(context, found) if found is not None and found[0].startswith("batch") else ():
        edit = bound.followed_by(*replace(bound, limit=text).filtering())
        if edit is not None:
            title = f"Leave out samples with a number above {text}"
            yield context.remedy(title, LEFT_OUT, edit, kind="data")


def doubtful_samples_left_out(report: Report) -> Report:
    """The report with a remedy that leaves out samples with a number like that of the bad one, if no other has such.

    It comes before every bound: a bound trains with the number, whatever it is, such as another unit or a fill value.
    """
    found = doubtful(report, _OTHER_UNIT)
    if found is None or report.origin is None or report.cause is None or not found.member.startswith("batch"):
        return report
    if any(remedy.kind == "data" for remedy in report.remedies):
        return report
    context = FailureContext(Failure(report.origin, Trace(), report.history), report.cause, SourceFiles())
    usual = max(abs(found.low), abs(found.high))
    limit = f"{10.0 ** math.floor(math.log10(usual * abs(found.value)) / 2):g}"
    column = f"[:, {found.index[0]}]" if found.index is not None and len(found.index) == 1 else ""
    size = f"below -{limit}" if found.value < 0 else f"above {limit}"
    title = f"Leave out samples with {found.member}{column} {size}, until the data is correct"
    for bound in reversed(list(_batch_bindings(context, (found.member, None)))):  # the loop around backward
        rows = found.index != () and not column
        edit = bound.followed_by(*replace(bound, limit=limit, column=column, rows=rows).filtering())
        edits, diff = as_patch([edit] if edit is not None else [], context.files.get)
        if diff:
            remedy = replace(context.remedy(title, LEFT_OUT, *edits, kind="data"), edits=edits, diff=diff)
            known = report.remedies
            at = next((i for i, other in enumerate(known) if _bounds(other)), len(known))
            return replace(report, remedies=(*known[:at], remedy, *known[at:]))
    return report


_BOUNDS = ("clamp", "clip", "minimum", "maximum")


def _bounds(remedy: Remedy) -> bool:
    return any(word in edit.new and word not in edit.old for edit in remedy.edits for word in _BOUNDS)


def _filled_in_loop(context: FailureContext) -> Iterator[Remedy]:
    for bound in _batch_bindings(context):
        text = _nan_to_num("torch", bound.source, bound.statement, bound.bad)
        edit = bound.followed_by(f"{bound.bad} = {text}")
        if edit is not None:
            yield context.remedy("Fill in the missing values of each batch", FILLED, edit, kind="data")


def _batch_bindings(
    context: FailureContext, known: tuple[str, TensorStat | None] | None = None
) -> Iterator[BatchBinding]:
    """The statements that may have assigned the bad data of the step."""
    yield from _by_slices(context)
    history, stat = context.failure.history, _bad(context)
    sites = [context.failure.origin.site, history.backward_at, history.stepped_at]
    loops: dict[ast.For, SourceFile] = {}
    for location in filter(None, map(context.location_of, sites)):
        loop = _loop_of(location.source, location.node) or _loop_around(location.source, location.node)
        if loop is not None:
            loops[loop] = location.source
    batch = known or _as_batch(context)
    for loop, source in loops.items():
        target = _element(source, loop)
        if target is None or (batch is None and not isinstance(target, ast.Tuple)):
            continue
        # Without a DataLoader the bad part is unknown; features usually come first and targets last.
        at = ["0"] if context.cause.slug == "nan_input" or batch else [str(len(getattr(target, "elts", ())) - 1)]
        bad = _part(source, target, re.findall(r"\[([^\]]*)\]", batch[0]) if batch else at)
        if bad is not None:
            many = len(batch[1].shape) > 1 if batch and batch[1] else stat is not None and len(stat.shape) > 1
            yield BatchBinding(source, loop, target, bad, many)


def _as_batch(context: FailureContext) -> tuple[str, TensorStat | None] | None:
    """The bad part of the batch that the step read."""
    arrived = context.failure.origin.arrived
    if arrived is not None:
        return arrived.name, arrived
    for event in _step(context):
        for i in event.inputs:
            if i.role == "input" and i.label.startswith("batch") and (i.guilty or (i.stat and i.stat.bad)):
                return i.label, i.stat
    label = context.failure.origin.label
    return (label, _bad(context)) if label.startswith("batch") else None


def _step(context: FailureContext) -> list[OpEvent]:
    events = [
        e for e in context.failure.trace.events if e.region in ("step", "body", "between") and e.phase == "forward"
    ]
    return [e for e in events if e.step == context.failure.trace.events[-1].step]


def _by_slices(context: FailureContext) -> Iterator[BatchBinding]:
    """`x, y = data[rows], target[rows]`: where the bad tensor is taken out of the data, or read first after that."""
    event = next((e for e in _step(context) if e.bad and any(i.guilty for i in e.inputs)), None)
    if event is None:  # a line was found, not an operator
        yield from _by_function(context)
        return
    location = context.location_of(event.site)
    if location is None:
        return
    source, statement = location.source, location.source.statement(location.node)
    rows = bool(event.outputs) and len(event.outputs[0].shape) > 1
    loop = next((p for p in source.parents(statement) if isinstance(p, ast.For | ast.While)), None)
    names = {n.id for n in ast.walk(location.node) if isinstance(n, ast.Name)}
    for taking in loop.body if loop is not None else [statement]:
        for name, part, target, last in _taken(source, taking, loop):
            here = taking is statement and location.node in ast.walk(part)
            before = taking.lineno < statement.lineno and isinstance(part, ast.Subscript) and name in names
            if here or before:
                yield BatchBinding(source, last, target, name, rows)
    for target, at, call in _returned(source, statement, location.node) if loop is None else ():
        yield BatchBinding(source, call, target, source.code(target.elts[at]), rows)


def _by_function(context: FailureContext) -> Iterator[BatchBinding]:
    """`return data[rows], target[rows]` in a function that the loop calls for its batches."""
    location, stat = context.location, _bad(context)
    statement = location.source.statement(location.node) if location is not None else None
    value = statement.value if isinstance(statement, ast.Return) else None
    if location is None or statement is None or not isinstance(value, ast.Tuple) or stat is None:
        return
    # Features usually come first and targets last.
    bad = value.elts[0 if context.cause.slug == "nan_input" else -1]
    for target, at, call in _returned(location.source, statement, bad):
        yield BatchBinding(location.source, call, target, location.source.code(target.elts[at]), len(stat.shape) > 1)


def _returned(source: SourceFile, statement: ast.stmt, node: ast.AST) -> Iterator[tuple[ast.Tuple, int, ast.Assign]]:
    """`x, y = get_batch()`: where the loop takes what this statement of a function returns, or assigns to return it."""
    function = next((p for p in source.parents(statement) if isinstance(p, ast.FunctionDef)), None)
    if function is None:
        return
    returns = [s for s in source.within(statement) if isinstance(s, ast.Return) and isinstance(s.value, ast.Tuple)]
    given = {t.id for t in getattr(statement, "targets", ()) if isinstance(t, ast.Name)}
    for parts in (r.value.elts for r in returns if isinstance(r.value, ast.Tuple)):
        at = [i for i, p in enumerate(parts) if node in ast.walk(p) or (isinstance(p, ast.Name) and p.id in given)]
        for taking in source.nodes:
            if not isinstance(taking, ast.Assign) or not isinstance(taking.value, ast.Call) or len(at) != 1:
                continue
            target = taking.targets[0]
            called = ast.unparse(taking.value.func).rsplit(".", 1)[-1]
            if called == function.name and isinstance(target, ast.Tuple) and len(target.elts) == len(parts):
                yield target, at[0], taking


def _taken(
    source: SourceFile, statement: ast.stmt, loop: ast.For | ast.While | None
) -> Iterator[tuple[str, ast.expr, ast.expr, ast.stmt]]:
    """What a statement assigns, name by name; all that is taken with the same index, and the last one to do so."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for name, part in zip(target.elts, value.elts, strict=True):
            yield source.code(name), part, target, statement
    elif loop is not None and _takes(statement, "") and isinstance(value, ast.Subscript):
        same = [s for s in loop.body if _takes(s, ast.unparse(value.slice))]
        yield source.code(target), value, ast.Tuple([s.targets[0] for s in same]), same[-1]


def _takes(statement: ast.stmt, rows: str) -> TypeGuard[ast.Assign]:
    """Whether it is `name = data[rows]`; "" for any rows."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Subscript):
        return False
    alone = len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)
    return alone and rows in ("", ast.unparse(statement.value.slice))


def _loop_of(source: SourceFile, node: ast.AST) -> ast.For | None:
    """The loop that iterates over the node."""
    loop = node if isinstance(node, ast.For) else source.parent(node)
    return loop if isinstance(loop, ast.For) and node in (loop, loop.iter) else None


def _loop_around(source: SourceFile, node: ast.AST) -> ast.For | None:
    """The innermost loop over data around the node, not over a range."""
    for parent in source.parents(node):
        if isinstance(parent, ast.For) and not _is_counter(source, parent.iter):
            return parent
    return None


def _element(source: SourceFile, loop: ast.For) -> ast.expr | None:
    """The part of the loop's target that is the batch, without the counters of `enumerate` and `zip`."""
    target, iterated = loop.target, loop.iter
    called = source.called(iterated) if isinstance(iterated, ast.Call) else ""
    if called == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
        return target.elts[1]
    if called == "zip" and isinstance(target, ast.Tuple) and isinstance(iterated, ast.Call):
        data = [t for t, a in zip(target.elts, iterated.args, strict=False) if not _is_counter(source, a)]
        return data[0] if len(data) == 1 else None
    return target


def _is_counter(source: SourceFile, node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and source.called(node) in ("range", "itertools.count")


def _part(source: SourceFile, target: ast.expr, path: list[str]) -> str | None:
    """The code for one part of a batch: `yb` for the second part of `xb, yb`."""
    if not path:
        return None if isinstance(target, ast.Tuple) else source.code(target)
    if isinstance(target, ast.Tuple | ast.List):
        at = int(path[0]) if path[0].isdigit() else len(target.elts)
        return _part(source, target.elts[at], path[1:]) if at < len(target.elts) else None
    quote = max("'\"", key=source.text.count)
    return source.code(target) + "".join(f"[{key.replace(chr(39), quote)}]" for key in path)
