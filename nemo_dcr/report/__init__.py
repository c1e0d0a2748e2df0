"""A run as one page: what its directory tells, read into values, and drawn as HTML that needs nothing else."""
