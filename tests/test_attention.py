"""What a block sees: the dense mask against its definition, the block lists against the mask."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.attention import (
    TILE,
    Mask,
    attend,
    build_blocks,
    build_masks,
    dense_mask,
    join,
    padded,
    slot_bounds,
)
from tests.drafting import packed_rows, sampled, tiny_config

KINDS = st.sampled_from([(None, False), (None, True), (40, True), (200, True), (64, False)])


def random_blocks(seed, seq_len, n, k):
    longest = [30, 150, seq_len][seed % 3]
    return sampled(packed_rows(seed, 2, seq_len, longest), n=n, block_size=k, seed=seed)


def whole_dense(blocks, seq_len, kind):
    """The dense mask over padded queries and keys; padded slots see themselves alone."""
    bounds = slot_bounds(blocks.anchors, blocks.lo, **kind)
    dense = dense_mask(bounds, seq_len)
    slots = dense.shape[1]
    whole = torch.zeros(2, padded(slots), padded(seq_len) + padded(slots), dtype=torch.bool)
    whole[:, :slots, :seq_len] = dense[:, :, :seq_len]
    whole[:, :slots, padded(seq_len) : padded(seq_len) + slots] = dense[:, :, seq_len:]
    extra = torch.arange(slots, padded(slots))
    whole[:, extra, padded(seq_len) + extra] = True
    return whole


@given(st.integers(0, 10_000), st.sampled_from([2, 5, 8]), KINDS)
@settings(max_examples=40, deadline=None)
def test_a_slot_sees_its_document_before_the_anchor_and_its_own_block(seed, k, kind):
    window, causal = kind
    seq_len, n = 70, 5
    blocks = random_blocks(seed, seq_len, n, k)
    bounds = slot_bounds(blocks.anchors, blocks.lo, block_size=k, window=window, causal=causal)
    got = dense_mask(bounds, seq_len)
    for row in range(2):
        for q in range(n * k):
            block, slot = divmod(q, k)
            a, lo = int(blocks.anchors[row, block]), int(blocks.lo[row, block])
            seen = [j for j in range(lo, a) if window is None or a + slot - j < window]
            own = [block * k + i for i in range(k) if not causal or i <= slot]
            wanted = seen + [seq_len + i for i in own]
            assert got[row, q].nonzero().flatten().tolist() == wanted


@given(
    st.integers(0, 10_000),
    st.sampled_from([128, 300, 517]),
    st.sampled_from([(8, 16), (8, 37), (10, 37), (16, 23), (16, 24)]),
    KINDS,
)
@settings(max_examples=120, deadline=None)
def test_block_lists_agree_with_the_dense_mask(seed, seq_len, shape, kind):
    (k, n), (window, causal) = shape, kind
    blocks = random_blocks(seed, seq_len, n, k)
    options = {"block_size": k, "window": window, "causal": causal}
    lists = build_blocks(blocks.anchors, blocks.lo, seq_len=seq_len, **options)
    whole = whole_dense(blocks, seq_len, options)
    tiles = whole.unflatten(1, (-1, TILE)).unflatten(3, (-1, TILE))
    seen, full = tiles.any(4).any(2), tiles.all(4).all(2)  # [B, Q/128, (S+Q)/128]
    listed = counted(lists.kv_count, lists.kv_index, seen.shape)
    listed_full = counted(lists.full_kv_count, lists.full_kv_index, seen.shape)
    turned = (seen.shape[0], seen.shape[2], seen.shape[1])
    assert torch.equal(counted(lists.q_count, lists.q_index, turned), listed.transpose(1, 2))
    from_keys = counted(lists.full_q_count, lists.full_q_index, turned)
    assert torch.equal(from_keys, listed_full.transpose(1, 2))
    assert not (listed_full.bool() & ~full).any(), "a partial tile is listed as full"
    assert ((listed + listed_full)[seen] == 1).all(), "a visible tile is missing or listed twice"
    assert (listed + listed_full).max() <= 1
    spare = (listed + listed_full).sum() - seen.sum()
    assert spare <= seen.sum(), "most of the listed tiles are seen by nobody"


def counted(counts, indices, shape):
    """How often each tile stands in the lists: int32 `[B, Q/128, (S+Q)/128]`."""
    assert counts.dtype == indices.dtype == torch.int32
    assert counts.is_contiguous()
    assert indices.is_contiguous()
    assert indices.min() >= 0
    assert indices.max() < shape[2]
    assert counts.max() <= shape[2]
    real = torch.arange(shape[2]) < counts[:, 0, :, None]
    found = torch.zeros(shape, dtype=torch.int32)
    return found.scatter_add(2, indices[:, 0].long(), real.int())


@given(st.integers(0, 10_000), st.sampled_from([(8, 16), (10, 13)]), KINDS)
@settings(max_examples=30, deadline=None)
def test_the_mask_between_tiles_is_the_dense_mask(seed, shape, kind):
    (k, n), (window, causal) = shape, kind
    blocks = random_blocks(seed, 200, n, k)
    options = {"block_size": k, "window": window, "causal": causal}
    lists = build_blocks(blocks.anchors, blocks.lo, seq_len=200, **options)
    whole = whole_dense(blocks, 200, options)
    b, q, kv = torch.meshgrid(*(torch.arange(n) for n in whole.shape), indexing="ij")
    assert torch.equal(lists.block_mask().mask_mod(b, torch.zeros_like(b), q, kv), whole)


def test_full_tiles_are_found_where_a_long_document_has_them():
    anchors = torch.arange(600, 616)[None]
    lists = build_blocks(anchors, torch.zeros_like(anchors), seq_len=1024, block_size=16)
    assert lists.full_kv_count.tolist() == [[[4, 4]]]
    assert lists.kv_count.tolist() == [[[2, 2]]]  # the tile of the anchors, and their own


def test_off_cuda_masks_are_dense_and_sliding_layers_have_their_own():
    blocks = random_blocks(1, 90, 6, 8)
    kinds = ("sliding_attention", "full_attention")
    config = tiny_config(layer_types=kinds, sliding_window=16)
    masks = build_masks(blocks.anchors, blocks.lo, config, seq_len=90)
    assert masks.full.dense is not None
    assert masks.sliding is not None
    assert masks.sliding.dense is not None
    assert masks.full.blocks is None
    assert (masks.sliding.dense <= masks.full.dense).all()
    assert not torch.equal(masks.sliding.dense, masks.full.dense)
    plain = build_masks(blocks.anchors, blocks.lo, tiny_config(), seq_len=90)
    assert plain.sliding is None


@pytest.mark.slow
@torch.no_grad()
def test_the_compiled_kernel_that_reads_the_lists_equals_dense_attention():
    torch.manual_seed(0)
    seq_len = 300  # padded to 384, and all three shapes of blocks to 384 slots: one compilation
    for seed, (k, n) in enumerate([(8, 45), (10, 37), (16, 23)] * 3):
        blocks = random_blocks(seed, seq_len, n, k)
        blocks.anchors[1, :3] = blocks.lo[1, :3] = 0
        q = torch.randn(2, 4, n * k, 16)
        context, own = torch.randn(2, 2, 2, seq_len, 16), torch.randn(2, 2, 2, n * k, 16)
        for window, causal in [(None, False), (64, True), (64, False)]:
            options = {"block_size": k, "window": window, "causal": causal}
            lists = build_blocks(blocks.anchors, blocks.lo, seq_len=seq_len, **options)
            dense = dense_mask(slot_bounds(blocks.anchors, blocks.lo, **options), seq_len)[:, None]
            got, wanted = (
                attend(q, join(context[0], own[0], mask), join(context[1], own[1], mask), mask)
                for mask in (Mask(blocks=lists), Mask(dense=dense))
            )
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_padded_keys_and_queries_change_nothing_for_dense_attention():
    blocks = random_blocks(5, 90, 6, 10)
    options = {"block_size": 10, "window": None, "causal": False}
    dense = dense_mask(slot_bounds(blocks.anchors, blocks.lo, **options), 90)[:, None]
    q, own = torch.randn(2, 4, 60, 16), torch.randn(2, 2, 60, 16)
    context = torch.randn(2, 2, 90, 16)
    keys = join(context, own, Mask(dense=dense))
    wanted = attend(q, keys, keys, Mask(dense=dense))
    lists = build_blocks(blocks.anchors, blocks.lo, seq_len=90, **options)
    keys = join(context, own, Mask(blocks=lists))
    whole = whole_dense(blocks, 90, options)[:, None]
    got = attend(F.pad(q, (0, 0, 0, 68)), keys, keys, Mask(dense=whole))
    torch.testing.assert_close(got[:, :, :60], wanted, rtol=1e-5, atol=1e-5)
    assert (got[:, :, 60:] == 0).all()
