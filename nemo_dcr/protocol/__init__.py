"""Algorithms B.1 and B.2 as pure state machines: no I/O, clock, randomness, torch or numpy.

Paper: Section 6.3; Appendix B
"""
