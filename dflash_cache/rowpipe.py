"""From the device to the shard: copied to pinned memory, checked and written by one thread."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_cache.encoding import Codec
from dflash_cache.geometry import Geometry
from dflash_cache.health import Guard, extremes, what_is_wrong
from dflash_cache.packing import Plan, RowTokens
from dflash_cache.shard_writer import ShardWriter
from dflash_cache.tapstats import FIELDS, add_row, empty_sums

DEPTH = 2


class WriterThread:
    """One thread with a bounded queue; an exception in it reaches the caller at the next call."""

    def __init__(self, depth: int = DEPTH):
        self.depth = depth
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shard-writer")
        self._pending: deque[Future] = deque()

    def submit(self, job: Callable[..., object], *arguments: Any) -> None:
        """Queue a job; waits while `depth` jobs are pending."""
        self._wait(self.depth - 1)
        self._pending.append(self._pool.submit(job, *arguments))

    def drain(self) -> None:
        """Wait for all jobs."""
        self._wait(0)

    def _wait(self, left: int) -> None:
        while len(self._pending) > left:
            self._pending.popleft().result()

    def close(self) -> None:
        """Drop what has not begun and wait for what has; the thread is gone afterwards."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class HostSlot:
    """Host memory of a batch, pinned for CUDA: encoded states [B, S, T, D], their scales
    [B, S, T] if there are any, extremes [B, 2, S, T] and statistics [B, 7, T]."""

    def __init__(self, rows: int, geometry: Geometry, device: torch.device):
        pinned = device.type == "cuda"
        stored = torch.from_numpy(np.empty(0, geometry.dtype)).dtype
        shape = (rows, geometry.seq_len, geometry.taps)
        self.bits = torch.empty((*shape, geometry.hidden), dtype=stored, pin_memory=pinned)
        self.scales = torch.empty(shape, pin_memory=pinned) if geometry.how.scaled else None
        self.extremes = torch.empty(rows, 2, *shape[1:], pin_memory=pinned)
        self.sums = torch.empty(rows, FIELDS, geometry.taps, dtype=torch.float64, pin_memory=pinned)
        self.seconds = 0.0
        self._began = time.perf_counter()
        self._lane = CopyLane(device) if pinned else None

    def begin(self) -> None:
        """Before the forward whose states will lie here: its time counts from now."""
        self._began = time.perf_counter()
        if self._lane is not None:
            self._lane.began.record()

    def fill(self, states: Tensor, document: Tensor, rows: int, codec: Codec) -> None:
        """Encode states [b, S, T, D] on their device and start copying the first `rows` of them.

        Padding becomes zero. All rows are encoded, so that the shape is the same for every batch.
        """
        document = document.to(states.device)
        states.masked_fill_(document[..., None, None] == 0, 0)
        encoded = codec.encode(states)
        decoded = codec.decode(*encoded)
        sums = [empty_sums(states.shape[2], states.device) for _ in document]
        for row, total in enumerate(sums[:rows]):
            add_row(total, decoded[row], document[row], states[row])
        pairs = [
            (self.bits, encoded.states),
            # Of the states themselves: codes of eight bits are finite whatever these are.
            (self.extremes, extremes(states.to(torch.bfloat16))),
            (self.sums, torch.stack(sums)),
        ]
        if self.scales is not None and encoded.scales is not None:
            pairs.append((self.scales, encoded.scales))
        if self._lane is not None:
            self._lane.copy([(host[:rows], device[:rows]) for host, device in pairs])
            return
        for host, device in pairs:
            host[:rows].copy_(device[:rows])
        self.seconds = time.perf_counter() - self._began

    def wait(self) -> None:
        """Until the copies are there; for the writer thread. `seconds` is the forward's then."""
        if self._lane is not None:
            self.seconds = self._lane.wait()


class CopyLane:
    """Copies to the host on a stream of their own, beside the next batch's forward."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.began, self.computed = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.copied = torch.cuda.Event()
        self._held: list[Tensor] = []

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Queue `host <- device` copies behind what the current stream computes."""
        self.computed.record()
        # The allocator gives memory back on the other stream: what is copied is held until then.
        self._held = [device for _, device in pairs]
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.computed)
            for host, device in pairs:
                host.copy_(device, non_blocking=True)
            self.copied.record()

    def wait(self) -> float:
        """Until the copies are done -> seconds of the forward and the encoding on the device."""
        self.copied.synchronize()
        self._held = []
        return self.began.elapsed_time(self.computed) / 1000


@dataclass
class Clock:
    """Seconds of a run: in all, on the device for states, of the writer thread."""

    total: float = 0.0
    forward: float = 0.0
    writing: float = 0.0

    def share(self, seconds: float) -> float:
        return min(1.0, seconds / self.total) if self.total else 0.0


@dataclass
class OpenShard:
    """A shard being written: its writer, its rows, and the documents that it leaves out."""

    number: int
    rows: range
    writer: ShardWriter
    skipped: list[dict]


@dataclass(frozen=True)
class RowSink:
    """The jobs of the writer thread."""

    plan: Plan
    guard: Guard
    clock: Clock

    def write(self, shard: OpenShard, slot: HostSlot, rows: Sequence[int], tokens: list) -> None:
        """Write the global `rows` that lie in `slot`, without their broken documents."""
        slot.wait()
        self.clock.forward += slot.seconds
        started = time.perf_counter()
        for i, row in enumerate(rows):
            bits, sums = slot.bits[i].numpy(), slot.sums[i]
            scales = None if slot.scales is None else slot.scales[i].numpy()
            bad = self._bad_documents(row, slot.extremes[i].numpy())
            self.guard.add(bad, len(self.plan.row_documents(row)))
            kept = blank(bits, scales, tokens[i], bad)
            shard.skipped += bad
            inside = row - shard.rows.start
            shard.writer.write_row(inside, bits, kept, None if bad else sums, scales)
        self.clock.writing += time.perf_counter() - started

    def _bad_documents(self, row: int, least_largest: np.ndarray) -> list[dict]:
        plan, bad = self.plan, []
        for index in self.plan.row_documents(row):
            start = int(plan.doc_start[index])
            stop = start + int(plan.doc_length[index])
            reason = what_is_wrong(*least_largest[:, start:stop])
            if reason:
                entry = {"row": row, "document": int(plan.doc_number[index]), "start": start}
                line = int(plan.doc_line[index])
                bad.append({**entry, "stop": stop, "line": line, "reason": reason})
        return bad

    def finish(self, shard: OpenShard, attributes: dict[str, Any]) -> None:
        """Publish the shard, unless too many documents were broken."""
        started = time.perf_counter()
        self.guard.check_shard()
        shard.writer.finish({**attributes, "skipped": shard.skipped})
        self.clock.writing += time.perf_counter() - started


def blank(
    bits: np.ndarray, scales: np.ndarray | None, tokens: RowTokens, bad: list[dict]
) -> RowTokens:
    """Zero the states of the bad documents in place; their tokens become padding in the copy."""
    if not bad:
        return tokens
    names = ("input_ids", "loss_mask", "document", "position")
    arrays = {name: getattr(tokens, name).copy() for name in names}
    for entry in bad:
        place = slice(entry["start"], entry["stop"])
        bits[place] = 0
        if scales is not None:
            scales[place] = 0
        for array in arrays.values():
            array[place] = 0
    return replace(tokens, **arrays)
