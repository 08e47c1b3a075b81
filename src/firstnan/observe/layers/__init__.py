"""The layer watch: checks the inputs and outputs of every layer, forward and backward, and names the first bad one."""

from firstnan.observe.layers.finding import LayerFinding, Sink
from firstnan.observe.layers.records import ModelCall
from firstnan.observe.layers.watch import LayerWatch

__all__ = ["LayerFinding", "LayerWatch", "ModelCall", "Sink"]
