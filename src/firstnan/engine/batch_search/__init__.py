"""Finds the batch that breaks a step, or the step from which training goes wrong."""
