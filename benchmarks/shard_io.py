"""Shards on this machine's disk: our writer and reader against raw files of the same bytes.

    python benchmarks/shard_io.py --dir /data/tmp [--gib 4] [--encoding bf16]

One run writes and reads the same bytes in every way, in turns, and prints the medians. Writing
includes the fsync of every file and folder. "Cold" asks the kernel to drop the files from its cache
first. Checksums are off where the table says so: the writer's and the reader's own switch.
"""

import os
import queue
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import numpy as np
import torch
import zarr

from dflash_cache import shard_writer
from dflash_cache.durable import fsync_path, fsync_tree
from dflash_cache.encoding import Codec
from dflash_cache.geometry import Geometry
from dflash_cache.packing import RowTokens
from dflash_cache.shard import Shard, ShardWriter
from dflash_cache.tapstats import empty_sums
from dflash_train.rows import READERS

SEQ_LEN, TAPS, HIDDEN = 4096, 5, 2560
CRC32C = shard_writer.crc32c


def main_geometry(gib: float, encoding: str) -> Geometry:
    one = Geometry(SEQ_LEN, 1, TAPS, HIDDEN, encoding)
    return Geometry(
        SEQ_LEN, max(4, int(gib * 2**30 / one.stored_row_bytes)), TAPS, HIDDEN, encoding
    )


def random_row(geometry: Geometry, seed: int) -> tuple[np.ndarray, np.ndarray | None, RowTokens]:
    """Encoded normal states of a row, their scales, and its tokens."""
    states = torch.randn(geometry.row_shape, generator=torch.Generator().manual_seed(seed))
    channels = torch.ones(geometry.taps, geometry.hidden)
    encoded = Codec(geometry.encoding, channels).encode(states)
    scales = None if encoded.scales is None else encoded.scales.numpy()
    ids = np.arange(geometry.seq_len, dtype=np.int32)
    ones = np.ones_like(ids)
    return encoded.states.numpy(), scales, RowTokens(ids, ones.astype(np.uint8), ones, ids)


class Bench:
    """Rows in memory, and every way to put them on a disk and to get them back."""

    def __init__(self, folder: Path, geometry: Geometry):
        self.folder, self.geometry = folder, geometry
        self.rows = [random_row(geometry, seed) for seed in range(3)]
        self.channels = torch.ones(geometry.taps, geometry.hidden)
        self.sums = empty_sums(geometry.taps)
        self.buffers = np.empty((READERS, *geometry.row_shape), dtype=geometry.dtype)
        self.buffers[:] = 0  # pages exist before anything is timed
        self.bytes = geometry.rows_per_shard * geometry.row_bytes
        self.shard = folder / "shards" / "000000.zarr"

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray | None, RowTokens]:
        return self.rows[i % len(self.rows)]

    def write_ours(self, checksums: bool) -> None:
        shutil.rmtree(self.folder / "shards", ignore_errors=True)
        shard_writer.crc32c = CRC32C if checksums else (lambda data: 0)
        g, codec = self.geometry, Codec(self.geometry.encoding, self.channels)
        with ShardWriter(self.shard, self.folder / "staging", g, g.rows_per_shard, codec) as writer:
            for i in range(g.rows_per_shard):
                states, scales, tokens = self.row(i)
                writer.write_row(i, states, tokens, self.sums, scales)
            writer.finish({})
        shard_writer.crc32c = CRC32C

    def write_raw(self) -> None:
        raw = self.folder / "raw"
        shutil.rmtree(raw, ignore_errors=True)
        raw.mkdir()
        for i in range(self.geometry.rows_per_shard):
            with open(raw / f"{i}.bin", "wb", buffering=0) as file:
                file.write(self.row(i)[0].data)
        fsync_tree(raw)
        fsync_path(self.folder)

    def write_zarr(self) -> None:
        """As anybody would: zarr's defaults, one chunk a row, and an fsync for fairness."""
        path = self.folder / "stock.zarr"
        shutil.rmtree(path, ignore_errors=True)
        g = self.geometry
        shape = (g.rows_per_shard, *g.row_shape)
        array = zarr.create_array(str(path), shape=shape, dtype=g.dtype, chunks=(1, *g.row_shape))
        for i in range(g.rows_per_shard):
            array[i] = self.row(i)[0]
        fsync_tree(path)

    def _in_threads(self, read: Callable[[int, np.ndarray], object]) -> None:
        free = queue.SimpleQueue[np.ndarray]()
        for buffer in self.buffers:
            free.put(buffer)

        def one(i: int) -> None:
            buffer = free.get()
            read(i, buffer)
            free.put(buffer)

        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(one, range(self.geometry.rows_per_shard)))

    def read_ours(self, checksums: bool) -> None:
        """The calls that the stream's reader makes for every row."""
        shard = Shard.open(self.shard, self.geometry)

        def read(i: int, out: np.ndarray) -> None:
            shard.read_states(i, out)
            shard.read_tokens(i)
            if checksums and shard.verify_row(i, out):
                raise RuntimeError(f"row {i} is damaged")

        self._in_threads(read)

    def read_raw(self) -> None:
        def read(i: int, out: np.ndarray) -> None:
            handle = os.open(self.folder / "raw" / f"{i}.bin", os.O_RDONLY)
            os.preadv(handle, [out.reshape(-1).view(np.uint8).data], 0)
            os.close(handle)

        self._in_threads(read)

    def read_zarr(self) -> None:
        array = zarr.open_array(str(self.folder / "stock.zarr"), mode="r")
        self._in_threads(lambda i, out: np.copyto(out, array[i]))

    def drop(self, path: Path) -> None:
        """Out of the page cache."""
        for file in path.rglob("*"):
            if file.is_file():
                handle = os.open(file, os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)


def timed(work: Callable[[], None], before: Callable[[], None] = lambda: None) -> float:
    before()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@click.command()
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), required=True, help="On the disk."
)
@click.option("--gib", default=1.0, show_default=True, help="Size of the shard.  [GiB]")
@click.option("--encoding", default="bf16", show_default=True)
@click.option("--repeats", default=3, show_default=True)
def main(folder: Path, gib: float, encoding: str, repeats: int) -> None:
    """Print GB/s of writing and reading, and their share of the raw rate of the same run."""
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(folder, main_geometry(gib, encoding))
    ours, raw, stock = bench.shard, folder / "raw", folder / "stock.zarr"
    ways: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "write raw + fsync": (bench.write_raw, os.sync),
        "write ours, checksums off": (lambda: bench.write_ours(False), os.sync),
        "write ours": (lambda: bench.write_ours(True), os.sync),
        "write stock zarr + fsync": (bench.write_zarr, os.sync),
        "read warm raw": (bench.read_raw, bench.read_raw),
        "read warm ours, checksums off": (
            lambda: bench.read_ours(False),
            lambda: bench.read_ours(False),
        ),
        "read warm ours": (lambda: bench.read_ours(True), lambda: bench.read_ours(True)),
        "read warm stock zarr": (bench.read_zarr, bench.read_zarr),
        "read cold raw": (bench.read_raw, lambda: bench.drop(raw)),
        "read cold ours, checksums off": (lambda: bench.read_ours(False), lambda: bench.drop(ours)),
        "read cold ours": (lambda: bench.read_ours(True), lambda: bench.drop(ours)),
        "read cold stock zarr": (bench.read_zarr, lambda: bench.drop(stock)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, (work, before) in ways.items():
            seconds[name].append(timed(work, before))
    g = bench.geometry
    print(f"{encoding}, {g.rows_per_shard} rows of {g.row_bytes / 1e6:.1f} MB, median of {repeats}")
    for name, times in seconds.items():
        rate = bench.bytes / statistics.median(times) / 1e9
        base = next(n for n in ways if " raw" in n and n.split(" raw")[0] in name)
        share = statistics.median(seconds[base]) / statistics.median(times)
        print(f"{name:<32} {rate:6.2f} GB/s   {share:6.1%} of raw")
    for path in (folder / "shards", raw, stock, folder / "staging"):
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
