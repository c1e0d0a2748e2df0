"""How payloads travel; opaque bytes, delivered at least once.

Paper: Section 7
"""
