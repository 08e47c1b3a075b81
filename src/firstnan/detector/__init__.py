"""`NaNDetector`: protection inside a training loop that one owns."""

from firstnan.detector.door import NaNDetector

__all__ = ["NaNDetector"]
