"""Refits of a real vLLM engine in this process, against a fresh engine: a report as `report.json` in the directory.

python -m tests.engines.in_process DIRECTORY ARCHITECTURE TP [--expert-parallel] [--async]

The fresh engine starts after the other one has ended. Each process imports vLLM for a quarter of a minute, which is
most of what this takes; so where every rank has a process of its own, the engine core stays in this one. Engines and
workers end with this process, which is why tests run it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nemo_dcr.adapters.vllm.async_in_process import AsyncLlmEngine
from nemo_dcr.adapters.vllm.in_process import LlmEngine
from nemo_dcr.adapters.vllm.whole_source import WholeTrainer
from nemo_dcr.config import CodecConfig, GateMode, RefitConfig
from tests.engines import tiny

ARCHITECTURES = {"qwen3": tiny.qwen3, "qwen3-moe": tiny.qwen3_moe, "nemotron-h": tiny.nemotron_h}
PROMPTS = [{"prompt_token_ids": [1, 2, 3, 4, 5]}, {"prompt_token_ids": [7] * 20}]
CODEC = CodecConfig(chunk_target_bytes=1 << 15, bucket_target_bytes=1 << 15)
REFIT = RefitConfig(heartbeat_s=0.05, lost_after_s=60)
REFIT_S = 600.0


def options(asked: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """Of an engine that can be refitted."""
    from vllm.config import WeightTransferConfig

    return {
        "model": str(checkpoint),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "kv_cache_memory_bytes": 32 << 20,
        "dtype": "bfloat16",
        "tensor_parallel_size": asked.tp,
        "enable_expert_parallel": asked.expert_parallel,
        "weight_transfer_config": WeightTransferConfig(backend="nemo_dcr"),
    }


def greedy() -> Any:
    """Four tokens with the log probabilities of the best two."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=4, logprobs=2, detokenize=False, ignore_eos=True)


def answer(output: Any) -> list[Any]:
    """Token ids, and the log probabilities of the best tokens, exactly."""
    best = [sorted((token, entry.logprob.hex()) for token, entry in at.items()) for at in output.outputs[0].logprobs]
    return [list(output.outputs[0].token_ids), best]


class Checkpoints:
    """Three versions on disk, and a trainer that goes through them."""

    def __init__(self, directory: Path, architecture: str) -> None:
        self._directory = directory
        first = tiny.write_checkpoint(directory / "v0", ARCHITECTURES[architecture]())
        second = tiny.stepped(first, tiny.read(first), 1)
        self.versions = [first, second, tiny.stepped(first, tiny.read(second), 2)]

    def trainer(self) -> WholeTrainer:
        """At version 0."""
        return WholeTrainer(self._directory / "run", tiny.read(self.versions[0]).items(), refit=REFIT, codec=CODEC)

    def refit(self, trainer: WholeTrainer, version: int) -> float:
        """Synchronous to version 1, asynchronous to version 2; returns the seconds that it took."""
        begin = time.monotonic()
        gate = GateMode.ASYNC if version == 2 else GateMode.SYNC
        trainer.refit(tiny.read(self.versions[version]).items(), gate, timeout_s=REFIT_S)
        return round(time.monotonic() - begin, 2)


def leave_open_on_the_last_rank(worker: Any) -> bool:
    """What an update that failed on some ranks leaves behind; returns whether a session is open on this rank."""
    if worker.rank + 1 == worker.parallel_config.world_size:
        worker.start_weight_update()
    return bool(worker._weight_update_active)


def refitted(asked: argparse.Namespace, checkpoints: Checkpoints) -> dict[str, Any]:
    """A `vllm.LLM` through all versions."""
    from vllm import LLM

    llm = LLM(**options(asked, checkpoints.versions[0]))
    served = LlmEngine(llm)
    trainer = checkpoints.trainer()
    trainer.add_engine(served, "engine", asked.tp)
    trainer.begin()
    report: dict[str, Any] = {"versions": [], "answers": [], "seconds": [], "streamed": []}
    for version in range(3):
        if version == 2 and asked.tp > 1:
            report["open"] = llm.collective_rpc(leave_open_on_the_last_rank)
        if version:
            report["seconds"].append(checkpoints.refit(trainer, version))
        answers = [served.generate([prompt], greedy(), use_tqdm=False) for prompt in PROMPTS]
        report["versions"].append(answers[0][0])
        report["answers"].append([answer(outputs[0]) for _, outputs in answers])
    report["checksums"] = served.checksums()
    trainer.close()
    llm.llm_engine.engine_core.shutdown()
    return report


async def refitted_on_a_loop(asked: argparse.Namespace, checkpoints: Checkpoints) -> dict[str, Any]:
    """A `vllm.AsyncLLM` through all versions, with requests that never pause during a refit."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**options(asked, checkpoints.versions[0])))
    served, loop = AsyncLlmEngine(llm), asyncio.get_running_loop()
    report: dict[str, Any] = {"versions": [], "answers": [], "seconds": [], "streamed": []}

    async def ask(number: int, name: str) -> tuple[int, list[Any]]:
        outputs = [found async for found in served.generate(PROMPTS[number], greedy(), name)]
        assert len({version for version, _ in outputs}) == 1
        return outputs[-1][0], answer(outputs[-1][1])

    async def stream(number: int, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            version, (tokens, _) = await ask(number, f"stream-{number}-{len(report['streamed'])}")
            report["streamed"].append([version, number, tokens])

    async def refit(trainer: WholeTrainer, version: int) -> float:
        stopping = asyncio.Event()
        streams = [asyncio.create_task(stream(number, stopping)) for number in range(len(PROMPTS))]
        took: float = await loop.run_in_executor(driver, checkpoints.refit, trainer, version)
        stopping.set()
        await asyncio.gather(*streams)
        return took

    # One thread, because sockets of the coordinator and its record belong to the thread that made them.
    with ThreadPoolExecutor(1) as driver:
        trainer = await loop.run_in_executor(driver, checkpoints.trainer)
        await loop.run_in_executor(driver, trainer.add_engine, served, "engine", asked.tp)
        await loop.run_in_executor(driver, trainer.begin)
        for version in range(3):
            if version:
                report["seconds"].append(await refit(trainer, version))
            answers = [await ask(number, f"asked-{version}-{number}") for number in range(len(PROMPTS))]
            report["versions"].append(answers[0][0])
            report["answers"].append([found for _, found in answers])
        report["checksums"] = await loop.run_in_executor(driver, served.checksums)
        await loop.run_in_executor(driver, trainer.close)
    llm.shutdown()
    return report


def fresh(asked: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """A fresh `vllm.LLM` of the last version."""
    from vllm import LLM

    llm = LLM(**options(asked, checkpoint))
    outputs = [llm.generate([prompt], greedy(), use_tqdm=False)[0] for prompt in PROMPTS]
    ranks = llm.collective_rpc("compute_weight_checksums")
    return {
        "fresh": [answer(output) for output in outputs],
        "fresh_checksums": {name: digest for rank in ranks for name, digest in rank.items()},
    }


def main() -> None:
    """Write `report.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("architecture", choices=ARCHITECTURES)
    parser.add_argument("tp", type=int)
    for flag in ("--expert-parallel", "--async"):
        parser.add_argument(flag, action="store_true")
    asked = parser.parse_args()
    on_a_loop = vars(asked)["async"]
    if asked.tp > 1 and not on_a_loop:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    checkpoints = Checkpoints(asked.directory, asked.architecture)
    report = asyncio.run(refitted_on_a_loop(asked, checkpoints)) if on_a_loop else refitted(asked, checkpoints)
    report |= fresh(asked, checkpoints.versions[-1])
    (asked.directory / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
