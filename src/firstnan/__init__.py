"""Finds the first NaN or Inf of a PyTorch training run and explains where it came from."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firstnan.api.checks import check, check_gradients, check_weights
    from firstnan.api.detector import NaNDetector
    from firstnan.api.replay import replay
    from firstnan.api.search import find_bad_batch, find_bad_samples
    from firstnan.api.trace import trace
    from firstnan.diagnose.rules import rule
    from firstnan.records import NaNEvent, Report
    from firstnan.records.errors import NonFiniteError
    from firstnan.records.files import load

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

_MODULES = {
    "NaNDetector": "api.detector",
    "NaNEvent": "records",
    "NonFiniteError": "records.errors",
    "Report": "records",
    "check": "api.checks",
    "check_gradients": "api.checks",
    "check_weights": "api.checks",
    "find_bad_batch": "api.search",
    "find_bad_samples": "api.search",
    "load": "records.files",
    "replay": "api.replay",
    "rule": "diagnose.rules",
    "trace": "api.trace",
}


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext firstnan`: adds the cell magic `%%firstnan`."""
    from firstnan.integrations import notebook

    notebook.load_ipython_extension(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Called by `%unload_ext firstnan`."""
    from firstnan.integrations import notebook

    notebook.unload_ipython_extension(shell)


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used: `firstnan run` starts before the program has set up torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'firstnan' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"firstnan.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
