"""The driver of an `AsyncLLM`: calls from other threads reach its loop; calls that would wait for themselves do not."""

from __future__ import annotations

import asyncio

import pytest

from nemo_dcr.adapters.vllm.async_in_process import AsyncLlmEngine
from nemo_dcr.errors import EngineTrouble
from nemo_dcr.ids import Version


class Llm:
    """A record of calls; one of them fails, and generation ends when it is told to."""

    def __init__(self):
        self.calls = []
        self.finish = asyncio.Event()

    async def update_weight_version(self, version):
        self.calls.append(("version", version))

    async def resume_generation(self):
        self.calls.append("resume")

    async def pause_generation(self, *, mode, clear_cache):
        self.calls.append(("pause", mode, clear_cache))
        raise RuntimeError("the engine core is dead")

    async def compute_weight_checksums(self):
        return [{"dp0:tp0:w": "1"}, {"dp0:tp1:w": "2"}]

    async def generate(self, prompt, sampling_params, request_id):
        self.calls.append(request_id)
        yield f"{prompt} first"
        await self.finish.wait()
        yield f"{prompt} last"


def test_every_output_comes_with_the_version_that_the_request_was_admitted_under():
    async def story():
        llm = Llm()
        engine = AsyncLlmEngine(llm)

        async def ask():
            return [found async for found in engine.generate("p", None, "r")]

        asked = asyncio.create_task(ask())
        await asyncio.to_thread(engine.resume, Version(4))
        assert llm.calls[:2] == [("version", "4"), "resume"]
        pausing = asyncio.create_task(asyncio.to_thread(engine.pause))
        await asyncio.wait([pausing], timeout=0.2)
        assert not pausing.done()
        llm.finish.set()
        assert await asked == [(4, "p first"), (4, "p last")]
        with pytest.raises(EngineTrouble, match="the engine core is dead"):
            await pausing

    asyncio.run(story())


def test_checksums_of_all_ranks_are_one_table():
    async def story():
        engine = AsyncLlmEngine(Llm())
        assert await asyncio.to_thread(engine.checksums) == {"dp0:tp0:w": "1", "dp0:tp1:w": "2"}

    asyncio.run(story())


def test_a_call_from_the_loop_itself_is_refused_and_reaches_nothing():
    async def story():
        llm = Llm()
        engine = AsyncLlmEngine(llm)
        with pytest.raises(EngineTrouble, match=r"use asyncio\.to_thread"):
            engine.resume(Version(1))
        assert llm.calls == []

    asyncio.run(story())
