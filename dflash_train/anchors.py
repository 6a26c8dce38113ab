"""Which tokens of a row are drafted from, and what each slot of their blocks is given and asked.

Everything here has a fixed shape and reads no value back from the device; it also traces under
`torch.compile(fullgraph=True)`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_cache.errors import UsageError

_WORD = 0xFFFFFFFF


class DraftInputs(NamedTuple):
    """The blocks of a batch: N anchors a row, K slots a block, Q = N*K.

    Attributes:
        anchors: int64 `[B, N]`, row index of each block's anchor, ascending; 0 where not valid.
        lo: int64 `[B, N]`, row index where the anchor's document starts; equal to the anchor, so
            that the context is empty, where the anchor is not valid.
        tokens: int64 `[B, Q]`, slot 0 holds the anchor's token, the others the mask token.
        q_positions: int64 `[B, Q]`, position of each slot within the anchor's document.
        labels: int64 `[B, N, K-1]`, token at anchor + k for k = 1..K-1, clamped to the row.
        weights_valid: float32 `[B, N, K-1]`, 1 up to the first slot that leaves the document or is
            not supervised, 0 from there on.
        valid_anchor: bool `[B, N]`, False for anchors that only fill up the shape.
    """

    anchors: Tensor
    lo: Tensor
    tokens: Tensor
    q_positions: Tensor
    labels: Tensor
    weights_valid: Tensor
    valid_anchor: Tensor


def candidates(loss_mask: Tensor, document: Tensor, position: Tensor) -> Tensor:
    """Where a block may start: the token and the next one are supervised and of one document.

    A document's first token is none: in serving the context of a block is never empty.

    Args:
        loss_mask, document, position: `[B, S]` integers as the cache stores them.

    Returns:
        bool `[B, S]`.
    """
    supervised = loss_mask != 0
    same = (document[:, :-1] == document[:, 1:]) & (document[:, :-1] != 0)
    inner = supervised[:, :-1] & supervised[:, 1:] & same & (position[:, :-1] >= 1)
    return torch.cat([inner, torch.zeros_like(supervised[:, :1])], dim=1)


def sample_anchors(
    candidates: Tensor, row_ids: Tensor, *, seed: Tensor, epoch: Tensor, n: int
) -> tuple[Tensor, Tensor]:
    """Draw n candidates a row without replacement: those with the largest hash.

    The hash of (seed, epoch, row, position) is integer arithmetic, so a resumed run and another
    device draw the same anchors. Rows with fewer than n candidates are filled up with anchor 0.

    Args:
        candidates: bool `[B, S]`, never True at index 0 (see `candidates`).
        row_ids: int64 `[B]`, global row numbers.
        seed: int64 0-d tensor. A Python int would be compiled in as a constant.
        epoch: int64 tensor, 0-d or `[B]` where the rows of a batch belong to different epochs.
        n: anchors a row.

    Returns:
        anchors int64 `[B, n]` ascending, valid bool `[B, n]`.

    Raises:
        UsageError: n exceeds the tokens of a row.
    """
    seq_len = candidates.shape[1]
    if n > seq_len:
        raise UsageError(f"{n} anchors do not fit a row of {seq_len} tokens; ask for fewer anchors")
    place = torch.arange(seq_len, device=candidates.device)  # [S]
    row_key = _fold(_fold(_fold(torch.zeros_like(row_ids), seed), epoch), row_ids)  # [B]
    key = _fold(row_key[:, None], place)  # [B, S], 32 bits
    # The position in the low bits makes every key unique, so topk has no ties to break.
    key = (key >> 1 << 31) | place
    key = torch.where(candidates, key, -1 - place)
    chosen = torch.topk(key, n, dim=1, sorted=False)
    anchors = torch.where(chosen.values >= 0, chosen.indices, 0).sort(dim=1).values
    return anchors, anchors > 0


def draft_inputs(
    input_ids: Tensor,
    loss_mask: Tensor,
    document: Tensor,
    position: Tensor,
    anchors: Tensor,
    valid: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
) -> DraftInputs:
    """Tokens, positions, labels and weights of the blocks at `anchors`.

    Args:
        input_ids, loss_mask, document, position: `[B, S]` integers as the cache stores them.
        anchors: int64 `[B, N]`.
        valid: bool `[B, N]`; anchors that are not valid are moved to 0 and given no weight.
        block_size: K.
        mask_token_id: the token of slots 1..K-1.
    """
    rows, seq_len = input_ids.shape
    anchors = torch.where(valid, anchors, 0)
    steps = torch.arange(block_size, device=anchors.device)  # [K]
    first = position.gather(1, anchors).long()  # [B, N]
    tokens = torch.where(steps == 0, input_ids.gather(1, anchors).long()[:, :, None], mask_token_id)
    at = anchors[:, :, None] + steps[1:]  # [B, N, K-1]
    index = at.clamp(max=seq_len - 1).flatten(1)
    same = document.gather(1, index).view_as(at) == document.gather(1, anchors)[:, :, None]
    supervised = loss_mask.gather(1, index).view_as(at) != 0
    good = (at < seq_len) & same & supervised & valid[:, :, None]
    return DraftInputs(
        anchors=anchors,
        lo=torch.where(valid, anchors - first, anchors),
        tokens=tokens.reshape(rows, -1),
        q_positions=(first[:, :, None] + steps).reshape(rows, -1),
        labels=input_ids.gather(1, index).view_as(at).long(),
        weights_valid=good.float().cumprod(dim=2),
        valid_anchor=valid,
    )


def _fold(state: Tensor, value: Tensor) -> Tensor:
    """Mix one more number into a 32-bit hash: murmur3's step with its finalizer as the mixer."""
    return _mix((_times(state, 5) + 0xE6546B64) & _WORD ^ _mix(value & _WORD))


def _mix(x: Tensor) -> Tensor:
    """murmur3's 32-bit finalizer on int64 tensors that hold 32-bit words."""
    x = _times(x ^ (x >> 16), 0x85EBCA6B)
    x = _times(x ^ (x >> 13), 0xC2B2AE35)
    return x ^ (x >> 16)


def _times(x: Tensor, factor: int) -> Tensor:
    """x * factor modulo 2**32, in halves: no product leaves int64, so nothing ever wraps."""
    high = ((x >> 16) * factor & 0xFFFF) << 16
    return ((x & 0xFFFF) * factor + high) & _WORD
