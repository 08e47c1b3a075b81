"""The check that runs every step: loss, gradients, updated parameters and buffers."""
