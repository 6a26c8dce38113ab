"""The loop of an extraction: the missing shards of a cache, one after the other."""

import io
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from typing import Any

import numpy as np
import torch

from dflash_cache.ahead import Ahead, Stopped, batches, shard_order
from dflash_cache.cache import Cache
from dflash_cache.corpus import Document
from dflash_cache.durable import DENIED, FULL, refusal
from dflash_cache.errors import DataError
from dflash_cache.extract_summary import ExtractSummary
from dflash_cache.health import Guard
from dflash_cache.packing import RowTokens, fill_row
from dflash_cache.progress import Progress, progress
from dflash_cache.provenance import Provenance
from dflash_cache.rowpipe import DEPTH, Clock, HostSlot, OpenShard, RowSink, WriterThread
from dflash_cache.shard import Shard
from dflash_cache.shard_layout import read_json
from dflash_cache.shard_writer import ShardWriter, clean_staging
from dflash_cache.stopping import StopSignals
from dflash_cache.target import Target

PACKAGES = (
    "dflash-train",
    "torch",
    "transformers",
    "flash-linear-attention",
    "causal-conv1d",
    "triton",
)


def versions() -> dict[str, str]:
    """Versions of what computes the states; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


class Job:
    """The missing shards of one cache, one after the other."""

    def __init__(
        self,
        cache: Cache,
        target: Target,
        documents: list[Document],
        batch_rows: int,
        report: Callable[[str], None],
        kernels: list[str] | None = None,
    ):
        self.cache, self.target, self.documents, self.report = cache, target, documents, report
        self.plan, self.batch_rows = cache.plan, batch_rows
        self.codec = cache.codec(target.device)
        self.guard = Guard()
        self.clock = Clock()
        self.sink = RowSink(self.plan, self.guard, self.clock)
        self.slots: list[HostSlot] = []
        self.batches = 0
        self.open: list[OpenShard] = []
        self.done: list[int] = []
        self.skipped: list[dict] = []
        self.kernels = kernels or []
        self.rank, self.world, self.stop = 0, 1, StopSignals()
        self.provenance, self.compared = Provenance(), set[int]()
        self.ahead = Ahead(
            target, self.plan, documents, batch_rows,
            missing=lambda k: not cache.shard_path(k).is_dir(),
            stop=lambda: self.stop.received is not None,
        )  # fmt: skip

    def run(self, rank: int = 0, world: int = 1, stop: StopSignals | None = None) -> None:
        """The shards of this worker, then those that are still missing; joins the writer first.

        Ends after the row in flight when `stop` has received a signal.
        """
        self.rank, self.world, self.stop = rank, world, stop or self.stop
        clean_staging(self.cache.staging_dir)
        missing = self.cache.missing()
        self._check_present(missing)
        if not missing:
            self.report(f"all {self.plan.shards} shards are there: nothing to do")
            return
        self.thread, started = WriterThread(), time.monotonic()
        try:
            self.stop.defer()
            self._shards(shard_order(missing, rank, world))
            self.thread.drain()
            self.clock.total = time.monotonic() - started
        except OSError as error:
            if error.errno not in (*FULL, *DENIED):
                raise
            kept = ": finished shards are kept"
            raise refusal(self.cache.path, error, kept) from error
        finally:
            self.thread.close()
            for shard in self.open:
                shard.writer.abort()
        self._compare_others()

    def _shards(self, numbers: list[int]) -> None:
        mine = [k for k in numbers if k % self.world == self.rank]
        self.ahead.shards, self.ahead.world = numbers, self.world
        stream = None if self.rank == 0 else io.StringIO()  # the other workers are quiet
        with progress(self._tokens(mine), "extract", "tokens", stream) as bar:
            for k in numbers:
                if self.stop.received is not None:
                    return
                if not self.cache.shard_path(k).is_dir():
                    bar.total += 0 if k in mine else self._tokens([k])
                    with suppress(Stopped):
                        self._shard(k, bar)

    def _check_present(self, missing: list[int]) -> None:
        """`DataError` for a present shard with lost or cut chunks; looks at sizes only."""
        for k in sorted(set(range(self.plan.shards)) - set(missing)):
            path = self.cache.shard_path(k)
            try:
                self._compare(k, Shard.open(path, self.cache.geometry).attributes)
            except DataError as error:
                told = str(error)
                advice = f"; remove {path} and run `dflash extract` again"
                raise DataError(told if told.endswith(advice) else told + advice) from error

    def _compare_others(self) -> None:
        """Also what other workers have made meanwhile."""
        for k in sorted(set(range(self.plan.shards)) - set(self.cache.missing()) - self.compared):
            self._compare(k, read_json(self.cache.shard_path(k) / "zarr.json")["attributes"])

    def _compare(self, k: int, attributes: dict[str, Any]) -> None:
        self.compared.add(k)
        self.provenance.add(k, attributes)

    def _tokens(self, shards: list[int]) -> int:
        wanted = np.isin(self.plan.doc_row // self.plan.rows_per_shard, shards)
        return int(self.plan.doc_length[wanted].sum())

    def _shard(self, k: int, bar: Progress) -> None:
        rows, geometry = self.plan.shard_rows(k), self.cache.geometry
        final, staging = self.cache.shard_path(k), self.cache.staging_dir
        writer = ShardWriter(final, staging, geometry, len(rows), self.cache.codec())
        shard = OpenShard(k, rows, writer, [])
        self.open.append(shard)
        for batch in batches(self.plan, k, self.batch_rows):
            if self.stop.received is not None:
                return
            if final.is_dir():  # another worker was faster
                break
            tokens = [fill_row(self.plan, self.documents, row) for row in batch]
            slot = self._run_batch(batch, tokens)
            self.thread.submit(self.sink.write, shard, slot, batch, tokens)
            bar.advance(sum(int(np.count_nonzero(t.document)) for t in tokens))
        self.thread.submit(self._finish, shard)

    def _run_batch(self, batch: range, tokens: list[RowTokens]) -> HostSlot:
        slot = self._slot()
        slot.begin()
        states, document = self.ahead.states(batch, tokens)
        slot.fill(states, document, len(tokens), self.codec)
        return slot

    def _slot(self) -> HostSlot:
        """One more than the queue is long: the one returned has been written."""
        if len(self.slots) <= DEPTH:
            self.slots.append(HostSlot(self.batch_rows, self.cache.geometry, self.target.device))
        self.batches += 1
        return self.slots[(self.batches - 1) % (DEPTH + 1)]

    def _finish(self, shard: OpenShard) -> None:
        """Publish it; a duplicate of what another worker has published is dropped."""
        if self.cache.shard_path(shard.number).is_dir():
            shard.writer.abort()
            self.open.remove(shard)
            return
        attributes = self._attributes(shard)
        self._compare(shard.number, attributes)
        if not self.done:  # a user can still stop before much has been mixed
            for line in self.provenance.warnings():
                self.report(f"warning: {line}")
        self.sink.finish(shard, attributes)
        self.open.remove(shard)
        if shard.writer.published:
            self.skipped += shard.skipped
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
            "weights": self.target.precision,
        }

    def summary(self, seconds: float) -> ExtractSummary:
        rows = [row for k in self.done for row in self.plan.shard_rows(k)]
        cuda, missing = self.target.device.type == "cuda", len(self.cache.missing())
        return ExtractSummary(
            documents=int(np.isin(self.plan.doc_row, rows).sum()) - len(self.skipped),
            tokens=self._tokens(self.done),
            rows=len(rows),
            bytes=sum(self.cache.stored_bytes(k) for k in self.done),
            shards_written=len(self.done),
            shards_skipped=self.plan.shards - len(self.done) - missing,
            fill=self.plan.fill,
            truncated=self.plan.truncated,
            skipped=self.skipped,
            seconds=seconds,
            kernels=[*self.kernels, *self.target.describe_kernels()[1:]],
            peak_gpu_bytes=torch.cuda.max_memory_allocated(self.target.device) if cuda else None,
            forward_share=self.clock.share(self.clock.forward),
            writer_share=self.clock.share(self.clock.writing),
            rank=self.rank,
            world=self.world,
            shards_missing=missing,
            stopped=self.stop.received if missing else None,
            warnings=self.provenance.warnings(),
        )
