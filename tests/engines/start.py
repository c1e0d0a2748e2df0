"""Start a `vllm.LLM` that selects the engine, with more options as JSON: python -m tests.engines.start MODEL OPTIONS.

Ends with 0 when it serves; a refusal ends it with the reason on standard error.
"""

from __future__ import annotations

import json
import sys


def main(model: str, options: str) -> None:
    """Start, and end again."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    common = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 64}
    common |= {"kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 2}
    LLM(model, weight_transfer_config=WeightTransferConfig(backend="nemo_dcr"), **common, **json.loads(options))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
