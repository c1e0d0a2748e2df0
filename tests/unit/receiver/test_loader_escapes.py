"""What a loader may not take with it: memory of the given tensor, threads, and tensors that it hangs on modules."""

from __future__ import annotations

import _thread
import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import PathClass
from nemo_dcr.receiver.paths import LoaderTable
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.receiver.threads import ThreadCensus
from nemo_dcr.testing.toy_loader import ScriptedModel

Weights = Iterable[tuple[str, Tensor]]
W = TensorMeta("w", (3,), "F32")


def table_of(act: Callable[[Tensor, Tensor], object]) -> LoaderTable:
    """Prewarm of one tensor of ones that `act(resident, given)` loads."""
    resident = torch.ones(3)

    def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
        return [name for name, tensor in weights if act(residents[name], tensor) is not residents]

    table = prewarm(ScriptedModel({"w": resident}, load), [W])
    assert resident.tolist() == [1, 1, 1]
    return table


# -- memory of the given tensor

ASK: dict[str, Callable[[Tensor, Tensor], object]] = {
    "data_ptr": lambda p, t: ctypes.memmove(p.data_ptr(), t.data_ptr(), 12),
    "untyped_storage": lambda p, t: p.untyped_storage().copy_(t.untyped_storage()),
    "storage": lambda p, t: p.storage().copy_(t.storage()),
    "numpy": lambda p, t: t.numpy(),
    "__array__": lambda p, t: np.asarray(t),
    "__dlpack__": lambda p, t: torch.utils.dlpack.from_dlpack(t).sum(),
    "share_memory_": lambda p, t: t.share_memory_(),
    "data_ptr of a result": lambda p, t: ctypes.memmove(p.data_ptr(), (t * 2).data_ptr(), 12),
    "data_ptr of a view": lambda p, t: ctypes.memmove(p.data_ptr(), t[1:].data_ptr(), 8),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("ask", ASK)
def test_memory_of_the_given_tensor_is_refused_before_it_is_touched(ask: str) -> None:
    """It has none of its own, so that an address would be a null pointer."""
    code, detail = table_of(ASK[ask]).reasons["w"]
    assert code == "LC1"
    assert f"Tensor.{ask.split()[0]} hands out memory" in detail


def test_memory_of_the_given_tensor_is_refused_in_another_thread_too() -> None:
    def act(p: Tensor, t: Tensor) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(t.data_ptr).exception()
        p.copy_(t)

    assert table_of(act).reasons["w"][0] == "LC1"


@pytest.mark.parametrize("ask", ["numpy", "__array__", "__dlpack__", "share_memory_"])
def test_memory_of_a_resident_tensor_is_refused_before_it_is_handed_out(ask: str) -> None:
    code, detail = table_of(lambda p, t: (getattr(p, ask)(), p.copy_(t))).reasons["w"]
    assert (code, f"Tensor.{ask} hands out memory" in detail) == ("LC1", True)


def test_the_address_of_a_resident_tensor_may_be_compared() -> None:
    assert table_of(lambda p, t: p.copy_(t) if p.data_ptr() != 5 else None).classes == {"w": PathClass.XOR}


# -- threads


class Threads:
    """Threads of a loader; `stop` ends those that wait."""

    def __init__(self) -> None:
        self.started: list[threading.Thread] = []
        self.stop = threading.Event()

    def start(self, limit_s: float) -> None:
        """One thread in all, which ends at the latest after so many seconds."""
        if not self.started:
            self.started.append(threading.Thread(target=self.stop.wait, args=(limit_s,), name="writer", daemon=True))
            self.started[0].start()

    def end(self) -> None:
        self.stop.set()
        for thread in self.started:
            thread.join()


def test_a_thread_that_outlives_the_load_is_refused_by_name() -> None:
    threads = Threads()
    try:
        code, detail = table_of(lambda p, t: (p.copy_(t), threads.start(60))).reasons["w"]
    finally:
        threads.end()
    assert code == "LC1"
    assert "still run and could write unseen: writer;" in detail


@pytest.mark.parametrize("limit_s", [0.0, 0.1])
def test_a_thread_that_is_about_to_end_is_waited_for(limit_s: float) -> None:
    threads = Threads()
    assert table_of(lambda p, t: (p.copy_(t), threads.start(limit_s))).reasons == {}
    threads.end()


def test_a_thread_that_was_there_before_is_none_of_the_loader() -> None:
    threads = Threads()
    threads.start(60)
    try:
        assert table_of(lambda p, t: p.copy_(t)).reasons == {}
    finally:
        threads.end()


def test_threads_without_an_object_are_found_by_number() -> None:
    running, stop = threading.Event(), threading.Event()
    census = ThreadCensus()
    assert census.outliving(0.0) == []

    def wait() -> None:
        running.set()
        stop.wait()

    number = _thread.start_new_thread(wait, ())
    running.wait()
    assert census.outliving(0.0) == [f"thread {number}"]
    stop.set()
    assert census.outliving() == []


# -- tensors that hang on modules


class Holder(ScriptedModel):
    """A model with a tensor as a plain attribute, which its loader does something with."""

    def __init__(self, act: Callable[[Holder, Tensor], object]) -> None:
        super().__init__({"w": torch.ones(3)}, self._place)
        self.inner = torch.nn.Module()
        self.scale, self.inner.scale = torch.ones(3), torch.full((3,), 2.0)
        self._act = act

    def _place(self, residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
        names = []
        for name, tensor in weights:
            residents[name].copy_(tensor)
            self._act(self, tensor)
            names.append(name)
        return names


def _data(holder: Holder, tensor: Tensor) -> None:
    holder.scale.data = torch.zeros(3)


BIND: dict[str, tuple[Callable[[Holder, Tensor], object], str]] = {
    "the given tensor": (lambda h, t: setattr(h, "scale", t), "LC9"),
    "what was made of it": (lambda h, t: setattr(h.inner, "scale", t.abs() + 1), "LC9"),
    "a constant": (lambda h, t: setattr(h, "scale", torch.zeros(3)), ""),
    "nothing": (lambda h, t: vars(h.inner).pop("scale", None), ""),
    "a number": (lambda h, t: setattr(h, "scale", 1), ""),
    "other memory": (_data, ""),
}


@pytest.mark.parametrize("bound", BIND)
def test_an_attribute_gets_its_tensor_back_and_may_not_hold_the_given_one(bound: str) -> None:
    act, code = BIND[bound]
    holder = Holder(act)
    held = (holder.scale, holder.inner.scale)
    places = [tensor.data_ptr() for tensor in held]
    table = prewarm(holder, [W])
    assert [reason for reason, _ in table.reasons.values()] == [code] * bool(code)
    assert holder.scale is held[0]
    assert holder.inner.scale is held[1]
    assert [tensor.data_ptr() for tensor in (holder.scale, holder.inner.scale)] == places
    assert (holder.scale.tolist(), holder.inner.scale.tolist()) == ([1, 1, 1], [2, 2, 2])


def test_an_attribute_that_is_written_unseen_gets_its_bits_back() -> None:
    holder = Holder(lambda h, t: None)
    hidden = holder.scale.numpy()
    holder._act = lambda h, t: hidden.fill(5)
    assert "scale was written" in prewarm(holder, [W]).reasons["w"][1]
    assert holder.scale.tolist() == [1, 1, 1]
