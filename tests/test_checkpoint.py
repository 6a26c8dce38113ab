"""Checkpoints: z-lab's layout, complete or absent, and never another run's."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_cache.errors import DataError, UsageError
from dflash_train import checkpoint
from dflash_train.checkpoint import load_drafter, resume, save_checkpoint, save_drafter
from dflash_train.config import TrainConfig
from dflash_train.drafter import Drafter, DrafterConfig

IDENTITY = {"manifest": "abc", "train_rows": 4}


def shape(layers: int = 2) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        vocab_size=24,
        block_size=8,
        target_layer_ids=(1, 3),
        mask_token_id=23,
        num_target_layers=5,
        layer_types=("full_attention",) * layers,
    )


def trained(layers: int = 2) -> tuple[Drafter, torch.optim.AdamW]:
    drafter = Drafter(shape(layers))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=torch.tensor(1e-3), fused=True)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return drafter, optimizer


def config(out: Path, **changes) -> TrainConfig:
    return TrainConfig(cache=Path("c"), out=out, **changes)


def save(out: Path, step: int, drafter: Drafter, optimizer: torch.optim.AdamW, **changes) -> Path:
    settings = config(out, **changes)
    return save_checkpoint(out, drafter, optimizer, step=step, config=settings, identity=IDENTITY)


def test_tensor_names_are_z_labs_and_bf16(tmp_path: Path):
    save_drafter(tmp_path / "d", Drafter(shape(layers=5)))
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    layer = [
        *(f"self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{p}" for p in ("gate_proj", "up_proj", "down_proj")),
        "input_layernorm",
        "post_attention_layernorm",
    ]
    names = {f"layers.{i}.{part}.weight" for i in range(5) for part in layer}
    assert set(tensors) == names | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert len(tensors) == 58
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}


def test_a_saved_drafter_loads_with_the_same_shape_and_weights(tmp_path: Path):
    drafter = Drafter(shape())
    save_drafter(tmp_path / "d", drafter)
    loaded = load_drafter(tmp_path / "d", "cpu", torch.float32)
    assert loaded.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float())


def test_an_error_while_saving_leaves_the_old_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = save_drafter(tmp_path / "d", Drafter(shape()))
    before = (folder / "model.safetensors").read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_write_json", killed)  # the weights are written already
    with pytest.raises(KeyboardInterrupt):
        save_drafter(tmp_path / "d", Drafter(shape()))
    assert (folder / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_an_error_while_saving_a_checkpoint_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drafter, optimizer = trained()
    save(tmp_path, 3, drafter, optimizer)
    monkeypatch.setattr(checkpoint, "_take_name", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(DataError, match=r"cannot write .*: full"):
        save(tmp_path, 6, drafter, optimizer)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_resume_restores_masters_and_moments_exactly(tmp_path: Path):
    drafter, optimizer = trained()
    folder = save(tmp_path, 3, drafter, optimizer)
    other, fresh = trained()
    assert resume(folder, other, fresh, config=config(tmp_path), identity=IDENTITY) == 3
    for p, q in zip(drafter.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        for moment in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[p][moment], fresh.state[q][moment])


def test_resume_refuses_other_settings_by_name(tmp_path: Path):
    drafter, optimizer = trained()
    folder = save(tmp_path, 3, drafter, optimizer, anchors=64)
    with pytest.raises(UsageError, match=r"anchors is 32, but the run in .* has 64"):
        resume(folder, drafter, optimizer, config=config(tmp_path, anchors=32), identity=IDENTITY)
    harmless = config(tmp_path, anchors=64, log_every=1, keep_last=9, resume=True)
    assert resume(folder, drafter, optimizer, config=harmless, identity=IDENTITY) == 3


def test_resume_refuses_another_cache_by_name(tmp_path: Path):
    drafter, optimizer = trained()
    folder = save(tmp_path, 3, drafter, optimizer)
    other = {**IDENTITY, "train_rows": 5}
    with pytest.raises(DataError, match=r"cache differs.*train_rows: 5, then 4"):
        resume(folder, drafter, optimizer, config=config(tmp_path), identity=other)


def test_only_the_last_checkpoints_are_kept(tmp_path: Path):
    drafter, optimizer = trained()
    for step in (2, 10, 4, 100_000_000):
        save(tmp_path, step, drafter, optimizer, keep_last=2)
    kept = [p.name for p in checkpoint.checkpoints(tmp_path)]
    assert kept == ["step-00000010", "step-100000000"]


def test_the_state_records_step_settings_and_cache(tmp_path: Path):
    folder = save(tmp_path, 3, *trained(), seed=11)
    state = json.loads((folder / "train_state.json").read_text())
    assert (state["step"], state["config"]["seed"], state["cache"]) == (3, 11, IDENTITY)


def test_a_folder_that_is_no_drafter_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"config\.json is missing"):
        load_drafter(tmp_path, "cpu", torch.float32)


def test_weights_of_another_shape_name_the_tensor(tmp_path: Path):
    folder = save_drafter(tmp_path / "d", Drafter(shape(layers=2)))
    written = replace(shape(layers=1)).to_hf()
    (folder / "config.json").write_text(json.dumps(written))
    with pytest.raises(DataError, match=r"tensor layers\.1\..* is unknown"):
        load_drafter(folder, "cpu", torch.float32)


def test_a_truncated_weight_file_is_refused(tmp_path: Path):
    folder = save_drafter(tmp_path / "d", Drafter(shape()))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(DataError, match="cannot read"):
        load_drafter(folder, "cpu", torch.float32)


def test_nothing_to_resume_is_said(tmp_path: Path):
    with pytest.raises(UsageError, match="no checkpoint to resume"):
        checkpoint.last_checkpoint(tmp_path)
