"""What a block sees, said twice: as a dense mask (CPU, tests) and as flex_attention block lists.

Slot (n, k) of the block at anchor a sees the context features lo <= j < a of its own document and
the slots of its own block, nothing else. In sliding layers of window W it sees context j only if
a + k - j < W. Causal layers show a slot the slots of its block up to itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_cache.errors import UsageError
from dflash_train.drafter_config import DrafterConfig

TILE = 128  # the only tile (besides 256) whose forward and backward both run on H200


@dataclass(frozen=True)
class SlotBounds:
    """What each of the Q = N*K slots sees, as half-open ranges; all int32 `[B, Q]`.

    Attributes:
        lower, upper: the context keys j with lower <= j < upper; none if lower >= upper.
        own_start, own_end: the slots of its block, counted from the first slot of the row.
    """

    lower: Tensor
    upper: Tensor
    own_start: Tensor
    own_end: Tensor


class Blocks(NamedTuple):
    """What flex_attention needs of a mask, all int32, as plain tensors that a compiled step takes.

    Attributes:
        kv_count, kv_index, full_kv_count, full_kv_index: for each tile of queries its partial and
            its full tiles of keys: `[B, 1, Q/128]` and `[B, 1, Q/128, (S+Q)/128]`.
        q_count, q_index, full_q_count, full_q_index: the same from the keys' side, for the
            backward: `[B, 1, (S+Q)/128]` and `[B, 1, (S+Q)/128, Q/128]`.
        lower, upper, own_start, own_end: `SlotBounds` of the padded slots, `[B, Q]`, the last two
            counted from the first key.
    """

    kv_count: Tensor
    kv_index: Tensor
    full_kv_count: Tensor
    full_kv_index: Tensor
    q_count: Tensor
    q_index: Tensor
    full_q_count: Tensor
    full_q_index: Tensor
    lower: Tensor
    upper: Tensor
    own_start: Tensor
    own_end: Tensor

    def block_mask(self) -> BlockMask:
        """As flex_attention takes it; the mask between tiles is free of division."""
        lower, upper, start, end = self[8:]

        def mask_mod(b, h, q, kv):
            context = (kv >= lower[b, q]) & (kv < upper[b, q])
            return context | ((kv >= start[b, q]) & (kv < end[b, q]))

        lengths = (lower.shape[1], self.kv_index.shape[3] * TILE)
        return BlockMask(lengths, *self[:8], (TILE, TILE), mask_mod)


class Mask(NamedTuple):
    """One layer's mask in the form that its device wants; neither of the two means "see all".

    Attributes:
        dense: bool, broadcastable to `[B, H, Q, S+Q]`, for SDPA.
        blocks: for flex_attention; keys and queries are padded to whole tiles.
    """

    dense: Tensor | None = None
    blocks: Blocks | None = None


class Masks(NamedTuple):
    """The masks of the two kinds of layer; `sliding` is None if the drafter has no such layer."""

    full: Mask
    sliding: Mask | None = None

    def of(self, layer_type: str) -> Mask:
        """The mask of a layer of this type; UsageError if it was not built."""
        if layer_type != "sliding_attention":
            return self.full
        if self.sliding is None:
            raise UsageError("the drafter has sliding layers, but its masks were built without")
        return self.sliding


def padded(length: int) -> int:
    """`length` rounded up to whole tiles of flex_attention."""
    return -(-length // TILE) * TILE


def slot_bounds(
    anchors: Tensor, lo: Tensor, *, block_size: int, window: int | None = None, causal: bool = False
) -> SlotBounds:
    """Ranges of keys that the slots of the blocks at `anchors` see.

    Args:
        anchors, lo: int64 `[B, N]`; the anchor, and where its document starts in the row.
        block_size: K slots a block.
        window: W of a sliding layer.
        causal: slots see only the slots of their block up to themselves.
    """
    rows, n = anchors.shape
    step = torch.arange(block_size, device=anchors.device, dtype=torch.int32)  # [K]
    block = torch.arange(n, device=anchors.device, dtype=torch.int32)[:, None] * block_size
    upper = anchors.int()[:, :, None]
    lower = lo.int()[:, :, None]
    if window is not None:
        lower = torch.maximum(lower, upper + step - (window - 1))
    end = block + (step + 1 if causal else block_size)

    def flat(x: Tensor) -> Tensor:
        return x.expand(rows, n, block_size).reshape(rows, n * block_size)

    return SlotBounds(flat(lower), flat(upper), flat(block), flat(end))


def dense_mask(bounds: SlotBounds, seq_len: int) -> Tensor:
    """The same as a bool mask `[B, Q, S+Q]` over the context keys and then the slots."""
    slots = bounds.lower.shape[1]
    context = torch.arange(seq_len, device=bounds.lower.device)  # [S]
    draft = torch.arange(slots, device=bounds.lower.device)  # [Q]
    sees = _inside(context, bounds.lower, bounds.upper)  # [B, Q, S]
    own = _inside(draft, bounds.own_start, bounds.own_end)  # [B, Q, Q]
    return torch.cat([sees, own], dim=2)


def build_blocks(
    anchors: Tensor,
    lo: Tensor,
    *,
    seq_len: int,
    block_size: int,
    window: int | None = None,
    causal: bool = False,
) -> Blocks:
    """The same for flex_attention, over `padded(S) + padded(Q)` keys and `padded(Q)` queries.

    The block lists come from the bounds directly: a context tile is full for a tile of slots if it
    lies between their largest lower and their smallest upper bound, and is listed for masking if it
    meets any slot's range. Full tiles skip the mask, so the *largest* lower bound is what keeps a
    block from seeing another document. Padded context is below no upper bound; a padded slot sees
    itself alone, which keeps its softmax finite.

    Call it outside of the compiled step: its results must lie in memory of their own before the
    attention kernel reads them (torch 2.11 inlines into the kernel what it can compute there).
    """
    bounds = slot_bounds(anchors, lo, block_size=block_size, window=window, causal=causal)
    bounds = _pad_slots(bounds)
    context_tiles = padded(seq_len) // TILE
    partial, full = _tiles_seen(bounds, context_tiles)  # each [B, Q/128, (S+Q)/128]
    lists = [
        part
        for side in (partial, full, partial.transpose(1, 2), full.transpose(1, 2))
        for part in _listed(side)
    ]
    offset = context_tiles * TILE
    own = (bounds.own_start + offset, bounds.own_end + offset)
    return Blocks._make([*lists, bounds.lower, bounds.upper, *own])


def build_masks(anchors: Tensor, lo: Tensor, config: DrafterConfig, *, seq_len: int) -> Masks:
    """The masks of a drafter's layers: block lists on CUDA, dense elsewhere.

    Args:
        anchors, lo: int64 `[B, N]` of `DraftInputs`.
        config: the drafter's; gives K, the window and which layers are causal.
        seq_len: S, the tokens of a row.
    """

    def build(window: int | None, causal: bool) -> Mask:
        kind: dict[str, Any] = {"block_size": config.block_size, "window": window, "causal": causal}
        if anchors.is_cuda:
            return Mask(blocks=build_blocks(anchors, lo, seq_len=seq_len, **kind))
        return Mask(dense=dense_mask(slot_bounds(anchors, lo, **kind), seq_len)[:, None])

    full = build(None, config.causal("full_attention"))
    if "sliding_attention" not in config.layer_types:
        return Masks(full)
    return Masks(full, build(config.sliding_window, config.causal("sliding_attention")))


def join(context: Tensor, draft: Tensor, mask: Mask) -> Tensor:
    """Keys or values of the context `[B, KV, S, h]` and of the slots `[B, KV, Q, h]` as `mask`
    counts them: padded to whole tiles for block lists, one after the other otherwise."""
    if mask.blocks is not None:
        context, draft = _pad_tiles(context), _pad_tiles(draft)
    return torch.cat([context, draft], dim=2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Grouped-query attention: fused flex_attention for block lists, SDPA otherwise.

    Args:
        q: `[B, H, Q, h]`.
        k, v: `[B, KV, S+Q, h]` as `join` lays them out; KV divides H.
        mask: of the layer.

    Returns:
        `[B, H, Q, h]` in the dtype of q.
    """
    if mask.blocks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense, enable_gqa=True)
    # Outside of a compiled step flex would run unfused and build the whole score matrix.
    flex: Callable[..., Any] = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    options: Any = {"BACKEND": "TRITON"} if q.is_cuda else None  # AUTO may pick flex-decoding
    queries = _pad_tiles(q)
    out = flex(
        queries, k, v, block_mask=mask.blocks.block_mask(), enable_gqa=True, kernel_options=options
    )
    return out[:, :, : q.shape[2]]


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _inside(keys: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """keys `[n]` against ranges `[B, Q]`: bool `[B, Q, n]`."""
    return (keys >= start[:, :, None]) & (keys < end[:, :, None])


def _pad_tiles(x: Tensor) -> Tensor:
    missing = padded(x.shape[2]) - x.shape[2]
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _pad_slots(bounds: SlotBounds) -> SlotBounds:
    """Add the slots that fill the last tile: without context, each its own block."""
    rows, slots = bounds.lower.shape
    device = bounds.lower.device
    extra = torch.arange(slots, padded(slots), device=device, dtype=torch.int32).expand(rows, -1)
    fill = (torch.zeros_like(extra), torch.zeros_like(extra), extra, extra + 1)
    given = (bounds.lower, bounds.upper, bounds.own_start, bounds.own_end)
    return SlotBounds(*(torch.cat(pair, dim=1) for pair in zip(given, fill, strict=True)))


def _tiles_seen(bounds: SlotBounds, context_tiles: int) -> tuple[Tensor, Tensor]:
    """Which tiles of keys a tile of slots sees in part, and which whole: bool `[B, Q/128, all]`."""
    rows, slots = bounds.lower.shape

    def tiled(x: Tensor) -> Tensor:
        return x.view(rows, slots // TILE, TILE)

    def between(start: Tensor, end: Tensor) -> Tensor:
        return (tile >= start[:, :, None]) & (tile < end[:, :, None])

    tile = torch.arange(context_tiles + slots // TILE, device=bounds.lower.device)
    lower, upper = tiled(bounds.lower), tiled(bounds.upper)
    sees = lower < upper
    any_from = torch.where(sees, lower, context_tiles * TILE).amin(2) // TILE  # [B, Q/128]
    any_to = (torch.where(sees, upper, 0).amax(2) + TILE - 1) // TILE
    full = between((lower.amax(2) + TILE - 1) // TILE, upper.amin(2) // TILE)
    own_from = tiled(bounds.own_start).amin(2) // TILE + context_tiles
    own_to = (tiled(bounds.own_end).amax(2) + TILE - 1) // TILE + context_tiles
    return (between(any_from, any_to) | between(own_from, own_to)) & ~full, full


def _listed(seen: Tensor) -> tuple[Tensor, Tensor]:
    """bool `[B, m, n]` as flex_attention counts: int32 `[B, 1, m]` and `[B, 1, m, n]`, those seen
    first; what lies beyond the count is never read."""
    count = seen.sum(2, dtype=torch.int32)
    index = seen.byte().argsort(dim=2, descending=True, stable=True).int()
    return count[:, None].contiguous(), index[:, None].contiguous()
