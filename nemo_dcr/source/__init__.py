"""The trainer side: conversion tasks, ownership, committed baseline, delta construction.

Paper: Section 5; Appendix A.1
"""
