"""The stream: each row once an epoch, the same order however it is cut, damage named."""

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_cache.cache import Cache
from dflash_cache.errors import DataError
from dflash_train.stream import RowOrder, RowStream
from tests.tiny_cache import make_cache

ROWS = list(range(3, 14))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return make_cache(tmp_path_factory.mktemp("cache") / "c", rows=8)


def stream_of(cache: Cache, *, batch_rows: int = 2, **options) -> RowStream:
    options = {"seed": 5, "device": "cpu", **options}
    return RowStream(cache, cache.rows("train"), batch_rows=batch_rows, **options)


def test_every_row_comes_once_an_epoch_in_another_order():
    order = RowOrder(ROWS, seed=1)
    epochs = [[order.at(e * len(ROWS) + i)[0] for i in range(len(ROWS))] for e in range(3)]
    assert all(sorted(epoch) == ROWS for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert order.at(len(ROWS))[1] == 1


def test_another_seed_gives_another_order():
    first, second = (RowOrder(ROWS, seed=seed) for seed in (1, 2))
    assert [first.at(i) for i in range(11)] != [second.at(i) for i in range(11)]


@pytest.mark.parametrize("threaded", [False, True])
def test_batch_split_does_not_change_the_sequence(cache: Cache, threaded: bool):
    sequences = []
    for batch_rows in (1, 2, 3):
        stream = stream_of(cache, batch_rows=batch_rows)
        if threaded:
            stream.start()
        batches = (next(stream) for _ in range(12 // batch_rows))
        sequences.append([row for batch in batches for row in batch.row_ids.tolist()])
        stream.close()
    assert sequences[0] == sequences[1] == sequences[2]


def test_resuming_at_step_k_gives_the_same_batches(cache: Cache):
    whole, rest = stream_of(cache), stream_of(cache, start_step=3)
    whole.start()
    rest.start()
    straight = [(b.step, b.rows, b.states.sum(dtype=torch.int64)) for b in _take(whole, 8)]
    resumed = [(b.step, b.rows, b.states.sum(dtype=torch.int64)) for b in _take(rest, 5)]
    assert straight[3:] == resumed


def _take(stream: RowStream, count: int):
    for _ in range(count):
        yield next(stream)
    stream.close()


def test_a_batch_holds_what_the_shard_holds_and_its_epochs(cache: Cache):
    rows = cache.rows("train")
    stream = stream_of(cache, batch_rows=len(rows) - 1, verify="always")
    stream.start()
    next(stream)
    batch = next(stream)
    for slot, row in enumerate(batch.rows):
        shard, inside = cache.locate(row)
        stored = np.empty(cache.geometry.row_shape, dtype=np.uint16)
        shard.read_states(inside, stored)
        assert np.array_equal(batch.states[slot].numpy(), stored)
        assert np.array_equal(batch.input_ids[slot].numpy(), shard.input_ids[inside])
        assert np.array_equal(batch.position[slot].numpy(), shard.position[inside])
    assert batch.epochs.tolist() == [0] + [1] * (len(rows) - 2)
    stream.close()


def test_memory_is_reused_and_not_before_it_is_given_back(cache: Cache):
    stream = stream_of(cache)
    stream.start()
    first = next(stream)
    kept = first.states.clone()
    threading.Event().wait(0.1)  # the loader would have overwritten it by now
    assert torch.equal(first.states, kept)
    pointers = {next(stream).states.data_ptr() for _ in range(6)}
    assert len(pointers | {first.states.data_ptr()}) == 2
    stream.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_a_damaged_row_is_named_with_its_shard(tmp_path: Path, threaded: bool):
    cache = make_cache(tmp_path / "c", rows=8)
    row = cache.rows("train")[2]
    shard, inside = cache.locate(row)
    chunk = shard.path / "states" / f"c.{inside}.0.0.0"
    content = bytearray(chunk.read_bytes())
    content[100] ^= 1
    chunk.write_bytes(bytes(content))
    stream = stream_of(cache)
    if threaded:
        stream.start()
    with pytest.raises(DataError, match=rf"{shard.path.name}, row {inside} \(row {row} of"):
        list(itertools.islice(stream, len(cache.rows("train"))))
    if threaded:
        with pytest.raises(DataError):
            next(stream)  # and does not wait for a loader that has ended
    stream.close()


def test_off_reads_a_damaged_row_without_a_word(tmp_path: Path):
    cache = make_cache(tmp_path / "c", rows=8)
    shard, inside = cache.locate(cache.rows("train")[0])
    chunk = shard.path / "states" / f"c.{inside}.0.0.0"
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    stream = stream_of(cache, verify="off")
    steps = [next(stream).step for _ in range(len(cache.rows("train")))]
    stream.close()
    assert steps == list(range(len(steps)))


def test_no_rows_are_an_error_and_not_an_endless_wait(cache: Cache):
    with pytest.raises(DataError, match="no rows to read"):
        RowStream(cache, [], batch_rows=1, seed=0, device="cpu")


def test_closing_joins_the_loader(cache: Cache):
    stream = stream_of(cache)
    stream.start()
    next(stream)
    stream.close()
    assert not any(t.name == "dflash-loader" for t in threading.enumerate())
