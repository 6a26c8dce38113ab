"""Every encoding through the whole job: extracted, opened by stock zarr, streamed, trained from."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from dflash_cache import extract as extract_module
from dflash_cache.cache import Cache
from dflash_cache.encoding import ENCODINGS
from dflash_cache.equaliser import LEAST_SHARE, Calibration, sample_rows
from dflash_cache.errors import DataError
from dflash_cache.extract import ExtractConfig, extract
from dflash_cache.inspector import inspect_shard
from dflash_cache.shard import Shard
from dflash_cache.target import Target
from dflash_train.config import TrainConfig
from dflash_train.stream import RowStream
from dflash_train.trainer import train
from tests.helpers import tiny_tokenizer
from tests.tiny_cache import make_cache
from tests.tiny_models import tiny_hybrid

NAMES = sorted(ENCODINGS)
LIMITS = {"bf16": 0.003, "bf16-lossless": 0.003, "int8": 0.012, "fp8": 0.03}
# fp32 states rounded to bf16 differ by up to 2^-9 and half of that on average.


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_hybrid(tmp_path_factory.mktemp("m") / "hybrid", tiny_tokenizer())


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("d") / "corpus.jsonl"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    texts = [" ".join(rng.choice(words, n)) for n in rng.integers(4, 40, 30)]
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def run(model: Path, data: Path, out: Path, encoding: str) -> Cache:
    config = ExtractConfig(
        str(model),
        data,
        out,
        taps=(0, 3),
        seq_len=64,
        rows_per_shard=4,
        device="cpu",
        encoding=encoding,
    )
    extract(config, lambda line: None)
    return Cache.open(out)


@pytest.fixture(scope="module")
def caches(model, data, tmp_path_factory) -> dict[str, Cache]:
    folder = tmp_path_factory.mktemp("caches")
    return {name: run(model, data, folder / name, name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_extracted_states_are_the_targets_up_to_the_error_that_is_recorded(caches, model, name):
    cache, target = caches[name], Target.load(str(model), taps=[0, 3])
    errors = []
    for row in range(cache.plan.rows):
        shard, i = cache.locate(row)
        ids, document, position = (
            torch.tensor(getattr(shard, n)[i][None]) for n in ("input_ids", "document", "position")
        )
        want = target.run_rows(ids, document, position)[0].float()
        have = cache.decoded_row(row).float()
        real = document[0] != 0
        assert (have[~real] == 0).all()
        errors.append(((have - want).norm(dim=-1) / want.norm(dim=-1))[real])
    found = torch.cat(errors).mean(0)
    assert (found < LIMITS[name]).all()
    recorded = [cache.shard(k).attributes["tap_stats"]["error"] for k in range(cache.plan.shards)]
    assert np.allclose(np.mean(recorded, axis=0), found, rtol=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_every_array_of_a_shard_opens_in_stock_zarr_with_the_same_numbers(caches, name):
    cache = caches[name]
    group, shard = zarr.open_group(str(cache.shard_path(0)), mode="r"), cache.shard(0)
    assert sorted(group.array_keys()) == sorted(shard.layouts)
    states = np.empty(cache.geometry.row_shape, dtype=cache.geometry.dtype)
    shard.read_states(1, states)
    if name == "bf16-lossless":
        high, low = (group[f"states_{part}"][1].astype(np.uint16) for part in ("hi", "lo"))
        assert np.array_equal(high << 8 | low, states)
    else:
        assert np.array_equal(group["states"][1], states)
    if ENCODINGS[name].scaled:
        scales = np.empty((64, 2), dtype=np.float32)
        shard.read_scales(1, scales)
        assert np.array_equal(group["scales"][1], scales)


@pytest.mark.parametrize("name", NAMES)
def test_a_shard_and_a_cache_of_any_encoding_verify_and_are_shown(caches, name):
    cache = caches[name]
    assert [p for k in range(cache.plan.shards) for p in cache.verify_shard(k)] == []
    report = inspect_shard(cache.shard_path(0))
    assert report.problems == []
    assert report.encoding == name
    assert [tap.error is not None and tap.error < 0.03 for tap in report.taps] == [True, True]


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_in_any_array_of_any_encoding_is_found_and_named(caches, tmp_path, name):
    import shutil

    shutil.copytree(caches[name].path, tmp_path / "c")
    cache = Cache.open(tmp_path / "c")
    for file in sorted(cache.shard_path(0).glob("*/c.*")):
        if file.parent.name in ENCODINGS[name].arrays and not file.name.startswith("c.1."):
            continue  # one row of the states stands for all
        good = file.read_bytes()
        damaged = bytearray(good)
        damaged[len(good) // 2] ^= 16
        file.write_bytes(damaged)
        problems = Shard.open(cache.shard_path(0), cache.geometry).verify()
        assert problems, file
        assert file.parent.name in problems[0]
        file.write_bytes(good)
    assert Shard.open(cache.shard_path(0), cache.geometry).verify() == []


def test_a_cut_zstd_chunk_is_named(caches, tmp_path):
    import shutil

    shutil.copytree(caches["bf16-lossless"].path, tmp_path / "c")
    cache = Cache.open(tmp_path / "c")
    file = cache.shard_path(0) / "states_hi" / "c.0.0.0.0"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"states_hi/c\.0\.0\.0\.0: this chunk cannot be decompr"):
        cache.decoded_row(0)
    file.write_bytes(b"")
    with pytest.raises(DataError, match=r"c\.0\.0\.0\.0: this chunk is empty"):
        Shard.open(cache.shard_path(0), cache.geometry)


def test_an_int8_shard_away_from_its_cache_is_shown_but_not_decoded(caches, tmp_path):
    import shutil

    shutil.copytree(caches["int8"].shard_path(0), tmp_path / "shards" / "000000.zarr")
    report = inspect_shard(tmp_path / "shards" / "000000.zarr")
    assert report.rows == 4
    assert report.taps == []
    assert any("channel_scale.safetensors" in problem for problem in report.problems)


def test_the_channel_scale_is_computed_once_and_workers_read_it(model, data, tmp_path, monkeypatch):
    first = run(model, data, tmp_path / "hs", "int8")
    assert first.manifest.target_digest["channel_scale.safetensors"]
    import shutil

    shutil.rmtree(first.shard_path(0))
    monkeypatch.setattr(extract_module, "calibrate", lambda *a: pytest.fail("calibrated again"))
    again = run(model, data, tmp_path / "hs", "int8")
    assert again.missing() == []
    assert torch.equal(again.channel_scale, first.channel_scale)


def test_a_channel_scale_that_was_changed_is_found(caches, tmp_path):
    import shutil

    from dflash_cache.target_files import save_channel_scale

    shutil.copytree(caches["int8"].path, tmp_path / "c")
    cache = Cache.open(tmp_path / "c")
    save_channel_scale(cache.target_dir, 2 * cache.channel_scale)
    assert any("channel_scale" in p for p in Cache.open(tmp_path / "c").verify_target())
    save_channel_scale(cache.target_dir, cache.channel_scale[:1])
    with pytest.raises(DataError, match=r"the channel scale is \[1, \d+\], the cache has 2 taps"):
        Cache.open(tmp_path / "c").decoded_row(0)


def test_the_equaliser_is_the_rms_and_silent_channels_get_a_floor():
    make = torch.Generator().manual_seed(0)
    states = torch.randn(3, 40, 2, 8, generator=make) * torch.arange(8.0)
    document = torch.ones(3, 40, dtype=torch.int32)
    document[:, 30:] = 0
    states[0, 0, 0, 0] = float("nan")  # that token does not count
    calibration = Calibration()
    calibration.add(states, document)
    scale = calibration.result()
    real = torch.cat([states[0, 1:30], states[1, :30], states[2, :30]]).double()
    rms = real.square().mean(0).sqrt()
    assert torch.allclose(scale[:, 1:], rms[:, 1:].float())
    assert torch.allclose(scale[:, 0], (LEAST_SHARE * rms.square().mean(1).sqrt()).float())


def test_the_sample_is_chosen_by_content_and_bounded(caches):
    plan = caches["bf16"].plan
    few = sample_rows(plan, 100)
    assert 1 <= len(few) <= 3
    assert sample_rows(plan, 10**9) == list(range(plan.rows))
    other = replace(plan, doc_digest=plan.doc_digest[::-1].copy())
    assert sample_rows(other, 300) != sample_rows(plan, 300)


@pytest.mark.parametrize("name", NAMES)
def test_the_stream_and_the_trainer_get_the_decoded_states(tmp_path, name):
    cache = make_cache(tmp_path / "c", D=64, encoding=name, embed_scale=0.1)
    rows = cache.rows("train")
    stream = RowStream(cache, rows, batch_rows=2, seed=0, device="cpu", verify="always")
    codec = cache.codec()
    batch = next(stream)
    for i, row in enumerate(batch.rows):
        assert torch.equal(codec.decode(batch.states, batch.scales)[i], cache.decoded_row(row))
    stream.close()
    small = {"layers": 1, "block_size": 8, "anchors": 6, "device": "cpu", "strict": True}
    summary = train(TrainConfig(cache=cache.path, out=tmp_path / "o", steps=4, **small), print)
    assert 0 < summary.loss < 20
    assert summary.skipped == 0


@pytest.mark.parametrize("name", ["int8", "fp8", "bf16-lossless"])
def test_bytes_on_the_disk_are_those_of_the_estimate(tmp_path, name):
    cache = make_cache(tmp_path / "c", D=512, S=128, T=3, rows=8, encoding=name)
    stored = sum(p.stat().st_size for p in cache.path.glob("shards/*/*/c.*"))
    expected = cache.plan.rows * cache.geometry.stored_row_bytes
    if name == "bf16-lossless":  # repeated tokens compress better than a text's states
        assert stored < expected
    else:
        assert stored == expected
