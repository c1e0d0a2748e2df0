"""The server side: prewarm, ingest, and application through the native loader.

Paper: Section 6.1; Appendix A.2
"""
