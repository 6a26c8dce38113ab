"""States <-> stored bits, on whatever device the states are. A new encoding is one more entry."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_cache.errors import UsageError


@dataclass(frozen=True)
class Encoding:
    """How an element of the states is stored.

    `dtype` is the numpy name of what lies in the file, `logical_dtype` what the bits mean,
    `formula` says in words how the stored numbers give bf16 back (it goes into every shard).
    """

    name: str
    dtype: str
    logical_dtype: str
    formula: str
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize


def _bf16_bits(states: Tensor) -> Tensor:
    return states.to(torch.bfloat16).contiguous().view(torch.uint16)


def _bits_bf16(bits: Tensor) -> Tensor:
    return bits.view(torch.bfloat16)


ENCODINGS: dict[str, Encoding] = {
    "bf16": Encoding(
        name="bf16",
        dtype="uint16",
        logical_dtype="bfloat16",
        formula="float32 bits = uint16 << 16",
        encode=_bf16_bits,
        decode=_bits_bf16,
    ),
}


def get_encoding(name: str) -> Encoding:
    """The encoding of that name; a `UsageError` lists the known ones."""
    if name not in ENCODINGS:
        known = ", ".join(sorted(ENCODINGS))
        raise UsageError(f"encoding {name!r} is not known; the known encodings are: {known}")
    return ENCODINGS[name]


def encode(states: Tensor, name: str = "bf16") -> Tensor:
    """`states` [..., D] of any float dtype -> stored bits of the same shape (bf16: uint16).

    fp32 is rounded to the nearest bf16, ties to even; bf16 passes through bit for bit.
    """
    return get_encoding(name).encode(states)


def decode(bits: Tensor, name: str = "bf16") -> Tensor:
    """Stored bits [..., D] -> bf16 states of the same shape; for bf16 a view, nothing is copied."""
    return get_encoding(name).decode(bits)
