"""Compiled layers: the states of the uncompiled ones, from the same kernels, in one graph each."""

import json
from pathlib import Path

import pytest
import torch

from dflash_cache import compiled
from dflash_cache.cache import Cache
from dflash_cache.errors import UsageError
from dflash_cache.extract import ExtractConfig, extract
from dflash_cache.kernels import REFERENCE
from dflash_cache.selfcheck import prove_compiled
from dflash_cache.target import Target
from tests.helpers import tiny_tokenizer
from tests.tiny_models import dense_config, hybrid_config, moe_config, save_model


def batch(cut: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two packed rows of 64 with a padded tail; the first document of each ends at `cut`."""
    make = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 500, (2, 64), generator=make)
    document = torch.ones(2, 64, dtype=torch.int32)
    document[:, cut:] = 2
    document[1, 60:] = 0
    position = torch.arange(64)[None].repeat(2, 1)
    position[:, cut:] -= cut
    return ids, document, position


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


CONFIGS = {
    "qwen3_5": lambda: hybrid_config(4),
    "qwen3": lambda: dense_config("qwen3", 2),
    "qwen3_next": lambda: moe_config("qwen3_next", 2),
    "qwen3_5_moe": lambda: moe_config("qwen3_5_moe", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", list(CONFIGS))
def test_compiled_layers_give_the_same_states_and_new_documents_compile_nothing(tmp_path, family):
    folder = save_model(tmp_path / family, CONFIGS[family]())
    target = Target.load(str(folder), taps=[0, 1])
    plain = [target.run_rows(*batch(cut)) for cut in (40, 10)]
    line = prove_compiled(target, batch())
    assert line.startswith("layers compiled; compiled = uncompiled (checked, error")
    with torch.compiler.set_stance("fail_on_recompile"):
        for cut, want in zip((40, 10), plain, strict=True):
            ids, document, position = batch(cut)
            have = target.run_rows(ids, document, position)
            real = document != 0
            torch.testing.assert_close(have[real], want[real], atol=1e-3, rtol=1e-4)
    for layer, kind in enumerate(target.kinds):
        operation = "delta" if kind == "linear_attention" else "attention"
        used = target.last_runner.implementations(layer, operation)
        assert used == ([REFERENCE] if operation == "delta" else ["sdpa per document"])


def test_a_graph_holds_our_operators_and_not_the_references_of_transformers(tmp_path):
    folder = save_model(tmp_path / "m", hybrid_config(2))
    target, graphs = Target.load(str(folder), taps=[0, 1]), []

    def keep(graph, inputs):
        calls = [node for node in graph.graph.nodes if node.op.startswith("call")]
        graphs.append({str(node.target) for node in calls})
        return graph.forward

    for layer in target.decoder.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False, backend=keep)
    target.run_rows(*batch())
    assert len(graphs) == 2
    linear, full = graphs
    assert any("dflash" in name and "delta" in name for name in linear), linear
    assert any("dflash" in name and "conv" in name for name in linear)
    assert any("dflash" in name and "attend" in name for name in full)
    assert not any("cumsum" in name or "conv1d" in name for name in linear)


def test_states_that_the_compiler_changes_are_refused(tmp_path, monkeypatch):
    folder = save_model(tmp_path / "m", hybrid_config(2))
    target = Target.load(str(folder), taps=[0, 1])

    def double(layers):
        for layer in layers:
            layer.register_forward_hook(lambda m, i, o: o * 1.01)

    monkeypatch.setattr("dflash_cache.target.compile_layers", double)
    with pytest.raises(UsageError, match=r"compiled layers give other states .* --no-compile"):
        prove_compiled(target, batch())


def test_a_layer_that_does_not_compile_is_told_in_one_sentence():
    def breaks(x):
        torch._dynamo.graph_break()
        return x

    told = pytest.raises(UsageError, match=r"layers do not compile \(.*\); give --no-compile")
    with told, compiled.explaining():
        torch.compile(breaks, fullgraph=True)(torch.ones(2))


def test_an_operator_without_an_active_run_is_refused():
    with pytest.raises(UsageError, match="runs only through"):
        torch.ops.dflash.delta(*torch.ones(5, 1, 1, 1, 1))


@pytest.mark.slow
def test_an_extraction_with_compiled_layers_fills_short_batches_up_and_says_so(tmp_path: Path):
    model = save_model(tmp_path / "m", hybrid_config(2), tokenizer=tiny_tokenizer())
    data = tmp_path / "d.jsonl"
    data.write_text(
        "".join(json.dumps({"text": "the quick fox " * n}) + "\n" for n in range(3, 12))
    )
    caches = {}
    for compile in (False, True):
        lines: list[str] = []
        config = ExtractConfig(
            str(model),
            data,
            tmp_path / str(compile),
            taps=(0, 1),
            seq_len=64,
            rows_per_shard=3,
            batch_rows=2,
            device="cpu",
            compile=compile,
        )
        summary = extract(config, lines.append)
        assert any(line.startswith("layers compiled") for line in lines) == compile
        assert any("layers compiled" in line for line in summary.kernels) == compile
        caches[compile] = Cache.open(config.out)
    for row in range(caches[True].plan.rows):
        have, want = (caches[which].decoded_row(row).float() for which in (True, False))
        torch.testing.assert_close(have, want, atol=0.02, rtol=0.01)  # a bf16 may round over


def test_compiling_and_streaming_exclude_each_other(tmp_path: Path):
    config = ExtractConfig("m", tmp_path / "d", tmp_path / "o", compile=True, stream_layers=True)
    with pytest.raises(UsageError, match="compile and stream_layers exclude each other"):
        extract(config, lambda line: None)
