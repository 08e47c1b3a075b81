"""Remedies, tried in copies of the program, and made in its files when asked."""
