"""What an extraction did, for a person and for a script."""

import signal
from dataclasses import asdict, dataclass, field
from typing import Any

from dflash_cache.progress import format_bytes, format_seconds


@dataclass(frozen=True)
class ExtractSummary:
    """What a run did. documents, tokens, rows and bytes are those that this run wrote.

    bytes: of the shards' files. forward_share: of the run's time in which the device worked on
    states (forward, encoding), writer_share: in which the writer thread checked and wrote.
    `stopped`: the signal that ended it early, `shards_missing` what was left then.
    """

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
    forward_share: float = 0.0
    writer_share: float = 0.0
    rank: int = 0
    world: int = 1
    shards_missing: int = 0
    stopped: int | None = None
    warnings: list[str] = field(default_factory=list)

    def _bottleneck(self) -> str:
        """Which of the two that overlap is what the run waits for."""
        idle = max(0.0, 1 - self.writer_share)
        what = "the target is" if self.forward_share >= self.writer_share else "writing is"
        return (
            f"forward {100 * self.forward_share:.0f} %, writer idle {100 * idle:.0f} %: "
            f"{what} the bottleneck"
        )

    @property
    def exit_code(self) -> int:
        """As a shell has it: 128 + the signal."""
        return 0 if self.stopped is None else 128 + self.stopped

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
            f"{self.shards_skipped} were there; {format_bytes(self.bytes)} in "
            f"{format_seconds(self.seconds)} ({self.tokens_per_second:,.0f} tokens/s)"
        ]
        if self.rows and self.rank == 0:  # the others say one line
            lines.append(self._bottleneck())
        if self.skipped:
            reasons = sorted({str(entry["reason"]) for entry in self.skipped})
            lines.append(f"skipped {len(self.skipped)} documents: {', '.join(reasons)}")
        if self.peak_gpu_bytes:
            lines.append(f"peak GPU memory: {format_bytes(self.peak_gpu_bytes)}")
        lines += [f"warning: {line}" for line in self.warnings]
        if self.stopped is not None:
            there = self.shards_written + self.shards_skipped
            lines.append(
                f"stopped by {signal.Signals(self.stopped).name}: {there} of "
                f"{there + self.shards_missing} shards are there and kept; run the same command "
                "again to go on"
            )
        worker = f"[rank {self.rank}/{self.world}] " if self.world > 1 else ""
        return "\n".join(worker + line for line in lines)
