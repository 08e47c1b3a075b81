"""Checks the inputs and outputs of layers in forward, reading no more tensors than needed to name the first bad one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from firstnan.observe.layers.finding import Sink, What
from firstnan.observe.layers.records import (
    BAD,
    FINITE,
    ONLY_NEGATIVE_INF,
    UNKNOWN,
    WAITING,
    LayerCall,
    PendingReads,
    SeenTensor,
    Size,
    Source,
    TensorRecord,
    ThreadState,
    examine,
    shape_and_dtype,
    values_of,
    version_of,
)
from firstnan.tensors import finite

# The most calls that are judged by one read: the tensors between them are kept alive until then.
_LONGEST_CHAIN = 5

_Judged = tuple[str, TensorRecord, Source]
_WholeCall = tuple[LayerCall, Sequence[_Judged], Sequence[_Judged]]


class Forward:
    """Reads only the end of a chain of layers that pass every non-finite value on (a norm, a linear, a GELU...).

    If the end is bad, everything in the chain is read, in the order in which it ran.
    """

    def __init__(self, sink: Sink, pending: PendingReads, statistics: bool) -> None:
        self._sink, self._pending, self._statistics, self._counts = sink, pending, statistics, False

    def measures(self, sizes: bool, counts: bool) -> None:
        """From now on: whether the sizes of outputs are told, and whether zeros and subnormal numbers are counted."""
        self._statistics, self._counts = sizes, counts

    def called(self, thread: ThreadState, call: LayerCall, inputs: list[SeenTensor], outputs: list[SeenTensor]) -> None:
        """A layer ran: its call joins the open chain, or ends it."""
        joins = (
            # When notes are read later, writes in place since then are detected only at the end of a chain.
            (call.layer.keeps_nonfinite or thread.reading_notes)
            and thread.depth > 0  # outside a model call nothing would end the chain
            and len(inputs) == len(outputs) == 1
            and inputs[0][2] is not outputs[0][2]
            and not self._statistics
            and finite.reads_are_free(outputs[0][2])
        )
        if thread.chain and not (joins and call.layer.keeps_nonfinite and inputs[0][1] is thread.chain[-1][2][0][1]):
            self.close(thread, call, inputs)
        if not joins:
            self._read(call, inputs, outputs)
            return
        thread.chain.append((call, inputs, outputs))
        if len(thread.chain) >= _LONGEST_CHAIN:
            self.close(thread)

    def close(self, thread: ThreadState, call: LayerCall | None = None, inputs: list[SeenTensor] | None = None) -> None:
        """Judges the chain by reading its end; `call` comes next and has these inputs."""
        if not thread.chain:
            return
        chain, thread.chain = thread.chain, []
        _, record, t, _ = chain[-1][2][0]
        now = thread.record(t, version_of(t))
        if now.state == UNKNOWN:
            plain = finite.readable(t)
            now.state = FINITE if plain is None or not plain.numel() else examine(plain, False)[0]
        if now.state == FINITE:
            for _, before, after in chain:
                before[0][1].state = after[0][1].state = FINITE
            return
        if now is not record and not (
            call and not call.layer.keeps_finite and any(k is record for _, k, *_ in inputs or ())
        ):
            # Written in place since, by the program or by a layer that keeps values finite: it was bad before that.
            record.state, now.reported = now.state, True
        for link in chain:
            self._read(*link)

    def _read(self, call: LayerCall, inputs: list[SeenTensor], outputs: list[SeenTensor]) -> None:
        """Reads those of these tensors whose state is unknown, and judges the call."""
        if (
            call.layer.keeps_finite
            and not self._statistics
            and inputs
            and all(k.state == FINITE for _, k, *_ in inputs)
        ):
            wide = [k for _, k, t, _ in outputs if t.dtype is not torch.float16]
            for record in wide:
                record.state = FINITE
            if len(wide) == len(outputs):
                return
        later = []
        for seen, sized in ((inputs, False), (outputs, self._statistics)):
            for _, record, t, _ in seen:
                if record.state != UNKNOWN or record.version != version_of(t):
                    continue
                plain = finite.readable(t)
                if plain is None or not plain.numel():
                    record.state = FINITE
                elif finite.reads_are_free(plain):
                    record.state, record.size = examine(plain, sized, self._counts)
                else:
                    record.state = WAITING
                    later.append((record, values_of(plain, sized)))
        if not later and not self._statistics and all(k.state == FINITE for _, k, *_ in (*inputs, *outputs)):
            return
        if not later:
            self._decide(call, [s[:3] for s in inputs], [s[:3] for s in outputs])
            return
        # A pending judgement must not keep a tensor alive.
        whole_call = (call, _without_tensors(inputs), _without_tensors(outputs))
        for record, values in later[:-1]:
            self._pending.add(values, partial(self._settle, record, None))
        self._pending.add(later[-1][1], partial(self._settle, later[-1][0], whole_call))

    def _settle(self, record: TensorRecord, whole_call: _WholeCall | None, state: int, size: Size | None) -> None:
        """The state of a pending tensor is known; after the last one of a call, the call is judged."""
        record.state, record.size = state, size
        if whole_call is not None:
            self._decide(*whole_call)

    def _decide(self, call: LayerCall, inputs: Sequence[_Judged], outputs: Sequence[_Judged]) -> None:
        if self._statistics and not call.layer.is_container:
            for _, record, source in outputs:
                if record.size is not None:
                    dtype = source.dtype if isinstance(source, Tensor) else source[1]
                    self._sink.magnitude(call.layer.name, "forward", dtype, *record.size)
        bad_output = any(record.state > FINITE for _, record, _ in outputs)
        if call.layer.is_container:
            if not bad_output or call.model_call.is_inside(call.layer):
                return  # What a layer inside has made is reported already.
            inputs = [judged for judged in inputs if judged[1].state == BAD]
            if inputs:
                outputs = ()  # It only passes on what it was given.
        elif any(record.state == BAD for _, record, _ in outputs):
            _read_again(inputs, outputs)
        for i, (place, record, source) in enumerate(inputs):
            # Negative infinities alone are a mask, unless they are the data itself and the output is bad.
            if record.state == BAD or (record.state == ONLY_NEGATIVE_INF and bad_output and i == 0):
                self._report(call, "input", place, record, source)
        for place, record, source in outputs:
            if record.state > FINITE:
                self._report(call, "output", place, record, source)

    def _report(self, call: LayerCall, what: What, place: str, record: TensorRecord, source: Source) -> None:
        if not record.reported:
            record.reported = True
            found = call.finding("forward", what, place, source)
            call.model_call.add(found)
            self._sink.layer_event(found)


def _read_again(inputs: Sequence[_Judged], outputs: Sequence[_Judged]) -> None:
    """Reads the finite inputs of a bad output once more: a write through `.data` is not counted as a new version."""
    for _, record, source in inputs:
        if record.state == FINITE and isinstance(source, Tensor) and not any(source is t for *_, t in outputs):
            plain = finite.readable(source)
            if plain is not None and plain.numel():
                record.state = examine(plain, False)[0]


def _without_tensors(seen: list[SeenTensor]) -> list[_Judged]:
    return [(place, record, shape_and_dtype(t)) for place, record, t, _ in seen]
