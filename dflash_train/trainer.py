"""The training run: one loop over the cache, read from top to bottom. Never loads the target."""

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from dflash_cache.cache import Cache, load_frozen
from dflash_cache.devices import choose_device
from dflash_cache.durable import check_creatable
from dflash_cache.errors import DataError, UsageError
from dflash_train.build import (
    build_drafter,
    check_cache,
    describe,
    pick_anchors,
    pick_precision,
)
from dflash_train.checkpoint import (
    cache_identity,
    last_checkpoint,
    resume,
    save_checkpoint,
    save_drafter,
)
from dflash_train.config import TrainConfig
from dflash_train.meter import Clock
from dflash_train.runlog import MetricsFile, RunLog
from dflash_train.steady import Steady, SteadyCounts
from dflash_train.step import TrainStep, learning_rate
from dflash_train.stream import RowStream
from dflash_train.teacher_forced import Acceptance, TeacherForced

SETTLE_LIMIT = 100  # steps after which the promise holds even if the allocator still moves


@dataclass(frozen=True)
class TrainSummary:
    """How a run ended. `drafter` is the exported folder, None if the run was interrupted;
    `checkpoint` the last one; `acceptance` None without held-out rows; `tokens` are the context
    tokens (rows x S) of this session's steps."""

    step: int
    steps: int
    interrupted: bool
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

    def to_dict(self) -> dict[str, Any]:
        """For `--json` and metrics.jsonl."""
        plain = replace(self, acceptance=None)
        fields = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(plain).items()}
        return {**fields, "acceptance": asdict(self.acceptance) if self.acceptance else None}


def train(config: TrainConfig, report: Callable[[str], None] = print) -> TrainSummary:
    """Train a drafter from `config.cache` into `config.out`.

    Raises UsageError for settings that do not fit, DataError for a damaged cache, another cache
    than the one resumed, or 10 non-finite steps in a row, and SteadyError with `strict`.
    """
    _refuse_existing_run(config)
    check_creatable(config.out)
    device = choose_device(config.device)
    cache = Cache.open(config.cache)
    notes = check_cache(cache)
    rows, heldout = cache.rows("train"), cache.rows("heldout")[: config.heldout_rows_limit]
    if not rows:
        raise DataError(f"{config.cache} has no train rows yet: run `dflash extract` first")
    frozen = load_frozen(cache.target_dir, device, pick_precision(config.precision, device))
    drafter = build_drafter(config, cache, frozen, device)
    anchors = pick_anchors(config, cache.geometry.seq_len)
    steps = config.steps or -(-config.epochs * len(rows) // config.rows_per_step)
    notes += describe(config, cache, drafter, rows=len(rows), anchors=anchors, steps=steps)
    if not heldout:
        notes.append("no held-out rows in the cache: the run reports the training tau only")
    for line in notes:
        report(line)

    train_step = TrainStep(drafter, frozen, config, anchors=anchors, codec=cache.codec(device))
    identity = cache_identity(cache, rows)
    first = 0
    if config.resume:
        folder = last_checkpoint(config.out)
        first = resume(folder, drafter, train_step.optimizer, config=config, identity=identity)
        report(f"resumed from {folder} at step {first}")
    metrics = MetricsFile(config.out / "metrics.jsonl", keep_until=first if config.resume else None)
    metrics.write("start", {"step": first, "config": config.to_dict(), "cache": identity})

    with ExitStack() as stack:
        stop = stack.enter_context(StopSignal(report))
        steady = stack.enter_context(closing(Steady(device, strict=config.strict)))
        stream = RowStream(
            cache,
            rows,
            batch_rows=config.batch_rows,
            seed=config.seed,
            device=device,
            verify=config.verify,
            start_step=first * config.accumulation,
        )
        stack.enter_context(closing(stream))
        evaluation = None
        if heldout:
            evaluation = TeacherForced(
                drafter, frozen, cache, heldout, anchors=anchors, verify=config.verify
            )
            stack.enter_context(closing(evaluation))
        clock = Clock(lambda: stream.wait_seconds)
        log = RunLog(
            config,
            drafter.config,
            clock,
            metrics,
            report,
            device,
            steps=steps,
            anchors=anchors,
            seq_len=cache.geometry.seq_len,
        )
        save = _Saver(config, train_step, identity)
        started, done, acceptance = time.perf_counter(), first, None

        for step in range(first, steps):
            lr = learning_rate(step, steps=steps, peak=config.lr, warmup=config.warmup)
            with steady.step(step + 1):
                train_step.run(stream, lr)
            done = step + 1
            clock.steps += 1

            # Everything that compiles or reserves memory happens once before the loader starts.
            if done - first == config.warmup_steps:
                if evaluation:
                    evaluation.rehearse()
                save(done)
                steady.settle()
                stream.start()
                clock.restart()
            elif done - first > config.warmup_steps and not steady.armed:
                if evaluation:
                    evaluation.rehearse()
                if steady.settled() or done - first > config.warmup_steps + SETTLE_LIMIT:
                    steady.arm()

            if done % config.log_every == 0 or done == steps:
                log.step(done, lr, train_step.report())
            if evaluation and _due(done, config.eval_every, steps):
                with clock.excluded():
                    acceptance = evaluation.run()
                log.evaluation(done, acceptance)
            if _due(done, config.checkpoint_every, steps) or stop.requested:
                with clock.excluded():
                    save(done)
            if stop.requested:
                break

        interrupted = done < steps
        if log.last.skipped and log.last.skipped >= done - first:
            raise DataError(
                f"all {log.last.skipped} steps had a loss or gradient that is not finite, so there "
                f"is no drafter: check {config.cache} with `dflash inspect-shard`, lower lr"
            )
        if done == first:  # resumed after the last step
            save(done)
            acceptance = evaluation.run() if evaluation else None
        summary = TrainSummary(
            step=done,
            steps=steps,
            interrupted=interrupted,
            loss=log.last.loss,
            tau=log.last.tau,
            skipped=log.last.skipped,
            tokens=(done - first) * config.rows_per_step * cache.geometry.seq_len,
            seconds=time.perf_counter() - started,
            acceptance=acceptance,
            steady=steady.counts,
            steady_line=steady.summary(),
            checkpoint=save.last,
            drafter=None if interrupted else save_drafter(config.out / "drafter", drafter),
        )
    _say_end(summary, metrics, report, steady.first_violation)
    return summary


def _due(step: int, every: int, steps: int) -> bool:
    return step == steps or (every > 0 and step % every == 0)


def _refuse_existing_run(config: TrainConfig) -> None:
    names = ("checkpoints", "drafter", "metrics.jsonl")
    found = [name for name in names if (config.out / name).exists()]
    if found and not config.resume:
        raise UsageError(
            f"{config.out} holds a run already ({', '.join(found)}): give --resume to continue it, "
            "or another --out"
        )


class StopSignal:
    """Turns SIGTERM and the first Ctrl-C into `requested`; a second Ctrl-C interrupts at once."""

    def __init__(self, report: Callable[[str], None]):
        self.report, self.requested = report, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        except ValueError:  # not the main thread, which alone may set handlers
            self._before.clear()
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.report(f"{signal.Signals(number).name}: saving after this step")

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class _Saver:
    """Writes the checkpoint of a step, once."""

    def __init__(self, config: TrainConfig, train_step: TrainStep, identity: dict[str, Any]):
        self.config, self.train_step, self.identity = config, train_step, identity
        self.last = Path()

    def __call__(self, step: int) -> None:
        if self.last.name.endswith(f"{step:08d}"):
            return
        self.last = save_checkpoint(
            self.config.out,
            self.train_step.drafter,
            self.train_step.optimizer,
            step=step,
            config=self.config,
            identity=self.identity,
        )


def _say_end(
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
        report(f"drafter: {summary.drafter} after {summary.step} steps")
    metrics.write("summary", summary.to_dict())
