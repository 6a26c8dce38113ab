"""The one shape of a cache."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dflash_cache.encoding import Encoding, get_encoding

# input_ids, document and position (int32 each) and loss_mask (uint8) of a token.
TOKEN_ARRAYS_BYTES = 13


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
    def how(self) -> Encoding:
        """The encoding itself."""
        return get_encoding(self.encoding)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of a row's states in memory (bf16: little-endian uint16)."""
        return np.dtype(self.how.dtype).newbyteorder("<")

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
        """Bytes of the states of one row in memory; on the disk too, unless they lie in planes."""
        return math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def stored_token_bytes(self) -> float:
        """Bytes of a token on the disk, over all arrays; an estimate for bf16-lossless."""
        states = self.taps * self.hidden * self.how.bytes_per_element
        return states + 4 * self.taps * self.how.scaled + TOKEN_ARRAYS_BYTES

    @property
    def stored_row_bytes(self) -> int:
        """`stored_token_bytes` of a whole row."""
        return math.ceil(self.seq_len * self.stored_token_bytes)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
