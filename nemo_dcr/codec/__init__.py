"""From delta records to payload bytes and back.

Paper: Appendix C, Appendix D
"""
