"""FP8 checkpoints are dequantised on load; other quantisations are refused in one sentence."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_cache.errors import DataError, UsageError
from dflash_cache.fp8 import DEQUANTISED, Fp8Blocks, fp8_blocks
from dflash_cache.loading import load_config
from dflash_cache.target import Target
from dflash_cache.weights import Weights, read_header
from tests.tiny_models import hybrid_config, moe_config, save_model, tiny_dense

# Neither divides the tiny shapes: the last block of a row or column is cut.
ROWS, COLUMNS = 24, 20
QUANTISED = re.compile(r"layers\.\d+\..*(_proj|in_proj_(qkv|z)|experts\..*)\.weight$")
FAMILIES = ["qwen3", "qwen3_5", "qwen3_next", "qwen3_5_moe"]


def by_hand(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3 [.., N, K] times the scale of each element's block, looked up one by one."""
    rows = torch.arange(weight.shape[-2]) // ROWS
    columns = torch.arange(weight.shape[-1]) // COLUMNS
    return (weight.float() * scale[..., rows[:, None], columns[None]]).bfloat16()


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 weight and float32 scales, a block's largest element at 448."""
    n, k = weight.shape
    grid = (-(-n // ROWS), -(-k // COLUMNS))
    scale = torch.empty(grid)
    for i in range(grid[0]):
        for j in range(grid[1]):
            block = weight[i * ROWS : (i + 1) * ROWS, j * COLUMNS : (j + 1) * COLUMNS]
            scale[i, j] = block.abs().max() / 448
    whole = scale.repeat_interleave(ROWS, 0).repeat_interleave(COLUMNS, 1)[:n, :k]
    return (weight / whole).to(torch.float8_e4m3fn), scale


def to_fp8(folder: Path) -> Path:
    """Turn a saved model into an FP8 checkpoint as Qwen ships them; returns the folder."""
    weights, out = load_file(folder / "model.safetensors"), {}
    for name, weight in weights.items():
        if QUANTISED.search(name) and weight.ndim == 2:
            out[name], out[name + "_scale_inv"] = quantise(weight)
        else:
            out[name] = weight.bfloat16() if weight.is_floating_point() else weight
    save_file(out, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantisation(folder, {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                              "weight_block_size": [ROWS, COLUMNS]})  # fmt: skip
    return folder


def set_quantisation(folder: Path, settings: dict) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))


def plain_copy(folder: Path, copy: Path) -> Path:
    """The same checkpoint dequantised by hand, without a quantisation in its config."""
    copy.mkdir()
    weights = load_file(folder / "model.safetensors")
    scales = {n: weights.pop(n) for n in list(weights) if n.endswith("_scale_inv")}
    for name, scale in scales.items():
        weight = name.removesuffix("_scale_inv")
        weights[weight] = by_hand(weights[weight], scale)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def make(family: str, root: Path) -> Path:
    if family == "qwen3":
        return tiny_dense(root / family, family)
    config = hybrid_config() if family == "qwen3_5" else moe_config(family)
    return save_model(root / family, config)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_fp8_checkpoint_loads_as_the_one_dequantised_by_hand(tmp_path, family):
    folder = to_fp8(make(family, tmp_path))
    stored = load_file(folder / "model.safetensors")
    assert sum(t.dtype == torch.float8_e4m3fn for t in stored.values()) > 8
    have = Target.load(str(folder), taps=[0, 2], full=True)
    want = Target.load(str(plain_copy(folder, tmp_path / "plain")), taps=[0, 2], full=True)
    pairs = zip(have.model.state_dict().items(), want.model.state_dict().items(), strict=True)
    for (name, a), (other, b) in pairs:
        assert name == other
        assert torch.equal(a, b), name
    assert (have.precision, want.precision) == (DEQUANTISED, "float32")


def test_the_states_of_an_fp8_target_are_those_of_the_dequantised_one(tmp_path):
    folder = to_fp8(make("qwen3_5", tmp_path))
    have = Target.load(str(folder), taps=[0, 2])
    want = Target.load(str(plain_copy(folder, tmp_path / "plain")), taps=[0, 2])
    ids = torch.arange(40)[None]
    row = (ids, torch.ones_like(ids), ids)
    assert torch.equal(have.run_rows(*row), want.run_rows(*row))


def test_every_element_is_multiplied_by_the_scale_of_its_block():
    torch.manual_seed(0)
    weight = torch.randn(3, 50, 45).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 3, 3)
    have = Fp8Blocks(ROWS, COLUMNS).dequantise("w", weight, scale)
    assert have.dtype == torch.bfloat16
    assert torch.equal(have, by_hand(weight, scale))


def test_scales_that_do_not_fit_are_named():
    weight = torch.zeros(50, 45).to(torch.float8_e4m3fn)
    with pytest.raises(DataError, match=r"scales of layer\.weight.*\(3, 2\).*\(3, 3\)"):
        Fp8Blocks(ROWS, COLUMNS).dequantise("layer.weight", weight, torch.ones(3, 2))


def test_an_fp8_weight_without_its_scales_is_named(tmp_path):
    folder = to_fp8(make("qwen3", tmp_path))
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight_scale_inv"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"layers\.1\.mlp\.up_proj\.weight is stored as F8_E4M3"):
        Target.load(str(folder), taps=[0, 2])


def test_fp8_weights_without_a_word_in_the_config_are_refused(tmp_path):
    folder = to_fp8(make("qwen3", tmp_path))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="is stored as F8_E4M3"):
        Target.load(str(folder), taps=[0, 2])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"quant_method": "awq", "bits": 4}, r"quantised \(awq, bits 4\)"),
        ({"quant_method": "gptq", "bits": 4}, r"\(gptq, bits 4\)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"\(bitsandbytes\)"),
        ({"quant_method": "mxfp4"}, r"\(mxfp4\)"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"},
         r"\(compressed-tensors, format float-quantized\)"),
        ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, "fmt e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, "ue8m0"),
        ({"quant_method": "fp8", "weight_block_size": None}, r"\(fp8\)"),
    ],
)  # fmt: skip
def test_other_quantisations_are_refused_before_anything_is_read(tmp_path, settings, told):
    folder = make("qwen3", tmp_path)
    set_quantisation(folder, settings)
    with pytest.raises(UsageError, match=told) as caught:
        load_config(str(folder), revision=None, trust_remote_code=False)
    assert "unquantised checkpoint" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_multimodal_checkpoint_may_say_it_in_its_text_config(tmp_path):
    config = moe_config("qwen3_5_moe")
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 64]}
    assert fp8_blocks("m", config) == Fp8Blocks(128, 64)


def test_tensors_are_grouped_by_layer_without_foreign_towers(tmp_path):
    tensors = {
        name: torch.zeros(4)
        for name in (
            "model.language_model.embed_tokens.weight",
            "model.language_model.layers.0.a",
            "model.language_model.layers.11.b",
            "model.visual.blocks.0.c",
            "mtp.layers.0.d",
            "lm_head.weight",
        )
    }
    save_file(tensors, tmp_path / "w.safetensors")
    weights = Weights([tmp_path / "w.safetensors"])
    assert weights.group(0) == ["model.language_model.layers.0.a"]
    assert weights.group(11) == ["model.language_model.layers.11.b"]
    assert sorted(weights.group(None)) == [
        "lm_head.weight",
        "model.language_model.embed_tokens.weight",
    ]
    assert weights.nbytes(0) == 16


def test_a_damaged_header_is_named(tmp_path):
    file = tmp_path / "w.safetensors"
    save_file({"a": torch.zeros(4)}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    with pytest.raises(DataError, match=r"w\.safetensors.*cut short"):
        read_header(file)
    file.write_bytes(b"\xff" * 40)
    with pytest.raises(DataError, match=r"w\.safetensors.*damaged"):
        read_header(file)
