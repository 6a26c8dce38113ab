"""The picture of a shard or a cache: its numbers, that it is drawn whole or not at all."""

import importlib
import json

import numpy as np
import pytest
from click.testing import CliRunner

import cli
from dflash_cache import plot as module
from dflash_cache.errors import DataError, UsageError
from dflash_cache.plot import MOST_ROWS, check_plot, plot, position_edges
from tests import tiny_cache
from tests.altering import alter_states
from tests.helpers import make_cache

pytest.importorskip("matplotlib")


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "hs")


def drawn(path, tmp_path, monkeypatch) -> module.PlotData:
    """What `plot` draws of a path."""
    seen: list[module.PlotData] = []
    monkeypatch.setattr(module, "draw", lambda data, file: seen.append(data))
    plot(path, tmp_path / "p.png")
    return seen[0]


@pytest.mark.parametrize("seq_len", [2, 3, 5, 64, 100, 4096])
def test_bins_of_positions_cover_a_row_and_are_finest_at_its_start(seq_len):
    edges = position_edges(seq_len)
    assert (edges[0], edges[-1]) == (0, seq_len)
    assert (np.diff(edges) >= 1).all()
    assert edges[:4].tolist() == list(range(min(4, seq_len + 1)))
    assert len(edges) < 30


def test_the_numbers_of_a_position_are_those_of_its_tokens(cache, tmp_path, monkeypatch):
    largest = np.uint16(0x42C8)  # 100 in bf16
    index = cache.plan.row_documents(2)[0]
    place = int(cache.plan.doc_start[index])
    alter_states(cache, 2, lambda bits: bits.__setitem__((place, 1, 3), largest))
    data = drawn(cache.path, tmp_path, monkeypatch)
    assert data.absmax.shape == data.norm.shape == (2, len(data.edges) - 1)
    assert data.absmax[1, 0] == 100.0
    assert np.nanmax(data.absmax[0]) < 10
    first = [
        cache.decoded_row(int(cache.plan.doc_row[i]))[int(cache.plan.doc_start[i]), 0]
        .float()
        .norm()
        for i in range(cache.plan.documents)
    ]
    assert data.norm[0, 0] == pytest.approx(float(np.mean(first)), rel=1e-5)
    assert data.layers == ["layer 1", "layer 3"]


def test_lengths_and_fill_are_those_of_the_plan(cache, tmp_path, monkeypatch):
    data = drawn(cache.path, tmp_path, monkeypatch)
    assert sorted(data.lengths) == [7, 9, 11, 14, 20, 25, 30, 32]
    assert len(data.fill) == cache.plan.rows
    assert data.fill.mean() == pytest.approx(cache.plan.fill)
    one = drawn(cache.shard_path(1), tmp_path, monkeypatch)
    rows = cache.plan.shard_rows(1)
    wanted = [cache.plan.doc_length[cache.plan.row_documents(row)] for row in rows]
    assert sorted(one.lengths) == sorted(np.concatenate(wanted))
    assert one.fill.tolist() == [sum(part) / 32 for part in wanted]


def test_at_most_so_many_rows_are_read(tmp_path, monkeypatch):
    cache = tiny_cache.make_cache(tmp_path / "hs", rows=90, S=32, rows_per_shard=8)
    assert cache.plan.rows > MOST_ROWS
    data = drawn(cache.path, tmp_path, monkeypatch)
    assert data.sample == f"{MOST_ROWS} of {cache.plan.rows} rows"


@pytest.mark.parametrize("encoding", ["bf16", "int8", "bf16-lossless"])
def test_a_png_of_four_panels_appears_and_nothing_beside_it(tmp_path, encoding):
    cache = tiny_cache.make_cache(tmp_path / "hs", encoding=encoding)
    (tmp_path / "out").mkdir()
    for path in (cache.path, cache.shard_path(0)):
        file = tmp_path / "out" / "p.png"
        plot(path, file)
        assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        pixels = importlib.import_module("matplotlib.image").imread(file)
        height, width = pixels.shape[:2]
        assert height > 800
        assert width > 1000
        quarters = [
            pixels[y : y + height // 2, x : x + width // 2, :3]
            for y in (0, height // 2)
            for x in (0, width // 2)
        ]
        assert all((q < 0.9).any(axis=-1).mean() > 0.01 for q in quarters)
        assert [p.name for p in (tmp_path / "out").iterdir()] == ["p.png"]
        file.unlink()


def test_a_picture_that_fails_leaves_the_old_one(cache, tmp_path, monkeypatch):
    file = tmp_path / "p.png"
    file.write_bytes(b"old")
    monkeypatch.setattr(module.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        plot(cache.path, file)
    assert file.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hs", "p.png"]


@pytest.mark.parametrize(
    ("name", "named"), [("p.pdf", "ends in .png"), ("no/such/p.png", "there is no folder")]
)
def test_a_name_that_cannot_be_drawn_to_is_refused(tmp_path, name, named):
    with pytest.raises(UsageError, match=named):
        check_plot(tmp_path / name)


def test_without_matplotlib_one_sentence_names_what_installs_it(cache, tmp_path, monkeypatch):
    def refuse(name: str, *_):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(module.importlib, "import_module", refuse)
    words = ["inspect-shard", str(cache.path), "--plot", str(tmp_path / "p.png")]
    ran = CliRunner().invoke(cli.main, words)
    assert ran.exit_code == 2
    assert "pip install 'dflash-train[plot]'" in ran.output
    assert "cache\n" not in ran.output


def test_a_cache_without_shards_cannot_be_drawn(tmp_path):
    cache = make_cache(tmp_path / "hs", skip=(0, 1, 2))
    with pytest.raises(DataError, match="no shards yet"):
        plot(cache.path, tmp_path / "p.png")


def test_the_command_draws_and_says_where(cache, tmp_path):
    file = tmp_path / "p.png"
    words = ["inspect-shard", str(cache.shard_path(0)), "--plot", str(file)]
    ran = CliRunner().invoke(cli.main, words)
    assert ran.exit_code == 0, ran.output
    assert f"drawn: {file}" in ran.output
    assert file.is_file()
    ran = CliRunner().invoke(cli.main, [*words, "--json"])
    assert json.loads(ran.stdout)["problems"] == []
