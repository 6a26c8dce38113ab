"""`--stream-layers`: a target that is run layer by layer gives the very same states and caches."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dflash_cache import loading, streamed
from dflash_cache.errors import DataError, UsageError
from dflash_cache.fp8 import DEQUANTISED
from dflash_cache.hostmem import cgroup_left, free_host_memory
from dflash_cache.layerwise import LayerLoader
from dflash_cache.streamed import StreamedTarget, stand_ins
from dflash_cache.target import Target
from tests.helpers import tiny_tokenizer
from tests.test_loading_fp8 import to_fp8
from tests.test_target import packed_row
from tests.tiny_models import hybrid_config, moe_config, save_model, tiny_dense, tiny_hybrid

FAMILIES = ["qwen3_5", "qwen3", "llama", "qwen3_next", "qwen3_5_moe"]
TAPS = [0, 1, 3]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {
        "qwen3_5": tiny_hybrid(root / "hybrid", tiny_tokenizer()),
        "qwen3": tiny_dense(root / "qwen3", "qwen3", tiny_tokenizer()),
        "llama": tiny_dense(root / "llama", "llama"),
        "qwen3_next": save_model(root / "next", moe_config("qwen3_next")),
        "qwen3_5_moe": save_model(root / "moe", moe_config("qwen3_5_moe")),
    }


@pytest.fixture(scope="module")
def parts() -> list[tuple]:
    """Batches of one, two and one rows; the last one is short, as at the end of a shard."""
    rows = [packed_row(lengths, seed=i) for i, lengths in enumerate([(23, 9), (100,), (5, 60, 3)])]
    two = tuple(torch.cat(x) for x in zip(rows[1], rows[2], strict=True))
    return [rows[0], two, packed_row((40,), seq_len=50, seed=9)]


def same(have: torch.Tensor, want: torch.Tensor, document: torch.Tensor) -> bool:
    """Equal to the bit wherever there is a document."""
    real = document != 0
    return bool(real.any()) and torch.equal(have[real], want[real])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_states_are_those_of_the_whole_target_to_the_bit(folders, parts, family, dtype):
    whole = Target.load(str(folders[family]), taps=TAPS, dtype=dtype)
    layered = StreamedTarget.stream(str(folders[family]), taps=TAPS, dtype=dtype)
    states = layered.run_many(parts)
    for have, (ids, document, position) in zip(states, parts, strict=True):
        assert same(have, whole.run_rows(ids, document, position), document)
        assert same(layered.run_rows(ids, document, position), have, document)
    assert layered.describe_kernels() == whole.describe_kernels()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_streamed_target_is_the_same_target(folders, family):
    whole = Target.load(str(folders[family]), taps=TAPS)
    layered = StreamedTarget.stream(str(folders[family]), taps=TAPS)
    assert layered.identity() == whole.identity()
    assert layered.kinds == whole.kinds
    have, want = layered.frozen(), whole.frozen()
    assert have.tied == want.tied == (family not in ("qwen3", "llama"))
    for name in ("embed", "head", "norm"):
        assert torch.equal(getattr(have, name), getattr(want, name))


def test_only_one_layer_has_weights_at_a_time(folders, parts):
    target = StreamedTarget.stream(str(folders["qwen3_5"]), taps=TAPS)
    seen = []

    def look() -> None:
        real = [not any(p.is_meta for p in layer.parameters()) for layer in target.loader.layers]
        seen.append([i for i, there in enumerate(real) if there])

    target.run_many(parts, between=look)
    assert seen == [[0]] * 3 + [[1]] * 3 + [[2]] * 3 + [[3]] * 3
    assert all(p.is_meta for layer in target.loader.layers for p in layer.parameters())


def test_every_layer_is_read_once_for_all_batches(folders, parts, monkeypatch):
    target = StreamedTarget.stream(str(folders["qwen3_5"]), taps=TAPS)
    filled = []
    fill = LayerLoader.fill
    monkeypatch.setattr(
        LayerLoader, "fill", lambda self, layer: (filled.append(layer), fill(self, layer))
    )
    target.run_many(parts)
    assert filled == [0, 1, 2, 3]


def test_hidden_states_may_wait_on_the_host_between_layers(folders, parts):
    """As on a GPU without room for them: buffers that are written again for every layer."""
    kept = None
    for seed in range(3):
        output = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(seed))
        if kept is None:
            kept = torch.empty_like(output)
        before = kept.data_ptr()
        kept = streamed._keep(output, kept, torch.device("meta"))
        assert torch.equal(kept, output)
        assert kept.data_ptr() == before


def test_an_fp8_checkpoint_is_streamed_dequantised(parts, tmp_path):
    for family in ("qwen3_5", "qwen3_next"):
        config = hybrid_config(layers=4) if family == "qwen3_5" else moe_config(family)
        folder = to_fp8(save_model(tmp_path / family, config))
        whole = Target.load(str(folder), taps=TAPS)
        layered = StreamedTarget.stream(str(folder), taps=TAPS)
        assert layered.precision == whole.precision == DEQUANTISED
        for have, (ids, document, position) in zip(layered.run_many(parts), parts, strict=True):
            assert same(have, whole.run_rows(ids, document, position), document)


def multimodal(folder: Path, copy: Path) -> Path:
    """The same text model as a multimodal checkpoint has it: other names, foreign towers, MTP."""
    shutil.copytree(folder, copy)
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        weights[re.sub(r"^model\.", "model.language_model.", name)] = tensor
    weights["model.visual.blocks.0.attn.proj.weight"] = torch.randn(8, 8)
    weights["mtp.layers.0.input_layernorm.weight"] = torch.randn(32)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_names_of_a_multimodal_checkpoint_are_found(folders, parts, tmp_path):
    folder = multimodal(folders["qwen3_5"], tmp_path / "vl")
    whole = Target.load(str(folders["qwen3_5"]), taps=TAPS)
    layered = StreamedTarget.stream(str(folder), taps=TAPS)
    for have, (ids, document, position) in zip(layered.run_many(parts), parts, strict=True):
        assert same(have, whole.run_rows(ids, document, position), document)


def without(folder: Path, copy: Path, *names: str) -> Path:
    shutil.copytree(folder, copy)
    weights = load_file(folder / "model.safetensors")
    for name in names:
        del weights[name]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_a_missing_tensor_is_named_when_its_layer_is_read(folders, parts, tmp_path):
    name = "model.layers.2.mlp.up_proj.weight"
    target = StreamedTarget.stream(str(without(folders["qwen3"], tmp_path / "m", name)), taps=TAPS)
    with pytest.raises(DataError, match=rf"lack {re.escape(name)} \(1 in all\)"):
        target.run_many(parts)


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_a_missing_tensor_outside_of_the_layers_is_named_at_once(folders, tmp_path, name):
    with pytest.raises(DataError, match=re.escape(name)):
        StreamedTarget.stream(str(without(folders["qwen3"], tmp_path / "m", name)), taps=TAPS)


def test_a_tensor_of_another_shape_is_named(folders, parts, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(folders["qwen3"], folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*shape"):
        StreamedTarget.stream(str(folder), taps=TAPS).run_many(parts)


def test_logits_are_refused(folders):
    target = StreamedTarget.stream(str(folders["qwen3"]), taps=TAPS)
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(UsageError, match="no logits"):
        target.forward(streamed.Runner(), ids, ids, logits_to_keep=1)


def test_a_decoder_that_works_between_its_layers_is_refused():
    first, second = stand_ins([nn.Identity(), nn.Identity()])
    passed = first(torch.ones(1, 2, 3))
    assert second(passed) is passed
    with pytest.raises(UsageError, match="between its layers"):
        second(passed * 2)


def test_a_stand_in_tells_what_its_layer_is():
    layer = nn.Linear(2, 2)
    layer.layer_type = "full_attention"
    (stand_in,) = stand_ins([layer])
    assert stand_in.layer_type == "full_attention"
    assert list(stand_in.parameters()) == []


@pytest.fixture
def small_gpu(monkeypatch):
    monkeypatch.setattr(loading, "free_memory", lambda _device: 10_000)
    monkeypatch.setattr(streamed, "free_memory", lambda _device: 10_000)


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(
    folders, small_gpu, monkeypatch
):
    monkeypatch.setattr("dflash_cache.target.load_model", None)
    with pytest.raises(UsageError, match=r"need .* GiB in float32.*--stream-layers"):
        Target.load(str(folders["qwen3"]), taps=TAPS)


def test_a_layer_that_does_not_fit_is_refused(folders, small_gpu):
    with pytest.raises(UsageError, match="even one layer"):
        StreamedTarget.stream(str(folders["qwen3"]), taps=TAPS)


def test_the_default_macro_batch_takes_a_quarter_of_the_free_memory(folders, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(streamed, "free_host_memory", lambda: 1 << 20)
    target = StreamedTarget.stream(str(folders["qwen3"]), taps=TAPS)
    row = 64 * (3 + 1) * 32 * 4  # tokens, taps and one hidden state, width, bytes
    assert target.batches_at_once(1, 64) == (1 << 18) // row
    assert target.batches_at_once(3, 64) == (1 << 18) // row // 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    target = StreamedTarget.stream(str(folders["qwen3"]), taps=TAPS)
    assert target.batches_at_once(1, 64) == (1 << 16) // row
    assert target.batches_at_once(1000, 64) == 1


def test_there_is_free_memory_here():
    assert 1 << 20 < free_host_memory() < 1 << 50


def test_a_containers_file_cache_counts_as_free(tmp_path):
    group = (tmp_path, "memory.max", "memory.current")
    assert cgroup_left(*group) == []
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert cgroup_left(*group) == []
    (tmp_path / "memory.max").write_text("1000\n")
    assert cgroup_left(*group) == [100]
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 500\nactive_file 100\n")
    assert cgroup_left(*group) == [700]
