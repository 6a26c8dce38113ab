"""One step: the loss it reports, what accumulation and bad numbers do, and the schedule."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dflash_cache.cache import Cache, load_frozen
from dflash_cache.encoding import decode
from dflash_train.anchors import candidates, draft_inputs, sample_anchors
from dflash_train.attention import build_masks
from dflash_train.build import build_drafter
from dflash_train.config import TrainConfig
from dflash_train.loss import decay_weights, default_gamma
from dflash_train.rows import Batch
from dflash_train.step import TrainStep, hidden_of_slots, learning_rate
from dflash_train.stream import RowStream
from tests.tiny_cache import make_cache

CPU = torch.device("cpu")
ANCHORS = 6


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return make_cache(tmp_path_factory.mktemp("cache") / "c", rows=12, T=3)


def make_step(cache: Cache, **changes) -> TrainStep:
    settings = {"layers": 1, "block_size": 8, "batch_rows": 2, **changes}
    config = TrainConfig(cache=cache.path, out=Path("unused"), **settings)
    frozen = load_frozen(cache.target_dir, CPU, torch.float32)
    return TrainStep(build_drafter(config, cache, frozen, CPU), frozen, config, anchors=ANCHORS)


def batches(cache: Cache, batch_rows: int = 2) -> RowStream:
    return RowStream(cache, cache.rows("train"), batch_rows=batch_rows, seed=0, device="cpu")


def weights_of(step: TrainStep) -> list[torch.Tensor]:
    return [p.detach().clone() for p in step.drafter.parameters()]


def test_reported_loss_is_the_decayed_mean_cross_entropy(cache: Cache):
    step = make_step(cache)
    batch = next(batches(cache))
    expected = plain_loss(step, batch)
    step.run(iter([batch]), lr=1e-3)
    assert step.report().loss == pytest.approx(expected, rel=1e-5)


def plain_loss(step: TrainStep, batch: Batch) -> float:
    """The same through F.cross_entropy over whole logits."""
    shape = step.drafter.config
    row = (batch.input_ids, batch.loss_mask, batch.document, batch.position)
    anchors, valid = sample_anchors(
        candidates(*row[1:]), batch.row_ids, seed=step.seed, epoch=batch.epochs, n=ANCHORS
    )
    kind = {"block_size": shape.block_size, "mask_token_id": shape.mask_token_id}
    blocks = draft_inputs(*row, anchors, valid, **kind)
    masks = build_masks(blocks.anchors, blocks.lo, shape, seq_len=batch.position.shape[1])
    states = decode(batch.states)
    embed = step.frozen.embed
    hidden = hidden_of_slots(step.drafter, embed, states, batch.position, blocks, masks)
    logits = (hidden @ step.frozen.head.T).flatten(0, 2)
    nll = F.cross_entropy(logits, blocks.labels.flatten(), reduction="none")
    weights = decay_weights(shape.block_size, default_gamma(shape.block_size))
    weights = (blocks.weights_valid * weights).flatten()
    return ((nll * weights).sum() / weights.sum()).item()


def test_accumulated_batches_equal_one_large_batch(cache: Cache):
    large, small = make_step(cache, batch_rows=4), make_step(cache, batch_rows=2, accumulation=2)
    large.run(batches(cache, 4), lr=1e-3)
    small.run(batches(cache, 2), lr=1e-3)
    first, second = large.report(), small.report()
    assert first.loss == pytest.approx(second.loss, rel=1e-5)
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-4)
    for p, q in zip(weights_of(large), weights_of(small), strict=True):
        assert torch.allclose(p, q, atol=1e-5)


def test_gradient_norm_is_that_of_the_mean_loss_and_is_clipped(cache: Cache):
    step = make_step(cache, clip=0.5)
    batch = next(batches(cache))
    sums, tally = step.forward(decode(batch.states), batch.position, *step.prepare(batch))
    (sums / tally[1]).backward()
    gradients = [p.grad.clone() for p in step.drafter.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    step.optimizer.zero_grad()
    step.run(iter([batch]), lr=1e-3)
    moments = [step.optimizer.state[p]["exp_avg"] for p in step.drafter.parameters()]
    assert step.report().grad_norm == pytest.approx(float(norm), rel=1e-5)
    factor = 0.1 * min(1.0, 0.5 / float(norm))  # 1 - beta1, clipped
    for moment, gradient in zip(moments, gradients, strict=True):
        assert torch.allclose(moment, factor * gradient, rtol=1e-3, atol=1e-7)


def with_nan(stream: Iterator[Batch]) -> Iterator[Batch]:
    """Overwrites the states of the first batch by bf16 NaN bits."""
    first = next(stream)
    yield replace(first, states=torch.full_like(first.states, 0x7FC0))
    yield from stream


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(cache: Cache):
    step = make_step(cache)
    stream = with_nan(batches(cache))
    before = weights_of(step)
    step.run(stream, lr=1e-3)
    assert all(torch.equal(p, q) for p, q in zip(before, weights_of(step), strict=True))
    step.run(stream, lr=1e-3)
    report = step.report()
    assert (report.skipped, report.longest_skip) == (1, 1)
    assert report.bad_rows == list(next(batches(cache)).rows)
    assert math.isfinite(report.loss)
    assert not all(torch.equal(p, q) for p, q in zip(before, weights_of(step), strict=True))


def test_rows_without_candidates_give_no_loss_and_no_nan(cache: Cache):
    step = make_step(cache)
    batch = next(batches(cache))
    silent = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    step.run(iter([silent]), lr=1e-3)
    report = step.report()
    assert report.skipped == 0
    assert math.isnan(report.tau)  # no block was counted
    assert all(torch.isfinite(p).all() for p in step.drafter.parameters())


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(cache: Cache):
    first, again, other = (weights_of(make_step(cache, seed=s)) for s in (3, 3, 4))
    assert all(torch.equal(p, q) for p, q in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_learning_rate_rises_then_falls_to_zero():
    rates = [learning_rate(s, steps=100, peak=1.0, warmup=0.04) for s in range(101)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[52] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0)
    assert learning_rate(0, steps=5, peak=1.0, warmup=0.0) == 1.0


@pytest.mark.parametrize("gamma", [None, 3.0])
def test_the_step_never_builds_a_graph_to_the_frozen_matrices(cache: Cache, gamma: float | None):
    step = make_step(cache, gamma=gamma)
    step.run(batches(cache), lr=1e-3)
    assert step.frozen.embed.grad is None
    assert step.frozen.head.grad is None
