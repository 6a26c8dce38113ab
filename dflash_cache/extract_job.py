"""The loop of an extraction: the missing shards of a cache, one after the other."""

import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import numpy as np
import torch

from dflash_cache.cache import Cache
from dflash_cache.corpus import Document
from dflash_cache.durable import FULL, refusal
from dflash_cache.equaliser import batch_arrays
from dflash_cache.errors import DataError, UsageError
from dflash_cache.health import Guard
from dflash_cache.packing import RowTokens, fill_row
from dflash_cache.progress import Progress, format_seconds, progress
from dflash_cache.rowpipe import DEPTH, HostSlot, OpenShard, RowSink, WriterThread
from dflash_cache.selfcheck import prove
from dflash_cache.shard import Shard
from dflash_cache.shard_writer import ShardWriter, clean_staging
from dflash_cache.target import Target

PACKAGES = (
    "dflash-train",
    "torch",
    "transformers",
    "flash-linear-attention",
    "causal-conv1d",
    "triton",
)


@dataclass(frozen=True)
class ExtractSummary:
    """What a run did. documents, tokens, rows and bytes are those that this run wrote."""

    documents: int
    tokens: int
    rows: int
    bytes: int
    shards_written: int
    shards_skipped: int
    fill: float
    truncated: int
    skipped: list[dict]
    seconds: float
    kernels: list[str]
    peak_gpu_bytes: int | None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}

    def render(self) -> str:
        """For a person; one line, and one for each kind of trouble."""
        lines = [
            f"extracted {self.documents:,} documents, {self.tokens:,} tokens in {self.rows:,} rows "
            f"({100 * self.fill:.1f} % full): {self.shards_written} shards written, "
            f"{self.shards_skipped} were there; {self.bytes / 2**20:,.1f} MiB of states in "
            f"{format_seconds(self.seconds)} ({self.tokens_per_second:,.0f} tokens/s)"
        ]
        if self.skipped:
            reasons = sorted({str(entry["reason"]) for entry in self.skipped})
            lines.append(f"skipped {len(self.skipped)} documents: {', '.join(reasons)}")
        if self.peak_gpu_bytes:
            lines.append(f"peak GPU memory: {self.peak_gpu_bytes / 2**30:.1f} GiB")
        return "\n".join(lines)


def versions() -> dict[str, str]:
    """Versions of what computes the states; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


class Job:
    """The missing shards of one cache, one after the other."""

    def __init__(
        self,
        cache: Cache,
        target: Target,
        documents: list[Document],
        batch_rows: int,
        report: Callable[[str], None],
    ):
        self.cache, self.target, self.documents, self.report = cache, target, documents, report
        self.plan, self.batch_rows = cache.plan, batch_rows
        self.codec = cache.codec(target.device)
        self.guard = Guard()
        self.sink = RowSink(self.plan, self.guard)
        self.slots: list[HostSlot] = []
        self.batches = 0
        self.open: list[OpenShard] = []
        self.done: list[int] = []
        self.kernels: list[str] = []

    def run(self, rank: int, world: int) -> None:
        """The shards of this worker, then those that are still missing; joins the writer first."""
        clean_staging(self.cache.staging_dir)
        missing = self.cache.missing()
        self._check_present(missing)
        if not missing:
            self.report(f"all {self.plan.shards} shards are there: nothing to do")
            return
        mine = [k for k in missing if k % world == rank]
        self._check_space(missing)
        self.kernels = [prove(self.target)]
        self.report(self.kernels[0])
        self.thread = WriterThread()
        try:
            with progress(self._tokens(mine), "extract", "tokens") as bar:
                for k in [*mine, *(k for k in missing if k not in mine)]:
                    if not self.cache.shard_path(k).is_dir():
                        self._shard(k, bar)
                self.thread.drain()
        except OSError as error:
            if error.errno not in FULL:
                raise
            kept = ": finished shards are kept"
            raise refusal(self.cache.path, error, kept) from error
        finally:
            self.thread.close()
            for shard in self.open:
                shard.writer.abort()

    def _check_present(self, missing: list[int]) -> None:
        """`DataError` for a present shard with lost or cut chunks; looks at sizes only."""
        for k in sorted(set(range(self.plan.shards)) - set(missing)):
            path = self.cache.shard_path(k)
            try:
                Shard.open(path, self.cache.geometry)
            except DataError as error:
                told = str(error)
                advice = f"; remove {path} and run `dflash extract` again"
                raise DataError(told if told.endswith(advice) else told + advice) from error

    def _check_space(self, missing: list[int]) -> None:
        rows = sum(len(self.plan.shard_rows(k)) for k in missing)
        need, free = rows * self.cache.geometry.row_bytes, shutil.disk_usage(self.cache.path).free
        if need > free:
            raise UsageError(
                f"the cache still needs {_size(need)}, but {self.cache.path} has only "
                f"{_size(free)} left; free space or give another --out"
            )

    def _tokens(self, shards: list[int]) -> int:
        wanted = np.isin(self.plan.doc_row // self.plan.rows_per_shard, shards)
        return int(self.plan.doc_length[wanted].sum())

    def _shard(self, k: int, bar: Progress) -> None:
        rows, geometry = self.plan.shard_rows(k), self.cache.geometry
        final, staging = self.cache.shard_path(k), self.cache.staging_dir
        writer = ShardWriter(final, staging, geometry, len(rows), self.cache.codec())
        shard = OpenShard(k, rows, writer, [])
        self.open.append(shard)
        for first in range(rows.start, rows.stop, self.batch_rows):
            batch = range(first, min(first + self.batch_rows, rows.stop))
            tokens = [fill_row(self.plan, self.documents, row) for row in batch]
            slot = self._run_batch(tokens)
            self.thread.submit(self.sink.write, shard, slot, batch, tokens)
            bar.advance(sum(int(np.count_nonzero(t.document)) for t in tokens))
        self.thread.submit(self._finish, shard)

    def _run_batch(self, tokens: list[RowTokens]) -> HostSlot:
        """Run rows; a short last batch is filled up with padding, so that CUDA sees one shape."""
        padding = self.batch_rows - len(tokens) if self.target.device.type == "cuda" else 0
        ids, document, position = batch_arrays(tokens, padding)
        states = self.target.run_rows(ids, document, position)
        slot = self._slot()
        slot.fill(states, document, len(tokens), self.codec)
        return slot

    def _slot(self) -> HostSlot:
        """One more than the queue is long: the one returned has been written."""
        if len(self.slots) <= DEPTH:
            self.slots.append(HostSlot(self.batch_rows, self.cache.geometry, self.target.device))
        self.batches += 1
        return self.slots[(self.batches - 1) % (DEPTH + 1)]

    def _finish(self, shard: OpenShard) -> None:
        self.sink.finish(shard, self._attributes(shard))
        self.open.remove(shard)
        self.done.append(shard.number)

    def _attributes(self, shard: OpenShard) -> dict[str, Any]:
        cuda = self.target.device.type == "cuda"
        return {
            "shard": shard.number,
            "row_range": [shard.rows.start, shard.rows.stop],
            "manifest_digest": self.cache.manifest.digest(),
            "kernels": [*self.kernels, *self.target.describe_kernels()[1:]],
            "versions": versions(),
            "device": torch.cuda.get_device_name(self.target.device) if cuda else "cpu",
            "dtype": str(self.target.dtype).removeprefix("torch."),
        }

    def summary(self, seconds: float) -> ExtractSummary:
        rows = [row for k in self.done for row in self.plan.shard_rows(k)]
        cuda = self.target.device.type == "cuda"
        return ExtractSummary(
            documents=int(np.isin(self.plan.doc_row, rows).sum()) - len(self.guard.skipped),
            tokens=self._tokens(self.done),
            rows=len(rows),
            bytes=len(rows) * self.cache.geometry.row_bytes,
            shards_written=len(self.done),
            shards_skipped=self.plan.shards - len(self.done),
            fill=self.plan.fill,
            truncated=self.plan.truncated,
            skipped=self.guard.skipped,
            seconds=seconds,
            kernels=[*self.kernels, *self.target.describe_kernels()[1:]],
            peak_gpu_bytes=torch.cuda.max_memory_allocated(self.target.device) if cuda else None,
        )
