"""The layer watch: looks at what every layer reads and writes, forward and backward, and names the first bad one."""

from firstnan.layers.found import Found, Sink
from firstnan.layers.watch import LayerWatch

__all__ = ["Found", "LayerWatch", "Sink"]
