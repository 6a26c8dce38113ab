"""The summary of a cache: what manifest, plan and shards say, damage and mixtures included."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

import cli
from dflash_cache.inspector import CacheReport, inspect_path, inspect_shard, show
from dflash_cache.provenance import ranges
from tests import tiny_cache
from tests.altering import edit_attributes, flip_bit
from tests.helpers import make_cache

ENCODINGS = ("bf16", "int8", "fp8", "bf16-lossless")


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "hs")


def summary(path) -> CacheReport:
    report = inspect_path(path)
    assert isinstance(report, CacheReport)
    return report


def shown(report: CacheReport, name: str) -> str:
    """The line of that name in what a person sees, without the name."""
    (line,) = [x for x in show(report).splitlines() if x.startswith(f"  {name} ")]
    return line.removeprefix(f"  {name}").strip()


def test_the_counts_are_those_of_the_plan_and_the_shards(cache):
    report, plan = summary(cache.path), cache.plan
    assert (report.shards, report.present, report.missing) == (3, 3, [])
    assert (report.rows, report.rows_present) == (plan.rows, plan.rows)
    assert (report.documents, report.truncated) == (plan.documents, plan.truncated)
    assert report.tokens == report.tokens_present == plan.tokens
    assert report.fill == plan.fill
    assert report.split == {
        "train": len(cache.rows("train")),
        "heldout": len(cache.rows("heldout")),
    }
    supervised = sum(int(cache.shard(k).loss_mask.sum()) for k in range(3))
    assert report.supervised_share == supervised / plan.tokens
    files = [p for p in (cache.path / "shards").rglob("*") if p.is_file()]
    assert report.shards_bytes == sum(p.stat().st_size for p in files)
    assert report.bytes_per_token == report.shards_bytes / plan.tokens
    assert report.bytes_per_place == report.shards_bytes / (plan.rows * 32)
    assert report.bf16_bytes == 2 * 2 * 8
    assert report.problems == report.warnings == []


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_statistics_of_the_shards_merge_into_those_of_all_their_tokens(tmp_path, encoding):
    cache = tiny_cache.make_cache(tmp_path / "hs", encoding=encoding)
    report = summary(cache.path)
    states = []
    for row in range(cache.plan.rows):
        shard, inside = cache.locate(row)
        states.append(cache.decoded_row(row).float().numpy()[shard.document[inside] > 0])
    values = np.concatenate(states).astype(np.float64)  # [tokens, T, D]
    assert len(report.tap_stats) == 2
    for tap, found in enumerate(report.tap_stats):
        assert found.layer == cache.manifest.taps[tap]
        assert found.mean == pytest.approx(values[:, tap].mean(), abs=1e-6)
        assert found.std == pytest.approx(values[:, tap].std(), rel=1e-6)
        assert found.absmax == pytest.approx(np.abs(values[:, tap]).max())
        assert found.nonfinite == 0
    assert report.geometry["encoding"] == shown(report, "encoding") == encoding


def test_errors_are_averaged_over_tokens_and_unknown_if_one_shard_has_none(cache):
    assert [tap.error for tap in summary(cache.path).tap_stats] == [None, None]
    for k, errors in enumerate([[0.01, 0.02], [0.03, 0.04], [0.05, 0.06]]):
        edit_attributes(cache.shard_path(k), lambda a, e=errors: a["tap_stats"].update(error=e))
    tokens = [cache.shard(k).attributes["tokens"] for k in range(3)]
    want = np.average([[0.01, 0.02], [0.03, 0.04], [0.05, 0.06]], axis=0, weights=tokens)
    assert [tap.error for tap in summary(cache.path).tap_stats] == pytest.approx(want.tolist())


def test_an_unfinished_cache_says_which_shards_are_missing(tmp_path):
    cache = make_cache(tmp_path / "hs", skip=(0,))
    report = summary(cache.path)
    assert (report.present, report.missing) == (2, [0])
    assert shown(report, "shards") == "2 of 3 are there, 0 missing"
    assert report.tokens_present < report.tokens
    assert report.problems == []


def test_a_cache_without_shards_is_shown_as_far_as_it_goes(cache):
    for k in range(3):
        shutil.rmtree(cache.shard_path(k))
    report = summary(cache.path)
    assert shown(report, "shards") == "0 of 3 are there, 0..2 missing"
    assert shown(report, "documents") == "8 (0 cut to 32 tokens)"
    assert report.tap_stats == []
    assert "kernels" not in show(report)


def test_kernels_versions_and_devices_are_counted_and_mixtures_warned_of(cache):
    def change(attributes: dict) -> None:
        attributes["kernels"] = ["kernels: fla; checked, error 1e-3", "layer 0 ..."]
        attributes["device"], attributes["dtype"] = "NVIDIA H200", "bfloat16"

    for k in range(3):
        edit_attributes(cache.shard_path(k), change)
    report = summary(cache.path)
    assert report.made_by["kernels"] == {"fla": 3}
    assert shown(report, "kernels") == "fla"
    assert shown(report, "device") == "NVIDIA H200"
    assert report.warnings == []
    edit_attributes(cache.shard_path(1), lambda attributes: attributes.update(device="cpu"))
    report = summary(cache.path)
    assert shown(report, "device") == "NVIDIA H200 (2 of 3 shards) / cpu (1 of 3 shards)"
    assert report.warnings == [
        "shards were made with different device: NVIDIA H200 (0, 2); cpu (1)"
    ]
    assert "warning: shards were made with different device" in show(report)


def test_skipped_documents_are_counted_by_reason(cache):
    for k, reasons in ((0, ["non-finite states"]), (1, ["all-zero states", "non-finite states"])):
        entries = [{"row": 0, "document": 1, "reason": reason} for reason in reasons]

        def skip(attributes: dict, entries=entries) -> None:
            attributes["skipped"] = entries
            attributes["documents"] -= len(entries)

        edit_attributes(cache.shard_path(k), skip)
    report = summary(cache.path)
    assert report.problems == []
    assert shown(report, "skipped") == "3 documents (2 non-finite states, 1 all-zero states)"


@pytest.mark.parametrize("value", [3, "x", {"a": 1}, [3], [None], [["reason"]]])
def test_attributes_of_another_form_are_shown_all_the_same(cache, value):
    def change(attributes: dict) -> None:
        attributes.update(kernels=value, versions=value, tap_stats=value, tokens=value)

    edit_attributes(cache.shard_path(0), change)
    report = summary(cache.path)
    assert any("no statistics of the taps" in problem for problem in report.problems)
    assert shown(report, "kernels")


def test_damage_that_the_metadata_show_is_named(cache):
    (cache.shard_path(0) / "states" / "c.1.0.0.0").unlink()
    (cache.shard_path(1) / "zarr.json").write_text("{")
    flip_bit(cache.shard_path(2) / "states" / "zarr.json", 400)
    report = summary(cache.path)
    for k, problem in enumerate(report.problems):
        assert str(cache.shard_path(k)) in problem
    assert len(report.problems) == 3
    assert report.present == 3


def test_the_target_is_named_and_the_geometry_told_in_words(cache):
    manifest = cache.path / "manifest.json"
    content = json.loads(manifest.read_text())
    content["identity"] = {"model": {"target": "some-model"}, "tap_convention": "tap i is so"}
    manifest.write_text(json.dumps(content))
    report = summary(cache.path)
    assert shown(report, "target") == "some-model"
    assert shown(report, "taps") == "layers 1, 3 (tap i is so)"
    assert shown(report, "geometry") == "32 tokens a row, 2 rows a shard, 2 taps of 8 values"


def test_the_command_summarises_a_cache_and_shows_a_shard(cache):
    def dflash(*words: object):
        return CliRunner().invoke(cli.main, ["inspect-shard", *(str(word) for word in words)])

    ran = dflash(cache.path)
    assert ran.exit_code == 0, ran.output
    assert ran.output.startswith("cache\n")
    found = json.loads(dflash(cache.path, "--json").stdout)
    assert found == json.loads(json.dumps(summary(cache.path).to_dict()))
    ran = dflash(cache.shard_path(0))
    assert ran.output.startswith("shard\n")
    (cache.shard_path(0) / "zarr.json").unlink()
    assert dflash(cache.path).exit_code == 1


def test_the_summary_reads_no_states(cache, monkeypatch):
    monkeypatch.setattr("dflash_cache.shard.read_row", lambda *_: pytest.fail("read a row"))
    assert summary(cache.path).problems == []
    with pytest.raises(pytest.fail.Exception):
        inspect_shard(cache.shard_path(0))


def test_a_cache_whose_plan_is_damaged_is_one_sentence(cache):
    shutil.rmtree(cache.path / "plan.zarr")
    ran = CliRunner().invoke(cli.main, ["inspect-shard", str(cache.path)])
    assert ran.exit_code == 1
    assert "the plan cannot be read" in ran.output


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([], ""), ([4], "4"), ([0, 1, 2, 7], "0..2, 7"), (list(range(0, 40, 2)), None)],
)
def test_ranges_are_short(numbers, words):
    shown_ranges = ranges(numbers)
    assert shown_ranges == words or shown_ranges.endswith("22, and 8 more")
