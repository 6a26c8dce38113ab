"""The job from a corpus to a cache: what is stored, resuming, stopping."""

import errno
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_cache import estimate
from dflash_cache.cache import Cache
from dflash_cache.encoding import decode, encode
from dflash_cache.errors import DataError, UsageError
from dflash_cache.extract import ExtractConfig, extract, place_of_worker
from dflash_cache.rowpipe import RowSink
from dflash_cache.target import Target
from tests.helpers import tiny_tokenizer
from tests.tiny_models import tiny_dense, tiny_hybrid

SEQ_LEN = 64
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "reads"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_hybrid(tmp_path_factory.mktemp("m") / "hybrid", tiny_tokenizer())


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("d") / "corpus.jsonl"
    texts = [" ".join(rng.choice(WORDS, n)) for n in rng.integers(4, 40, 30)]
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def config(model: Path, data: Path, out: Path, **changes) -> ExtractConfig:
    values = {"taps": (0, 3), "seq_len": SEQ_LEN, "rows_per_shard": 4, "device": "cpu"}
    return ExtractConfig(str(model), data, out, **(values | changes))


@pytest.fixture(scope="module")
def extracted(model, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("c") / "hs"
    lines: list[str] = []
    summary = extract(config(model, data, out), lines.append)
    return Cache.open(out), summary, lines


def read(cache: Cache, row: int):
    """ids, document, position [S] and states [S, T, D] of a row."""
    shard, i = cache.locate(row)
    bits = np.zeros(cache.geometry.row_shape, dtype=np.uint16)
    shard.read_states(i, bits)
    return shard.input_ids[i], shard.document[i], shard.position[i], torch.from_numpy(bits)


def test_every_stored_document_has_the_states_of_the_document_alone_in_bf16(extracted, model):
    cache, *_ = extracted
    target = Target.load(str(model), taps=[0, 3])
    seen = 0
    for row in range(cache.plan.rows):
        ids, document, position, bits = read(cache, row)
        for number in np.unique(document[document != 0]):
            place = document == number
            one = torch.tensor(ids[place])[None]
            alone = target.run_rows(one, torch.ones_like(one), torch.arange(one.shape[1])[None])
            error = (decode(bits[place]).float() - alone[0]).abs()
            assert (error <= alone[0].abs() * 2**-8 + 1e-4).all()
            assert position[place].tolist() == list(range(one.shape[1]))
            seen += 1
    assert seen == cache.plan.documents == 30


def test_the_round_trip_through_the_cache_is_exact_to_the_bit(extracted, model, data):
    cache, *_ = extracted
    target = Target.load(str(model), taps=[0, 3])
    for row in range(cache.plan.rows):
        ids, document, position, bits = read(cache, row)
        arrays = (torch.tensor(a)[None] for a in (ids, document, position))
        states = target.run_rows(*arrays)
        states[0, torch.tensor(document) == 0] = 0
        assert torch.equal(encode(states).states[0].view(torch.int16), bits.view(torch.int16))


def test_row_tails_are_zero_and_the_cache_verifies(extracted):
    cache, *_ = extracted
    for row in range(cache.plan.rows):
        ids, document, _, bits = read(cache, row)
        assert not bits.numpy()[document == 0].any()
        assert not ids[document == 0].any()
        assert bits.numpy()[document != 0].any(axis=(1, 2)).all()
    assert not cache.missing()
    assert [p for k in range(cache.plan.shards) for p in cache.verify_shard(k)] == []
    assert cache.verify_target() == []
    assert list(cache.staging_dir.iterdir()) == []


def test_the_summary_counts_what_was_written(extracted):
    cache, summary, lines = extracted
    assert (summary.documents, summary.tokens) == (30, cache.plan.tokens)
    assert (summary.rows, summary.shards_written) == (cache.plan.rows, cache.plan.shards)
    assert summary.shards_skipped == 0
    assert summary.bytes == sum(cache.stored_bytes(k) for k in range(cache.plan.shards))
    assert summary.bytes > cache.plan.rows * SEQ_LEN * 2 * 32 * 2
    assert 0 < summary.forward_share <= 1
    assert 0 < summary.writer_share <= 1
    assert re.search(r"forward \d+ %, writer idle \d+ %: .* is the bottleneck", summary.render())
    assert summary.kernels[0].startswith(
        "kernels: torch reference on CPU (2 GatedDeltaNet layers); packed = alone (checked, error"
    )
    assert any(line.startswith("plan: 30 documents") for line in lines)


def test_shards_record_how_they_were_made(extracted):
    attributes = extracted[0].shard(0).attributes
    assert attributes["dtype"] == "float32"
    assert attributes["device"] == "cpu"
    assert attributes["skipped"] == []
    assert "torch" in attributes["versions"]
    assert len(attributes["kernels"]) == 1 + 4


def snapshot(path: Path) -> dict[str, tuple[int, int]]:
    files = (p for p in path.rglob("*") if p.is_file())
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_ino) for p in files}


def test_extracting_again_writes_nothing(model, data, tmp_path):
    extract(config(model, data, tmp_path / "hs"), lambda _: None)
    before = snapshot(tmp_path)
    summary = extract(config(model, data, tmp_path / "hs"), lambda _: None)
    assert snapshot(tmp_path) == before
    assert (summary.shards_written, summary.rows, summary.tokens) == (0, 0, 0)


def test_a_resumed_extraction_equals_an_uninterrupted_one(model, data, extracted, tmp_path):
    whole = extracted[0]
    shutil.copytree(whole.path, tmp_path / "hs")
    cache = Cache.open(tmp_path / "hs")
    shutil.rmtree(cache.shard_path(1))
    summary = extract(config(model, data, tmp_path / "hs"), lambda _: None)
    assert summary.shards_written == 1
    for row in range(whole.plan.rows):
        for have, want in zip(read(cache, row), read(whole, row), strict=True):
            assert np.array_equal(np.asarray(have), np.asarray(want))


def test_states_do_not_depend_on_the_rows_of_a_batch(model, data, extracted, tmp_path):
    extract(config(model, data, tmp_path / "hs", batch_rows=3), lambda _: None)
    cache = Cache.open(tmp_path / "hs")
    for row in range(cache.plan.rows):
        have, want = (decode(read(c, row)[3]).float() for c in (cache, extracted[0]))
        assert float((have - want).norm() / want.norm()) < 1e-4


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"taps": (0, 2)}, "taps"), ({"dtype": "bfloat16"}, "dtype"), ({"heldout": 0.5}, "heldout")],
)
def test_another_extraction_into_the_same_cache_is_refused(model, data, extracted, changes, field):
    with pytest.raises(UsageError, match=field):
        extract(config(model, data, extracted[0].path, **changes), lambda _: None)


def test_another_model_of_the_same_shape_is_refused(model, data, extracted, tmp_path):
    other = tiny_hybrid(tmp_path / "hybrid", tiny_tokenizer(), rms_norm_eps=1e-5)
    with pytest.raises(UsageError, match="model"):
        extract(config(other, data, extracted[0].path), lambda _: None)


def test_workers_share_the_shards_and_the_cache_is_the_same(model, data, extracted, tmp_path):
    out, whole = tmp_path / "hs", extracted[0]
    # The first worker alone also does what the second one has not done yet.
    summary = extract(config(model, data, out, rank=1, world=2), lambda _: None)
    assert summary.shards_written == whole.plan.shards
    assert extract(config(model, data, out, rank=0, world=2), lambda _: None).shards_written == 0
    cache = Cache.open(out)
    for row in range(whole.plan.rows):
        assert torch.equal(
            read(cache, row)[3].view(torch.int16), read(whole, row)[3].view(torch.int16)
        )


def test_the_place_of_a_worker_comes_from_the_launcher(monkeypatch):
    plain = ExtractConfig("m", Path("d"), Path("o"))
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert place_of_worker(plain) == (0, 1)
    monkeypatch.setenv("SLURM_PROCID", "2")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert place_of_worker(plain) == (2, 4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert place_of_worker(plain) == (1, 3)
    with pytest.raises(UsageError, match="rank 3"):
        place_of_worker(ExtractConfig("m", Path("d"), Path("o"), rank=3))


def broken_model(model: Path, folder: Path, change) -> Path:
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_model_that_gives_nan_stops_the_job_and_leaves_no_shard(model, data, tmp_path):
    def poison(weights):
        weights["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")

    broken = broken_model(model, tmp_path / "m", poison)
    with pytest.raises(DataError, match="non-finite"):
        extract(config(broken, data, tmp_path / "hs"), lambda _: None)
    assert list((tmp_path / "hs" / "shards").iterdir()) == []
    assert list((tmp_path / "hs" / "staging").iterdir()) == []


def test_a_broken_document_becomes_padding_and_is_named(model, tmp_path):
    tokenizer = tiny_tokenizer()
    bad = tokenizer.convert_tokens_to_ids("<|mask|>")

    def poison(weights):
        weights["model.embed_tokens.weight"][bad] = float("inf")

    texts = ["fox and dog " * 3] * 40
    texts[17] += "<|mask|>"
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    broken = broken_model(model, tmp_path / "m", poison)
    summary = extract(config(broken, tmp_path / "d.jsonl", tmp_path / "hs"), lambda _: None)
    assert summary.documents == 39
    assert [s["line"] for s in summary.skipped] == [18]
    cache = Cache.open(tmp_path / "hs")
    entry = summary.skipped[0]
    ids, document, position, bits = read(cache, entry["row"])
    place = slice(entry["start"], entry["stop"])
    assert entry["document"] not in document
    for array in (ids, document, position, bits.numpy()):
        assert not array[place].any()
    shard, _ = cache.locate(entry["row"])
    assert shard.attributes["skipped"] == [entry]
    assert shard.attributes["tap_stats"]["nonfinite"] == [0, 0]
    assert [p for k in range(cache.plan.shards) for p in cache.verify_shard(k)] == []


def test_an_error_of_the_writer_thread_reaches_the_caller(model, data, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(RowSink, "write", fail)
    with pytest.raises(OSError, match="no space left"):
        extract(config(model, data, tmp_path / "hs"), lambda _: None)
    assert list((tmp_path / "hs" / "shards").iterdir()) == []
    assert list((tmp_path / "hs" / "staging").iterdir()) == []


def test_an_interrupted_job_leaves_whole_shards_only(model, data, tmp_path, monkeypatch):
    original, calls = Target.run_rows, []

    def interrupted(self, *arguments):
        calls.append(1)
        if len(calls) == 7:  # in the second shard of four rows
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(Target, "run_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        extract(config(model, data, tmp_path / "hs"), lambda _: None)
    cache = Cache.open(tmp_path / "hs")
    assert 0 in cache.missing() or cache.verify_shard(0) == []
    assert 1 in cache.missing()
    assert list(cache.staging_dir.iterdir()) == []


def test_a_cache_that_does_not_fit_on_the_disk_is_refused(model, data, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UsageError, match=r"still needs \d+\.\d KiB, .* only 1000 bytes left"):
        extract(config(model, data, tmp_path / "hs"), lambda _: None)


def test_a_full_disk_is_told_with_the_path_and_what_to_do(model, data, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RowSink, "write", fail)
    told = "hs: the disk is full; free space and run the same command again: finished shards are"
    with pytest.raises(DataError, match=told):
        extract(config(model, data, tmp_path / "hs"), lambda _: None)


@pytest.mark.parametrize("name", ["file", "file/below/it"])
def test_an_out_that_cannot_be_a_folder_is_a_usage_error(model, data, tmp_path, name):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="another --out"):
        extract(config(model, data, tmp_path / name), lambda _: None)


def test_a_present_shard_that_lost_a_chunk_is_not_taken_for_done(model, data, extracted, tmp_path):
    shutil.copytree(extracted[0].path, tmp_path / "hs")
    shard = Cache.open(tmp_path / "hs").shard_path(1)
    (shard / "states" / "c.0.0.0.0").unlink()
    with pytest.raises(DataError, match=f"remove {shard} and run `dflash extract` again"):
        extract(config(model, data, tmp_path / "hs"), lambda _: None)
    shutil.rmtree(shard)
    assert extract(config(model, data, tmp_path / "hs"), lambda _: None).shards_written == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "/nowhere/m"}, "does not exist"),
        ({"encoding": "int3"}, "int3"),
        ({"dtype": "float8"}, "float8"),
        ({"device": "tpu"}, "tpu"),
        ({"batch_rows": 0}, "batch_rows"),
        ({"taps": (0, 99)}, "6 layers"),
    ],
)
def test_a_wrong_option_is_a_usage_error(model, data, tmp_path, changes, words):
    base = {"model": str(model), "data": data, "out": tmp_path / "hs", "device": "cpu"}
    with pytest.raises(UsageError, match=words):
        extract(ExtractConfig(**(base | changes)), lambda _: None)
    assert not (tmp_path / "hs").exists()


def test_a_dense_target_is_extracted_too(data, tmp_path):
    llama = tiny_dense(tmp_path / "llama", "llama", tiny_tokenizer())
    summary = extract(config(llama, data, tmp_path / "hs"), lambda _: None)
    assert summary.documents == 30
    assert summary.kernels[0].startswith("kernels: sdpa on CPU (no GatedDeltaNet layers); packed")


def test_without_rows_per_shard_a_small_cache_is_one_shard(model, data, tmp_path):
    extract(config(model, data, tmp_path / "hs", rows_per_shard=None), lambda _: None)
    cache = Cache.open(tmp_path / "hs")
    assert cache.plan.shards == 1
    assert cache.geometry.rows_per_shard == cache.plan.rows


def test_long_documents_are_cut_and_counted(model, data, tmp_path):
    lines: list[str] = []
    summary = extract(config(model, data, tmp_path / "hs", seq_len=24), lines.append)
    assert summary.truncated > 0
    assert any(f"{summary.truncated} documents cut to 24 tokens" in line for line in lines)


@pytest.mark.parametrize(("given", "other"), [("rank", "world"), ("world", "rank")])
def test_a_rank_without_a_world_is_refused(model, data, tmp_path, monkeypatch, given, other):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=f"--{given} is given without --{other}"):
        place_of_worker(config(model, data, tmp_path, **{given: 1}))
