"""Mean, deviation, largest value, non-finite count and encoding error per tap, streaming."""

from typing import Any

import torch
from torch import Tensor

# Rows of the accumulator; ABSMAX is a maximum, the others add up.
COUNT, TOTAL, SQUARES, ABSMAX, NONFINITE, COMPARED, ERROR = range(7)
FIELDS = 7
# Tokens at a time: on a CPU what fits its caches, on a GPU what keeps launches few.
SLICE = {"cpu": 256, "cuda": 2048}


def empty_sums(taps: int, device: torch.device | str = "cpu") -> Tensor:
    """A fresh accumulator, float64 [7, T]: count, sum, sum of squares, absmax, non-finite, tokens
    whose encoding error is known, sum of their relative errors."""
    return torch.zeros(FIELDS, taps, dtype=torch.float64, device=device)


def add_row(sums: Tensor, states: Tensor, document: Tensor, original: Tensor | None = None) -> None:
    """Add the decoded states [S, T, D] of one row, in place, on their device.

    `document` [S] integer, 0 where padding: such places do not count. Non-finite elements are
    counted and left out of everything else. `original` [S, T, D]: the states before encoding, for
    the error. Nothing syncs with the host.
    """
    size = SLICE[states.device.type]
    for first in range(0, states.shape[0], size):
        part = slice(first, first + size)
        values = states[part].float()  # [s, T, D]
        real = (document[part] != 0)[:, None, None]
        finite = torch.isfinite(values)
        nonfinite = (real & ~finite).sum(dim=2, dtype=torch.int32).sum(dim=0)  # [T]
        values = torch.where(finite & real, values, 0.0)
        sums[COUNT] += real.sum() * states.shape[2] - nonfinite
        sums[TOTAL] += values.sum(dim=(0, 2), dtype=torch.float64)
        sums[SQUARES] += values.double().square().sum(dim=(0, 2))
        sums[ABSMAX] = torch.maximum(sums[ABSMAX], values.abs().amax(dim=(0, 2)).double())
        sums[NONFINITE] += nonfinite
        if original is not None:
            _add_error(sums, values, original[part].float(), real[..., 0])


def _add_error(sums: Tensor, values: Tensor, original: Tensor, real: Tensor) -> None:
    """values, original [s, T, D]; real [s, 1]."""
    size = original.norm(dim=-1)  # [s, T]
    error = (values - original).norm(dim=-1) / size.clamp(min=1e-30)
    known = real & torch.isfinite(error) & (size > 0)
    sums[COMPARED] += known.sum(dim=0)
    sums[ERROR] += torch.where(known, error, 0.0).sum(dim=0, dtype=torch.float64)


def merge_sums(into: Tensor, other: Tensor) -> None:
    """Add accumulator `other` to `into`, both [7, T]."""
    other = other.to(into.device)
    absmax = torch.maximum(into[ABSMAX], other[ABSMAX])
    into += other
    into[ABSMAX] = absmax


def summarize(sums: Tensor) -> dict[str, list[Any]]:
    """{"mean", "std", "absmax": [T] floats, "nonfinite": [T] ints}; zeros where nothing counted.

    With "error", the mean over tokens of |decoded - original| / |original|, if that is known.
    """
    sums = sums.cpu()
    count = sums[COUNT].clamp(min=1)
    mean = sums[TOTAL] / count
    variance = (sums[SQUARES] / count - mean.square()).clamp(min=0)
    found = {
        "mean": mean.tolist(),
        "std": variance.sqrt().tolist(),
        "absmax": sums[ABSMAX].tolist(),
        "nonfinite": [int(n) for n in sums[NONFINITE].tolist()],
    }
    if bool((sums[COMPARED] > 0).all()):
        found["error"] = (sums[ERROR] / sums[COMPARED]).tolist()
    return found
