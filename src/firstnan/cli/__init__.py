"""The command `firstnan`."""
