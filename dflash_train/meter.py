"""Speed of a run: FLOPs of a step, share of the GPU's peak, and the log line."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_cache.progress import format_seconds
from dflash_train.drafter import DrafterConfig

# Dense bf16 of the data sheets (SXM parts), FLOP/s; a GPU that is not here gets no MFU.
PEAK_FLOPS = {"H200": 989.5e12, "H100": 989.5e12, "A100": 312e12, "B200": 2250e12}


def step_flops(
    shape: DrafterConfig, *, rows: int, seq_len: int, anchors: int, context: float
) -> float:
    """FLOPs of one step, forward and backward, as the log's MFU counts them.

    Four parts: context, block, head and attention; `context` is the mean length of the anchors'
    contexts. The factor 14 counts the scores that the backward computes again.
    """
    d, layers = shape.hidden_size, shape.num_hidden_layers
    q, kv = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
    taps, slots = len(shape.target_layer_ids), shape.block_size
    blocks = rows * anchors
    context_part = rows * seq_len * (4 * taps * d**2 + layers * 12 * d * kv)
    per_slot = 2 * d * q + 2 * d * kv + 3 * d * shape.intermediate_size
    block_part = blocks * slots * layers * 6 * per_slot
    head_part = blocks * (slots - 1) * 4 * shape.vocab_size * d
    attention_part = blocks * slots * layers * q * (context + slots) * 14
    return context_part + block_part + head_part + attention_part


def peak_flops(device: torch.device) -> float | None:
    """Peak of the GPU by its name, or None if the table lacks it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def memory_bytes(device: torch.device) -> int:
    """Reserved on the GPU; on the CPU the resident size of this process (0 if unknown)."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    status = Path("/proc/self/statm")
    if not status.is_file():
        return 0
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Reading:
    """One log line's numbers; `mfu` is None where the device has no known peak."""

    step: int
    loss: float
    tau: float
    lr: float
    tokens_per_s: float
    mfu: float | None
    data_wait: float
    memory_gib: float
    eta_s: float
    grad_norm: float
    skipped: int
    accuracy: list[float]

    def line(self, steps: int) -> str:
        """`step | loss | tau | lr | tok/s | MFU | data wait | memory | ETA`"""
        width = len(str(steps))
        parts = [
            f"step {self.step:>{width}}/{steps}",
            f"loss {self.loss:.4f}",
            f"tau {self.tau:.2f}",
            f"lr {self.lr:.2e}",
            f"{self.tokens_per_s:,.0f} tok/s",
            *([f"MFU {100 * self.mfu:.1f} %"] if self.mfu is not None else []),
            f"data wait {100 * self.data_wait:.1f} %",
            f"memory {self.memory_gib:.2f} GiB",
            f"ETA {format_seconds(self.eta_s)}",
            *([f"{self.skipped} skipped"] if self.skipped else []),
        ]
        return " | ".join(parts)


class Clock:
    """Wall time, steps and data wait since the last lap, without evaluations and checkpoints."""

    def __init__(self, wait_seconds: Callable[[], float]):
        self._wait_seconds = wait_seconds
        self._pace = (0.0, 0.0)  # what the last lap with any step said
        self._started, self._wait = time.perf_counter(), wait_seconds()
        self._excluded, self.steps = 0.0, 0

    def restart(self) -> None:
        if self.steps:
            self._pace = self._measure()
        self._started, self._wait = time.perf_counter(), self._wait_seconds()
        self._excluded, self.steps = 0.0, 0

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """What runs in here is not the steps' time."""
        started = time.perf_counter()
        yield
        self._excluded += time.perf_counter() - started

    def lap(self) -> tuple[float, float]:
        """(seconds a step, share of them that waited for data) since the last lap."""
        self.restart()
        return self._pace

    def _measure(self) -> tuple[float, float]:
        seconds = max(time.perf_counter() - self._started - self._excluded, 1e-9)
        waited = self._wait_seconds() - self._wait
        return seconds / self.steps, min(waited / seconds, 1.0)
