"""What a run leaves to read: its log lines and `metrics.jsonl`."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dflash_cache.errors import DataError
from dflash_train.config import TrainConfig
from dflash_train.drafter import DrafterConfig
from dflash_train.meter import Clock, Reading, memory_bytes, peak_flops, step_flops
from dflash_train.tally import MAX_SKIPPED, StepReport
from dflash_train.teacher_forced import Acceptance


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, each with its `kind`; not-a-number becomes null."""

    def __init__(self, path: Path | None, *, keep_until: int | None = None):
        """Starts anew, or keeps the lines up to step `keep_until` of the run that is resumed.

        Without a path (on all ranks but the first) nothing is written.
        """
        self.path = path
        if path is None:
            return
        lines = []
        if keep_until is not None and path.is_file():
            lines = [
                line
                for line in path.read_text(encoding="utf-8").splitlines()
                if json.loads(line).get("step", 0) <= keep_until
            ]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    def write(self, kind: str, content: Any) -> None:
        """Append a mapping or dataclass; each line is flushed, so a kill loses none."""
        if self.path is None:
            return
        fields = content if isinstance(content, dict) else asdict(content)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **_finite(fields)}) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


NOTHING = StepReport(math.nan, math.nan, [], 0.0, 0.0, 0, 0, [])  # before the first log step


@dataclass
class RunLog:
    """Log lines and metrics; stops a run whose steps are no longer finite."""

    config: TrainConfig
    shape: DrafterConfig
    clock: Clock
    metrics: MetricsFile
    report: Callable[[str], None]
    device: torch.device
    steps: int
    anchors: int
    seq_len: int
    world: int = 1
    last: StepReport = field(default_factory=lambda: NOTHING)

    def step(self, step: int, lr: float, counted: StepReport) -> None:
        seconds, waited = self.clock.lap()
        self.last = counted
        tokens = self.config.rows_per_step * self.seq_len
        reading = Reading(
            step=step,
            loss=counted.loss,
            tau=counted.tau,
            lr=lr,
            tokens_per_s=tokens / seconds,
            mfu=self._mfu(counted.context, seconds),
            data_wait=waited,
            memory_gib=memory_bytes(self.device) / 2**30,
            eta_s=(self.steps - step) * seconds,
            grad_norm=counted.grad_norm,
            skipped=counted.skipped,
            accuracy=counted.accuracy,
        )
        self.report(reading.line(self.steps))
        self.metrics.write("train", reading)
        if counted.longest_skip >= MAX_SKIPPED:
            raise DataError(
                f"{counted.longest_skip} steps in a row up to step {step} had a loss or gradient "
                f"that is not finite, the last {MAX_SKIPPED} on rows {counted.bad_rows} of the "
                "cache: run `dflash inspect-shard` on their shards, or lower the learning rate"
            )

    def _mfu(self, context: float, seconds: float) -> float | None:
        peak = peak_flops(self.device)
        if peak is None:
            return None
        rows = self.config.rows_per_step
        flops = step_flops(
            self.shape,
            rows=rows,
            seq_len=self.seq_len,
            anchors=self.anchors,
            context=context,
        )
        return flops / seconds / (peak * self.world)

    def evaluation(self, step: int, acceptance: Acceptance) -> None:
        self.report(f"step {step}/{self.steps} | {acceptance.line()}")
        self.metrics.write("eval", {"step": step, **asdict(acceptance)})
