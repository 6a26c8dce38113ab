"""convert: another encoding of the same cache, exact where it can be, resumable, verified."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from cli import main
from dflash_cache import convert as module
from dflash_cache.cache import Cache
from dflash_cache.convert import convert
from dflash_cache.errors import DataError, UsageError
from tests.tiny_cache import make_cache

QUIET = {"device": "cpu", "report": lambda line: None}
SCALED = ("int8", "fp8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return make_cache(tmp_path_factory.mktemp("source") / "hs", D=256, rows=10)


def all_states(cache: Cache) -> torch.Tensor:
    return torch.stack([cache.decoded_row(row) for row in range(cache.plan.rows)])


def disk_bytes(cache: Cache) -> int:
    return sum(p.stat().st_size for p in (cache.path / "shards").rglob("c.*"))


@pytest.mark.parametrize("encoding", ["bf16", "bf16-lossless"])
def test_exact_encodings_give_every_bit_back(source: Cache, tmp_path: Path, encoding: str):
    summary = convert(source.path, tmp_path / "d", encoding, **QUIET)
    there = Cache.open(tmp_path / "d")
    assert torch.equal(all_states(there).view(torch.int16), all_states(source).view(torch.int16))
    assert summary.error == [0.0, 0.0]
    convert(there.path, tmp_path / "back", "bf16", **QUIET)
    back = Cache.open(tmp_path / "back")
    for k in range(source.plan.shards):
        for file in source.shard_path(k).rglob("c.*"):
            same = back.shard_path(k) / file.relative_to(source.shard_path(k))
            assert same.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("encoding", SCALED)
def test_scaled_encodings_take_half_the_bytes_and_say_what_they_lost(
    source: Cache, tmp_path: Path, encoding: str
):
    summary = convert(source.path, tmp_path / "d", encoding, **QUIET)
    there = Cache.open(tmp_path / "d")
    assert disk_bytes(there) < 0.54 * disk_bytes(source)
    want, have = all_states(source).float(), all_states(there).float()
    real = want.norm(dim=-1) > 0
    found = ((have - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-9))[real].mean()
    assert found == pytest.approx(np.mean(summary.error), rel=1e-3)
    assert 0 < found < {"int8": 0.01, "fp8": 0.04}[encoding]


@pytest.mark.parametrize("encoding", ["bf16", "int8", "fp8", "bf16-lossless"])
def test_tokens_and_records_are_carried_over_and_every_shard_verifies(
    source: Cache, tmp_path: Path, encoding: str
):
    convert(source.path, tmp_path / "d", encoding, **QUIET)
    there = Cache.open(tmp_path / "d")
    for k in range(source.plan.shards):
        assert there.verify_shard(k) == []
        old, new = source.shard(k), there.shard(k)
        for name in ("input_ids", "loss_mask", "document", "position"):
            assert np.array_equal(getattr(old, name), getattr(new, name))
        assert new.attributes["row_range"] == old.attributes["row_range"]
        assert new.attributes["converted_from"]["manifest_digest"] == source.manifest.digest()
    assert there.verify_target() == []


def test_a_stopped_conversion_goes_on_where_it_was(source: Cache, tmp_path: Path, monkeypatch):
    real, calls = module._shard, []

    def stop(*arguments):
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(arguments[2])
        real(*arguments)

    monkeypatch.setattr(module, "_shard", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(source.path, tmp_path / "d", "int8", **QUIET)
    scale = Cache.open(tmp_path / "d").channel_scale
    monkeypatch.setattr(module, "_shard", real)
    summary = convert(source.path, tmp_path / "d", "int8", **QUIET)
    assert (summary.shards_skipped, summary.shards_written) == (1, source.plan.shards - 1)
    assert torch.equal(Cache.open(tmp_path / "d").channel_scale, scale)
    straight = convert(source.path, tmp_path / "straight", "int8", **QUIET)
    assert torch.equal(
        all_states(Cache.open(tmp_path / "d")), all_states(Cache.open(tmp_path / "straight"))
    )
    assert straight.error == summary.error


def test_a_damaged_source_row_is_named_and_nothing_of_its_shard_is_written(tmp_path: Path):
    cache = make_cache(tmp_path / "hs")
    file = cache.shard_path(0) / "states" / "c.2.0.0.0"
    damaged = bytearray(file.read_bytes())
    damaged[100] ^= 4
    file.write_bytes(damaged)
    with pytest.raises(DataError, match=r"c\.2\.0\.0\.0: row 2 of states has crc32c"):
        convert(cache.path, tmp_path / "d", "fp8", **QUIET)
    there = Cache.open(tmp_path / "d")
    assert 0 in there.missing()
    assert list(there.staging_dir.iterdir()) == []


def test_an_unfinished_source_or_the_source_itself_is_refused(tmp_path: Path):
    import shutil

    cache = make_cache(tmp_path / "hs")
    with pytest.raises(UsageError, match="is the cache itself"):
        convert(cache.path, cache.path, "int8", **QUIET)
    shutil.rmtree(cache.shard_path(1))
    with pytest.raises(DataError, match=r"lacks 1 of \d shards \(the first is number 1\)"):
        convert(cache.path, tmp_path / "d", "int8", **QUIET)


def test_what_a_lossy_encoding_lost_is_remembered_in_the_identity(source: Cache, tmp_path: Path):
    convert(source.path, tmp_path / "a", "fp8", **QUIET)
    convert(tmp_path / "a", tmp_path / "b", "bf16", **QUIET)
    assert Cache.open(tmp_path / "b").manifest.identity["converted_from"] == "fp8"
    assert "converted_from" not in Cache.open(tmp_path / "a").manifest.identity


def test_the_command_prints_one_json_object(source: Cache, tmp_path: Path):
    arguments = ["convert", str(source.path), str(tmp_path / "d"), "--encoding", "int8"]
    result = CliRunner().invoke(main, [*arguments, "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["encoding"] == "int8"
    again = CliRunner().invoke(main, [*arguments[:-1], "int9", "--device", "cpu"])
    assert again.exit_code == 2
    assert "'int9'" in again.output


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    source: Cache, tmp_path: Path, monkeypatch
):
    usage = module.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UsageError, match=r"needs .* KiB, but only 1000 bytes are free"):
        convert(source.path, tmp_path / "d", "fp8", **QUIET)
    assert not (tmp_path / "d").exists()
