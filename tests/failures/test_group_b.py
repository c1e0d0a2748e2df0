"""Group B of the known failures: change detection, baseline and codec. Each test is over a kind of dtype or damage."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from torch import Tensor

from nemo_dcr.bits import Words, unsigned, width
from nemo_dcr.bits.tensors import integer_view, tensor_from_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.checkpoint.apply import apply
from nemo_dcr.checkpoint.diff import diff
from nemo_dcr.checkpoint.in_place import apply_in_place
from nemo_dcr.codec.payload import encode_payload, verify_payload
from nemo_dcr.codec.records import Encoding, Item, PathClass
from nemo_dcr.codec.wire import HEADER_BYTES
from nemo_dcr.config import CodecConfig
from nemo_dcr.errors import ConditionViolated, NemoDcrError, PayloadCorrupt
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey, Version
from nemo_dcr.receiver.apply import Applier
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.record import AttemptMode
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.exchange import LoneExchange
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.source.projection import ScaledCast
from nemo_dcr.source.residual import ResidualConverter
from nemo_dcr.source.setup import agree_plan
from nemo_dcr.source.tasks import AffineTask, Part, ResidualInput, ResidualTask, tensor_reader
from nemo_dcr.testing.refit_outcome import dense_load, stored_bits
from nemo_dcr.testing.strategies import ANY_DTYPE
from nemo_dcr.testing.toy_loader import ScriptedModel, shard
from tests.failures.kinds import KINDS, Weights, each_by, outcome_of_load, versions, zeros
from tests.unit.checkpoint.checkpoints import content, flipped, tensor, write_checkpoint

NANS = {
    "BF16": (0x7FC0, 0x7FC1),
    "F16": (0x7E00, 0x7E01),
    "F32": (0x7FC00000, 0x7FC00001),
    "F64": (0x7FF8000000000000, 0x7FF8000000000001),
    "F8_E5M2": (0x7D, 0x7E),
}


class Trainer:
    """One owner of whole tensors; `live` is what it would send next."""

    def __init__(self, old: Mapping[TensorMeta, Words]) -> None:
        self.live = {meta.name: words.copy() for meta, words in old.items()}
        tasks = [
            AffineTask.identity(BoxMap.whole(meta), lambda name=meta.name: self.live[name])  # type: ignore[misc]
            for meta in old
        ]
        self.owner = DeltaOwner(OwnerId(0), tasks)
        self.owner.capture(Version(0))

    def items(self, mode: AttemptMode = AttemptMode.XOR) -> list[Item]:
        classes = {meta.name: PathClass.XOR for meta in self.owner.tensor_table()}
        return [item for bucket in self.owner.stream(mode, classes) for item in bucket.items]


def trainer_of(dtype: str, old: Sequence[int], new: Sequence[int]) -> Trainer:
    trainer = Trainer({TensorMeta("w", (len(old),), dtype): np.array(old, dtype=unsigned(dtype))})
    trainer.live["w"] = np.array(new, dtype=unsigned(dtype))
    return trainer


def entries(items: Sequence[Item]) -> dict[int, int]:
    return {int(at): int(value) for item in items for at, value in zip(item.flat_indices(), item.values, strict=True)}


# -- B1: zeros of both signs, NaNs


@pytest.mark.parametrize("mode", [AttemptMode.XOR, AttemptMode.OVERWRITE])
@pytest.mark.parametrize("dtype", NANS)
def test_b1_a_sign_of_zero_is_a_change_and_an_unchanged_nan_is_none(dtype: str, mode: AttemptMode) -> None:
    minus, (nan, other_nan) = 1 << (8 * width(dtype) - 1), NANS[dtype]
    trainer = trainer_of(dtype, [0, minus, nan, nan, 1, minus | nan], [minus, 0, nan, other_nan, 1, minus | nan])
    wanted = {0: minus, 1: minus, 3: 3 if dtype == "F8_E5M2" else 1}
    if mode is AttemptMode.OVERWRITE:
        wanted = {0: minus, 1: 0, 3: other_nan}
    assert entries(trainer.items(mode)) == wanted
    assert trainer.owner.counts.changed_elements == 3


# -- B2: detectors that look at too little


@pytest.mark.parametrize(
    ("dtype", "byte"), [(d, b) for d in ("BF16", "F32", "F64", "I64", "U8") for b in range(width(d))]
)
def test_b2_a_change_of_any_one_byte_is_seen(dtype: str, byte: int) -> None:
    mask = 0x41 << (8 * byte)
    assert entries(trainer_of(dtype, [5, 5, 5], [5, 5 ^ mask, 5]).items()) == {1: mask}


@pytest.mark.parametrize("dtype", ["BF16", "F32", "U8"])
def test_b2_changes_are_counted_from_the_committed_version_and_not_from_the_last_look(dtype: str) -> None:
    trainer = trainer_of(dtype, [1, 2, 3], [9, 2, 3])
    assert entries(trainer.items(AttemptMode.OVERWRITE)) == {0: 9}
    trainer.live["w"] = np.array([9, 8, 3], dtype=unsigned(dtype))
    assert entries(trainer.items(AttemptMode.OVERWRITE)) == {0: 9, 1: 8}
    trainer.live["w"] = np.array([1, 2, 3], dtype=unsigned(dtype))
    assert trainer.items() == []


# -- B3: one element, two records


def _copy(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
    return [name for name, tensor in weights if residents[name].copy_(tensor) is not None]


def engine_with(meta: TensorMeta, old: Words) -> tuple[ScriptedModel, Applier]:
    model = ScriptedModel({meta.name: zeros(meta)}, _copy)
    dense_load(model, [meta], {meta.name: old})
    return model, Applier(model, prewarm(model, [meta]))


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("dtype", KINDS)
def test_b3_two_owners_of_one_tensor_never_cancel_each_other(dtype: str, calls: int) -> None:
    meta = TensorMeta("w", (4,), dtype)
    old = np.ones(4, dtype=unsigned(dtype))
    model, applier = engine_with(meta, old)
    mask = Item.run(meta, Encoding.XOR, 1, old[:1])
    with pytest.raises(ConditionViolated, match="LC6"):
        _apply_in(applier, [mask, mask], calls)
    new = Item.run(meta, Encoding.OVERWRITE, 1, old[:1] ^ old[:1])
    _apply_in(applier, [new, new], calls, attempt=2)
    assert integer_view(model.w).tolist() == [1, 0, 1, 1]


def _apply_in(applier: Applier, items: list[Item], calls: int, attempt: int = 1) -> None:
    for group in [items] if calls == 1 else [[item] for item in items]:
        applier.apply(group, attempt=AttemptId(attempt))


@pytest.mark.parametrize("dtype", KINDS)
def test_b3_two_names_of_one_storage_are_refused_at_prewarm(dtype: str) -> None:
    metas = [TensorMeta(name, (4, 2), dtype) for name in ("embed", "head")]
    residents = lambda: dict.fromkeys(("embed", "head"), zeros(metas[0]))  # noqa: E731
    assert outcome_of_load(lambda: _copy, metas, residents).refused == "LC7"


# -- B4: tied heads


@pytest.mark.parametrize("dtype", KINDS)
def test_b4_a_tied_head_follows_its_embedding(dtype: str) -> None:
    meta = TensorMeta("embed", (4, 2), dtype)
    residents = lambda: dict.fromkeys(("embed", "head"), zeros(meta))  # noqa: E731
    assert outcome_of_load(lambda: _copy, [meta], residents).exact


@pytest.mark.parametrize("dtype", KINDS)
def test_b4_an_equal_head_that_is_not_tied_stays(dtype: str) -> None:
    metas = [TensorMeta(name, (4, 2), dtype) for name in ("embed", "head")]
    old, new = versions(metas)
    old["head"], new["head"] = old["embed"].copy(), old["embed"].copy()
    assert outcome_of_load(lambda: _copy, metas, old=old, new=new).exact


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64", "I64"])
def test_b4_a_cloned_head_that_no_load_updates_is_refused(dtype: str, turned: bool) -> None:
    """The clone is made once, after the first load: a refit of the embedding alone would leave it behind."""
    meta = TensorMeta("embed", (4, 2), dtype)
    old, new = versions([meta], seed=3)

    def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
        names = _copy(residents, weights)
        embed = residents["embed"]
        if not bool((integer_view(residents["head"]) != 0).any()):
            integer_view(residents["head"]).copy_(integer_view(embed.t() if turned else embed))
        return names

    def after_load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
        return load(residents, weights) if _is_dense(residents) else _copy(residents, weights)

    shape = (2, 4) if turned else (4, 2)
    residents = lambda: {"embed": zeros(meta), "head": zeros(meta, shape)}  # noqa: E731
    assert outcome_of_load(lambda: after_load, [meta], residents, old=old, new=new).refused == "LC10"


def _is_dense(residents: Mapping[str, Tensor]) -> bool:
    return not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


# -- B6: index widths

EDGES = (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 5)


@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize("dtype", ["U8", "BF16", "F64"])
@pytest.mark.parametrize("shape", [(2**31 + 10,), (2, 2**31 + 5), (2**16, 2**16 + 1), (2**41,)], ids=str)
def test_b6_indices_survive_beyond_every_width(shape: tuple[int, ...], dtype: str, encoding: Encoding) -> None:
    meta = TensorMeta("w", shape, dtype)
    for at in (
        [0, *(edge for edge in EDGES if edge < meta.numel - 1), meta.numel - 1],
        [meta.numel - 3, meta.numel - 1],
        [*range(meta.numel - 4, meta.numel)],
        [0, 65535, 2 * 65535 + 1],
        [7, 7 + 2**32 if meta.numel > 2**32 + 7 else 8 + 2**30],
    ):
        item = Item.of(meta, encoding, np.array(at, dtype=np.int64), np.arange(1, len(at) + 1, dtype=unsigned(dtype)))
        data = encode_payload(PayloadKey(AttemptId(1), OwnerId(0), 0), [item]).data
        (back,) = verify_payload(data, limits=CodecConfig()).decode()
        assert back.flat_indices().tolist() == at
        assert back.values.tolist() == item.values.tolist()


# -- B7: memory that is not contiguous

STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda full: full.t(),
    "every second column": lambda full: full[:, 1::2],
    "one column": lambda full: full[:, 3],
    "every third row": lambda full: full[::3],
    "expanded": lambda full: full[:1].expand(6, 8),
    "middle": lambda full: full[1:5, 2:7],
}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("cut", STRIDED)
def test_b7_a_strided_shard_is_read_as_its_contiguous_copy(cut: str, dtype: str) -> None:
    (wide,) = metas = [TensorMeta("full", (6, 8), dtype)]
    old, new = versions(metas)
    holder = [STRIDED[cut](tensor_from_words(old["full"], dtype, wide.shape))]
    meta = TensorMeta("w", tuple(holder[0].shape), dtype)
    owner = DeltaOwner(OwnerId(0), [AffineTask.identity(BoxMap.whole(meta), tensor_reader(lambda: holder[0], "w"))])
    owner.capture(Version(0))
    before = integer_view(holder[0].clone(memory_format=torch.contiguous_format)).flatten().tolist()
    holder[0] = STRIDED[cut](tensor_from_words(new["full"], dtype, wide.shape))
    after = integer_view(holder[0].clone(memory_format=torch.contiguous_format)).flatten().tolist()
    buckets = owner.stream(AttemptMode.OVERWRITE, {})
    found = entries([item for bucket in buckets for item in bucket.items])
    mask = (1 << (8 * width(dtype))) - 1
    assert found == {at: word & mask for at, word in enumerate(after) if word != before[at]}
    assert found


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "F64"])
def test_b7_strided_values_and_indices_are_sent_as_their_contiguous_copies(dtype: str) -> None:
    values = np.arange(1, 41, dtype=unsigned(dtype)).reshape(8, 5)[:, 3]
    table = np.cumsum(np.arange(1, 33, dtype=np.int64)).reshape(8, 4)
    at = table[:, 1]
    key = PayloadKey(AttemptId(1), OwnerId(0), 0)
    meta = TensorMeta("w", (1000,), dtype)
    strided = encode_payload(key, [Item.of(meta, Encoding.OVERWRITE, at, values)]).data
    whole = encode_payload(key, [Item.of(meta, Encoding.OVERWRITE, at.copy(), values.copy())]).data
    assert strided == whole


# -- B9: several dtypes in one model


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("router", ["F32", "F64", "F16", "I64", "U8"])
@pytest.mark.parametrize("weight", ["BF16", "F8_E4M3"])
def test_b9_every_tensor_keeps_its_own_dtype_and_its_last_bit(weight: str, router: str, first: bool) -> None:
    """One unit in the last place of a router bias that is a buffer, on the whole way from trainer to engine."""
    metas = [TensorMeta("w", (6,), weight), TensorMeta("z.bias" if first else "a.bias", (3,), router)]
    old, _ = versions(metas)
    new = {name: words.copy() for name, words in old.items()}
    new[metas[1].name][1] ^= 1
    trainer = Trainer({meta: old[meta.name] for meta in metas})
    trainer.live = new
    names = {meta.name: meta.name.replace(".", "_") for meta in metas}

    def load(residents: Mapping[str, Tensor], weights: Weights) -> None:
        for name, given in weights:
            residents[names[name]].copy_(given)

    model, dense = (ScriptedModel({names[meta.name]: zeros(meta) for meta in metas}, load) for _ in range(2))
    dense_load(model, metas, old)
    applier = Applier(model, prewarm(model, metas))
    data = encode_payload(PayloadKey(AttemptId(1), OwnerId(0), 0), trainer.items()).data
    applier.apply(verify_payload(data, limits=CodecConfig()).decode({meta.name: meta for meta in metas}))
    dense_load(dense, metas, new)
    assert trainer.owner.counts.changed_elements == 1
    assert stored_bits(model) == stored_bits(dense)


# -- B10: everything that is not a float matrix


@pytest.mark.parametrize("shape", [(), (0, 4), (5,), (2, 0), (1,)], ids=str)
@pytest.mark.parametrize("dtype", ANY_DTYPE)
def test_b10_every_dtype_and_shape_survives_a_failed_attempt_and_its_retry(dtype: str, shape: tuple[int, ...]) -> None:
    metas = [TensorMeta("w", shape, dtype), TensorMeta("v", (3,), dtype)]
    outcome = outcome_of_load(lambda: each_by(lambda p, t: p.copy_(t)), metas)
    assert (outcome.detail, outcome.classes["w"]) == ("", PathClass.XOR)


# -- B11: checksums


def _payload() -> bytes:
    meta = TensorMeta("w", (900,), "F32")
    rng = np.random.default_rng(5)
    values = np.frombuffer(rng.bytes(1200), dtype="<u4")
    return encode_payload(PayloadKey(AttemptId(7), OwnerId(3), 2), [Item.run(meta, Encoding.XOR, 5, values)]).data


def _swap(data: bytes, one: int, two: int, size: int) -> bytes:
    changed = bytearray(data)
    changed[one : one + size], changed[two : two + size] = data[two : two + size], data[one : one + size]
    return bytes(changed)


def _last_words(data: bytes, count: int) -> int:
    """Offset, from an 8-byte border, of words inside the compressed body."""
    return (len(data) - 16) // 8 * 8 - 8 * count


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "two words change places": lambda data: _swap(data, _last_words(data, 4), _last_words(data, 2), 8),
    "two blocks change places": lambda data: _swap(data, _last_words(data, 32), _last_words(data, 16), 64),
    "one bit": lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
    "a cut": lambda data: data[:-9],
    "zeros at the end": lambda data: data + bytes(8),
    "another attempt": lambda data: data[:16] + struct.pack("<Q", 8) + data[24:],
    "another owner": lambda data: data[:24] + struct.pack("<I", 4) + data[28:],
    "another payload number": lambda data: data[:28] + struct.pack("<I", 3) + data[32:],
    "a pair of equal changes": lambda data: bytes(
        byte ^ (1 if at in (_last_words(data, 4), _last_words(data, 2)) else 0) for at, byte in enumerate(data)
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_b11_the_digest_covers_every_byte_and_its_place(damage: str) -> None:
    data = _payload()
    assert len(verify_payload(data, limits=CodecConfig()).decode()) == 1
    with pytest.raises(PayloadCorrupt):
        verify_payload(DAMAGE[damage](data), limits=CodecConfig())


METADATA = {"name": b"\xa1v", "dtype": b"\xa3I32", "encoding": b"\x01"}


@pytest.mark.parametrize("field", METADATA)
def test_b11_the_digest_covers_the_metadata(field: str) -> None:
    """The body is one uncompressed block here, so that the change is one of metadata and of nothing else."""
    data = _payload()
    body = zstandard.ZstdDecompressor().decompress(data[HEADER_BYTES:-16])
    plain_field = {"name": b"\xa1w", "dtype": b"\xa3F32", "encoding": b"\xa3F32\x00"}[field]
    new_field = METADATA[field] if field != "encoding" else b"\xa3F32\x01"
    frame = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", len(body)) + struct.pack("<I", len(body) << 3 | 1)[:3] + body
    head = data[:48] + struct.pack("<Q", len(frame))
    digest = hashlib.blake2b(head + frame, digest_size=16).digest()
    assert len(verify_payload(head + frame + digest, limits=CodecConfig()).decode()) == 1
    changed = frame.replace(plain_field, new_field, 1)
    assert changed != frame
    with pytest.raises(PayloadCorrupt):
        verify_payload(head + changed + digest, limits=CodecConfig())


# -- B13: padded vocabularies

ROWS, CANONICAL_ROWS, PADDED_ROWS = 130, 128, 192


@pytest.mark.parametrize("padding", ["fill", "copy"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_b13_trainer_padding_is_never_sent_and_receiver_padding_stays_zero(dtype: str, padding: str) -> None:
    meta = TensorMeta("embed", (CANONICAL_ROWS, 2), dtype)
    live = np.full(ROWS * 2, 5, dtype=unsigned(dtype))
    owner = residual_owner([meta], lambda _: live[: CANONICAL_ROWS * 2].copy(), {"embed.padded": live}, dtype)
    ranks = [_vocabulary_rank(meta, rank, padding) for rank in range(3)]
    for model in ranks:
        dense_load(model, [meta], {"embed": live[: CANONICAL_ROWS * 2]})
    appliers = [Applier(model, prewarm(model, [meta])) for model in ranks]
    before = [stored_bits(model) for model in ranks]
    live[129 * 2] ^= 1
    assert overwrites_of(owner, 1) == []
    live[127 * 2] ^= 1
    items = overwrites_of(owner, 2)
    assert entries(items) == {254: 4}
    for applier in appliers:
        applier.apply(items)
    assert [stored_bits(model) != bits for model, bits in zip(ranks, before, strict=True)] == [False, True, False]
    held = torch.cat([integer_view(model.embed) for model in ranks])
    assert held.shape[0] == PADDED_ROWS
    assert not bool((held[CANONICAL_ROWS:] != 0).any())


def _vocabulary_rank(meta: TensorMeta, rank: int, padding: str) -> ScriptedModel:
    start, length = shard(PADDED_ROWS, rank, 3)
    filled = max(0, min(length, CANONICAL_ROWS - start))

    def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
        for _, given in weights:
            part = given[start : start + filled]
            if padding == "copy":
                residents["embed"].copy_(torch.cat([part, torch.zeros(length - filled, 2, dtype=part.dtype)]))
            else:
                residents["embed"][:filled].copy_(part)
                residents["embed"][filled:].fill_(0)
        return ["embed"]

    return ScriptedModel({"embed": zeros(meta, (length, 2))}, load)


def residual_owner(
    outputs: Sequence[TensorMeta],
    convert: Callable[[TensorMeta], Words],
    inputs: Mapping[str, Words],
    dtype: str,
    steps: Mapping[str, tuple[str, ...]] | None = None,
) -> DeltaOwner:
    """An owner whose outputs are converted from all inputs; `steps` are tasks between them, by name."""
    watched = [
        ResidualInput(name=name, shard="0", dtype=dtype, count=len(words), read=lambda words=words: words)  # type: ignore[misc]
        for name, words in inputs.items()
    ]
    tasks = [
        ResidualTask(name=name, shard="0", outputs=(), depends=reads, nbytes=1, convert=lambda _: [])
        for name, reads in (steps or {}).items()
    ]
    depends = tuple(name for name in (*inputs, *(steps or {})) if all(name not in r for r in (steps or {}).values()))
    tasks.append(
        ResidualTask(
            name="convert",
            shard="0",
            outputs=tuple(outputs),
            depends=depends,
            nbytes=1,
            convert=lambda meta: [Part(BoxMap.whole(meta), convert(meta))],
        )
    )
    exchange = LoneExchange()
    plan = agree_plan(exchange, [], watched, tasks)
    residual = ResidualConverter(plan, exchange, watched, tasks, chunk_target_bytes=1 << 20)
    owner = DeltaOwner(OwnerId(0), [], residual=residual)
    owner.capture(Version(0))
    return owner


def overwrites_of(owner: DeltaOwner, attempt: int) -> list[Item]:
    buckets = owner.stream(AttemptMode.OVERWRITE, {}, attempt=AttemptId(attempt))
    return [item for bucket in buckets for item in bucket.items]


# -- B14: shared scales


@pytest.mark.parametrize("indirect", [False, True])
@pytest.mark.parametrize("target", ["BF16", "F16", "F8_E4M3", "F8_E5M2"])
def test_b14_a_changed_scale_sends_every_output_whose_bits_change_and_no_other(target: str, indirect: bool) -> None:
    """x stays; the scale moves by a little, directly or through an amax that feeds it."""
    outputs = [TensorMeta("one", (4, 8), target), TensorMeta("two", (32,), target)]
    x = np.random.default_rng(2).standard_normal(32).astype("<f4").view("<u4").copy()
    x[:4] = [0, 0x80000000, 0x7FC00001, 0x7F800000]
    scale = np.array([0.5], dtype="<f4").view("<u4").copy()

    def convert(_: TensorMeta) -> Words:
        return ScaledCast("F32", target, float(scale.view("<f4")[0])).apply(x)

    steps = {"scale": ("amax",)} if indirect else None
    owner = residual_owner(outputs, convert, {"x": x, "amax" if indirect else "scale": scale}, "F32", steps)
    before = convert(outputs[0])
    assert overwrites_of(owner, 1) == []
    scale += np.uint32(1 << 17)
    after = convert(outputs[0])
    wanted = {at: int(after[at]) for at in np.flatnonzero(before != after)}
    assert 0 < len(wanted) < 32
    assert {item.tensor.name: entries([item]) for item in overwrites_of(owner, 2)} == {"one": wanted, "two": wanted}


# -- B17: the caller's base

SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "flipped bit": lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
    "cut": lambda data: data[:-20],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("way", ["new directory", "in place"])
@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("dtype", ["BF16", "F32", "I64"])
def test_b17_a_refused_delta_leaves_the_callers_base_as_it_was(
    dtype: str, spoil: str, way: str, tmp_path: Path
) -> None:
    """The second of two payloads is damaged, so that the first one could have been applied already."""
    old = {name: tensor(dtype, (50,), seed) for seed, name in enumerate(("a", "b", "c"))}
    base = write_checkpoint(tmp_path / "base", old)
    new = write_checkpoint(tmp_path / "new", {name: flipped(each, 3, 80) for name, each in old.items()})
    delta = tmp_path / "delta"
    diff(base, new, delta, codec=CodecConfig(chunk_target_bytes=64, bucket_target_bytes=64))
    payloads = sorted(path for path in delta.iterdir() if path.suffix == ".dcrp")
    assert len(payloads) > 1
    payloads[-1].write_bytes(SPOILT[spoil](payloads[-1].read_bytes()))
    before = content(base)
    with pytest.raises(NemoDcrError):
        apply_in_place(base, [delta]) if way == "in place" else apply(base, [delta], tmp_path / "out")
    assert content(base) == before
    assert not (tmp_path / "out").exists()
