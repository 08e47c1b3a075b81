"""The samples of a step whose loop has no loader: the variables of the loop's body that have one row for each."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from firstnan.engine.samples.cut import Cut, CutError, OnePerSample
from firstnan.engine.samples.search import Replaced, SearchResult, search
from firstnan.engine.turn import Turn
from firstnan.records import Feature, SampleValues
from firstnan.tensors.finite import is_finite, tensors_in
from firstnan.tensors.state import RandomState, copy_batch, own_generators, seed_all

_LARGEST = 1 << 26
"""Elements of all variables together."""
_MOST_DRAWN = 4
_MOST_SEEDS = 3
DRAWN = "the random numbers drawn in this step are the reason, not the data: "
BY_CHANCE = (
    "the random numbers drawn in this step, or the data that they choose, are the reason: the step fails with other "
    "samples too, and is finite with other random numbers"
)


@dataclass(frozen=True)
class Question:
    """Rows to replace, in all variables or only in some of them; or a seed for other random numbers."""

    rows: Replaced
    only: frozenset[str] | None = None
    seed: int | None = None


_Roots = dict[str, frozenset[str]]


@dataclass(frozen=True)
class _Place:
    """A statement of the body before which rows can be replaced."""

    number: int
    values: dict[str, Any]
    """The variables with one row per sample."""
    drawn: dict[str, int]
    """Those with random numbers that the step has drawn, and the line."""
    comes_from: _Roots
    """Those computed from such numbers -> from which."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Those of which the body reads a part: `data[i : i + 8]` -> its index. Their values are that part."""
    outside: bool = False
    """The data is there before the loop, so the body does not fetch it again."""


class Variables:
    """Learns in a first run of the body which variables hold its data, and replaces rows of them in later runs.

    `size` is the number of samples, if it is known; `is_data` tells data from weights.
    """

    def __init__(self, turn: Turn, start: int, size: int | None, is_data: Callable[[Tensor], bool]) -> None:
        self._turn, self._start, self._size, self._is_data = turn, start, size, is_data
        self._places: list[_Place] = []
        """Where the data is complete; then, if numbers are drawn after something was computed from it, later."""
        self._fetches = self._follows = True
        """Whether more data may come before anything is computed from it, and whether the body is followed at all."""
        self._versions: list[int] = []
        self._before: RandomState | None = None
        self._place = _Place(start, {}, {}, {})
        self._whole: dict[str, Tensor | list[Any]] = {}
        """The tensors and lists of which the body reads a part, as they are before any row is replaced."""
        self._learning = True
        self.cut: Cut | None = None
        self.asks: Question | None = None

    def paused(self, number: int) -> None:
        """The body is about to run the statement with this number."""
        if self._learning:
            self._learn(number)
        elif self.asks is not None and self.asks.seed is not None:
            if number == self._start:
                seed_all(self.asks.seed, own_generators(sys._getframe()))
                if self._place.outside:
                    self._replace({}, None)
        elif number == self._place.number and self.asks is not None:
            self._replace(self.asks.rows, self.asks.only)

    def _replace(self, rows: Replaced, only: frozenset[str] | None) -> None:
        """Puts the data into its variables, with these rows replaced in all or some of them."""
        assert self.cut is not None
        for name, value in self.cut.replaced(rows).items():
            new = value if only is None or name in only else copy_batch(self.cut.batch[name])
            if name in self._place.parts:
                whole = self._whole[name]
                part, new = new, whole.clone() if isinstance(whole, Tensor) else list(whole)
                new[self._place.parts[name]] = part
            _put(self._turn.names, name, new)

    def _learn(self, number: int) -> None:
        state, before = RandomState.now(), self._before
        self._before = state
        if not self._follows or self.lists():
            return
        turn = self._turn
        found = self._data(turn.given | turn.assigned_before(number))
        if not self._places:
            if found:
                self._hold(number, found, {}, {})
            return
        statement, last = turn.statement(number - 1), self._places[-1]
        assigned, read = _names(statement, ast.Store), _names(statement, ast.Load)
        tensors = {name for name in assigned if next(tensors_in(turn.names.get(name), depth=2), None) is not None}
        drew, fresh = before is not None and before != state, read.isdisjoint(last.values)
        if not tensors:
            if self._fetches and self._versions != _versions(found):  # it has written into its data
                self._hold(number, found, last.drawn, last.comes_from)
        elif not tensors <= found.keys() or not all(is_finite(t) for n in tensors for _, t in tensors_in(found[n])):
            self._follows = False
        else:
            drawn = last.drawn | (dict.fromkeys(tensors, statement.lineno) if drew else {})
            roots = frozenset(tensors) if drew else frozenset(r for n in read for r in last.comes_from.get(n, ()))
            comes_from = last.comes_from | (dict.fromkeys(tensors, roots) if roots else {})
            self._fetches = self._fetches and (drew or fresh)
            if self._fetches or drew:
                self._hold(number, found, drawn, comes_from)
            else:
                self._places[-1] = replace(last, comes_from=comes_from)

    def _hold(self, number: int, found: dict[str, Any], drawn: dict[str, int], comes_from: _Roots) -> None:
        place = _Place(number, copy_batch(found), drawn, comes_from)
        self._versions = _versions(found)
        if self._fetches:
            self._places = [place]
        else:
            self._places[1:] = [place]

    def _parts(self) -> dict[str, Any]:
        """Tensors from outside of which the body reads one part only, that its counters select -> the index."""
        found = {name: _evaluated(index, self._turn.names) for name, index in self._turn.selected().items()}
        return {
            name: index
            for name, index in found.items()
            if index is not None and _is_within(index, _get(self._turn.names, name))
        }

    def lists(self) -> dict[str, Any]:
        """The parts of lists from outside that the body reads: one element per sample, of whatever shape."""
        found = {name: (_get(self._turn.names, name), index) for name, index in self._parts().items()}
        parts = {name: value[index] for name, (value, index) in found.items() if isinstance(value, list)}
        return {name: OnePerSample(p) for name, p in parts.items() if all(map(self._is_finite_data, p))}

    def plain_lists(self) -> dict[str, Any]:
        """The parts of lists without tensors that the body reads, such as baskets of numbers, or texts."""
        found = {name: (_get(self._turn.names, name), index) for name, index in self._parts().items()}
        return {name: OnePerSample(value[index]) for name, (value, index) in found.items() if _is_plain(value)}

    def _is_finite_data(self, value: Any) -> bool:
        tensors = [t for _, t in tensors_in(value)]
        return bool(tensors) and all(is_finite(t) and not t.requires_grad and self._is_data(t) for t in tensors)

    def _data(self, names: set[str]) -> dict[str, Any]:
        """Those of these variables that hold finite data with one row per sample."""
        return self._fit({name: _get(self._turn.names, name) for name in sorted(names)})

    def _fit(self, values: dict[str, Any]) -> dict[str, Any]:
        """Those of these values that are finite data with one row per sample."""
        found = {name: value for name, value in values.items() if self._is_fit(value)}
        if not found:
            return {}
        if self._size is None:
            firsts = Counter(t.shape[0] for value in found.values() for _, t in tensors_in(value, depth=2) if t.dim())
            self._size = firsts.most_common(1)[0][0]
        return {name: value for name, value in found.items() if _can_cut(value, self._size)}

    def _is_fit(self, value: Any) -> bool:
        if not isinstance(value, Tensor | list | tuple | dict):
            return False
        tensors = [t for _, t in tensors_in(value, depth=2)]
        return bool(tensors) and all(t.dim() > 0 and not t.requires_grad and self._is_data(t) for t in tensors)

    def learned(self) -> str:
        """Ends the first run: empty, or why there is nothing to replace."""
        self._learning = False
        if not self._places:  # the data is there before the loop
            parts = self._parts()
            self._whole = {name: _get(self._turn.names, name) for name in parts}
            selected = {name: self._whole[name][index] for name, index in parts.items()}
            lists = self.lists()
            if lists:
                self._size = len(next(iter(lists.values())))
            fitting = {name: part for name, part in lists.items() if len(part) == self._size} or self._fit(selected)
            values = copy_batch(fitting or self._data(self._turn.read() - self._turn.subscripted()))
            kept = {name: index for name, index in parts.items() if name in values}
            if not values:  # baskets, sentences: lists of which the body makes its tensors
                values = self.plain_lists()
                kept = {name: parts[name] for name in values}
                self._size = next((len(part) for part in values.values()), None)
            self._places = [_Place(self._start, values, {}, {}, kept, outside=True)] if values else []
        if not self._places or self._size is None:
            return "the variables that hold its samples are not known"
        held = [t for place in self._places for _, t in tensors_in(place.values)]
        whole = [t for t in self._whole.values() if isinstance(t, Tensor)]
        if sum(t.numel() for t in (*held, *whole)) > _LARGEST:
            return "it is too large"
        try:
            for place in self._places:
                Cut(place.values, self._size)
        except CutError as error:
            return str(error)
        return ""

    def searched(self, suspects: Sequence[int], rows: Sequence[int] = ()) -> Generator[Question, bool, SearchResult]:
        """The search for bad samples, at each place; then whether random numbers of the step are the reason.

        `rows`: those that are bad at the origin, whatever they depend on.
        """
        replays = 0
        finding = SearchResult(None)
        for place in self._places:
            self._place = place
            self.cut = Cut(self._place.values, self._size or 0)
            asking = search(self.cut.size, [i for i in suspects if i < self.cut.size])
            answer: bool | None = None
            while True:
                try:
                    replaced = next(asking) if answer is None else asking.send(answer)
                except StopIteration as stop:
                    finding = stop.value
                    break
                answer = yield Question(replaced)
            replays += finding.replays
            if finding.bad and finding.confirmed:
                break
        finding = replace(finding, replays=replays)
        if not finding.bad and finding.repeated and rows:
            return (yield from self._drawn_elsewhere(finding, tuple(rows)))
        return (yield from self._with_reason(finding))

    def _drawn_elsewhere(self, finding: SearchResult, rows: tuple[int, ...]) -> Generator[Question, bool, SearchResult]:
        """The rows at the origin if random numbers that a function of the step draws are the reason, whatever the data.

        They are not in a variable of the body, so nobody can replace some of them.
        """
        for seed in range(_MOST_SEEDS):
            if (yield Question({}, seed=seed)):
                asked = finding.replays + seed + 1
                return replace(finding, bad=rows, note=BY_CHANCE, replays=asked)
        return replace(finding, replays=finding.replays + _MOST_SEEDS)

    def _with_reason(self, finding: SearchResult) -> Generator[Question, bool, SearchResult]:
        """Whether random numbers that the step has drawn are the reason, and which of them."""
        assert self.cut is not None
        place, bad = self._place, finding.bad or ()
        drawn = {name for name, roots in place.comes_from.items() if roots}
        healthy = next((i for i in range(self.cut.size) if i not in bad), None)
        if not bad or not finding.confirmed or not drawn or drawn == place.values.keys() or healthy is None:
            return finding
        rows, asked = dict.fromkeys(bad, healthy), 1
        if (yield Question(rows, frozenset(place.values.keys() - drawn))):
            return replace(finding, replays=finding.replays + asked)
        reasons = []
        for name in sorted(place.drawn)[:_MOST_DRAWN]:
            asked += 1
            if (yield Question(rows, frozenset(n for n, roots in place.comes_from.items() if name in roots))):
                reasons.append(f"{name} (line {place.drawn[name]}){_number(place.values[name], bad[0])}")
        # What the code writes into drawn numbers is there with any others too.
        for seed in range(_MOST_SEEDS if reasons else 0):
            asked += 1
            if (yield Question({}, seed=seed)):
                break
        else:
            reasons = []
        if reasons:
            return replace(finding, note=DRAWN + ", ".join(reasons), replays=finding.replays + asked)
        return replace(finding, replays=finding.replays + asked)

    def features(self, bad: Sequence[int]) -> tuple[Feature, ...]:
        """What is unusual about these samples, by the names of the variables."""
        found = self.cut.features(bad) if self.cut is not None else ()
        return tuple(replace(f, member=_VARIABLE.sub(r"\1", f.member)) for f in found)

    def contents(self, bad: Sequence[int]) -> tuple[SampleValues, ...]:
        """What the first of these samples hold, by the names of the variables."""
        found = self.cut.values(bad) if self.cut is not None else ()
        return tuple(replace(one, member=_VARIABLE.sub(r"\1", one.member)) for one in found)


_VARIABLE = re.compile(r"^batch\['([^']+)'\]")


_ARITHMETIC = ast.Name | ast.Constant | ast.BinOp | ast.UnaryOp | ast.Slice | ast.operator | ast.unaryop | ast.Load


def _evaluated(index: ast.expr, names: dict[str, Any]) -> Any:
    """The index that an expression of whole numbers selects, `i * 8 : i * 8 + 8` or `i`; None if it is another."""
    inside = list(ast.walk(index))
    if not all(isinstance(n, _ARITHMETIC) for n in inside):
        return None
    if any(type(names.get(n.id)) is not int for n in inside if isinstance(n, ast.Name)):
        return None
    call = ast.Call(ast.Name("slice", ast.Load()), [], [])
    if isinstance(index, ast.Slice):
        call.args = [end or ast.Constant(None) for end in (index.lower, index.upper, index.step)]
    code = ast.fix_missing_locations(ast.Expression(call if isinstance(index, ast.Slice) else index))
    return eval(compile(code, "<index>", "eval"), {"__builtins__": {"slice": slice}}, names)


def _is_plain(value: Any) -> bool:
    """Whether this is a list of lists of numbers or names, or of texts; by its beginning."""
    if not isinstance(value, list) or not all(isinstance(sample, list | tuple | str) for sample in value[:64]):
        return False
    return all(isinstance(one, int | str) for sample in value[:64] for one in sample[:64])


def _is_within(index: Any, value: Any) -> bool:
    """Whether the index selects something with rows from the value."""
    if isinstance(value, list):
        return isinstance(index, slice) and bool(value[index])
    if not isinstance(value, Tensor) or not value.dim():
        return False
    return isinstance(index, slice) or (type(index) is int and value.dim() > 1 and -len(value) <= index < len(value))


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def _number(value: Any, row: int) -> str:
    one = isinstance(value, Tensor) and value[row].numel() == 1
    return f" = {value[row].item():.6g} in row {row}" if one else ""


def _versions(values: dict[str, Any]) -> list[int]:
    return [t._version for _, t in tensors_in(values) if not t.is_inference()]


def _can_cut(value: Any, size: int) -> bool:
    try:
        Cut({"": value}, size)
    except CutError:
        return False
    return all(t.shape[0] == size for _, t in tensors_in(value, depth=2))


def _get(names: dict[str, Any], name: str) -> Any:
    owner, _, attribute = name.partition(".")
    value = names.get(owner)
    return vars(value).get(attribute) if attribute and hasattr(value, "__dict__") else None if attribute else value


def _put(names: dict[str, Any], name: str, value: Any) -> None:
    owner, _, attribute = name.partition(".")
    if attribute:
        vars(names[owner])[attribute] = value
    else:
        names[owner] = value
