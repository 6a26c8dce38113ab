"""States <-> stored numbers, on whatever device the states are. A new encoding is one more entry.

Scaled encodings hold one float32 scale for each token and tap; `int8` besides divides each channel
by a static equaliser (`equaliser.py`), so that a few loud channels do not cost the others their
bits. The formulas in `ENCODINGS` go into every shard: ten lines of numpy give bf16 back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash_cache.errors import UsageError

# Smallest absmax that a scale is made from: an all-zero token gives codes of zero, not 0/0.
TINY = 1e-30
INT8_MAX, FP8_MAX = 127.0, 448.0
STATES, STATES_HI, STATES_LO, SCALES = "states", "states_hi", "states_lo", "scales"


class Encoded(NamedTuple):
    """What is stored of states [..., T, D].

    Attributes:
        states: [..., T, D] in the encoding's dtype.
        scales: float32 [..., T] of the scaled encodings, else None.
    """

    states: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True)
class Encoding:
    """How the states are stored.

    Attributes:
        name: what users call it.
        dtype: numpy name of an element as readers get it.
        logical_dtype: what an element means.
        formula: in words, how the stored numbers give bf16 back.
        encode, decode: `encode(states, channel_scale) -> Encoded` and its inverse
            `decode(states, scales, channel_scale) -> bf16`.
        scaled: whether there is a `scales` array.
        equalised: whether a channel scale [T, D] is needed.
        planes: whether the two bytes of an element lie in arrays of their own, the upper one
            compressed; readers get the elements put together.
        bytes_per_element: on the disk; a planning figure for `planes`, where it depends on the
            states.
    """

    name: str
    dtype: str
    logical_dtype: str
    formula: str
    encode: Callable[[Tensor, Tensor | None], Encoded]
    decode: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
    scaled: bool = False
    equalised: bool = False
    planes: bool = False
    bytes_per_element: float = 2.0

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays of a shard that hold the states, one chunk a row each."""
        return (STATES_HI, STATES_LO) if self.planes else (STATES,)


def _to_bf16(states: Tensor, _: Tensor | None) -> Encoded:
    return Encoded(states.to(torch.bfloat16).contiguous().view(torch.uint16))


def _from_bf16(states: Tensor, _scales: Tensor | None, _channels: Tensor | None) -> Tensor:
    return states.view(torch.bfloat16)


def _scales(values: Tensor, largest: float) -> Tensor:
    """One scale per token and tap: float32 [..., T] from values [..., T, D]."""
    return values.abs().amax(-1).clamp(min=TINY) / largest


def _to_int8(states: Tensor, channels: Tensor | None) -> Encoded:
    values = states.float() / channels
    scales = _scales(values, INT8_MAX)
    codes = (values / scales[..., None]).round().clamp(-INT8_MAX, INT8_MAX)
    return Encoded(codes.to(torch.int8), scales)


def _from_int8(states: Tensor, scales: Tensor | None, channels: Tensor | None) -> Tensor:
    if scales is None or channels is None:
        raise UsageError("int8 states are decoded with their scales and the channel scale")
    return (states.float() * scales[..., None] * channels).to(torch.bfloat16)


def _to_fp8(states: Tensor, _: Tensor | None) -> Encoded:
    values = states.float()
    scales = _scales(values, FP8_MAX)
    codes = (values / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return Encoded(codes.view(torch.uint8), scales)


def _from_fp8(states: Tensor, scales: Tensor | None, _: Tensor | None) -> Tensor:
    if scales is None:
        raise UsageError("fp8 states are decoded with their scales")
    return (states.view(torch.float8_e4m3fn).float() * scales[..., None]).to(torch.bfloat16)


ENCODINGS: dict[str, Encoding] = {
    encoding.name: encoding
    for encoding in (
        Encoding(
            name="bf16",
            dtype="uint16",
            logical_dtype="bfloat16",
            formula="float32 bits = uint16 << 16",
            encode=_to_bf16,
            decode=_from_bf16,
        ),
        Encoding(
            name="int8",
            dtype="int8",
            logical_dtype="int8",
            formula="bfloat16(float32(states) * scales[..., None] * channel_scale)",
            encode=_to_int8,
            decode=_from_int8,
            scaled=True,
            equalised=True,
            bytes_per_element=1.0,
        ),
        Encoding(
            name="fp8",
            dtype="uint8",
            logical_dtype="float8_e4m3fn",
            formula="bfloat16(float32(float8_e4m3fn bits) * scales[..., None])",
            encode=_to_fp8,
            decode=_from_fp8,
            scaled=True,
            bytes_per_element=1.0,
        ),
        Encoding(
            name="bf16-lossless",
            dtype="uint16",
            logical_dtype="bfloat16",
            formula="float32 bits = (states_hi << 8 | states_lo) << 16",
            encode=_to_bf16,
            decode=_from_bf16,
            planes=True,
            bytes_per_element=1.4,
        ),
    )
}


def get_encoding(name: str) -> Encoding:
    """The encoding of that name; a `UsageError` lists the known ones."""
    if name not in ENCODINGS:
        known = ", ".join(sorted(ENCODINGS))
        raise UsageError(f"encoding {name!r} is not known; the known encodings are: {known}")
    return ENCODINGS[name]


class Codec:
    """Both directions of one encoding on one device; on CUDA each is one fused kernel.

    Args:
        name: of the encoding.
        channel_scale: float32 [T, D], of equalised encodings.
        device: where the states are.
    """

    def __init__(
        self,
        name: str = "bf16",
        channel_scale: Tensor | None = None,
        device: torch.device | str = "cpu",
    ):
        self.encoding, self.device = get_encoding(name), torch.device(device)
        if self.encoding.equalised and channel_scale is None:
            raise UsageError(
                f"{name} needs the cache's channel scale: target/channel_scale.safetensors"
            )
        self._channels = None
        if self.encoding.equalised and channel_scale is not None:
            self._channels = channel_scale.to(self.device, torch.float32)
        self._encode, self._decode = self.encoding.encode, self.encoding.decode
        if self.device.type == "cuda" and self.encoding.scaled:
            self._encode = torch.compile(self._encode, dynamic=False, fullgraph=True)
            self._decode = torch.compile(self._decode, dynamic=False, fullgraph=True)

    def encode(self, states: Tensor) -> Encoded:
        """States [..., T, D] of any float dtype -> what is stored of them."""
        return self._encode(states, self._channels)

    def decode(self, states: Tensor, scales: Tensor | None = None) -> Tensor:
        """Stored numbers [..., T, D], scales [..., T] -> bf16; for bf16 a view."""
        return self._decode(states, scales, self._channels)


def encode(states: Tensor, name: str = "bf16", channel_scale: Tensor | None = None) -> Encoded:
    """`states` [..., T, D] of any float dtype -> stored numbers, and scales [..., T].

    fp32 is rounded to the nearest bf16, ties to even; bf16 passes through bit for bit. Non-finite
    states have no meaningful int8 or fp8 code: leave such documents out before.
    """
    return get_encoding(name).encode(states, channel_scale)


def decode(
    states: Tensor,
    name: str = "bf16",
    scales: Tensor | None = None,
    channel_scale: Tensor | None = None,
) -> Tensor:
    """The inverse of `encode` -> bf16 states of the same shape; for bf16 a view."""
    return get_encoding(name).decode(states, scales, channel_scale)


def split_planes(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint16 [...] -> (upper bytes, lower bytes), each uint8 [...]."""
    both = np.ascontiguousarray(bits, dtype="<u2").view(np.uint8).reshape(*bits.shape, 2)
    return np.ascontiguousarray(both[..., 1]), np.ascontiguousarray(both[..., 0])


def join_planes(high: np.ndarray, low: np.ndarray, out: np.ndarray) -> None:
    """The inverse, into `out`, uint8 of twice the size (the bytes of little-endian uint16)."""
    pairs = out.reshape(-1, 2)
    pairs[:, 1] = high.reshape(-1)
    pairs[:, 0] = low.reshape(-1)
