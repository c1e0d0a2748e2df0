"""Which configurations of vLLM a refit is exact in; the others are refused at start-up, with the reason.

A refused configuration is one whose loader path, caches or processes nobody proved. It is better not to start than to
serve weights that no coordinator knows.
Not handled: loader paths (see prewarm) and what happens to parameters after loading.

Paper: Section 7 (engines); Table A.2
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_dcr.errors import OperatorNeeded

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def refusals(config: VllmConfig) -> list[str]:
    """Every reason why this engine cannot take part in refits; empty when it can."""
    parallel, found = config.parallel_config, []
    if parallel.pipeline_parallel_size > 1:
        found.append("pipeline parallelism: a stage would not take every tensor; set --pipeline-parallel-size 1")
    # Replicas of a dense model are told that they are alone; all but the first still have their number.
    if parallel.data_parallel_size > 1 or getattr(parallel, "data_parallel_index", 0) > 0:
        found.append("data parallelism inside one engine: start one engine for each replica instead")
    if getattr(parallel, "_api_process_count", 1) > 1:
        found.append("several API server processes: each would have a gate of its own; set --api-server-count 1")
    if config.lora_config is not None:
        found.append("LoRA adapters: merged or stacked adapters are not refitted; leave out --enable-lora")
    if config.speculative_config is not None:
        found.append("a draft model or MTP head: its own weights are not refitted; leave out --speculative-config")
    if config.model_config.quantization is not None:
        found.append(f"quantization {config.model_config.quantization!r}: weights are repacked after loading")
    if getattr(config.model_config, "enable_sleep_mode", False):
        found.append("sleep mode: it releases or moves the storage; leave out --enable-sleep-mode")
    if getattr(parallel, "enable_eplb", False):
        found.append("expert load balancing: it moves experts between ranks; leave out --enable-eplb")
    return found


def require_supported(config: VllmConfig) -> None:
    """Raises: OperatorNeeded naming every refusal."""
    found = refusals(config)
    if found:
        raise OperatorNeeded(
            "vLLM was started in a way that refits are not exact in: " + "; ".join(found), "start it without these"
        )
