"""Whoever can write where payloads lie can make an attempt fail, and never has a forged bit committed or served.

The forger here is as strong as that place allows: the store holds its payloads, each with a right digest, and in one
case a manifest that lists them, while the owner sees what it wrote itself.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_dcr.adapters.owner import Owner
from nemo_dcr.adapters.receiver import Receiver
from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.payload import encode_payload, verify_payload
from nemo_dcr.config import CodecConfig
from nemo_dcr.control import open_control
from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.ids import PayloadKey
from nemo_dcr.transport import objects
from nemo_dcr.transport.base import Announcement, Manifest
from nemo_dcr.transport.object_store import FilePublisher

TABLE = [TensorMeta("weight", (16, 8), "BF16")]


class Engine(torch.nn.Linear):
    def load_weights(self, weights: Any) -> None:
        for _, full in weights:
            self.weight.data.copy_(full)


class Forger:
    """Replaces what one attempt stores; `manifests` says whether it replaces the manifest as well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, manifests: bool) -> None:
        self.forged: dict[int, Announcement] = {}
        """Payloads of the attempt, by number, as the store holds them."""
        self.waiting = False
        self._attempt: int | None = None
        self._honest: dict[int, Announcement] = {}
        self._manifests = manifests
        publish, close = FilePublisher.publish, FilePublisher.close_set

        def forging_publish(store: FilePublisher, key: PayloadKey, data: Any, digest: bytes) -> Announcement:
            if self.waiting:
                self.waiting, self._attempt = False, key.attempt
            if key.attempt != self._attempt:
                return publish(store, key, data, digest)
            honest = bytes(data)
            items = verify_payload(honest, limits=CodecConfig()).decode()
            other = encode_payload(key, [replace(item, values=item.values ^ 1) for item in items])
            self.forged[key.payload] = publish(store, key, other.data, other.digest)
            self._honest[key.payload] = Announcement(key, digest, len(honest))
            return self._honest[key.payload]

        def forging_close(store: FilePublisher) -> Manifest:
            if not self._honest or self._attempt != store._attempt:
                return close(store)
            if not self._manifests:
                store._published = dict(self._honest)
                return close(store)
            close(store)
            return objects.manifest_of(store._attempt, store._owner, self._honest.values())

        monkeypatch.setattr(FilePublisher, "publish", forging_publish)
        monkeypatch.setattr(FilePublisher, "close_set", forging_close)


@pytest.mark.slow
@pytest.mark.parametrize("manifests", [False, True], ids=["payloads", "payloads and manifest"])
def test_forged_payloads_fail_the_attempt_and_are_never_served(
    manifests: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forger = Forger(monkeypatch, manifests=manifests)
    torch.manual_seed(0)
    policy = torch.nn.Linear(8, 16, bias=False)
    engine = Engine(8, 16, bias=False, dtype=torch.bfloat16)
    answers: set[bytes] = set()
    ended = threading.Event()

    def serve(receiver: Receiver) -> None:
        while not ended.is_set():
            try:
                with receiver.serving("request"):
                    answers.add(copied_words(engine.weight).tobytes())
            except OperatorNeeded:
                ended.wait(0.001)

    with (
        Receiver(engine, directory=tmp_path) as receiver,
        Owner.from_module(policy, checkpoint=TABLE, directory=tmp_path) as owner,
    ):
        versions = [copied_words(policy.weight.bfloat16()).tobytes()]
        owner.refit()
        thread = threading.Thread(target=serve, args=(receiver,))
        thread.start()
        forger.waiting = True
        with torch.no_grad():
            policy.weight.mul_(1.5)
        versions.append(copied_words(policy.weight.bfloat16()).tobytes())
        assert owner.refit() == 2
        ended.set()
        thread.join()
    assert forger.forged, "nothing was forged"
    history = open_control(f"sqlite:///{tmp_path / 'record.sqlite'}").history()
    assert forger.forged[0].key.attempt not in [record.attempt for record in history]
    assert copied_words(engine.weight).tobytes() == versions[-1]
    assert answers <= set(versions)
