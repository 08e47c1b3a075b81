"""The hooks on a model's layers: attaches and detaches them, and passes what they see to `Forward` and `Backward`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from firstnan.observe.layers.backward import Backward
from firstnan.observe.layers.choose_layers import Layer, Trackable, layers_of
from firstnan.observe.layers.finding import Sink
from firstnan.observe.layers.forward import Forward
from firstnan.observe.layers.records import (
    Call,
    LayerNote,
    PendingReads,
    SeenTensor,
    ThreadState,
    floating_tensors,
    version_of,
)
from firstnan.observe.patches import Hook

# The most layer calls to process together: their tensors are kept alive until then.
_MOST_NOTES = 6
# The most model calls whose loss is not known yet; their tensors are kept alive too.
_MOST_DEFERRED = 3
# Every tensor is read in this many steps at the start and after a failure, then in every eighth step.
_FULL_STEPS = 16
_EVERY = 8


class LayerWatch:
    """Watches the layers of `roots` (name prefix -> model) and reports every non-finite tensor to `sink`.

    `trackable` replaces the choice of layers, `skip` excludes types, names or globs, and `statistics` also reports the
    magnitude of every output and of its gradient. With `defer_reads` most steps only take notes until the loss is
    known: then call `read_notes` if it is bad, `drop_notes` if it is good. The first steps, counted from `steps`, and
    every eighth step are read in full.
    """

    def __init__(
        self,
        roots: Mapping[str, Module],
        sink: Sink,
        *,
        trackable: Trackable | None = None,
        skip: Iterable[type | str] = (),
        statistics: bool = False,
        defer_reads: bool = False,
        steps: int = 0,
    ) -> None:
        self._training_thread: int | None = None
        self.error: Exception | None = None
        """The first internal error."""
        self._is_paused: Callable[[], bool] = lambda: False
        self._roots, self._trackable, self._skip = dict(roots), trackable, tuple(skip)
        self._statistics, self._defer_reads = statistics, defer_reads and not statistics
        self._full_until = _FULL_STEPS
        self._lock = threading.Lock()
        self._attached = False
        self.steps = steps
        """The number of steps watched, including those of earlier watches."""
        self._handles: list[Any] = []
        self._thread = ThreadState()
        self._pending = PendingReads()
        self._forward = Forward(sink, self._pending, statistics)
        self._backward = Backward(sink, self._pending, statistics, self._run_unless_paused)

    def attach(self) -> None:
        """Puts hooks on the modules that the models have now."""
        with self._lock:
            if self._attached:
                return
            self._thread = ThreadState()
            for root in self._roots.values():
                enter = _Hook(root, partial(self._run, self._enter))
                self._handles.append(root.register_forward_pre_hook(enter))
            for module, layer in layers_of(self._roots, self._trackable, self._skip):
                self._handles.append(module.register_forward_hook(_LayerHook(module, layer, self), with_kwargs=True))
            for root in self._roots.values():
                leave = _Hook(root, partial(self._run, self._leave))
                self._handles.append(root.register_forward_hook(leave, always_call=True))
            self._attached = True

    def detach(self) -> None:
        """Removes every hook, including those on the graph and on tensors."""
        with self._lock:
            self._attached = False
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._backward.detach()
            self._pending.clear()
            self._thread = ThreadState()

    def pause_while(self, paused: Callable[[], bool]) -> None:
        """Nothing is looked at while this holds: asked when a model is called, and when a gradient comes."""
        self._is_paused = paused

    def train_in(self, thread: int | None) -> None:
        """The thread whose forward passes are the training step; None: every thread that records gradients."""
        self._training_thread = thread

    def new_step(self) -> None:
        """Begins a new step: the calls of each layer are counted from 0 again."""
        self.steps += 1
        self._backward.new_step()

    def watch_closely(self) -> None:
        """Reads everything for a while, from the next step on: something is or may soon be wrong."""
        self._full_until = self.steps + 1 + _FULL_STEPS

    def read_notes(self) -> None:
        """The loss of this thread's forward pass is bad: reads what its layers did."""
        self.watch_closely()
        self._run(self._read_deferred)

    def drop_notes(self) -> None:
        """The loss of this thread's forward pass is good: its notes are not needed."""
        self._thread.deferred.clear()

    def collect(self) -> list[Tensor]:
        """Scalars on devices where reading waits; once read, pass them to `judge` in this order."""
        return self._pending.collect()

    def judge(self, values: list[float]) -> None:
        """Judges the tensors of the oldest `collect` by these values of its scalars."""
        self._run(self._pending.judge, values)

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        """Every hook runs through here: an internal error is kept and never reaches the program."""
        if torch.compiler.is_compiling() or not self._attached:
            return
        try:
            function(*args)
        except Exception as error:
            self.error = self.error or error

    def _run_unless_paused(self, function: Callable[..., None], *args: Any) -> None:
        if not self._is_paused():
            self._run(function, *args)

    def _cannot_read(self) -> bool:
        """Whether to read nothing: paused, or inside a functional transform or tracer, where tensors have no values."""
        in_transform = torch._C._functorch.peek_interpreter_stack() is not None
        return in_transform or torch._C._get_tracing_state() is not None or self._is_paused()

    def _enter(self, module: Module, args: Any) -> None:
        thread = self._thread
        if thread.depth == 0 or thread.entered != self.steps:  # the latter in case the last call was interrupted
            # Asked once for a whole model, since asking torch takes much of a hook's time.
            thread.recording, thread.recomputing = torch.is_grad_enabled(), _is_recomputing()
            thread.unreadable = self._cannot_read()
            unusual = thread.recomputing or thread.unreadable or self._statistics
            plain = not (unusual or torch.is_inference_mode_enabled())
            thread.depth, thread.entered, thread.notes = 0, self.steps, [] if plain else None
            thread.notes_only = plain and module.training and self._takes_notes_only(thread)
        thread.depth += 1

    def _leave(self, module: Module, args: Any, output: Any) -> None:
        thread = self._thread
        thread.depth = max(0, thread.depth - 1)
        if thread.depth == 0 and thread.notes_only:
            thread.deferred.append(thread.notes or [])
            thread.notes_only, thread.notes = False, None
            while len(thread.deferred) > _MOST_DEFERRED:
                self._read_notes(thread, thread.deferred.pop(0))
        elif thread.depth == 0:
            self._process_notes(thread)
            self._forward.close(thread)
            thread.notes = None

    def _process_notes(self, thread: ThreadState) -> None:
        """Judges layers that have run; several at once, since code that ran a moment ago runs much faster."""
        notes = thread.notes
        if not notes:
            return
        thread.notes = []
        for note in notes:
            self._judgement_of(thread, note)(follow=note[-1] is not None)

    def _judgement_of(self, thread: ThreadState, note: LayerNote) -> Callable[..., None]:
        """A function that judges the layer call of this note by reading its tensors."""
        layer, t, version, node, output, output_version, output_node = note
        call = self._call(thread, layer, thread.recording, False)
        inputs = [("", thread.record(t, version), t, node)]
        outputs = [("", thread.record(output, output_version), output, output_node)]
        return partial(self._judge, thread, call, inputs, outputs, recomputing=False)

    def _takes_notes_only(self, thread: ThreadState) -> bool:
        """Whether the model call that begins now only takes notes."""
        if not (self._defer_reads and thread.recording) or self._training_thread not in (None, thread.ident):
            return False
        return self.steps >= self._full_until and self.steps % _EVERY != 0

    def _read_deferred(self) -> None:
        thread = self._thread
        deferred, thread.deferred = [*thread.deferred, thread.notes or []] if thread.notes_only else thread.deferred, []
        thread.notes_only, thread.notes = False, None
        for notes in deferred:
            self._read_notes(thread, notes)

    def _read_notes(self, thread: ThreadState, notes: list[Any]) -> None:
        thread.depth += 1  # as inside the call in which they were taken
        thread.reading_notes = True
        try:
            for note in notes:
                judge = self._judgement_of(thread, note) if isinstance(note, tuple) else note
                judge(follow=False)
            self._forward.close(thread)
        finally:
            thread.depth -= 1
            thread.reading_notes = False

    def _called(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
        thread = self._thread
        if thread.notes_only and thread.notes is not None:
            # It may have written outputs of earlier layers in place, so those get their records first.
            earlier = [self._judgement_of(thread, note) for note in thread.notes if isinstance(note, tuple)]
            thread.notes = [note for note in thread.notes if not isinstance(note, tuple)] + earlier
            seen = self._recorded_call(thread, layer, args, kwargs, output)
            thread.notes.append(partial(self._judge, thread, *seen, recomputing=False))
            return
        self._process_notes(thread)
        inside = thread.depth > 0
        recomputing = thread.recomputing if inside else _is_recomputing()
        if thread.unreadable if inside else self._cannot_read():
            return
        call, inputs, outputs = self._recorded_call(thread, layer, args, kwargs, output, recomputing)
        self._judge(thread, call, inputs, outputs, recomputing, follow=torch.is_grad_enabled() and bool(outputs))

    def _recorded_call(
        self, thread: ThreadState, layer: Layer, args: Any, kwargs: Any, output: Any, recomputing: bool = False
    ) -> tuple[Call, list[SeenTensor], list[SeenTensor]]:
        """A call of a layer, with its inputs and outputs as they are now."""
        trains = torch.is_grad_enabled() or (thread.depth > 0 and thread.recording)
        call = self._call(thread, layer, trains, recomputing)
        given = floating_tensors(args[0] if len(args) == 1 else args)
        for name, value in kwargs.items():
            given += floating_tensors(value, name)
        made = floating_tensors(output)
        # For an input that the layer wrote in place, only the former record describes what it read, if there is one.
        written = [id(t) for _, t in made]
        inputs = []
        for place, t in given:
            record = thread.last_record(t) if id(t) in written else thread.record(t, version_of(t))
            if record is not None:
                inputs.append((place, record, t, t.grad_fn))
        return call, inputs, [(place, thread.record(t, version_of(t)), t, t.grad_fn) for place, t in made]

    def _judge(
        self,
        thread: ThreadState,
        call: Call,
        inputs: list[SeenTensor],
        outputs: list[SeenTensor],
        recomputing: bool,
        *,
        follow: bool,
    ) -> None:
        if not recomputing:
            self._forward.called(thread, call, inputs, outputs)
        if follow:
            self._backward.follow(call, inputs, outputs)

    def _call(self, thread: ThreadState, layer: Layer, trains: bool, recomputing: bool) -> Call:
        in_step = recomputing or (trains and self._training_thread in (None, thread.ident))
        return Call(layer, thread.number(layer, self.steps, recomputing), in_step, thread.name)


def _is_recomputing() -> bool:
    """Whether activation checkpointing runs layers again during backward; those calls were judged already."""
    return torch._C._current_autograd_node() is not None


class _Hook(Hook):
    """A hook on one of the user's modules and its replicas."""

    __slots__ = ("_module",)

    def __init__(self, module: Module, function: Callable[..., None]) -> None:
        super().__init__(function)
        self._module = weakref.ref(module)

    def __call__(self, module: Module, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module is self._module() or module.__dict__.get("_is_replica"):
            self._act(module, *args)


class _LayerHook(_Hook):
    """Runs after every call of a layer; for the usual call, with one input and one output, it only takes a note."""

    def __init__(self, module: Module, layer: Layer, watch: LayerWatch) -> None:
        super().__init__(module, partial(watch._run, watch._called, layer))
        self._layer, self._watch = layer, watch

    def __call__(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not (module is self._module() or module.__dict__.get("_is_replica")):
            return
        thread = self._watch._thread
        notes = thread.notes
        if notes is not None and self._layer.keeps_nonfinite and len(args) == 1 and not kwargs:
            t = args[0]
            usual = type(t) is Tensor and type(output) is Tensor and t is not output
            if usual and output.is_floating_point() and not t.is_inference():
                notes.append((self._layer, t, t._version, t.grad_fn, output, output._version, output.grad_fn))
                if len(notes) >= _MOST_NOTES and not thread.notes_only:
                    self._watch._run(self._watch._process_notes, thread)
                return
        self._act(args, kwargs, output)
