"""One tensor or many: finite or not, statistics, versions, names, randomness, snapshots."""
