"""Which loops run: numpy until a node asks for compiled ones, and numpy again where there are none."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.payload import encode_payload, verify_payload
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.config import CodecConfig
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.kernels import fast, hot, plain


@pytest.fixture(autouse=True)
def cold() -> Iterator[None]:
    hot.cool()
    yield
    hot.cool()


def test_numpy_runs_until_enough_bytes_are_at_stake() -> None:
    assert hot.loops() is plain
    assert "not worth" in hot.warm(hot.WORTH_BYTES - 1)
    assert hot.loops() is plain
    assert hot.warm(hot.WORTH_BYTES) == ""
    assert hot.loops() is fast
    assert hot.warm(0) == ""
    assert hot.loops() is fast


@pytest.mark.parametrize("problem", [ImportError("no numba"), RuntimeError("cannot cache: no locator available")])
def test_numpy_runs_on_where_the_compiled_loops_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def fail(name: str) -> None:
        raise problem

    monkeypatch.setattr(hot.importlib, "import_module", fail)
    assert str(problem) in hot.warm(hot.WORTH_BYTES)
    assert hot.loops() is plain


def test_a_machine_without_numba_imports_no_compiled_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nemo_dcr.kernels.fast", "nemo_dcr.kernels.loops"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "numba" in hot.warm(hot.WORTH_BYTES)
    assert hot.loops() is plain


def test_payload_bytes_do_not_depend_on_the_loops() -> None:
    rng = np.random.default_rng(5)
    items = []
    for number, (dtype, rate) in enumerate(
        [("BF16", 0.0005), ("BF16", 0.01), ("BF16", 0.5), ("BF16", 1.0), ("U8", 0.02), ("F32", 0.02), ("F64", 0.001)]
    ):
        width = {"BF16": 2, "U8": 1, "F32": 4, "F64": 8}[dtype]
        meta = TensorMeta(f"t{number}", (60_003,), dtype)
        at = np.flatnonzero(rng.random(60_003) < rate)
        values = rng.integers(0, 256**width - 1, len(at), dtype=np.dtype(f"<u{width}"), endpoint=True)
        items.append(Item.of(meta, Encoding.XOR if number % 2 else Encoding.OVERWRITE, at, values))
    key = PayloadKey(AttemptId(7), OwnerId(0), 0)
    numpy_made = encode_payload(key, items)
    hot.warm(hot.WORTH_BYTES)
    assert hot.loops() is fast
    assert encode_payload(key, items).data == numpy_made.data
    decoded = verify_payload(numpy_made.data, limits=CodecConfig()).decode()
    for item, made in zip(items, decoded, strict=True):
        assert (made.start, made.count) == (item.start, item.count)
        assert made.values.tobytes() == item.values.tobytes()
        assert made.flat_indices().tobytes() == item.flat_indices().tobytes()
