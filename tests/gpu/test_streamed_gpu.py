"""On CUDA: a target that is run layer by layer gives the states of the whole one; memory; FP8."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig

from dflash_cache.selfcheck import prove
from dflash_cache.streamed import StreamedTarget
from dflash_cache.target import Target
from tests.gpu.test_target_gpu import packed_row
from tests.helpers import tiny_tokenizer
from tests.test_loading_fp8 import to_fp8
from tests.tiny_models import VOCAB, save_model, tiny_dense, tiny_hybrid

pytestmark = pytest.mark.gpu
TAPS = [0, 2, 3]
SIZES = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256}

MOE = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    **SIZES,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {
        "hybrid": tiny_hybrid(root / "hybrid", tiny_tokenizer(), std=0.05, **SIZES),
        "dense": tiny_dense(root / "dense", "qwen3", tiny_tokenizer(), std=0.05),
        "moe": save_model(root / "moe", Qwen3MoeConfig(**MOE), std=0.05),
        "fp8": to_fp8(tiny_hybrid(root / "fp8", tiny_tokenizer(), std=0.05, **SIZES)),
    }


def batches() -> list[tuple]:
    return [packed_row(rows=2, seed=seed) for seed in range(3)]


@pytest.mark.parametrize("place", ["cuda", "cpu"])
@pytest.mark.parametrize("name", ["hybrid", "dense", "moe", "fp8"])
def test_streamed_states_equal_those_of_the_whole_target(folders, name, place, monkeypatch):
    """Hidden states wait on the GPU, or in pinned memory of the host."""
    settings = {"taps": TAPS, "device": "cuda", "dtype": torch.bfloat16}
    whole = Target.load(str(folders[name]), **settings)
    layered = StreamedTarget.stream(str(folders[name]), **settings)
    monkeypatch.setattr(layered, "_place", lambda _parts: torch.device(place, 0)
                        if place == "cuda" else torch.device(place))  # fmt: skip
    for have, (ids, document, position) in zip(layered.run_many(batches()), batches(), strict=True):
        want, real = whole.run_rows(ids, document, position).cpu(), document != 0
        assert have.device.type == "cpu"
        assert torch.equal(have[real], want[real])
    assert layered.describe_kernels() == whole.describe_kernels()


def test_the_self_check_passes_layer_by_layer(folders):
    target = StreamedTarget.stream(
        str(folders["hybrid"]), taps=TAPS, device="cuda", dtype=torch.bfloat16
    )
    assert "checked" in prove(target)


def test_only_a_layer_of_the_target_is_on_the_gpu(tmp_path):
    sizes = {"hidden_size": 1024, "intermediate_size": 8192, "head_dim": 64}
    folder = tiny_dense(tmp_path / "wide", "qwen3", std=0.02, layers=8, **sizes)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    target = StreamedTarget.stream(str(folder), taps=[0, 7], device="cuda", dtype=torch.bfloat16)
    target.run_many(batches())
    layer = sum(p.numel() for p in target.loader.layers[0].parameters()) * 2
    peak = torch.cuda.max_memory_allocated() - before
    assert layer < peak < 4 * layer
    assert torch.cuda.memory_allocated() - before < layer
