"""One session: trip, replay, search, settle."""
