"""The fused loss against torch's own cross-entropy."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.loss import decay_weights, default_gamma, linear_cross_entropy


def problem(seed, tokens=23, size=12, vocab=37, dtype=torch.float64):
    make = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, size, generator=make, dtype=dtype, requires_grad=True)
    head = torch.randn(vocab, size, generator=make, dtype=dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=make)
    weights = torch.rand(tokens, generator=make, dtype=dtype)
    weights = weights * (torch.rand(tokens, generator=make) > 0.3)
    return hidden, head, labels, weights


@given(st.integers(0, 10_000), st.integers(1, 40), st.sampled_from([None, 1, 7, 16]))
@settings(max_examples=60, deadline=None)
def test_value_and_gradient_equal_cross_entropy(seed, tokens, chunk):
    hidden, head, labels, weights = problem(seed, tokens)
    total = weights.sum() + 0.5
    loss, nll, correct = linear_cross_entropy(hidden, head, labels, weights, total, chunk)
    (grad,) = torch.autograd.grad(3 * loss, hidden)
    logits = hidden @ head.T
    wanted_nll = F.cross_entropy(logits, labels, reduction="none")
    wanted = (wanted_nll * weights).sum() / total
    (wanted_grad,) = torch.autograd.grad(3 * wanted, hidden)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(nll, wanted_nll.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-12, atol=1e-12)
    assert torch.equal(correct, logits.argmax(1) == labels)


def test_a_tied_head_gets_its_gradient_from_the_embedding_side_only():
    table = torch.randn(37, 12, dtype=torch.float64, requires_grad=True)
    _, _, labels, weights = problem(0)
    tokens = torch.arange(23) % 37
    loss, _, _ = linear_cross_entropy(
        F.embedding(tokens, table), table.detach(), labels, weights, weights.sum()
    )
    (grad,) = torch.autograd.grad(loss, table)
    logits = F.embedding(tokens, table) @ table.detach().T
    wanted = (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / weights.sum()
    torch.testing.assert_close(grad, torch.autograd.grad(wanted, table)[0], rtol=1e-12, atol=1e-12)


def test_no_weight_at_all_gives_zero_loss_and_zero_gradient():
    hidden, head, labels, _ = problem(1)
    none = torch.zeros(23, dtype=torch.float64)
    loss, nll, _ = linear_cross_entropy(hidden, head, labels, none, none.sum())
    loss.backward()
    assert loss == 0
    assert nll.isfinite().all()
    assert hidden.grad is not None
    assert (hidden.grad == 0).all()


def test_huge_logits_stay_finite():
    hidden, head, labels, weights = problem(2, dtype=torch.float32)
    loss, _, _ = linear_cross_entropy(hidden * 1e4, head, labels, weights, weights.sum())
    (grad,) = torch.autograd.grad(loss, hidden)
    assert loss.isfinite()
    assert grad.isfinite().all()


def test_bf16_keeps_its_dtype_and_stays_near_the_exact_gradient():
    hidden, head, labels, weights = problem(3, tokens=200, size=64, vocab=500)
    low = hidden.detach().bfloat16().requires_grad_()
    low_head, low_weights = head.bfloat16(), weights.float()
    loss, nll, _ = linear_cross_entropy(low, low_head, labels, low_weights, low_weights.sum())
    loss.backward()
    exact = low.detach().double().requires_grad_()
    wanted = F.cross_entropy(exact @ low_head.double().T, labels, reduction="none") * weights
    (wanted.sum() / weights.sum()).backward()
    assert low.grad is not None
    assert exact.grad is not None
    assert low.grad.dtype == torch.bfloat16
    assert nll.dtype == torch.float32
    assert (low.grad.double() - exact.grad).norm() / exact.grad.norm() < 0.02


def test_decay_weights_fall_by_gamma_from_one():
    assert decay_weights(16, 7.0).tolist() == pytest.approx([math.exp(-i / 7) for i in range(15)])


@pytest.mark.parametrize(("block", "gamma"), [(16, 7), (10, 5), (8, 4), (4, 2), (13, 6)])
def test_default_gamma_is_the_papers_where_the_paper_has_one(block, gamma):
    assert default_gamma(block) == pytest.approx(gamma)
