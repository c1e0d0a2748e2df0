"""Checkpoint deltas as files: what `nemo-dcr diff`, `apply`, `verify` and `inspect` do.

Paper: Section 6.1 (items), Appendix C (buckets), Appendix D (payloads)
"""
