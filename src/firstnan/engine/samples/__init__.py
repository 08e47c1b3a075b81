"""Which samples of a batch are to blame."""
