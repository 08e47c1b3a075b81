"""Finds the samples of a batch that are responsible for a failure."""
