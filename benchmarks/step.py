"""The trainer's own step on random states: speed, share of the GEMM rate, memory, where time goes.

    python benchmarks/step.py qwen3-8b                 # also qwen3.6-27b; one GPU
    python benchmarks/step.py tiny --steps 3           # a smoke test on a CPU

No cache is needed: frozen matrices, drafter and batches are made in memory. "Resident" batches lie
in device memory; "ring" batches come from pinned host memory through the trainer's RowStream, whose
loader here reads nothing. Each step ends with the finished optimizer step on fp32 masters.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
from step_parts import PARTS, breakdown, seconds_a_step, synchronize
from torch import Tensor

from dflash_cache.devices import choose_device
from dflash_cache.encoding import Codec
from dflash_cache.geometry import Geometry
from dflash_cache.target_files import FrozenTarget
from dflash_train.build import pick_precision
from dflash_train.config import TrainConfig
from dflash_train.drafter import Drafter, DrafterConfig, default_config
from dflash_train.meter import step_flops
from dflash_train.rows import RowBuffer
from dflash_train.step import TrainStep
from dflash_train.stream import RowStream

WARMUP = 6


@dataclass(frozen=True)
class Size:
    """A target's and its drafter's shape; the drafter has 5 layers, unless it is tiny."""

    hidden: int
    intermediate: int
    vocab: int
    target_layers: int
    taps: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 5
    seq_len: int = 4096
    anchors: int = 512
    theta: float = 1e6


SIZES = {
    "qwen3-8b": Size(4096, 12288, 151_936, 36, (1, 9, 17, 25, 33)),
    "qwen3.6-27b": Size(5120, 17408, 248_320, 64, (1, 16, 31, 46, 61), theta=1e7),
    "tiny": Size(64, 128, 512, 8, (1, 3), 4, 2, 16, layers=2, seq_len=256, anchors=16),
}


def drafter_shape(size: Size, block_size: int, sliding: int, window: int | None) -> DrafterConfig:
    """As the trainer makes it; the first `sliding` layers have a window."""
    target = {
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "vocab_size": size.vocab,
        "num_hidden_layers": size.target_layers,
        "rope_theta": size.theta,
    }
    kinds = ("sliding_attention",) * sliding + ("full_attention",) * (size.layers - sliding)
    return default_config(
        target,
        size.taps,
        mask_token_id=size.vocab - 1,
        block_size=block_size,
        layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        layer_types=kinds,
        sliding_window=window if sliding else None,
    )


def random_frozen(size: Size, device: torch.device, dtype: torch.dtype) -> FrozenTarget:
    """Untied matrices of a usual scale."""
    embed, head = (
        torch.randn(size.vocab, size.hidden, device=device, dtype=dtype) * 0.02 for _ in range(2)
    )
    return FrozenTarget(embed, head, torch.ones(size.hidden, device=device, dtype=dtype), {})


def fill_buffer(buffer: RowBuffer, geometry: Geometry, vocab: int, shortest: int, codec: Codec):
    """Random states, and rows of documents of `shortest` to S tokens, all of them supervised."""
    rows, seq_len = buffer.input_ids.shape
    encoded = codec.encode(torch.randn(rows, *geometry.row_shape, device=codec.device))
    buffer.states.copy_(encoded.states)
    if buffer.scales is not None and encoded.scales is not None:
        buffer.scales.copy_(encoded.scales)
    buffer.input_ids.copy_(torch.randint(0, vocab - 1, (rows, seq_len)))
    buffer.loss_mask.fill_(1)
    buffer.row_ids.copy_(torch.arange(rows))
    buffer.epochs.zero_()
    for row in range(rows):
        document, position = documents(seq_len, shortest)
        buffer.document[row].copy_(document)
        buffer.position[row].copy_(position)


def documents(seq_len: int, shortest: int) -> tuple[Tensor, Tensor]:
    """document and position int32 [S] of a row; the last document is cut at the row's end."""
    document, position = (torch.zeros(seq_len, dtype=torch.int32) for _ in range(2))
    start, number = 0, 0
    while start < seq_len:
        number += 1
        length = int(torch.randint(shortest, seq_len + 1, ()))
        end = min(start + length, seq_len)
        document[start:end] = number
        position[start:end] = torch.arange(end - start, dtype=torch.int32)
        start = end
    return document, position


class FilledReader:
    """In the place of a RowReader: the ring's slots hold their rows already."""

    def fill(self, buffer: RowBuffer, rows: Any, epochs: Any) -> None:
        buffer.row_ids.copy_(torch.as_tensor(rows))
        buffer.epochs.copy_(torch.as_tensor(epochs))

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def ring(
    geometry: Geometry, rows: int, device: torch.device, fill: Callable[[RowBuffer], None]
) -> Iterator[RowStream]:
    """The trainer's stream over slots that are filled once."""
    cache: Any = SimpleNamespace(geometry=geometry, path=Path("random"))
    stream = RowStream(cache, range(4096), batch_rows=rows, seed=0, device=device)
    stream.reader.close()
    stream.reader = FilledReader()  # type: ignore[assignment]
    for slot in stream.host:
        fill(slot)
    try:
        yield stream
    finally:
        stream.close()


def gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square product, about half a second of it."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=dtype)
    repeats = 300 if device.type == "cuda" else 10
    for timed in (repeats // 5, repeats):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(timed):
            torch.mm(a, b, out=out)
        synchronize(device)
        seconds = (time.perf_counter() - started) / timed
    return 2 * n**3 / seconds


@click.command()
@click.argument("name", type=click.Choice(sorted(SIZES)))
@click.option("--steps", default=30, show_default=True, help="Steps that are timed.")
@click.option("--rows", default=1, show_default=True, help="Rows of one forward.")
@click.option("--accumulation", default=1, show_default=True, help="Forwards of one step.")
@click.option("--seq-len", type=int, help="Tokens of a row.  [default: the size's]")
@click.option("--anchors", type=int, help="Blocks a row.  [default: the size's]")
@click.option("--block-size", default=16, show_default=True, help="Slots of a block.")
@click.option("--sliding", default=0, show_default=True, help="Layers with a window.")
@click.option("--window", default=2048, show_default=True, help="Their window.  [tokens]")
@click.option("--shortest", type=int, help="Shortest document; default: one document a row.")
@click.option("--encoding", default="bf16", show_default=True, help="bf16, int8 or fp8.")
@click.option("--loss", default="decay", show_default=True, help="decay or dpace.")
@click.option("--device", default="auto", show_default=True, help="cuda, cpu or auto.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def main(name: str, steps: int, rows: int, encoding: str, device: str, **asked: Any) -> None:
    """Time the trainer's step for a named size."""
    size, place = SIZES[name], choose_device(device)
    seq_len, anchors = asked["seq_len"] or size.seq_len, asked["anchors"] or size.anchors
    shape = drafter_shape(size, asked["block_size"], asked["sliding"], asked["window"])
    config = TrainConfig(
        cache=Path("random"), out=Path("none"), batch_rows=rows,
        accumulation=asked["accumulation"], loss=asked["loss"],
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = pick_precision("auto", place)
    geometry = Geometry(seq_len, 1, len(size.taps), size.hidden, encoding)
    codec = Codec(encoding, torch.ones(geometry.taps, geometry.hidden), place)
    with place:
        drafter = Drafter(shape)
    frozen = random_frozen(size, place, dtype)
    step = TrainStep(drafter, frozen, config, anchors=anchors, codec=codec)

    def fill(buffer: RowBuffer) -> None:
        fill_buffer(buffer, geometry, size.vocab, asked["shortest"] or seq_len, codec)

    figures: dict[str, Any] = {"name": name, "device": _name(place)}
    buffers = [RowBuffer(geometry, rows, place) for _ in range(2)]
    for buffer in buffers:
        fill(buffer)
    resident = itertools.cycle(b.batch(0, tuple(range(rows))) for b in buffers)
    started = time.perf_counter()
    step.run(resident, 1e-4)
    synchronize(place)
    figures["first_step_s"] = time.perf_counter() - started
    for _ in range(WARMUP):
        step.run(resident, 1e-4)
    step.report()
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
    figures["resident_s"] = seconds_a_step(step, resident, steps)
    figures["context"] = step.report().context
    if place.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated(place) / 2**30
    with ring(geometry, rows, place, fill) as stream:
        stream.start()
        for _ in range(WARMUP):
            step.run(stream, 1e-4)
        figures["ring_s"] = seconds_a_step(step, stream, steps)
        figures["ring_wait_s"] = stream.wait_seconds / (steps + WARMUP)
    figures["gemm_flops"] = gemm_rate(place, dtype)
    figures["step_flops"] = step_flops(
        shape, rows=config.rows_per_step, seq_len=seq_len, anchors=anchors,
        context=figures["context"],
    )  # fmt: skip
    parts, rest = breakdown(step, resident)
    figures["parts_s"] = {part: parts[part] for part in (*PARTS, "idle")}
    figures["rest_s"] = dict(rest.most_common(12))
    figures["context_tokens"] = config.rows_per_step * seq_len
    figures["draft_tokens"] = config.rows_per_step * anchors * shape.block_size
    print(json.dumps(figures, indent=2) if asked["as_json"] else render(figures))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def render(figures: dict[str, Any]) -> str:
    """A line for each way to feed it, then the parts of the resident step."""
    lines = [
        f"{figures['name']} on {figures['device']}, torch {torch.__version__}: "
        f"{figures['step_flops'] / 1e12:,.3f} TFLOP a step at a mean context of "
        f"{figures['context']:,.0f}; a large GEMM: {figures['gemm_flops'] / 1e12:,.2f} TFLOP/s",
        f"{'':10}{'ms/step':>10}{'context tok/s':>15}{'draft tok/s':>13}{'TFLOP/s':>10}"
        f"{'of GEMM':>9}",
    ]
    for way in ("resident", "ring"):
        seconds = figures[f"{way}_s"]
        rate = figures["step_flops"] / seconds
        lines.append(
            f"{way:10}{seconds * 1000:>10,.1f}{figures['context_tokens'] / seconds:>15,.0f}"
            f"{figures['draft_tokens'] / seconds:>13,.0f}{rate / 1e12:>10,.2f}"
            f"{rate / figures['gemm_flops']:>9.1%}"
        )
    peak = f"; peak {figures['peak_gib']:.1f} GiB" if "peak_gib" in figures else ""
    lines.append(
        f"first step after {figures['first_step_s']:,.1f} s; the ring's step waited "
        f"{figures['ring_wait_s'] * 1000:,.2f} ms for data{peak}"
    )
    total = sum(figures["parts_s"].values())
    lines += [
        f"  {part:14}{seconds * 1000:>10,.2f} ms {seconds / total:>7.1%}"
        for part, seconds in figures["parts_s"].items()
    ]
    lines.append("largest of the rest:")
    lines += [f"  {s * 1000:>8,.2f} ms  {kernel[:80]}" for kernel, s in figures["rest_s"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
