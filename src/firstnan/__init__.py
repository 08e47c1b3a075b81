"""Finds the first NaN or Inf of a PyTorch training run and says why it was born."""

__all__ = ["__version__"]

# Nothing else is imported here: `firstnan run` starts before the user's program has chosen its torch settings.
__version__ = "0.1.0"
