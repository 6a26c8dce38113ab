"""Shards -> pinned ring -> device batch: fixed shapes, an order that resumes from a step number."""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from dflash_cache.cache import Cache
from dflash_cache.errors import DataError
from dflash_train.rows import Batch, RowBuffer, RowReader

RING = 2  # host slots, and as many on the device: one is used while the other is filled


class RowOrder:
    """The endless concatenation of one permutation of `rows` per epoch.

    Rows are sorted by a hash of (seed, epoch, row), so the order depends neither on a library's
    generator nor on how batches are cut.
    """

    def __init__(self, rows: Sequence[int], seed: int):
        self.rows, self.seed = np.asarray(rows, dtype=np.uint64), seed
        self._cached: tuple[int, np.ndarray] = (-1, self.rows)

    def at(self, position: int) -> tuple[int, int]:
        """(row, epoch) at a position of the sequence."""
        epoch, offset = divmod(position, len(self.rows))
        if self._cached[0] != epoch:
            key = mix(mix(np.uint64(self.seed)) ^ np.uint64(epoch))
            self._cached = (epoch, self.rows[np.argsort(mix(self.rows ^ key), kind="stable")])
        return int(self._cached[1][offset]), epoch


def mix(value: np.ndarray | np.uint64) -> np.ndarray:
    """splitmix64's finaliser: a bijection of uint64 that scatters neighbours."""
    z = np.atleast_1d(value) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class RowStream:
    """Iterates `Batch`es: batch t holds positions [t*G, (t+1)*G) of `RowOrder`, endlessly.

    Of several ranks each takes every `world`-th batch: number t is batch t * world + rank then, so
    that `world` ranks together read what one does alone.

    A batch is lent until the next one is asked for; on CUDA that call records, on the caller's
    current stream, that its work on the batch (the backward included) has been queued. Rows are
    read in the calling thread until `start()` hands that to a loader thread: whatever compiles
    must have done so before. The state of the stream is `step`, the number of the next batch.
    """

    def __init__(
        self,
        cache: Cache,
        rows: Sequence[int],
        *,
        batch_rows: int,
        seed: int,
        device: torch.device | str,
        verify: str = "first",
        direct: bool = False,
        start_step: int = 0,
        rank: int = 0,
        world: int = 1,
    ):
        if not rows:
            raise DataError(f"{cache.path} has no rows to read: extract more documents")
        self.step, self.batch_rows = start_step, batch_rows
        self.rank, self.world = rank, world
        self.order = RowOrder(rows, seed)
        self.reader = RowReader(cache, verify=verify, direct=direct)
        self.device = torch.device(device)
        cuda = self.device.type == "cuda"
        self.lane = _CudaLane(self.device) if cuda else None
        host = torch.device("cpu")
        self.host = [RowBuffer(cache.geometry, batch_rows, host, pinned=cuda) for _ in range(RING)]
        self.slots = self.host
        if cuda:
            self.slots = [RowBuffer(cache.geometry, batch_rows, self.device) for _ in range(RING)]
        self._free = threading.Semaphore(RING)
        self._loaded: queue.SimpleQueue[tuple[int, ...] | Exception] = queue.SimpleQueue()
        self._lent = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._host_wait = 0.0

    @property
    def wait_seconds(self) -> float:
        """Time so far that the consumer (on CUDA: its stream) stood still for want of data."""
        return self.lane.stalled() if self.lane else self._host_wait

    def start(self) -> None:
        """Read ahead in a loader thread from here on."""
        self._thread = threading.Thread(
            target=self._loader, args=(self.step,), name="dflash-loader", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop and join the loader; batches lent are no longer valid."""
        self._closing = True
        self._free.release()
        if self._thread is not None:
            self._thread.join()
        self.reader.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        slot, step = self.step % RING, self.step
        self._give_back()
        started = time.perf_counter()
        if self.lane:
            self.lane.begin_wait()
        rows = self._take(step)
        if self.lane:
            self.lane.end_wait(slot)
        self._host_wait += time.perf_counter() - started
        self._lent, self.step = True, step + 1
        return self.slots[slot].batch(step, rows)

    def _give_back(self) -> None:
        if self._lent:
            if self.lane:
                self.lane.record_used((self.step - 1) % RING)
            self._free.release()
            self._lent = False

    def _take(self, step: int) -> tuple[int, ...]:
        if self._thread is None:
            self._free.acquire()
            return self._load(step)
        loaded = self._loaded.get()
        if isinstance(loaded, Exception):
            self._loaded.put(loaded)  # the loader is gone: asking again must not wait for it
            raise loaded
        return loaded

    def _loader(self, step: int) -> None:
        try:
            if self.lane:
                torch.cuda.set_device(self.lane.device)
            while True:
                self._free.acquire()
                if self._closing:
                    return
                self._loaded.put(self._load(step))
                step += 1
        except Exception as error:  # whatever it is, the trainer must hear of it
            self._loaded.put(error)

    def _load(self, step: int) -> tuple[int, ...]:
        """Fill slot `step % RING`, which the consumer has given back."""
        slot, first = step % RING, (step * self.world + self.rank) * self.batch_rows
        places = [self.order.at(first + i) for i in range(self.batch_rows)]
        rows, epochs = tuple(row for row, _ in places), [epoch for _, epoch in places]
        if self.lane:
            self.lane.ready[slot].synchronize()  # the last copy out of this host slot
        self.reader.fill(self.host[slot], rows, epochs)
        if self.lane:
            self.lane.copy(slot, self.host[slot], self.slots[slot])
        return rows


class _CudaLane:
    """The copy stream and its events; allocates nothing after its construction but events."""

    def __init__(self, device: torch.device):
        self.device = torch.device("cuda", device.index or 0)
        self.stream = torch.cuda.Stream(self.device)
        self.ready = [torch.cuda.Event() for _ in range(RING)]
        self.used = [torch.cuda.Event() for _ in range(RING)]
        self._spare: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._stalled = 0.0

    def copy(self, slot: int, source: RowBuffer, target: RowBuffer) -> None:
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.used[slot])
            target.copy_(source)
            self.ready[slot].record(self.stream)

    def record_used(self, slot: int) -> None:
        self.used[slot].record(torch.cuda.current_stream(self.device))

    def begin_wait(self) -> None:
        """Before the host asks for the batch: from here the GPU may run dry."""
        if not self._spare:
            self._spare.append(
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            )
        self._waits.append(self._spare.pop())
        self._waits[-1][0].record(torch.cuda.current_stream(self.device))

    def end_wait(self, slot: int) -> None:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self.ready[slot])
        self._waits[-1][1].record(current)

    def stalled(self) -> float:
        """Seconds between begin and end of the waits that the GPU has passed."""
        while self._waits and self._waits[0][1].query():
            pair = self._waits.popleft()
            self._stalled += pair[0].elapsed_time(pair[1]) / 1000
            self._spare.append(pair)
        return self._stalled
