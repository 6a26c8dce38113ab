"""An independent reading of the paper's equations: one block at a time, loops, plain softmax."""

import torch


def norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(vector, position, theta):
    """One head's vector `[h]` at one position; pairs (i, i + h/2) as complex numbers."""
    half = vector.shape[0] // 2
    pairs = torch.complex(vector[:half], vector[half:])
    angle = position * theta ** (-torch.arange(half, dtype=vector.dtype) / half)
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag])


def reference_block(weights, config, features, feature_positions, noise, positions):
    """Hidden states `[K, D]` of one block, given the features `[n, D]` before its anchor."""
    eps, theta, size = config.rms_norm_eps, config.rope_theta, config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    hidden = noise
    for layer, kind in enumerate(config.layer_types):
        w = {
            name.removeprefix(f"layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        x = norm(hidden, w["input_layernorm.weight"], eps)
        both = torch.cat([features, x])
        places = [*feature_positions, *positions]
        sliding = kind == "sliding_attention"
        causal = config.is_causal if config.is_causal is not None else sliding
        heads = []
        for head in range(config.num_attention_heads):
            mine = slice(head * size, (head + 1) * size)
            shared = slice(head // group * size, (head // group + 1) * size)
            q = x @ w["self_attn.q_proj.weight"][mine].T
            k = both @ w["self_attn.k_proj.weight"][shared].T
            v = both @ w["self_attn.v_proj.weight"][shared].T
            q, k = (
                torch.stack([
                    rotate(norm(row, w[f"self_attn.{which}_norm.weight"], eps), p, theta)
                    for row, p in zip(rows, at, strict=True)
                ])
                for which, rows, at in (("q", q, positions), ("k", k, places))
            )  # fmt: skip
            scores = q @ k.T / size**0.5
            for i, here in enumerate(positions):
                for j, there in enumerate(places):
                    context = j < len(feature_positions)
                    if context and sliding and here - there >= config.sliding_window:
                        scores[i, j] = -torch.inf
                    if not context and causal and there > here:
                        scores[i, j] = -torch.inf
            heads.append(scores.softmax(-1) @ v)
        hidden = hidden + torch.cat(heads, -1) @ w["self_attn.o_proj.weight"].T
        x = norm(hidden, w["post_attention_layernorm.weight"], eps)
        gate, up = x @ w["mlp.gate_proj.weight"].T, x @ w["mlp.up_proj.weight"].T
        hidden = hidden + (gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T
    return norm(hidden, weights["norm.weight"], eps)
