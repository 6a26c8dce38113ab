"""Encoding: bf16 bits survive unchanged; scaled codes err as little as their bits allow."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.encoding import (
    ENCODINGS,
    Codec,
    decode,
    encode,
    get_encoding,
    join_planes,
    split_planes,
)
from dflash_cache.errors import UsageError


def all_patterns() -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).reshape(256, 256)


def test_every_finite_bf16_pattern_survives_the_round_trip_bit_for_bit():
    bits = all_patterns()
    finite = torch.isfinite(bits.view(torch.bfloat16))
    assert finite.sum() == 65536 - 2 * 128
    back = encode(decode(bits)).states
    assert torch.equal(back.int()[finite], bits.int()[finite])


def test_decode_copies_nothing():
    bits = all_patterns()
    states = decode(bits)
    assert states.dtype == torch.bfloat16
    assert states.data_ptr() == bits.data_ptr()


def test_encode_rounds_fp32_to_the_nearest_and_ties_to_even():
    halves = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8])
    expected = [1.0, 1 + 2**-6, 1 + 2**-7, -1.0]
    assert decode(encode(halves).states).float().tolist() == expected


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_encode_agrees_with_torch_on_any_float(values):
    x = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(encode(x).states.int(), x.to(torch.bfloat16).view(torch.uint16).int())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.bfloat16])
def test_encode_takes_any_float_dtype_and_keeps_the_shape(dtype):
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    bits = encode(x.transpose(0, 1)).states
    assert bits.shape == (4, 3, 5)
    assert bits.dtype == torch.uint16
    assert torch.equal(decode(bits), x.transpose(0, 1).to(torch.bfloat16))


def test_the_formula_written_in_the_shard_gives_the_value_back_in_numpy():
    x = torch.randn(100, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    bits = encode(x).states.numpy()
    floats = (bits.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(floats, x.float().numpy())
    assert ENCODINGS["bf16"].formula == "float32 bits = uint16 << 16"
    assert ENCODINGS["bf16"].itemsize == 2


def test_an_unknown_encoding_is_a_usage_error_that_lists_the_known_ones():
    with pytest.raises(UsageError, match="'int3' is not known; the known encodings are: bf16"):
        get_encoding("int3")


def states_with_massive_activations(tokens: int = 400, seed: int = 0) -> torch.Tensor:
    """[S, T, D]: channels of very different size, a few of them huge at a document's start."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 3, 256, generator=make) * torch.logspace(-2, 1, 256)
    x[::50, :, 7] = 25_000 * torch.randn(tokens // 50, 3, generator=make).sign()
    x[::50, :, 100] = 2_000
    return x.to(torch.bfloat16)


def rms(states: torch.Tensor) -> torch.Tensor:
    return states.float().square().mean(0).sqrt()  # [T, D]


def error(states: torch.Tensor, name: str, scale: torch.Tensor | None = None) -> float:
    """Median over tokens and taps of the relative error."""
    encoded = encode(states, name, scale)
    back = decode(encoded.states, name, encoded.scales, scale)
    assert back.dtype == torch.bfloat16
    assert back.shape == states.shape
    wide = states.float()
    return float(((back.float() - wide).norm(dim=-1) / wide.norm(dim=-1)).median())


@pytest.mark.parametrize("seed", range(3))
def test_int8_errs_less_than_fp8_on_massive_activations(seed):
    states = states_with_massive_activations(seed=seed)
    scale = rms(states_with_massive_activations(seed=seed + 10))  # from other tokens
    assert error(states, "int8", scale) < 0.02
    assert error(states, "int8", scale) < error(states, "fp8") < 0.04


def test_without_its_equaliser_int8_would_lose_the_quiet_channels():
    states = states_with_massive_activations()[::50]
    flat = torch.ones(3, 256)
    encoded = encode(states, "int8", flat)
    back = decode(encoded.states, "int8", encoded.scales, flat)
    quiet = states[..., :7]
    assert (back[..., :7] == 0).all()
    scale = rms(states_with_massive_activations(seed=1))
    encoded = encode(states, "int8", scale)
    back = decode(encoded.states, "int8", encoded.scales, scale)[..., :7]
    assert ((back - quiet).float().norm() / quiet.float().norm()) < 0.2


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_scales_are_one_float_per_token_and_tap_and_codes_use_the_whole_range(name):
    states = states_with_massive_activations()
    scale = rms(states)
    encoded = encode(states, name, scale)
    assert encoded.states.shape == states.shape
    assert encoded.states.element_size() == 1
    assert encoded.scales.shape == states.shape[:2]
    assert encoded.scales.dtype == torch.float32
    codes = encoded.states
    largest = codes.view(torch.float8_e4m3fn) if name == "fp8" else codes
    assert (largest.float().abs().amax(-1) == {"fp8": 448, "int8": 127}[name]).all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_all_zero_tokens_stay_zero(name):
    states = torch.zeros(4, 2, 16)
    encoded = encode(states, name, torch.ones(2, 16))
    assert (decode(encoded.states, name, encoded.scales, torch.ones(2, 16)) == 0).all()


def test_numpy_reads_int8_by_the_formula_written_in_the_shard():
    states = states_with_massive_activations()
    scale = rms(states)
    encoded = encode(states, "int8", scale)
    codes, scales = encoded.states.numpy(), encoded.scales.numpy()
    by_hand = codes.astype(np.float32) * scales[..., None] * scale.numpy()
    ours = decode(encoded.states, "int8", encoded.scales, scale)
    assert torch.equal(torch.from_numpy(by_hand).to(torch.bfloat16), ours)
    assert "float32(states) * scales[..., None] * channel_scale" in ENCODINGS["int8"].formula


def test_numpy_reads_fp8_by_a_table_of_256_values():
    states = states_with_massive_activations()
    encoded = encode(states, "fp8")
    sign, exponent, fraction = (np.arange(256) >> n for n in (7, 3, 0))
    exponent, fraction = exponent & 15, fraction & 7
    size = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
    table = np.where(sign > 0, -size, size).astype(np.float32)
    by_hand = table[encoded.states.numpy()] * encoded.scales.numpy()[..., None]
    ours = decode(encoded.states, "fp8", encoded.scales)
    assert torch.equal(torch.from_numpy(by_hand).to(torch.bfloat16), ours)


def test_planes_are_the_upper_and_the_lower_bytes_and_join_exactly():
    bits = all_patterns().numpy()
    high, low = split_planes(bits)
    assert np.array_equal(high, bits >> 8)
    assert np.array_equal(low, bits & 255)
    out = np.zeros(2 * bits.size, dtype=np.uint8)
    join_planes(high, low, out)
    assert np.array_equal(out.view("<u2").reshape(bits.shape), bits)


def test_a_codec_without_its_channel_scale_is_refused():
    with pytest.raises(UsageError, match=r"int8 needs the cache's channel scale"):
        Codec("int8")


def test_a_codec_encodes_and_decodes_like_the_functions():
    states = states_with_massive_activations()
    scale = rms(states)
    for name in ENCODINGS:
        codec = Codec(name, scale)
        encoded, plain = codec.encode(states), encode(states, name, scale)
        assert torch.equal(encoded.states, plain.states)
        back = codec.decode(*encoded)
        assert torch.equal(back, decode(plain.states, name, plain.scales, scale))
