"""What the hooks report about a training program: one method for each kind of event."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from enum import Enum, auto
from types import FrameType
from typing import Any

from torch import Tensor


class Decision(Enum):
    """What happens to the update that an optimizer is about to make."""

    RUN = auto()
    DROP = auto()


class Observer:
    """The base class: every method does nothing and lets everything pass."""

    # Optimizers.

    def optimizer_made(self, optimizer: Any, frame: FrameType) -> None:
        """An optimizer was constructed; `frame` is the constructor's."""

    def scheduler_made(self, scheduler: Any) -> None: ...

    def passes_quickly(self, optimizer: Any) -> bool:
        """Whether this check suffices before an update."""
        return False

    def passed_quickly(self, optimizer: Any) -> bool:
        """Whether this check suffices after an update."""
        return False

    def before_update(self, optimizer: Any, closure: bool, frame: FrameType) -> Decision:
        """An optimizer is about to update its parameters; `closure` if a closure computes the gradients."""
        return Decision.RUN

    def after_update(self, optimizer: Any) -> None: ...

    def update_skipped(self, optimizer: Any, scale: float) -> None:
        """A gradient scaler found infinite gradients and made no update."""

    def update_count(self) -> int:
        """How many updates were made so far."""
        return 0

    # Backward.

    def forked(self) -> None:
        """Backward is called in a process that was forked from the watched one."""

    def concerns(self, roots: list[Tensor]) -> bool:
        """Whether this backward call belongs to the watched training."""
        return True

    def before_backward(self, roots: list[Tensor], frame: FrameType) -> None: ...

    def needs_after_backward(self) -> bool:
        """Whether `after_backward` has to be called; asked after every backward call, so it must be quick."""
        return False

    def after_backward(self, roots: list[Tensor]) -> None: ...

    def gradients_returned(
        self, losses: list[Tensor], targets: list[Tensor], gradients: list[Tensor], frame: FrameType
    ) -> None:
        """`torch.autograd.grad` returned these gradients of the losses with respect to the targets."""

    def norm_measured(self, gradients: list[Tensor], norm: Any) -> None:
        """The program measures the 2-norm of its gradients, to clip them."""

    def gradients_clipped(self, parameters: list[Tensor], limit: Any, norm: Any) -> None: ...

    def loss_scaled(self, given: Any, scaled: Any, scaler: Any) -> Any:
        """A gradient scaler scaled a loss; returns what the program gets."""
        return scaled

    # Data.

    def indices_sampled(self, iterator: Any, indices: Any) -> Any:
        """A loader's sampler chose these dataset indices for a later batch; returns those that the loader gets."""
        return indices

    def epoch_begins(self, iterator: Any) -> None: ...

    def loader_asked(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
        """The program asks a loader of torch for its next batch."""
        return fetch(iterator)

    # What the program reads.

    def value_read(self, tensor: Tensor, frame: FrameType) -> None:
        """The program read a non-finite value, or the result of a test."""

    def group_left(self) -> None:
        """The program is about to leave its process group."""

    def module_returned(self, module: Any, output: Any) -> None:
        """An outermost module returned, before the program has trained."""

    # Ourselves.

    def internal_error(self, error: Exception) -> None:
        """Our own code failed; the program continues."""

    def unseen(self) -> contextlib.AbstractContextManager[Any]:
        """A context for our own code, which is not part of the program."""
        return contextlib.nullcontext()
