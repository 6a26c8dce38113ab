"""Random packed rows and tiny drafters for the tests of the drafter side."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_train.anchors import DraftInputs, candidates, draft_inputs, sample_anchors
from dflash_train.drafter import Drafter, DrafterConfig, default_config

VOCAB = 64
MASK_TOKEN = VOCAB - 1


def packed_rows(seed: int, rows: int, seq_len: int, longest: int = 60) -> dict[str, Tensor]:
    """Rows of documents of random length, with unsupervised stretches and a padded tail."""
    rng = np.random.default_rng(seed)
    document = np.zeros((rows, seq_len), np.int32)
    position = np.zeros((rows, seq_len), np.int32)
    supervised = np.zeros((rows, seq_len), np.uint8)
    for row in range(rows):
        start, number = 0, 0
        while (length := int(rng.integers(1, longest + 1))) + start <= seq_len:
            number += 1
            document[row, start : start + length] = number
            position[row, start : start + length] = np.arange(length)
            prompt = int(rng.integers(0, length + 1))
            supervised[row, start + prompt : start + length] = 1
            start += length
    gaps = rng.random((rows, seq_len)) < 0.05
    columns = {
        "input_ids": rng.integers(0, MASK_TOKEN, (rows, seq_len), dtype=np.int32),
        "loss_mask": supervised * ~gaps,
        "document": document,
        "position": position,
    }
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def sampled(
    batch: dict[str, Tensor], n: int, block_size: int, seed: int = 0, epoch: int = 0
) -> DraftInputs:
    """The blocks that a training step would draw from `batch`."""
    where = candidates(batch["loss_mask"], batch["document"], batch["position"])
    device = where.device
    anchors, valid = sample_anchors(
        where,
        torch.arange(where.shape[0], device=device),
        seed=torch.tensor(seed, device=device),
        epoch=torch.tensor(epoch, device=device),
        n=n,
    )
    return draft_inputs(
        **batch, anchors=anchors, valid=valid, block_size=block_size, mask_token_id=MASK_TOKEN
    )


def tiny_config(**changes: Any) -> DrafterConfig:
    """Two layers, two taps, D = 32, four heads of 16 on two kv heads, K = 8."""
    target = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "num_hidden_layers": 6,
        "rope_theta": 10_000.0,
    }
    fields: dict[str, Any] = {
        "mask_token_id": MASK_TOKEN,
        "block_size": 8,
        "layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return default_config(target, (1, 3), **{**fields, **changes})


def tiny_drafter(config: DrafterConfig, seed: int = 0) -> Drafter:
    """A drafter with weights large enough, and norms uneven enough, to tell mistakes apart."""
    torch.manual_seed(seed)
    drafter = Drafter(config)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=0.2)
    return drafter


def published(**changes: Any) -> dict[str, Any]:
    """The shape of a published drafter's config.json, in the older form; "absent" drops a key."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "layer_types": ["full_attention"] * 5,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": 36,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    return {key: value for key, value in (config | changes).items() if value != "absent"}
