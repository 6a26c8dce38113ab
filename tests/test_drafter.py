"""The drafter: its equations, what may reach a block, the names of its weights."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.errors import UsageError
from dflash_train.anchors import candidates, draft_inputs, sample_anchors
from dflash_train.attention import (
    Mask,
    Masks,
    build_blocks,
    build_masks,
    dense_mask,
    slot_bounds,
)
from dflash_train.drafter import Drafter, DrafterConfig
from dflash_train.loss import decay_weights, linear_cross_entropy
from tests.drafting import (
    MASK_TOKEN,
    VOCAB,
    packed_rows,
    published,
    sampled,
    tiny_config,
    tiny_drafter,
)
from tests.reference_drafter import norm, reference_block

SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 12}
ALL_SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 12}
VARIANTS = [{}, SLIDING, ALL_SLIDING, SLIDING | {"is_causal": False}, {"is_causal": True}]


def run(drafter, batch, blocks, taps, embed):
    masks = build_masks(
        blocks.anchors, blocks.lo, drafter.config, seq_len=batch["input_ids"].shape[1]
    )
    noise = F.embedding(blocks.tokens, embed)
    return drafter(taps, noise, batch["position"], blocks.q_positions, masks)


def setup(seed, seq_len=60, rows=2, n=5, **changes):
    config = tiny_config(**changes)
    torch.manual_seed(seed)
    batch = packed_rows(seed, rows, seq_len, longest=30)
    taps = torch.randn(rows, seq_len, config.taps, config.hidden_size)
    embed = torch.randn(VOCAB, config.hidden_size)
    return config, batch, sampled(batch, n, config.block_size), taps, embed


@pytest.mark.parametrize("changes", VARIANTS)
def test_forward_equals_a_plain_reading_of_the_equations(changes):
    config, batch, blocks, taps, embed = setup(3, **changes)
    drafter, taps, embed = tiny_drafter(config).double(), taps.double(), embed.double()
    weights = {name: value.detach() for name, value in drafter.state_dict().items()}
    got = run(drafter, batch, blocks, taps, embed).unflatten(1, (-1, config.block_size))
    flat = taps.flatten(2) @ weights["fc.weight"].T
    features = norm(flat, weights["hidden_norm.weight"], config.rms_norm_eps)
    checked = 0
    for row, n in blocks.valid_anchor.nonzero().tolist():
        a, lo = int(blocks.anchors[row, n]), int(blocks.lo[row, n])
        tokens = [int(batch["input_ids"][row, a])] + [MASK_TOKEN] * (config.block_size - 1)
        first = int(batch["position"][row, a])
        wanted = reference_block(
            weights,
            config,
            features[row, lo:a],
            list(range(a - lo)),
            embed[tokens],
            [first + k for k in range(config.block_size)],
        )
        # RoPE's angles are fp32 by design, the reference's are not
        torch.testing.assert_close(got[row, n], wanted, rtol=1e-4, atol=1e-5)
        checked += 1
    assert checked >= 5


@pytest.mark.parametrize("changes", VARIANTS)
@given(seed=st.integers(0, 10_000), row=st.integers(0, 1), place=st.integers(0, 59))
@settings(max_examples=25, deadline=None)
def test_a_state_reaches_exactly_the_blocks_after_it_in_its_document(changes, seed, row, place):
    config, batch, blocks, taps, embed = setup(seed, **changes)
    # in float64, so that even the faintest attention moves a digit
    drafter, taps, embed = tiny_drafter(config).double(), taps.double(), embed.double()
    changed = taps.clone()
    changed[row, place] = torch.randn_like(changed[row, place]) * 3
    with torch.no_grad():
        before = run(drafter, batch, blocks, taps, embed)
        after = run(drafter, batch, blocks, changed, embed)
    moved = (before != after).any(2).unflatten(1, (-1, config.block_size)).any(2)  # [B, N]
    in_context = (blocks.lo <= place) & (place < blocks.anchors)
    if "full_attention" not in config.layer_types:
        in_context &= blocks.anchors - place < 12  # slot 0 sees furthest
    in_context[1 - row] = False
    assert torch.equal(moved, in_context)


@given(seed=st.integers(0, 10_000), block=st.integers(0, 4), slot=st.integers(0, 7))
@settings(max_examples=25, deadline=None)
def test_a_slot_reaches_no_other_block(seed, block, slot):
    config, batch, blocks, taps, embed = setup(seed)
    drafter, taps, embed = tiny_drafter(config).double(), taps.double(), embed.double()
    other = blocks.tokens.clone()
    other[0, block * 8 + slot] = (other[0, block * 8 + slot] + 1) % VOCAB
    with torch.no_grad():
        before = run(drafter, batch, blocks, taps, embed)
        after = run(drafter, batch, blocks._replace(tokens=other), taps, embed)
    moved = (before != after).any(2).unflatten(1, (-1, 8))
    assert moved[0, block].all()
    moved[0, block] = False
    assert not moved.any()


@pytest.mark.parametrize("changes", VARIANTS)
def test_drafting_with_kept_keys_equals_training_on_the_same_block(changes):
    config, _, _, _, embed = setup(0, **changes)
    drafter = tiny_drafter(config)
    taps = torch.randn(1, 40, 2, 32)
    anchor = torch.tensor([[33]])
    tokens = torch.tensor([[7] + [MASK_TOKEN] * 7])
    positions, slots = torch.arange(40)[None], torch.arange(33, 41)[None]
    masks = build_masks(anchor, torch.zeros_like(anchor), config, seq_len=40)
    noise = F.embedding(tokens, embed)
    with torch.no_grad():
        wanted = drafter(taps, noise, positions, slots, masks)
        parts = [
            drafter.context_kv(taps[:, a:b], positions[:, a:b]) for a, b in [(0, 20), (20, 33)]
        ]
        kept = [
            (torch.cat([a[0], b[0]], 2), torch.cat([a[1], b[1]], 2))
            for a, b in zip(*parts, strict=True)
        ]
        got = drafter.draft(noise, slots, kept)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_taps_may_be_flat_or_not_and_of_another_dtype():
    config, batch, blocks, taps, embed = setup(2)
    drafter, stored = tiny_drafter(config), taps.bfloat16()
    wanted = run(drafter, batch, blocks, stored.float(), embed)
    assert torch.equal(run(drafter, batch, blocks, stored, embed), wanted)
    assert torch.equal(run(drafter, batch, blocks, stored.flatten(2), embed), wanted)


def test_fp32_masters_compute_in_the_dtype_of_the_embedding():
    config, batch, blocks, taps, embed = setup(2)
    drafter = tiny_drafter(config)
    exact = run(drafter, batch, blocks, taps, embed)
    low = run(drafter, batch, blocks, taps.bfloat16(), embed.bfloat16())
    assert low.dtype == torch.bfloat16
    assert (low.float() - exact).norm() / exact.norm() < 0.05
    low.sum().backward()
    assert drafter.fc.weight.grad is not None
    assert drafter.fc.weight.grad.dtype == torch.float32


def test_autocast_gives_finite_low_precision_gradients():
    config, batch, blocks, taps, embed = setup(2)
    drafter = tiny_drafter(config)
    exact = run(drafter, batch, blocks, taps, embed)
    with torch.autocast("cpu", torch.bfloat16):
        low = run(drafter, batch, blocks, taps, embed)
    low.float().sum().backward()
    assert (low.float() - exact).norm() / exact.norm() < 0.05
    assert all(p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters())


def step(drafter, embed, batch, taps, row_ids, seed, epoch, n=6):
    """One training step's forward, as the trainer compiles it."""
    config = drafter.config
    where = candidates(batch["loss_mask"], batch["document"], batch["position"])
    anchors, valid = sample_anchors(where, row_ids, seed=seed, epoch=epoch, n=n)
    blocks = draft_inputs(
        **batch,
        anchors=anchors,
        valid=valid,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
    )
    hidden = run(drafter, batch, blocks, taps, embed).unflatten(1, (n, config.block_size))
    weights = (blocks.weights_valid * decay_weights(config.block_size, 4.0)).flatten()
    return linear_cross_entropy(
        hidden[:, :, 1:].flatten(0, 2), embed, blocks.labels.flatten(), weights, weights.sum()
    )


def test_rows_without_candidates_give_zero_loss_and_zero_finite_gradients():
    config, batch, _, taps, embed = setup(1, **SLIDING)
    drafter = tiny_drafter(config)
    batch["loss_mask"].zero_()
    zero = torch.tensor(0)
    loss, nll, _ = step(drafter, embed, batch, taps, torch.arange(2), zero, zero)
    loss.backward()
    assert loss == 0
    assert nll.isfinite().all()
    for parameter in drafter.parameters():
        assert parameter.grad is not None
        assert (parameter.grad == 0).all()


def test_a_step_is_one_graph_and_never_recompiles_over_anchors_rows_and_epochs():
    config, batch, _, taps, embed = setup(0, **SLIDING)
    drafter = tiny_drafter(config)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=count, fullgraph=True, dynamic=False)
    losses = []
    for epoch in range(4):
        batch = packed_rows(epoch, 2, 60, longest=30)
        rest = (torch.arange(2) + 2 * epoch, torch.tensor(1), torch.tensor(epoch))
        got = compiled(drafter, embed, batch, taps, *rest)
        wanted = step(drafter, embed, batch, taps, *rest)
        torch.testing.assert_close(got[0], wanted[0])
        assert torch.equal(got[2], wanted[2])
        got[0].backward()
        losses.append(float(got[0].detach()))
    assert len(graphs) == 1
    assert len(set(losses)) == 4


@pytest.mark.slow
@torch.no_grad()
def test_the_compiled_drafter_takes_block_lists_of_every_step_without_recompiling():
    config = tiny_config(block_size=10, **{**SLIDING, "sliding_window": 40})
    drafter = tiny_drafter(config)
    torch._dynamo.reset()
    compiled = torch.compile(drafter, fullgraph=True, dynamic=False)
    for epoch in range(3):
        batch = packed_rows(epoch, 2, 200, longest=90)
        blocks = sampled(batch, n=13, block_size=10, seed=epoch)
        taps = torch.randn(2, 200, config.taps, config.hidden_size)
        noise = torch.randn(2, 130, config.hidden_size)
        where = (taps, noise, batch["position"], blocks.q_positions)
        lists, dense = (masks_of(blocks, config, 200, fused) for fused in (True, False))
        with torch.compiler.set_stance("fail_on_recompile" if epoch else "default"):
            got = compiled(*where, lists)
        torch.testing.assert_close(got, drafter(*where, dense), rtol=1e-4, atol=1e-4)


def masks_of(blocks, config, seq_len, fused):
    """Both kinds of mask as they are on CUDA (`fused`) or elsewhere."""

    def build(window, causal):
        kind = {"block_size": config.block_size, "window": window, "causal": causal}
        if fused:
            return Mask(blocks=build_blocks(blocks.anchors, blocks.lo, seq_len=seq_len, **kind))
        bounds = slot_bounds(blocks.anchors, blocks.lo, **kind)
        return Mask(dense=dense_mask(bounds, seq_len)[:, None])

    sliding = build(config.sliding_window, config.causal("sliding_attention"))
    return Masks(build(None, config.causal("full_attention")), sliding)


def test_masks_without_the_sliding_layers_mask_are_refused():
    config, batch, blocks, taps, embed = setup(0, **SLIDING)
    masks = Masks(Mask())
    noise = F.embedding(blocks.tokens, embed)
    with pytest.raises(UsageError, match="sliding layers"):
        tiny_drafter(config)(taps, noise, batch["position"], blocks.q_positions, masks)


def test_five_layers_have_the_58_weights_of_z_labs_checkpoints():
    shape = published()
    with torch.device("meta"):
        drafter = Drafter(DrafterConfig.from_hf(shape))
    layer = [f"self_attn.{p}.weight" for p in
             ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]  # fmt: skip
    layer += [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names = {f"layers.{i}.{name}" for i in range(5) for name in layer}
    names |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    state = drafter.state_dict()
    assert len(names) == 58
    assert set(state) == names == {name for name, _ in drafter.named_parameters()}
    assert state["fc.weight"].shape == (4096, 5 * 4096)
    assert state["layers.0.self_attn.k_proj.weight"].shape == (1024, 4096)
    assert state["layers.4.self_attn.q_norm.weight"].shape == (128,)
    assert sum(p.numel() for p in drafter.parameters()) == pytest.approx(1.05e9, rel=0.01)


def test_weights_start_small_and_norms_at_one():
    torch.manual_seed(0)
    drafter = Drafter(tiny_config())
    assert float(drafter.fc.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert (drafter.norm.weight == 1).all()
    assert all(p.dtype == torch.float32 for p in drafter.parameters())
