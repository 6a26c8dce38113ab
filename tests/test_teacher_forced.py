"""tau from one table: the walk and the mean against plain loops, and against decoding by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.cache import Cache, FrozenTarget, load_frozen
from dflash_cache.encoding import decode
from dflash_train.anchors import candidates
from dflash_train.build import build_drafter
from dflash_train.config import TrainConfig
from dflash_train.drafter import Drafter
from dflash_train.teacher_forced import AcceptTable, TeacherForced, summarize, walk
from tests.tiny_cache import make_cache

CPU = torch.device("cpu")
K = 6


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, K - 1)), min_size=1, max_size=60))
def test_walk_equals_a_loop_over_positions(line: list[tuple[bool, int]]):
    """A stub predictor: each position is a candidate or not, with a number accepted there."""
    anchors = np.array([i for i, (allowed, _) in enumerate(line) if allowed], dtype=np.int64)
    accepted = np.array([n for allowed, n in line if allowed], dtype=np.int64)
    tokens = steps = position = 0
    while position < len(line):
        allowed, count = line[position]
        if allowed:
            tokens, steps = tokens + count + 1, steps + 1
        position += count + 1 if allowed else 1
    assert walk(anchors, accepted) == (tokens, steps)


def table_of(documents: list[list[int]], labels: int = K - 1) -> AcceptTable:
    """Documents of consecutive candidates, given as the numbers accepted there."""
    accepted = np.concatenate(documents)
    count = len(accepted)
    return AcceptTable(
        row=np.zeros(count, np.int64),
        anchor=np.concatenate([np.arange(len(d)) + 100 * i for i, d in enumerate(documents)]),
        document=np.concatenate([np.full(len(d), i + 1) for i, d in enumerate(documents)]),
        accepted=accepted,
        labels=np.full(count, labels),
        right=np.arange(K - 1) < accepted[:, None],
    )


def test_walk_is_below_the_mean_where_acceptance_clusters():
    """Long runs that the walk jumps over in one step count at each position in the mean."""
    acceptance = summarize(table_of([[5, 5, 5, 5, 5, 5, 0, 0], [5, 5, 5, 5, 5, 5, 0, 0]]))
    assert acceptance.tau_mean == pytest.approx((6 * 6 + 2) / 8)
    assert acceptance.tau_walk == pytest.approx((6 + 1 + 1) / 3)
    assert acceptance.documents == 2


def test_short_blocks_are_shown_apart():
    table = table_of([[5, 3, 2, 1]])
    table.labels[2:] = [2, 1]
    acceptance = summarize(table)
    assert (acceptance.blocks, acceptance.short_blocks) == (2, 2)
    assert (acceptance.tau_mean, acceptance.tau_short) == (5.0, 2.5)
    assert acceptance.accuracy == [1.0, 1.0, 1.0, 0.5, 0.5]
    assert acceptance.accepted_at_least == [1.0, 1.0, 1.0, 0.5, 0.5]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return make_cache(tmp_path_factory.mktemp("cache") / "c", rows=10, T=3, heldout=0.3)


def parts(cache: Cache) -> tuple[Drafter, FrozenTarget]:
    config = TrainConfig(cache=cache.path, out=Path("unused"), layers=1, block_size=K)
    frozen = load_frozen(cache.target_dir, CPU, torch.float32)
    return build_drafter(config, cache, frozen, CPU).eval(), frozen


def test_every_candidate_of_the_held_out_rows_is_in_the_table(cache: Cache):
    drafter, frozen = parts(cache)
    rows = cache.rows("heldout")
    evaluation = TeacherForced(drafter, frozen, cache, rows, anchors=7)
    table = evaluation.table()
    evaluation.close()
    for row in rows:
        shard, inside = cache.locate(row)
        arrays = (shard.loss_mask, shard.document, shard.position)
        allowed = candidates(*(torch.tensor(a[inside])[None] for a in arrays))[0]
        assert table.anchor[table.row == row].tolist() == allowed.nonzero()[:, 0].tolist()


def test_the_number_of_anchors_a_pass_changes_nothing(cache: Cache):
    drafter, frozen = parts(cache)
    tables = []
    for anchors in (5, 32):
        evaluation = TeacherForced(drafter, frozen, cache, cache.rows("heldout"), anchors=anchors)
        tables.append(evaluation.table())
        evaluation.close()
    assert np.array_equal(tables[0].accepted, tables[1].accepted)
    assert np.array_equal(tables[0].labels, tables[1].labels)


def test_the_table_equals_drafting_each_block_as_decoding_does(cache: Cache):
    """One block at a time through `context_kv` and `draft`, compared token by token."""
    drafter, frozen = parts(cache)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    row = cache.rows("heldout")[0]
    evaluation = TeacherForced(drafter, frozen, cache, [row], anchors=9)
    table = evaluation.table()
    evaluation.close()
    for i, anchor in enumerate(table.anchor.tolist()):
        right, labels = _draft(drafter, frozen, cache, row, anchor)
        assert table.labels[i] == labels
        assert table.right[i, :labels].tolist() == right[:labels]
        wrong = [k for k in range(labels) if not right[k]]
        assert table.accepted[i] == (wrong[0] if wrong else labels)


@torch.no_grad()
def _draft(
    drafter: Drafter, frozen: FrozenTarget, cache: Cache, row: int, anchor: int
) -> tuple[list[bool], int]:
    shard, inside = cache.locate(row)
    states = np.empty(cache.geometry.row_shape, dtype=np.uint16)
    shard.read_states(inside, states)
    ids, document = shard.input_ids[inside], shard.document[inside]
    mask = shard.loss_mask[inside]
    start = anchor - int(shard.position[inside][anchor])
    taps = decode(torch.from_numpy(states))[None, start:anchor].float()
    context = drafter.context_kv(taps, torch.arange(anchor - start)[None])
    tokens = torch.tensor([[ids[anchor]] + [drafter.config.mask_token_id] * (K - 1)])
    places = torch.arange(anchor - start, anchor - start + K)[None]
    hidden = drafter.draft(frozen.embed[tokens.long()], places, context)
    best = (hidden[0, 1:] @ frozen.head.T).argmax(-1).tolist()
    after = range(anchor + 1, min(anchor + K, len(ids)))
    labels = 0
    for j in after:
        if document[j] != document[anchor] or not mask[j]:
            break
        labels += 1
    return [best[j - anchor - 1] == ids[j] for j in after], labels
