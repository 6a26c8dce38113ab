"""Shard writer: all or nothing, durable, one winner, statistics of real tokens only."""

import errno
import os

import numpy as np
import pytest
import torch

from dflash_cache import durable
from dflash_cache.encoding import decode
from dflash_cache.shard import Shard, ShardWriter
from dflash_cache.shard_writer import clean_staging, staging_name
from dflash_cache.tapstats import add_row, empty_sums
from tests.helpers import GEOMETRY, row_of, write_shard


def test_nothing_is_visible_before_finish_and_nothing_is_left_after_an_error(tmp_path):
    final = tmp_path / "shards" / "000001.zarr"
    writer = ShardWriter(final, tmp_path / "staging", GEOMETRY, 2)
    writer.write_row(0, *row_of(0))
    assert writer.path.is_dir()
    assert not final.exists()
    with pytest.raises(ValueError, match="not float32"), writer:
        writer.write_row(1, row_of(1)[0].astype(np.float32), row_of(1)[1])
    assert not final.exists()
    assert list((tmp_path / "staging").iterdir()) == []


def test_a_shard_with_unwritten_rows_cannot_be_finished(tmp_path):
    with ShardWriter(tmp_path / "000001.zarr", tmp_path / "staging", GEOMETRY, 3) as writer:
        writer.write_row(1, *row_of(1))
        with pytest.raises(ValueError, match=r"rows \[0, 2\] of 000001.zarr"):
            writer.finish({})
    assert not (tmp_path / "000001.zarr").exists()


def test_a_row_of_another_shape_or_dtype_or_written_twice_is_refused(tmp_path):
    states, tokens = row_of(0)
    with ShardWriter(tmp_path / "000001.zarr", tmp_path / "staging", GEOMETRY, 2) as writer:
        with pytest.raises(ValueError, match="a row is uint16"):
            writer.write_row(0, states[:8], tokens)
        with pytest.raises(ValueError, match="not float32"):
            writer.write_row(0, states.astype(np.float32), tokens)
        writer.write_row(0, states, tokens)
        with pytest.raises(ValueError, match="row 0 has been written"):
            writer.write_row(0, states, tokens)


def test_a_second_writer_of_a_shard_is_a_harmless_duplicate(tmp_path):
    first = write_shard(tmp_path, attributes={"by": "first"})
    second = write_shard(tmp_path, attributes={"by": "second"})
    assert first == second
    assert Shard.open(first).attributes["by"] == "first"
    assert list((tmp_path / "staging").iterdir()) == []


def test_every_file_and_folder_is_flushed_before_the_rename_and_the_parent_after(
    tmp_path, monkeypatch
):
    events = []
    monkeypatch.setattr(durable, "fsync_path", lambda path: events.append(path))
    rename = os.rename
    monkeypatch.setattr(durable.os, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    path = write_shard(tmp_path)
    at = events.index("rename")
    staged = events[at - 1]
    flushed = {p.relative_to(staged) for p in events[:at]}
    assert flushed == {p.relative_to(path) for p in [path, *path.rglob("*")]}
    assert events[at + 1 :] == [path.parent]


def test_a_rename_that_fails_for_another_reason_is_not_hidden(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(durable.os, "rename", full)
    with pytest.raises(OSError, match="no space left"):
        write_shard(tmp_path)


def test_only_what_dead_processes_of_this_host_or_days_left_is_cleaned(tmp_path):
    staging = tmp_path / "staging"
    host = staging_name("000001").split("-", 1)[1].rsplit("-", 2)[0]
    own = staging / staging_name("000001")
    reused = staging / f"000002-{host}-{os.getpid()}-1"
    dead = staging / f"000003-{host}-99999999-12345"
    foreign, old = staging / "000004-else.where-5-6", staging / "000005-else.where-5-6"
    for path in (own, reused, dead, foreign, old):
        path.mkdir(parents=True)
    os.utime(old, (1, 1))
    assert sorted(clean_staging(staging)) == sorted([reused, dead, old])
    assert own.is_dir()
    assert foreign.is_dir()
    assert clean_staging(tmp_path / "none") == []


def test_tap_statistics_count_real_tokens_only(tmp_path):
    states, tokens = row_of(0)
    states[tokens.document == 0] = 0x4900  # a large number where nobody is to look
    states[2, 1, 0], states[3, 1, 1] = 0x7F80, 0x7FC0  # infinity and not-a-number in tap 1
    with ShardWriter(tmp_path / "000000.zarr", tmp_path / "staging", GEOMETRY, 1) as writer:
        writer.write_row(0, states, tokens)
        stats = Shard.open(writer.finish({})).attributes["tap_stats"]
    values = (states.astype(np.uint32) << 16).view(np.float32)[tokens.document != 0]
    values = values.astype(np.float64)  # [n, T, D]
    for tap in range(2):
        x = values[:, tap][np.isfinite(values[:, tap])]
        assert stats["mean"][tap] == pytest.approx(x.mean(), rel=1e-12)
        assert stats["std"][tap] == pytest.approx(x.std(), rel=1e-12)
        assert stats["absmax"][tap] == np.abs(x).max()
    assert stats["nonfinite"] == [0, 2]


def test_statistics_computed_elsewhere_are_taken_over(tmp_path):
    states, tokens = row_of(0)
    sums = empty_sums(2)
    add_row(sums, decode(torch.from_numpy(states)), torch.from_numpy(tokens.document))
    found = []
    for given in (None, sums):
        with ShardWriter(tmp_path / f"{len(found)}.zarr", tmp_path / "s", GEOMETRY, 1) as writer:
            writer.write_row(0, states, tokens, given)
            found.append(Shard.open(writer.finish({})).attributes["tap_stats"])
    assert found[0] == found[1]
