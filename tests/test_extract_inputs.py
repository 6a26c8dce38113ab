"""Odd corpora, odd states, damaged or foreign caches: what extraction does with each."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_cache import extract_job
from dflash_cache.cache import Cache
from dflash_cache.errors import DataError, UsageError
from dflash_cache.extract import ExtractConfig, ExtractSummary, extract
from dflash_cache.target import Target
from tests.helpers import tiny_tokenizer
from tests.tiny_models import tiny_dense, tiny_hybrid

S = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("m") / "hybrid"
    return tiny_hybrid(folder, tiny_tokenizer(), layers=2)


def corpus(folder: Path, lengths: list[int]) -> Path:
    rng, path = np.random.default_rng(0), folder / "corpus.jsonl"
    lines = ({"input_ids": rng.integers(5, 300, n).tolist(), "loss_mask": [1] * n} for n in lengths)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(model: Path, data: Path, out: Path, **changes) -> tuple[ExtractSummary, list[str]]:
    values = {"taps": (0, 1), "seq_len": S, "rows_per_shard": 2, "device": "cpu"}
    lines: list[str] = []
    config = ExtractConfig(str(model), data, out, **(values | changes))
    return extract(config, lines.append), lines


@pytest.fixture(scope="module")
def made(model, tmp_path_factory) -> Path:
    """A folder with a corpus and a complete cache `hs` of it."""
    root = tmp_path_factory.mktemp("made")
    run(model, corpus(root, [20, 25, 31, 9, 14, 28, 30]), root / "hs")
    return root


@pytest.fixture
def copy(made, tmp_path) -> Path:
    shutil.copytree(made / "hs", tmp_path / "hs")
    return tmp_path / "hs"


# --- documents


@pytest.mark.parametrize("length", [2, S, S + 1, 100 * S])
@pytest.mark.parametrize("encoding", ["bf16", "int8"])
def test_a_document_of_any_length_is_stored_up_to_the_row(model, tmp_path, length, encoding):
    data = corpus(tmp_path, [length])
    summary, lines = run(model, data, tmp_path / "hs", encoding=encoding)
    kept = min(length, S)
    assert (summary.documents, summary.tokens, summary.rows) == (1, kept, 1)
    assert summary.truncated == (length > S)
    assert (f"1 documents cut to {S} tokens" in lines[0]) == (length > S)
    cache = Cache.open(tmp_path / "hs")
    tokens = cache.shard(0).read_tokens(0)
    assert np.count_nonzero(tokens.document) == kept
    written = json.loads(data.read_text())["input_ids"]
    assert tokens.input_ids[:kept].tolist() == written[:kept]
    assert cache.decoded_row(0)[:kept].abs().amax(dim=(1, 2)).min() > 0
    assert not cache.decoded_row(0)[kept:].any()
    assert cache.verify_shard(0) == []


def test_a_document_of_one_token_cannot_teach_and_is_left_out_and_counted(model, tmp_path):
    summary, lines = run(model, corpus(tmp_path, [20, 1, 9]), tmp_path / "hs")
    assert lines[0] == "corpus: 1 skipped, fewer than 2 tokens (first: line 2)"
    assert (summary.documents, summary.tokens) == (2, 29)
    with pytest.raises(DataError, match=r"no record gave a document: fewer than 2 tokens \(1\)"):
        run(model, corpus(tmp_path, [1]), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("text", ["", "\n\n\n"])
def test_an_empty_corpus_is_a_data_error_and_leaves_nothing(model, tmp_path, text):
    (tmp_path / "corpus.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"corpus\.jsonl"):
        run(model, tmp_path / "corpus.jsonl", tmp_path / "hs")
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_a_tokenizer_without_a_pad_token_is_no_obstacle(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    model = tiny_dense(tmp_path / "m", "llama", tokenizer, layers=2)
    assert json.loads((model / "tokenizer_config.json").read_text()).get("pad_token") is None
    (tmp_path / "corpus.jsonl").write_text('{"text": "The fox."}\n{"text": "The lazy dog?"}\n')
    summary, _ = run(model, tmp_path / "corpus.jsonl", tmp_path / "hs")
    assert summary.documents == 2
    assert Cache.open(tmp_path / "hs").verify_shard(0) == []


# --- states


def states_become(monkeypatch, change) -> None:
    """`change(states, input_ids)` alters what the target gives, in place."""
    original = Target.run_rows

    def changed(self, ids, *arguments, **options):
        states = original(self, ids, *arguments, **options)
        change(states, ids)
        return states

    monkeypatch.setattr(Target, "run_rows", changed)


BROKEN = {
    "non-finite": lambda states, _: states[..., 3].fill_(float("nan")),
    "all-zero": lambda states, _: states.zero_(),
    "constant": lambda states, _: states.fill_(2.5),
}


@pytest.mark.parametrize("reason", BROKEN)
@pytest.mark.parametrize("encoding", ["bf16", "fp8", "bf16-lossless"])
def test_unusable_states_of_every_document_stop_the_job(
    model, made, tmp_path, monkeypatch, reason, encoding
):
    states_become(monkeypatch, BROKEN[reason])
    with pytest.raises(DataError, match=f"have unusable states, the first one .*: {reason} states"):
        run(model, made / "corpus.jsonl", tmp_path / "hs", encoding=encoding)
    assert Cache.open(tmp_path / "hs").missing() == [0, 1, 2]
    assert list((tmp_path / "hs" / "staging").iterdir()) == []


@pytest.mark.parametrize("reason", ["non-finite", "all-zero"])
def test_no_channel_scale_is_made_of_unusable_states(model, made, tmp_path, monkeypatch, reason):
    states_become(monkeypatch, BROKEN[reason])
    with pytest.raises(DataError, match="the channel scale cannot be computed"):
        run(model, made / "corpus.jsonl", tmp_path / "hs", encoding="int8")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("encoding", ["bf16", "int8", "fp8", "bf16-lossless"])
def test_states_beyond_30000_are_stored_within_the_encodings_error(
    model, made, tmp_path, monkeypatch, encoding
):
    seen: list[torch.Tensor] = []

    def massive(states, ids):
        states[:, :, :, 5] = 40_000.0 + ids[:, :, None]
        states[:, :, :, 6] = -33_000.0
        seen.append(states.clone())

    states_become(monkeypatch, massive)
    summary, _ = run(model, made / "corpus.jsonl", tmp_path / "hs", encoding=encoding)
    assert summary.skipped == []
    cache = Cache.open(tmp_path / "hs")
    states = torch.cat(seen[-cache.plan.rows :])  # the last ones are those that were written
    limit = {"int8": 0.02, "fp8": 0.05}.get(encoding, 2**-8)
    for row in range(cache.plan.rows):
        used = torch.from_numpy(cache.locate(row)[0].read_tokens(cache.locate(row)[1]).document) > 0
        have, want = cache.decoded_row(row)[used].float(), states[row][used]
        assert have.isfinite().all()
        assert ((have - want).norm(dim=-1) / want.norm(dim=-1)).max() < limit
    assert max(cache.shard(0).attributes["tap_stats"]["absmax"]) > 30_000


# --- another extraction into the same folder


def other_template(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"taps": (1,)}, "taps"),
        ({"seq_len": 64}, "seq_len"),
        ({"encoding": "fp8"}, "encoding"),
        ({"heldout": 0.5}, "heldout"),
        ({"rows_per_shard": 3}, "rows_per_shard"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"template_options": {"enable_thinking": False}}, "template_options"),
    ],
)
def test_other_settings_are_refused_naming_the_field(model, made, changes, field):
    before = sorted(str(p) for p in made.rglob("*"))
    with pytest.raises(UsageError, match=rf"this cache was made for \S*{field}"):
        run(model, made / "corpus.jsonl", made / "hs", **changes)
    assert sorted(str(p) for p in made.rglob("*")) == before


def test_another_corpus_template_or_model_is_refused_naming_it(model, made, tmp_path):
    with pytest.raises(UsageError, match="this cache was made for corpus"):
        run(model, corpus(tmp_path, [20, 25, 31, 9, 14, 28, 29]), made / "hs")
    with pytest.raises(UsageError, match="this cache was made for chat_template"):
        run(other_template(model, tmp_path / "t"), made / "corpus.jsonl", made / "hs")
    other = tiny_hybrid(tmp_path / "m", tiny_tokenizer(), layers=2, rms_norm_eps=1e-5)
    with pytest.raises(UsageError, match=r"this cache was made for model\.\S*config"):
        run(other, made / "corpus.jsonl", made / "hs")


# --- a damaged cache


def test_a_cut_row_is_named_with_its_file_and_what_to_do(model, made, copy):
    shard = Cache.open(copy).shard_path(1)
    file = shard / "states" / "c.1.0.0.0"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=rf"{re.escape(str(file))}.*remove {shard} and run"):
        run(model, made / "corpus.jsonl", copy)


def test_a_manifest_that_was_edited_is_refused(model, made, copy):
    manifest = copy / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"seq_len": 32', '"seq_len": 48'))
    with pytest.raises(UsageError, match="made for seq_len 48, not 32"):
        run(model, made / "corpus.jsonl", copy)
    manifest.write_text(text.replace('"created": "2', '"created": "1'))
    assert "manifest_digest" in Cache.open(copy).verify_shard(0)[0]
    manifest.write_text(text[:-40])
    with pytest.raises(DataError, match=r"manifest\.json: the manifest cannot be read"):
        run(model, made / "corpus.jsonl", copy)


def test_without_its_manifest_a_folder_is_no_cache_and_is_left_alone(model, made, copy):
    (copy / "manifest.json").unlink()
    before = sorted(str(p) for p in copy.rglob("*"))
    with pytest.raises(DataError, match="the manifest of this cache is missing"):
        run(model, made / "corpus.jsonl", copy)
    assert sorted(str(p) for p in copy.rglob("*")) == before


# --- workers that differ


def test_shards_made_elsewhere_are_warned_about_at_once_and_in_the_summary(
    model, made, copy, monkeypatch
):
    shutil.rmtree(Cache.open(copy).shard_path(1))
    mine = extract_job.versions()
    monkeypatch.setattr(extract_job, "versions", lambda: mine | {"torch": "1.0"})
    summary, lines = run(model, made / "corpus.jsonl", copy)
    told = f"shards were made with different torch: {mine['torch']} (0, 2); 1.0 (1)"
    assert summary.warnings == [told]
    assert f"warning: {told}" in lines
    assert f"warning: {told}" in summary.render()


def test_like_shards_are_not_warned_about(model, made, copy):
    shutil.rmtree(Cache.open(copy).shard_path(1))
    assert run(model, made / "corpus.jsonl", copy)[0].warnings == []


def test_a_shard_that_another_worker_publishes_first_is_dropped(model, made, copy, monkeypatch):
    path = Cache.open(copy).shard_path(1)
    path.rename(copy / "aside")
    inode = (copy / "aside").stat().st_ino

    def another_is_faster(_states, _ids):
        if (copy / "staging").exists() and any((copy / "staging").iterdir()):
            (copy / "aside").rename(path)

    states_become(monkeypatch, another_is_faster)
    summary, _ = run(model, made / "corpus.jsonl", copy)
    assert (summary.shards_written, summary.shards_skipped) == (0, 3)
    assert path.stat().st_ino == inode
    assert list((copy / "staging").iterdir()) == []
