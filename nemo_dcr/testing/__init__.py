"""Shipped helpers: reference engine, real checkpoint, strategies and conformance suites."""
