"""Inspector: recomputes everything, says what is wrong, marks what is supervised."""

import io
import json
import re
import shutil

import numpy as np
import pytest
from rich.console import Console

from dflash_cache.errors import UsageError
from dflash_cache.inspector import inspect_shard, render
from tests.helpers import make_cache, tiny_tokenizer


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "hs")


def test_the_counts_are_those_of_the_plan(cache):
    for k in range(cache.plan.shards):
        report = inspect_shard(cache.shard_path(k))
        rows = cache.plan.shard_rows(k)
        documents = np.concatenate([cache.plan.row_documents(row) for row in rows])
        tokens = int(cache.plan.doc_length[documents].sum())
        assert (report.rows, report.documents, report.tokens) == (len(rows), len(documents), tokens)
        assert report.fill == tokens / (len(rows) * 32)
        assert report.states_bytes == len(rows) * 32 * 2 * 8 * 2
        assert report.bytes_per_token == report.states_bytes / tokens
        assert report.supervised_share == cache.shard(k).loss_mask.sum() / tokens
        assert sum(report.split.values()) == len(rows)
        assert report.problems == []


def test_arrays_taps_kernels_and_versions_are_reported(cache):
    report = inspect_shard(cache.shard_path(0))
    assert [(a.name, a.shape, a.dtype) for a in report.arrays] == [
        ("states", [2, 32, 2, 8], "uint16"),
        ("input_ids", [2, 32], "int32"),
        ("loss_mask", [2, 32], "uint8"),
        ("document", [2, 32], "int32"),
        ("position", [2, 32], "int32"),
    ]
    assert report.total_bytes > sum(a.bytes for a in report.arrays)
    assert [tap.layer for tap in report.taps] == [1, 3]
    assert all(tap.agrees and tap.nonfinite == 0 and 0.9 < tap.std < 1.1 for tap in report.taps)
    assert report.kernels == ["layer 0: torch reference"]
    assert "torch" in report.versions
    assert report.checked == 2
    assert report.bad == []


def shown(report, name: str) -> str:
    """The line of that name in what a person sees, without the name."""
    (line,) = [x for x in render(report).splitlines() if x.startswith(f"  {name} ")]
    return line.removeprefix(f"  {name}").strip()


def test_kernels_versions_and_skipped_are_read_without_json(cache):
    report = inspect_shard(cache.shard_path(0))
    report.kernels = ["kernels: torch reference on CPU (2 GatedDeltaNet layers)", "layer 0", "l 1"]
    report.versions = {"python": "3.11.7", "torch": "2.13.0+cpu"}
    bad = [("states not finite", 1), ("all-zero states", 2), ("states not finite", 3)]
    report.skipped = [{"reason": reason, "document": number} for reason, number in bad]
    assert shown(report, "kernels") == (
        "torch reference on CPU (2 GatedDeltaNet layers) (per layer: --json)"
    )
    assert shown(report, "versions") == "python 3.11.7, torch 2.13.0+cpu"
    assert shown(report, "skipped") == "3 documents (2 states not finite, 1 all-zero states)"
    assert report.to_dict()["kernels"][1:] == ["layer 0", "l 1"]


def test_a_shard_that_skipped_and_recorded_nothing_says_so(cache):
    report = inspect_shard(cache.shard_path(0))
    assert shown(report, "kernels") == "layer 0: torch reference"
    assert shown(report, "skipped") == "none"
    report.kernels, report.versions = None, None
    assert shown(report, "kernels") == shown(report, "versions") == "not recorded"


@pytest.mark.parametrize("value", [3, "x", {"a": 1}, [3], [None], [["reason"]]])
def test_attributes_of_another_form_are_shown_all_the_same(cache, value):
    report = inspect_shard(cache.shard_path(0))
    report.kernels = report.versions = report.skipped = value
    assert all(shown(report, name) for name in ("kernels", "versions", "skipped"))


def test_the_report_is_json(cache):
    report = inspect_shard(cache.shard_path(0))
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


def test_supervised_tokens_are_between_brackets_and_the_text_is_the_rows_own(cache):
    report = inspect_shard(cache.shard_path(0), tokens=12)
    tokenizer, shard = tiny_tokenizer(), cache.shard(0)
    ids, mask = shard.input_ids[0][:12], shard.loss_mask[0][:12]
    marked = "".join(run.text for run in report.text if run.supervised)
    assert re.findall(r"⟦", render(report).split("first tokens")[1])[1:] == ["⟦"] * sum(
        run.supervised for run in report.text
    )
    runs = np.split(np.arange(12), 1 + np.flatnonzero(np.diff(mask)))
    expected = [tokenizer.decode(ids[run]) for run in runs if mask[run[0]]]
    assert marked == "".join(expected)


def test_on_a_terminal_supervised_tokens_are_bold_green_without_brackets(cache):
    report = inspect_shard(cache.shard_path(0), tokens=12)
    file = io.StringIO()
    render(report, Console(file=file, force_terminal=True, color_system="standard", width=100))
    assert "\x1b[1;32m" in file.getvalue()
    assert "⟦" not in file.getvalue()


def test_markup_in_the_text_is_shown_and_not_obeyed(cache):
    class Shouting:
        def decode(self, ids, **_):
            return "[bold red]x[/]"

    report = inspect_shard(cache.shard_path(0), tokens=4, tokenizer=Shouting())
    assert "[bold red]x[/]" in render(report)


def test_documents_are_separated_in_the_text(tmp_path):
    cache = make_cache(tmp_path / "hs", lengths=(4, 4), seq_len=16, heldout=0.0)
    report = inspect_shard(cache.shard_path(0), tokens=16)
    assert {run.document for run in report.text} == {1, 2}
    assert render(report).count("\n---\n") == 1


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("flip", "row 1 of states has crc32c"),
        ("delete", "c.1.0.0.0: this chunk is missing"),
        ("truncate", "c.1.0.0.0: this chunk has 100 bytes instead of 1024"),
        ("ids", "row 0 of input_ids has crc32c"),
        ("attributes", "the attributes or the arrays' zarr.json have been changed"),
        ("group", "zarr.json: this metadata file cannot be read"),
    ],
)
def test_damage_is_reported_and_does_not_raise(cache, damage, named):
    path = cache.shard_path(0)
    chunk, ids, meta = path / "states/c.1.0.0.0", path / "input_ids/c.0.0", path / "zarr.json"
    actions = {
        "flip": lambda: chunk.write_bytes(b"\x55" + chunk.read_bytes()[1:]),
        "delete": chunk.unlink,
        "truncate": lambda: chunk.write_bytes(chunk.read_bytes()[:100]),
        "ids": lambda: ids.write_bytes(b"\x55" + ids.read_bytes()[1:]),
        "attributes": lambda: meta.write_text(meta.read_text().replace("reference", "fused")),
        "group": meta.unlink,
    }
    actions[damage]()
    report = inspect_shard(path)
    assert any(named in problem for problem in report.problems)
    assert named in render(report)


@pytest.mark.parametrize("chunk", ["states/c.1.0.0.0", "document/c.0.0"])
@pytest.mark.parametrize("size", [None, 1])
def test_a_damaged_chunk_is_one_problem_that_says_what_to_do(cache, chunk, size):
    path = cache.shard_path(0)
    if size is None:
        (path / chunk).unlink()
    else:
        (path / chunk).write_bytes(b"x")
    (problem,) = inspect_shard(path).problems
    assert problem.startswith(f"{path / chunk}: this chunk ")
    assert problem.endswith(f"; remove {path} and run `dflash extract` again")


def test_statistics_that_the_attributes_do_not_share_are_a_problem(cache):
    meta = cache.shard_path(0) / "zarr.json"
    content = json.loads(meta.read_text())
    content["attributes"]["tap_stats"]["std"][1] *= 1.01
    meta.write_text(json.dumps(content))
    report = inspect_shard(cache.shard_path(0))
    assert [tap.agrees for tap in report.taps] == [True, False]
    assert "tap 1: the attributes record other statistics" in report.problems


def test_non_finite_and_all_zero_states_are_problems(cache):
    chunk = cache.shard_path(0) / "states" / "c.0.0.0.0"
    bits = np.frombuffer(chunk.read_bytes(), np.uint16).reshape(32, 2, 8).copy()
    bits[0] = 0
    bits[1, 0, :3] = 0x7F80
    chunk.write_bytes(bits.tobytes())
    problems = inspect_shard(cache.shard_path(0)).problems
    assert "row 0: 1 tokens have all-zero states" in problems
    assert "tap 0: 3 values are not finite" in problems


def test_a_shard_outside_of_a_cache_is_reported_without_text_and_it_says_why(cache, tmp_path):
    alone = tmp_path / "alone.zarr"
    shutil.copytree(cache.shard_path(0), alone)
    report = inspect_shard(alone)
    assert report.problems == []
    assert report.split == {}
    assert report.text_note == "the shard lies in no cache, so there is no tokenizer"
    assert "text: none" in render(report)
    assert inspect_shard(alone, tokenizer=tiny_tokenizer()).text != []


def test_a_cache_without_tokenizer_is_reported_without_text_and_it_says_why(cache):
    for file in cache.target_dir.glob("*token*"):
        file.unlink()
    report = inspect_shard(cache.shard_path(0))
    assert report.text == []
    assert report.text_note is not None
    assert "holds no tokenizer" in report.text_note


def test_a_shard_that_the_plan_does_not_know_is_a_problem(cache):
    extra = cache.path / "shards" / "000099.zarr"
    shutil.copytree(cache.shard_path(0), extra)
    assert any("the plan has no shard" in p for p in inspect_shard(extra).problems)


@pytest.mark.parametrize("name", ["nowhere", "empty", "file.txt", "hs/plan.zarr"])
def test_a_path_that_is_neither_shard_nor_cache_is_a_usage_error(cache, tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(UsageError, match="is neither a shard nor a cache"):
        inspect_shard(tmp_path / name)
