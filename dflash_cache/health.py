"""No broken states into a cache: find documents whose states are not finite, zero or constant."""

import threading
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dflash_cache.errors import DataError

FIRST, FIRST_SHARE = 100, 10  # one in ten of the first hundred documents
LATER, LATER_SHARE = 1000, 1000  # one in a thousand, once a thousand have been seen


def extremes(states: Tensor) -> Tensor:
    """states [B, S, T, D] -> float32 [B, 2, S, T]: least and largest element per token and tap."""
    least, largest = torch.aminmax(states, dim=-1)
    return torch.stack([least, largest], dim=1).float()


def what_is_wrong(least: np.ndarray, largest: np.ndarray) -> str | None:
    """Why the states of a document cannot be used, from its extremes [L, T]; None if they can.

    One vector of a healthy model is never the same number in all of its channels.
    """
    if not (np.isfinite(least).all() and np.isfinite(largest).all()):
        return "non-finite states"
    flat = least == largest
    if not flat.any():
        return None
    return "all-zero states" if (largest[flat] == 0).all() else "constant states"


@dataclass
class Guard:
    """Counts documents and bad ones; raises `DataError` when there are too many to go on."""

    seen: int = 0
    skipped: list[dict] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, bad: list[dict], documents: int) -> None:
        with self.lock:
            self.seen += documents
            self.skipped += bad
        early = self.seen - documents < FIRST and len(self.skipped) * FIRST_SHARE >= FIRST
        late = self.seen >= LATER and len(self.skipped) * LATER_SHARE > self.seen
        if bad and (early or late):
            self._stop()

    def check_shard(self) -> None:
        """Before a shard is published: a corpus may have fewer documents than `FIRST`."""
        if self.seen < FIRST and self.skipped and len(self.skipped) * FIRST_SHARE >= self.seen:
            self._stop()

    def _stop(self) -> None:
        first = self.skipped[0]
        raise DataError(
            f"{len(self.skipped)} of {self.seen} documents have unusable states, the first one "
            f"(line {first['line']} of the corpus): {first['reason']}; check the target's weights, "
            "its dtype and the kernels"
        )
