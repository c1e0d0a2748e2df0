"""Refits of a real `vllm.LLM` in this process, against a fresh engine: a report as JSON on standard output.

python -m tests.engines.in_process DIRECTORY ARCHITECTURE TP [--expert-parallel]

Every engine and its workers end with this process, which is why tests run it as one.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from nemo_dcr.adapters.vllm.in_process import LlmEngine
from nemo_dcr.adapters.vllm.whole_source import WholeTrainer
from nemo_dcr.config import CodecConfig, GateMode, RefitConfig
from tests.engines import tiny

ARCHITECTURES = {"qwen3": tiny.qwen3, "qwen3-moe": tiny.qwen3_moe}
PROMPTS = [{"prompt_token_ids": [1, 2, 3, 4, 5]}, {"prompt_token_ids": [7] * 20}]
CODEC = CodecConfig(chunk_target_bytes=1 << 15, bucket_target_bytes=1 << 15)


def engine(checkpoint: Path, tp: int, expert_parallel: bool) -> Any:
    """A started engine that can be refitted."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    return LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        kv_cache_memory_bytes=32 << 20,
        dtype="bfloat16",
        tensor_parallel_size=tp,
        enable_expert_parallel=expert_parallel,
        weight_transfer_config=WeightTransferConfig(backend="nemo_dcr"),
    )


def answers(outputs: Any) -> list[Any]:
    """Token ids, and the log probabilities of the best tokens, exactly."""
    return [
        [
            list(output.outputs[0].token_ids),
            [
                sorted((token, entry.logprob.hex()) for token, entry in best.items())
                for best in output.outputs[0].logprobs
            ],
        ]
        for output in outputs
    ]


def main(directory: Path, architecture: str, tp: int, expert_parallel: bool) -> dict[str, Any]:
    """Three versions, sync and async; then a fresh engine of the last one."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=4, logprobs=2, detokenize=False, ignore_eos=True)
    first = tiny.write_checkpoint(directory / "v0", ARCHITECTURES[architecture]())
    second = tiny.stepped(first, tiny.read(first), 1)
    third = tiny.stepped(first, tiny.read(second), 2)
    report: dict[str, Any] = {"versions": [], "answers": []}
    served = LlmEngine(engine(first, tp, expert_parallel))
    trainer = WholeTrainer(
        directory / "run", tiny.read(first).items(), refit=RefitConfig(heartbeat_s=0.05, lost_after_s=60), codec=CODEC
    )
    trainer.add_engine(served, "engine", tp)
    trainer.begin()
    for checkpoint, gate in ((None, None), (second, GateMode.SYNC), (third, GateMode.ASYNC)):
        begin = time.monotonic()
        if checkpoint is not None and gate is not None:
            trainer.refit(tiny.read(checkpoint).items(), gate)
        report.setdefault("seconds", []).append(round(time.monotonic() - begin, 2))
        version, outputs = served.generate(PROMPTS, greedy, use_tqdm=False)
        report["versions"].append(version)
        report["answers"].append(answers(outputs))
    report["checksums"] = served.checksums()
    trainer.close()
    del served
    gc.collect()
    fresh = engine(third, tp, expert_parallel)
    report["fresh"] = answers(fresh.generate(PROMPTS, greedy, use_tqdm=False))
    report["fresh_checksums"] = {
        name: digest for rank in fresh.collective_rpc("compute_weight_checksums") for name, digest in rank.items()
    }
    return report


if __name__ == "__main__":
    found = main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), "--expert-parallel" in sys.argv)
    (Path(sys.argv[1]) / "report.json").write_text(json.dumps(found))
