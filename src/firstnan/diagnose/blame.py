"""From a trace to the origin of the causal value and its path; pure, knows nothing of torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from math import isinf

from firstnan.records import Operand, OpEvent, Origin, PathStep, Phase, Role, Site, Trace
from firstnan.records.operator_families import (
    CONSTRUCTORS,
    FULL,
    LABEL_PICKS,
    MASK_KEEPING,
    MATRIX_PRODUCTS,
    NORMALISERS,
    WRITES,
)


@dataclass(frozen=True, slots=True)
class OriginCandidate:
    """One place where the walk back ended: an event, or something from outside that an event read."""

    event: OpEvent
    operand: Operand | None = None

    @property
    def order(self) -> tuple[int, int]:
        # What came from outside was there before any event.
        return (0 if self.operand is not None else 1, self.event.index)


@dataclass(frozen=True, slots=True)
class Verdict:
    origin: Origin | None
    path: tuple[PathStep, ...] = ()
    innocent: bool = False
    """Every infinity on the way was intentional and none became a NaN."""


def blame(trace: Trace, noticed: Iterable[int], *, loss_is_finite: bool = False) -> Verdict:
    """Walks back from the events that wrote what was noticed to the first causal one."""
    walk = _Walk(trace)
    for index in noticed:
        walk.visit(index)
    candidate, innocent = walk.choose()
    if candidate is None:
        return Verdict(None, innocent=innocent)
    chain = walk.chain(candidate.event.index)
    origin = _describe(trace, candidate, chain, loss_is_finite)
    if origin.phase != "forward":  # a forward pass although no step has begun is not before it
        origin = replace(origin, read_at=_read_at(candidate.event, chain))
    carriers = chain if candidate.operand is not None else chain[1:]
    return Verdict(origin, tuple(_path_step(e) for e in carriers), innocent)


class _Walk:
    """Everything that reaches what was noticed through operands whose bad elements were handed on."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.consumer: dict[int, int | None] = {}

    def visit(self, start: int) -> None:
        stack: list[tuple[int, int | None]] = [(start, None)]
        while stack:
            index, consumer = stack.pop()
            if index in self.consumer:
                continue
            self.consumer[index] = consumer
            event = self.trace.events[index]
            for o in event.inputs:
                if o.guilty:
                    stack += [(p, index) for p in (o.producer, *o.also) if p is not None]
                elif (event.born or event.nan_from_inf) and (quotient := self._quotient(o)) is not None:
                    self.consumer.setdefault(quotient.index, index)
                    read = quotient.inputs[-1].producer
                    stack += [(read, quotient.index)] if read is not None else []

    def _quotient(self, operand: Operand) -> OpEvent | None:
        """What divided by an infinity, if a number is 0 for that reason: a norm that overflowed, then `inf / norm`."""
        stat = operand.stat
        if operand.producer is None or stat is None or stat.numel != 1 or stat.zeros != 1:
            return None
        made = self.trace.events[operand.producer]
        below = made.inputs[-1].stat if made.op in ("reciprocal", "div") and made.inputs else None
        infinite = below is not None and (below.inf or (below.min is not None and isinf(below.min)))
        return made if infinite else None

    def chain(self, index: int) -> list[OpEvent]:
        """From the origin to what was noticed."""
        chain: list[OpEvent] = []
        at: int | None = index
        while at is not None:
            chain.append(self.trace.events[at])
            at = self.consumer.get(at)
        return chain

    def choose(self) -> tuple[OriginCandidate | None, bool]:
        """The causal candidate among all that were reached, and whether all of them are innocent."""
        accidents: list[OriginCandidate] = []
        nan_makers: list[OriginCandidate] = []
        on_purpose: list[OriginCandidate] = []
        refusals: list[OriginCandidate] = []
        for index in sorted(self.consumer):
            event = self.trace.events[index]
            if event.raised and any(o.guilty for o in event.inputs):
                refusals.append(OriginCandidate(event))
            elif event.on_purpose and not self._is_data(event) and not self._is_weight(event):
                on_purpose.append(OriginCandidate(event))
            elif event.born or event.raised or event.uninitialized or event.on_purpose:
                accidents.append(OriginCandidate(self._written(event) if event.on_purpose else event))
            for operand in event.inputs:
                if operand.guilty and operand.producer is None:
                    fed_in = operand.role == "input" and self._is_fed_in(event)
                    innocent = _intended(operand) and not fed_in and not self._scales(event)
                    (on_purpose if innocent else accidents).append(OriginCandidate(event, operand))
            if event.nan_from_inf:
                nan_makers.append(OriginCandidate(event))
        if accidents:
            first = min(accidents, key=lambda c: c.order)
            return self._rewritten(first, accidents) or first, False
        if nan_makers:
            return self._log_of_zero(nan_makers[0].event, on_purpose) or nan_makers[0], False
        # What refuses a NaN has not made it; an intended infinity is a failure only where it is refused.
        if refusals and not any(o.nan for c in on_purpose for o in c.event.outputs):
            return refusals[0], False
        if not on_purpose:
            # The trail ends in the middle (memory written by something that was not seen): as far back as it goes.
            return (OriginCandidate(self.trace.events[min(self.consumer)]) if self.consumer else None), False
        return self._unmasked(on_purpose)

    def _rewritten(self, first: OriginCandidate, accidents: list[OriginCandidate]) -> OriginCandidate | None:
        """What the program computed and wrote over a weight in this step.

        Weights are not restored for a replay: what the step has written into them is there before it writes again."""
        if first.operand is None or not first.operand.label or first.operand.label != first.event.edits_weight:
            return None
        made = (c for c in accidents if c.operand is None and first.event in self.chain(c.event.index)[1:])
        return min(made, key=lambda c: c.order, default=None)

    def _is_fed_in(self, event: OpEvent) -> bool:
        """Whether weights are multiplied with it: a mask is added or selected."""
        first = next((e for e in self.chain(event.index) if e.op not in MASK_KEEPING), None)
        return first is not None and first.op in MATRIX_PRODUCTS | NORMALISERS

    def _scales(self, event: OpEvent) -> bool:
        """Whether it is in a buffer that is multiplied with: a mask is added or selects, a scale has overflowed."""
        products = (e for e in self.chain(event.index) if e.op == "mul" and not e.nan_from_inf)
        return any(o.guilty and o.role == "buffer" for e in products for o in e.inputs)

    def _is_data(self, event: OpEvent) -> bool:
        """Whether it is an infinity of the batch, although alone it looks intended: fed in, or among other numbers."""
        if event.region not in ("setup", "data") or any(o.nan for o in event.outputs):
            return False
        read = (o for e in self.chain(event.index) for o in e.inputs)
        return self._is_fed_in(event) or any(o.guilty and o.role == "input" and not _intended(o) for o in read)

    def _is_weight(self, event: OpEvent) -> bool:
        """Whether weights were filled with it before the step: `normal_` with an infinite deviation."""
        if event.region == "step":
            return False
        return any(o.guilty and o.role == "parameter" for e in self.chain(event.index) for o in e.inputs)

    def _written(self, constant: OpEvent) -> OpEvent:
        """What has put a constant into the data; alone it does nothing."""
        user = next((e for e in self.chain(constant.index) if e.op not in CONSTRUCTORS | {"to"}), constant)
        return user if user.op in WRITES and user.region == constant.region else constant

    def _log_of_zero(self, maker: OpEvent, on_purpose: list[OriginCandidate]) -> OriginCandidate | None:
        """The logarithm of zeros and ones is a mask where it is added; where it is multiplied it is the bug."""
        logs = [c for c in on_purpose if c.event.op == "log" and maker in self.chain(c.event.index)]
        return logs[0] if logs and maker.op == "mul" else None

    def _unmasked(self, on_purpose: list[OriginCandidate]) -> tuple[OriginCandidate, bool]:
        """Only constants were found: a NaN constant, or an infinity that a label or a sum brought into the loss."""
        for candidate in on_purpose:
            if any(o.nan for o in candidate.event.outputs):
                chain = self.chain(candidate.event.index)
                # A constant alone does nothing; show the operator that brought it into the data.
                user = next((e for e in chain if e.op not in CONSTRUCTORS | {"to"}), chain[0])
                return (candidate if _overwrites(user, candidate.event) else OriginCandidate(user)), False
        for candidate in on_purpose:
            chain = self.chain(candidate.event.index)
            if (empty := _all_masked(chain)) is not None:
                return OriginCandidate(empty), True
            for event in chain:
                if event.op not in MASK_KEEPING:
                    if candidate.event.op == "log" and event.op not in LABEL_PICKS:
                        return candidate, False
                    return OriginCandidate(event), True
        picked = (e for c in on_purpose for e in self.chain(c.event.index)[1:] if _reads_masked_only(c.event, e))
        return OriginCandidate(next(picked, on_purpose[0].event)), True


def _all_masked(chain: list[OpEvent]) -> OpEvent | None:
    """The last logsumexp before the loss: its result is -inf only where every entry of a slice is masked."""
    kept = list(takewhile(lambda e: e.op in MASK_KEEPING, chain))
    return next((e for e in reversed(kept) if e.op == "logsumexp"), None)


def _reads_masked_only(mask: OpEvent, event: OpEvent) -> bool:
    """Whether all that it reads of a mask with other entries is masked: a label has chosen `scores[before, tag]`."""
    partly = any(o.bad and o.bad < o.numel for o in mask.outputs)
    return partly and any(o.guilty and o.stat is not None and o.stat.bad == o.stat.numel for o in event.inputs)


def _overwrites(user: OpEvent, constant: OpEvent) -> bool:
    """Whether it writes into, or reads as a whole, memory that was filled with NaN: what is left of it is bad."""
    if constant.op not in FULL or user.op == "where" or not constant.outputs or constant.outputs[0].numel < 2:
        return False
    size = constant.outputs[0].numel
    return any(o.guilty and o.name in ("self", "input") and o.stat and o.stat.numel == size for o in user.inputs)


def _intended(operand: Operand) -> bool:
    """Whether an infinity from outside is there on purpose: a mask or a limit, never a weight and never a NaN."""
    stat = operand.stat
    if stat is None or stat.nan or operand.role == "parameter":
        return False
    alike = stat.min is None or stat.min == stat.max or stat.binary
    if operand.role == "buffer":
        return alike or not stat.posinf  # a bias may hold -inf among other numbers; a table with inf went wrong
    if operand.role == "input" and stat.posinf and stat.max not in (None, 0.0, 1.0):
        return False  # beside other equal numbers of a batch (weights, lengths), an infinity is not a limit
    one_sign = stat.posinf == 0 or stat.neginf == 0
    return one_sign and alike


def _describe(trace: Trace, candidate: OriginCandidate, chain: list[OpEvent], loss_is_finite: bool) -> Origin:
    event = candidate.event
    if candidate.operand is not None:
        return _from_outside(event, candidate.operand, chain)
    if event.raised and event.op == "linalg_check_errors":
        event = next((replace(e, raised=event.raised) for e in trace.producers(event)), event)
    returned = _returned_in_backward(event, chain) if loss_is_finite else None
    if returned is not None:
        return _from_backward(returned, event)
    if event.phase == "backward":
        return _from_backward(event, _forward_of(trace, event))
    if _edits_gradient(trace, event, chain):
        return replace(_origin("backward", event, event), role="gradient", label=event.label)
    phase = _phase(trace, event, chain)
    role, label = _kept_as(chain) if phase == "parameter" and not event.label else (event.role, event.label)
    return replace(_origin(phase, event, event), role=role, label=label)


def _kept_as(chain: list[OpEvent]) -> tuple[Role | None, str]:
    """The role and the name of the weight or buffer that a value was written into after it was computed."""
    for event in chain:
        held = [(i.role, i.label) for i in event.inputs if i.guilty] + [(event.role, event.label)]
        for role, label in held:
            if role in ("parameter", "buffer"):
                return role, label
    return None, ""


def _read_at(event: OpEvent, chain: list[OpEvent]) -> Site | None:
    """Where a step first reads what was created before it."""
    if event.region not in ("setup", "data"):
        return None
    if event.grad or event.module_type:
        return None  # a forward pass, although no step has begun
    # Without a loader, all that is known of the first step is that it computes with gradients.
    reads = (e for e in chain if e.region == "step" or e.grad or e.module_type)
    return next((e.site for e in reads if e.site is not None), None)


def _origin(phase: Phase, event: OpEvent, shown: OpEvent) -> Origin:
    """What the event read and produced, at the operator that is shown."""
    bad = next((o for o in event.outputs if o.bad), None)
    return Origin(
        phase,
        shown.op,
        shown.aten,
        event,
        site=shown.site,
        module=shown.module,
        module_type=shown.module_type,
        inputs=tuple(i.stat for i in event.inputs if i.stat is not None),
        produced=replace(bad, name="result") if bad else None,
        step=event.step,
    )


def _edits_gradient(trace: Trace, event: OpEvent, chain: list[OpEvent]) -> bool:
    """Whether the program computes with gradients after backward, as when it clips or normalises them by hand."""
    plain = all(e.phase == "forward" and not e.grad and e.region == "step" for e in chain)
    if not plain or any(e.role in ("parameter", "buffer", "input", "state") for e in chain):
        return False
    return any(made.phase == "backward" for e in chain for made in trace.producers(e))


def _phase(trace: Trace, event: OpEvent, chain: list[OpEvent]) -> Phase:
    """Bad data and bad weights are called so wherever the operator ran that made them."""
    if event.phase == "optimizer":
        return "optimizer"
    if event.region == "data":
        return "input"
    for e in chain:
        if e.phase == "optimizer" and e.region == "step":
            return "optimizer"
        roles = {i.role for i in e.inputs if i.guilty} | ({e.role} if not e.grad else set())
        if "parameter" in roles and not event.module_type:  # a layer may initialise its weights with its first input
            return "optimizer" if event.region == "update" else "parameter"
        if "buffer" in roles and event.region == "between":
            return "parameter"
        # What a step computes is forward, even if it writes the result over its batch.
        if "input" in roles and event.region != "step":
            return "input"
    if event.aten.startswith("aten.lift_fresh") and not event.on_purpose:
        return "input"
    # Before the first step only what belongs to a forward pass is one; the rest prepares data.
    return "input" if event.region == "setup" and not _in_forward_pass(trace, event, chain) else "forward"


def _in_forward_pass(trace: Trace, event: OpEvent, chain: list[OpEvent]) -> bool:
    """Whether a layer or a gradient takes part: in the event, before it, or in what the loss read before it ran."""
    if any(e.module_type or e.grad for e in (event, *trace.feeding(event))):
        return True
    begun = (p for e in chain if e.grad for p in trace.producers(e) if p.index < event.index)
    return any(p.grad for p in begun)


def _from_outside(event: OpEvent, operand: Operand, chain: list[OpEvent]) -> Origin:
    """The value was bad before the trace began; the site is where it enters."""
    # A tensor from a file that is copied into the weights, or into a buffer, is a bad weight.
    copies = (e for e in chain if e.role == "parameter" or (e.role == "buffer" and e.op == "copy"))
    written = next((e for e in copies if not e.grad), None) if operand.role is None else None
    weight = operand.role in ("parameter", "state") or written is not None
    # Numbers become a tensor, or a part of one, where they are written; any other operator only reads them.
    makes = operand.role is None and (weight or event.op in CONSTRUCTORS | WRITES or "lift_fresh" in event.aten)
    return replace(
        _origin("parameter" if weight else "input", event, event),
        op=event.op if makes else "",
        aten=event.aten if makes else "",
        inputs=(operand.stat,) if operand.stat else (),
        produced=operand.stat,
        role=written.role if written is not None else operand.role or "unknown",
        label=written.label if written is not None else operand.label,
    )


def _returned_in_backward(event: OpEvent, chain: list[OpEvent]) -> OpEvent | None:
    """The backward operator in which a forward value that never reached the loss comes back (0 * inf)."""
    if event.phase != "forward" or event.region != "step":
        return None
    after = next((e for e in chain if e.phase == "backward"), None)
    return after if after is not None and (after.nan_from_inf or after.bad) else None


def _from_backward(event: OpEvent, forward: OpEvent | None) -> Origin:
    """The site is the forward operator's, unless the backward is the user's own."""
    shown = event if forward is None or (event.in_python_backward and event.site is not None) else forward
    layer = forward or event
    origin = _origin("backward", event, shown)
    return replace(origin, forward_event=forward, module=layer.module, module_type=layer.module_type)


def _forward_of(trace: Trace, event: OpEvent) -> OpEvent | None:
    """The forward operator of a backward one, also through a derivative of a derivative."""
    at = event
    for _ in range(8):
        if at.forward is None:
            break
        at = trace.events[at.forward]
        if at.phase != "backward":
            return at
    return at if at is not event else None


def _path_step(event: OpEvent) -> PathStep:
    site = event.site
    library = event.library_site
    return PathStep(
        op=event.op,
        line=site.line if site else None,
        file=site.file if site else "",
        code=site.code if site else "",
        module=event.module,
        phase=event.phase,
        library=f"{library.file}:{library.line}" if library else "",
    )
