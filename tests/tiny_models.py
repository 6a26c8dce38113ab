"""Tiny random targets, saved to a folder as a user would have them: a hybrid and two dense ones."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    KimiLinearConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3NextConfig,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

VOCAB = 512
LAYER_TYPES = ["linear_attention", "full_attention"]
SIZE = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64}


def hybrid_config(layers: int = 6, head_dim: int = 16, **changes) -> Qwen3_5TextConfig:
    """GatedDeltaNet and gated full attention in turns; more value heads than key heads."""
    values: dict[str, Any] = SIZE | {
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "linear_conv_kernel_dim": 4,
        "layer_types": (LAYER_TYPES * layers)[:layers],
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [head_dim // 4 - 2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    return Qwen3_5TextConfig(**(values | changes))


def dense_config(family: str, layers: int = 4, **changes):
    """`qwen3` or `llama`, untied."""
    cls = {"qwen3": Qwen3Config, "llama": LlamaConfig}[family]
    values: dict[str, Any] = SIZE | {
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
    }
    return cls(**(values | changes))


def moe_config(family: str, layers: int = 4):
    """`qwen3_next` or `qwen3_5_moe`: the other GatedDeltaNet families, with experts."""
    cls = {"qwen3_next": Qwen3NextConfig, "qwen3_5_moe": Qwen3_5MoeTextConfig}[family]
    values: dict[str, Any] = hybrid_config(layers).to_dict()
    for name in ("model_type", "architectures", "intermediate_size", "dtype"):
        values.pop(name, None)
    if family == "qwen3_next":
        rope = values.pop("rope_parameters")
        values["rope_parameters"] = {k: v for k, v in rope.items() if "mrope" not in k}
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    return cls(**(values | experts))


def save_model(folder: Path, config, seed: int = 0, std: float = 0.3, tokenizer=None) -> Path:
    """Random weights large enough that layers matter and argmaxes are clear; fp32 safetensors."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=std if "embed" not in name else 1.0)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def tiny_hybrid(folder: Path, tokenizer=None, std: float = 0.3, **changes) -> Path:
    return save_model(folder, hybrid_config(**changes), std=std, tokenizer=tokenizer)


def tiny_dense(
    folder: Path, family: str = "qwen3", tokenizer=None, std: float = 0.3, **changes
) -> Path:
    return save_model(folder, dense_config(family, **changes), std=std, tokenizer=tokenizer)


def kimi_config(layers: int = 4, **changes):
    """`kimi_linear`: Kimi Delta Attention and latent attention in turns, with experts."""
    values: dict[str, Any] = SIZE | {
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "layer_types": (LAYER_TYPES * layers)[:layers],
        "mlp_layer_types": ["dense", *["sparse"] * (layers - 1)],
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return KimiLinearConfig(**(values | changes))
