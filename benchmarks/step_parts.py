"""Where the time of a training step goes, from torch.profiler; for the benchmarks."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dflash_train.rows import Batch
from dflash_train.step import TrainStep

PROFILED = 3
RANGES = {"mask": "prepare", "optimizer": "_update"}  # parts that are methods of their own
# The others by the names of their kernels (of operators on the CPU), the first that fits.
NAMES = {
    "flex backward": r"attention.*backward",
    "flex forward": r"attention",
    "GEMM": r"gemm|nvjet|cutlass|xmma|cublas|splitk|::(add|b)?mm$",
    "optimizer": r"adam|multi_tensor|lpnorm",
    "cross-entropy": r"logsumexp|argmax|_exp_|::exp$|::gather$|linearcrossentropy",
}
PARTS = (*("GEMM", "flex forward", "flex backward", "optimizer", "cross-entropy"), "mask", "rest")
# Ranges that the profiler shows among kernels, and copies that run beside the step.
NO_KERNELS = ("dflash::", "## Call", "Torch-Compiled Region", "Optimizer.", "Memcpy HtoD")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_a_step(step: TrainStep, stream: Iterator[Batch], steps: int) -> float:
    """Mean over `steps`, from an idle device to an idle device; the warm-up has been done."""
    synchronize(step.device)
    started = time.perf_counter()
    for _ in range(steps):
        step.run(stream, 1e-4)
    synchronize(step.device)
    return (time.perf_counter() - started) / steps


def part_of(name: str, spans: list[tuple[str, float, float]], start: float) -> str:
    """By the range that a kernel runs in, else by its name."""
    for label, first, last in spans:
        if first <= start < last:
            return label
    return next((part for part, words in NAMES.items() if re.search(words, name.lower())), "rest")


def breakdown(step: TrainStep, stream: Iterator[Batch]) -> tuple[Counter[str], Counter[str]]:
    """Seconds a step by part, and by kernel for what is "rest"; `idle` is when none ran.

    The profiler slows the host, so `idle` is an upper bound. Names `step`'s methods for good.
    """
    cuda = step.device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    for label, name in RANGES.items():
        setattr(step, name, _within(f"dflash::{label}", getattr(step, name)))
    step.run(stream, 1e-4)
    with profile(activities=kinds) as trace:
        wall = seconds_a_step(step, stream, PROFILED)
    parts, rest = Counter[str](), Counter[str]()
    for part, kernel, seconds in _kernels(trace.events(), cuda):
        parts[part] += seconds / PROFILED
        if part == "rest":
            rest[kernel] += seconds / PROFILED
    parts["idle"] = max(0.0, wall - sum(parts.values()))
    return parts, rest


def _within(label: str, work: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        with record_function(label):
            return work(*arguments)

    return run


def _kernels(events: Any, cuda: bool) -> Iterator[tuple[str, str, float]]:
    """(part, name, seconds) of every kernel; on the CPU of every operator's own time."""
    wanted = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    events = [e for e in events if e.device_type == wanted]
    spans = [
        (e.name.removeprefix("dflash::"), e.time_range.start, e.time_range.end)
        for e in events
        if e.name.startswith("dflash::")
    ]
    for event in events:
        if cuda and (event.is_user_annotation or event.name.startswith(NO_KERNELS)):
            continue
        own = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        yield part_of(event.name, spans, event.time_range.start), event.name, own * 1e-6
