"""Everything that hooks into torch and Python: patches, hooks, imports, output, source files."""
