"""Encoding: bf16 bits survive unchanged, floats are rounded as torch rounds them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.encoding import ENCODINGS, decode, encode, get_encoding
from dflash_cache.errors import UsageError


def all_patterns() -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).reshape(256, 256)


def test_every_finite_bf16_pattern_survives_the_round_trip_bit_for_bit():
    bits = all_patterns()
    finite = torch.isfinite(bits.view(torch.bfloat16))
    assert finite.sum() == 65536 - 2 * 128
    back = encode(decode(bits))
    assert torch.equal(back.int()[finite], bits.int()[finite])


def test_decode_copies_nothing():
    bits = all_patterns()
    states = decode(bits)
    assert states.dtype == torch.bfloat16
    assert states.data_ptr() == bits.data_ptr()


def test_encode_rounds_fp32_to_the_nearest_and_ties_to_even():
    halves = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8])
    expected = [1.0, 1 + 2**-6, 1 + 2**-7, -1.0]
    assert decode(encode(halves)).float().tolist() == expected


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_encode_agrees_with_torch_on_any_float(values):
    x = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(encode(x).int(), x.to(torch.bfloat16).view(torch.uint16).int())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.bfloat16])
def test_encode_takes_any_float_dtype_and_keeps_the_shape(dtype):
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    bits = encode(x.transpose(0, 1))
    assert bits.shape == (4, 3, 5)
    assert bits.dtype == torch.uint16
    assert torch.equal(decode(bits), x.transpose(0, 1).to(torch.bfloat16))


def test_the_formula_written_in_the_shard_gives_the_value_back_in_numpy():
    x = torch.randn(100, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    bits = encode(x).numpy()
    floats = (bits.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(floats, x.float().numpy())
    assert ENCODINGS["bf16"].formula == "float32 bits = uint16 << 16"
    assert ENCODINGS["bf16"].itemsize == 2


def test_an_unknown_encoding_is_a_usage_error_that_lists_the_known_ones():
    with pytest.raises(UsageError, match="'int3' is not known; the known encodings are: bf16"):
        get_encoding("int3")
