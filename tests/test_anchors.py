"""Anchors: which tokens are drafted from, drawn how, and what their slots are asked."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.errors import UsageError
from dflash_train.anchors import candidates, draft_inputs, sample_anchors
from tests.drafting import MASK_TOKEN, packed_rows, sampled

M = 0xFFFFFFFF


def mix(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x85EBCA6B & M
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & M
    return x ^ (x >> 16)


def fold(state: int, value: int) -> int:
    return mix(((state * 5 + 0xE6546B64) & M) ^ mix(value & M))


def draw(where, rows=None, seed=0, epoch=0, n=4):
    rows = torch.arange(where.shape[0]) if rows is None else rows
    return sample_anchors(where, rows, seed=torch.tensor(seed), epoch=torch.tensor(epoch), n=n)


@given(st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_a_candidate_and_its_next_token_are_supervised_and_of_one_document(seed):
    batch = packed_rows(seed, rows=2, seq_len=90, longest=20)
    got = candidates(batch["loss_mask"], batch["document"], batch["position"])
    mask, doc, pos = (batch[k].tolist() for k in ("loss_mask", "document", "position"))
    for row in range(2):
        for p in range(90):
            wanted = (
                p + 1 < 90
                and mask[row][p] == mask[row][p + 1] == 1
                and doc[row][p] == doc[row][p + 1] != 0
                and pos[row][p] >= 1
            )
            assert bool(got[row, p]) == wanted, (row, p)


@given(st.integers(0, 10_000), st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_anchors_are_distinct_sorted_candidates_and_all_of_them_where_few(seed, n):
    batch = packed_rows(seed, rows=3, seq_len=90, longest=20)
    where = candidates(batch["loss_mask"], batch["document"], batch["position"])
    anchors, valid = draw(where, n=n)
    for row in range(3):
        chosen = anchors[row][valid[row]].tolist()
        allowed = where[row].nonzero().flatten().tolist()
        assert chosen == sorted(set(chosen))
        assert set(chosen) <= set(allowed)
        assert len(chosen) == min(n, len(allowed))
        assert anchors[row].tolist() == [0] * (n - len(chosen)) + chosen


@given(st.integers(-(2**62), 2**62), st.integers(0, 50), st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_the_draw_is_the_same_arithmetic_on_every_device(seed, epoch, row):
    where = torch.ones(1, 200, dtype=torch.bool)
    where[:, 0] = False
    anchors, _ = draw(where, torch.tensor([row]), seed, epoch, n=10)
    state = fold(fold(fold(0, seed), epoch), row)
    keys = {p: (fold(state, p) >> 1, p) for p in range(1, 200)}
    wanted = sorted(sorted(keys, key=lambda p: keys[p], reverse=True)[:10])
    assert anchors[0].tolist() == wanted


def test_each_epoch_row_and_seed_draws_anew_and_repeats_itself():
    where = torch.ones(2, 400, dtype=torch.bool)
    where[:, 0] = False
    first, _ = draw(where, n=50)
    assert torch.equal(first, draw(where, n=50)[0])
    assert not torch.equal(first[0], first[1])
    for other in (draw(where, epoch=1, n=50)[0], draw(where, seed=1, n=50)[0]):
        assert not torch.equal(first[0], other[0])
    swapped, _ = draw(where, torch.tensor([1, 0]), n=50)
    assert torch.equal(swapped, first.flip(0))


def test_rows_of_one_batch_may_belong_to_different_epochs():
    where = torch.ones(2, 100, dtype=torch.bool)
    where[:, 0] = False
    rows, seed = torch.tensor([3, 3]), torch.tensor(0)
    mixed, _ = sample_anchors(where, rows, seed=seed, epoch=torch.tensor([4, 5]), n=9)
    assert torch.equal(mixed[0], draw(where, rows, epoch=4, n=9)[0][0])
    assert torch.equal(mixed[1], draw(where, rows, epoch=5, n=9)[0][1])


def test_every_candidate_is_drawn_about_equally_often():
    where = torch.ones(4000, 65, dtype=torch.bool)
    where[:, 0] = False
    anchors, _ = draw(where, n=16)  # expects 1000 a position, sigma 27
    counts = torch.bincount(anchors.flatten(), minlength=65)[1:]
    assert counts.min() > 865
    assert counts.max() < 1135
    pairs = (anchors[:, 1:] - anchors[:, :-1] == 1).sum()  # expects 4000 * 63 * (16*15)/(64*63)
    assert 14_000 < pairs < 16_000


def test_more_anchors_than_tokens_is_an_error_that_says_so():
    with pytest.raises(UsageError, match="9 anchors do not fit a row of 8 tokens"):
        draw(torch.ones(1, 8, dtype=torch.bool), n=9)


@given(st.integers(0, 10_000), st.sampled_from([2, 8, 10, 16]))
@settings(max_examples=50, deadline=None)
def test_slots_hold_the_anchor_then_masks_and_are_asked_for_the_tokens_at_their_place(seed, k):
    batch = packed_rows(seed, rows=2, seq_len=120, longest=40)
    got = sampled(batch, n=6, block_size=k)
    for row in range(2):
        ids, mask, doc, pos = (batch[c][row].tolist() for c in batch)
        for n, a in enumerate(got.anchors[row].tolist()):
            slots = slice(n * k, (n + 1) * k)
            assert got.tokens[row, slots].tolist() == [ids[a]] + [MASK_TOKEN] * (k - 1)
            assert got.q_positions[row, slots].tolist() == [pos[a] + i for i in range(k)]
            alive = bool(got.valid_anchor[row, n])
            assert got.lo[row, n] == (a - pos[a] if alive else a)
            for i in range(1, k):
                inside = a + i < len(ids) and doc[a + i] == doc[a] and mask[a + i] == 1
                alive = alive and inside
                assert float(got.weights_valid[row, n, i - 1]) == float(alive), (a, i)
                if alive:
                    assert got.labels[row, n, i - 1] == ids[a + i]


def test_a_block_stops_at_its_documents_end_and_never_jumps_a_gap():
    ones = torch.ones(1, 12, dtype=torch.int32)
    batch = {
        "input_ids": torch.arange(12, dtype=torch.int32)[None],
        "loss_mask": ones.clone().index_fill_(1, torch.tensor([9]), 0),
        "document": torch.tensor([[1] * 5 + [2] * 7]),
        "position": torch.tensor([[*range(5), *range(7)]]),
    }
    anchors = torch.tensor([[2, 6, 10]])
    got = draft_inputs(
        **batch,
        anchors=anchors,
        valid=torch.ones_like(anchors, dtype=torch.bool),
        block_size=6,
        mask_token_id=MASK_TOKEN,
    )
    assert got.weights_valid[0].tolist() == [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert got.labels[0, 0].tolist() == [3, 4, 5, 6, 7]
    assert got.labels[0, 2].tolist() == [11, 11, 11, 11, 11]
    assert got.lo.tolist() == [[0, 5, 5]]


def test_a_row_without_candidates_keeps_its_shapes_an_empty_context_and_no_weight():
    batch = packed_rows(3, rows=2, seq_len=50)
    batch["loss_mask"][0] = 0
    got = sampled(batch, n=5, block_size=8)
    assert got.anchors.shape == (2, 5)
    assert got.labels.shape == (2, 5, 7)
    assert got.anchors[0].tolist() == got.lo[0].tolist() == [0] * 5
    assert not got.valid_anchor[0].any()
    assert got.weights_valid[0].sum() == 0
