"""Values that were non-finite before any operator touched them: data, labels, weights, constants."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from firstnan.diagnose.rules.base import ANY, Explanation, Failure, counted, describe, nonfinite, rule
from firstnan.records import OpEvent, Origin, Phase
from firstnan.records.operator_families import ARITHMETIC, CONSTRUCTORS, FULL, LOSSES, WRITES, words

INPUT: frozenset[Phase] = frozenset({"input"})
PARAMETER: frozenset[Phase] = frozenset({"parameter"})
READ_TARGETS = LOSSES | words("ctc_loss eq isnan mul ne rsub sub xlogy")
LABEL_WORDS = re.compile(r"(^|[^a-z])(labels?|targets?|y|ys|gt|truth|answers?)([^a-z]|$)", re.IGNORECASE)
NAN_LITERAL = re.compile(r"(^|[^a-z_])nan([^a-z_]|$)", re.IGNORECASE)


def _content(failure: Failure) -> str:
    return nonfinite(failure.origin.produced or failure.made)


def _found(failure: Failure, name: str, why: str, confidence: float, of_an_operator: float) -> Explanation:
    """The second confidence counts where an operator of this run made the value: its own cause says more."""
    stat = failure.origin.produced or failure.made
    evidence = (describe(stat, name),) if stat else ()
    known = failure.event is not None or failure.origin.op  # an operation of numpy is known without an event
    return Explanation(why, of_an_operator if known else confidence, evidence)


def wrapped_integers(origin: Origin) -> str:
    """A sentence about the integers that the line has read which made bad data; "" if there are none."""
    found = next((i for i in origin.inputs if i.dtype.startswith("int") and i.min is not None), None)
    if found is None:
        return ""
    seen = f"{found.name} is {found.dtype} and goes down to {found.min:.0f}"
    return f" {seen}: a product was probably too large for {found.dtype}, and wrapped."


def _in_model(event: OpEvent) -> bool:
    return bool(event.module or event.module_type) and not event.module_type.endswith("Loss")


@dataclass(frozen=True)
class DataUse:
    """What the step does with bad data."""

    carriers: tuple[OpEvent, ...]
    """The events that made it and handed it on."""
    enters_model: bool | None
    """Whether a layer reads it before it meets the model's output; None if neither is seen."""
    multiplied: bool = False
    """Whether it meets the output in a product."""

    @property
    def label(self) -> str:
        """Its name as a part of the batch."""
        return next((e.label for e in self.carriers if e.label), "")


def _data_use(failure: Failure) -> DataUse:
    events, label, origin = failure.trace.events, failure.origin.label, failure.origin.event
    known = origin is not None and origin.index < len(events) and events[origin.index] == origin
    # What came from outside of the trace was only read by its event.
    stat = failure.origin.produced
    only_read = origin is not None and stat is not None and failure.origin.inputs == (stat,)
    carriers = {origin.index: origin} if origin is not None and known and not only_read else {}
    derived: set[int] = set()
    met: OpEvent | None = None
    for event in events:
        if event.phase != "forward" or event.index in carriers:
            continue
        reads = any(
            (label and i.label == label) or (i.producer in carriers and (i.stat is None or i.stat.bad))
            for i in event.inputs
        ) or (only_read and known and event == origin)
        if reads and _in_model(event):
            return DataUse(tuple(carriers.values()), True)
        if _in_model(event) or any(i.producer in derived for i in event.inputs):
            derived.add(event.index)
            met = met or (event if reads else None)
        elif reads:
            carriers[event.index] = event
    return DataUse(tuple(carriers.values()), None if met is None else False, met is not None and met.op == "mul")


def _is_label(failure: Failure) -> bool:
    """Whether the tensor is a target: it meets the model's output and not the model, or its name says so."""
    label = failure.origin.label
    enters = _data_use(failure).enters_model
    if enters is not None:
        return not enters
    if LABEL_WORDS.search(label):
        return True
    readers = [e for e in failure.trace.events if e.phase == "forward" and any(i.label == label for i in e.inputs)]
    return label.endswith("[1]") and bool(readers) and all(e.op in READ_TARGETS for e in readers)


def _is_number(failure: Failure) -> bool:
    """Whether it is a number of the program's own, made before the step, and not data."""
    origin = failure.origin
    return origin.role is None and not origin.op and origin.read_at is not None


@rule("nan_input", title="Non-finite number made before the step", phases=INPUT)
def nan_number(failure: Failure) -> Explanation | None:
    origin = failure.origin
    if not _is_number(failure) or origin.read_at is None:
        return None
    name, value = origin.label or "the number", origin.produced.posinf if origin.produced else 1
    why = (
        f"{name} has been {'Inf' if value else '-Inf'} since the line above, before the first step. "
        f"`{origin.read_at.code}` (line {origin.read_at.line}) computes with it, so its result is non-finite."
    )
    return Explanation(why, 0.8)


@rule("nan_label", phases=INPUT)
def nan_label(failure: Failure) -> Explanation | None:
    if failure.origin.role == "buffer" or _is_number(failure) or not _is_label(failure):
        return None
    name = failure.origin.label or _data_use(failure).label or "targets"
    # Soft targets are multiplied with the model's output, and so are weights of samples or pairs.
    factors = _data_use(failure).multiplied
    what = "targets or weights" if factors else "targets"
    how = "The model's output is multiplied with them" if factors else "The loss compares with them"
    why = (
        f"The {what} of this batch ({name}) contain {_content(failure)}, before anything is computed. {how}, so the "
        "loss and the gradients become non-finite."
    )
    return _found(failure, name, why, 0.85, 0.5)


@rule("nan_input", phases=INPUT)
def nan_input(failure: Failure) -> Explanation | None:
    if failure.origin.role == "buffer" or _is_number(failure):
        return None
    name = failure.origin.label or _data_use(failure).label or "input"
    event = failure.origin.event
    outside = event is not None and failure.trace.is_read_outside_training(event)
    why = (
        f"The input data {'' if outside else 'of this batch '}({name}) contains {_content(failure)}, before the model "
        "reads it. The model only passes it on: clean the data, or fix the code that reads it."
    )
    return _found(failure, name, why, 0.6, 0.4)


@rule("nan_input", title="Non-finite value in a buffer", phases=INPUT)
def nan_buffer(failure: Failure) -> Explanation | None:
    if failure.origin.role != "buffer":
        return None
    name = failure.origin.label or "of the model"
    earlier = "from an earlier step, " if failure.origin.step else ""
    why = (
        f"The buffer {name} contains {_content(failure)}, before step {failure.origin.step} computes anything. It came "
        f"with the model, {earlier}or from code that writes the buffer outside the step."
    )
    return _found(failure, name, why, 0.6, 0.4)


@rule("uninitialized_memory", phases=ANY)
def uninitialized_memory(failure: Failure) -> Explanation | None:
    event = failure.event
    if event is None or not any(e.uninitialized for e in (event, *failure.trace.producers(event))):
        return None
    name = failure.origin.label or f"`{failure.code}`"
    why = (
        f"The memory of {name} comes from `torch.empty` and was never written: it contains {_content(failure)}. Its "
        "content differs from run to run."
    )
    return _found(failure, name, why, 0.96, 0.96)


def writes_nan(failure: Failure) -> bool:
    """Whether the program itself writes a NaN that the code asks for into a parameter; an update does not."""
    event = failure.origin.event
    if failure.phase != "parameter" or event is None or not _literal(failure, event):
        return False
    if any(i.role in ("gradient", "state") or i.label.endswith(".grad") for i in event.inputs):
        return False
    site = event.site or failure.origin.site
    return event.op in CONSTRUCTORS | WRITES or (site is not None and bool(NAN_LITERAL.search(site.code)))


@rule("nan_parameter", phases=PARAMETER)
def nan_parameter(failure: Failure) -> Explanation | None:
    name = failure.origin.label or "of the model"
    step = failure.origin.step
    if writes_nan(failure):
        when = f"after {step} updates" if step else "before the first update"
        kind = "buffer" if failure.origin.role == "buffer" else "parameter"
        why = f"`{failure.code}` writes {_content(failure)} into the {kind} {name}, {when}; no optimizer did."
        return _found(failure, name, why, 0.97, 0.97)
    if (number := _non_finite_number(failure)) and failure.event is not None and failure.origin.role == "parameter":
        when = f"after {step} updates" if step else "before the first update"
        why = f"`{failure.code}` writes {_content(failure)} into the parameter {name}, {when}: its {number}."
        return _found(failure, name, why, 0.97, 0.97)
    source = (
        "It was written after an earlier step"
        if step
        else "It comes from the initialisation of the weights, or from a checkpoint"
    )
    if failure.origin.event is None and failure.origin.role == "parameter":  # not read in the step
        source = "No update made it: it was there before training began, or the program has written it since"
    if failure.origin.event is not None and failure.origin.event.edits_weight:
        why = (
            f"The parameter {name} contains {_content(failure)}. `{failure.code}` writes it in this step: either this "
            "line made it, or it was there before."
        )
        return _found(failure, name, why, 0.6, 0.35)
    if failure.origin.role == "state" and not step:
        source = "It was loaded with the state, probably from a checkpoint"
    if name.endswith(")"):  # "(frozen)", "(in a copy of the model that is not trained)"
        source = "No update has written it: it is not trained"
    what = {"state": f"The optimizer's state, {name},", "buffer": f"The buffer {name}"}.get(
        failure.origin.role or "", f"The parameter {name}"
    )
    why = f"{what} contains {_content(failure)}, before step {step} computes anything. {source}."
    return _found(failure, name, why, 0.6, 0.35)


def _non_finite_number(failure: Failure) -> str:
    """The number that the operator was given and that is non-finite: "std is inf"; "" if there is none."""
    given = failure.event.scalars if failure.event is not None else ()
    return next((f"{n} is {v}" for n, v in given if isinstance(v, float) and not math.isfinite(v)), "")


def _computes_with_nan(failure: Failure) -> bool:
    """Whether a tensor meets a NaN that python has computed: the line of the operator does not say `nan`."""
    event = failure.event
    given = event is not None and any(isinstance(v, float) and math.isnan(v) for _, v in event.scalars)
    return given and failure.op in ARITHMETIC and not NAN_LITERAL.search(failure.code)


@rule("nan_constant", title="Number computed in Python is NaN", phases=ANY - {"optimizer"})
def nan_from_python(failure: Failure) -> Explanation | None:
    if not failure.bad or not _computes_with_nan(failure):
        return None
    why = (
        f"`{failure.code}` computes with a Python number that is NaN already ({_non_finite_number(failure)}), so "
        f"{counted(failure.nan)} became NaN. No operator of torch made it: look at the code that computes this number."
    )
    return Explanation(why, 0.9, failure.input_lines())


@rule("nan_constant", phases=ANY)
def nan_constant(failure: Failure) -> Explanation | None:
    event = failure.origin.event
    if event is None or failure.phase == "optimizer" or not event.bad or not _literal(failure, event):
        return None
    if _computes_with_nan(failure):
        return None
    elements = counted(sum(o.nan for o in event.outputs))
    if event.op in FULL:
        why = f"`{failure.code}` fills {elements} with NaN. Those that are not overwritten later reach the loss."
    else:
        why = (
            f"`{failure.code}` computes with, or selects, a NaN that is a constant in the code: {elements} became NaN."
        )
    return Explanation(
        why, 0.3 if failure.phase == "input" and _is_data(failure, event) else 0.9, failure.input_lines()
    )


def _is_data(failure: Failure, event: OpEvent) -> bool:
    """A whole row of NaN that ends up in a batch or in the model is data; a number, or a table beside it, is not."""
    if event.op == "tensor" and all(o.numel == 1 for o in event.outputs):
        return False
    use = _data_use(failure)
    batch = any(e.role == "input" or e.region == "data" for e in use.carriers)
    return batch or event.op not in CONSTRUCTORS or use.enters_model is not False


def _literal(failure: Failure, event: OpEvent) -> bool:
    """Whether the operator writes or reads a NaN that the code asks for."""
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
