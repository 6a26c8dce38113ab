"""Shard: plain bytes, read as written, and every kind of damage is found and named."""

import json
import os
import shutil
import threading
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import torch
import zarr

from dflash_cache.errors import DataError
from dflash_cache.packing import RowTokens
from dflash_cache.shard import Geometry, Shard, ShardWriter
from dflash_cache.shard_layout import crc32c
from tests.helpers import GEOMETRY, row_of, write_shard


@pytest.fixture
def shard_path(tmp_path):
    return write_shard(tmp_path)


def flip_bit(file, offset):
    raw = bytearray(file.read_bytes())
    raw[offset] ^= 4
    file.write_bytes(bytes(raw))


def test_what_is_read_is_what_was_written(shard_path):
    shard = Shard.open(shard_path, GEOMETRY)
    out = np.empty(GEOMETRY.row_shape, dtype=np.uint16)
    for i in range(3):
        states, tokens = row_of(i)
        shard.read_states(i, out)
        assert np.array_equal(out, states)
        back = shard.read_tokens(i)
        for name in ("input_ids", "loss_mask", "document", "position"):
            assert np.array_equal(getattr(shard, name)[i], getattr(tokens, name))
            assert np.array_equal(getattr(back, name), getattr(tokens, name))
            assert getattr(shard, name).dtype == getattr(tokens, name).dtype
    assert shard.verify() == []


def test_states_are_plain_chunk_files_of_one_row_each(shard_path):
    meta = json.loads((shard_path / "states" / "zarr.json").read_text())
    assert meta["data_type"] == "uint16"
    assert meta["codecs"] == [{"name": "bytes", "configuration": {"endian": "little"}}]
    assert meta["chunk_grid"]["configuration"]["chunk_shape"] == [1, 16, 2, 4]
    assert meta["chunk_key_encoding"]["configuration"]["separator"] == "."
    assert meta["attributes"]["logical_dtype"] == "bfloat16"
    for i in range(3):
        raw = (shard_path / "states" / f"c.{i}.0.0.0").read_bytes()
        assert raw == row_of(i)[0].tobytes()


def test_the_ten_lines_of_numpy_in_the_documentation_read_a_row(shard_path):
    text = (Path(__file__).parent.parent / "docs" / "format.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    found = {}
    exec(code.replace("hs/shards/000000.zarr", str(shard_path)), found)
    values = (row_of(2)[0].astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(found["states"], values)
    assert np.array_equal(found["input_ids"], row_of(2)[1].input_ids)


def test_any_zarr_reader_sees_the_same(shard_path):
    group = zarr.open_group(store=str(shard_path), mode="r")
    assert np.array_equal(group["states"][1], row_of(1)[0])
    assert np.array_equal(group["position"][2], row_of(2)[1].position)
    assert group.attrs["shard"] == 7


def test_an_all_zero_row_is_written_as_a_chunk(tmp_path):
    tokens = RowTokens(*(np.zeros(16, d) for d in (np.int32, np.uint8, np.int32, np.int32)))
    with ShardWriter(tmp_path / "000000.zarr", tmp_path / "staging", GEOMETRY, 1) as writer:
        writer.write_row(0, np.zeros(GEOMETRY.row_shape, np.uint16), tokens)
        path = writer.finish({})
    assert (path / "states" / "c.0.0.0.0").stat().st_size == GEOMETRY.row_bytes
    assert (path / "document" / "c.0.0").stat().st_size == 16 * 4
    assert Shard.open(path).verify() == []


def test_the_attributes_count_documents_tokens_and_supervised_tokens(shard_path):
    attributes = Shard.open(shard_path).attributes
    assert (attributes["documents"], attributes["tokens"], attributes["supervised"]) == (6, 36, 18)


def test_the_last_shard_may_have_fewer_rows_than_the_others(tmp_path):
    shard = Shard.open(write_shard(tmp_path, rows=1), GEOMETRY)
    assert shard.rows == 1
    assert shard.verify() == []


def test_threads_read_different_rows_at_once(shard_path):
    shard = Shard.open(shard_path)
    wrong = []

    def read(i):
        out = np.empty(GEOMETRY.row_shape, dtype=np.uint16)
        for _ in range(50):
            shard.read_states(i, out)
            if not np.array_equal(out, row_of(i)[0]):
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(i % 3,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_states_are_read_into_the_memory_of_a_torch_tensor(shard_path):
    slot = torch.zeros(2, *GEOMETRY.row_shape, dtype=torch.uint16)
    Shard.open(shard_path).read_states(2, slot[1].numpy())
    assert np.array_equal(slot[1].numpy(), row_of(2)[0])
    assert not slot[0].any()


def test_a_buffer_of_another_size_and_a_row_that_is_not_there_are_refused(shard_path):
    shard = Shard.open(shard_path)
    with pytest.raises(ValueError, match="a row of states is 256 bytes, not 10"):
        shard.read_states(0, np.empty(10, np.uint8))
    with pytest.raises(ValueError, match=r"row 3 is not in 000007\.zarr, which has 3 rows"):
        shard.read_states(3, np.empty(GEOMETRY.row_shape, np.uint16))


@pytest.mark.parametrize(
    ("file", "offset", "named"),
    [
        ("states/c.1.0.0.0", 77, "row 1 of states"),
        ("input_ids/c.0.0", 2 * 64 + 5, "row 2 of input_ids"),
        ("loss_mask/c.0.0", 3, "row 0 of loss_mask"),
        ("document/c.0.0", 64, "row 1 of document"),
        ("position/c.0.0", 1, "row 0 of position"),
    ],
)
def test_a_flipped_bit_is_found_and_the_row_is_named(shard_path, file, offset, named):
    flip_bit(shard_path / file, offset)
    problems = Shard.open(shard_path).verify()
    assert len(problems) == 1
    assert named in problems[0]
    assert str(shard_path / file) in problems[0]


def test_a_deleted_chunk_is_an_error_and_not_zeros(shard_path):
    file = shard_path / "states" / "c.1.0.0.0"
    opened = Shard.open(shard_path)
    file.unlink()
    with pytest.raises(DataError, match=r"c.1.0.0.0: this chunk is missing"):
        opened.read_states(1, np.empty(GEOMETRY.row_shape, np.uint16))
    with pytest.raises(DataError, match=r"c.1.0.0.0: this chunk is missing"):
        Shard.open(shard_path)
    assert Shard.open(shard_path, check=False).verify() == [
        f"{file}: this chunk is missing; remove {shard_path} and run `dflash extract` again"
    ]


def test_a_truncated_chunk_is_an_error_that_names_the_sizes(shard_path):
    file = shard_path / "states" / "c.2.0.0.0"
    opened = Shard.open(shard_path)
    os.truncate(file, 100)
    with pytest.raises(DataError, match=r"c.2.0.0.0: this chunk has 100 bytes instead of 256"):
        opened.read_states(2, np.empty(GEOMETRY.row_shape, np.uint16))
    with pytest.raises(DataError, match="has 100 bytes instead of 256"):
        Shard.open(shard_path)
    problems = Shard.open(shard_path, check=False).verify()
    advice = f"remove {shard_path} and run `dflash extract` again"
    assert problems == [f"{file}: this chunk has 100 bytes instead of 256; {advice}"]


def test_edited_attributes_are_found(shard_path):
    file = shard_path / "zarr.json"
    meta = json.loads(file.read_text())
    meta["attributes"]["tokens"] += 1
    file.write_text(json.dumps(meta))
    (problem,) = Shard.open(shard_path).verify()
    assert "the attributes or the arrays' zarr.json have been changed" in problem


def test_an_edited_array_metadata_file_is_found(shard_path):
    file = shard_path / "states" / "zarr.json"
    file.write_text(file.read_text().replace("bfloat16", "float16"))
    (problem,) = Shard.open(shard_path).verify()
    assert "have been changed" in problem


def test_attributes_without_checksums_are_a_problem_and_not_a_pass(shard_path):
    file = shard_path / "zarr.json"
    meta = json.loads(file.read_text())
    del meta["attributes"]["crc32c"]
    file.write_text(json.dumps(meta))
    problems = Shard.open(shard_path).verify()
    assert any("no crc32c for each row of states" in problem for problem in problems)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"zarr_format": 2}', '{"shape": 3}'])
@pytest.mark.parametrize("file", ["zarr.json", "states/zarr.json", "position/zarr.json"])
def test_broken_metadata_is_a_data_error_that_names_the_file(shard_path, file, content):
    (shard_path / file).write_text(content)
    with pytest.raises(DataError, match=str(shard_path / file)):
        Shard.open(shard_path)


def test_a_shard_of_another_geometry_is_refused_with_both(shard_path):
    with pytest.raises(
        DataError, match=r"a row is uint16 \[16, 2, 4\], the cache has .*\[16, 3, 4\]"
    ):
        Shard.open(shard_path, Geometry(16, 3, 3, 4))


def test_a_path_without_shard_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="there is no shard here"):
        Shard.open(tmp_path / "000000.zarr")


def recompress(path, target, **options):
    """The same shard with another codec chain for the states."""
    shutil.copytree(path, target)
    shutil.rmtree(target / "states")
    states = zarr.open_group(store=str(path), mode="r")["states"]
    group = zarr.open_group(store=str(target), mode="r+")
    array = group.create_array("states", shape=states.shape, dtype=states.dtype, **options)
    array[:] = states[:]
    return target


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (1, 16, 2, 4)},  # zarr's default: zstd
        {"chunks": (2, 16, 1, 4), "compressors": None},
        {"chunks": (1, 16, 2, 4), "shards": (3, 16, 2, 4), "compressors": None},
    ],
)
def test_another_codec_chain_is_read_through_zarr_and_checked_by_the_same_sums(
    shard_path, tmp_path, options
):
    shard = Shard.open(recompress(shard_path, tmp_path / "other.zarr", **options), GEOMETRY)
    out = np.empty(GEOMETRY.row_shape, dtype=np.uint16)
    shard.read_states(1, out)
    assert not shard.plain
    assert np.array_equal(out, row_of(1)[0])
    assert [shard.verify_row(i) for i in range(3)] == [[], [], []]


def test_a_missing_chunk_is_found_through_zarr_too(shard_path, tmp_path):
    path = recompress(shard_path, tmp_path / "other.zarr", chunks=(1, 16, 2, 4))
    shutil.rmtree(path / "states" / "c" / "1")
    with pytest.raises(DataError, match="1 of 3 chunks are missing"):
        Shard.open(path, GEOMETRY)


def test_verify_row_checks_states_that_have_been_read_already(shard_path):
    shard = Shard.open(shard_path)
    states = row_of(1)[0]
    assert shard.verify_row(1, states) == []
    states[3, 0, 0] ^= 1
    (problem,) = shard.verify_row(1, states)
    assert "row 1 of states" in problem


def test_crc32c_of_slices_is_the_crc32c_of_the_whole():
    data = np.random.default_rng(0).integers(0, 256, 9 << 20, dtype=np.uint8)
    assert crc32c(data) == google_crc32c.value(data.tobytes())
    assert crc32c(b"123456789") == 0xE3069283


def test_geometry_gives_the_sizes():
    geometry = Geometry(4096, 6, 5, 4096)
    assert geometry.row_bytes == 4096 * 40_960
    assert geometry.stored_token_bytes == 40_960 + 13
    assert geometry.states_shape == (6, 4096, 5, 4096)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("states", {"shape": [0, 4, 2, 8]}),
        (
            "states",
            {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 1, 1, 1]}}},
        ),
        ("states", {"chunk_key_encoding": {"name": "nonsense"}}),
        ("position", {"codecs": [{"name": "nonsense"}]}),
        ("input_ids", {"data_type": "float99"}),
        ("input_ids", {"shape": "many"}),
    ],
)
def test_metadata_that_makes_no_sense_is_a_data_error_that_names_the_array(
    shard_path, tmp_path, name, change
):
    shutil.copytree(shard_path, tmp_path / "000007.zarr")
    file = tmp_path / "000007.zarr" / name / "zarr.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DataError, match=name):
        Shard.open(tmp_path / "000007.zarr")
