"""Functions on tensors: finiteness, statistics, versions, names, random state, snapshots."""
