"""`dflash train --dry-run`: what a run takes of memory, disk and time; writes nothing."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from dflash_cache.cache import Cache, FrozenTarget, load_frozen
from dflash_cache.devices import choose_device
from dflash_cache.errors import DataError
from dflash_cache.geometry import Geometry
from dflash_cache.packing import Plan
from dflash_cache.progress import format_bytes, format_seconds
from dflash_train.build import (
    build_drafter,
    check_cache,
    drafter_config,
    pick_anchors,
    pick_precision,
)
from dflash_train.config import TrainConfig
from dflash_train.drafter import Drafter, DrafterConfig
from dflash_train.loss import chunk_size
from dflash_train.meter import peak_flops, step_flops
from dflash_train.rows import RowBuffer, RowReader, choose_io
from dflash_train.stream import RING

SAMPLE_ROWS, SAMPLE_SECONDS = 16, 3.0
ESTIMATE = " (estimate)"


@dataclass(frozen=True)
class DryRun:
    """The figures of one process; bytes, seconds, rows and tokens are whole runs' where not named.

    `memory`: part -> bytes on the device, those that are only estimated named so; `device_bytes`
    what the device has, None for the CPU. `ring_bytes` are those of the host's batches, as the
    pinned allocator rounds them on CUDA. `rows` the train rows, `step_bytes` read a step.
    `disk_bytes_per_second` was timed over `sampled_rows`, past the page cache if `direct`.
    `step_flops` by the analytic count; `peak_seconds` those at the peak of the data sheet.
    """

    device: str
    parameters: int
    memory: dict[str, int]
    device_bytes: int | None
    ring_bytes: int
    rows: int
    steps: int
    rows_per_step: int
    tokens: int
    epochs: float
    step_bytes: int
    sampled_rows: int
    direct: bool
    disk_bytes_per_second: float
    step_flops: float
    peak_seconds: float | None

    @property
    def disk_seconds(self) -> float:
        """No step is faster than this when its rows come from the disk."""
        return self.step_bytes / self.disk_bytes_per_second

    @property
    def least_seconds(self) -> float:
        """No run is shorter."""
        return self.steps * max(self.disk_seconds, self.peak_seconds or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            **asdict(self),
            "memory_total": sum(self.memory.values()),
            "disk_seconds": self.disk_seconds,
            "least_seconds": self.least_seconds,
        }

    def render(self) -> str:
        """For a person."""
        has = f" of {format_bytes(self.device_bytes)}" if self.device_bytes else ""
        total = format_bytes(sum(self.memory.values()))
        parts = [f"  {name:<24}{format_bytes(size):>12}" for name, size in self.memory.items()]
        how = "past the page cache" if self.direct else "buffered, perhaps from the page cache"
        at_peak = ""
        if self.peak_seconds is not None:
            at_peak = f", {self.peak_seconds * 1000:,.1f} ms at the peak of the data sheet"
        return "\n".join(
            [
                f"drafter: {self.parameters:,} parameters",
                f"memory on {self.device}: {total}{has}",
                *parts,
                f"host memory of the ring: {format_bytes(self.ring_bytes)}",
                f"run: {self.steps:,} steps of {self.rows_per_step} rows; {self.tokens:,} tokens, "
                f"{self.epochs:.2f} passes over {self.rows:,} train rows",
                f"disk: {format_bytes(self.disk_bytes_per_second)}/s ({self.sampled_rows} rows, "
                f"{how}); a step reads {format_bytes(self.step_bytes)}, so it takes at least "
                f"{self.disk_seconds * 1000:,.1f} ms",
                f"arithmetic: {self.step_flops / 1e12:,.3f} TFLOP a step{at_peak}",
                f"time: at least {format_seconds(self.least_seconds)}",
            ]
        )


def dry_run(config: TrainConfig, report: Callable[[str], None] = print) -> DryRun:
    """The figures of `dflash train` with this config in one process; reads a few rows.

    Raises UsageError and DataError as the run itself would for settings and a cache that do not
    fit. `report` is given what is to be said besides.
    """
    device, cache = choose_device(config.device), Cache.open(config.cache)
    for line in check_cache(cache):
        report(line)
    rows = cache.rows("train")
    if not rows:
        raise DataError(f"{config.cache} has no train rows yet: run `dflash extract` first")
    frozen = load_frozen(cache.target_dir)  # mapped, not read
    shape, anchors = _shape(config, cache, frozen), pick_anchors(config, cache.geometry.seq_len)
    steps = config.steps or -(-config.epochs * len(rows) // config.rows_per_step)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Drafter(shape).parameters())
    direct, speed, sampled = disk_rate(cache, rows, config.batch_rows, report)
    flops, peak = _step_flops(config, cache, shape, anchors), peak_flops(device)
    cuda = device.type == "cuda"
    return DryRun(
        device=str(device),
        parameters=parameters,
        memory=device_memory(config, cache, frozen, shape, device, anchors, parameters),
        device_bytes=torch.cuda.get_device_properties(device).total_memory if cuda else None,
        ring_bytes=ring_bytes(cache.geometry, config.batch_rows, pinned=cuda),
        rows=len(rows),
        steps=steps,
        rows_per_step=config.rows_per_step,
        tokens=steps * config.rows_per_step * cache.geometry.seq_len,
        epochs=steps * config.rows_per_step / len(rows),
        step_bytes=config.rows_per_step * cache.geometry.stored_row_bytes,
        sampled_rows=sampled,
        direct=direct,
        disk_bytes_per_second=speed,
        step_flops=flops,
        peak_seconds=flops / peak if peak else None,
    )


def _shape(config: TrainConfig, cache: Cache, frozen: FrozenTarget) -> DrafterConfig:
    if config.init_from is None:
        return drafter_config(config, cache, frozen)
    return build_drafter(config, cache, frozen, torch.device("cpu")).config


def device_memory(
    config: TrainConfig,
    cache: Cache,
    frozen: FrozenTarget,
    shape: DrafterConfig,
    device: torch.device,
    anchors: int,
    parameters: int,
) -> dict[str, int]:
    """Part -> bytes on the device while a step runs; on the CPU the batches are the ring itself."""
    width = pick_precision(config.precision, device).itemsize
    matrices = [frozen.embed] if frozen.tied else [frozen.embed, frozen.head]
    parts = {
        "fp32 masters": 4 * parameters,
        "gradients": 4 * parameters,
        "AdamW's moments": 8 * parameters,
        "embedding and head": width * sum(m.numel() for m in matrices),
        f"{RING} batches": RING * sum(batch_sizes(cache.geometry, config.batch_rows)),
    }
    if cache.geometry.encoding != "bf16":
        elements = config.batch_rows * int(np.prod(cache.geometry.row_shape))
        parts["decoded states"] = 2 * elements
    activations = activation_elements(shape, config.batch_rows, cache.geometry.seq_len, anchors)
    copies = parameters if width < 4 else 0  # of the weights, in the computation's precision
    slots = config.batch_rows * anchors * (shape.block_size - 1)
    logits = min(slots, chunk_size(slots)) * shape.vocab_size
    return {
        **parts,
        f"activations{ESTIMATE}": width * (activations + copies),
        f"loss chunk{ESTIMATE}": 2 * width * (logits + slots * shape.hidden_size),
    }


def activation_elements(shape: DrafterConfig, rows: int, seq_len: int, anchors: int) -> int:
    """Elements that the forward keeps for the backward, roughly.

    For each slot and layer: both norms' inputs and outputs, queries before and after RoPE and the
    attention's output, keys and values likewise, three of the MLP. For each token of the context:
    its feature before and after the norm, and each layer's keys and values.
    """
    d, layers = shape.hidden_size, shape.num_hidden_layers
    q, kv = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
    slots = rows * anchors * shape.block_size
    per_slot = layers * (4 * d + 3 * q + 4 * kv + 3 * shape.intermediate_size)
    return slots * per_slot + rows * seq_len * (2 * d + layers * 4 * kv)


def batch_sizes(geometry: Geometry, rows: int) -> list[int]:
    """Bytes of each tensor of a batch."""
    buffer = RowBuffer(geometry, rows, torch.device("meta"))
    return [t.numel() * t.itemsize for t in vars(buffer).values() if t is not None]


def ring_bytes(geometry: Geometry, rows: int, *, pinned: bool) -> int:
    """Host memory of the ring; the pinned allocator rounds each tensor to a power of two."""
    sizes = batch_sizes(geometry, rows)
    return RING * sum(1 << (size - 1).bit_length() if pinned else size for size in sizes)


def disk_rate(
    cache: Cache, rows: Sequence[int], batch_rows: int, report: Callable[[str], None]
) -> tuple[bool, float, int]:
    """(past the page cache or not, stored bytes a second, rows read), of rows spread over `rows`.

    Read as the trainer reads them, without their checksums. O_DIRECT is used where it is possible,
    whatever the run will use: a page cache would tell its own speed.
    """
    direct, refused = choose_io("direct", cache, rows[0])
    for line in refused:
        report(line.replace("--io direct is not possible", "the disk's rate may be too high"))
    sample = [rows[int(i)] for i in np.linspace(0, len(rows) - 1, min(SAMPLE_ROWS, len(rows)))]
    for row in sample:
        cache.locate(row)  # opening a shard is not reading it
    buffer = RowBuffer(cache.geometry, batch_rows, torch.device("cpu"))
    reader, done, started = RowReader(cache, verify="off", direct=direct), 0, time.perf_counter()
    try:
        for first in range(0, len(sample), batch_rows):
            some = [sample[(first + i) % len(sample)] for i in range(batch_rows)]
            reader.fill(buffer, some, [0] * batch_rows)
            done += batch_rows
            if time.perf_counter() - started > SAMPLE_SECONDS:
                break
    finally:
        reader.close()
    seconds = max(time.perf_counter() - started, 1e-9)
    return direct, done * cache.geometry.stored_row_bytes / seconds, done


def _step_flops(config: TrainConfig, cache: Cache, shape: DrafterConfig, anchors: int) -> float:
    return step_flops(
        shape,
        rows=config.rows_per_step,
        seq_len=cache.geometry.seq_len,
        anchors=anchors,
        context=mean_context(cache.plan),
    )


def mean_context(plan: Plan) -> float:
    """Tokens before a token in its document, on average: an anchor's context, about."""
    length = plan.doc_length.astype(np.float64)
    return float((length * (length - 1)).sum() / (2 * length.sum()))
