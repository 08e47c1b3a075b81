"""Looks at the gradients between layers, and names the layer that made a bad one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import unserializable_hook

from firstnan.observe.layers.found import Sink, What
from firstnan.observe.layers.tensors import (
    FINITE,
    Call,
    Known,
    Seen,
    Size,
    Source,
    Use,
    Waiting,
    examine,
    outline,
    values_of,
    version_of,
)
from firstnan.tensors import finite

_LONGEST_ROW = 4
_LONGEST_WALK = 200
_MOST_USES = 256
_MOST_HANDLES = 4096

Guard = Callable[..., None]
"""Runs a function with arguments while the watch is on, and lets no error out."""


class Backward:
    """Hooks on the graph. As in forward, a row of gradients is judged by its last where no layer loses a bad number.

    Inside such a row the hook is nothing but the `append` of a list, which costs no Python at all.
    """

    def __init__(self, sink: Sink, waiting: Waiting, statistics: bool, guard: Guard) -> None:
        self._sink, self._waiting, self._statistics, self._guard = sink, waiting, statistics, guard
        self._handles: deque[Any] = deque(maxlen=_MOST_HANDLES)
        self._held: deque[list[Any]] = deque(maxlen=_MOST_HANDLES)
        self._leaves: dict[int, tuple[Known, Any]] = {}

    def follow(self, call: Call, read: list[Seen], made: list[Seen]) -> None:
        """Hooks the gradients of what a layer read and made, each tensor once."""
        row = None
        for place, known, t, node in read:
            if not t.requires_grad:
                continue
            uses = known.uses
            if not known.hooked:
                if t is made[0][2]:
                    continue  # Written in place by this layer: its gradient as it was before cannot be asked for.
                self._hook(known, t, node, None)
            elif uses and (len(uses) >= _MOST_USES or any(use.call is call for use in uses)):
                continue
            use = Use(call, place)
            if uses:
                self._watch_part(use, known, t, read, made)
            uses.append(use)
            if call.layer.faithful and known.row < _LONGEST_ROW and len(read) == len(made) == 1:
                row = known.row + 1, use
        for place, known, t, node in made:
            if t.requires_grad:
                if not known.hooked:
                    self._hook(known, t, node, row)
                known.makers.append((call, place))

    def _hook(self, known: Known, t: Tensor, node: Any, row: tuple[int, Use] | None) -> None:
        known.hooked = True
        if node is None:
            hook = partial(self._guard, self._arrived_at_leaf, known)
            self._leaves[id(known)] = known, t.register_hook(unserializable_hook(hook))
        # On the node, not on the tensor: a later write in place does not move it, and the tensor stays as it is.
        elif row is None or self._statistics or not finite.reads_are_free(t):
            self._handles.append(node.register_prehook(partial(self._guard, self._arrived, known, t.output_nr)))
        else:
            known.row, use = row
            use.made = known, t.output_nr
            self._held.append(use.held)
            self._handles.append(node.register_prehook(use.held.append))

    def _watch_part(self, use: Use, known: Known, t: Tensor, read: list[Seen], made: list[Seen]) -> None:
        """Several layers add to one gradient: what this one adds has to be seen by itself."""
        inside = use.call.layer.name + "."
        parts = not any(other.call.layer.name.startswith(inside) for other in known.uses)
        if parts and known.version == version_of(t):
            for node, i in _edges_into(t, [n for *_, n in read], [n for *_, n in made]):
                self._handles.append(node.register_hook(partial(self._guard, self._added, use, i)))

    # In backward.

    def _arrived(self, known: Known, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        """The gradient of a tensor is complete: it speaks for the row that leads to it."""
        gradient = gradients[number]
        if gradient is None:
            return
        row = _row_before(known)
        plain = finite.readable(gradient)
        if row and (plain is None or not plain.numel() or examine(plain, False)[0] == FINITE):
            for earlier in (*(k for k, _ in row), known):
                for call, place in earlier.makers:
                    call.given[place] = FINITE
            return
        for earlier, its_gradient in row:
            self._look(earlier, its_gradient)
        self._look(known, gradient)

    def _arrived_at_leaf(self, known: Known, gradient: Tensor) -> None:
        self._arrived(known, 0, (gradient,))
        _release(*self._leaves.pop(id(known), (known, None)))

    def _look(self, known: Known, gradient: Tensor) -> None:
        plain = finite.readable(gradient)
        if plain is None or not plain.numel():
            return
        sized = self._statistics and bool(known.makers)
        if finite.reads_are_free(plain):
            self._settle(known.makers, known.uses, gradient, *examine(plain, sized))
        else:
            then = partial(self._settle, known.makers, known.uses, outline(gradient))
            self._waiting.add(values_of(plain, sized), then)

    def _settle(
        self, makers: list[tuple[Call, str]], uses: list[Use], source: Source, state: int, size: Size | None
    ) -> None:
        if state > FINITE:
            call, what, place = blame(makers, uses)
            self._sink.layer_event(call.found("backward", what, place, source))
        for call, place in makers:
            call.given[place] = state
            if size is not None:
                self._sink.magnitude(call.layer.name, "backward", *size)

    def _added(self, use: Use, i: int, handed_on: tuple[Tensor | None, ...], given: Any) -> None:
        plain = finite.readable(handed_on[i])
        if plain is None or not plain.numel():
            return
        if finite.reads_are_free(plain):
            _part(use, *examine(plain, False))
        else:
            self._waiting.add(values_of(plain, False), partial(_part, use))

    # At the end.

    def new_step(self) -> None:
        """A leaf outlives the step, so its hook must not; nor may gradients that nobody came for."""
        for _ in range(len(self._held)):
            self._held.popleft().clear()
        for key in list(self._leaves):
            held = self._leaves.pop(key, None)  # another thread's backward may be quicker
            if held is not None:
                _release(*held)

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self.new_step()


def _row_before(known: Known) -> list[tuple[Known, Tensor]]:
    """The gradients that were held until this one came, the earliest first."""
    row: list[tuple[Known, Tensor]] = []
    for use in known.uses:
        if use.held and use.made is not None:
            made, number = use.made
            gradient = use.held[-1][number]
            use.held.clear()
            row += _row_before(made)
            if gradient is not None:
                row.append((made, gradient))
    return row


def blame(makers: list[tuple[Call, str]], uses: list[Use]) -> tuple[Call, What, str]:
    """Which call to name for a bad gradient of a tensor with these makers and readers, and where.

    A reader is innocent if what it added was finite, or if no gradient came to it. One that was given only finite
    gradients created the bad one; one that was given a bad gradient passed it on. Of layers inside each other the
    innermost comes first.
    """
    suspects = [u for u in uses if u.call.given and u.part != FINITE]
    passed = [u for u in suspects if max(u.call.given.values()) > FINITE]
    born = [u for u in suspects if u not in passed and not u.call.layer.tame]
    proven = [u for u in born if u.part > FINITE]
    for use in proven or passed or born:
        return use.call, "input", use.place
    for call, place in makers:
        return call, "output", place
    return uses[0].call, "input", uses[0].place


def _edges_into(t: Tensor, read: list[Any], made: list[Any]) -> list[tuple[Any, int]]:
    """The nodes from `made` down to `t` that hand a gradient to `t`, with its position among what they hand on.

    The walk ends at everything that the layer read; empty where the layer is too large to be walked.
    """
    edge = get_gradient_edge(t)
    ends = {edge.node, *read}
    stack = [node for node in made if node not in ends]
    walked = set(stack)
    edges = []
    while stack:
        node = stack.pop()
        for i, (below, position) in enumerate(node.next_functions):
            if below is edge.node and position == edge.output_nr:
                edges.append((node, i))
            elif below is not None and below not in ends and below not in walked:
                walked.add(below)
                stack.append(below)
        if len(walked) > _LONGEST_WALK:
            return []
    return edges


def _part(use: Use, state: int, size: Size | None) -> None:
    use.part = max(use.part, state)


def _release(known: Known, handle: Any) -> None:
    if handle is not None:
        handle.remove()
    known.hooked, known.uses = False, []
