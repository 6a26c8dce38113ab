"""Fused attention against dense attention, values and gradients, on anchors with empty contexts."""

import pytest
import torch
import torch.nn.functional as F

from dflash_train.anchors import candidates, draft_inputs, sample_anchors
from dflash_train.attention import (
    Mask,
    Masks,
    attend,
    build_blocks,
    build_masks,
    dense_mask,
    join,
    slot_bounds,
)
from dflash_train.drafter import Drafter
from dflash_train.loss import decay_weights, linear_cross_entropy
from tests.drafting import VOCAB, packed_rows, sampled, tiny_config, tiny_drafter

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SEQ_LEN = 700
FULL, SLIDING, CAUSAL = (None, False), (150, True), (None, True)
# What bf16 itself costs: the largest error, relative to the largest value.
BF16 = 2e-2


def rows(seed, seq_len=SEQ_LEN, longest=400):
    return {name: x.cuda() for name, x in packed_rows(seed, 2, seq_len, longest).items()}


def blocks_with_empty_contexts(seed, n, k):
    blocks = sampled(rows(seed), n, k, seed=seed)
    blocks.anchors[0, :3] = blocks.lo[0, :3] = 0  # as in a row with too few candidates
    blocks.lo[1, 5] = blocks.anchors[1, 5]  # and one in the middle of a tile
    return blocks


def masks_of(blocks, k, kind):
    options = {"block_size": k, "window": kind[0], "causal": kind[1]}
    lists = build_blocks(blocks.anchors, blocks.lo, seq_len=SEQ_LEN, **options)
    dense = dense_mask(slot_bounds(blocks.anchors, blocks.lo, **options), SEQ_LEN)
    return Mask(blocks=lists), Mask(dense=dense[:, None])


def heads(shape, seed, dtype):
    make = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=make, device="cuda", dtype=dtype)


def attention_and_gradients(mask, inputs, upstream, dtype):
    """Output and the gradients of q and of the context's and the slots' keys and values."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    q, context_k, context_v, own_k, own_v = leaves
    out = attend(q, join(context_k, own_k, mask), join(context_v, own_v, mask), mask)
    return [out, *torch.autograd.grad(out, leaves, upstream.to(dtype))]


@pytest.mark.parametrize("kind", [FULL, SLIDING, CAUSAL], ids=["full", "sliding", "causal"])
@pytest.mark.parametrize(("k", "n", "size"), [(16, 40, 128), (10, 37, 64), (8, 50, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_values_and_gradients_equal_dense_attention(dtype, k, n, size, kind):
    for seed in range(3):
        blocks = blocks_with_empty_contexts(seed, n, k)
        fused, dense = masks_of(blocks, k, kind)
        shapes = [(8, n * k), (2, SEQ_LEN), (2, SEQ_LEN), (2, n * k), (2, n * k)]
        inputs = [heads((2, *shape, size), 10 * seed + i, dtype) for i, shape in enumerate(shapes)]
        upstream = heads((2, 8, n * k, size), 10 * seed + 9, dtype)
        got = attention_and_gradients(fused, inputs, upstream, dtype)
        wanted = attention_and_gradients(dense, inputs, upstream, torch.float64)
        limit = 1e-4 if dtype == torch.float32 else BF16
        for name, a, b in zip(["out", "q", "ck", "cv", "k", "v"], got, wanted, strict=True):
            assert a.isfinite().all(), name
            error = (a.double() - b).abs().max() / b.abs().max()
            assert error < limit, (name, seed, float(error))


def test_outside_of_a_compiled_step_attention_is_fused_all_the_same():
    blocks = blocks_with_empty_contexts(0, 256, 16)
    mask, _ = masks_of(blocks, 16, FULL)
    q = heads((2, 8, 4096, 64), 0, torch.bfloat16)
    context, own = heads((2, 2, SEQ_LEN, 64), 1, q.dtype), heads((2, 2, 4096, 64), 2, q.dtype)
    keys = join(context, own, mask)
    attend(q, keys, keys, mask)  # compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(q, keys, keys, mask)
    scores = 2 * 8 * 4096 * keys.shape[2] * 2  # bytes of the score matrix, were it ever made
    assert torch.cuda.max_memory_allocated() - before < scores / 8


def config(**changes):
    kinds = ("sliding_attention", "full_attention")
    return tiny_config(layer_types=kinds, sliding_window=64, head_dim=16, **changes)


@torch.no_grad()
def prepare(shape, batch, row_ids, seed, epoch, dense, n=24):
    where = candidates(batch["loss_mask"], batch["document"], batch["position"])
    anchors, valid = sample_anchors(where, row_ids, seed=seed, epoch=epoch, n=n)
    blocks = draft_inputs(
        **batch,
        anchors=anchors,
        valid=valid,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
    )
    masks = dense_masks(blocks, shape) if dense else build_masks(
        blocks.anchors, blocks.lo, shape, seq_len=SEQ_LEN
    )  # fmt: skip
    return blocks, masks


def step(drafter, embed, taps, position, blocks, masks, n=24):
    """What the trainer compiles: drafter and loss, on blocks and masks that were made before."""
    shape = drafter.config
    noise = F.embedding(blocks.tokens, embed)
    hidden = drafter(taps, noise, position, blocks.q_positions, masks)
    hidden = hidden.unflatten(1, (n, shape.block_size))[:, :, 1:].flatten(0, 2)
    decay = decay_weights(shape.block_size, 4.0, hidden.device)
    weights = (blocks.weights_valid * decay).flatten()
    return linear_cross_entropy(hidden, embed, blocks.labels.flatten(), weights, weights.sum())


def dense_masks(blocks, shape):
    def build(window, causal):
        bounds = slot_bounds(
            blocks.anchors, blocks.lo, block_size=shape.block_size, window=window, causal=causal
        )
        return Mask(dense=dense_mask(bounds, SEQ_LEN)[:, None])

    return Masks(build(None, False), build(shape.sliding_window, True))


def inputs_of(epoch, dtype, shape):
    taps = heads((2, SEQ_LEN, shape.taps, shape.hidden_size), epoch, dtype)
    row_ids = torch.arange(2, device="cuda") + 2 * epoch
    number = torch.tensor(epoch, device="cuda")
    return rows(epoch), taps, row_ids, torch.tensor(1, device="cuda"), number


def gradients(drafter: Drafter, loss):
    drafter.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("k", [8, 10])
def test_a_compiled_step_equals_a_dense_one_and_never_recompiles(dtype, k):
    shape = config(block_size=k)
    drafter = tiny_drafter(shape).cuda()
    embed = heads((VOCAB, shape.hidden_size), 0, dtype)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    for epoch in range(4):
        data = inputs_of(epoch, dtype, shape)
        if epoch == 3:
            data[0]["loss_mask"][0] = 0  # a row without candidates
        with torch.compiler.set_stance("fail_on_recompile" if epoch else "default"):
            batch, taps, *numbers = data
            made = prepare(shape, batch, *numbers, dense=False)
            got = compiled(drafter, embed, taps, batch["position"], *made)
            found = gradients(drafter, got[0])
        exactly = prepare(shape, batch, *numbers, dense=True)
        wanted = step(drafter, embed.float(), taps.float(), batch["position"], *exactly)
        exact = gradients(drafter, wanted[0])
        limit = 1e-3 if dtype == torch.float32 else 5e-2
        assert abs(float(got[0].detach() - wanted[0].detach())) < limit * float(wanted[0].detach())
        assert len(found) == len(exact) == len(list(drafter.parameters()))
        for name, grad in exact.items():
            assert found[name].isfinite().all(), name
            assert (found[name] - grad).norm() <= limit * grad.norm() + 1e-6, (name, epoch)


def test_the_gpu_draws_the_anchors_that_the_cpu_draws():
    batch = packed_rows(0, 2, SEQ_LEN, 400)
    here = sampled(batch, 32, 16, seed=5, epoch=3)
    there = sampled({name: x.cuda() for name, x in batch.items()}, 32, 16, seed=5, epoch=3)
    for name in ("anchors", "lo", "tokens", "q_positions", "labels", "weights_valid"):
        assert torch.equal(getattr(here, name), getattr(there, name).cpu()), name


def test_sampling_and_masks_never_wait_for_the_device():
    batch, shape = rows(0), config()
    zero, row_ids = torch.tensor(0, device="cuda"), torch.arange(2, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        where = candidates(batch["loss_mask"], batch["document"], batch["position"])
        anchors, valid = sample_anchors(where, row_ids, seed=zero, epoch=zero, n=24)
        blocks = draft_inputs(
            **batch, anchors=anchors, valid=valid, block_size=8, mask_token_id=VOCAB - 1
        )
        masks = build_masks(blocks.anchors, blocks.lo, shape, seq_len=SEQ_LEN)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert masks.full.blocks is not None
    assert masks.sliding is not None
