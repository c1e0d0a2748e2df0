"""Live storage before and after a loader: every byte of every storage is compared, and comes back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_dcr.bits.tensors import integer_view, torch_dtype
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import PathClass
from nemo_dcr.errors import NemoDcrError, OperatorNeeded, UnsupportedDtype, UnsupportedLoaderPath
from nemo_dcr.receiver.live_storage import ByteCopy, Checksums, LiveStorage
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.receiver.residents import Residents, storage_bytes
from nemo_dcr.testing.toy_loader import ScriptedModel

Weights = Iterable[tuple[str, Tensor]]
W = TensorMeta("w", (4, 6), "BF16")


def matrix() -> Tensor:
    return torch.arange(1, 25, dtype=torch.bfloat16).view(4, 6)


def plain(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
    return [name for name, tensor in weights if residents[name].copy_(tensor) is not None]


PLACES: dict[str, Callable[[], Tensor]] = {
    "whole": matrix,
    "one element": lambda: torch.tensor(3.0),
    "offset": lambda: matrix()[2:],
    "transposed": lambda: matrix().t(),
    "every second column": lambda: matrix()[:, ::2],
    "odd number of bytes": lambda: torch.arange(7, dtype=torch.uint8),
    "in inference mode": lambda: _in_inference_mode(),
}


def _in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return matrix().clone()


@pytest.mark.parametrize("place", PLACES)
def test_every_byte_of_a_storage_is_compared_and_comes_back(place: str) -> None:
    """Also those that no element of the tensor covers."""
    tensor = PLACES[place]()
    whole = storage_bytes(tensor).numpy()
    before = whole.copy()
    live = ByteCopy(Residents(ScriptedModel({"w": tensor}, plain)))
    assert live.changed() == []
    for at in range(len(whole)):
        whole[at] ^= 0x80
        assert live.changed() == ["w"]
        live.look()
        assert bytes(whole) == bytes(before)
    assert live.written == {"w"}


@pytest.mark.parametrize("dtype", ["BOOL", "I8", "F8_E4M3", "BF16", "F32", "F64", "C64", "F4"])
def test_any_dtype_is_compared_by_its_bits(dtype: str) -> None:
    tensor = torch.zeros(16, dtype=torch.uint8).view(torch_dtype(dtype))
    live = ByteCopy(Residents(ScriptedModel({"w": tensor}, plain)))
    for pattern in (0x80, 0x7F, 0xFF, 1):  # -0.0, NaNs of several widths, a subnormal
        storage_bytes(tensor).fill_(pattern)
        live.look()
        assert storage_bytes(tensor).tolist() == [0] * 16


def test_large_storages_are_compared_to_the_last_byte() -> None:
    tensor = torch.zeros((1 << 24) + 3, dtype=torch.uint8)
    live = ByteCopy(Residents(ScriptedModel({"w": tensor}, plain)))
    for at in (0, (1 << 24) - 1, 1 << 24, (1 << 24) + 2):
        tensor[at] = 1
        live.look()
        assert not bool(tensor.any())


class Engine(ScriptedModel):
    """Tied and aliased tensors, an empty one, and an attribute."""

    def __init__(self) -> None:
        tensor = matrix()
        super().__init__(
            {"w": tensor, "tied": tensor, "turned": tensor.t(), "part": tensor[1:2], "none": torch.empty(0, 3)}, plain
        )
        self.scale = torch.ones(3)


@pytest.mark.parametrize("keep", [ByteCopy, Checksums])
def test_a_storage_with_many_names_is_kept_once_and_reported_under_all_of_them(keep: type[LiveStorage]) -> None:
    engine = Engine()
    live = keep(Residents(engine))
    assert live.nbytes == (24 * 2 + 3 * 4 if keep is ByteCopy else 0)
    engine.tied[3, 5] = 0
    engine.scale[0] = 0
    live.look()
    assert live.written == {"w", "tied", "turned", "part", "scale"}


def writing(act: Callable[[], object]) -> Callable[[Mapping[str, Tensor], Weights], list[str]]:
    """The plain loader, which does `act` after each copy."""

    def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
        names = []
        for name, tensor in weights:
            residents[name].copy_(tensor)
            act()
            names.append(name)
        return names

    return load


@pytest.mark.parametrize("place", [place for place in PLACES if place != "one element"])
def test_prewarm_undoes_a_foreign_write_and_refuses_every_name(place: str) -> None:
    tensor, other = PLACES[place](), torch.ones(2, dtype=torch.bfloat16)
    hidden = storage_bytes(tensor).numpy()
    before = bytes(hidden)
    metas = [TensorMeta("o", (2,), "BF16"), TensorMeta("w", tuple(tensor.shape), "BF16")]
    model = ScriptedModel({"w": tensor, "o": other}, writing(lambda: hidden.put(range(3), hidden[:3] + 1)))
    if tensor.dtype is torch.uint8:
        metas[1] = TensorMeta("w", (7,), "U8")
    table = prewarm(model, metas)
    assert bytes(hidden) == before
    assert table.classes == dict.fromkeys(("o", "w"), PathClass.UNSUPPORTED)
    assert {code for code, _ in table.reasons.values()} == {"LC1"}
    with pytest.raises(UnsupportedLoaderPath, match=r"\(LC1\): resident w was written where no operator .* put back"):
        table.check()


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_write_that_undoes_itself_after_some_loads_is_seen(times: int) -> None:
    tensor = matrix()
    hidden = storage_bytes(tensor).numpy()
    before, count = bytes(hidden), iter(range(1000))

    def turn() -> None:
        hidden[:] = hidden[::-1].copy() if next(count) % times == 0 else hidden

    table = prewarm(ScriptedModel({"w": tensor}, writing(turn)), [W])
    assert (table.reasons["w"][0], bytes(hidden)) == ("LC1", before)


def test_a_loader_that_takes_its_tensors_one_by_one_is_looked_at_too() -> None:
    """It holds its input, so that each tensor gets a call; each call turns the hidden memory once."""
    first, second = matrix(), matrix()
    hidden = storage_bytes(first).numpy()
    before = bytes(hidden)

    def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
        held = list(weights)
        hidden[:] = hidden[::-1].copy()
        return plain(residents, held)

    metas = [W, TensorMeta("v", (4, 6), "BF16")]
    table = prewarm(ScriptedModel({"w": first, "v": second}, load), metas)
    assert ({code for code, _ in table.reasons.values()}, bytes(hidden)) == ({"LC1"}, before)


def test_live_bits_come_back_when_prewarm_itself_is_interrupted() -> None:
    tensor = matrix()
    hidden = storage_bytes(tensor).numpy()
    before = bytes(hidden)

    def stop() -> None:
        hidden[:] = 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prewarm(ScriptedModel({"w": tensor}, writing(stop)), [W])
    assert bytes(hidden) == before


def test_live_bits_come_back_when_prewarm_raises_an_error_of_its_own() -> None:
    tensor, odd = matrix(), torch.ones(24, dtype=torch.complex128)
    hidden = storage_bytes(tensor).numpy()
    before = bytes(hidden)
    model = ScriptedModel({"w": tensor, "odd": odd}, writing(lambda: hidden.fill(0)))
    expected: tuple[type[NemoDcrError], ...] = (UnsupportedDtype, UnsupportedLoaderPath)
    with pytest.raises(expected):
        prewarm(model, [W, TensorMeta("odd", (24,), "C64")]).check()
    assert bytes(hidden) == before


def test_checksums_stop_prewarm_with_the_name_and_undo_nothing() -> None:
    tensor = matrix()
    hidden = storage_bytes(tensor).numpy()
    model = ScriptedModel({"w": tensor}, writing(lambda: hidden.fill(7)))
    with pytest.raises(OperatorNeeded, match=r"wrote w during prewarm .* start the engine again"):
        prewarm(model, [W], keep=Checksums)
    assert set(hidden.tolist()) == {7}


def test_checksums_notice_words_that_change_places() -> None:
    tensor = torch.arange(64, dtype=torch.float32)
    live = Checksums(Residents(ScriptedModel({"w": tensor}, plain)))
    hidden = tensor.numpy()
    hidden[[8, 40]] = hidden[[40, 8]]
    assert live.changed() == ["w"]
    hidden[[8, 40]] = hidden[[40, 8]]
    assert live.changed() == []


@pytest.mark.parametrize("keep", [ByteCopy, Checksums])
def test_nothing_of_a_loader_without_foreign_writes_is_refused(keep: type[LiveStorage]) -> None:
    model = ScriptedModel({"w": matrix()}, plain)
    assert prewarm(model, [W], keep=keep).classes == {"w": PathClass.XOR}


def test_a_thread_that_goes_on_writing_needs_an_operator() -> None:
    tensor = torch.zeros(4096, dtype=torch.int64)
    hidden, stop, threads = tensor.numpy(), threading.Event(), []

    def write() -> None:
        while not stop.is_set():
            np.add(hidden, 1, out=hidden)

    def start() -> None:
        if not threads:
            threads.append(threading.Thread(target=write, daemon=True))
            threads[0].start()

    try:
        with pytest.raises(OperatorNeeded, match=r"w is still being written .* end the thread"):
            prewarm(ScriptedModel({"w": tensor}, writing(start)), [TensorMeta("w", (4096,), "I64")])
    finally:
        stop.set()
        threads[0].join()


def test_a_storage_that_lost_its_memory_gets_its_bits_back_and_needs_an_operator() -> None:
    tensor = matrix()
    before = bytes(storage_bytes(tensor).numpy())

    def leave() -> None:
        if not tensor.is_shared():
            thread = threading.Thread(target=tensor.share_memory_)
            thread.start()
            thread.join()
            storage_bytes(tensor).numpy()[:] = 1

    with pytest.raises(OperatorNeeded, match="gave w other memory"):
        prewarm(ScriptedModel({"w": tensor}, writing(leave)), [W])
    assert bytes(storage_bytes(tensor).numpy()) == before


@pytest.mark.parametrize("nbytes", [0, 16, 480])
def test_a_storage_of_another_size_gets_its_size_and_bits_back(nbytes: int) -> None:
    """Whether it also gets its address back is up to the allocator: refused, or a need of an operator."""
    tensor = matrix()
    before = bytes(storage_bytes(tensor).numpy())

    def resize() -> None:
        if tensor.untyped_storage().nbytes() == 48:
            tensor.untyped_storage().resize_(nbytes)

    with pytest.raises((OperatorNeeded, UnsupportedLoaderPath)):
        prewarm(ScriptedModel({"w": tensor}, writing(resize)), [W]).check()
    assert bytes(storage_bytes(tensor).numpy()) == before


def test_the_copy_is_freed_at_the_end() -> None:
    made = []

    class Watched(ByteCopy):
        def __init__(self, residents: Residents) -> None:
            super().__init__(residents)
            made.append(weakref.ref(self))

    table = prewarm(ScriptedModel({"w": matrix()}, plain), [W], keep=Watched)
    assert table.classes == {"w": PathClass.XOR}
    assert [reference() for reference in made] == [None]


SHARED = np.arange(1, 13, dtype=np.float32)


@pytest.mark.parametrize(
    ("one", "other", "refused"),
    [
        (slice(0, 6), slice(0, 6), True),
        (slice(0, 6), slice(5, 11), True),
        (slice(0, 6), slice(6, 12), False),
        (slice(0, 12, 2), slice(1, 12, 2), False),
        (slice(0, 12, 2), slice(0, 12, 2), True),
    ],
    ids=str,
)
def test_two_storages_over_one_memory_are_one_destination(one: slice, other: slice, refused: bool) -> None:
    """torch knows them as two storages; an XOR through both would cancel where they meet."""
    array = SHARED.copy()
    whole = [torch.from_numpy(array), torch.from_numpy(array)]
    model = ScriptedModel({"a": whole[0][one], "b": whole[1][other]}, plain)
    table = prewarm(model, [TensorMeta(name, (6,), "F32") for name in ("a", "b")])
    assert {code for code, _ in table.reasons.values()} == ({"LC7"} if refused else set())
    assert integer_view(whole[0]).tolist() == SHARED.view(np.int32).tolist()
