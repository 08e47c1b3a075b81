"""Bad values in the data: filled in where they are made, or their rows left out, there or where the loop takes them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from firstnan.records import OpEvent, Remedy, TensorStat
from firstnan.repair.base import Job, remedy
from firstnan.repair.edits import Edit, after, before, put
from firstnan.repair.numbers import written
from firstnan.repair.source import Source

FILLED = "The bad cells get an ordinary value, and every other number stays as it is."
LEFT_OUT = "Samples with a bad value take no part in the loss; all others do as before."
LOADS = ("torch.load", "numpy.load", "pickle.load", "joblib.load")
TABLES = ("numpy.genfromtxt", "numpy.loadtxt", "numpy.load", "numpy.fromfile", "numpy.memmap")


def _bad(job: Job) -> TensorStat | None:
    return job.scene.origin.produced or job.scene.made


@remedy("nan_label")
def rows_left_out_of_the_step(job: Job) -> Iterator[Remedy]:
    """Samples without a usable target are left out where the loop takes its batch."""
    yield from _dropped_in_loop(job)
    yield from _dropped_from_table(job)


@remedy("nan_input")
def filled_in(job: Job) -> Iterator[Remedy]:
    """Missing features are filled in where the data is made or comes in; or their rows are left out."""
    yield from _filled_at_origin(job)
    yield from _dropped_from_table(job)
    yield from _filled_in_loop(job)
    yield from _dropped_in_loop(job)


@remedy("nan_label")
def targets_filled_in(job: Job) -> Iterator[Remedy]:
    """The last resort for a target: an ordinary value."""
    yield from _filled_at_origin(job)


# --- where the data is made -------------------------------------------------------------------------------------


def _filled_at_origin(job: Job) -> Iterator[Remedy]:
    place, stat = job.place, _bad(job)
    if place is None or _loop_of(place.source, place.node) is not None:
        return
    source = place.source
    value = _value(place.node, job.scene.origin.label)
    if value is None:
        return
    title = "Fill in the missing values where they are read"
    number = stat is not None and stat.shape == () and source.expr(value).library != "torch"
    if number and isinstance(source.statement(value), ast.Assign):
        yield from _filled_number(job, source, value)
    if isinstance(value, ast.Call) and source.called(value) in LOADS and stat is not None and stat.shape != ():
        fill = _nan_to_num("torch", source, value, "v", stat)
        text = f"{{k: {fill} for k, v in {source.code(value)}.items()}}"
        yield job.remedy(title, FILLED, put(source, value, text), kind="data")
    for library in _libraries(source, value):
        text = _nan_to_num(library, source, value, source.code(value), stat)
        yield job.remedy(title, FILLED, put(source, value, text), kind="data")


def _filled_number(job: Job, source: Source, value: ast.expr) -> Iterator[Remedy]:
    statement = source.statement(value)
    assert isinstance(statement, ast.Assign)
    if len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        name = statement.targets[0].id
        line = f'{name} = {name} if abs({name}) < float("inf") else 0.0'
        yield job.remedy("Fill in the missing number", FILLED, after(source, statement, line), kind="data")


def _value(node: ast.AST, label: str) -> ast.expr | None:
    """The expression whose value is bad: the place itself, or what its statement assigns or returns.

    Of several that are handed on together it is the one that mentions the bad variable."""
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


def _libraries(source: Source, value: ast.expr) -> list[str]:
    """Whose array the expression is, the likelier first."""
    used = [source.expr(n).library for n in ast.walk(value) if isinstance(n, ast.Call)]
    outer = source.expr(value).library
    if outer in ("torch", "numpy"):
        return [outer]
    known = [lib for lib in dict.fromkeys(used) if lib in ("numpy", "torch")]
    numpy = ["numpy"] if source.reach("numpy", value) else []
    return known or [*numpy, "torch"]


def _nan_to_num(library: str, source: Source, at: ast.AST, text: str, stat: TensorStat | None) -> str:
    """A call of `nan_to_num` that puts infinities at the end of the ordinary range, not at that of the type."""
    ends = []
    if stat is not None and stat.posinf:
        ends.append(f"posinf={written(stat.max or 0.0)}")
    if stat is not None and stat.neginf:
        ends.append(f"neginf={written(stat.min or 0.0)}")
    return f"{source.spell(f'{library}.nan_to_num', at)}({', '.join([text, *ends])})"


def _dropped_from_table(job: Job) -> Iterator[Remedy]:
    """Whole rows of a table that was read from a file, before anything is made of it."""
    place = job.place
    if place is None:
        return
    source = place.source
    for name in (n for n in ast.walk(place.node) if isinstance(n, ast.Name)):
        found = source.assigned(name)
        value = found.value if found is not None else None
        if found is None or not isinstance(value, ast.Call):
            continue
        called = source.called(value)
        if called.startswith("pandas.read_"):
            edit = put(source, value, f"{source.code(value)}.dropna()")
        elif called in TABLES:
            finite = source.spell("numpy.isfinite", value)
            edit = after(source, found, f"{name.id} = {name.id}[{finite}({name.id}).all(axis=1)]")
        else:
            continue
        yield job.remedy("Leave out the rows with a missing value", LEFT_OUT, edit, kind="data")


# --- where the loop takes its batch -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Taken:
    """The statement that gives the step its data: what it binds, and which part of that is bad."""

    source: Source
    statement: ast.stmt
    target: ast.expr
    bad: str
    """How the bad part is written after the statement."""
    rows: bool
    """It has more dimensions than that of the samples."""

    def then(self, *lines: str) -> Edit | None:
        """New lines right behind: at the top of the body of a loop."""
        if not isinstance(self.statement, ast.For):
            return after(self.source, self.statement, *lines)
        first = self.statement.body[0]
        return before(self.source, first, *lines) if first.lineno > self.statement.iter.lineno else None

    def kept(self) -> list[str]:
        """Lines that leave out the samples with a bad value."""
        finite = f"{self.source.spell('torch.isfinite', self.statement)}({self.bad})"
        lines = [f"keep = {finite}.flatten(1).all(1)" if self.rows else f"keep = {finite}"]
        target = self.source.code(self.target)
        if isinstance(self.target, ast.Tuple | ast.List):
            parts = [self.source.code(t) for t in self.target.elts]
            return [*lines, f"{', '.join(parts)} = {', '.join(f'{p}[keep]' for p in parts)}"]
        if self.bad == target:
            return [*lines, f"{target} = {target}[keep]"]
        if re.search(r"\[['\"]", self.bad):
            return [*lines, f"{target} = {{name: column[keep] for name, column in {target}.items()}}"]
        return [*lines, f"{target} = [column[keep] for column in {target}]"]


def _dropped_in_loop(job: Job) -> Iterator[Remedy]:
    for taken in _taken(job):
        edit = taken.then(*taken.kept())
        if edit is not None:
            yield job.remedy("Leave out the samples with a bad value", LEFT_OUT, edit, kind="data")


def _filled_in_loop(job: Job) -> Iterator[Remedy]:
    for taken in _taken(job):
        text = _nan_to_num("torch", taken.source, taken.statement, taken.bad, _bad(job))
        edit = taken.then(f"{taken.bad} = {text}")
        if edit is not None:
            yield job.remedy("Fill in the missing values of each batch", FILLED, edit, kind="data")


def _taken(job: Job) -> Iterator[Taken]:
    """The statements of the loop that may have given the step its bad data."""
    yield from _by_slices(job)
    history, stat = job.scene.history, _bad(job)
    sites = [job.scene.origin.site, history.backward_at, history.stepped_at]
    loops: dict[ast.For, Source] = {}
    for place in (job.place_of(s) for s in sites):
        loop = _loop_of(place.source, place.node) or _loop_around(place.source, place.node) if place else None
        if place is not None and loop is not None:
            loops[loop] = place.source
    batch = _as_batch(job)
    for loop, source in loops.items():
        target = _element(source, loop)
        if target is None or (batch is None and not isinstance(target, ast.Tuple)):
            continue
        # Without a DataLoader nobody told which part is bad: targets come last, features first.
        at = ["0"] if job.cause.slug == "nan_input" or batch else [str(len(getattr(target, "elts", ())) - 1)]
        bad = _part(source, target, re.findall(r"\[([^\]]*)\]", batch[0]) if batch else at)
        if bad is not None:
            many = len(batch[1].shape) > 1 if batch and batch[1] else stat is not None and len(stat.shape) > 1
            yield Taken(source, loop, target, bad, many)


def _as_batch(job: Job) -> tuple[str, TensorStat | None] | None:
    """The bad part of the batch as the step read it."""
    arrived = job.scene.origin.arrived
    if arrived is not None:
        return arrived.name, arrived
    for event in _step(job):
        for i in event.inputs:
            if i.role == "input" and i.label.startswith("batch") and (i.guilty or (i.stat and i.stat.bad)):
                return i.label, i.stat
    label = job.scene.origin.label
    return (label, _bad(job)) if label.startswith("batch") else None


def _step(job: Job) -> list[OpEvent]:
    events = [e for e in job.scene.trace.events if e.region in ("step", "between") and e.phase == "forward"]
    return [e for e in events if e.step == job.scene.trace.events[-1].step]


def _by_slices(job: Job) -> Iterator[Taken]:
    """`x, y = data[rows], target[rows]`: the first operator of the step that reads the bad tensor."""
    event = next((e for e in _step(job) if e.bad and any(i.guilty for i in e.inputs)), None)
    place = job.place_of(event.site) if event is not None else None
    if event is None or place is None:
        return
    source, statement = place.source, place.source.statement(place.node)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return
    target, value = statement.targets[0], statement.value
    rows = bool(event.outputs) and len(event.outputs[0].shape) > 1
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for name, part in zip(target.elts, value.elts, strict=True):
            if place.node in ast.walk(part):
                yield Taken(source, statement, target, source.code(name), rows)


def _loop_of(source: Source, node: ast.AST) -> ast.For | None:
    """The loop whose head the node is."""
    parent = source.parent(node)
    if isinstance(node, ast.For):
        return node
    inside = isinstance(parent, ast.For) and node is parent.iter
    return parent if inside and isinstance(parent, ast.For) else None


def _loop_around(source: Source, node: ast.AST) -> ast.For | None:
    """The nearest loop over data around the node, not one that only counts."""
    for parent in source.parents(node):
        if isinstance(parent, ast.For) and not (
            isinstance(parent.iter, ast.Call) and source.called(parent.iter) in ("range", "itertools.count")
        ):
            return parent
    return None


def _element(source: Source, loop: ast.For) -> ast.expr | None:
    """What of the loop's target is the batch: without the counters of `enumerate` and `zip`."""
    target, walked = loop.target, loop.iter
    called = source.called(walked) if isinstance(walked, ast.Call) else ""
    if called == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
        return target.elts[1]
    if called == "zip" and isinstance(target, ast.Tuple) and isinstance(walked, ast.Call):
        data = [t for t, a in zip(target.elts, walked.args, strict=False) if not _counts(source, a)]
        return data[0] if len(data) == 1 else None
    return target


def _counts(source: Source, node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and source.called(node) in ("range", "itertools.count")


def _part(source: Source, target: ast.expr, path: list[str]) -> str | None:
    """`yb` for the second part of a batch that is taken apart as `xb, yb`."""
    if not path:
        return None if isinstance(target, ast.Tuple) else source.code(target)
    if isinstance(target, ast.Tuple | ast.List):
        at = int(path[0]) if path[0].isdigit() else len(target.elts)
        return _part(source, target.elts[at], path[1:]) if at < len(target.elts) else None
    quote = max("'\"", key=source.text.count)
    return source.code(target) + "".join(f"[{key.replace(chr(39), quote)}]" for key in path)
