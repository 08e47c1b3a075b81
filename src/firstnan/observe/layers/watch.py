"""The hooks on a model's layers: attaches and detaches them, and passes what they see to `Forward` and `Backward`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook

from firstnan.observe.layers.backward import Backward
from firstnan.observe.layers.choose_layers import Layer, Trackable, layers_of
from firstnan.observe.layers.finding import Sink
from firstnan.observe.layers.forward import Forward
from firstnan.observe.layers.global_hooks import GlobalHooks, unhookable
from firstnan.observe.layers.records import (
    LayerCall,
    LayerNote,
    ModelCall,
    PendingReads,
    SeenTensor,
    ThreadState,
    floating_tensors,
    version_of,
)
from firstnan.observe.patches import Hook
from firstnan.observe.sites import ends_at_origin
from firstnan.records.errors import NonFiniteError

# The most layer calls to process together: their tensors are kept alive until then.
_MOST_NOTES = 6
# The most model calls whose loss is not known yet; their tensors are kept alive too.
_MOST_DEFERRED = 3
# Every tensor is read in this many steps at the start and after a failure, then in every eighth step.
_FULL_STEPS = 16
_EVERY = 8
# Of the steps that are read in full, every fourth one, and the first, measure how large the outputs are.
_MEASURED_EVERY = 32
# Zeros and subnormal numbers, which take several passes over a tensor, are counted even more rarely.
_COUNTED_EVERY = 256

Unseen = Callable[[], AbstractContextManager[Any] | None]
"""A context that hides what is done in it from the tracer; None if there is nothing to hide from."""
Returned = Callable[[Module, Any, Any, Any, ModelCall], None]
"""What is called after a call of a model: the module, its arguments, its result, and what was found in it."""


class LayerWatch:
    """Watches the layers of `roots` (name prefix -> model) and reports every non-finite tensor to `sink`.

    `trackable` replaces the choice of layers, `skip` excludes types, names or globs, and `statistics` also reports the
    magnitude of every output and of its gradient; `measures` that of the outputs, in every 32nd step. With
    `defer_reads` most steps only take notes until the loss is known: then call `read_notes` if it is bad, `drop_notes`
    if it is good. The first steps, counted from `steps`, and every eighth step are read in full.
    """

    def __init__(
        self,
        roots: Mapping[str, Module],
        sink: Sink,
        *,
        trackable: Trackable | None = None,
        skip: Iterable[type | str] = (),
        statistics: bool = False,
        measures: bool = False,
        defer_reads: bool = False,
        steps: int = 0,
    ) -> None:
        self._training_thread: int | None = None
        self._step_is_open = False
        """Whether the training thread is in a call of a model, with gradients."""
        self.error: Exception | None = None
        """The first internal error."""
        self._is_paused: Callable[[], bool] = lambda: False
        self._unseen: Unseen = lambda: None
        self._returned: Returned | None = None
        self._trains: Callable[[], bool] = lambda: True
        self._roots, self._trackable, self._skip = dict(roots), trackable, tuple(skip)
        self._statistics, self._defer_reads = statistics, defer_reads and not statistics
        self._may_measure = measures
        self._full_until = _FULL_STEPS
        self._lock = threading.RLock()
        self._attached = False
        self.steps = steps
        """The number of steps watched, including those of earlier watches."""
        self.calls = 0
        """The number of calls of the models so far."""
        self._handles: list[Any] = []
        self._paths: dict[int, tuple[weakref.ref[Module], str | None]] = {}
        """Every module that was looked at, and its path."""
        self._hook_tables: list[Any] = []
        self._hook_ids: list[int] = []
        """The forward hooks of each watched module, and which of them is ours: it has to be the last."""
        self._global = GlobalHooks()
        self._unhookable: set[int] = set()
        """The ids of modules that must not have hooks of their own."""
        self._thread = ThreadState()
        self._pending = PendingReads()
        self._forward = Forward(sink, self._pending, statistics)
        self._backward = Backward(sink, self._pending, statistics, self._run_unless_paused)

    def attach(self) -> None:
        """Puts hooks on the modules that the models have now; those that they get later are watched too."""
        with self._lock:
            if self._attached:
                return
            self._thread = ThreadState()
            self._attached = True
            self._watch_modules(self._roots)
            self._handles.append(register_module_module_registration_hook(self._module_added))

    def detach(self) -> None:
        """Removes every hook, including those on the graph and on tensors."""
        with self._lock:
            self._attached = False
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._hook_tables.clear()
            self._hook_ids.clear()
            self._paths.clear()
            self._unhookable.clear()
            self._global.remove()
            self._backward.detach()
            self._pending.clear()
            self._thread = ThreadState()

    def _watch_modules(self, roots: Mapping[str, Module]) -> None:
        """Puts hooks on those modules inside `roots` that have none yet."""
        choice = layers_of(roots, self._trackable, self._skip)
        known = {key for key, (ref, _) in self._paths.items() if ref() is not None}
        self._paths.update((key, value) for key, value in choice.paths.items() if key not in known)
        layers = {id(module): (module, layer) for module, layer in choice.layers if id(module) not in known}
        self._unhookable |= unhookable(roots.values())
        if roots is self._roots:
            for root in roots.values():
                if id(root) not in known:
                    self._watch_root(root, layers.pop(id(root), (root, None))[1])
        for module, layer in layers.values():
            self._put_hook(module, _LayerHook(module, layer, self))

    def _watch_root(self, root: Module, layer: Layer | None) -> None:
        own = _LayerHook(root, layer, self) if layer is not None else None
        enter = _Hook(root, partial(self._run, self._enter))
        self._put_hook(root, _RootHook(root, partial(self._run, self._leave), own), before=enter)

    def _put_hook(self, module: Module, after: _Hook, before: _Hook | None = None) -> None:
        if id(module) in self._unhookable:
            self._global.add(module, before, after)
            return
        if before is not None:
            self._handles.append(module.register_forward_pre_hook(before))
        always = isinstance(after, _RootHook)
        handle = module.register_forward_hook(after, with_kwargs=True, always_call=always)
        self._handles.append(handle)
        self._hook_tables.append(module._forward_hooks)
        self._hook_ids.append(handle.id)

    def _module_added(self, module: Module, name: str, child: Module | None) -> None:
        """A module gets a new part: it is watched from its first call on."""
        ref, path = self._paths.get(id(module), (None, None))
        if child is not None and path is not None and ref is not None and ref() is module:
            with self._lock:
                self._run(self._watch_modules, {f"{path}.{name}" if path else name: child})

    def _look_for_modules(self) -> None:
        """Watches modules that were added past `register_module`."""
        if not all(id(m) in self._paths for root in self._roots.values() for m in root.modules()):
            with self._lock:
                self._watch_modules(self._roots)

    def _be_last(self) -> None:
        """Hooks that others have added since may change what a layer returns, so ours has to run after them."""
        if max(map(len, self._hook_tables), default=0) > 1:
            for hooks, ours in zip(self._hook_tables, self._hook_ids, strict=True):
                if len(hooks) > 1 and next(reversed(hooks)) != ours and ours in hooks:
                    hooks.move_to_end(ours)
        for module, hook in self._global.overtaken():
            self._unhookable.discard(id(module))
            self._put_hook(module, hook)

    def pause_while(self, paused: Callable[[], bool]) -> None:
        """Nothing is looked at while this holds: asked when a model is called, and when a gradient comes."""
        self._is_paused = paused

    def hide_reads(self, unseen: Unseen) -> None:
        """What is read while the program is traced is not part of it: `unseen()` hides it there."""
        self._unseen = unseen

    def when_returned(self, act: Returned, trains: Callable[[], bool]) -> None:
        """Has `act` called after every call of a model that was read; `trains()`: whether calls belong to steps."""
        self._returned, self._trains = act, trains

    def train_in(self, thread: int | None) -> None:
        """The thread whose forward passes are the training step; None: every thread that records gradients."""
        self._training_thread = thread

    def new_step(self) -> None:
        """Begins a new step: the calls of each layer are counted from 0 again."""
        self.steps += 1
        self._backward.new_step()

    def step_again(self) -> None:
        """The same step is about to run again: the calls of each layer are counted from 0 again."""
        self._thread.count_anew()

    def watch_closely(self) -> None:
        """Reads everything for a while, from the next step on: something is or may soon be wrong."""
        self._full_until = self.steps + 1 + _FULL_STEPS

    def read_notes(self) -> None:
        """The loss of this thread's forward pass is bad: reads what its layers did."""
        self.watch_closely()
        self._run(self._look_for_modules)
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
        __tracebackhide__ = True
        if torch.compiler.is_compiling() or not self._attached:
            return
        try:
            hidden = self._unseen()
            if hidden is None:
                function(*args)
            else:
                with hidden:
                    function(*args)
        except NonFiniteError as error:
            raise ends_at_origin(error) from None
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
            unusual = self._measures(thread.recording) or thread.recomputing or thread.unreadable
            plain = not (unusual or torch.is_inference_mode_enabled())
            thread.depth, thread.entered, thread.notes = 0, self.steps, [] if plain else None
            thread.notes_only = plain and module.training and self._takes_notes_only(thread)
            thread.model_call = ModelCall()
            if not thread.recomputing:
                self.calls += 1
                if not (thread.recording and self._trains()):
                    thread.count_anew()
                self._be_last()
                if not thread.notes_only:
                    self._look_for_modules()
        thread.depth += 1
        if thread.depth == 1 and thread.ident == self._training_thread:
            self._step_is_open = thread.recording

    def _leave(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        thread = self._thread
        thread.depth = max(0, thread.depth - 1)
        if thread.depth == 0 and thread.ident == self._training_thread:
            self._step_is_open = False
        if thread.depth == 0 and thread.notes_only:
            thread.deferred.append(thread.notes or [])
            thread.notes_only, thread.notes = False, None
            while len(thread.deferred) > _MOST_DEFERRED:
                self._read_notes(thread, thread.deferred.pop(0))
        elif thread.depth == 0:
            self._process_notes(thread)
            self._forward.close(thread)
            thread.notes = None
            if output is not None:
                self._tell_returned(thread, module, args, kwargs, output)

    def _tell_returned(self, thread: ThreadState, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._returned is None or thread.recomputing or thread.unreadable:
            return
        self._returned(module, args, kwargs, output, thread.model_call)

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

    def _measures(self, recording: bool) -> bool:
        """Whether the layers that run now tell how large their outputs are."""
        measured = (
            self._may_measure and recording and (self.steps < self._full_until or self.steps % _MEASURED_EVERY == 0)
        )
        self._forward.measures(self._statistics or measured, measured and self.steps % _COUNTED_EVERY == 0)
        return self._statistics or measured

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
            thread.model_call = ModelCall()
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

    def _called(self, layer: Layer, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        thread = self._thread
        if thread.notes_only and thread.notes is not None:
            if layer.is_container:
                thread.notes.append(_ContainerNote(self, thread, layer, args, kwargs, output))
                return
            # It may have written outputs of earlier layers in place, so those get their records first.
            thread.notes = [self._judgement_of(thread, n) if isinstance(n, tuple) else n for n in thread.notes]
            seen = self._recorded_call(thread, layer, args, kwargs, output)
            thread.notes.append(partial(self._judge, thread, *seen, recomputing=False))
            return
        self._process_notes(thread)
        inside = thread.depth > 0
        if not inside:
            self._measures(torch.is_grad_enabled())
        if not inside and thread.entered != self.steps:
            thread.entered, thread.model_call = self.steps, ModelCall()
        recomputing = thread.recomputing if inside else _is_recomputing()
        if thread.unreadable if inside else self._cannot_read():
            return
        if recomputing and self._takes_notes_only(thread):
            return  # The gradients of this step are not followed, so parts of it would only mislead.
        if layer.is_container:
            if not recomputing:
                self._judge_container(thread, layer, args, kwargs, floating_tensors(output))
        else:
            call, inputs, outputs = self._recorded_call(thread, layer, args, kwargs, output, recomputing)
            self._judge(thread, call, inputs, outputs, recomputing, follow=torch.is_grad_enabled() and bool(outputs))
        if not inside:
            self._tell_returned(thread, module, args, kwargs, output)

    def _judge_container(
        self, thread: ThreadState, layer: Layer, args: Any, kwargs: Any, outputs: list[tuple[str, Tensor]]
    ) -> None:
        """A container is judged by those of its results that no layer inside has returned."""
        own = []
        for place, t in outputs:
            record = thread.last_record(t)
            if record is None or record.version != version_of(t):
                own.append((place, t))
        if own:
            call = self._call(thread, layer, torch.is_grad_enabled() or (thread.depth > 0 and thread.recording), False)
            inputs = [(p, thread.record(t, version_of(t)), t, None) for p, t in _given(args, kwargs)]
            made = [(p, thread.record(t, version_of(t)), t, None) for p, t in own]
            self._forward.called(thread, call, inputs, made)

    def _recorded_call(
        self, thread: ThreadState, layer: Layer, args: Any, kwargs: Any, output: Any, recomputing: bool = False
    ) -> tuple[LayerCall, list[SeenTensor], list[SeenTensor]]:
        """A call of a layer, with its inputs and outputs as they are now."""
        trains = torch.is_grad_enabled() or (thread.depth > 0 and thread.recording)
        call = self._call(thread, layer, trains, recomputing)
        given = _given(args, kwargs)
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
        call: LayerCall,
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

    def _call(self, thread: ThreadState, layer: Layer, trains: bool, recomputing: bool) -> LayerCall:
        # The training thread may have started this one, to run a part of the model.
        in_step = recomputing or (trains and (self._training_thread in (None, thread.ident) or self._step_is_open))
        return LayerCall(layer, thread.number(layer, self.steps, recomputing), in_step, thread.name, thread.model_call)


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
        __tracebackhide__ = True
        if torch.compiler.is_compiling():
            return
        if module is self._module() or module.__dict__.get("_is_replica"):
            self._act(module, *args)


class _LayerHook(_Hook):
    """Runs after every call of a layer; for the usual call, with one input and one output, it only takes a note."""

    def __init__(self, module: Module, layer: Layer, watch: LayerWatch) -> None:
        super().__init__(module, partial(watch._run, watch._called, layer))
        self._layer, self._watch = layer, watch
        # Both are known layers of torch: they write to nothing that an earlier layer has returned but their own input.
        self._keeps_nonfinite, self._keeps_finite = layer.keeps_nonfinite, layer.keeps_finite

    def __call__(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        __tracebackhide__ = True
        if torch.compiler.is_compiling() or not (module is self._module() or module.__dict__.get("_is_replica")):
            return
        thread = self._watch._thread
        notes = thread.notes
        if notes is not None:
            takes_note = self._keeps_nonfinite or (self._keeps_finite and thread.notes_only)
            if self._layer.is_container:
                if notes and _returns_last(notes[-1], output):
                    return
            elif takes_note and len(args) == 1 and not kwargs:
                t = args[0]
                usual = type(t) is Tensor and type(output) is Tensor and t is not output
                if usual and output.is_floating_point() and not t.is_inference():
                    notes.append((self._layer, t, t._version, t.grad_fn, output, output._version, output.grad_fn))
                    if len(notes) >= _MOST_NOTES and not thread.notes_only:
                        self._watch._run(self._watch._process_notes, thread)
                    return
        self._act(module, args, kwargs, output)


class _RootHook(_Hook):
    """Runs after every call of a model, also one that raised: first as the hook of a layer, if it is one."""

    def __init__(self, module: Module, leave: Callable[..., None], layer_hook: _LayerHook | None) -> None:
        super().__init__(module, leave)
        self._layer_hook = layer_hook

    def __call__(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        __tracebackhide__ = True
        if torch.compiler.is_compiling() or not (module is self._module() or module.__dict__.get("_is_replica")):
            return
        if self._layer_hook is not None and output is not None:
            self._layer_hook(module, args, kwargs, output)
        self._act(module, args, kwargs, output)


class _ContainerNote:
    """A call of a container, to be judged later."""

    __slots__ = ("_args", "_kwargs", "_layer", "_outputs", "_thread", "_watch")

    def __init__(
        self, watch: LayerWatch, thread: ThreadState, layer: Layer, args: Any, kwargs: Any, output: Any
    ) -> None:
        self._watch, self._thread, self._layer, self._args, self._kwargs = watch, thread, layer, args, kwargs
        self._outputs = [(place, t, version_of(t)) for place, t in floating_tensors(output)]

    def __call__(self, *, follow: bool) -> None:
        # What was written since then is no longer what the container returned.
        unchanged = [(place, t) for place, t, version in self._outputs if version == version_of(t)]
        self._watch._judge_container(self._thread, self._layer, self._args, self._kwargs, unchanged)


def _returns_last(note: Any, output: Any) -> bool:
    """Whether a container returns what the layer of this note has made."""
    return isinstance(note, tuple) and note[4] is output and note[5] == version_of(output)


def _given(args: Any, kwargs: Any) -> list[tuple[str, Tensor]]:
    found = floating_tensors(args[0] if len(args) == 1 else args)
    for name, value in kwargs.items():
        found += floating_tensors(value, name)
    return found
