"""NeMo-DCR inside vLLM: an out-of-tree weight-transfer engine, its drivers, and what keeps loaders exact there."""
