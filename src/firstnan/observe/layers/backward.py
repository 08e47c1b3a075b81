"""Checks the gradients between layers, and names the layer that created a bad one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import unserializable_hook

from firstnan.observe.layers.finding import Sink, What
from firstnan.observe.layers.records import (
    FINITE,
    LayerCall,
    PendingReads,
    SeenTensor,
    Size,
    Source,
    TensorRecord,
    TensorUse,
    examine,
    shape_and_dtype,
    values_of,
    version_of,
)
from firstnan.tensors import finite

_LONGEST_CHAIN = 4
_LONGEST_WALK = 200
_MOST_USES = 256
_MOST_HANDLES = 4096

SafeCall = Callable[..., None]
"""Calls a function with arguments while the watch is attached; its errors never reach the program."""


class Backward:
    """Hooks on the autograd graph. As in forward, a chain of layers that pass every non-finite value on is judged by
    the last gradient.

    Inside such a chain the hook is the `append` of a list, which runs no Python code.
    """

    def __init__(self, sink: Sink, pending: PendingReads, statistics: bool, call_safely: SafeCall) -> None:
        self._sink, self._pending, self._statistics, self._call_safely = sink, pending, statistics, call_safely
        self._handles: deque[Any] = deque(maxlen=_MOST_HANDLES)
        self._held: deque[list[Any]] = deque(maxlen=_MOST_HANDLES)
        self._leaves: dict[int, tuple[TensorRecord, Any]] = {}

    def follow(self, call: LayerCall, inputs: list[SeenTensor], outputs: list[SeenTensor]) -> None:
        """Hooks the gradients of a layer's inputs and outputs, each tensor once."""
        chain = None
        for place, record, t, node in inputs:
            if not t.requires_grad:
                continue
            uses = record.uses
            if not record.hooked:
                if t is outputs[0][2]:
                    continue  # Written in place by this layer: the gradient of the former version cannot be hooked.
                self._hook(record, t, node, None)
            elif uses and (len(uses) >= _MOST_USES or any(use.call is call for use in uses)):
                continue
            use = TensorUse(call, place)
            if uses:
                self._watch_part(use, record, t, inputs, outputs)
            uses.append(use)
            if call.layer.keeps_nonfinite and record.held_count < _LONGEST_CHAIN and len(inputs) == len(outputs) == 1:
                chain = record.held_count + 1, use
        for place, record, t, node in outputs:
            if t.requires_grad:
                if not record.hooked:
                    self._hook(record, t, node, chain)
                record.producers.append((call, place))

    def _hook(self, record: TensorRecord, t: Tensor, node: Any, chain: tuple[int, TensorUse] | None) -> None:
        record.hooked = True
        if node is None:
            hook = partial(self._call_safely, self._arrived_at_leaf, record)
            self._leaves[id(record)] = record, t.register_hook(unserializable_hook(hook))
        # On the node, not on the tensor: a later write in place does not move the hook, and the tensor is not changed.
        elif chain is None or self._statistics or not finite.reads_are_free(t):
            self._handles.append(node.register_prehook(partial(self._call_safely, self._arrived, record, t.output_nr)))
        else:
            record.held_count, use = chain
            use.output = record, t.output_nr
            self._held.append(use.held)
            self._handles.append(node.register_prehook(use.held.append))

    def _watch_part(
        self, use: TensorUse, record: TensorRecord, t: Tensor, inputs: list[SeenTensor], outputs: list[SeenTensor]
    ) -> None:
        """Hooks this layer's own contribution to a gradient that several layers add to."""
        inside = use.call.layer.name + "."
        parts = not any(other.call.layer.name.startswith(inside) for other in record.uses)
        if parts and record.version == version_of(t):
            for node, i in _edges_into(t, [n for *_, n in inputs], [n for *_, n in outputs]):
                self._handles.append(node.register_hook(partial(self._call_safely, self._added, use, i)))

    # In backward.

    def _arrived(self, record: TensorRecord, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        """The gradient of a tensor is complete: the held gradients of its chain are judged by it."""
        gradient = gradients[number]
        if gradient is None:
            return
        chain = _held_before(record)
        plain = finite.readable(gradient)
        if chain and (plain is None or not plain.numel() or examine(plain, False)[0] == FINITE):
            for earlier in (*(k for k, _ in chain), record):
                for call, place in earlier.producers:
                    call.given[place] = FINITE
            return
        for earlier, its_gradient in chain:
            self._read(earlier, its_gradient)
        self._read(record, gradient)

    def _arrived_at_leaf(self, record: TensorRecord, gradient: Tensor) -> None:
        self._arrived(record, 0, (gradient,))
        _release(*self._leaves.pop(id(record), (record, None)))

    def _read(self, record: TensorRecord, gradient: Tensor) -> None:
        plain = finite.readable(gradient)
        if plain is None or not plain.numel():
            return
        sized = self._statistics and bool(record.producers)
        if finite.reads_are_free(plain):
            self._settle(record.producers, record.uses, gradient, *examine(plain, sized))
        else:
            then = partial(self._settle, record.producers, record.uses, shape_and_dtype(gradient))
            self._pending.add(values_of(plain, sized), then)

    def _settle(
        self,
        producers: list[tuple[LayerCall, str]],
        uses: list[TensorUse],
        source: Source,
        state: int,
        size: Size | None,
    ) -> None:
        if state > FINITE:
            call, what, place = blame(producers, uses)
            self._sink.layer_event(call.finding("backward", what, place, source))
        for call, place in producers:
            call.given[place] = state
            if size is not None:
                dtype = source.dtype if isinstance(source, Tensor) else source[1]
                self._sink.magnitude(call.layer.name, "backward", dtype, *size)

    def _added(self, use: TensorUse, i: int, gradients: tuple[Tensor | None, ...], given: Any) -> None:
        plain = finite.readable(gradients[i])
        if plain is None or not plain.numel():
            return
        if finite.reads_are_free(plain):
            _add_part(use, *examine(plain, False))
        else:
            self._pending.add(values_of(plain, False), partial(_add_part, use))

    # At the end.

    def new_step(self) -> None:
        """Drops held gradients that were never read, and the hooks on leaves, which outlive the step."""
        for _ in range(len(self._held)):
            self._held.popleft().clear()
        for key in list(self._leaves):
            leaf = self._leaves.pop(key, None)  # backward in another thread may have removed it
            if leaf is not None:
                _release(*leaf)

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self.new_step()


def _held_before(record: TensorRecord) -> list[tuple[TensorRecord, Tensor]]:
    """The gradients that were held until this one arrived, the earliest first."""
    chain: list[tuple[TensorRecord, Tensor]] = []
    for use in record.uses:
        if use.held and use.output is not None:
            output, number = use.output
            gradient = use.held[-1][number]
            use.held.clear()
            chain += _held_before(output)
            if gradient is not None:
                chain.append((output, gradient))
    return chain


def blame(producers: list[tuple[LayerCall, str]], uses: list[TensorUse]) -> tuple[LayerCall, What, str]:
    """The call to name for a bad gradient of a tensor with these producers and readers, and the place in it.

    A reader is innocent if its own contribution was finite, or if it received no gradient. A reader that received only
    finite gradients created the bad one; a reader that received a bad gradient passed it on. Of nested layers the
    innermost comes first.
    """
    suspects = [u for u in uses if u.call.given and u.part != FINITE]
    passed_on = [u for u in suspects if max(u.call.given.values()) > FINITE]
    created = [u for u in suspects if u not in passed_on and not u.call.layer.keeps_finite]
    proven = [u for u in created if u.part > FINITE]
    for use in proven or passed_on or created:
        return use.call, "input", use.place
    for call, place in producers:
        return call, "output", place
    return uses[0].call, "input", uses[0].place


def _edges_into(t: Tensor, inputs: list[Any], outputs: list[Any]) -> list[tuple[Any, int]]:
    """The graph nodes between `outputs` and `t` that pass a gradient to `t`, with its position among their results.

    The walk ends at the layer's inputs; the result is empty if the layer is too large to walk.
    """
    edge = get_gradient_edge(t)
    ends = {edge.node, *inputs}
    stack = [node for node in outputs if node is not None and node not in ends]  # None: an output without a graph
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


def _add_part(use: TensorUse, state: int, size: Size | None) -> None:
    use.part = max(use.part, state)


def _release(record: TensorRecord, handle: Any) -> None:
    if handle is not None:
        handle.remove()
    record.hooked, record.uses = False, []
