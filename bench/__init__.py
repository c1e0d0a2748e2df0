"""Measurements of this package beside the machine's own limits and the public peers, all in one run."""
