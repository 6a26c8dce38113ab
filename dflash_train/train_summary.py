"""How a training run ended, for people and for scripts."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dflash_train.runlog import MetricsFile
from dflash_train.steady import SteadyCounts
from dflash_train.teacher_forced import Acceptance

_BEST = ": step {}'s, with the best held-out tau (--no-keep-best takes the last step's)"


@dataclass(frozen=True)
class TrainSummary:
    """How a run ended. `drafter` is the exported folder, None if the run was interrupted, and
    `drafter_step` the step whose weights it holds; `checkpoint` the last one; `acceptance` that of
    the last evaluation, None without held-out rows; `tokens` are the context tokens (rows x S) of
    this session's steps. `exit_code` is 128 + the signal that ended the run, else 0. Of several
    ranks the first has acceptance, checkpoint and drafter, the others have none."""

    step: int
    steps: int
    rank: int
    world: int
    interrupted: bool
    exit_code: int
    loss: float
    tau: float
    skipped: int
    tokens: int
    seconds: float
    acceptance: Acceptance | None
    steady: SteadyCounts
    steady_line: str
    checkpoint: Path
    drafter: Path | None
    drafter_step: int | None

    def to_dict(self) -> dict[str, Any]:
        """For `--json` and metrics.jsonl."""
        plain = replace(self, acceptance=None)
        fields = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(plain).items()}
        return {**fields, "acceptance": asdict(self.acceptance) if self.acceptance else None}


def say_end(
    summary: TrainSummary, metrics: MetricsFile, report: Callable[[str], None], violation: str
) -> None:
    report(summary.steady_line)
    if violation:
        report(f"first: {violation}")
    if summary.interrupted:
        report(
            f"stopped at step {summary.step} of {summary.steps} on request; saved "
            f"{summary.checkpoint}; --resume continues there"
        )
    else:
        best = "" if summary.drafter_step == summary.step else _BEST.format(summary.drafter_step)
        report(f"drafter: {summary.drafter} after {summary.step} steps{best}")
    metrics.write("summary", summary.to_dict())
