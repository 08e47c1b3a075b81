"""Values that were non-finite before any operator touched them: data, labels, weights, constants."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from firstnan.diagnose.rules.base import ANY, Finding, rule
from firstnan.diagnose.rules.failure import Failure, describe, words
from firstnan.records import OpEvent, Phase, TensorStat

INPUT: frozenset[Phase] = frozenset({"input"})
PARAMETER: frozenset[Phase] = frozenset({"parameter"})
LOSSES = words(
    "mse_loss l1_loss smooth_l1_loss huber_loss nll_loss nll_loss2d binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div sub rsub cross_entropy soft_margin_loss mul eq ne isnan "
    "ctc_loss poisson_nll_loss xlogy"
)
LABEL_WORDS = re.compile(r"(^|[^a-z])(labels?|targets?|y|ys|gt|truth|answers?)([^a-z]|$)", re.IGNORECASE)
CONSTRUCTORS = words("tensor scalar_tensor full full_like new_full new_tensor as_tensor")
NAN_LITERAL = re.compile(r"(^|[^a-z_])nan([^a-z_]|$)", re.IGNORECASE)


def _what(stat: TensorStat | None) -> str:
    """The non-finite contents of a tensor in words."""
    if stat is None:
        return "non-finite values"
    parts = [f"{n} {word}" for n, word in ((stat.nan, "NaN"), (stat.inf, "infinite")) if n]
    where = f", the first at {list(stat.first_index)}" if stat.first_index else ""
    return f"{' and '.join(parts) or 'non-finite'} value(s) out of {stat.numel}{where}"


def _in_model(event: OpEvent) -> bool:
    return bool(event.module or event.module_type) and not event.module_type.endswith("Loss")


@dataclass(frozen=True)
class DataUse:
    """What became of bad data on its way to the model."""

    carriers: tuple[OpEvent, ...]
    """The events that made it and handed it on."""
    enters_model: bool | None
    """Whether a layer reads it before it meets what the model has computed; None where neither is seen."""

    @property
    def label(self) -> str:
        """What it is called as part of a batch."""
        return next((e.label for e in self.carriers if e.label), "")


def _data_use(failure: Failure) -> DataUse:
    events, label, origin = failure.trace.events, failure.origin.label, failure.origin.event
    known = origin is not None and origin.index < len(events) and events[origin.index] == origin
    carriers = {origin.index: origin} if origin is not None and known else {}
    derived: set[int] = set()
    met = False
    for event in events:
        if event.phase != "forward" or event.index in carriers:
            continue
        reads = any(
            (label and i.label == label) or (i.producer in carriers and (i.stat is None or i.stat.bad))
            for i in event.inputs
        )
        if reads and _in_model(event):
            return DataUse(tuple(carriers.values()), True)
        if _in_model(event) or any(i.producer in derived for i in event.inputs):
            derived.add(event.index)
            met = met or reads
        elif reads:
            carriers[event.index] = event
    return DataUse(tuple(carriers.values()), False if met else None)


def _is_label(failure: Failure) -> bool:
    """The tensor is a target: it meets what the model has computed, not the model; or its name says so."""
    label = failure.origin.label
    enters = _data_use(failure).enters_model
    if enters is not None:
        return not enters
    if LABEL_WORDS.search(label):
        return True
    readers = [e for e in failure.trace.events if e.phase == "forward" and any(i.label == label for i in e.inputs)]
    return label.endswith("[1]") and bool(readers) and all(e.op in LOSSES for e in readers)


@rule("nan_label", phases=INPUT)
def nan_label(failure: Failure) -> Finding | None:
    if failure.origin.role == "buffer" or not _is_label(failure):
        return None
    stat = failure.origin.produced or failure.made
    name = failure.origin.label or _data_use(failure).label or "targets"
    why = (
        f"The targets of this batch ({name}) hold {_what(stat)}, before any computation. The loss compares "
        "with them, so it and every gradient become non-finite."
    )
    return Finding(why, 0.85 if failure.event is None else 0.5, (describe(stat, name),) if stat else ())


@rule("nan_input", phases=INPUT)
def nan_input(failure: Failure) -> Finding | None:
    if failure.origin.role == "buffer":
        return None
    stat = failure.origin.produced or failure.made
    name = failure.origin.label or _data_use(failure).label or "input"
    why = (
        f"The input data of this batch ({name}) holds {_what(stat)}, before the model touches it. The model "
        "only passes it on; the data, or the code that reads it, has to be cleaned."
    )
    return Finding(why, 0.6 if failure.event is None else 0.4, (describe(stat, name),) if stat else ())


@rule("nan_input", title="Non-finite value in a buffer", phases=INPUT)
def nan_buffer(failure: Failure) -> Finding | None:
    if failure.origin.role != "buffer":
        return None
    stat, name = failure.origin.produced or failure.made, failure.origin.label or "a buffer"
    why = (
        f"The buffer {name} holds {_what(stat)} before step {failure.origin.step} computes anything. No operator of the "
        "step made it: it came with the model, or the code that fills it has to be looked at."
    )
    return Finding(why, 0.6 if failure.event is None else 0.4, (describe(stat, name),) if stat else ())


@rule("uninitialized_memory", phases=ANY)
def uninitialized_memory(failure: Failure) -> Finding | None:
    empty = failure.op.startswith(("empty", "new_empty")) or failure.origin.op.startswith(("empty", "new_empty"))
    if not (empty and failure.phase == "parameter") and not _from_empty(failure):
        return None
    stat = failure.origin.produced or failure.made
    name = failure.origin.label or f"`{failure.code}`"
    why = (
        f"The memory of {name} comes from `torch.empty` and nothing ever wrote to it: it holds {_what(stat)}. "
        "What stands in it differs from run to run."
    )
    return Finding(why, 0.96, (describe(stat, name),) if stat else ())


def _from_empty(failure: Failure) -> bool:
    """The operator made, or read, memory that nobody has written."""
    return failure.event is not None and any(
        e.uninitialized for e in (failure.event, *failure.trace.producers(failure.event))
    )


@rule("nan_parameter", phases=PARAMETER)
def nan_parameter(failure: Failure) -> Finding | None:
    stat = failure.origin.produced or failure.made
    name = failure.origin.label or "a parameter"
    why = (
        f"The parameter {name} holds {_what(stat)} before step {failure.origin.step} computes anything. No "
        "operator of the step made it: it came with the weights, for example from a checkpoint."
    )
    return Finding(why, 0.6 if failure.event is None else 0.35, (describe(stat, name),) if stat else ())


@rule("nan_constant", phases=ANY)
def nan_constant(failure: Failure) -> Finding | None:
    event = failure.origin.event
    if event is None or failure.phase == "optimizer" or not event.bad or not _literal(failure, event):
        return None
    why = (
        f"`{failure.code}` computes with, or selects, a NaN that stands in the code as a constant. It reaches "
        f"{sum(o.nan for o in event.outputs)} element(s) of the result."
    )
    return Finding(why, 0.3 if failure.phase == "input" and _is_data(failure, event) else 0.9, failure.input_lines())


def _is_data(failure: Failure, event: OpEvent) -> bool:
    """A whole row of NaN that ends up in a batch or in the model is data; a number, or a table beside it, is not."""
    if event.op == "tensor" and all(o.numel == 1 for o in event.outputs):
        return False
    use = _data_use(failure)
    batch = any(e.role == "input" or e.region == "data" for e in use.carriers)
    return batch or event.op not in CONSTRUCTORS or use.enters_model is not False


def _literal(failure: Failure, event: OpEvent) -> bool:
    """The operator writes a NaN that was asked for, or reads one."""
    if not any(o.nan for o in event.outputs):
        return False
    if event.op in CONSTRUCTORS and event.site is not None and NAN_LITERAL.search(event.site.code):
        return True
    given = [v for _, v in event.scalars if isinstance(v, float)]
    if any(math.isnan(v) for v in given) or (event.on_purpose and not any(math.isinf(v) for v in given)):
        return True
    if any(i.role == "constant" and i.stat is not None and i.stat.nan for i in event.inputs):
        return True
    return any(p.on_purpose and any(o.nan for o in p.outputs) for p in failure.trace.producers(event))
