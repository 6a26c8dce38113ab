"""Which weights a run keeps: when a checkpoint is written, and what `OUT/drafter` holds."""

import math
from pathlib import Path
from typing import Any

from dflash_train.checkpoint import best_checkpoint, copy_drafter, save_checkpoint, save_drafter
from dflash_train.config import TrainConfig
from dflash_train.drafter import Drafter
from dflash_train.step import TrainStep


class Saver:
    """Writes the checkpoint of a step, once, on the first rank."""

    def __init__(self, config: TrainConfig, train_step: TrainStep, identity: dict[str, Any]):
        self.config, self.train_step, self.identity = config, train_step, identity
        self.last = Path()
        self._done = -1
        self._tau: tuple[int, float] = (-1, math.nan)  # the step that it was measured at

    def measured(self, step: int, tau: float) -> None:
        """Write the checkpoint of this step, whose held-out tau is known, if it is the best."""
        self._tau = (step, tau)
        best = best_checkpoint(self.config.out) if self.config.keep_best else None
        if self.config.keep_best and not math.isnan(tau) and (best is None or tau > best.tau):
            self._done = -1  # the rehearsal's checkpoint of this step does not know its tau
            self(step)

    def __call__(self, step: int) -> None:
        if self._done == step or not self.train_step.ranks.first:
            return
        self._done = step
        self.last = save_checkpoint(
            self.config.out,
            self.train_step.drafter,
            self.train_step.optimizer,
            step=step,
            config=self.config,
            identity=self.identity,
            tau=self._tau[1] if self._tau[0] == step else None,
        )


def export_drafter(config: TrainConfig, drafter: Drafter, step: int) -> tuple[Path, int]:
    """Write `OUT/drafter`; returns it and the step whose weights it holds."""
    folder = config.out / "drafter"
    best = best_checkpoint(config.out) if config.keep_best else None
    if best is None or best.step == step:
        return save_drafter(folder, drafter), step
    return copy_drafter(best.folder, folder), best.step
