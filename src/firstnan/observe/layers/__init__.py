"""The layer watch: looks at what every layer reads and writes, forward and backward, and names the first bad one."""

from firstnan.observe.layers.found import Found, Sink
from firstnan.observe.layers.watch import LayerWatch

__all__ = ["Found", "LayerWatch", "Sink"]
