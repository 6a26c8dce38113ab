"""Verify: damage of any kind is found and named by file and row; a sound cache passes."""

import json
import random
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import cli
from dflash_cache.verify import verify
from tests import tiny_cache
from tests.altering import (
    edit_attributes,
    flip_bit,
)
from tests.helpers import make_cache

ENCODINGS = ("bf16", "int8", "fp8", "bf16-lossless")
ARRAYS = ("states", "input_ids", "loss_mask", "document", "position")


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "hs")


def check(path: Path):
    """The report, and that every line of it has been told once."""
    told: list[str] = []
    report = verify(path, report=told.append)
    expected = [
        *report.problems,
        *(f"warning: {line}" for line in report.warnings),
        *(f"note: {line}" for line in report.notes),
    ]
    assert sorted(told) == sorted(expected)
    return report


def test_a_sound_cache_has_no_problems_and_all_of_it_has_been_read(cache):
    report = check(cache.path)
    assert (report.problems, report.warnings, report.notes) == ([], [], [])
    assert (report.shards, report.present, report.missing) == (3, 3, [])
    assert report.rows == cache.plan.rows
    assert report.documents == cache.plan.documents == 8
    assert report.tokens == cache.plan.tokens
    files = [p for p in (cache.path / "shards").rglob("*") if p.is_file()]
    assert report.bytes == sum(p.stat().st_size for p in files)
    assert report.render().endswith("no problems")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_sound_cache_of_any_encoding_has_no_problems(tmp_path, encoding):
    cache = tiny_cache.make_cache(tmp_path / "hs", encoding=encoding)
    report = check(cache.path)
    assert report.problems == []
    assert report.rows == cache.plan.rows > 4


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_flipped_bit_in_any_array_is_named_by_file_and_row(tmp_path, encoding):
    cache = tiny_cache.make_cache(tmp_path / "hs", encoding=encoding)
    shard = cache.shard(1)
    flips = 0
    for name, layout in shard.layouts.items():
        file, offset = layout.place(2)
        size = file.stat().st_size if layout.packed else layout.row_bytes
        bit = 8 * (offset + size // 2)
        flip_bit(file, bit)
        problems = check(cache.path).problems
        flip_bit(file, bit)
        assert len(problems) == 1, (name, problems)
        assert problems[0].startswith(f"{file}: ")
        assert f"row 2 of {name} has crc32c" in problems[0] or layout.packed
        flips += 1
    assert flips == len(shard.layouts) == len(list(shard.path.glob("*/zarr.json")))
    assert check(cache.path).problems == []


def test_a_flipped_bit_in_any_metadata_file_is_found_and_the_shard_named(cache):
    path, draw, flips = cache.shard_path(1), random.Random(0), 0
    files = sorted(path.rglob("zarr.json"))
    assert len(files) == 1 + len(ARRAYS)
    for file in files:
        for bit in draw.sample(range(8 * file.stat().st_size), 8):
            flip_bit(file, bit)
            problems = check(cache.path).problems
            flip_bit(file, bit)
            assert any(str(path) in problem for problem in problems), (file, bit)
            flips += 1
    assert flips == 48
    assert check(cache.path).problems == []


def test_a_number_that_is_spelt_in_other_characters_tells_of_a_flipped_bit(cache):
    """The digest of the attributes' meaning cannot see it: 1e-05 and 1E-05 are the same number."""
    path = cache.shard_path(0)
    edit_attributes(path, lambda attributes: attributes.update(extra=1e-05))
    assert check(cache.path).problems == []
    file = path / "zarr.json"
    flip_bit(file, 8 * file.read_bytes().index(b"e-05") + 5)
    assert b"1E-05" in file.read_bytes()
    (problem,) = check(cache.path).problems
    assert problem.startswith(f"{file}: ")


def test_several_damaged_rows_are_all_named_and_each_once(cache):
    states, ids = (cache.shard_path(k) / name for k, name in ((0, "states"), (1, "input_ids")))
    flip_bit(states / "c.0.0.0.0", 77)
    flip_bit(states / "c.1.0.0.0", 99)
    (ids / "c.0.0").write_bytes(b"short")
    problems = check(cache.path).problems
    assert sorted(p.split(": ")[0] for p in problems) == [
        str(states / "c.0.0.0.0"),
        str(states / "c.1.0.0.0"),
        str(ids / "c.0.0"),
    ]
    assert "has 5 bytes instead of 256" in problems[0]


@pytest.mark.parametrize("chunk", ["states/c.1.0.0.0", "position/c.0.0"])
def test_a_truncated_or_missing_chunk_is_named_once_with_what_to_do(cache, chunk):
    file = cache.shard_path(2) / chunk
    for damage in (lambda: file.write_bytes(file.read_bytes()[:-1]), file.unlink):
        damage()
        (problem,) = check(cache.path).problems
        assert problem.startswith(f"{file}: this chunk ")
        assert problem.endswith("run `dflash extract` again")


def test_a_shard_without_metadata_is_named_and_the_others_are_checked(cache):
    (cache.shard_path(0) / "zarr.json").unlink()
    flip_bit(cache.shard_path(1) / "states" / "c.0.0.0.0", 5)
    report = check(cache.path)
    assert report.rows == cache.plan.rows - 2
    assert len(report.problems) == 2
    assert str(cache.shard_path(0) / "zarr.json") in report.problems[0]
    assert str(cache.shard_path(1)) in report.problems[1]


def test_an_edited_manifest_is_one_problem_however_many_shards_there_are(cache):
    file = cache.path / "manifest.json"
    file.write_text(file.read_text().replace('"heldout": 0.25', '"heldout": 0.5'))
    (problem,) = check(cache.path).problems
    assert problem.startswith(f"{file}: this is not the manifest that the shards were written for")


def test_a_manifest_with_another_geometry_names_the_shards_that_do_not_fit(cache):
    file = cache.path / "manifest.json"
    file.write_text(file.read_text().replace('"hidden": 8', '"hidden": 9'))
    problems = check(cache.path).problems
    assert [str(cache.shard_path(k)) in p for k, p in enumerate(problems)] == [True] * 3


@pytest.mark.parametrize(
    ("content", "named"),
    [("{", "cannot be read"), ("\udcff", "cannot be read"), (None, "the manifest is missing")],
)
def test_a_broken_or_missing_manifest_is_a_problem_that_names_it(cache, content, named):
    file = cache.path / "manifest.json"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content.encode(errors="surrogateescape"))
    (problem,) = check(cache.path).problems
    assert problem.startswith(str(file))
    assert named in problem or "UTF-8" in problem


def test_a_plan_that_is_not_the_manifests_is_a_problem(cache, tmp_path):
    other = make_cache(tmp_path / "other", lengths=(20, 30, 9, 14, 32, 7, 25, 12))
    shutil.rmtree(cache.path / "plan.zarr")
    shutil.copytree(other.path / "plan.zarr", cache.path / "plan.zarr")
    (problem,) = check(cache.path).problems
    assert "plan.zarr is not the plan that manifest.json names" in problem


def test_a_changed_file_of_the_target_is_a_problem(cache):
    flip_bit(cache.path / "target" / "frozen.safetensors", 8000)
    (problem,) = check(cache.path).problems
    assert problem.startswith(f"{cache.path}/target/frozen.safetensors: its sha256")


def test_an_unfinished_cache_is_told_and_is_no_damage(tmp_path):
    cache = make_cache(tmp_path / "hs", skip=(1,))
    (cache.staging_dir / "000001-host-1-1").mkdir()
    report = check(cache.path)
    assert report.problems == []
    assert report.missing == [1]
    assert report.notes[0].startswith("2 of 3 shards are there, 1 missing: run the same")
    assert str(cache.staging_dir / "000001-host-1-1") in report.notes[1]
    assert "an unfinished shard" in report.notes[1]


def test_a_shard_of_another_cache_or_number_is_a_problem(cache, tmp_path):
    other = make_cache(tmp_path / "other", heldout=0.0)
    shutil.rmtree(cache.shard_path(0))
    shutil.copytree(other.shard_path(0), cache.shard_path(0))
    shutil.copytree(cache.shard_path(1), cache.path / "shards" / "000009.zarr")
    problems = check(cache.path).problems
    assert f"{cache.path}/shards/000009.zarr: the plan has no shard of that name" in problems
    assert any("000000.zarr: attribute manifest_digest is" in p for p in problems)


def test_shards_made_by_different_kernels_versions_or_devices_are_a_warning(cache):
    def change(attributes: dict) -> None:
        attributes["kernels"] = ["kernels: fla; checked, error 1e-3", "layer 0 ..."]
        attributes["versions"]["torch"] = "1.0"
        attributes["device"] = "H200"

    edit_attributes(cache.shard_path(1), change)
    report = check(cache.path)
    assert report.problems == []
    assert len(report.warnings) == 3
    assert "different kernels: layer 0: torch reference (0, 2); fla (1)" in report.warnings[0]
    assert "different device: not recorded (0, 2); H200 (1)" in report.warnings[1]
    assert "different torch" in report.warnings[2]


@pytest.mark.parametrize("form", [3, "x", {"a": 1}, [3], [None], [{"row": "x"}]])
def test_attributes_of_another_form_are_problems_and_no_accident(cache, form):
    edit_attributes(cache.shard_path(0), lambda a: a.update(kernels=form, versions=form))
    assert check(cache.path).problems == []
    edit_attributes(cache.shard_path(0), lambda a: a.update(crc32c=form))
    assert check(cache.path).problems


def test_a_channel_scale_that_is_lost_is_told_and_the_checksums_are_still_read(tmp_path):
    cache = tiny_cache.make_cache(tmp_path / "hs", encoding="int8")
    (cache.target_dir / "channel_scale.safetensors").unlink()
    flip_bit(cache.shard_path(0) / "states" / "c.1.0.0.0", 3)
    problems = check(cache.path).problems
    assert any("channel_scale.safetensors: missing" in p for p in problems)
    assert any("the states are not decoded" in p for p in problems)
    assert any("row 1 of states has crc32c" in p for p in problems)
    assert len(problems) == 3


# --- the command


def dflash(*words: object):
    return CliRunner().invoke(cli.main, ["verify", *(str(word) for word in words)])


def test_the_command_ends_with_0_for_a_sound_cache_and_1_for_a_damaged_one(cache):
    ran = dflash(cache.path)
    assert ran.exit_code == 0, ran.output
    assert "3 of 3 shards are there; checked 6 rows, 8 documents" in ran.output
    file = cache.shard_path(1) / "states" / "c.0.0.0.0"
    flip_bit(file, 9)
    ran = dflash(cache.path)
    assert ran.exit_code == 1
    (line,) = [x for x in ran.stdout.splitlines() if "crc32c" in x]
    assert line.startswith(f"{file}: row 0 of states")
    assert "\n1 problem\na damaged shard: remove it" in ran.stdout


def test_json_is_alone_on_stdout_and_holds_every_problem(cache):
    flip_bit(cache.shard_path(1) / "states" / "c.0.0.0.0", 9)
    shutil.rmtree(cache.shard_path(2))
    ran = dflash(cache.path, "--json")
    assert ran.exit_code == 1
    found = json.loads(ran.stdout)
    assert (found["shards"], found["present"], found["missing"]) == (3, 2, [2])
    assert len(found["problems"]) == len(found["notes"]) == 1
    assert found["problems"][0] in ran.stderr
    assert found["recomputed"] is None


@pytest.mark.parametrize("name", ["nowhere", "empty", "file.txt"])
def test_what_is_no_cache_is_a_usage_error(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    ran = dflash(tmp_path / name)
    assert ran.exit_code == 2
    assert "is not a cache" in ran.output


@pytest.mark.parametrize("words", [["--recompute", 2], ["--model", "m"]])
def test_recompute_and_model_go_together(cache, words):
    ran = dflash(cache.path, *words)
    assert ran.exit_code == 2
    assert "--recompute N and --model M are given together" in ran.output


def test_problems_of_rows_are_told_in_the_order_of_the_rows(tmp_path):
    cache = tiny_cache.make_cache(tmp_path / "hs", rows=40, rows_per_shard=8)
    damaged = list(range(0, cache.plan.rows, 5))
    for row in damaged:
        shard, inside = cache.locate(row)
        flip_bit(shard.layouts["states"].place(inside)[0], 1)
    problems = check(cache.path).problems
    rows = [int(p.split(": row ")[1].split(" ")[0]) for p in problems]
    shards = [int(p.split("shards/")[1][:6]) for p in problems]
    assert [8 * k + row for k, row in zip(shards, rows, strict=True)] == damaged
