"""Residual conversion finds every changed canonical bit, with one rank and with several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_dcr.bits import Words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Encoding, Item, PathClass
from nemo_dcr.errors import AttemptFailed, ConditionViolated
from nemo_dcr.ids import AttemptId, OwnerId, Version
from nemo_dcr.record import AttemptMode
from nemo_dcr.source.assembly import assemble, pack_parts, unpack_parts
from nemo_dcr.source.baseline import committed
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.exchange import Exchange, LoneExchange
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.source.projection import ScaledCast
from nemo_dcr.source.residual import ResidualConverter
from nemo_dcr.source.setup import agree_plan
from nemo_dcr.source.tasks import Part, ResidualInput, ResidualTask
from nemo_dcr.testing.ranks import ThreadExchange, run_in_threads
from nemo_dcr.testing.source_cases import apply_items, changed_set, changed_words, random_words

V0, V1, V2 = Version(0), Version(1), Version(2)
OUT = TensorMeta("out", (4, 3), "BF16")


def watch(name: str, words: Words, dtype: str, shard: str = "0") -> ResidualInput:
    return ResidualInput(name=name, shard=shard, dtype=dtype, count=len(words), read=lambda: words)


def converts(
    convert: Callable[[TensorMeta], Sequence[Part]],
    depends: tuple[str, ...],
    outputs: tuple[TensorMeta, ...] = (OUT,),
    shard: str = "0",
) -> ResidualTask:
    return ResidualTask(name="convert", shard=shard, outputs=outputs, depends=depends, nbytes=1, convert=convert)


def owner_of(
    exchange: Exchange, inputs: Sequence[ResidualInput], tasks: Sequence[ResidualTask], chunk: int = 1 << 20
) -> DeltaOwner:
    plan = agree_plan(exchange, [], inputs, tasks)
    residual = ResidualConverter(plan, exchange, inputs, tasks, chunk_target_bytes=chunk)
    owner = DeltaOwner(OwnerId(exchange.rank), [], residual=residual)
    owner.capture(V0)
    return owner


def items_of(owner: DeltaOwner, attempt: int, mode: AttemptMode = AttemptMode.XOR) -> list[Item]:
    buckets = owner.stream(mode, {OUT.name: PathClass.XOR}, attempt=AttemptId(attempt))
    return [item for bucket in buckets for item in bucket.items]


def scaled(x: Words, scale: Words) -> Words:
    """out = BF16(x * scale): a shared factor, FP32 in and BF16 out."""
    factor = float(scale.view("<f4")[0])
    return ScaledCast("F32", "BF16", factor).apply(x)


def scale_owner(x: Words, scale: Words) -> DeltaOwner:
    def convert(tensor: TensorMeta) -> Sequence[Part]:
        return [Part(BoxMap.whole(tensor), scaled(x, scale))]

    return owner_of(
        LoneExchange(), [watch("x", x, "F32"), watch("scale", scale, "F32")], [converts(convert, ("x", "scale"))]
    )


def test_a_changed_scale_sends_all_outputs_whose_bits_change_and_only_those() -> None:
    """B14: x stays, the factor moves by one ulp; few outputs cross a rounding boundary."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal(12).astype("<f4").view("<u4").copy()
    x[:3] = [0x00000000, 0x80000000, 0x7FC00001]
    scale = np.array([0.5], dtype="<f4").view("<u4").copy()
    owner = scale_owner(x, scale)
    before = {"out": scaled(x, scale)}
    assert items_of(owner, 1) == []
    scale += np.uint32(1 << 12)
    after = {"out": scaled(x, scale)}
    expected = changed_set(before, after)
    assert 0 < len(expected) < 12
    full = {"out": before["out"].copy()}
    items = items_of(owner, 2)
    assert apply_items(full, items) == expected
    assert {item.encoding for item in items} == {Encoding.OVERWRITE}
    assert (owner.counts.changed_elements, owner.counts.source_elements) == (1, 13)
    assert owner.counts.emitted == owner.counts.emitted_changed == len(expected)


def test_an_input_change_that_converts_to_the_same_bits_sends_nothing() -> None:
    x = np.array([0x3F800000] * 12, dtype="<u4")
    scale = np.array([1.0], dtype="<f4").view("<u4").copy()
    owner = scale_owner(x, scale)
    x[5] += 1
    assert items_of(owner, 1) == []
    assert (owner.counts.changed_elements, owner.counts.emitted) == (1, 0)
    owner.update_baseline(V1)
    assert owner.tag == committed(V1)
    assert items_of(owner, 2) == []
    assert owner.counts.changed_elements == 0


def test_updates_follow_complete_streams_and_repeat_without_harm() -> None:
    x = np.array([0x3F800000] * 12, dtype="<u4")
    scale = np.array([1.0], dtype="<f4").view("<u4").copy()
    owner = scale_owner(x, scale)
    x[2] = 0x40000000
    with pytest.raises(ConditionViolated, match="no complete stream"):
        owner.update_baseline(V1)
    owner = scale_owner(np.array([0x3F800000] * 12, dtype="<u4"), scale)
    owner = scale_owner(x, scale)
    x[3] = 0x40000000
    first = items_of(owner, 1)
    second = items_of(owner, 2, AttemptMode.OVERWRITE)
    assert [item.values.tolist() for item in first] == [item.values.tolist() for item in second] == [[0x4000]]
    owner.update_baseline(V1)
    owner.update_baseline(V1)
    ((tensor, _, words),) = list(owner.tracker_words())
    assert (tensor, words.tolist()) == (OUT, scaled(x, scale).tolist())
    assert items_of(owner, 3) == []
    x[0] = 0x7FC00001
    assert len(items_of(owner, 4)) == 1
    owner.update_baseline(V2)


def test_an_update_never_takes_the_changes_of_an_earlier_candidate() -> None:
    """The stream of a second candidate was cut off, so this rank does not know that candidate's residual changes."""
    x = np.array([0x3F800000] * 12, dtype="<u4")
    owner = scale_owner(x, np.array([1.0], dtype="<f4").view("<u4").copy())
    x[3] = 0x40000000
    assert len(items_of(owner, 1)) == 1
    x[4] = 0x40000000
    chunks = owner.chunks(AttemptMode.OVERWRITE, {}, attempt=AttemptId(2))
    next(chunks)
    chunks.close()
    with pytest.raises(ConditionViolated, match="no complete stream"):
        owner.update_baseline(V1)
    assert owner.tag == committed(V0)


def test_restore_sends_the_residual_baseline_and_dense_the_candidate() -> None:
    x = np.array([0x3F800000] * 12, dtype="<u4")
    scale = np.array([1.0], dtype="<f4").view("<u4").copy()
    owner = scale_owner(x, scale)
    old = scaled(x, scale)
    x[:] = 0x40000000
    (restored,) = items_of(owner, 1, AttemptMode.RESTORE)
    assert (restored.values.tolist(), restored.indices) == (old.tolist(), None)
    (dense,) = items_of(owner, 2, AttemptMode.DENSE)
    assert dense.values.tolist() == [0x4000] * 12


def test_a_lost_residual_baseline_comes_back_with_a_dense_attempt() -> None:
    """D12: the whole candidate is kept until the commit and becomes the baseline."""
    x = np.array([0x3F800000] * 12, dtype="<u4")
    scale = np.array([1.0], dtype="<f4").view("<u4").copy()
    owner = scale_owner(x, scale)
    owner.lose_baseline()
    x[1] = 0x40000000
    with pytest.raises(ConditionViolated, match="SC3"):
        items_of(owner, 1)
    assert len(items_of(owner, 2, AttemptMode.DENSE)) == 1
    owner.update_baseline(V1)
    assert owner.tag == committed(V1)
    assert items_of(owner, 3) == []


def test_padding_rows_never_leave_the_trainer() -> None:
    """B13: trainer rows 130, canonical rows 128."""
    canonical = TensorMeta("out", (128, 2), "BF16")
    rows = np.zeros(130 * 2, dtype="<u2")

    def trim(tensor: TensorMeta) -> Sequence[Part]:
        return [Part(BoxMap.whole(tensor), rows[: 128 * 2])]

    owner = owner_of(LoneExchange(), [watch("x", rows, "BF16")], [converts(trim, ("x",), (canonical,))])
    rows[129 * 2] = 1
    assert items_of(owner, 1) == []
    assert owner.counts.changed_elements == 1
    rows[127 * 2] = 1
    (item,) = items_of(owner, 2)
    assert item.flat_indices().tolist() == [254]


def test_a_tied_weight_sends_both_of_its_names() -> None:
    """B4: the head follows the embedding."""
    head = TensorMeta("head", (4, 3), "BF16")
    words = np.zeros(12, dtype="<u2")

    def both(tensor: TensorMeta) -> Sequence[Part]:
        return [Part(BoxMap.whole(tensor), words.copy())]

    owner = owner_of(LoneExchange(), [watch("x", words, "BF16")], [converts(both, ("x",), (OUT, head))])
    words[4] = 9
    assert [(i.tensor.name, i.start, i.values.tolist()) for i in items_of(owner, 1)] == [
        ("head", 4, [9]),
        ("out", 4, [9]),
    ]


HALF = (BoxMap.box(OUT, (0, 0), (2, 3)), BoxMap.box(OUT, (2, 0), (2, 3)))


def parts(*made: tuple[BoxMap, int]) -> list[Part]:
    return [Part(box, np.full(box.domain, word, dtype="<u2")) for box, word in made]


def test_parts_that_agree_bit_for_bit_may_overlap() -> None:
    middle = BoxMap.box(OUT, (1, 0), (2, 3))
    assembled = assemble(OUT, parts((HALF[0], 0x7FC1), (middle, 0x7FC1), (HALF[1], 0x7FC1)))
    assert assembled.tolist() == [0x7FC1] * 12


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (parts((HALF[0], 1)), "uncovered"),
        (parts((HALF[0], 0x0000), (BoxMap.whole(OUT), 0x8000)), "differ"),
        (parts((BoxMap.whole(TensorMeta("other", (4, 3), "BF16")), 1)), "instead of"),
        ([], "uncovered"),
    ],
    ids=["gap", "signs of zero disagree", "another tensor", "nothing"],
)
def test_parts_must_cover_and_agree(made: list[Part], message: str) -> None:
    with pytest.raises(ConditionViolated, match=message) as caught:
        assemble(OUT, made)
    assert caught.value.condition == "SC6"


@given(st.integers(0, 2**32 - 1), st.integers(0, 4))
def test_parts_survive_the_way_as_bytes(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        tensor = TensorMeta(f"t{number}", (int(rng.integers(0, 4)), 3), str(rng.choice(["BF16", "F32", "U8"])))
        box = BoxMap.box(tensor, (0, 1), (tensor.shape[0], 2), axes=(1, 0))
        made.append(Part(box, random_words(rng, tensor.dtype, box.domain)))
    message = pack_parts(made)
    back = unpack_parts(message)
    assert [(part.map, part.words.tobytes()) for part in back] == [(p.map, p.words.tobytes()) for p in made]
    for broken in (message[:-1], message + b"x", message[:9]):
        if made and broken != message:
            with pytest.raises(ConditionViolated, match="SC6"):
                unpack_parts(broken)


def split_rows(words: Words, box: BoxMap) -> Callable[[TensorMeta], Sequence[Part]]:
    return lambda tensor: [Part(box, words.copy())]


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4), st.sampled_from([8, 64, 10_000]))
def test_ranks_convert_parts_and_one_of_them_emits_each_tensor(seed: int, world: int, chunk: int) -> None:
    """Random tensors split by rows over ranks, in chunks of one tensor, of some or of all."""
    rng = np.random.default_rng(seed)
    tensors = [TensorMeta(f"t{n}", (int(rng.integers(world, 9)), 3), "BF16") for n in range(4)]
    old = {t.name: random_words(rng, t.dtype, t.numel) for t in tensors}
    new = {n: changed_words(rng, "BF16", words, float(rng.choice([0, 0.2]))) for n, words in old.items()}

    def work(exchange: ThreadExchange) -> list[Item]:
        inputs, tasks, live = [], [], []
        for tensor in tensors:
            rows = tensor.shape[0] // world
            first = exchange.rank * rows
            count = tensor.shape[0] - first if exchange.rank == world - 1 else rows
            box = BoxMap.box(tensor, (first, 0), (count, 3))
            words = box.take(old[tensor.name])
            live.append((box, words))
            shard = str(exchange.rank)
            inputs.append(watch(f"source {tensor.name}", words, "BF16", shard))
            tasks.append(
                ResidualTask(
                    name=tensor.name,
                    shard=shard,
                    outputs=(tensor,),
                    depends=(f"source {tensor.name}",),
                    nbytes=1,
                    convert=split_rows(words, box),
                )
            )
        owner = owner_of(exchange, inputs, tasks, chunk)
        for box, words in live:
            words[:] = box.take(new[box.tensor.name])
        found = items_of(owner, 1)
        owner.update_baseline(V1)
        assert owner.tag in (None, committed(V1))
        for tensor, _, words in owner.tracker_words():
            assert words.tobytes() == new[tensor.name].tobytes()
        assert items_of(owner, 2) == []
        return found

    items = [item for found in run_in_threads(world, work) for item in found]
    full = {name: words.copy() for name, words in old.items()}
    assert apply_items(full, items) == changed_set(old, new)


def three_chunk_owner(exchange: ThreadExchange, fail_on: str = "") -> DeltaOwner:
    """Three tensors in three rounds; each rank has one half of each."""
    tensors = [TensorMeta(f"t{n}", (4, 3), "BF16") for n in range(3)]
    words = np.zeros(6, dtype="<u2")
    captured: list[bool] = []

    def convert(tensor: TensorMeta) -> Sequence[Part]:
        if captured and tensor.name == fail_on:
            raise ConditionViolated("SC6", tensor.name, "the conversion broke")
        return [Part(BoxMap.box(tensor, (exchange.rank * 2, 0), (2, 3)), words.copy())]

    shard = str(exchange.rank)
    owner = owner_of(
        exchange, [watch("x", words, "BF16", shard)], [converts(convert, ("x",), tuple(tensors), shard)], chunk=1
    )
    words[0] = 1
    captured.append(True)
    return owner


@pytest.mark.parametrize("chunks_before", [0, 1, 2])
def test_a_rank_that_leaves_early_stops_the_others_and_a_retry_succeeds(chunks_before: int) -> None:
    def work(exchange: ThreadExchange) -> int:
        owner = three_chunk_owner(exchange)
        chunks = owner.chunks(AttemptMode.XOR, {}, attempt=AttemptId(1))
        if exchange.rank == 0:
            for _ in range(chunks_before + 1):
                next(chunks)
            chunks.close()
        elif chunks_before < 2:
            with pytest.raises(AttemptFailed, match="stopped at attempt/1"):
                list(chunks)
        else:
            list(chunks)
        return sum(item.count for item in items_of(owner, 2, AttemptMode.OVERWRITE))

    assert sum(run_in_threads(2, work)) == 3 * 2


def test_a_rank_whose_conversion_fails_stops_the_others() -> None:
    def work(exchange: ThreadExchange) -> str:
        owner = three_chunk_owner(exchange, fail_on="t1" if exchange.rank == 1 else "")
        with pytest.raises(AttemptFailed) as caught:
            items_of(owner, 1)
        return str(caught.value)

    stopped, broke = run_in_threads(2, work)
    assert "stopped at attempt/1/1" in stopped
    assert "conversion broke" in broke


def test_a_rank_that_never_starts_can_be_left_by_the_others() -> None:
    """stop_and_wait must return although another rank never came to the meeting."""

    def work(exchange: ThreadExchange) -> int:
        owner = three_chunk_owner(exchange)
        if exchange.rank == 0:
            with pytest.raises(AttemptFailed, match="stopped at"):
                list(owner.stream(AttemptMode.XOR, {}, attempt=AttemptId(1), stopped=lambda: True))
        return sum(item.count for item in items_of(owner, 2, AttemptMode.OVERWRITE))

    assert sum(run_in_threads(2, work)) == 3 * 2


def test_a_conversion_that_makes_another_tensor_is_refused() -> None:
    other = TensorMeta("other", (4, 3), "BF16")
    words = np.zeros(12, dtype="<u2")
    with pytest.raises(ConditionViolated, match="another tensor"):
        owner_of(
            LoneExchange(),
            [watch("x", words, "BF16")],
            [converts(lambda tensor: [Part(BoxMap.whole(other), words)], ("x",))],
        )
