"""The check of every step: loss, gradients, updated parameters and buffers."""
