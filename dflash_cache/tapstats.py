"""Mean, deviation, largest value and non-finite count per tap, over real tokens, streaming."""

from typing import Any

import torch
from torch import Tensor

from dflash_cache.encoding import decode

# Rows of the accumulator [5, T]; ABSMAX is a maximum, the others add up.
COUNT, TOTAL, SQUARES, ABSMAX, NONFINITE = range(5)
SLICE = 256


def empty_sums(taps: int, device: torch.device | str = "cpu") -> Tensor:
    """A fresh accumulator, float64 [5, T]: count, sum, sum of squares, absmax, non-finite."""
    return torch.zeros(5, taps, dtype=torch.float64, device=device)


def add_row(sums: Tensor, bits: Tensor, document: Tensor, encoding: str = "bf16") -> None:
    """Add the stored states `bits` [S, T, D] of one row, in place, on the device of `bits`.

    `document` [S] integer, 0 where padding: such places do not count. Non-finite elements are
    counted and left out of everything else. Nothing syncs with the host.
    """
    for first in range(0, bits.shape[0], SLICE):
        values = decode(bits[first : first + SLICE], encoding).float()  # [s, T, D]
        real = (document[first : first + SLICE] != 0)[:, None, None]
        finite = torch.isfinite(values)
        nonfinite = (real & ~finite).sum(dim=2, dtype=torch.int32).sum(dim=0)  # [T]
        values = torch.where(finite & real, values, 0.0)
        sums[COUNT] += real.sum() * bits.shape[2] - nonfinite
        sums[TOTAL] += values.sum(dim=(0, 2), dtype=torch.float64)
        sums[SQUARES] += values.double().square().sum(dim=(0, 2))
        sums[ABSMAX] = torch.maximum(sums[ABSMAX], values.abs().amax(dim=(0, 2)).double())
        sums[NONFINITE] += nonfinite


def merge_sums(into: Tensor, other: Tensor) -> None:
    """Add accumulator `other` to `into`, both [5, T]."""
    other = other.to(into.device)
    absmax = torch.maximum(into[ABSMAX], other[ABSMAX])
    into += other
    into[ABSMAX] = absmax


def summarize(sums: Tensor) -> dict[str, list[Any]]:
    """{"mean", "std", "absmax": [T] floats, "nonfinite": [T] ints}; zeros where nothing counted."""
    sums = sums.cpu()
    count = sums[COUNT].clamp(min=1)
    mean = sums[TOTAL] / count
    variance = (sums[SQUARES] / count - mean.square()).clamp(min=0)
    return {
        "mean": mean.tolist(),
        "std": variance.sqrt().tolist(),
        "absmax": sums[ABSMAX].tolist(),
        "nonfinite": [int(n) for n in sums[NONFINITE].tolist()],
    }
