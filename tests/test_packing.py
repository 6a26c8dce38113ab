"""Packing: every token once, whole documents, no mixed rows, the same plan every time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.corpus import Document
from dflash_cache.errors import DataError, UsageError
from dflash_cache.packing import fill_row, load_plan, make_plan, save_plan, split_documents
from tests.helpers import make_documents

corpora = st.lists(st.integers(2, 60), min_size=1, max_size=60)


def plan_of(documents, heldout=0.0, window=16, seq_len=40, rows_per_shard=3):
    return make_plan(
        documents, seq_len=seq_len, rows_per_shard=rows_per_shard, heldout=heldout, window=window
    )


@settings(max_examples=60, deadline=None)
@given(corpora, st.sampled_from([0.0, 0.3]), st.sampled_from([1, 7, 4096]))
def test_every_token_of_every_document_appears_exactly_once(lengths, heldout, window):
    documents = make_documents(lengths)
    plan = plan_of(documents, heldout, window)
    seen = np.zeros((plan.rows, plan.seq_len), dtype=np.int32)
    for index, document in enumerate(documents):
        length = min(len(document.input_ids), plan.seq_len)
        row, start = plan.doc_row[index], plan.doc_start[index]
        tokens = fill_row(plan, documents, row)
        place = slice(start, start + length)
        seen[row, place] += 1
        assert np.array_equal(tokens.input_ids[place], document.input_ids[:length])
        assert np.array_equal(tokens.loss_mask[place], document.loss_mask[:length])
        assert np.array_equal(tokens.position[place], np.arange(length))
        assert (tokens.document[place] == plan.doc_number[index]).all()
    assert seen.max() == 1
    assert seen.sum() == plan.tokens == sum(min(n, plan.seq_len) for n in lengths)


@settings(max_examples=40, deadline=None)
@given(corpora)
def test_the_documents_of_a_row_are_contiguous_numbered_from_one_and_then_padding(lengths):
    documents = make_documents(lengths)
    plan = plan_of(documents)
    for row in range(plan.rows):
        tokens = fill_row(plan, documents, row)
        used = np.count_nonzero(tokens.document)
        assert (np.diff(tokens.document[:used]) >= 0).all()
        assert np.array_equal(
            np.unique(tokens.document[:used]), np.arange(1, len(plan.row_documents(row)) + 1)
        )
        tail = [getattr(tokens, name)[used:] for name in vars(tokens)]
        assert not np.concatenate(tail).any()


@settings(max_examples=40, deadline=None)
@given(corpora, st.floats(0.05, 0.9))
def test_no_row_mixes_the_splits_and_train_rows_come_first(lengths, heldout):
    documents = make_documents(lengths)
    plan = plan_of(documents, heldout)
    split = split_documents(documents, heldout)
    assert np.array_equal(plan.row_split[plan.doc_row], split)
    assert (np.diff(plan.row_split.astype(int)) >= 0).all()
    if len(lengths) >= 2:
        assert set(split.tolist()) == {0, 1}


@settings(max_examples=30, deadline=None)
@given(corpora)
def test_shards_cover_the_rows_in_order(lengths):
    plan = plan_of(make_documents(lengths))
    rows = [row for k in range(plan.shards) for row in plan.shard_rows(k)]
    assert rows == list(range(plan.rows))
    assert all(len(plan.shard_rows(k)) == plan.rows_per_shard for k in range(plan.shards - 1))


def test_all_documents_of_a_record_share_its_split():
    ids, mask = np.zeros(5, np.int32), np.ones(5, np.uint8)
    documents = [Document(ids, mask, "c", i, f"record {i % 20}") for i in range(100)]
    split = split_documents(documents, 0.4)
    assert all(len(set(split[i::20])) == 1 for i in range(20))
    assert 0 < split.mean() < 1


def test_a_record_keeps_its_split_when_the_corpus_grows():
    documents = make_documents([5] * 400)
    small, large = split_documents(documents[:200], 0.3), split_documents(documents, 0.3)
    assert np.array_equal(small, large[:200])
    assert abs(large.mean() - 0.3) < 0.08


def test_nothing_is_held_out_when_the_share_is_zero():
    assert not split_documents(make_documents([5] * 50), 0.0).any()


def test_natural_lengths_fill_at_least_97_percent():
    rng = np.random.default_rng(7)
    lengths = np.clip(np.exp(rng.normal(np.log(300) - 0.5, 1.0, 3000)), 2, None).astype(int)
    assert 250 < lengths.mean() < 350
    plan = make_plan(make_documents(lengths.tolist()), seq_len=4096, rows_per_shard=6, heldout=0.02)
    assert plan.fill >= 0.97


def test_the_same_corpus_gives_the_same_plan_and_another_one_another_digest():
    lengths = [30, 8, 17, 40, 3, 22]
    first, second = plan_of(make_documents(lengths), 0.3), plan_of(make_documents(lengths), 0.3)
    other = plan_of(make_documents(lengths, seed=1), 0.3)
    assert first.digest() == second.digest()
    assert first.digest() != other.digest()


def test_a_document_longer_than_a_row_is_cut_and_counted():
    documents = make_documents([100, 40, 12])
    plan = plan_of(documents)
    assert plan.truncated == 1
    assert plan.doc_cut.tolist() == [60, 0, 0]
    assert plan.doc_length.tolist() == [40, 40, 12]


def test_a_plan_survives_the_disk(tmp_path):
    plan = plan_of(make_documents([30, 8, 17, 40, 3, 22]), 0.3)
    save_plan(plan, tmp_path / "plan.zarr")
    back = load_plan(tmp_path / "plan.zarr")
    assert back.digest() == plan.digest()
    assert back.doc_digest.dtype == np.uint64
    assert np.array_equal(back.row_documents(0), plan.row_documents(0))


def test_a_damaged_or_missing_plan_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        load_plan(tmp_path / "plan.zarr")
    save_plan(plan_of(make_documents([30, 8])), tmp_path / "plan.zarr")
    file = tmp_path / "plan.zarr" / "doc_start" / "c.0"
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    with pytest.raises(DataError, match="does not match its own digest"):
        load_plan(tmp_path / "plan.zarr")


@pytest.mark.parametrize(
    ("option", "value"),
    [("seq_len", 1), ("rows_per_shard", 0), ("heldout", 1.0), ("heldout", -0.1), ("window", 0)],
)
def test_an_option_out_of_range_is_a_usage_error_that_names_it(option, value):
    options = {"seq_len": 8, "rows_per_shard": 1, "heldout": 0.0, "window": 4} | {option: value}
    with pytest.raises(UsageError, match=f"^{option} is {value}"):
        make_plan(make_documents([5]), **options)


def test_an_empty_corpus_is_a_data_error():
    with pytest.raises(DataError, match="no documents"):
        plan_of([])


def test_a_shard_that_does_not_exist_is_refused():
    with pytest.raises(UsageError, match="shard 9 does not exist"):
        plan_of(make_documents([5])).shard_rows(9)
