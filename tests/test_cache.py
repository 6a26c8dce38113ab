"""Cache: one creator wins, another identity is refused by name, present and missing shards."""

import json
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from dflash_cache.cache import Cache, Manifest, create_cache, load_frozen, save_frozen
from dflash_cache.errors import DataError, UsageError
from dflash_cache.packing import make_plan
from dflash_cache.shard import Geometry
from tests.helpers import make_cache, make_documents, tiny_tokenizer


def small_plan(lengths=(5, 6)):
    return make_plan(make_documents(list(lengths)), seq_len=8, rows_per_shard=2, heldout=0.0)


def manifest_of(plan, **changes):
    manifest = Manifest(
        geometry=Geometry(8, 2, 3, 4),
        taps=(1, 3, 5),
        identity={"target": {"path": "m", "revision": "a"}, "heldout": 0.0},
        plan_digest=plan.digest(),
    )
    return replace(manifest, **changes)


def save_nothing(folder):
    (folder / "config.json").write_text("{}")


def test_a_created_cache_opens_with_manifest_plan_and_target(tmp_path):
    plan = small_plan()
    cache = create_cache(tmp_path / "a" / "hs", manifest_of(plan), plan, save_nothing)
    opened = Cache.open(tmp_path / "a" / "hs")
    assert opened.manifest == cache.manifest
    assert opened.plan.digest() == plan.digest()
    assert list(opened.manifest.target_digest) == ["config.json"]
    assert opened.missing() == [0]
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["hs"]


def test_a_manifest_survives_json():
    manifest = manifest_of(small_plan(), versions={"torch": "2"})
    back = Manifest.from_json(manifest.to_json())
    assert back == manifest
    assert back.digest() == manifest.digest()
    assert back.encoding == "bf16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"taps": (0, 2, 4)},
            "made for taps [1, 3, 5], not [0, 2, 4]; use another --out or the same taps",
        ),
        ({"geometry": Geometry(8, 2, 3, 8)}, "made for hidden 4, not 8"),
        ({"geometry": Geometry(16, 2, 3, 4)}, "made for seq_len 8, not 16"),
        ({"geometry": Geometry(8, 5, 3, 4)}, "made for rows_per_shard 2, not 5"),
        (
            {"identity": {"target": {"path": "m", "revision": "b"}, "heldout": 0.0}},
            "made for target.revision a, not b",
        ),
        (
            {"identity": {"target": {"path": "m", "revision": "a"}, "heldout": 0.0, "x": 1}},
            "made for x null, not 1",
        ),
        ({"plan_digest": "other"}, "not other; use another --out or the same plan digest"),
    ],
)
def test_another_identity_is_refused_naming_the_field_and_both_values(tmp_path, changes, message):
    plan = small_plan()
    create_cache(tmp_path / "hs", manifest_of(plan), plan, save_nothing)
    with pytest.raises(UsageError) as error:
        create_cache(tmp_path / "hs", manifest_of(plan, **changes), plan, save_nothing)
    assert message in str(error.value)


def test_what_is_only_recorded_may_differ(tmp_path):
    plan = small_plan()
    first = create_cache(tmp_path / "hs", manifest_of(plan), plan, save_nothing)
    other = manifest_of(plan, versions={"torch": "9"}, created="2001-01-01")
    again = create_cache(tmp_path / "hs", other, plan, lambda folder: pytest.fail("saved twice"))
    assert again.manifest == first.manifest


def test_of_many_creators_one_wins_and_all_open_the_same(tmp_path):
    plan = small_plan()
    barrier, digests = threading.Barrier(4), []

    def save_together(folder):
        save_nothing(folder)
        barrier.wait()

    def create(i):
        manifest = manifest_of(plan, versions={"creator": str(i)})
        cache = create_cache(tmp_path / "hs", manifest, plan, save_together)
        digests.append(cache.manifest.digest())

    threads = [threading.Thread(target=create, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(digests) == 4
    assert len(set(digests)) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["hs"]


def test_a_creator_that_fails_leaves_nothing_behind(tmp_path):
    def fail(folder):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        create_cache(tmp_path / "hs", manifest_of(small_plan()), small_plan(), fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["/proc/none/such", "/dev/null/below", "/tmp/" + 300 * "x"])
def test_a_place_that_cannot_be_created_is_a_usage_error(path):
    plan = small_plan()
    with pytest.raises(UsageError, match=f"{path} cannot be .*; give"):
        create_cache(path, manifest_of(plan), plan, save_nothing)


def test_a_folder_with_something_else_in_it_is_not_touched(tmp_path):
    (tmp_path / "photo.jpg").write_text("mine")
    with pytest.raises(UsageError, match="exists and is not a cache"):
        create_cache(tmp_path, manifest_of(small_plan()), small_plan(), save_nothing)
    assert (tmp_path / "photo.jpg").read_text() == "mine"


def test_an_empty_folder_may_become_a_cache(tmp_path):
    plan = small_plan()
    (tmp_path / "hs").mkdir()
    assert create_cache(tmp_path / "hs", manifest_of(plan), plan, save_nothing).missing() == [0]


def test_rows_are_those_of_a_split_in_the_shards_that_are_there(tmp_path):
    cache = make_cache(tmp_path / "hs", skip=(1,))
    assert cache.missing() == [1]
    present = [r for k in range(cache.plan.shards) if k != 1 for r in cache.plan.shard_rows(k)]
    train, heldout = cache.rows("train"), cache.rows("heldout")
    assert sorted(train + heldout) == present
    assert train
    assert heldout
    assert all(cache.plan.row_split[row] == 1 for row in heldout)
    with pytest.raises(UsageError, match="split 'test' is not known"):
        cache.rows("test")


def test_locate_gives_the_shard_and_the_row_within_it(tmp_path):
    cache = make_cache(tmp_path / "hs")
    for row in cache.rows("train") + cache.rows("heldout"):
        shard, inside = cache.locate(row)
        used = np.count_nonzero(shard.document[inside])
        documents = cache.plan.row_documents(row)
        assert used == cache.plan.doc_length[documents].sum()
    assert cache.shard(0) is cache.shard(0)
    with pytest.raises(UsageError, match="row 99 does not exist"):
        cache.locate(99)


def test_a_missing_shard_is_a_data_error_when_it_is_opened(tmp_path):
    cache = make_cache(tmp_path / "hs", skip=(0,))
    with pytest.raises(DataError, match="there is no shard here"):
        cache.shard(0)


def test_verify_finds_nothing_in_a_sound_cache(tmp_path):
    cache = make_cache(tmp_path / "hs")
    assert cache.verify_target() == []
    assert [cache.verify_shard(k) for k in range(cache.plan.shards)] == [[]] * cache.plan.shards


def test_verify_finds_a_shard_that_belongs_elsewhere(tmp_path):
    cache = make_cache(tmp_path / "hs")
    shutil.rmtree(cache.shard_path(1))
    shutil.copytree(cache.shard_path(0), cache.shard_path(1))
    problems = cache.verify_shard(1)
    assert any("row_range is [0, 2], this cache expects [2, 4]" in p for p in problems)
    other = make_cache(tmp_path / "other", taps=(0, 2))
    shutil.rmtree(cache.shard_path(0))
    shutil.copytree(other.shard_path(0), cache.shard_path(0))
    assert any("manifest_digest" in p for p in cache.verify_shard(0))


def test_verify_expects_the_documents_of_the_plan_unless_they_are_named_as_skipped(tmp_path):
    cache = make_cache(tmp_path / "hs")
    shard = cache.shard(0)
    documents = shard.attributes["documents"]
    shard.attributes["documents"] -= 1
    (problem,) = cache.foreign_problems(shard, 0)
    assert f"{documents - 1} documents and 0 skipped, the plan has {documents}" in problem
    shard.attributes["skipped"] = [{"line": 3, "reason": "all-zero states"}]
    assert cache.foreign_problems(shard, 0) == []


def test_verify_finds_damaged_target_files(tmp_path):
    cache = make_cache(tmp_path / "hs")
    config = cache.target_dir / "config.json"
    config.write_text(config.read_text().replace("tiny", "tinY"))
    (cache.target_dir / "frozen.safetensors").unlink()
    assert cache.verify_target() == [
        "target/frozen.safetensors: missing",
        "target/config.json: its sha256 is not the one in manifest.json",
    ]


def test_a_path_that_is_no_cache_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r"is not a cache: there is no manifest\.json"):
        Cache.open(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format_version": 1}'])
def test_a_broken_manifest_is_a_data_error_that_names_it(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json: the manifest cannot be read"):
        Cache.open(tmp_path)


def test_another_format_version_is_refused_with_its_number(tmp_path):
    cache = make_cache(tmp_path / "hs", lengths=(5, 6, 7))
    file = cache.path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 7}))
    with pytest.raises(DataError, match="format version 7 is not 1"):
        Cache.open(cache.path)


def test_a_plan_of_another_cache_is_refused(tmp_path):
    cache = make_cache(tmp_path / "a", lengths=(5, 6, 7))
    other = make_cache(tmp_path / "b", lengths=(5, 6, 8))
    shutil.rmtree(cache.path / "plan.zarr")
    shutil.copytree(other.path / "plan.zarr", cache.path / "plan.zarr")
    with pytest.raises(DataError, match=r"plan.zarr is not the plan that manifest.json names"):
        Cache.open(cache.path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_frozen_target_survives_the_disk_in_its_own_dtype(tmp_path, dtype):
    embed, head = torch.randn(2, 7, 4).to(dtype).unbind(0)
    norm, config = torch.randn(4), {"hidden_size": 4}
    save_frozen(tmp_path, embed, head, norm, config, tiny_tokenizer())
    frozen = load_frozen(tmp_path, "cpu")
    assert torch.equal(frozen.embed, embed)
    assert torch.equal(frozen.head, head)
    assert torch.equal(frozen.norm, norm)
    assert frozen.embed.dtype == dtype
    assert frozen.config == config
    assert not frozen.tied
    assert (tmp_path / "tokenizer.json").is_file()
    assert load_frozen(tmp_path, "cpu", torch.float64).head.dtype == torch.float64


def test_a_tied_head_is_the_embedding_itself_on_disk_and_in_memory(tmp_path):
    embed = torch.randn(500, 16)
    save_frozen(tmp_path, embed, None, torch.ones(16), {})
    assert (tmp_path / "frozen.safetensors").stat().st_size < 1.2 * embed.nbytes
    frozen = load_frozen(tmp_path, "cpu", torch.bfloat16)
    assert frozen.tied
    assert frozen.head.data_ptr() == frozen.embed.data_ptr()


def test_damaged_target_files_are_a_data_error(tmp_path):
    with pytest.raises(DataError, match="the target's files cannot be read"):
        load_frozen(tmp_path)
    save_frozen(tmp_path, torch.ones(3, 2), None, torch.ones(2), {})
    (tmp_path / "frozen.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(DataError, match="the target's files cannot be read"):
        load_frozen(tmp_path)
