"""A freshly started engine of a checkpoint, in a process of its own: what refitted servers are compared with.

The process is new because vLLM 0.32 cannot start an engine on CPUs where llvmlite was imported, which compiled loops
do: it walks over all modules, and stumbles over an object that answers to every name. The caller has set
`VLLM_ENABLE_V1_MULTIPROCESSING=0`, without which the engine core would be one more process.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

Answer = tuple[tuple[int, ...], tuple[float, ...]]
"""Token ids of a greedy completion, and the log probability of each."""


def fresh_answers(checkpoint: Path, prompts: list[list[int]], tokens: int) -> tuple[list[Answer], dict[str, str]]:
    """The answers to the prompts, one at a time, and vLLM's own checksum of every parameter."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_answers, checkpoint, prompts, tokens).result()


def _answers(checkpoint: Path, prompts: list[list[int]], tokens: int) -> tuple[list[Answer], dict[str, str]]:
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig

    llm = LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        weight_transfer_config=WeightTransferConfig(backend="nemo_dcr"),
    )
    greedy = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, detokenize=False, ignore_eos=True)
    answers = []
    for prompt in prompts:
        given: Any = {"prompt_token_ids": prompt}
        best: Any = llm.generate([given], greedy, use_tqdm=False)[0].outputs[0]
        chosen = zip(best.token_ids, best.logprobs, strict=True)
        answers.append((tuple(best.token_ids), tuple(at[token].logprob for token, at in chosen)))
    checksums = llm.collective_rpc("compute_weight_checksums")[0]
    llm.llm_engine.engine_core.shutdown()
    return answers, checksums
