"""A batch of rows, memory for it, and the reader that fills that memory from shards."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_cache.cache import Cache
from dflash_cache.errors import DataError
from dflash_cache.shard import Geometry, Shard

READERS = 4  # rows read at once: a cold disk wants that many requests in flight


@dataclass(frozen=True)
class Batch:
    """G rows in buffers of the stream, valid until the next batch is asked for.

    states [G, S, T, D] as stored (bf16: uint16 bits); scales float32 [G, S, T] of the scaled
    encodings, else None; input_ids, document, position int32 [G, S];
    loss_mask uint8 [G, S]; row_ids int64 [G] global rows; epochs int64 [G] epoch of each row.
    `rows` repeats row_ids on the host.
    """

    states: Tensor
    scales: Tensor | None
    input_ids: Tensor
    loss_mask: Tensor
    document: Tensor
    position: Tensor
    row_ids: Tensor
    epochs: Tensor
    step: int
    rows: tuple[int, ...]


TENSORS = ("states", "input_ids", "loss_mask", "document", "position", "row_ids", "epochs")


class RowBuffer:
    """Memory for a batch of `rows` rows, allocated once, on the host (pinned or not) or a device.

    The pinned allocator rounds each block up to the next power of two: a slot of 2.1 GB takes
    4 GB of host memory.
    """

    def __init__(
        self, geometry: Geometry, rows: int, device: torch.device, *, pinned: bool = False
    ):
        stored = torch.from_numpy(np.empty(0, dtype=geometry.dtype)).dtype
        line = (rows, geometry.seq_len)

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)

        self.states = empty((rows, *geometry.row_shape), stored)
        self.scales = None
        if geometry.how.scaled:
            self.scales = empty((*line, geometry.taps), torch.float32)
        self.input_ids, self.document, self.position = (empty(line, torch.int32) for _ in range(3))
        self.loss_mask = empty(line, torch.uint8)
        self.row_ids, self.epochs = (empty((rows,), torch.int64) for _ in range(2))

    def copy_(self, other: "RowBuffer") -> None:
        """Copy a host buffer of the same shape here without waiting for the copy's end."""
        for name in TENSORS:
            getattr(self, name).copy_(getattr(other, name), non_blocking=True)
        if self.scales is not None and other.scales is not None:
            self.scales.copy_(other.scales, non_blocking=True)

    def batch(self, step: int, rows: tuple[int, ...]) -> Batch:
        tensors = {name: getattr(self, name) for name in TENSORS}
        return Batch(**tensors, scales=self.scales, step=step, rows=rows)


class RowReader:
    """Fills host buffers from shards; `verify` checksums `always`, the `first` time or `off`."""

    def __init__(self, cache: Cache, *, verify: str = "first"):
        self.cache, self.verify = cache, verify
        self._verified: set[int] = set()
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="dflash-read")

    def close(self) -> None:
        self._pool.shutdown()

    def fill(self, buffer: RowBuffer, rows: Sequence[int], epochs: Sequence[int]) -> None:
        """Read `rows` into `buffer`; DataError names shard and row of what is damaged."""
        buffer.row_ids.copy_(torch.as_tensor(rows))
        buffer.epochs.copy_(torch.as_tensor(epochs))
        if len(rows) == 1:
            self._read(buffer, 0, rows[0])
        else:
            list(self._pool.map(lambda item: self._read(buffer, *item), enumerate(rows)))

    def _read(self, buffer: RowBuffer, slot: int, row: int) -> None:
        shard, inside = self.cache.locate(row)
        states = buffer.states[slot].numpy()
        shard.read_states(inside, states)
        if buffer.scales is not None:
            shard.read_scales(inside, buffer.scales[slot].numpy())
        tokens = shard.read_tokens(inside)
        for name in ("input_ids", "loss_mask", "document", "position"):
            np.copyto(getattr(buffer, name)[slot].numpy(), getattr(tokens, name))
        if self.verify == "always" or (self.verify == "first" and row not in self._verified):
            self._check(shard, inside, row, states)

    def _check(self, shard: Shard, inside: int, row: int, states: np.ndarray) -> None:
        problems = shard.verify_row(inside, states)
        if problems:
            raise DataError(
                f"shard {shard.path.name}, row {inside} (row {row} of the cache) is damaged: "
                f"{problems[0]}; remove {shard.path} and run `dflash extract` again"
            )
        self._verified.add(row)
