"""verify --recompute: a true cache passes, one altered state fails, another model is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import cli
from dflash_cache.cache import Cache
from dflash_cache.errors import DataError, UsageError
from dflash_cache.extract import ExtractConfig, extract
from dflash_cache.recompute import limits, token_errors
from dflash_cache.verify import Recompute, verify
from tests.altering import alter_states, edit_attributes, flip_bit
from tests.helpers import make_cache, tiny_tokenizer
from tests.tiny_models import tiny_hybrid

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "reads"]
ENCODINGS = ("bf16", "int8", "fp8", "bf16-lossless")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_hybrid(tmp_path_factory.mktemp("m") / "hybrid", tiny_tokenizer(), layers=4)


@pytest.fixture(scope="module")
def extracted(model, tmp_path_factory):
    """`extracted(encoding)`: the folder of a cache of 12 documents, made once."""
    folder, rng = tmp_path_factory.mktemp("c"), np.random.default_rng(0)
    data = folder / "corpus.jsonl"
    texts = [" ".join(rng.choice(WORDS, n)) for n in rng.integers(4, 30, 12)]
    data.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))

    def made(encoding: str) -> Path:
        out = folder / encoding
        if not out.exists():
            config = ExtractConfig(
                str(model), data, out, taps=(0, 2), seq_len=64, rows_per_shard=2,
                device="cpu", encoding=encoding,
            )  # fmt: skip
            extract(config, report=lambda line: None)
        return out

    return made


@pytest.fixture
def cache(extracted, tmp_path) -> Cache:
    """A copy of the bf16 cache, to be damaged."""
    return Cache.open(shutil.copytree(extracted("bf16"), tmp_path / "hs"))


def check(path: Path, model: Path, count: int = 100, **asked):
    ask = Recompute(count=count, model=str(model), device="cpu", **asked)
    return verify(path, report=lambda line: None, recompute=ask)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_document_of_a_true_cache_passes_and_the_error_is_that_of_the_encoding(
    extracted, model, encoding
):
    report = check(extracted(encoding), model)
    assert report.problems == []
    found = report.recomputed
    assert found.documents == report.documents == 12
    assert found.tokens == report.tokens
    assert found.layers == [0, 2]
    assert (found.dtype, found.device) == ("float32", "cpu")
    recorded = [
        Cache.open(extracted(encoding)).shard(k).attributes["tap_stats"]["error"]
        for k in range(report.shards)
    ]
    assert np.allclose(found.mean, np.mean(recorded, axis=0), rtol=0.2)
    assert max(found.worst) <= found.worst_limit
    assert f"{found.mean[1]:.3%}" in report.render()


def test_as_many_documents_as_asked_for_are_drawn_by_the_seed(cache, model):
    # A document whose state is altered is named only if it was drawn.
    for row in range(cache.plan.rows):
        alter_states(cache, row, lambda bits: bits.__setitem__((slice(0, 3), 0, 0), 0x4640))
    drawn = [check(cache.path, model, 2, seed=seed).recomputed.failed for seed in (0, 0, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len({tuple(failed) for failed in drawn}) > 1
    assert all(len(failed) <= 2 for failed in drawn)


def test_one_altered_state_is_named_by_file_row_and_document_though_the_checksum_agrees(
    cache, model
):
    index = 5
    row, place = int(cache.plan.doc_row[index]), int(cache.plan.doc_start[index]) + 2
    number, line = int(cache.plan.doc_number[index]), int(cache.plan.doc_line[index])

    def negate(bits: np.ndarray) -> None:
        bits[place, 1] ^= 0x8000

    file = alter_states(cache, row, negate)
    assert verify(cache.path, report=lambda line: None).problems == []
    report = check(cache.path, model)
    assert report.problems == report.recomputed.failed
    (problem,) = report.problems
    assert problem.startswith(f"{file}: row {row % 2} (row {row} of the cache, document {number} ")
    assert f"(line {line} of the corpus)" in problem
    assert "in tap 1 " in problem
    assert "at position 2 by 200.00% " in problem
    assert "1 differ" in report.render()


def test_states_of_other_weights_fail_in_every_document(cache, model):
    for row in range(cache.plan.rows):
        alter_states(cache, row, lambda bits: bits.__setitem__(slice(None), np.roll(bits, 1, 2)))
    report = check(cache.path, model)
    assert len(report.recomputed.failed) == 12


def test_a_document_that_cannot_be_read_is_named_and_the_others_are_compared(cache, model):
    file = cache.shard_path(0) / "states" / "c.0.0.0.0"
    file.unlink()
    report = check(cache.path, model)
    lost = np.isin(cache.plan.doc_row, cache.plan.shard_rows(0)).sum()
    assert len(report.recomputed.failed) == lost > 0
    assert all("cannot be compared" in line for line in report.recomputed.failed)
    assert report.recomputed.documents == 12 - lost


def test_a_document_that_was_left_out_is_not_drawn(cache, model):
    index = 0
    row, number = int(cache.plan.doc_row[index]), int(cache.plan.doc_number[index])
    entry = {"row": row, "document": number, "reason": "all-zero states"}
    edit_attributes(cache.locate(row)[0].path, lambda a: a.update(skipped=[entry]))
    assert check(cache.path, model).recomputed.documents == 11


def test_another_model_is_refused_before_anything_is_read(cache, model, tmp_path, monkeypatch):
    other = shutil.copytree(model, tmp_path / "other")
    monkeypatch.setattr("dflash_cache.shard.read_row", lambda *_: pytest.fail("read a row"))
    weights = next(other.glob("*.safetensors"))
    header = int.from_bytes(weights.read_bytes()[:8], "little")
    flip_bit(weights, 8 * (8 + header))  # the first number: a digest samples the data
    with pytest.raises(
        UsageError, match="is not the target of this cache: its weights are not those"
    ):
        check(cache.path, other)
    config = other / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(UsageError, match=r"its config\.json is not the one"):
        check(cache.path, other)


def test_the_same_model_elsewhere_and_in_another_precision_is_the_same_model(
    cache, model, tmp_path
):
    moved = shutil.copytree(model, tmp_path / "moved")
    report = check(cache.path, moved, 3, dtype="bfloat16")
    assert report.recomputed.dtype == "bfloat16"
    assert report.recomputed.limit == limits("bf16", {"float32", "bfloat16"})[0]


def test_a_cache_that_names_no_model_cannot_be_recomputed(tmp_path, model):
    cache = make_cache(tmp_path / "hs")
    with pytest.raises(DataError, match="names no target model"):
        check(cache.path, model)


def test_limits_are_wider_for_half_precision_and_for_eight_bits():
    exact, worst = limits("bf16", {"float32"})
    assert exact == limits("bf16-lossless", {"float32"})[0] > 2**-9
    assert exact < limits("int8", {"float32"})[0] < limits("fp8", {"float32"})[0]
    assert limits("bf16", {"float32", "bfloat16"})[0] == limits("bf16", {"bfloat16"})[0] > exact
    assert exact < worst <= limits("fp8", {"bfloat16"})[1] < 1


def test_the_error_of_a_token_is_relative_to_its_own_size():
    want = torch.tensor([[[3.0, 4.0]], [[300.0, 400.0]]])
    have = want + torch.tensor([[[0.5, 0.0]], [[0.5, 0.0]]])
    assert token_errors(have, want).flatten().tolist() == pytest.approx([0.1, 0.001])


def test_the_command_prints_the_errors_and_fails_with_the_document(cache, model):
    words = ["verify", cache.path, "--recompute", 12, "--model", model, "--device", "cpu"]

    def dflash(*more: str):
        return CliRunner().invoke(cli.main, [*(str(word) for word in words), *more])

    ran = dflash()
    assert ran.exit_code == 0, ran.output
    assert "recomputed 12 documents" in ran.output
    assert "allowed: 1% and 10% in a document" in ran.output
    alter_states(cache, 1, lambda bits: bits.__setitem__((3, 0), np.roll(bits[3, 0], 1)))
    ran = dflash("--json")
    assert ran.exit_code == 1
    found = json.loads(ran.stdout)
    assert found["recomputed"]["failed"] == found["problems"]
    assert len(found["problems"]) == 1
