"""Settings of a framework because of which the program's own logs do not show a bad loss."""

from __future__ import annotations

from types import FrameType
from typing import Any

_FILTER = "logging_nan_inf_filter"
_IN_THE_LOGS = (
    f"the Trainer's {_FILTER} is on: its logs show an average of earlier losses in place of a NaN or Inf loss"
)


def hidden_by(frame: FrameType | None) -> str:
    """What hides a bad loss, said in one sentence; empty if nothing is known to. No framework is imported.

    A Trainer of transformers is one of the objects whose methods are running. Only what objects hold is looked at: a
    property may do anything.
    """
    while frame is not None:
        arguments = _held(frame.f_locals.get("self")).get("args")
        if _held(arguments).get(_FILTER) is True:
            return _IN_THE_LOGS
        frame = frame.f_back
    return ""


def _held(value: Any) -> dict[str, Any]:
    try:
        return vars(value) if value is not None else {}
    except TypeError:  # it has no attributes of its own
        return {}
