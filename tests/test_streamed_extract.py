"""Extractions with `--stream-layers`: the same caches; what runs ahead of the writer."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_cache.ahead import Ahead, Stopped, batches
from dflash_cache.cache import Cache
from dflash_cache.errors import UsageError
from dflash_cache.extract import ExtractConfig, dry_run, extract
from dflash_cache.layerwise import LayerLoader
from dflash_cache.packing import fill_row, make_plan
from dflash_cache.streamed import StreamedTarget
from tests.helpers import make_documents, tiny_tokenizer
from tests.test_loading_fp8 import to_fp8
from tests.tiny_models import tiny_dense, tiny_hybrid


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {
        "qwen3_5": tiny_hybrid(root / "hybrid", tiny_tokenizer()),
        "qwen3": tiny_dense(root / "qwen3", "qwen3", tiny_tokenizer()),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("d") / "corpus.jsonl"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    texts = [" ".join(rng.choice(words, n)) for n in rng.integers(4, 40, 24)]
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def config(model: Path, data: Path, out: Path, **changes) -> ExtractConfig:
    values = {"taps": (0, 3), "seq_len": 64, "rows_per_shard": 3, "device": "cpu"}
    return ExtractConfig(str(model), data, out, **(values | changes))


def decoded(path: Path) -> list[torch.Tensor]:
    cache = Cache.open(path)
    assert not cache.missing()
    return [cache.decoded_row(row) for row in range(cache.plan.rows)]


@pytest.fixture(scope="module")
def ordinary(folders, data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("c") / "hs"
    extract(config(folders["qwen3_5"], data, out), lambda _: None)
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {"macro_rows": 1},
        {"macro_rows": 4},  # crosses a shard, and the last one is ragged
        {"macro_rows": None},
        {"macro_rows": 5, "batch_rows": 2},
    ],
)
def test_extraction_with_streamed_layers_gives_the_same_cache(
    folders, data, ordinary, tmp_path, changes
):
    model, out = folders["qwen3_5"], tmp_path / "hs"
    lines: list[str] = []
    extract(config(model, data, out, stream_layers=True, **changes), lines.append)
    cost = [line for line in lines if line.startswith("stream-layers: ")]
    rows = Cache.open(out).plan.rows
    assert len(cost) == 1
    at_once = changes["macro_rows"] or rows
    at_once = min(at_once // changes.get("batch_rows", 1) * changes.get("batch_rows", 1), rows)
    passes = -(-rows // at_once)
    assert cost[0].startswith(f"stream-layers: {passes} pass")
    assert f"{at_once} rows" in cost[0]
    if "batch_rows" in changes:
        # Rows of one batch share a matrix product, which then rounds in another way.
        other = tmp_path / "other"
        extract(config(model, data, other, batch_rows=2), lambda _: None)
        want = decoded(other)
    else:
        want = decoded(ordinary)
    for have, other_row in zip(decoded(out), want, strict=True):
        assert torch.equal(have, other_row)


def test_int8_gets_the_same_channel_scale_and_rows(folders, data, tmp_path):
    for name, changes in (("a", {}), ("b", {"stream_layers": True})):
        whole = config(folders["qwen3"], data, tmp_path / name, encoding="int8", **changes)
        extract(whole, lambda _: None)
    a, b = (Cache.open(tmp_path / name) for name in "ab")
    assert torch.equal(a.channel_scale, b.channel_scale)
    for have, want in zip(decoded(tmp_path / "b"), decoded(tmp_path / "a"), strict=True):
        assert torch.equal(have, want)


def test_a_cache_begun_without_streaming_is_continued_with_it(folders, data, ordinary, tmp_path):
    out = tmp_path / "hs"
    shutil.copytree(ordinary, out)
    shutil.rmtree(Cache.open(out).shard_path(1))
    again = config(folders["qwen3_5"], data, out, stream_layers=True, macro_rows=2)
    assert extract(again, lambda _: None).shards_written == 1
    for have, want in zip(decoded(out), decoded(ordinary), strict=True):
        assert torch.equal(have, want)


def test_shards_say_in_which_precision_the_weights_were_stored(data, tmp_path):
    model = to_fp8(tiny_dense(tmp_path / "m", "qwen3", tiny_tokenizer()))
    for name, changes in (("a", {}), ("b", {"stream_layers": True})):
        extract(config(model, data, tmp_path / name, **changes), lambda _: None)
        attributes = Cache.open(tmp_path / name).shard(0).attributes
        assert attributes["weights"] == "fp8 dequantised to bfloat16"
        assert attributes["dtype"] == "float32"
    for have, want in zip(decoded(tmp_path / "b"), decoded(tmp_path / "a"), strict=True):
        assert torch.equal(have, want)


def test_a_signal_within_a_macro_batch_ends_the_run_and_keeps_whole_shards(
    folders, data, ordinary, tmp_path, monkeypatch
):
    model, out, passes = folders["qwen3_5"], tmp_path / "hs", []
    fill, run_many = LayerLoader.fill, StreamedTarget.run_many

    def running(self, *args, **kwargs):
        passes.append([])
        return run_many(self, *args, **kwargs)

    def filling(self, layer):
        fill(self, layer)
        if passes:  # the self-check comes before
            passes[-1].append(layer)
            if len(passes) == 2 and layer == 1:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(StreamedTarget, "run_many", running)
    monkeypatch.setattr(LayerLoader, "fill", filling)
    streaming = config(model, data, out, stream_layers=True, macro_rows=3)
    summary = extract(streaming, lambda _: None)
    assert (summary.stopped, summary.shards_written) == (signal.SIGTERM, 1)
    assert passes == [[0, 1, 2, 3], [0, 1]]
    monkeypatch.undo()
    assert extract(streaming, lambda _: None).shards_skipped == 1
    for have, want in zip(decoded(out), decoded(ordinary), strict=True):
        assert torch.equal(have, want)


def test_a_dry_run_tells_the_cost_and_reads_no_layer(folders, data, tmp_path, monkeypatch):
    def filling(self, layer):
        raise AssertionError("a layer was read")

    monkeypatch.setattr(LayerLoader, "fill", filling)
    lines: list[str] = []
    dry = config(folders["qwen3_5"], data, tmp_path / "hs", stream_layers=True)
    assert dry_run(dry, lines.append) is not None
    assert any(line.startswith("stream-layers: 1 pass over 4 layers") for line in lines)
    assert not (tmp_path / "hs").exists()


def test_macro_rows_alone_is_refused(folders, data, tmp_path):
    with pytest.raises(UsageError, match="stream_layers"):
        extract(config(folders["qwen3"], data, tmp_path / "hs", macro_rows=3), lambda _: None)


class Counting:
    """A target whose states are the ids; remembers how many batches it was given at once."""

    device, one_shape = torch.device("cpu"), False

    def __init__(self, at_once: int):
        self.at_once, self.groups = at_once, []

    def batches_at_once(self, _rows: int, _seq_len: int) -> int:
        return self.at_once

    def run_many(self, arrays, *, between):
        between()
        self.groups.append(len(arrays))
        return [ids for ids, *_ in arrays]


def ahead_of(at_once: int, world: int = 1, stop: bool = False, gone: tuple[int, ...] = ()) -> Ahead:
    documents = make_documents([32] * 10)
    plan = make_plan(documents, seq_len=32, rows_per_shard=3, heldout=0.0)
    target = Counting(at_once)
    ahead = Ahead(target, plan, documents, 2, lambda k: k not in gone, lambda: stop)
    ahead.shards, ahead.world = list(range(plan.shards)), world
    return ahead


def run_all(ahead: Ahead, shards: list[int]) -> None:
    for k in shards:
        for batch in batches(ahead.plan, k, 2):
            tokens = [fill_row(ahead.plan, ahead.documents, row) for row in batch]
            states, _ = ahead.states(batch, tokens)
            assert [list(s) for s in states] == [list(t.input_ids) for t in tokens]


def test_macro_batches_cross_shards_but_batches_do_not():
    ahead = ahead_of(3)
    run_all(ahead, [0, 1, 2, 3])
    assert ahead.target.groups == [3, 3, 1]


def test_shards_of_other_workers_are_not_run_ahead():
    ahead = ahead_of(8, world=2)
    run_all(ahead, [0, 2])
    assert ahead.target.groups == [4]


def test_shards_that_are_there_are_not_run():
    ahead = ahead_of(8, gone=(1,))
    run_all(ahead, [0, 2, 3])
    assert ahead.target.groups == [5]


def test_states_of_a_shard_that_another_worker_finished_are_dropped():
    ahead = ahead_of(4)
    run_all(ahead, [0])
    run_all(ahead, [3])
    assert ahead.target.groups == [4, 1]


def test_a_signal_gives_the_macro_batch_up():
    with pytest.raises(Stopped):
        run_all(ahead_of(4, stop=True), [0])
