"""bits: names, widths and views of stored words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_dcr import bits
from nemo_dcr.bits import tensors
from nemo_dcr.errors import UnsupportedDtype

TORCH_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=lambda dtype: str(dtype)
)
KNOWN = sorted(bits.WIDTHS)
FLOAT_PATTERNS = {
    "BF16": [0x7FC0, 0x7FC1, 0xFFC0, 0x7F81, 0x8000, 0x0000, 0x0001, 0x8001, 0x7F80, 0x3F80],
    "F16": [0x7E01, 0xFE00, 0x7C01, 0x8000, 0x0001, 0x8001, 0x3C00],
    "F32": [0x7FC00001, 0xFFC00000, 0x7F800001, 0x80000000, 0x00000001, 0x80000001],
    "F64": [0x7FF8000000000001, 0xFFF8000000000000, 0x7FF0000000000001, 0x8000000000000000, 1],
    "F8_E4M3": list(range(256)),
    "F8_E5M2": list(range(256)),
    "F8_E8M0": list(range(256)),
}


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_torch_dtype_has_words_or_is_refused_by_type(dtype: torch.dtype) -> None:
    names = [name for name in KNOWN if tensors.torch_dtype(name) is dtype]
    if names:
        assert [tensors.dtype_name(dtype)] == names
        assert bits.width(names[0]) == dtype.itemsize == bits.unsigned(names[0]).itemsize
    else:
        with pytest.raises(UnsupportedDtype) as caught:
            tensors.dtype_name(dtype)
        assert caught.value.dtype == str(dtype)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.qint8, torch.quint4x2], ids=str)
def test_dtypes_without_a_word_of_at_most_eight_bytes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedDtype):
        tensors.dtype_name(dtype)


def test_every_dtype_that_safetensors_writes_for_torch_has_words() -> None:
    from safetensors.torch import _TYPES  # the table behind safe_open

    unknown = {name for name, dtype in _TYPES.items() if dtype.itemsize <= 8 and name not in bits.WIDTHS}
    assert unknown == set()
    for name, dtype in _TYPES.items():
        assert tensors.dtype_name(dtype) == name


@pytest.mark.parametrize("name", ["", "BF17", "bf16", "F6_E2M3", "bfloat16", "C128"])
def test_an_unknown_name_is_a_typed_error(name: str) -> None:
    with pytest.raises(UnsupportedDtype):
        bits.width(name)
    with pytest.raises(UnsupportedDtype):
        bits.unsigned(name)
    with pytest.raises(UnsupportedDtype):
        bits.words(b"", name)
    with pytest.raises(UnsupportedDtype):
        tensors.torch_dtype(name)


@pytest.mark.parametrize("nbytes", [0, 3, 16])
def test_only_powers_of_two_up_to_eight_bytes_are_widths(nbytes: int) -> None:
    with pytest.raises(UnsupportedDtype):
        bits.unsigned_of_width(nbytes)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,), (2, 3), (3, 1, 5)], ids=str)
def test_words_survive_the_way_through_a_tensor(name: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(7)
    count = int(np.prod(shape))
    flat = bits.words(rng.bytes(count * bits.width(name)), name)
    if name == "BOOL":
        flat = flat & 1
    tensor = tensors.tensor_from_words(flat, name, shape)
    assert tensor.dtype is tensors.torch_dtype(name)
    assert tuple(tensor.shape) == shape
    assert bits.equal_words(tensors.copied_words(tensor), flat)
    assert bits.equal_words(tensors.resident_words(tensor), flat)


@pytest.mark.parametrize("name", sorted(FLOAT_PATTERNS))
def test_nan_payloads_negative_zero_and_subnormals_keep_their_bits(name: str) -> None:
    flat = np.array(FLOAT_PATTERNS[name], dtype=bits.unsigned(name))
    tensor = tensors.tensor_from_words(flat, name, (len(flat),))
    assert tensors.copied_words(tensor).tolist() == FLOAT_PATTERNS[name]


def test_equality_is_of_bits_not_of_numbers() -> None:
    zero, negative_zero = np.array([0x0000], "<u2"), np.array([0x8000], "<u2")
    nan = np.array([0x7FC1], "<u2")
    assert not bits.equal_words(zero, negative_zero)
    assert bits.equal_words(nan, nan.copy())
    assert not bits.equal_words(nan, np.array([0x7FC0], "<u2"))
    assert not bits.equal_words(nan, nan.astype("<u4"))
    assert not bits.equal_words(zero, np.zeros(2, "<u2"))


def test_resident_words_alias_the_storage() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    tensors.resident_words(tensor)[4] = 0x7FC1
    assert tensors.copied_words(tensor).tolist() == [0, 0, 0, 0, 0x7FC1, 0]
    scalar = torch.tensor(1.0)
    tensors.resident_words(scalar)[0] = 0x80000000
    assert tensors.copied_words(scalar).tolist() == [0x80000000]


def test_copied_words_do_not_alias() -> None:
    tensor = torch.zeros(4, dtype=torch.int32)
    tensors.copied_words(tensor)[0] = 1
    assert tensors.copied_words(tensor).tolist() == [0, 0, 0, 0]


def test_copied_words_of_any_strides_are_those_of_the_contiguous_tensor() -> None:
    base = torch.arange(60, dtype=torch.int16).reshape(5, 12).view(torch.bfloat16)
    for view in (base.t(), base[:, 3], base[:, ::2], base[1:3, 4:7], base.expand(2, 5, 12), base[::2].t()):
        expected = [int(x) for x in view.view(torch.int16).reshape(-1).tolist()]
        assert tensors.copied_words(view).tolist() == expected


def test_resident_words_refuse_a_view_that_they_cannot_alias() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        tensors.resident_words(torch.zeros(3, 4).t())
    with pytest.raises(ValueError, match="CPU"):
        tensors.resident_words(torch.zeros(3, device="meta"))


def test_lazily_conjugated_tensors_are_copied_right_and_never_aliased() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    lazy = values.conj()
    assert bits.equal_words(tensors.copied_words(lazy), tensors.copied_words(values.conj().resolve_conj()))
    assert bits.equal_words(tensors.copied_words(lazy.imag), tensors.copied_words(torch.tensor([-2.0, 4.0])))
    with pytest.raises(ValueError, match="lazily"):
        tensors.resident_words(lazy)


def test_a_tensor_that_needs_grad_has_words() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, -0.0]))
    tensors.resident_words(parameter)[1] = 0
    assert tensors.copied_words(parameter).tolist() == [0x3F800000, 0]


def test_tensor_from_words_refuses_other_widths_and_counts() -> None:
    with pytest.raises(ValueError, match="cannot be elements"):
        tensors.tensor_from_words(np.array([70000], "<u4"), "BF16", (1,))
    with pytest.raises(ValueError, match="do not fill"):
        tensors.tensor_from_words(np.zeros(5, "<u2"), "BF16", (2, 3))
    with pytest.raises(ValueError, match="do not fill"):
        tensors.tensor_from_words(np.zeros(0, "<u2"), "BF16", ())


def test_tensor_from_words_copies_read_only_memory() -> None:
    tensor = tensors.tensor_from_words(bits.words(b"\x01\x00\x02\x00", "BF16"), "BF16", (2,))
    tensor.zero_()
    assert tensors.copied_words(tensor).tolist() == [0, 0]


@given(data=st.binary(max_size=64), name=st.sampled_from(KNOWN))
def test_words_of_bytes_are_little_endian_elements(data: bytes, name: str) -> None:
    width = bits.width(name)
    if len(data) % width:
        with pytest.raises(ValueError, match="multiple"):
            bits.words(data, name)
        return
    expected = [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]
    assert bits.words(data, name).tolist() == expected
    assert bits.words(np.frombuffer(data, np.uint8), name).tolist() == expected


def test_words_alias_a_writable_buffer_and_refuse_a_strided_one() -> None:
    buffer = bytearray(4)
    bits.words(buffer, "BF16")[1] = 0xABCD
    assert buffer == b"\x00\x00\xcd\xab"
    array = np.zeros((2, 2), np.float32)
    bits.words(array, "F32")[3] = 1
    assert array.view("<u4").tolist() == [[0, 0], [0, 1]]
    assert bits.words(np.array(1.0), "F64").tolist() == [0x3FF0000000000000]
    assert bits.words(np.zeros((0, 3), np.float32), "BF16").tolist() == []
    with pytest.raises(ValueError, match="contiguous"):
        bits.words(array.T, "F32")
    with pytest.raises(ValueError, match="contiguous"):
        bits.words(memoryview(b"abcdefgh")[::2], "BF16")
