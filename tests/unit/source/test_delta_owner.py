"""The owner emits the complete changed set, and nothing but it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_dcr.bits import Words
from nemo_dcr.bits.tensors import tensor_from_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Encoding, Item, PathClass
from nemo_dcr.config import CodecConfig
from nemo_dcr.errors import AttemptFailed, ConditionViolated, InternalError, UnsupportedMapping
from nemo_dcr.ids import CandidateId, OwnerId, Version
from nemo_dcr.record import AttemptMode
from nemo_dcr.source.baseline import BaselineState, committed
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.source.projection import Cast, Identity, ScaledCast
from nemo_dcr.source.tasks import AffineTask, tensor_reader
from nemo_dcr.testing.source_cases import apply_items, changed_set, changed_words, random_words

V0, V1 = Version(0), Version(1)
DTYPES = ("BF16", "F32", "F16", "F8_E4M3", "I64", "U8", "BOOL")
TINY = CodecConfig(chunk_target_bytes=64, bucket_target_bytes=200)


def items_of(owner: DeltaOwner, mode: AttemptMode, path: PathClass = PathClass.XOR, **kwargs: object) -> list[Item]:
    classes = {tensor.name: path for tensor in owner.tensor_table()}
    return [item for bucket in owner.stream(mode, classes, **kwargs) for item in bucket.items]  # type: ignore[arg-type]


def fingerprint(items: list[Item]) -> list[tuple[object, ...]]:
    return [(i.tensor, i.encoding, i.start, i.flat_indices().tobytes(), i.values.tobytes()) for i in items]


@dataclass
class Trainer:
    """Full canonical words of two versions, cut into boxes that random owners hold. Shards are strided tensors."""

    old: dict[str, Words]
    new: dict[str, Words]
    owners: list[DeltaOwner]
    live: dict[str, Words]

    def become(self, words: dict[str, Words]) -> None:
        for name in self.live:
            self.live[name][:] = words[name]


@st.composite
def trainers(draw: st.DrawFn) -> Trainer:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old, new, live = {}, {}, {}
    tasks: list[list[AffineTask]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        tensor = TensorMeta(f"t{number}", shape, draw(st.sampled_from(DTYPES)))
        old[tensor.name] = random_words(rng, tensor.dtype, tensor.numel)
        rate = draw(st.sampled_from([0.0, 0.1, 1.0]))
        new[tensor.name] = changed_words(rng, tensor.dtype, old[tensor.name], rate)
        live[tensor.name] = old[tensor.name].copy()
        for box in _cut(draw, tensor):
            tasks[draw(st.integers(0, len(tasks) - 1))].append(AffineTask.identity(box, _reader(box, live)))
    owners = [DeltaOwner(OwnerId(rank), owned, config=TINY) for rank, owned in enumerate(tasks)]
    for owner in owners:
        owner.capture(V0)
    return Trainer(old, new, owners, live)


def _cut(draw: st.DrawFn, tensor: TensorMeta) -> list[BoxMap]:
    axes = tuple(draw(st.permutations(range(len(tensor.shape)))))
    if not tensor.shape:
        return [BoxMap.whole(tensor)]
    axis = draw(st.integers(0, len(tensor.shape) - 1))
    bounds = sorted(draw(st.lists(st.integers(0, tensor.shape[axis]), max_size=2)))
    boxes = []
    for low, high in zip([0, *bounds], [*bounds, tensor.shape[axis]], strict=True):
        start = tuple(low if a == axis else 0 for a in range(len(tensor.shape)))
        extent = tuple(high - low if a == axis else n for a, n in enumerate(tensor.shape))
        boxes.append(BoxMap.box(tensor, start, extent, axes=axes))
    return list({box.label: box for box in boxes}.values())


def _reader(box: BoxMap, live: dict[str, Words]):  # type: ignore[no-untyped-def]
    """Read the box out of a torch tensor over the full words: a strided, transposed, non-contiguous view (B7)."""
    name, dtype = box.tensor.name, box.tensor.dtype

    def get() -> torch.Tensor:
        full = tensor_from_words(live[name], dtype, box.view)
        corner = tuple(slice(s, s + n) for s, n in zip(box.start, box.extent, strict=True))
        return full[corner].permute(box.axes)

    return tensor_reader(get, box.label)


@given(trainers())
def test_xor_and_overwrite_give_exactly_the_changed_set(trainer: Trainer) -> None:
    trainer.become(trainer.new)
    expected = changed_set(trainer.old, trainer.new)
    for mode, path in (
        (AttemptMode.XOR, PathClass.XOR),
        (AttemptMode.XOR, PathClass.OVERWRITE),
        (AttemptMode.OVERWRITE, PathClass.XOR),
    ):
        full = {name: words.copy() for name, words in trainer.old.items()}
        items = [item for owner in trainer.owners for item in items_of(owner, mode, path, base=V0)]
        assert apply_items(full, items) == expected
        assert all(full[name].tobytes() == trainer.new[name].tobytes() for name in full)
        wanted = Encoding.XOR if mode is AttemptMode.XOR and path is PathClass.XOR else Encoding.OVERWRITE
        assert {item.encoding for item in items} <= {wanted}
        counts = [owner.counts for owner in trainer.owners]
        assert sum(c.source_elements for c in counts) == sum(len(words) for words in trainer.old.values())
        assert sum(c.changed_elements for c in counts) == len(expected)
        assert sum(c.emitted for c in counts) == sum(c.emitted_changed for c in counts) == len(expected)
        assert sum(c.xor_items + c.overwrite_items for c in counts) == len(items)


@given(trainers())
def test_dense_sends_the_candidate_and_restore_the_baseline(trainer: Trainer) -> None:
    trainer.become(trainer.new)
    for mode, wanted in ((AttemptMode.DENSE, trainer.new), (AttemptMode.RESTORE, trainer.old)):
        rng = np.random.default_rng(7)
        dirty = {name: rng.integers(0, 2, len(words)).astype(words.dtype) for name, words in trainer.old.items()}
        written = apply_items(dirty, [item for owner in trainer.owners for item in items_of(owner, mode)])
        assert all(dirty[name].tobytes() == wanted[name].tobytes() for name in dirty)
        assert len(written) == sum(len(words) for words in wanted.values())
    assert all(not owner.counts.compared for owner in trainer.owners)


@given(trainers())
def test_a_retry_recomputes_the_same_complete_changed_set(trainer: Trainer) -> None:
    trainer.become(trainer.new)
    for owner in trainer.owners:
        first = fingerprint(items_of(owner, AttemptMode.OVERWRITE))
        part = owner.stream(AttemptMode.OVERWRITE, {})
        next(part, None)
        part.close()  # type: ignore[attr-defined]
        assert fingerprint(items_of(owner, AttemptMode.OVERWRITE)) == first


@given(trainers())
def test_after_the_update_the_baseline_is_the_candidate_and_nothing_is_left_to_send(trainer: Trainer) -> None:
    trainer.become(trainer.new)
    for owner in trainer.owners:
        owner.update_baseline(V1)
        owner.update_baseline(V1)
        assert owner.tag in (None, committed(V1))
        assert owner.baseline_bytes == sum(words.nbytes for _, _, words in owner.tracker_words())
        for tensor, box, words in owner.tracker_words():
            assert words.tobytes() == box.take(trainer.new[tensor.name]).tobytes()
        assert items_of(owner, AttemptMode.XOR, base=V1) == []


def single(old: list[int], new: list[int], dtype: str = "BF16", **task: object) -> tuple[DeltaOwner, Words]:
    """An owner of one tensor whose live words are now `new`."""
    kind = {"BF16": "<u2", "F32": "<u4"}[dtype]
    live = np.array(old, dtype=kind)
    box = BoxMap.whole(TensorMeta("w", (len(old),), str(task.get("target", dtype))))
    projection = task.get("projection", Identity(dtype))
    owner = DeltaOwner(OwnerId(0), [AffineTask(map=box, projection=projection, read=lambda: live)])  # type: ignore[arg-type]
    owner.capture(V0)
    live[:] = new
    return owner, live


def test_stored_bits_decide_not_values() -> None:
    """B1: a zero that changes its sign is sent, a NaN that stays the same is not, a NaN payload that moves is."""
    owner, _ = single([0x0000, 0x7FC0, 0x7FC0, 0x0001], [0x8000, 0x7FC0, 0x7FC1, 0x0001])
    (item,) = items_of(owner, AttemptMode.XOR)
    assert item.flat_indices().tolist() == [0, 2]
    assert item.values.tolist() == [0x8000, 0x0001]


def test_a_change_of_the_high_byte_alone_is_seen() -> None:
    """B2 (a)."""
    owner, _ = single([0x3F80, 0x3F80], [0x3F80, 0x4080])
    (item,) = items_of(owner, AttemptMode.OVERWRITE)
    assert (item.start, item.values.tolist()) == (1, [0x4080])


def test_several_optimizer_steps_between_refits_are_one_change_and_a_round_trip_is_none() -> None:
    """B2 (b) and (c): comparison is with the committed baseline, not with the last step."""
    owner, live = single([1, 2, 3], [9, 2, 3])
    live[:] = [9, 8, 3]
    (item,) = items_of(owner, AttemptMode.XOR)
    assert item.flat_indices().tolist() == [0, 1]
    live[:] = [1, 2, 3]
    assert items_of(owner, AttemptMode.XOR) == []
    assert owner.counts.changed_elements == 0


def test_one_ulp_of_an_fp32_router_bias_in_a_bf16_model_is_one_change_of_its_own_width() -> None:
    """B9."""
    owner, _ = single([0x40DA2502, 0x40E204A8], [0x40DA2503, 0x40E204A8], "F32")
    (item,) = items_of(owner, AttemptMode.XOR)
    assert (item.tensor.dtype, item.values.dtype, item.values.tolist()) == ("F32", np.dtype("<u4"), [1])


@pytest.mark.parametrize(
    "drifted",
    [
        torch.zeros(6, dtype=torch.float16),
        torch.zeros(6, dtype=torch.float32),
        torch.zeros(2, 3, dtype=torch.bfloat16),
        torch.zeros(5, dtype=torch.bfloat16),
    ],
    ids=["same width", "other width", "same numel", "other numel"],
)
@pytest.mark.parametrize("mode", [AttemptMode.XOR, AttemptMode.OVERWRITE, AttemptMode.DENSE])
def test_drift_of_dtype_or_shape_fails_the_attempt(drifted: torch.Tensor, mode: AttemptMode) -> None:
    """B8."""
    live = [torch.zeros(6, dtype=torch.bfloat16)]
    box = BoxMap.whole(TensorMeta("w", (6,), "BF16"))
    owner = DeltaOwner(OwnerId(0), [AffineTask.identity(box, tensor_reader(lambda: live[0], box.label))])
    owner.capture(V0)
    live[0] = drifted
    with pytest.raises(ConditionViolated, match="declared") as caught:
        items_of(owner, mode)
    assert caught.value.condition == "SC4"
    with pytest.raises(ConditionViolated, match="SC4"):
        owner.update_baseline(V1)


def test_plain_word_readers_are_checked_too() -> None:
    live = [np.zeros(4, dtype="<u2")]
    box = BoxMap.whole(TensorMeta("w", (4,), "BF16"))
    owner = DeltaOwner(OwnerId(0), [AffineTask.identity(box, lambda: live[0])])
    owner.capture(V0)
    for drifted in (np.zeros(4, dtype="<u4"), np.zeros(3, dtype="<u2"), np.zeros((2, 2), dtype="<u2")):
        live[0] = drifted
        with pytest.raises(ConditionViolated, match="SC4"):
            items_of(owner, AttemptMode.XOR)


@pytest.mark.parametrize("projection", [Cast("F32", "BF16"), ScaledCast("F32", "BF16", 0.25)])
def test_cast_and_scaled_values_are_overwrites_and_may_exceed_the_changed_bits(projection) -> None:  # type: ignore[no-untyped-def]
    """A change below the rounding boundary is emitted but changes no canonical bit: D_chg is smaller than D."""
    old, new = [0x3F800000, 0x3F800000, 0x7FC00001], [0x3F800001, 0x40000000, 0x7FC00001]
    owner, live = single(old, new, "F32", projection=projection, target="BF16")
    (item,) = items_of(owner, AttemptMode.XOR, PathClass.XOR)
    assert item.encoding is Encoding.OVERWRITE
    assert item.flat_indices().tolist() == [0, 1]
    assert item.values.tolist() == projection.apply(live[:2].copy()).tolist()
    assert (owner.counts.changed_elements, owner.counts.emitted, owner.counts.emitted_changed) == (2, 2, 1)
    (everything,) = items_of(owner, AttemptMode.DENSE)
    assert everything.values.tolist() == projection.apply(live).tolist()
    (restored,) = items_of(owner, AttemptMode.RESTORE)
    assert restored.values.tolist() == projection.apply(np.array(old, dtype="<u4")).tolist()


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([Cast("F32", "BF16"), Cast("F32", "F8_E4M3"), ScaledCast("F32", "F16", 0.3)]),
)
def test_destinations_with_changed_bits_are_a_subset_of_the_emitted_ones(seed, projection) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    old = random_words(rng, "F32", 60)
    new = changed_words(rng, "F32", old, 0.3)
    owner, _ = single(old.tolist(), new.tolist(), "F32", projection=projection, target=projection.target)
    before, after = {"w": projection.apply(old)}, {"w": projection.apply(new)}
    full = {"w": before["w"].copy()}
    emitted = apply_items(full, items_of(owner, AttemptMode.OVERWRITE))
    changed = changed_set(before, after)
    assert changed.items() <= emitted.items()
    assert full["w"].tolist() == after["w"].tolist()
    assert owner.counts.emitted_changed == len(changed)


def test_several_boxes_of_one_tensor_give_one_item() -> None:
    tensor = TensorMeta("w", (4, 4), "BF16")
    live = np.zeros(16, dtype="<u2")
    boxes = [BoxMap.box(tensor, (0, column), (4, 2)) for column in (0, 2)]
    owner = DeltaOwner(OwnerId(0), [AffineTask.identity(box, lambda b=box: b.take(live)) for box in boxes])  # type: ignore[misc]
    owner.capture(V0)
    live[[1, 2, 3, 4]] = 5
    (item,) = items_of(owner, AttemptMode.XOR)
    assert (item.start, item.indices, item.count) == (1, None, 4)


def test_boxes_that_overlap_on_one_owner_fail_the_attempt() -> None:
    tensor = TensorMeta("w", (4,), "BF16")
    live = np.zeros(4, dtype="<u2")
    boxes = [BoxMap.whole(tensor), BoxMap.box(tensor, (1,), (2,))]
    owner = DeltaOwner(OwnerId(0), [AffineTask.identity(box, lambda b=box: b.take(live)) for box in boxes])  # type: ignore[misc]
    owner.capture(V0)
    live[1] = 1
    with pytest.raises(ConditionViolated, match="SC1"):
        items_of(owner, AttemptMode.XOR)


def test_a_shard_or_tensor_given_twice_is_refused() -> None:
    """B3: two records for one element would cancel each other."""
    task = AffineTask.identity(BoxMap.whole(TensorMeta("w", (1,), "BF16")), lambda: np.zeros(1, dtype="<u2"))
    with pytest.raises(UnsupportedMapping, match="SC1"):
        DeltaOwner(OwnerId(0), [task, task])


def test_an_owner_without_tasks_gives_no_chunks_and_has_no_tag() -> None:
    owner = DeltaOwner(OwnerId(3), [])
    owner.capture(V0)
    for mode in (AttemptMode.XOR, AttemptMode.OVERWRITE, AttemptMode.DENSE, AttemptMode.RESTORE):
        assert list(owner.chunks(mode, {})) == []
    owner.update_baseline(V1)
    assert (owner.tag, owner.tensor_table(), owner.baseline_bytes) == (None, (), 0)


def test_a_missing_path_class_fails_only_the_xor_attempt() -> None:
    owner, _ = single([1], [2])
    with pytest.raises(ConditionViolated, match="LC3"):
        list(owner.stream(AttemptMode.XOR, {}))
    assert len(list(owner.stream(AttemptMode.OVERWRITE, {}))) == 1


def test_a_baseline_that_is_not_the_committed_version_is_never_compared() -> None:
    """SC3: the tag is checked before the first chunk."""
    owner, _ = single([1], [2])
    with pytest.raises(ConditionViolated, match="record is at 1"):
        owner.stream(AttemptMode.XOR, {}, base=V1)
    owner.lose_baseline()
    for mode in (AttemptMode.XOR, AttemptMode.OVERWRITE, AttemptMode.RESTORE):
        with pytest.raises(ConditionViolated, match="lost"):
            owner.stream(mode, {})
    with pytest.raises(InternalError):
        owner.stream(AttemptMode.FINISH, {})


def test_a_torn_update_blocks_streams_until_it_is_repeated() -> None:
    """D19: no restore between the commit and the end of the baseline update."""
    tensors = [TensorMeta(name, (1,), "BF16") for name in ("a", "b")]
    live = {tensor.name: np.array([1], dtype="<u2") for tensor in tensors}
    broken = [False]

    def read(name: str) -> Words:
        if broken[0] and name == "b":
            raise MemoryError
        return live[name]

    owner = DeltaOwner(OwnerId(0), [AffineTask.identity(BoxMap.whole(t), lambda n=t.name: read(n)) for t in tensors])  # type: ignore[misc]
    owner.capture(V0)
    for words in live.values():
        words[:] = 2
    broken[0] = True
    with pytest.raises(MemoryError):
        owner.update_baseline(V1)
    assert owner.tag is not None
    assert owner.tag.state is BaselineState.UPDATING
    with pytest.raises(ConditionViolated, match="SC3"):
        owner.stream(AttemptMode.RESTORE, {})
    broken[0] = False
    owner.update_baseline(V1)
    assert owner.tag == committed(V1)


def test_a_lost_tracker_goes_on_densely_and_comes_back_with_the_commit() -> None:
    """D12."""
    owner, live = single([1, 2], [1, 9])
    owner.lose_baseline()
    (item,) = items_of(owner, AttemptMode.DENSE, base=V0)
    assert item.values.tolist() == [1, 9]
    assert not owner.counts.compared
    with pytest.raises(ConditionViolated, match="not committed"):
        owner.rebuild(V0, open_candidate=CandidateId("c"), committed_candidate=CandidateId("b"))
    owner.update_baseline(V1)
    assert owner.tag == committed(V1)
    live[0] = 4
    (item,) = items_of(owner, AttemptMode.XOR, base=V1)
    assert item.flat_indices().tolist() == [0]


def test_chunks_count_input_bytes_before_unchanged_elements_are_dropped() -> None:
    tensors = [TensorMeta(f"t{number}", (20,), "BF16") for number in range(5)]
    live = {tensor.name: np.zeros(20, dtype="<u2") for tensor in tensors}
    config = CodecConfig(chunk_target_bytes=80, bucket_target_bytes=100)
    tasks = [AffineTask.identity(BoxMap.whole(t), lambda n=t.name: live[n]) for t in tensors]  # type: ignore[misc]
    owner = DeltaOwner(OwnerId(0), tasks, config=config)
    owner.capture(V0)
    live["t0"][3] = live["t4"][1] = 1
    chunks = list(owner.chunks(AttemptMode.OVERWRITE, {}))
    assert [(len(chunk.items), chunk.input_bytes) for chunk in chunks] == [(1, 80), (0, 80), (1, 40)]
    assert (owner.counts.chunks, owner.counts.input_bytes) == (3, 200)
    buckets = list(owner.stream(AttemptMode.OVERWRITE, {}))
    assert [(len(bucket.items), bucket.input_bytes) for bucket in buckets] == [(2, 120)]


def test_a_stop_request_ends_the_stream_with_a_typed_error() -> None:
    owner, _ = single([1], [2])
    with pytest.raises(AttemptFailed, match="stopped"):
        items_of(owner, AttemptMode.OVERWRITE, stopped=lambda: True)
    assert len(items_of(owner, AttemptMode.OVERWRITE)) == 1
