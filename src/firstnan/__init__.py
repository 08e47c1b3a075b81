"""Finds the first NaN or Inf of a PyTorch training run and says why it was born."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firstnan.bad_batch import find_bad_batch
    from firstnan.checks import check, check_gradients, check_weights
    from firstnan.detector import NaNDetector
    from firstnan.errors import NonFiniteError
    from firstnan.records import NaNEvent, Report
    from firstnan.replaying import replay
    from firstnan.report import load
    from firstnan.rules import rule
    from firstnan.samples.door import find_bad_samples
    from firstnan.tracing import trace

__all__ = [
    "NaNDetector",
    "NaNEvent",
    "NonFiniteError",
    "Report",
    "__version__",
    "check",
    "check_gradients",
    "check_weights",
    "find_bad_batch",
    "find_bad_samples",
    "load",
    "replay",
    "rule",
    "trace",
]
__version__ = "0.1.0"

_ROOMS = {
    "NaNDetector": "detector",
    "NaNEvent": "records",
    "NonFiniteError": "errors",
    "Report": "records",
    "check": "checks",
    "check_gradients": "checks",
    "check_weights": "checks",
    "find_bad_batch": "bad_batch",
    "find_bad_samples": "samples.door",
    "load": "report",
    "replay": "replaying",
    "rule": "rules",
    "trace": "tracing",
}


def __getattr__(name: str) -> Any:
    """Loads a name when it is asked for: `firstnan run` starts before the program has chosen its torch settings."""
    if name not in _ROOMS:
        raise AttributeError(f"module 'firstnan' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"firstnan.{_ROOMS[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
