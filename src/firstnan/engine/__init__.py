"""The session behind every entry point: trip, replay, sample search, result."""
