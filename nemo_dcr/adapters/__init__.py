"""The only files that import an engine or a trainer framework."""
