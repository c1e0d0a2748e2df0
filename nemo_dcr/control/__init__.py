"""Back ends of the durable commit record.

Paper: Section 6.3; Appendix B
"""
