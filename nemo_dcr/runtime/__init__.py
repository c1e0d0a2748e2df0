"""Drives the pure machines with sockets, clocks and threads."""
