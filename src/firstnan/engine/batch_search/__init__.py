"""Which batch, or which step, training goes wrong with."""
