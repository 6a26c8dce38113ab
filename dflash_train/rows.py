"""A batch of rows, memory for it, and the reader that fills that memory from shards."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_cache.cache import Cache
from dflash_cache.errors import DataError
from dflash_cache.shard import Geometry, Shard
from dflash_cache.shard_files import ALIGN, bytes_of, direct_problem, read_part

READERS = 4  # requests at once, of one row or of several: a cold disk wants that many in flight


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
    4 GB of host memory. Host memory of the states begins at a page, so that O_DIRECT reads into
    it; the rows behind the first do too if a row's bytes are a multiple of a page.
    """

    def __init__(
        self, geometry: Geometry, rows: int, device: torch.device, *, pinned: bool = False
    ):
        stored = torch.from_numpy(np.empty(0, dtype=geometry.dtype)).dtype
        line = (rows, geometry.seq_len)

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)

        shape = (rows, *geometry.row_shape)
        # Pinned memory comes in pages of its own.
        paged = device.type == "cpu" and not pinned
        self.states = at_page(shape, stored) if paged else empty(shape, stored)
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


def at_page(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor that begins at a page of memory."""
    size = math.prod(shape) * dtype.itemsize
    memory = torch.empty(size + ALIGN, dtype=torch.uint8)
    return memory[-memory.data_ptr() % ALIGN :][:size].view(dtype).view(shape)


def choose_io(name: str, cache: Cache, row: int) -> tuple[bool, list[str]]:
    """Whether rows are read with O_DIRECT, and a line that says so where it was asked in vain.

    Tried out on the shard of `row`. A shard elsewhere that refuses later stops the run.
    """
    if name != "direct":
        return False, []
    shard, inside = cache.locate(row)
    if shard.plain is None:
        problem: str | None = f"the states of {shard.path} are not stored as plain bytes"
    else:
        problem = direct_problem(shard.plain.place(inside)[0])
    if problem is None:
        return True, []
    return False, [f"--io direct is not possible: {problem}; rows are read buffered"]


class RowReader:
    """Fills host buffers from shards; `verify` checksums `always`, the `first` time or `off`.

    The states of plain shards are read in parts, `READERS` at once, past the page cache if
    `direct`; those of other shards are read whole, buffered.
    """

    def __init__(self, cache: Cache, *, verify: str = "first", direct: bool = False):
        self.cache, self.verify, self.direct = cache, verify, direct
        self._verified: set[int] = set()
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="dflash-read")

    def close(self) -> None:
        self._pool.shutdown()

    def fill(self, buffer: RowBuffer, rows: Sequence[int], epochs: Sequence[int]) -> None:
        """Read `rows` into `buffer`; DataError names shard and row of what is damaged."""
        buffer.row_ids.copy_(torch.as_tensor(rows))
        buffer.epochs.copy_(torch.as_tensor(epochs))
        cuts = -(-READERS // len(rows))
        parts = [(buffer, *item, cut, cuts) for item in enumerate(rows) for cut in range(cuts)]
        list(self._pool.map(lambda part: self._read_states(*part), parts))
        list(self._pool.map(lambda item: self._read_rest(buffer, *item), enumerate(rows)))

    def _read_states(self, buffer: RowBuffer, slot: int, row: int, cut: int, cuts: int) -> None:
        """One of `cuts` parts of a row's states."""
        shard, inside = self.cache.locate(row)
        states = bytes_of(buffer.states[slot].numpy())
        if shard.plain is not None:
            size = -(-states.nbytes // cuts // ALIGN) * ALIGN
            part = states[cut * size :][:size]
            if part.nbytes:
                read_part(shard.plain, inside, cut * size, part, self.direct)
        elif cut == 0:
            shard.read_states(inside, states)

    def _read_rest(self, buffer: RowBuffer, slot: int, row: int) -> None:
        """What there is of a row besides its states, and the checksums of all."""
        shard, inside = self.cache.locate(row)
        if buffer.scales is not None:
            shard.read_scales(inside, buffer.scales[slot].numpy())
        tokens = shard.read_tokens(inside)
        for name in ("input_ids", "loss_mask", "document", "position"):
            np.copyto(getattr(buffer, name)[slot].numpy(), getattr(tokens, name))
        if self.verify == "always" or (self.verify == "first" and row not in self._verified):
            self._check(shard, inside, row, buffer.states[slot].numpy())

    def _check(self, shard: Shard, inside: int, row: int, states: np.ndarray) -> None:
        problems = shard.verify_row(inside, states)
        if problems:
            raise DataError(
                f"shard {shard.path.name}, row {inside} (row {row} of the cache) is damaged: "
                f"{problems[0]}; remove {shard.path} and run `dflash extract` again"
            )
        self._verified.add(row)
