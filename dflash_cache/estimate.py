"""Know before you start: what an extraction holds, what it takes of the disk, how long it runs."""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_cache.corpus import Document
from dflash_cache.durable import nearest_folder
from dflash_cache.encoding import Codec
from dflash_cache.equaliser import batch_arrays
from dflash_cache.errors import UsageError
from dflash_cache.geometry import Geometry
from dflash_cache.packing import Plan, fill_row
from dflash_cache.progress import format_bytes
from dflash_cache.rowpipe import HostSlot
from dflash_cache.target import Target


@dataclass(frozen=True)
class Estimate:
    """The figures of a plan, and of what is still missing of its cache.

    `token_bytes`: bytes on the disk of a place in a row, over all arrays; `estimated`: that it
    depends on the states and is a planning figure. `total_bytes` are those of all shards,
    `missing_bytes` of the missing ones and, as long as there is no cache, of its target files and
    plan. `free_bytes` are free in the folder `place`. `left_out`: reason -> lines of the corpus.
    `sample_tokens` are run beforehand, by one worker, for the channel scale. `tokens_per_second` is
    one worker's, `seconds` all workers together; None if nothing was timed.
    """

    documents: int
    tokens: int
    rows: int
    shards: int
    seq_len: int
    fill: float
    truncated: int
    encoding: str
    token_bytes: float
    estimated: bool
    total_bytes: int
    missing_shards: int
    missing_tokens: int
    missing_bytes: int
    free_bytes: int
    place: str
    sample_tokens: int = 0
    workers: int = 1
    left_out: dict[str, int] = field(default_factory=dict)
    tokens_per_second: float | None = None
    seconds: float | None = None

    @property
    def fits(self) -> bool:
        return self.missing_bytes <= self.free_bytes

    def timed(self, tokens_per_second: float) -> "Estimate":
        """With the time that follows from the speed of one worker."""
        tokens = self.missing_tokens / self.workers + self.sample_tokens
        seconds = tokens / tokens_per_second
        return replace(self, tokens_per_second=tokens_per_second, seconds=seconds)

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "fits": self.fits}

    def render(self) -> str:
        """For a person: the plan, the disk, the time; a line each."""
        return "\n".join([self._plan(), self._disk(), *self.time_lines()])

    def _plan(self) -> str:
        cut = f", {self.truncated} documents cut to {self.seq_len} tokens" if self.truncated else ""
        return (
            f"plan: {self.documents:,} documents, {self.tokens:,} tokens in {self.rows:,} rows of "
            f"{self.seq_len:,} ({100 * self.fill:.1f} % full), {self.shards:,} shards{cut}"
        )

    def _disk(self) -> str:
        what = f"{self.encoding}, an estimate" if self.estimated else self.encoding
        total, missing, free = map(
            format_bytes, (self.total_bytes, self.missing_bytes, self.free_bytes)
        )
        return (
            f"disk: {self.token_bytes:,.0f} bytes a token ({what}), {total} in all, "
            f"{missing} still to write; {free} free in {self.place}"
        )

    def time_lines(self) -> list[str]:
        if self.seconds is None or self.tokens_per_second is None:
            return []
        sample = f" and {self.sample_tokens:,} for the channel scale" if self.sample_tokens else ""
        by = f" on each of {self.workers} workers" if self.workers > 1 else ""
        return [
            f"time: about {format_duration(self.seconds)} for {self.missing_tokens:,} tokens"
            f"{sample}, {self.tokens_per_second:,.0f} a second in a timed batch{by}"
        ]


def make_estimate(
    plan: Plan, geometry: Geometry, missing: Sequence[int], more_bytes: int, out: Path
) -> Estimate:
    """From the plan and the numbers of the missing shards; `more_bytes`: what else is missing."""
    wanted = np.isin(plan.doc_row // plan.rows_per_shard, missing)
    rows = sum(len(plan.shard_rows(k)) for k in missing)
    place = nearest_folder(out)
    return Estimate(
        documents=plan.documents,
        tokens=plan.tokens,
        rows=plan.rows,
        shards=plan.shards,
        seq_len=plan.seq_len,
        fill=plan.fill,
        truncated=plan.truncated,
        encoding=geometry.encoding,
        token_bytes=geometry.stored_token_bytes,
        estimated=geometry.how.planes,
        total_bytes=plan.rows * geometry.stored_row_bytes,
        missing_shards=len(missing),
        missing_tokens=int(plan.doc_length[wanted].sum(dtype=np.int64)),
        missing_bytes=rows * geometry.stored_row_bytes + more_bytes,
        free_bytes=shutil.disk_usage(place).free,
        place=str(place),
    )


def plan_bytes(plan: Plan) -> int:
    """What `plan.zarr` takes of the disk."""
    return sum(values.nbytes for values in vars(plan).values() if isinstance(values, np.ndarray))


def check_space(estimate: Estimate, force: bool, report: Callable[[str], None]) -> None:
    """`UsageError` if the disk is too small for what is missing; with `force` only a warning."""
    if estimate.fits:
        return
    need, free = format_bytes(estimate.missing_bytes), format_bytes(estimate.free_bytes)
    told = f"the cache still needs {need}, but {estimate.place} has only {free} left"
    if not force:
        raise UsageError(
            f"{told}; free space, give another --out or a smaller --encoding, or --force to go on"
        )
    report(f"warning: {told}; going on because of --force")


def first_batch(
    target: Target, plan: Plan, documents: Sequence[Document], rows: Sequence[int], batch_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """input_ids, document, position [B, S] of the batch that `rows` begin with, as the job has
    it: filled up with padding on CUDA."""
    tokens = [fill_row(plan, documents, row) for row in rows[:batch_rows]]
    return batch_arrays(tokens, batch_rows - len(tokens) if target.one_shape else 0)


def measure(
    target: Target,
    geometry: Geometry,
    plan: Plan,
    documents: Sequence[Document],
    rows: Sequence[int],
    batch_rows: int,
) -> float:
    """Tokens a second: the second of two runs of the batch that `rows` begin with.

    Forward, encoding and the copy to the host; the first run, in which kernels are compiled and
    chosen, does not count.
    """
    ids, document, position = first_batch(target, plan, documents, rows, batch_rows)
    count = min(batch_rows, len(rows))
    slot = HostSlot(batch_rows, geometry, target.device)
    # Any scale will do, and it is not known before there is a cache.
    codec = Codec(geometry.encoding, torch.ones(geometry.row_shape[1:]), target.device)
    seconds = 0.0
    for _ in range(2):
        started = time.monotonic()
        slot.fill(target.run_rows(ids, document, position), document, count, codec)
        slot.wait()
        seconds = time.monotonic() - started
    return int((document != 0).sum()) / max(seconds, 1e-9)


def format_duration(seconds: float) -> str:
    """`3 s`, `12 min 30 s`, `3 h 20 min`, `6 d 4 h`: two units at most."""
    whole = max(round(seconds), 1)
    for unit, size, below, step in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // step} {below}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"
