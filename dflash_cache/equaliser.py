"""The static channel equaliser of int8: each channel's RMS over a sample of the corpus.

Dividing by it first lets one scale per token and tap serve all channels; without it the few
channels of massive activations take the whole range of the codes.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dflash_cache.corpus import Document
from dflash_cache.errors import DataError
from dflash_cache.packing import Plan, RowTokens, fill_row
from dflash_cache.progress import progress

if TYPE_CHECKING:  # a conversion needs no target, whose import takes seconds
    from dflash_cache.target import Target

SAMPLE_TOKENS = 1 << 17
SAMPLE_SHARE = 8  # at most one in so many of a small corpus' tokens, but a few rows at least
LEAST_SAMPLE = 1 << 13
# A channel that was silent in the sample may speak later: its divisor is at least this share of
# the tap's own RMS, so that it cannot take the whole range.
LEAST_SHARE = 1e-3


def sample_rows(plan: Plan, tokens: int | None = None) -> list[int]:
    """Rows for the calibration, `tokens` or a little more: those with the smallest hash.

    Rows are chosen by the digests of their documents, so that the sample is spread over the corpus
    and does not depend on the order of the files.
    """
    if tokens is None:
        tokens = min(SAMPLE_TOKENS, max(LEAST_SAMPLE, plan.tokens // SAMPLE_SHARE))
    key = np.zeros(plan.rows, dtype=np.uint64)
    np.bitwise_xor.at(key, plan.doc_row, plan.doc_digest)
    order = np.argsort(key, kind="stable")
    held = np.bincount(plan.doc_row, weights=plan.doc_length, minlength=plan.rows)[order]
    count = int(np.searchsorted(np.cumsum(held), tokens)) + 1
    return sorted(order[:count].tolist())


class Calibration:
    """Sums of squares per tap and channel over real tokens; float64 on the device of the states."""

    def __init__(self) -> None:
        self.squares: Tensor | None = None  # [T, D]
        self.count = 0

    def add(self, states: Tensor, document: Tensor) -> None:
        """states [B, S, T, D]; document [B, S], 0 = padding. Tokens that are not finite do not
        count."""
        for row, numbers in zip(states, document.to(states.device), strict=True):
            wide = row.float()  # [S, T, D]
            good = (numbers != 0) & wide.isfinite().flatten(1).all(1)  # [S]
            wide = torch.where(good[:, None, None], wide, 0.0)
            squares = wide.double().square().sum(0)
            self.squares = squares if self.squares is None else self.squares + squares
            self.count += int(good.sum())

    def result(self) -> Tensor:
        """The equaliser, float32 [T, D] on the CPU; `DataError` if no state was usable."""
        if self.squares is None or not self.count or not bool((self.squares.sum(1) > 0).all()):
            raise DataError(
                "the channel scale cannot be computed: the target gave no finite states other "
                "than zero for the sample; check its weights, its dtype and the kernels"
            )
        rms = (self.squares / self.count).sqrt()
        least = LEAST_SHARE * rms.square().mean(1, keepdim=True).sqrt()
        return torch.maximum(rms, least).float().cpu()


def calibrate(
    target: "Target", plan: Plan, documents: Sequence[Document], batch_rows: int
) -> Tensor:
    """Run the sample through the target -> float32 [T, D]."""
    rows = sample_rows(plan)
    calibration = Calibration()
    with progress(len(rows), "channel scale", "rows") as bar:
        step = batch_rows * target.batches_at_once(batch_rows, plan.seq_len)
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            tokens = [fill_row(plan, documents, row) for row in part]
            groups = (tokens[i : i + batch_rows] for i in range(0, len(part), batch_rows))
            arrays = [batch_arrays(group) for group in groups]
            for (_, document, _), states in zip(arrays, target.run_many(arrays), strict=True):
                calibration.add(states.to(target.device), document)
            bar.advance(len(part))
    return calibration.result()


def batch_arrays(tokens: Iterable[RowTokens], padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """input_ids, document, position of rows as [B + padding, S]; the padding rows are zero."""
    names, rows = ("input_ids", "document", "position"), list(tokens)
    stacked = (np.stack([getattr(t, name) for t in rows]) for name in names)
    ids, document, position = (torch.from_numpy(np.pad(a, ((0, padding), (0, 0)))) for a in stacked)
    return ids, document, position
