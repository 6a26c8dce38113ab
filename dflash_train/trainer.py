"""The training run: one loop over the cache, read from top to bottom. Never loads the target."""

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

import torch

from dflash_cache.cache import Cache, load_frozen
from dflash_cache.devices import choose_device
from dflash_cache.durable import check_creatable
from dflash_cache.errors import DataError, UsageError
from dflash_cache.stopping import StopSignals
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
)
from dflash_train.config import TrainConfig
from dflash_train.keeping import Saver, export_drafter
from dflash_train.meter import Clock
from dflash_train.ranks import Ranks
from dflash_train.rows import choose_io
from dflash_train.runlog import MetricsFile, RunLog
from dflash_train.steady import Steady
from dflash_train.step import TrainStep, learning_rate
from dflash_train.stream import RowStream
from dflash_train.teacher_forced import TeacherForced
from dflash_train.train_summary import TrainSummary, say_end

SETTLE_LIMIT = 100  # steps after which the promise holds even if the allocator still moves


def train(config: TrainConfig, report: Callable[[str], None] = print) -> TrainSummary:
    """Train a drafter from `config.cache` into `config.out`; under torchrun with all its ranks.

    SIGTERM and Ctrl-C end it after the step in flight, with a checkpoint; before the first step, or
    a second time, at once (`Terminated` or KeyboardInterrupt).

    Raises UsageError for settings that do not fit, DataError for a damaged cache, another cache
    than the one resumed, 10 non-finite steps in a row or a rank that is gone, and SteadyError with
    `strict`.
    """
    device = choose_device(config.device)
    with StopSignals() as stop, Ranks.join(device, config.device) as ranks:
        return _train(config, device, ranks, stop, report if ranks.first else _quiet)


def _train(
    config: TrainConfig,
    device: torch.device,
    ranks: Ranks,
    stop: StopSignals,
    report: Callable[[str], None],
) -> TrainSummary:
    if ranks.first:
        _refuse_existing_run(config)
        check_creatable(config.out)
    ranks.share(config.accumulation)
    cache = Cache.open(config.cache)
    notes = check_cache(cache)
    rows, heldout = cache.rows("train"), cache.rows("heldout")[: config.heldout_rows_limit]
    if not rows:
        raise DataError(f"{config.cache} has no train rows yet: run `dflash extract` first")
    frozen = load_frozen(cache.target_dir, device, pick_precision(config.precision, device))
    drafter = build_drafter(config, cache, frozen, device)
    anchors = pick_anchors(config, cache.geometry.seq_len)
    steps = config.steps or -(-config.epochs * len(rows) // config.rows_per_step)
    notes += describe(
        config, cache, drafter, rows=len(rows), anchors=anchors, steps=steps, world=ranks.world
    )
    if not heldout:
        notes.append("no held-out rows in the cache: the run reports the training tau only")
    direct, refused = choose_io(config.io, cache, rows[0])
    for line in notes + refused:
        report(line)

    codec = cache.codec(device)
    train_step = TrainStep(drafter, frozen, config, anchors=anchors, codec=codec, ranks=ranks)
    identity = cache_identity(cache, rows)
    ranks.check_same(f"train rows in {config.cache}", identity["train_rows_digest"])
    first = 0
    if config.resume:
        folder = last_checkpoint(config.out)
        first = resume(folder, drafter, train_step.optimizer, config=config, identity=identity)
        report(f"resumed from {folder} at step {first}")
    ranks.check_same(f"checkpoints in {config.out}", f"{first:x}")
    ranks.from_first_(drafter.parameters())
    path = config.out / "metrics.jsonl" if ranks.first else None
    metrics = MetricsFile(path, keep_until=first if config.resume else None)
    begun = {"step": first, "world": ranks.world, "config": config.to_dict(), "cache": identity}
    metrics.write("start", begun)

    with ExitStack() as stack:
        steady = stack.enter_context(closing(Steady(device, strict=config.strict)))
        stream = RowStream(
            cache,
            rows,
            batch_rows=config.batch_rows,
            seed=config.seed,
            device=device,
            verify=config.verify,
            direct=direct,
            start_step=first * train_step.turns,
            rank=ranks.rank,
            world=ranks.world,
        )
        stack.enter_context(closing(stream))
        evaluation = None
        if heldout and ranks.first:  # the others wait for it at the end of the next step
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
            world=ranks.world,
        )
        save = Saver(config, train_step, identity)
        stop.defer()
        started, done, acceptance, received = time.perf_counter(), first, None, 0

        for step in range(first, steps):
            lr = learning_rate(step, steps=steps, peak=config.lr, warmup=config.warmup)
            with steady.step(step + 1):
                train_step.run(stream, lr)
            done = step + 1
            clock.steps += 1
            received = ranks.largest(stop.received or 0)  # so that all stop after the same step
            if received:
                report(f"{signal.Signals(received).name}: saving after step {done}")

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
                    save.measured(done, acceptance.tau_walk)
                log.evaluation(done, acceptance)
            if _due(done, config.checkpoint_every, steps) or received:
                with clock.excluded():
                    save(done)
            if received:
                break

        interrupted = done < steps
        if log.last.skipped and log.last.skipped >= done - first:
            raise DataError(
                f"all {log.last.skipped} steps had a loss or gradient that is not finite, so there "
                f"is no drafter: check {config.cache} with `dflash inspect-shard`, lower lr"
            )
        if done == first:  # resumed after the last step
            if evaluation:
                acceptance = evaluation.run()
                save.measured(done, acceptance.tau_walk)
            save(done)
        exported = None if interrupted or not ranks.first else export_drafter(config, drafter, done)
        steady.add_others(ranks.total)
        summary = TrainSummary(
            step=done,
            steps=steps,
            rank=ranks.rank,
            world=ranks.world,
            interrupted=interrupted,
            exit_code=128 + received if received and interrupted else 0,
            loss=log.last.loss,
            tau=log.last.tau,
            skipped=log.last.skipped,
            tokens=(done - first) * config.rows_per_step * cache.geometry.seq_len,
            seconds=time.perf_counter() - started,
            acceptance=acceptance,
            steady=steady.counts,
            steady_line=steady.summary(ranks.world),
            checkpoint=save.last,
            drafter=exported[0] if exported else None,
            drafter_step=exported[1] if exported else None,
        )
    say_end(summary, metrics, report, steady.first_violation)
    return summary


def _quiet(_: str) -> None:
    """The report of every rank but the first."""


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
