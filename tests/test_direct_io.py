"""O_DIRECT: the same bytes as through the page cache, whatever the sizes; a refusal is told."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_cache.cache import Cache
from dflash_cache.errors import DataError
from dflash_cache.shard_files import ALIGN, SCRATCH, address_of, direct_problem, read_part
from dflash_cache.shard_layout import ArrayLayout
from dflash_train.config import TrainConfig
from dflash_train.rows import RowBuffer, choose_io
from dflash_train.stream import RowStream
from dflash_train.trainer import train
from tests.tiny_cache import make_cache

O_DIRECT = os.O_DIRECT
OPEN = os.open


@pytest.fixture
def anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to read from directly; where the file system refuses, the same code without it."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(ALIGN))
    if direct_problem(probe) is not None:
        monkeypatch.setattr(os, "O_DIRECT", 0)
    return tmp_path


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_DIRECT."""

    def refuse(path, flags, *more):
        if flags & O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return OPEN(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)


def layout_of(folder: Path, size: int) -> tuple[ArrayLayout, bytes]:
    """An array of one row of `size` random bytes in a file of its own."""
    content = np.random.default_rng(size).bytes(size)
    layout = ArrayLayout("states", folder, (1, size), np.dtype("u1"), plain=True)
    layout.place(0)[0].write_bytes(content)
    return layout, content


@pytest.mark.parametrize("size", [1, 4095, 4096, 12_289, 3 * SCRATCH + 17])
@pytest.mark.parametrize("shift", [0, 3])
def test_every_part_of_a_file_is_read_whatever_its_place(anywhere: Path, size: int, shift: int):
    layout, content = layout_of(anywhere, size)
    memory = np.zeros(size + 2 * ALIGN, np.uint8)
    first = -address_of(memoryview(memory)) % ALIGN + shift
    for start in {0, min(ALIGN, size - 1), size // 3}:
        out = memoryview(memory)[first : first + size - start]
        read_part(layout, 0, start, out, direct=True)
        assert bytes(out) == content[start:]


def test_a_file_that_ends_early_is_named(anywhere: Path):
    layout, _ = layout_of(anywhere, 9000)
    os.truncate(layout.place(0)[0], 8000)
    with pytest.raises(DataError, match="has 8000 bytes instead of 9000"):
        read_part(layout, 0, 0, memoryview(bytearray(9000)), direct=True)


def states_of(cache: Cache, *, direct: bool, batch_rows: int) -> list[torch.Tensor]:
    rows = cache.rows("train")
    stream = RowStream(
        cache, rows, batch_rows=batch_rows, seed=0, device="cpu", verify="always", direct=direct
    )
    stream.start()
    states = [next(stream).states.clone() for _ in range(len(rows))]
    stream.close()
    return states


@pytest.mark.parametrize("batch_rows", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "shape", [{"S": 61, "T": 3, "D": 34}, {"S": 64, "T": 2, "D": 256}, {"encoding": "int8"}]
)
def test_a_stream_gives_the_same_bytes_either_way(anywhere: Path, batch_rows: int, shape: dict):
    cache = make_cache(anywhere / "c", rows=6, **shape)
    assert choose_io("direct", cache, 0) == (True, [])
    ways = [states_of(cache, direct=direct, batch_rows=batch_rows) for direct in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*ways, strict=True))


def test_rows_of_whole_pages_are_read_in_place(tmp_path: Path):
    cache = make_cache(tmp_path / "c", rows=6, S=64, T=2, D=32)
    buffer = RowBuffer(cache.geometry, 3, torch.device("cpu"))
    assert cache.geometry.row_bytes % ALIGN == 0
    assert all(buffer.states[i].data_ptr() % ALIGN == 0 for i in range(3))


@pytest.mark.usefixtures("refusing")
def test_a_refusal_is_announced_once_and_the_run_reads_buffered(tmp_path: Path):
    cache = make_cache(tmp_path / "c", rows=12, T=3)
    told: list[str] = []
    config = TrainConfig(
        cache=cache.path, out=tmp_path / "o", steps=3, io="direct", layers=1, block_size=8,
        anchors=6, device="cpu",
    )  # fmt: skip
    assert train(config, told.append).step == 3
    (line,) = [line for line in told if "O_DIRECT" in line]
    assert line.startswith("--io direct is not possible: the file system of")
    assert line.endswith("rows are read buffered")


@pytest.mark.usefixtures("refusing")
def test_a_refusal_in_the_middle_of_a_run_is_one_sentence(tmp_path: Path):
    layout, _ = layout_of(tmp_path, 5000)
    with pytest.raises(DataError, match="refuses O_DIRECT: read it with --io buffered"):
        read_part(layout, 0, 0, memoryview(bytearray(5000)), direct=True)


def test_states_in_planes_are_not_read_directly_and_it_says_so(tmp_path: Path):
    cache = make_cache(tmp_path / "c", rows=6, encoding="bf16-lossless")
    direct, (line,) = choose_io("direct", cache, 0)
    assert not direct
    assert "not stored as plain bytes" in line
    assert states_of(cache, direct=False, batch_rows=2)


def test_buffered_is_the_default_and_says_nothing(tmp_path: Path):
    cache = make_cache(tmp_path / "c", rows=6)
    config = TrainConfig(cache=cache.path, out=tmp_path / "o")
    assert choose_io(config.io, cache, 0) == (False, [])
