"""D-PACE: weights as a direct double loop has them, the fused gradient, and a run that learns."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_cache.cache import Cache, load_frozen
from dflash_cache.encoding import decode
from dflash_cache.errors import UsageError
from dflash_train.build import build_drafter
from dflash_train.config import TrainConfig
from dflash_train.loss import DPACE_FLOOR, dpace_weights, linear_cross_entropy
from dflash_train.rows import Batch
from dflash_train.step import TrainStep, hidden_of_slots
from dflash_train.stream import RowStream
from dflash_train.trainer import train
from tests.tiny_cache import make_cache


def by_loops(nll: Tensor, valid: Tensor, floor: float) -> Tensor:
    """The definition, slot by slot, in float64."""
    weights = torch.zeros_like(nll, dtype=torch.float64)
    slots = nll.shape[1]
    for block in range(nll.shape[0]):
        for j in range(slots):
            for m in range(j, slots):
                product = 1.0
                for i in range(m + 1):
                    q = (1 - floor) * float(torch.exp(-nll[block, i])) + floor
                    product *= q if valid[block, i] else 1.0
                weights[block, j] += product * bool(valid[block, m]) * bool(valid[block, j])
    return weights


def problem(seed: int, blocks: int, slots: int, size: int = 12, vocab: int = 37):
    """hidden [M, D], head [V, D], labels [M], and which slots count, 0 or 1 [blocks, slots]."""
    make = torch.Generator().manual_seed(seed)
    double = torch.float64
    hidden = torch.randn(blocks * slots, size, generator=make, dtype=double, requires_grad=True)
    head = torch.randn(vocab, size, generator=make, dtype=double)
    labels = torch.randint(0, vocab, (blocks * slots,), generator=make)
    valid = (torch.rand(blocks, slots, generator=make) > 0.2).to(double)
    return hidden, head, labels, valid


@given(st.integers(0, 10_000), st.sampled_from([7, 9, 15]), st.sampled_from([0.0, 0.5, 0.9]))
@settings(max_examples=30, deadline=None)
def test_weights_are_those_of_the_double_loop(seed: int, slots: int, floor: float):
    make = torch.Generator().manual_seed(seed)
    nll = 3 * torch.rand(4, slots, generator=make, dtype=torch.float64)
    valid = (torch.rand(4, slots, generator=make) > 0.3).to(torch.float64)
    torch.testing.assert_close(
        dpace_weights(nll, valid, floor), by_loops(nll, valid, floor), rtol=1e-12, atol=1e-14
    )


@given(st.integers(0, 10_000), st.integers(1, 9), st.sampled_from([None, 1, 20, 64]))
@settings(max_examples=40, deadline=None)
def test_value_and_gradient_equal_the_plain_formulation(seed: int, blocks: int, chunk: int | None):
    slots = 7
    hidden, head, labels, valid = problem(seed, blocks, slots)
    anchors = torch.tensor(float(blocks), dtype=torch.float64)
    loss, nll, _ = linear_cross_entropy(
        hidden, head, labels, valid.flatten(), anchors, chunk, dpace_slots=slots
    )
    (grad,) = torch.autograd.grad(3 * loss, hidden)
    wanted_nll = F.cross_entropy(hidden @ head.T, labels, reduction="none")
    weights = by_loops(wanted_nll.detach().view(blocks, slots), valid, DPACE_FLOOR)
    wanted = (weights.flatten() * wanted_nll).sum() / anchors
    (wanted_grad,) = torch.autograd.grad(3 * wanted, hidden)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(nll, wanted_nll.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-11, atol=1e-12)


def test_without_a_floor_the_weights_follow_the_expected_accepted_length():
    logs = -2 * torch.rand(5, 15, dtype=torch.float64)
    logs.requires_grad_()
    expected = logs.exp().cumprod(1).sum()  # sum over m of the chance that m slots are right
    (slope,) = torch.autograd.grad(expected, logs)
    weights = dpace_weights(-logs.detach(), torch.ones_like(logs), floor=0.0)
    torch.testing.assert_close(weights, slope, rtol=1e-12, atol=1e-14)


def test_blocks_without_valid_slots_give_zero_loss_and_zero_gradient():
    hidden, head, labels, valid = problem(1, 3, 7)
    none = torch.zeros_like(valid).flatten()
    loss, _, _ = linear_cross_entropy(hidden, head, labels, none, none.sum(), dpace_slots=7)
    loss.backward()
    assert loss == 0
    assert hidden.grad is not None
    assert (hidden.grad == 0).all()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return make_cache(tmp_path_factory.mktemp("cache") / "c", rows=12, T=3)


def make_step(cache: Cache, **changes) -> TrainStep:
    asked = {"layers": 1, "block_size": 8, "batch_rows": 2, "loss": "dpace", **changes}
    config = TrainConfig(cache=cache.path, out=Path("unused"), **asked)
    frozen = load_frozen(cache.target_dir, "cpu", torch.float32)
    drafter = build_drafter(config, cache, frozen, torch.device("cpu"))
    return TrainStep(drafter, frozen, config, anchors=6)


def batches(cache: Cache, batch_rows: int) -> RowStream:
    return RowStream(cache, cache.rows("train"), batch_rows=batch_rows, seed=0, device="cpu")


def plain_loss(step: TrainStep, batch: Batch) -> float:
    """Through F.cross_entropy over whole logits and the double loop, per valid anchor."""
    blocks, masks = step.prepare(batch)
    embed, states = step.frozen.embed, decode(batch.states)
    hidden = hidden_of_slots(step.drafter, embed, states, batch.position, blocks, masks)
    logits = (hidden @ step.frozen.head.T).flatten(0, 2)
    nll = F.cross_entropy(logits, blocks.labels.flatten(), reduction="none")
    slots = blocks.labels.shape[-1]
    weights = by_loops(nll.detach().view(-1, slots), blocks.weights_valid.flatten(0, 1), 0.5)
    return ((weights.flatten() * nll).sum() / blocks.valid_anchor.sum()).item()


@pytest.mark.parametrize("block_size", [8, 10, 16])
@pytest.mark.parametrize("sliding", [{}, {"sliding_layers": 1, "sliding_window": 24}])
def test_the_reported_loss_is_that_of_a_valid_anchor(cache: Cache, block_size: int, sliding: dict):
    step = make_step(cache, block_size=block_size, layers=2, **sliding)
    batch = next(batches(cache, 2))
    expected = plain_loss(step, batch)
    step.run(iter([batch]), lr=1e-3)
    assert step.report().loss == pytest.approx(expected, rel=1e-5)


def test_accumulated_batches_equal_one_large_batch(cache: Cache):
    large, small = make_step(cache, batch_rows=4), make_step(cache, batch_rows=2, accumulation=2)
    large.run(batches(cache, 4), lr=1e-3)
    small.run(batches(cache, 2), lr=1e-3)
    first, second = large.report(), small.report()
    assert first.loss == pytest.approx(second.loss, rel=1e-5)
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-4)


def test_a_run_with_dpace_learns_and_says_so(cache: Cache, tmp_path: Path):
    asked: dict = {"layers": 1, "block_size": 8, "anchors": 6, "device": "cpu", "strict": True}
    asked |= {"steps": 160, "batch_rows": 2, "lr": 3e-3, "eval_every": 20, "loss": "dpace"}
    told: list[str] = []
    summary = train(TrainConfig(cache=cache.path, out=tmp_path / "o", **asked), told.append)
    lines = [json.loads(line) for line in (tmp_path / "o" / "metrics.jsonl").open()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    evals = [line["tau_walk"] for line in lines if line["kind"] == "eval"]
    assert losses[-1] < losses[0] / 4
    assert evals[-1] > evals[0]
    assert any("loss: D-PACE" in line for line in told)
    assert summary.steady.recompiles == 0


def test_dpace_and_a_gamma_are_not_asked_for_together():
    with pytest.raises(UsageError, match=r"loss dpace has no gamma \(here 7.0\)"):
        TrainConfig(cache=Path("c"), out=Path("o"), loss="dpace", gamma=7.0)
