"""What is said before anything is written: sizes, time, and no when the disk is too small."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import cli
from dflash_cache import estimate
from dflash_cache.cache import Cache
from dflash_cache.estimate import format_bytes, format_duration
from dflash_cache.extract import ExtractConfig, dry_run, extract
from dflash_cache.extract_job import shard_order
from tests.helpers import tiny_tokenizer
from tests.test_extract_inputs import corpus
from tests.tiny_models import tiny_hybrid

S, TAPS, HIDDEN = 32, 2, 32


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_hybrid(tmp_path_factory.mktemp("m") / "hybrid", tiny_tokenizer(), layers=2)


@pytest.fixture
def config(model, tmp_path):
    def make(**changes) -> ExtractConfig:
        values = {"taps": (0, 1), "seq_len": S, "rows_per_shard": 2, "device": "cpu"}
        return ExtractConfig(str(model), data, tmp_path / "hs", **(values | changes))

    data = corpus(tmp_path, [20, 25, 31, 9, 14, 28, 40, 30])
    return make


STORED = {"bf16": 2.0, "int8": 1.0, "fp8": 1.0}


@pytest.mark.parametrize("encoding", STORED)
def test_the_bytes_told_are_those_that_the_shards_take(config, encoding):
    told = dry_run(config(encoding=encoding), lambda _: None)
    extract(config(encoding=encoding), lambda _: None)
    cache = Cache.open(config().out)
    chunks = [p.stat().st_size for p in cache.path.glob("shards/*/*/c*") if p.is_file()]
    assert told.total_bytes == sum(chunks)
    assert told.token_bytes == sum(chunks) / (cache.plan.rows * S)
    whole = sum(p.stat().st_size for p in cache.path.rglob("*") if p.is_file())
    metadata = 40_000 * (cache.plan.shards + 1)
    assert told.missing_bytes <= whole <= told.missing_bytes + metadata
    assert not told.estimated


def test_a_dry_run_counts_times_and_writes_nothing(config, tmp_path):
    told = dry_run(config(), lambda _: None)
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.jsonl"]
    assert (told.documents, told.tokens, told.truncated) == (8, 189, 1)
    assert told.fill == told.tokens / (told.rows * S)
    assert told.missing_shards == told.shards == -(-told.rows // 2)
    assert told.tokens_per_second > 0
    assert told.seconds == pytest.approx(told.tokens / told.tokens_per_second)
    assert (told.place, told.fits) == (str(tmp_path), True)


def test_workers_share_the_time_but_not_the_sample_for_the_channel_scale(config):
    told = dry_run(config(world=4, rank=0, encoding="int8"), lambda _: None)
    assert (told.workers, told.sample_tokens) == (4, told.tokens)
    assert told.seconds == pytest.approx((told.tokens / 4 + told.tokens) / told.tokens_per_second)
    assert "and 189 for the channel scale" in told.render()
    assert "on each of 4 workers" in told.render()
    assert dry_run(config(world=4, rank=1), lambda _: None) is None


def test_of_a_cache_that_is_begun_only_the_rest_counts(config):
    extract(config(), lambda _: None)
    cache = Cache.open(config().out)
    cache.shard_path(1).rename(cache.path / "aside")
    told = dry_run(config(), lambda _: None)
    assert told.missing_shards == 1
    assert told.missing_bytes == 2 * cache.geometry.stored_row_bytes
    assert told.missing_tokens < told.tokens
    (cache.path / "aside").rename(cache.shard_path(1))
    done = dry_run(config(), lambda _: None)
    assert (done.missing_bytes, done.seconds) == (0, None)
    assert "time" not in done.render()


def test_lossless_is_labelled_an_estimate(config):
    told = dry_run(config(encoding="bf16-lossless"), lambda _: None)
    assert told.estimated
    assert "(bf16-lossless, an estimate)" in told.render()


def test_a_real_run_says_the_same_first_and_other_workers_nothing(config):
    lines: list[str] = []
    extract(config(), lines.append)
    told = [line.split(":")[0] for line in "\n".join(lines).splitlines()]
    assert told[:4] == ["plan", "disk", "kernels", "time"]
    quiet: list[str] = []
    Cache.open(config().out).shard_path(1).rename(config().out / "aside")
    summary = extract(config(world=2, rank=1), quiet.append)
    assert quiet == []
    assert summary.render().startswith("[rank 1/2] extracted ")


def test_a_disk_that_is_too_small_is_refused_with_both_figures_unless_forced(
    config, tmp_path, monkeypatch
):
    usage = estimate.shutil.disk_usage(tmp_path)._replace(free=2048)
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda _: usage)
    refused = dflash(config(), "--json")
    assert refused.exit_code == 2
    text = " ".join(refused.stderr.replace("│", " ").split())
    assert "the cache still needs" in text
    assert f"but {tmp_path} has only 2.0 KiB left; free space" in text
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.jsonl"]
    forced = dflash(config(), "--force")
    assert forced.exit_code == 0, forced.output
    assert "2.0 KiB left; going on because of --force" in forced.output
    assert Cache.open(config().out).missing() == []


def test_json_of_a_dry_run_is_one_object_alone_on_stdout(config, tmp_path):
    ran = dflash(config(), "--dry-run", "--json")
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert (told["documents"], told["encoding"], told["fits"]) == (8, "bf16", True)
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.jsonl"]
    shown = dflash(config(), "--dry-run")
    told = [line.split(":")[0] for line in shown.stdout.splitlines()]
    assert told == ["kernels", "plan", "disk", "time"]


def dflash(config: ExtractConfig, *more: str):
    words = ["extract", "--model", config.model, "--data", config.data, "--out", config.out]
    words += ["--taps", "0,1", "--seq-len", S, "--rows-per-shard", 2, "--device", "cpu", *more]
    return CliRunner().invoke(cli.main, [str(word) for word in words])


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (5.5 * 2**20, "5.5 MiB"),
        (2**30 - 1, "1.0 GiB"),
        (2**30, "1.0 GiB"),
        (38e12, "34.6 TiB"),
        (2**61, "2048.0 PiB"),
    ],
)
def test_sizes_are_told_in_fitting_units(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "1 s"),
        (59.6, "1 min 0 s"),
        (75, "1 min 15 s"),
        (3 * 3600 + 1230, "3 h 20 min"),
        (6 * 86400 + 4 * 3600 + 9, "6 d 4 h"),
    ],
)
def test_durations_are_told_in_two_units(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_every_worker_does_its_own_shards_first_and_then_all_others(world):
    missing = [0, 1, 2, 4, 5, 8, 9, 11]
    for rank in range(world):
        order = shard_order(missing, rank, world)
        mine = [k for k in missing if k % world == rank]
        assert sorted(order) == missing
        assert order[: len(mine)] == mine
    if world == 2:
        assert shard_order(missing, 0, 2) == [0, 2, 4, 8, 11, 9, 5, 1]
