"""The one shape of a cache."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dflash_cache.encoding import get_encoding


@dataclass(frozen=True)
class Geometry:
    """S tokens a row, R rows a shard, T taps (a count), D hidden, and how elements are stored.

    The last shard of a cache may have fewer rows than R; a row's shape never varies.
    """

    seq_len: int
    rows_per_shard: int
    taps: int
    hidden: int
    encoding: str = "bf16"

    @property
    def dtype(self) -> np.dtype:
        """The stored dtype of `states` (bf16: little-endian uint16)."""
        return np.dtype(get_encoding(self.encoding).dtype).newbyteorder("<")

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """(S, T, D)"""
        return (self.seq_len, self.taps, self.hidden)

    @property
    def states_shape(self) -> tuple[int, int, int, int]:
        """(R, S, T, D) of a full shard."""
        return (self.rows_per_shard, *self.row_shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of the states of one row: also the size of one chunk file."""
        return math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of the states of one token."""
        return self.taps * self.hidden * self.dtype.itemsize

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
