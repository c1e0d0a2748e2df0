"""NeMo-DCR: bit-exact delta-compressed refits with a checked retry and joint-commit protocol."""

__version__ = "0.1.0"
