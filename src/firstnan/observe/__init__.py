"""Every touch of torch and of Python: patches, hooks, imports, output, source files."""
