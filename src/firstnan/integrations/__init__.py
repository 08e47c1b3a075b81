"""Callbacks for training frameworks, one file each; no framework is imported before the program itself uses it."""
