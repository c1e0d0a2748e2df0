"""Completions from vLLM servers whose batches are the same in every run.

What a server computes for a row can depend on the rows beside it. So a synchronous step pauses the scheduler, posts a
server's groups one after the other, and resumes when the last of them has reached the scheduler: all rows then start in
one batch, in one order. Every sample has a seed of its own, so a row depends on the weights and on its batch alone.
The response header says which committed version computed it.
Not handled: a server that dies during a synchronous rollout (kills fall into refits).

Paper: Section 7 (attribution of responses), Section 8 (rollouts)
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from examples.grpo.arithmetic import END
from examples.grpo.records import Sample
from nemo_dcr.adapters.vllm.middleware import VERSION_HEADER
from nemo_dcr.errors import EngineTrouble

CALL_S = 300.0
_TRIPS = 3
"""Round trips between front end and scheduler after the request was admitted: it lies before them in every queue."""

Groups = Sequence[tuple[int, ...]]
"""Prompts, each as token ids; every one is sampled as one group."""


class RolloutServer:
    """One server, by its base address."""

    def __init__(self, instance: str, url: str, *, model: str = "demo") -> None:
        """Raises: EngineTrouble when it does not answer."""
        self.instance = instance
        self._url = url.rstrip("/")
        self._model = model
        # A stop text would be found by the front end, some steps later each time; a token stops inside the scheduler.
        (self._end,) = self.tokenize(END)

    def tokenize(self, prompt: str) -> tuple[int, ...]:
        """Token ids of a prompt. Raises: EngineTrouble."""
        found, _ = self._call("POST", "tokenize", {"model": self._model, "prompt": prompt})
        return tuple(found["tokens"])

    def sample(
        self, groups: Groups, *, members: int, max_tokens: int, seeds: Sequence[int], pinned: bool
    ) -> tuple[Sample, ...]:
        """`members` completions of each group's prompt, group after group.

        Args:
            groups: prompts.
            members: completions of each.
            max_tokens: of a completion; the end of its line ends it earlier.
            seeds: of the first member of each group; the next member has the next seed.
            pinned: let all rows start in one batch, in this order.

        Raises: EngineTrouble when the server does not answer, or answers for something else.
        """
        bodies = [
            {
                "model": self._model,
                "prompt": list(group),
                "n": members,
                "seed": seed,
                "stop_token_ids": [self._end],
                "max_tokens": max_tokens,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "logprobs": 0,
                "return_token_ids": True,
            }
            for group, seed in zip(groups, seeds, strict=True)
        ]
        if pinned:
            self._call("POST", "pause?mode=wait&clear_cache=true")
        asked: list[Future[tuple[dict[str, Any], str]]] = []
        with ThreadPoolExecutor(len(bodies)) as pool:
            try:
                for body in bodies:
                    asked.append(pool.submit(self._call, "POST", "v1/completions", body))
                    if pinned:
                        self._wait_until_queued(len(asked))
            finally:
                if pinned:
                    self._call("POST", "resume")
            answers = [answer.result() for answer in asked]
        return tuple(
            sample
            for group, (found, version) in zip(groups, answers, strict=True)
            for sample in self._samples(group, members, found, version)
        )

    def _wait_until_queued(self, requests: int) -> None:
        """Return when so many requests were admitted, and the last of them has reached the scheduler."""
        deadline = time.monotonic() + CALL_S
        while self._call("GET", "nemo_dcr/gate")[0].get("running") != requests:
            if time.monotonic() > deadline:
                raise EngineTrouble(self._url, "v1/completions", f"{requests} requests were not admitted")
            time.sleep(0.01)
        for _ in range(_TRIPS):
            self._call("GET", "is_paused")

    def _samples(
        self, prompt: tuple[int, ...], members: int, found: Mapping[str, Any], version: str
    ) -> tuple[Sample, ...]:
        choices = sorted(found["choices"], key=lambda choice: int(choice["index"]))
        if [choice["index"] for choice in choices] != list(range(members)) or not version.isdigit():
            raise EngineTrouble(self._url, "v1/completions", f"{len(choices)} choices of version {version!r}")
        return tuple(
            Sample(
                prompt=tuple(prompt),
                tokens=tuple(choice["token_ids"]),
                logprobs=tuple(choice["logprobs"]["token_logprobs"]),
                text=choice["text"],
                instance=self.instance,
                version=int(version),
            )
            for choice in choices
        )

    def _call(self, method: str, path: str, body: Any = None) -> tuple[dict[str, Any], str]:
        """The answer and the version that it is attributed to, if any."""
        data = None if method == "GET" else json.dumps(body).encode() if body is not None else b""
        request = urllib.request.Request(
            f"{self._url}/{path}", data, {"content-type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=CALL_S) as response:
                found = json.loads(response.read() or b"{}")
                return found, str(response.headers.get(VERSION_HEADER.decode(), ""))
        except (OSError, ValueError) as problem:
            raise EngineTrouble(self._url, path, f"no answer: {problem}") from None


def sample_all(
    servers: Sequence[RolloutServer],
    prompts: Groups,
    shares: Mapping[str, Sequence[int]],
    *,
    members: int,
    max_tokens: int,
    seed: int,
    pinned: bool,
) -> tuple[Sample, ...]:
    """All samples of a step, group after group; `shares` are sample numbers of each server. Raises: EngineTrouble.

    Sample i has the seed `seed` + i, whichever server computes it.
    """

    def ask(server: RolloutServer) -> tuple[Sample, ...]:
        numbers = sorted({number // members for number in shares[server.instance]})
        if not numbers:
            return ()
        groups = [prompts[number] for number in numbers]
        seeds = [seed + number * members for number in numbers]
        return server.sample(groups, members=members, max_tokens=max_tokens, seeds=seeds, pinned=pinned)

    with ThreadPoolExecutor(len(servers)) as pool:
        return tuple(sample for part in pool.map(ask, servers) for sample in part)
