"""A tiny qwen3_5's forward, written from its definition in float64: the oracle of the taps."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.tiny_models import hybrid_config


def rotate(x, cos, sin):
    """RoPE on the first channels, as many as `cos` has: x [L, H, h], cos, sin [L, r]."""
    r = cos.shape[-1]
    a, b = x[..., : r // 2], x[..., r // 2 : r]
    turned = torch.cat([-b, a], dim=-1)
    return torch.cat([x[..., :r] * cos[:, None] + turned * sin[:, None], x[..., r:]], dim=-1)


def zero_centered_norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + weight)


def hybrid_layers_by_hand(folder: Path, ids: torch.Tensor) -> list[torch.Tensor]:
    """Outputs [L, D] of every layer of a tiny qwen3_5, written from its definition, in float64."""
    config = hybrid_config()
    weights = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}
    x = weights["model.embed_tokens.weight"][ids]
    outputs = []
    for i, kind in enumerate(config.layer_types):
        w = {k.removeprefix(f"model.layers.{i}."): v for k, v in weights.items()}
        h = zero_centered_norm(x, w["input_layernorm.weight"])
        x = x + (gated_delta_net if kind == "linear_attention" else gated_attention)(config, w, h)
        h = zero_centered_norm(x, w["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(h @ w["mlp.gate_proj.weight"].T)
        x = x + (gate * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        outputs.append(x)
    return outputs


def gated_attention(config, w, h):
    length, heads, size = len(h), config.num_attention_heads, config.head_dim
    query, gate = (h @ w["self_attn.q_proj.weight"].T).view(length, heads, 2 * size).chunk(2, -1)
    key = (h @ w["self_attn.k_proj.weight"].T).view(length, -1, size)
    value = (h @ w["self_attn.v_proj.weight"].T).view(length, -1, size)
    query = zero_centered_norm(query, w["self_attn.q_norm.weight"])
    key = zero_centered_norm(key, w["self_attn.k_norm.weight"])
    rotary = size // 2
    rates = 10000.0 ** (-torch.arange(0, rotary, 2).double() / rotary)
    angles = (torch.arange(length).double()[:, None] * rates).repeat(1, 2)
    query, key = (rotate(x, angles.cos(), angles.sin()) for x in (query, key))
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) * size**-0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), value)
    return (mixed * gate.sigmoid()).reshape(length, -1) @ w["self_attn.o_proj.weight"].T


def gated_delta_net(config, w, h):
    length, size = len(h), config.linear_key_head_dim
    mixed = h @ w["linear_attn.in_proj_qkv.weight"].T  # [L, C]
    kernel = w["linear_attn.conv1d.weight"][:, 0]  # [C, 4]
    padded = torch.cat([mixed.new_zeros(3, mixed.shape[1]), mixed])
    mixed = sum(padded[i : i + length] * kernel[:, i] for i in range(4))
    mixed = torch.nn.functional.silu(mixed)
    keys = config.linear_num_key_heads * size
    q, k, v = (x.view(length, -1, size) for x in mixed.split([keys, keys, 2 * keys], dim=-1))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    beta = (h @ w["linear_attn.in_proj_b.weight"].T).sigmoid()
    step = torch.nn.functional.softplus(
        h @ w["linear_attn.in_proj_a.weight"].T + w["linear_attn.dt_bias"]
    )
    decay = (-w["linear_attn.A_log"].exp() * step).exp()
    state, outputs = torch.zeros(v.shape[1], size, size, dtype=h.dtype), []
    for t in range(length):
        state = state * decay[t, :, None, None]
        wrong = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * wrong)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) * size**-0.5)
    out = torch.stack(outputs)  # [L, Hv, dv]
    out = out * (out.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w["linear_attn.norm.weight"]
    gate = (h @ w["linear_attn.in_proj_z.weight"].T).view(out.shape)
    out = out * torch.nn.functional.silu(gate)
    return out.reshape(length, -1) @ w["linear_attn.out_proj.weight"].T
